"""Pictures and sound of prompts: what the model's own processor makes of the files.

The processor runs once, where the files are. Its tensors (``pixel_values``, ``image_grid_thw``,
``input_features``, ...) are kept as it made them, whole under every ``--store``, in the pass
``inputs`` of the run. So a run is repeated without the files, the processor and what it imports.
The model is fed their floats in its own dtype, on both machines and in a truth alike.

Such a prompt runs alone, in one prefill: how tensors of several go into one batch is known to their
processor only. Of an encoder-decoder (speech) the prompt's tokens are what its decoder begins with.
"""

from __future__ import annotations

import inspect
import io
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import _disable_current_modes

from divergence.errors import DivergenceError, ModelError, PromptError, UsageError, first_line
from divergence.outside import read_bytes
from divergence.recording.engines.engine import NO_TEXT, decoder_start
from divergence.recording.engines.identity import config_values, without_home
from divergence.recording.engines.load import LoadedModel, load_processor
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import ConfigValue, MediaNote, SampleTokens
from divergence.run.reader import Run
from divergence.run.record import INPUTS
from divergence.run.site import ROOT, join_site
from divergence.run.writer import RunWriter

if TYPE_CHECKING:
    from divergence.recording.prompts import Prompt
    from divergence.recording.request import Request

_MOST_BYTES = 1 << 30
_INSTALL = "pip install 'divergence-debug[media]'"


