"""Loading a Hugging Face model by hub id or local path, without surprises.

The task is read off the config's architectures; attention is ``eager`` unless asked otherwise,
because every backend has it. Parameters that the checkpoint lacks (transformers fills them with
random numbers) are reported: a missing shard looks exactly like a wrong kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from divergence.errors import DivergenceError, ModelError, UsageError, first_line
from divergence.numerics.formats import format_named
from divergence.recording.engines.codes import QuantizedCodes, dequantize
from divergence.recording.engines.placement import (
    DeviceMap,
    as_loaded,
    device_map_of,
    distribution,
    divide,
    input_device,
    why_not,
)
from divergence.recording.hooks.forwards import USUAL, Forwards
from divergence.recording.hooks.patch import patched
from divergence.recording.ranks.processes import Ranks
from divergence.run.command import command_line
from divergence.run.schema.layout import MANIFEST, expanded
from divergence.run.schema.manifest import Task
from divergence.run.trust import ATTENTION

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


__all__ = [
    "LoadedModel", "Loading", "empty_model", "is_gguf", "load_model", "load_tokenizer",
    "register_operators", "resolve_task",
]  # fmt: skip

TASKS = ("auto", "causal-lm", "encoder", "encoder-decoder")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode on its device, with what is needed to feed it."""

    source: str
    revision: str | None
    task: Task
    module: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device
    trust_remote_code: bool
    missing: list[str] = field(default_factory=list)
    """Parameters that the checkpoint lacked."""
    ranks: Ranks | None = None
    """The processes that the model runs on, where there are several."""
    twin: torch.nn.Module | None = None
    """The structure of the whole model without weights, where it runs on several ranks. ``module``
    may then hold a part of it under other names."""
    forwards: Forwards = USUAL
    codes: QuantizedCodes | None = None
    """What the checkpoint holds in place of weights, where they were dequantised."""
    quantization: Any = None
    """What config.json says of quantisation; a model that is dequantised forgets it."""

    @property
    def structure(self) -> torch.nn.Module:
        """What the model is made of, on however many ranks it runs."""
        return self.module if self.twin is None else self.twin


@dataclass(frozen=True, slots=True)
class Loading:
    """Which model, and how it is to be loaded."""

    source: str
    """A directory, a file that the engine reads, or an id of the hub."""
    device: str = "cpu"
    task: str = "auto"
    revision: str | None = None
    dtype: str | None = None
    """None: the checkpoint's own."""
    attn_implementation: str = "eager"
    trust_remote_code: bool = False
    device_map: DeviceMap | None = None
    ranks: Ranks | None = None
    """The processes that the model is divided among; all of them load."""


def _load_config(loading: Loading) -> PretrainedConfig:
    """The model's config alone. Raises ModelError for no such model and for damaged configs."""
    from transformers import AutoConfig

    _check_source(loading.source)
    try:
        place, file = _parts(loading.source)
        config = cast("PretrainedConfig", AutoConfig.from_pretrained(
            place, revision=loading.revision, trust_remote_code=loading.trust_remote_code, **file
        ))  # fmt: skip
    except (Exception, SystemExit) as error:  # a config and its code may do anything
        raise _model_error(loading, error) from error
    # a config.json may name attention too, also a kernel of the hub, and would come before options
    config._attn_implementation = loading.attn_implementation
    return config


def resolve_task(config: PretrainedConfig, task: str = "auto") -> Task:
    """``auto`` → from ``is_encoder_decoder`` and the architectures' names."""
    if task not in TASKS:
        raise UsageError(f"unknown task {task!r}", hint=f"one of {', '.join(TASKS)}")
    if task != "auto":
        return cast(Task, task)  # one of them
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    names = config.architectures or []
    causal = re.compile("CausalLM|LMHead|ForConditionalGeneration$|GenerationDecoder$")
    if any(causal.search(name) for name in names):
        return "causal-lm"
    if names:
        return "encoder"
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return "causal-lm" if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else "encoder"