class Media:
    """The processor's tensors of each prompt that has pictures or sound, by its number."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._main = getattr(loaded.structure, "main_input_name", "input_ids")
        self._processor: Any = None
        self._lengths: dict[int, int] = {}
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self.notes: list[str] = []
        """What of the files no model hears."""
        self.settings: dict[str, ConfigValue] = {}
        """The processor's, by dotted key, with its class and the version of Pillow."""

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def check_read(self, are_text: Sequence[bool]) -> None:
        """Raises ModelError for a model that does not read prompts of text alone, as these are."""
        if self._main in NO_TEXT and any(are_text):
            raise _unread(self._loaded, are_text.index(True))

    def check(self, request: Request, samples: Sequence[SampleTokens]) -> None:
        """Raises UsageError for what such prompts cannot be run with, and what ``check_read``
        does."""
        self.check_read([self._main not in self._tensors.get(n, {}) for n in range(len(samples))])
        asked = {
            "--train": request.stepping,
            "--prefill-chunk": request.prefill_chunk,
            "--pad-left": request.pad_left,
            "--pad-right": request.pad_right,
            "--batch": request.batch and len(samples) > 1,
        }
        named = [option for option, value in asked.items() if value]
        if self and named:
            raise UsageError(
                f"{named[0]}: a prompt with pictures or sound runs by itself, in one prefill",
                hint="--no-batch" if named[0] == "--batch" else f"leave out {named[0]}",
            )

    def read(self, run: Run) -> None:
        """Takes what the run that is repeated keeps. Raises RunFormatError where it is damaged."""
        tokens = run.manifest.tokens
        self.settings = tokens.processor
        for number, sample in enumerate(tokens.samples):
            tensors: dict[str, torch.Tensor] = {}
            for name in sample.inputs:
                record = run.find((INPUTS, number, 0, join_site(ROOT, f"in.{name}")))
                if record is None or not run.has_bytes(record):
                    raise UsageError(
                        f"{run.path} cannot be repeated: it lacks {name} of prompt {number}",
                        hint="copy it again, or capture it again from the prompts",
                    )
                tensors[name] = run.read(record)
            if tensors:
                self._keep(number, tensors, len(sample.prompt_ids))

    def _keep(self, number: int, tensors: dict[str, torch.Tensor], num_tokens: int) -> None:
        """Raises ModelError for what the model does not take: a run is no reason to pass it on."""
        taken = inspect.signature(self._loaded.structure.forward).parameters
        if odd := [name for name in tensors if name not in taken]:
            raise ModelError(
                f"{type(self._loaded.structure).__name__} takes no {odd[0]}, which prompt {number} "
                "has of its pictures or sound",
                hint="is the processor another model's?",
            )
        self._tensors[number], self._lengths[number] = tensors, num_tokens

    def write(self, writer: RunWriter) -> None:
        """Keeps them in the run, before the first forward; each rank has all of them."""
        mesh = writer.manifest.mesh
        placement: Any = None if mesh is None else ("replicate",) * len(mesh.axes)
        for number, tensors in self._tensors.items():
            for order, (name, tensor) in enumerate(tensors.items()):
                item, site = CapturedTensor(tensor.contiguous()), join_site(ROOT, f"in.{name}")
                writer.put(
                    item,
                    pass_=INPUTS,
                    sample=number,
                    step=0,
                    site=site,
                    order=order,
                    placement=placement,
                )

    def fed(self, number: int, num_tokens: int) -> dict[str, Any]:
        """Return the argument of ``run_group`` that holds what the model is called with beside
        ``num_tokens`` tokens: the prompt's, or with generated ones behind them, which are text.
        Empty of a prompt without pictures and sound, which not every engine takes."""
        dtype = getattr(self._loaded.module, "dtype", torch.float32)
        fed: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.get(number, {}).items():
            if tensor.shape == (1, self._lengths[number]) and not tensor.is_floating_point():
                tensor = torch.nn.functional.pad(tensor, (0, num_tokens - tensor.shape[1]))
            form = dtype if tensor.is_floating_point() else tensor.dtype
            with _disable_current_modes():  # rounded in a truth too: it has the same input
                fed[name] = tensor.to(device=self._loaded.device, dtype=form, copy=True)
        return {"given": fed} if fed else {}

    def process(self, prompt: Prompt, number: int, *, chat: bool) -> SampleTokens:
        """The prompt's tokens, of which the processor made room for pictures and sound. Raises
        PromptError, and ModelError for a model without a processor."""
        loaded = self._loaded
        speaks = loaded.task == "encoder-decoder" and self._main in NO_TEXT
        if not (speaks or loaded.task == "causal-lm"):
            raise _unread(loaded, number)
        if self._processor is None:
            self._processor = load_processor(loaded)
            self.settings = config_values(self._processor.to_dict())
        processor, notes = self._processor, []
        given: dict[str, list[Any]] = {}
        files: list[tuple[Literal["images", "audio"], str]] = [
            *(("images", path) for path in prompt.images),
            *(("audio", path) for path in prompt.audio),
        ]
        for kind, path in files:
            data = read_bytes(path, most=_MOST_BYTES, error=PromptError)
            digest = xxhash.xxh3_128_hexdigest(data)
            notes.append(MediaNote(kind=kind, path=without_home(path), digest=digest))
            read = self._picture if kind == "images" else self._sound
            given.setdefault(kind, []).append(read(data, path))
        text: str | None
        try:
            if speaks:
                output = dict(processor(**given, **self._rate(given), return_tensors="pt"))
                ids = self._begin(prompt.text)
                text = prompt.text
                if not text and loaded.tokenizer is not None:
                    text = str(loaded.tokenizer.decode(ids))
            else:
                output, text = self._beside_text(prompt, given, number, chat=chat)
                ids = output.pop("input_ids")[0].tolist()
                output.pop("attention_mask", None)
        except DivergenceError:
            raise
        except Exception as error:  # processors and templates raise errors of their own
            raise PromptError(
                f"prompt {number}: {type(processor).__name__} failed: {first_line(error, most=300)}"
            ) from error
        output.pop("labels", None)  # PaliGemma's: a loss would stand before the logits
        loose = [name for name, value in output.items() if not isinstance(value, torch.Tensor)]
        if loose:
            raise PromptError(
                f"prompt {number}: {type(processor).__name__} makes {loose[0]}, which is no tensor",
                hint="pictures of one size",
            )
        self._keep(number, output, len(ids))
        extractor: Any = getattr(processor, "feature_extractor", None)
        if hasattr(extractor, "n_samples") and (heard := output.get("input_features")) is not None:
            most, num = heard[:, 0].numel() * extractor.hop_length, sum(map(len, given["audio"]))
            if num > most:
                lengths = [f"{value / extractor.sampling_rate:.3g} s" for value in (num, most)]
                what = f"{lengths[0]} of sound, of which {type(processor).__name__} keeps"
                self.notes.append(f"prompt {number} has {what} {lengths[1]}")
        return SampleTokens(text=text, prompt_ids=ids, inputs=list(output), media=notes)

    def _beside_text(
        self, prompt: Prompt, given: Mapping[str, list[Any]], number: int, *, chat: bool
    ) -> tuple[dict[str, Any], str]:
        """(all tensors, the prompt as text). Text that has places for its pictures is taken as it
        is; else they stand before the first words of the user, in the model's template."""
        processor, text = self._processor, prompt.text
        options: dict[str, Any] = {"return_tensors": "pt"}
        names = ("image_token", "boi_token", "audio_token")
        marks = [mark for name in names if (mark := getattr(processor, name, None))]
        if text is not None and not chat and any(mark in text for mark in marks):
            return dict(processor(text=[text], **given, **self._rate(given), **options)), text
        if getattr(processor, "chat_template", None) is None:
            raise PromptError(
                f"prompt {number} has no place for its pictures or sound, and the model has no "
                "chat template that makes one",
                hint=f"write {marks[0] if marks else 'its token'} into the text where one belongs",
            )
        conversation: list[dict[str, Any]] = [
            {"role": message.role, "content": [{"type": "text", "text": message.content}]}
            for message in prompt.conversation
        ]
        user = next((m for m in conversation if m["role"] == "user"), conversation[0])
        user["content"][:0] = [
            {"type": kind, kind: item}
            for kind, name in (("image", "images"), ("audio", "audio"))
            for item in given.get(name, ())
        ]
        rendered = processor.apply_chat_template(conversation, add_generation_prompt=True)
        options |= {"return_dict": True, "tokenize": True, "add_generation_prompt": True}
        return dict(processor.apply_chat_template(conversation, **options)), rendered

    def _begin(self, text: str | None) -> list[int]:
        """Return the tokens that a decoder begins with: its start, and the prompt's text."""
        module, tokenizer = self._loaded.module, self._loaded.tokenizer
        ids: list[int] = []
        if text:
            if tokenizer is None:
                raise PromptError("the prompt has text, but the model has no usable tokenizer")
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        start = decoder_start(module)
        return ids if ids[:1] == [start] else [start, *ids]

    def _rate(self, given: Mapping[str, list[Any]]) -> dict[str, int]:
        """Samples a second, as the processor is told; nothing where there is no sound."""
        if "audio" not in given:
            return {}
        extractor = getattr(self._processor, "feature_extractor", None)
        return {"sampling_rate": getattr(extractor, "sampling_rate", 16000)}

    def _picture(self, data: bytes, path: str) -> Any:
        try:
            import PIL
            from PIL import Image, ImageOps
        except ImportError as error:
            raise PromptError("pictures are read with Pillow", hint=_INSTALL) from error
        self.settings["Pillow"] = PIL.__version__
        try:
            with Image.open(io.BytesIO(data)) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
        except PIL.UnidentifiedImageError:  # its text names a buffer
            raise PromptError("no picture in a format that Pillow reads", where=path) from None
        except Exception as error:  # of each format's own reader
            raise PromptError(f"no picture: {first_line(error)}", where=path) from error

    def _sound(self, data: bytes, path: str) -> np.ndarray:
        """float32, one channel, at the processor's rate. A WAV file of 16 bits at that rate is read
        here, to the values that transformers' own readers give; others by those."""
        rate = self._rate({"audio": []})["sampling_rate"]
        try:
            with wave.open(io.BytesIO(data)) as file:
                if file.getframerate() == rate and file.getsampwidth() == 2:
                    samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
                    if len(samples) < file.getnframes() * file.getnchannels():
                        raise EOFError
                    channels = samples.reshape(-1, file.getnchannels()).astype(np.float32) / 32768
                    return np.asarray(channels.mean(axis=1, dtype=np.float32))
        except EOFError:
            if data[:4] == b"RIFF":
                raise PromptError("the sound is cut off: copy it again", where=path) from None
        except wave.Error:
            pass  # another format
        from transformers.audio_utils import load_audio

        try:
            sound: np.ndarray = load_audio(str(Path(path).absolute()), sampling_rate=rate)
            return sound
        except ImportError as error:
            raise PromptError(
                f"sound that is no WAV of 16 bits at {rate} Hz is read with soundfile and soxr",
                where=path,
                hint=_INSTALL,
            ) from error
        except Exception as error:  # of each format's own reader
            raise PromptError(f"no sound: {first_line(error)}", where=path) from error


def _unread(loaded: LoadedModel, number: int) -> ModelError:
    """A prompt that the model does not read."""
    name = type(loaded.structure).__name__
    main = getattr(loaded.structure, "main_input_name", "input_ids")
    hint = (
        "in Python: capture(model, inputs=[dict(processor(...))], out=...) runs any module on what "
        "its processor makes, and compare takes such runs"
    )
    if loaded.task != "encoder" and main in NO_TEXT:
        what = "images" if main == "pixel_values" else "audio"
        hint = f'name the file: --prompts FILE.jsonl with {{"{what}": ["..."]}}; {hint}'
    if main in NO_TEXT:
        return ModelError(f"{name} reads {main}, and prompts hold text", hint=hint)
    return ModelError(
        f"prompt {number} has pictures or sound, and {name} is run on text ({loaded.task})",
        hint=hint,
    )