def load_tokenizer(
    source: str, *, revision: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the model has none (token ids are then needed)."""
    from transformers import AutoTokenizer

    place, file = _parts(source)
    try:
        return AutoTokenizer.from_pretrained(
            place, revision=revision, trust_remote_code=trust_remote_code, **file
        )
    except Exception:  # any tokenizer library's own error; reported when text needs it
        return None


def load_model(loading: Loading) -> LoadedModel:
    """Load model and tokenizer.

    Raises ModelError (no such model, no weights, not loadable, does not fit) and
    UsageError (unknown dtype or attention implementation).
    """
    config, ranks = _load_config(loading), loading.ranks
    options: dict[str, Any] = {
        "config": config,
        "revision": loading.revision,
        "trust_remote_code": loading.trust_remote_code,
        "weights_only": True,  # of pickled weights: tensors and plain containers, no calls
        "dtype": "auto" if loading.dtype is None else _model_dtype(loading.dtype),
        "attn_implementation": loading.attn_implementation,
        "output_loading_info": True,
    }
    if loading.device_map is not None:
        options["device_map"] = device_map_of(loading.device_map)
    division = None if ranks is None else distribution(ranks)
    at_once = division is not None and ranks is not None and as_loaded(ranks)
    if at_once:
        options["distributed_config"] = division
    quantization = getattr(config, "quantization_config", None)
    task = resolve_task(config, loading.task)
    factory = _factory(config, task)
    try:
        with _no_bars():
            place, file = _parts(loading.source)
            module, told = factory.from_pretrained(place, **options, **file)
        if ranks is not None and division is not None and not at_once:
            module = divide(module, division, ranks)
    except (Exception, SystemExit) as error:  # torn weights, pickles and custom code: each its own
        name = (config.architectures or [""])[0]
        raise (
            _attention_error(loading, error)
            or why_not(name, error, ranks)
            or _model_error(loading, error)
        ) from error
    if loading.device_map is None and division is None:
        try:
            module.to(loading.device)
        except RuntimeError as error:  # out of memory is a RuntimeError on every backend
            raise ModelError(
                f"the model does not fit on {loading.device}: {first_line(error, most=300)}",
                hint="use --device-map auto, a smaller --dtype, or --device cpu",
            ) from error
    with _no_bars():
        codes = dequantize(module, loading.source)
    return replace(
        _loaded(loading, task, module, input_device(module)),
        missing=sorted(str(name) for name in told.get("missing_keys", ())),
        ranks=ranks,
        twin=None if ranks is None else empty_model(loading).module,
        codes=codes,
        quantization=quantization,
    )


def empty_model(loading: Loading) -> LoadedModel:
    """The model's structure on torch's meta device: shapes without weights."""
    config = _load_config(loading)
    task = resolve_task(config, loading.task)
    factory = _factory(config, task)
    options: dict[str, Any] = {}
    own_dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if loading.dtype is not None:
        options["dtype"] = _model_dtype(loading.dtype)
    elif own_dtype is not None:
        options["dtype"] = format_named(str(own_dtype)).torch_dtype
    try:
        with torch.device("meta"):
            module = factory.from_config(
                config, attn_implementation=loading.attn_implementation,
                trust_remote_code=loading.trust_remote_code, **options,
            )  # fmt: skip
    except (Exception, SystemExit) as error:  # as in load_model
        raise _attention_error(loading, error) or _model_error(loading, error) from error
    return _loaded(loading, task, module, torch.device("meta"))


def _loaded(
    loading: Loading, task: Task, module: torch.nn.Module, device: torch.device
) -> LoadedModel:
    source, revision, trusted = loading.source, loading.revision, loading.trust_remote_code
    return LoadedModel(
        source=source, revision=revision, task=task,
        module=module.eval(), device=device, trust_remote_code=trusted,
        tokenizer=load_tokenizer(source, revision=revision, trust_remote_code=trusted),
    )  # fmt: skip


def _factory(config: PretrainedConfig, task: Task) -> Any:
    import transformers as hf

    if task == "causal-lm":
        return hf.AutoModelForCausalLM
    names = config.architectures or [""]
    if task == "encoder-decoder":
        return hf.AutoModelForSeq2SeqLM
    for suffix, factory in (
        ("ForMaskedLM", hf.AutoModelForMaskedLM),
        ("ForSequenceClassification", hf.AutoModelForSequenceClassification),
        ("ForTokenClassification", hf.AutoModelForTokenClassification),
        ("ForQuestionAnswering", hf.AutoModelForQuestionAnswering),
    ):
        if names[0].endswith(suffix):
            return factory
    return hf.AutoModel


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Without the progress bars of transformers and of what it calls: progress is the caller's, and
    none where stderr is no terminal. A program that has them has them again afterwards."""
    from tqdm.std import tqdm
    from transformers.utils import logging

    shown, made = logging.is_progress_bar_enabled(), tqdm.__init__
    logging.disable_progress_bar()

    def without(bar: Any, *args: Any, **how: Any) -> None:
        made(bar, *args, **how | {"disable": True})

    try:
        with patched(tqdm, "__init__", without):
            yield
    finally:
        if shown:
            with warnings.catch_warnings():  # HF_HUB_DISABLE_PROGRESS_BARS has the last word
                warnings.simplefilter("ignore")
                logging.enable_progress_bar()


def _model_dtype(name: str) -> torch.dtype:
    form = format_named(name)
    if form.kind != "float" or form.name.startswith("float8"):
        raise UsageError(
            f"a model cannot be run in dtype {form.name}",
            hint="one of float32, bfloat16, float16, float64",
        )
    return form.torch_dtype


def _parts(source: str) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` is given: a folder or an id; of a GGUF file its folder and name."""
    place = os.path.expanduser(source)
    if not is_gguf(source):
        return place, {}
    return os.path.dirname(place) or ".", {"gguf_file": os.path.basename(place)}


def is_gguf(source: str) -> bool:
    """A file of llama.cpp, which transformers widens as it reads it (with the package gguf)."""
    return source.endswith(".gguf") and expanded(source).is_file()


def _check_source(source: str) -> None:
    if is_gguf(source):
        return
    path = expanded(source)
    if not path.exists():
        if not source.startswith((".", "/", "~")):
            return  # an id of the hub
        raise ModelError(f"no such model: {path} does not exist", hint="check the path")
    if not path.is_dir():
        raise ModelError(f"{path} is a file", hint="give the model's directory, or a .gguf file")
    if (path / MANIFEST).is_file():
        raise ModelError(
            f"{source} is not a model but a run",
            hint=command_line("capture", like=source, o="OTHER", note="repeats it"),
        )
    if not (path / "config.json").is_file():
        raise ModelError(
            f"no model in {path}: it has no config.json",
            hint="give the directory that save_pretrained or `hf download` wrote",
        )


def _attention_error(loading: Loading, error: BaseException) -> UsageError | None:
    implementation = loading.attn_implementation
    text = str(error).lower()
    named = "attn_implementation" in text or "attention implementation" in text
    if not named and (implementation == "eager" or "attention" not in text):
        return None
    return UsageError(
        f"attention implementation {implementation!r} cannot be used: "
        + first_line(error, most=300),
        hint=f"one of {', '.join(ATTENTION)}; eager is always there",
    )


def _model_error(loading: Loading, error: BaseException) -> DivergenceError:
    if isinstance(error, DivergenceError):
        return error  # says what it is: a rank that was told to stop meanwhile
    source, revision, text = loading.source, loading.revision, str(error)
    if "trust_remote_code" in text:
        at = "" if revision is None else f" at {revision}"
        return ModelError(
            f"{source}{at} carries its own modelling code",
            hint="read that code, then pass --trust-remote-code",
        )
    lower = text.lower()
    absent = "not found" in lower or "no such file" in lower
    if "no file named" in lower or ("safetensors" in lower and absent):
        return ModelError(
            f"no weights in {source}",
            where=first_line(error, most=300),
            hint="download the model.safetensors files (all shards) beside config.json",
        )
    if "accelerate" in text:
        return ModelError(
            "--device-map needs the accelerate package",
            hint="pip install 'divergence-debug[accelerate]', or leave out --device-map",
        )
    if isinstance(error, ImportError):
        # as of a quantised model
        asked = re.search(r"pip install (?:-\S+ )*['\"]?(\w[\w.<>=\[\]-]*)", text)
        by_itself = f"importing {error.name or 'transformers'} by itself shows why it fails"
        return ModelError(
            f"cannot load {source!r}: {first_line(error, most=300)}",
            where="a package that transformers imports here",
            hint=f"pip install '{asked[1]}'" if asked and not error.name else by_itself,
        )
    if "Unrecognized configuration class" in text:
        return ModelError(
            f"cannot load {source!r}: {first_line(error, most=300)}",
            where="config.json, whose class no auto class of transformers takes for this task",
            hint="another --task; or in Python load the model and capture(model, inputs=[...])",
        )
    if expanded(source).exists():
        return ModelError(
            f"cannot load {source!r}: {first_line(error, most=300)}",
            where=type(error).__name__,
            hint="its files are damaged, or for another version of transformers; download it again",
        )
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    return ModelError(
        f"cannot load {source!r}: {first_line(error, most=300)}",
        hint="HF_HUB_OFFLINE is set: only local paths and cached models can be used"
        if offline
        else f"there is no directory {source} here; as a hub id: check it, --revision, and that "
        "this machine reaches the hub",
    )


def register_operators() -> None:
    """Have transformers register its ``torch.ops.transformers``; nothing where it has none."""
    with contextlib.suppress(Exception):  # an older transformers, or a torch it cannot use
        importlib.import_module("transformers.integrations.moe")
