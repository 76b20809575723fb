"""The manifest of a run: what was run, on what, with which settings, as typed data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import xxhash

from divergence.run.record import Count
from divergence.run.site import LOGPROBS

if TYPE_CHECKING:
    import numpy as np
    import torch


# Fingerprints: xxh3-128 of bytes, the same on every machine for the same values.
#
# Used for equality (equal tensors stored once, equal weights recognised), not for
# security: xxh3 is fast (memory speed) and not cryptographic.


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; little-endian, row-major."""
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, dense and contiguous on the CPU, no conjugation or sign pending."""
    import torch

    if (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())
    ):
        return tensor  # the usual case, and hot
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def digest_tensor(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes as 32 hex digits. Moves it to the CPU where needed."""
    return xxhash.xxh3_128_hexdigest(tensor_bytes(plain_tensor(tensor)))


def digest_array(array: np.ndarray) -> str:
    """xxh3-128 of an array's bytes, row-major: as of the tensor that it stands for."""
    import numpy as np

    flat = np.ascontiguousarray(array).reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(np.uint8).data)


def digest_text(text: str) -> str:
    """xxh3-128 of the UTF-8 bytes."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def digest_json(value: Any) -> str:
    """xxh3-128 of canonical JSON: sorted keys, no spaces, so that key order does not matter."""
    return digest_text(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str))


def digest_many(digests: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    """One digest over named digests, independent of their order."""
    pairs = digests.items() if isinstance(digests, Mapping) else digests
    return digest_text("\n".join(f"{name}={digest}" for name, digest in sorted(pairs)))


# What ran a model: engine, code, compiler, quantiser and training step, and how its machine
# computes, as a manifest has them.

EngineValue = bool | int | float | str | None
"""One option of an engine."""


class Calibration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Holds what a simulated quantisation took from running the model in floating point before."""

    num_tokens: Count
    """Tokens that it ran on."""
    limits: dict[str, list[float]] = {}
    """By matrix: the least and the largest number that enters it."""
    scales: dict[str, list[float]] = {}
    """By norm: what each channel is divided by before it is quantised."""
    fed_by: dict[str, str] = {}
    """By matrix: the norm that feeds it."""


class EngineNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Says what ran the model."""

    name: str
    """``transformers``, ``compile``, or another engine's name."""
    version: str
    """Of the engine's package."""
    options: dict[str, EngineValue] = {}
    """The engine's own options as used, defaults included."""
    facts: dict[str, str] = {}
    """Its switches as found, and what it said of itself: ``prefix caching`` → ``off``. Where there
    is ``weights`` or ``blocks``, it does not tell all of them."""
    calibration: Calibration | None = None
    """Of a simulated quantisation whose scales come from calibration."""

    @property
    def simulates(self) -> bool:
        """Is the model what the engine makes of the checkpoint, by a scheme? Other engines are ways
        to run one model."""
        return "scheme" in self.facts


class ModuleNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that modules of one class hold, where not all hold the same."""

    value: str
    """As Python writes it: what most have."""
    num_modules: Count
    others: dict[str, list[str]]
    """Each other value → paths of the modules that have it."""

    def at(self, path: str) -> str:
        """The value in one module."""
        return next((other for other, paths in self.others.items() if path in paths), self.value)


class CodeNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The code that modules of one class ran, so that two runs can be shown to have run the same
    code."""

    digest: str
    """Of the syntax of ``forward`` and of what it calls, without comments, docstrings, annotations
    and line numbers."""
    origin: str
    """Python module of ``forward``; with file name and line where it belongs to no library."""
    functions: dict[str, str] = {}
    """Digest of each of those functions, by name. Empty where it is no Python function."""
    replaced: list[str] = []
    """What was put in place of the class's own code, and by what."""
    wrapped: list[str] = []
    """What stands around the module or in it: an adapter, sharding, offloading, quantised
    weights."""
    compiled: str | None = None
    """What compiled it."""
    odd: dict[str, str] = {}
    """Modules of this class that run other code than the class' own, each with its digest: all of
    them where none runs that."""
    places: list[str] = []
    """Paths of the modules, with ``*`` for the numbers in them."""
    attributes: dict[str, str | ModuleNumbers] = {}
    """Plain numbers and switches that the modules hold, by name: one value where all have the
    same. (Text with ``;`` of earlier versions: most modules' value, then others'.)"""
    changed_after: dict[str, Count] | None = None
    """Of these those that changed while the run was made → the prompt behind which they first had.
    None where nobody looked."""


class CompiledNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A module that was given to ``torch.compile``, and what became of it."""

    backend: str
    state: Literal["compiled", "partly", "eager", "unknown"]
    """``compiled``; ``partly``: some of its code ran eager; ``eager``: all of it did; ``unknown``:
    this torch does not tell."""
    num_graphs: Count = 0
    """Number of compiled pieces. Modules of one class share their code: of all of them."""
    num_recompilations: Count = 0
    """How often that code was compiled again, for inputs of another kind or another module."""
    graph_breaks: list[str] = []
    """Why code was left to Python between two compiled pieces, each reason once."""
    reason: str | None = None
    """Why it is not compiled in one piece."""


class QuantizedNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how one kind of value is turned into codes: code = x / scale + zero point, rounded to
    the nearest code and kept in its range."""

    kind: Literal["int", "float"]
    """``float``: of 8 bits, float8_e4m3fn."""
    bits: Count
    per: Literal["tensor", "channel", "token", "group", "block", "head"]
    """What has a scale of its own. ``channel``: an output's row of the weight; ``group``:
    ``group_size`` inputs of a row; ``block``: a rectangle of the weight."""
    group_size: Count | None = None
    symmetric: bool = True
    """False: there are zero points."""
    dynamic: bool = False
    """Scales are computed from the values themselves, when they are there."""

    def __str__(self) -> str:
        """``int8 per channel``, ``int4 per group of 128, asymmetric``"""
        size = f" of {self.group_size}" if self.group_size else ""
        zero = "" if self.symmetric else ", asymmetric"
        return f"{self.kind}{self.bits} per {self.per}{size}{zero}"


class QuantizedScheme(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Modules whose values are quantised alike."""

    weights: QuantizedNumbers | None = None
    activations: QuantizedNumbers | None = None
    """What enters the modules; None: as it is."""
    modules: list[str] = []
    """Their paths, with ``*`` for the numbers in them."""
    num_modules: Count = 0

    @property
    def name(self) -> str:
        """``W8A8``; of floating-point codes ``FP8 W8A8``."""
        bits = [16 if codes is None else codes.bits for codes in (self.weights, self.activations)]
        floats = self.weights is not None and self.weights.kind == "float" and bits[0] == 8
        return f"{'FP8 ' if floats else ''}W{bits[0]}A{bits[1]}"

    def __str__(self) -> str:
        """``W8A8: int8 weights per channel, int8 activations per token, dynamic``"""
        parts = []
        for what, codes in (("weights", self.weights), ("activations", self.activations)):
            if codes is not None:
                code, _, rest = str(codes).partition(" ")
                parts.append(f"{code} {what} {rest}")
        if self.activations is not None:
            parts.append("dynamic" if self.activations.dynamic else "static")
        return f"{self.name}: {', '.join(parts)}"


class QuantizationNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how a model is quantised, as its configuration says and its modules show."""

    method: str
    """``compressed-tensors``, ``torchao``, ``gptq``, ``gguf``: who wrote the codes."""
    format: str | None = None
    """How the method calls the codes' layout: ``int-quantized``, ``pack-quantized``."""
    schemes: list[QuantizedScheme] = []
    """Empty where the method's configuration was not understood."""
    kv_cache: QuantizedNumbers | None = None
    kept: list[str] = []
    """Modules with a weight matrix that is not quantised; paths as in ``modules``."""
    dequantized: bool = False
    """The codes were turned into numbers of the model's dtype when the weights were loaded: what
    runs is a model without codes."""

    @property
    def has_activations(self) -> bool:
        """Are activations quantised, keys and values among them, so that rounding may flip a code
        of theirs?"""
        return self.has_coded_inputs or (self.kv_cache is not None and not self.dequantized)

    @property
    def has_coded_inputs(self) -> bool:
        """Is what enters modules quantised?"""
        coded = any(scheme.activations is not None for scheme in self.schemes)
        return coded and not self.dequantized

    @property
    def name(self) -> str:
        """``W8A8``; of several schemes ``W8A8 + W4A16``, with keys and values ``W8A8 + KV8``; the
        method where nothing is known."""
        names = dict.fromkeys(scheme.name for scheme in self.schemes)
        if self.kv_cache is not None:
            names[f"KV{self.kv_cache.bits}"] = None
        return " + ".join(names) or self.method

    def __str__(self) -> str:
        """``W8A8: int8 weights per channel, int8 activations per token, dynamic; not quantised:
        lm_head (compressed-tensors, int-quantized)``"""
        texts = [
            str(scheme) + (f" ({scheme.num_modules} modules)" if len(self.schemes) > 1 else "")
            for scheme in self.schemes
        ] or ([] if self.method == "simulated" else [SCHEME_UNKNOWN])
        if self.kv_cache is not None:
            texts.append(f"KV cache {self.kv_cache}")
        if self.kept:
            texts.append(f"not quantised: {', '.join(self.kept)}")
        if self.dequantized:
            texts.append("dequantised when loaded")
        by = ", ".join(filter(None, (self.method, self.format)))
        return f"{'; '.join(texts)} ({by})"


class StepPrecision(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Says in which dtypes a training step kept what it has, and added it up: read from the tensors
    of the step, the most frequent dtype where there are several. None: it has none."""

    parameters: str
    """Of the model, in which forward and backward are made (but for autocast)."""
    gradients: str | None = None
    """In which the micro-batches' gradients were added up."""
    reduction: str | None = None
    """In which ranks sent them to each other, or would have."""
    main_weights: str | None = None
    """Of the weights that the optimizer stepped. None: no step was made."""
    moments: str | None = None
    buffers: str | None = None
    num_stepped: int = 0
    """Weights whose gradient is not zero."""
    num_unmoved: int = 0
    """Those of them that the step left as they were: it was too small for their dtype."""


_TOLD_ELSEWHERE = ("precision_policy", "precision")
"""Not settings of a step: the analysis of precision tells them."""


Factor = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
"""A number that a step multiplies by; its square is a number as well."""


class Training(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The training step that was recorded in place of decoding."""

    train: bool = False
    """Was there one?"""
    autocast: str | None = None
    """The dtype of the forward under autocast. None: without."""
    gradient_checkpointing: bool = False
    """Blocks ran again in the backward."""
    dropout: bool = False
    """The model's own was kept."""
    optimizer: str | None = None
    """``adamw`` or ``sgd``, of which one step was made. None: without a step."""
    learning_rate: Factor | None = None
    weight_decay: Factor | None = None
    clip_grad_norm: Factor | None = None
    """The norm to which the gradients were scaled down. None: not clipped."""
    loss_scale: Factor | None = None
    """By what the loss was multiplied before the backward. None: by nothing."""
    reduce_dtype: str | None = None
    """In which the micro-batches' gradients were added up, as ranks would send them. None: torch
    adds each to the ones before."""
    reduce_order: str | None = None
    """``ring`` or ``tree``."""
    accumulate_dtype: str | None = None
    """In which each micro-batch's gradients were added to those before. None: the parameters'."""
    main_weights: bool = False
    """The optimizer stepped float32 copies of weights in 16 bits."""
    moments_dtype: str | None = None
    """In which the optimizer kept its moments. None: that of the weights it steps."""
    buffer_dtype: str | None = None
    """To which the model's floating-point buffers were cast. None: as the model makes them."""
    precision_policy: str | None = None
    """Of which framework's settings these dtypes were taken, and by which switches."""
    precision: StepPrecision | None = None
    """In which dtypes the step was really made; None where no pass ended."""
    zero: Count | None = None
    """What ranks divided, as a stage of ZeRO: 1 the optimizer's state, 2 gradients too,
    3 parameters too. None: nothing."""

    def beside(self, other: Training) -> list[tuple[str, str, str]]:
        """(what, here, there) of two runs, one of which at least has a training step: that it has,
        and each setting in which they differ. (Autocast is told with the dtype.)"""
        if not (self.train or other.train):
            return []
        done = ("forward and backward" if step.train else "none" for step in (self, other))
        lines = [("training", *done)]
        for name in self.__struct_fields__:
            here, there = getattr(self, name), getattr(other, name)
            if here != there and name not in ("train", "autocast", *_TOLD_ELSEWHERE):
                label = "ZeRO stage" if name == "zero" else name.replace("_", " ")
                lines.append((label, str(here or "none"), str(there or "none")))
        return lines  # type: ignore[return-value]  # three texts each

    def options_beside(self, other: Training) -> dict[str, bool | str | float]:
        """The settings in which this step differs from ``other``, which it repeats, by the names
        that capture() has for them. No option takes back what ``other`` alone has."""
        return {
            name: value
            for name in self.__struct_fields__
            if name not in ("train", *_TOLD_ELSEWHERE)
            and (value := getattr(self, name)) not in (None, getattr(other, name))
        }

    def __str__(self) -> str:
        """``forward and backward, adamw, learning rate 0.001``; ``none`` where there was none."""
        if not self.train:
            return "none"
        texts = ["forward and backward"]
        texts += [f"autocast {self.autocast}"] if self.autocast else []
        texts += ["gradient checkpointing"] if self.gradient_checkpointing else []
        texts += ["dropout"] if self.dropout else []
        texts += [self.optimizer] if self.optimizer else []
        if self.reduce_dtype:
            texts.append(f"reduced in {self.reduce_dtype}, {self.reduce_order}")
        texts += [f"added up in {self.accumulate_dtype}"] if self.accumulate_dtype else []
        texts += ["float32 main weights"] if self.main_weights else []
        texts += [f"moments in {self.moments_dtype}"] if self.moments_dtype else []
        texts += [f"buffers in {self.buffer_dtype}"] if self.buffer_dtype else []
        texts += [f"ZeRO {self.zero}"] if self.zero else []
        for name in ("learning_rate", "weight_decay", "clip_grad_norm", "loss_scale"):
            value = getattr(self, name)
            texts += [] if value is None else [f"{name.replace('_', ' ')} {value:g}"]
        return ", ".join(texts)


class ArithmeticFact(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One thing that a probe found out about a machine's arithmetic."""

    name: str
    """``probe: what it looked at``, with shape and dtype. Facts with equal names are compared."""
    value: str
    """The answer in words."""
    verified: bool
    """The answer was checked against the machine itself."""
    unit: str | None = None
    """Unit of ``numbers``."""
    numbers: dict[str, float] = {}
    """The answer in numbers, where there are any."""
    digest: str | None = None
    """Equal for equal answers. Set where the words do not hold all of the answer (a tree, a table
    of outputs)."""
    evidence: str | None = None
    """How the answer was checked, or why there is none."""

    @property
    def probe(self) -> str:
        """``order`` of ``order: sum …``."""
        return self.name.partition(": ")[0]

    @property
    def subject(self) -> str:
        """Return what follows the probe's name."""
        return self.name.partition(": ")[2]

    @property
    def answer(self) -> tuple[str, str | None]:
        """Equal for equal findings."""
        return (self.value, self.digest)


ValuesForm = Literal["bfloat16", "float16", "float32", "float64"]
NUM_SUMS = 4
"""Sums of each of three kinds in ``ParameterNote.sums``."""


class ParameterNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One floating-point parameter or buffer."""

    dtype: str
    shape: list[Count]
    form: ValuesForm
    """The narrowest format that holds its values exactly, bfloat16 before float16."""
    values: str
    """xxh3-128 of the values in that format: equal for equal values, whatever their dtype."""
    rounded: dict[ValuesForm, str] = {}
    """By narrower format: xxh3-128 of the values rounded to it."""
    norm: float
    """Of its finite numbers, as the sums."""
    sums: Annotated[list[float], msgspec.Meta(min_length=3 * NUM_SUMS, max_length=3 * NUM_SUMS)]
    """Sums with signs that are the same on every machine: four by column, four by row, four by
    both. Those by column are the same for any order of rows, and the other way round."""
    levels: Count | None = None
    """Its first numbers are whole multiples of one step, up to so many: it was quantised."""
    nonfinite: Count = 0
    """How many of its numbers are inf or nan."""
    strides: list[Count] | None = None
    """By axis: how far apart in memory, in numbers, one element and the next lie. None where it is
    contiguous."""


# manifest.json: what ran, on which tokens, under which settings, where.
#
# Typed and strict: unknown keys are refused, and an error names the path of the
# wrong value. Everything a second machine needs to re-execute the run is here or
# in the shards; nothing here is executed.

SCHEMA_VERSION = 8
SUITE = "suite:"
"""Before the name of a suite of cases, which stands where a model's source would."""

SCHEME_UNKNOWN = "scheme not known"
"""Stands in place of a scheme that a method does not tell."""
NO_TENSOR = "returns no tensor"
"""How a reason in ``Plan.skipped_operators`` ends, of an operator that takes a number out of one.
"""
NO_DIGEST = "0" * 32
"""Stands in the place of a manifest's digest while that is made."""
UNKNOWN = "unknown"
"""The device of an imported dump, and the digest of a parameter: not told."""

ModuleRole = Literal["block", "trunk", "inner"]
SwitchStatus = Literal["accepted", "set", "refused", "absent"]
TokenId = Count
NO_LABEL = -100
"""The label of a token that has none, as torch and transformers have it."""
Task = Literal["causal-lm", "encoder", "encoder-decoder", "operators"]
"""``operators``: no model; a suite, a replay or a probe of single operators."""

StoreMode = Literal["full", "sketch", "stats", "hash"]
"""What is kept of a tensor: every byte, projections and statistics, statistics, or digests."""


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Shared strictness; no fields of its own."""


ConfigValue = bool | int | float | str | list[bool | int | float | str | None] | None
"""One value of a model's configuration."""


class DerivedNote(_Strict, kw_only=True):
    """A tensor that modules made, and that no checkpoint stores."""

    digest: str
    """xxh3-128."""
    dtype: str
    shape: list[Count]
    values: list[bool | int | float | str] = []
    """The first 64, row-major; nan and inf as text."""
    changed_after: Count | None = None
    """The prompt after which it was another one, in the free pass. None: it stayed as it was."""


ATTENTION = tuple(
    "eager sdpa flash_attention_2 flash_attention_3 flash_attention_4 flex_attention".split()
)
"""transformers' own. Every other name may be a repository of kernels, which is code."""


class ModelIdentity(_Strict, kw_only=True):
    """Says which model ran, so that two runs can be shown to have used the same one."""

    source: str
    revision: str | None = None
    model_class: str
    task: Task
    """What the model does, and so how it is run."""
    config_digest: str
    """Digest of the configuration."""
    dtype: str
    """The dtype of the weights as run."""
    num_parameters: Count
    digest: str
    """One digest over all of ``digests``."""
    digests: dict[str, str] = {}
    """xxh3-128 of each parameter and buffer, in the run's dtype; or ``offloaded``, ``unknown``."""
    rounded_digests: dict[str, str] = {}
    """By narrower dtype: the overall digest of the same weights rounded to it. So a float32 run and
    a bfloat16 run of one checkpoint can be recognised as such."""
    parameters: dict[str, ParameterNote] = {}
    """Of floating-point ones, what else tells how two that differ belong together."""
    dequantized: dict[str, str] = {}
    """Of modules whose codes were dequantised as they were loaded: the digest of the weight."""
    quantization: QuantizationNote | None = None
    attn_implementation: str | None = None
    tokenizer_digest: str | None = None
    chat_template_digest: str | None = None
    trust_remote_code: bool = False
    missing: list[str] = []
    """Parameters that the checkpoint lacks, and that are therefore random."""
    config: dict[str, ConfigValue] = {}
    """The configuration by dotted key, without names, paths and what changes no number."""
    derived: dict[str, DerivedNote] = {}
    """By dotted name: tensors that no checkpoint stores, as they were once the model was loaded."""
    code: dict[str, CodeNote] = {}
    """By class of module: ``ModuleNote.kind`` without what follows a slash. Where two classes share
    a name, the Python module's name and a dot come before it."""
    tied: list[list[str]] = []
    """Groups of parameter names that share their memory."""
    embedding_rows: Count | None = None
    """Rows of the input embedding."""
    head_rows: Count | None = None
    """Rows of the output matrix."""
    tokenizer_size: Count | None = None
    """Number of tokens in the tokenizer."""
    chat_example: str | None = None
    """A fixed conversation, as the chat template renders it."""


class MediaNote(_Strict, kw_only=True):
    """A file that a prompt named."""

    kind: Literal["images", "audio"]
    path: str
    digest: str
    """xxh3-128 of the file."""


class SampleTokens(_Strict, kw_only=True):
    """One prompt: text for people, ids for machines."""

    text: str | None = None
    prompt_ids: list[TokenId]
    """Without padding."""
    num_left_pad: Count = 0
    """Pads that the batch put before the prompt."""
    num_right_pad: Count = 0
    """Pads that the batch put after the prompt."""
    decoder_prompt_ids: list[TokenId] = []
    """What an encoder-decoder's decoder began with."""
    generated_ids: list[TokenId] = []
    """What was fed forward as decode tokens, forced or the model's own choice."""
    chosen_ids: list[TokenId] = []
    """The greedy choice at each step. It differs from ``generated_ids`` only where tokens were
    forced."""
    labels: list[Annotated[int, msgspec.Meta(ge=NO_LABEL, le=2**63 - 1)]] | None = None
    """Of a training step: what each token of the prompt is to be predicted as, -100 where the loss
    leaves it out. None: as itself."""
    inputs: list[str] = []
    """Of a step of ``record``: names or places of the tensors that the module was called with;
    empty where it was given anything that cannot be kept. Of a prompt: names of the tensors that
    the model's processor made of its pictures and sound."""
    constants: dict[str, ConfigValue] = {}
    """Of a step of ``record`` whose ``inputs`` are told: what else it was called with, by name or
    place."""
    parts: dict[Annotated[str, msgspec.Meta(max_length=1000)], list[str]] = {}
    """By name of an argument that is a list, tuple or dict: which of them, then its keys. A part is
    called ``NAME.KEY``."""
    media: list[MediaNote] = []
    """The pictures, then the sounds, in the prompt's order."""
    weights: str | None = None
    """The digest of the parameters that it ran with, where they were no longer those that the run
    began with."""

    @property
    def used_labels(self) -> list[int]:
        """Those of the loss: all but the first token's, which nothing predicts."""
        return (self.prompt_ids if self.labels is None else self.labels)[1:]

    @property
    def answer_ids(self) -> list[int]:
        """Return what the prompt was answered: with the last token, which was its own choice and
        never fed, where no other tokens were forced."""
        own = self.chosen_ids[: len(self.generated_ids)] == self.generated_ids
        return self.chosen_ids if own else self.generated_ids

    @property
    def num_padded(self) -> int:
        """Length of its row in the batch: the prompt and its pads."""
        return self.num_left_pad + len(self.prompt_ids) + self.num_right_pad


class Tokens(_Strict, kw_only=True):
    """All prompts, and how they were batched."""

    samples: list[SampleTokens]
    groups: list[list[Count]]
    """Samples that ran together in one forward, in the order of its rows; each sample is in one
    group. A record's ``sample`` is the first of its group."""
    forced_by: str | None = None
    """Id of the run whose tokens were forced; None where the model chose its own."""
    texts: dict[str, str] = {}
    """Decoded text of the token ids that a report may want to show."""
    processor: dict[str, ConfigValue] = {}
    """Settings of the processor that read the prompts' pictures and sound, by dotted key."""

    def group_of(self, sample: int) -> list[int]:
        """The group whose first sample this is; empty where there is none."""
        return next((group for group in self.groups if group and group[0] == sample), [])

    def pads(self, sample: int) -> np.ndarray | None:
        """(B, T), True where the prompts of the group whose first sample this is have pads; None
        where they have none."""
        members = [self.samples[number] for number in self.group_of(sample)]
        if not any(member.num_left_pad or member.num_right_pad for member in members):
            return None
        import numpy as np

        place = np.arange(max(member.num_padded for member in members))
        begins = np.array([[member.num_left_pad] for member in members])
        ends = np.array([[member.num_left_pad + len(member.prompt_ids)] for member in members])
        return (place < begins) | (place >= ends)

    @property
    def layout(self) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """The groups, and each sample's pads: forwards of equal layout have equal rows."""
        return self.groups, [(sample.num_left_pad, sample.num_right_pad) for sample in self.samples]


class Switch(_Strict, kw_only=True):
    """One determinism or precision switch: what was asked for, and what the machine did."""

    name: str
    asked: str
    found: str
    """The value before."""
    status: SwitchStatus
    """``accepted``: read back as asked for. ``set``: cannot be read back (an environment
    variable)."""
    note: str | None = None


class Settings(_Strict, kw_only=True):
    """Says how the run was made."""

    deterministic: bool
    seed: int
    device: str
    device_map: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    max_new_tokens: Count
    batch: bool
    """Prompts ran together in batches."""
    use_cache: bool = True
    """False: each decode step was a forward over the whole sequence, its own token recorded."""
    prefill_chunk: Count | None = None
    """Tokens of the prompt that were fed at a time. None: all of them in one forward."""
    hooks: bool = True
    """Modules were watched by hooks. False: what the model returns was recorded, without any."""
    compute_dtype: str | None = None
    """What every operator of every pass was computed in, where that is wider than the model's
    dtype: ``float64`` in a truth."""
    switches: list[Switch] = []
    nondeterministic_warnings: list[str] = []
    """Operators that torch reported as nondeterministic."""
    cpu_fallbacks: list[str] = []
    """Operators that the CPU ran, since torch said that the device has none of them."""


class Environment(_Strict, kw_only=True):
    """The machine: no host name, no user, no path. Variables are recorded by allow-list only."""

    label: str
    """What to call the machine."""
    platform: str
    python: str
    device_type: str
    device_name: str
    num_devices: Count = 0
    driver: str | None = None
    runtime: str | None = None
    cpu: str
    """The name that the processor itself gives."""
    cpu_capability: str
    num_threads: Count
    versions: dict[str, str]
    variables: dict[str, str] = {}
    architecture: str | None = None
    """``x86_64``, ``aarch64``."""
    cpu_model: str | None = None
    """Maker and numbers of family, model and stepping, which virtual machines hide less often than
    the name."""
    torch_build: dict[str, str] = {}
    """Compiler and linear algebra libraries that torch was built with."""

    @property
    def facts(self) -> dict[str, str]:
        """What is known of the machine, by name."""
        number = f" × {self.num_devices}" if self.num_devices > 1 else ""
        fixed = {
            "label": self.label,
            "device": f"{self.device_type}: {self.device_name}{number}",
            "driver": self.driver,
            "runtime": self.runtime,
            "CPU": self.cpu,
            "instructions": self.cpu_capability,
            "threads": str(self.num_threads),
            "CPU model": self.cpu_model,
            "platform": self.platform,
            "Python": self.python,
        }
        more = dict(sorted(self.versions.items())) | self.torch_build
        every = fixed | more | self.variables | fixed  # a variable may have a name of ours
        return {name: text for name, text in every.items() if text}


class ModuleNote(_Strict, kw_only=True):
    """Says what a captured module is: its class, and its part in the model."""

    kind: str
    """Class of the module."""
    role: ModuleRole
    """``block``: a repeated block. ``trunk``: run once, outside the blocks (embedding, rotary
    table, final norm, head). ``inner``: inside either."""
    routed: bool = False
    """The block sends each token to some of its experts, a discrete choice that rounding may
    flip."""


class OwnTruth(_Strict, kw_only=True):
    """The run's own truth, in float64: each block got the input that the free pass recorded, and
    with ``full`` the free run was made too."""

    mode: Literal["auto", "full", "floor"]
    """``auto``: as many forwards as fitted the share of the capture's time; ``full``: all;
    ``floor``: no tensors, but the sums of the pass ``floor``, which the other two have as well."""
    num_steps: list[Count]
    """By group of prompts: the forwards that were made, from the prefill on."""
    device: str
    """Where it was computed: the CPU, of a model on a device that has no float64."""
    seconds: float
    """What it took."""
    budget_seconds: float | None = None
    """What it was allowed. None: as long as it takes."""
    stopped_by: str | None = None
    """What ended it early, other than its time, or with no step at all why there is none."""


class Plan(_Strict, kw_only=True):
    """Says what the run was asked to record."""

    passes: list[str]
    sites: list[str]
    steps: str | None = None
    """Selected steps; None for all."""
    positions: str | None = None
    """Selected token positions; None for all."""
    store: StoreMode = "full"
    statistics_off: float | None = None
    """Where another tool computed the statistics: what its digits leave open, relative; beside
    what sums in a tensor's own dtype are off by. None: this tool did."""
    only_changed: str | None = None
    """Id of the run that holds the bytes of the records that have none here."""
    anchored_to: str | None = None
    """Id of the run whose recorded inputs were put in place."""
    plants: list[str] = []
    """Faults that were planted."""
    logits_site: str | None = None
    """The site whose tensor is the logits."""
    replayed_pass: str | None = None
    """In a replay: the pass of the run in ``anchored_to`` whose operators were run again."""
    substitutes: list[str] = []
    """Operators whose results were replaced by another run's."""
    skipped_operators: dict[str, Count] = {}
    """Number of calls that were not recorded or not run again, by reason: ``NO_TENSOR``, or words.
    """
    modules: dict[str, ModuleNote] = {}
    """Every hooked module, by path."""
    not_called: dict[str, Count] = {}
    """Outermost modules that the free pass never called, with their number of parameters."""
    compiled: dict[str, CompiledNote] = {}
    """Modules that were given to ``torch.compile``, by path."""
    truth: OwnTruth | None = None
    """The passes ``truth``, ``truth_free`` and ``floor``, where the run has one."""


class MeshAxis(_Strict, kw_only=True):
    """One way in which the work is divided between ranks."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    """Number of parts."""


class Mesh(_Strict, kw_only=True):
    """The processes of a run of several ranks."""

    axes: list[MeshAxis]
    """Rank r stands at place r of these axes, in row-major order."""
    environments: list[Environment] = []
    """The ranks' environments in order, where they are not all equal to the manifest's."""

    def __str__(self) -> str:
        """``4 ranks (dp 2 × tp 2)``"""
        axes = " × ".join(f"{axis.name} {axis.size}" for axis in self.axes)
        return f"{self.num_ranks} rank{'s' if self.num_ranks != 1 else ''} ({axes})"

    @property
    def num_ranks(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def places_of(self, rank: int) -> tuple[int, ...]:
        """The rank's index on each axis: of ``dp 2 × tp 4`` rank 5 stands at (1, 1)."""
        places = []
        for axis in reversed(self.axes):
            rank, place = divmod(rank, axis.size)
            places.append(place)
        return tuple(reversed(places))


class Repeatability(_Strict, kw_only=True):
    """Did this machine repeat itself bit for bit?"""

    num_runs: Count = 1
    """1: not measured."""
    num_compared: Count = 0
    num_different: Count = 0
    first_difference: str | None = None
    """The first tensor that differed."""
    num_forwards: Count = 0
    """Repeated forwards up to the first that differs in each prompt: what comes later inherits."""
    begins: dict[str, Count] = {}
    """In how many of them a difference began, by the first site that differed."""

    @property
    def places(self) -> list[str]:
        """The sites at which differences began, most often first, with how often each."""
        ordered = sorted(self.begins.items(), key=lambda item: -item[1])
        return [f"{site} ({count})" if len(ordered) > 1 else site for site, count in ordered]


class Override(_Strict, kw_only=True):
    """A setting of the recorded run that ``--like`` was told to change."""

    name: str
    reference: str
    """The recorded run's value."""
    used: str
    """The value in this run."""


class Sizes(_Strict, kw_only=True):
    """Says how much the run holds."""

    num_records: Count = 0
    num_tensors: Count = 0
    num_shards: Count = 0
    stored_bytes: Count = 0
    """Bytes on disk for tensors."""
    seen_bytes: Count = 0
    """Bytes of all tensors before equal ones were stored once."""


class Manifest(_Strict, kw_only=True):
    """The whole of manifest.json."""

    schema_version: int = SCHEMA_VERSION
    digest: str | None = None
    """xxh3-128 of this file with zeros in the place of these 32 digits. None in runs made before
    version 8, and in what other programs write."""
    record_digests: dict[str, str] = {}
    """xxh3-128 of each file of records, noted when the run is closed."""
    id: str
    tool_version: str
    created: str
    command: str | None = None
    complete: bool = False
    """The run reached its end."""
    stopped_by: str | None = None
    """What ended an incomplete run."""
    like: str | None = None
    """Id of the run that this one repeats."""
    model: ModelIdentity
    engine: EngineNote | None = None
    """None in runs made before version 6, by transformers."""
    tokens: Tokens
    settings: Settings
    training: Training = msgspec.field(default_factory=Training)
    environment: Environment
    plan: Plan
    repeatability: Repeatability = msgspec.field(default_factory=Repeatability)
    overrides: list[Override] = []
    sizes: Sizes = msgspec.field(default_factory=Sizes)
    arithmetic: list[ArithmeticFact] = []
    """What probes found out about this machine."""
    mesh: Mesh | None = None
    """None where one process made the run."""

    def encode(self) -> bytes:
        """The file's text, closed by its digest, which is set. UnicodeEncodeError where a text
        holds what UTF-8 cannot."""
        self.digest = NO_DIGEST
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        self.digest = xxhash.xxh3_128_hexdigest(text)
        return text.replace(NO_DIGEST.encode(), self.digest.encode(), 1)

    def is_closed_by(self, text: bytes) -> bool:
        """Does the digest fit ``text``, the bytes that this manifest was read from?"""
        digest = self.digest or ""
        blank = text.replace(digest.encode(), NO_DIGEST.encode(), 1)
        return xxhash.xxh3_128_hexdigest(blank) == digest

    @property
    def num_ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.num_ranks

    @property
    def scores_alone(self) -> bool:
        """Does the run hold log-probabilities of tokens and nothing else? No model ran then, as far
        as is known."""
        return self.plan.sites == [LOGPROBS]

    @property
    def can_be_repeated(self) -> bool:
        """Can `capture --like` make it again? A suite can, and a model that ran on tokens."""
        samples = self.tokens.samples
        has_tokens = bool(samples) and all(sample.prompt_ids for sample in samples)
        made_here = not self.scores_alone and not self.is_of_a_module
        return self.model.source.startswith(SUITE) or (has_tokens and made_here)

    @property
    def model_dtype(self) -> str:
        """That of the model; of scores alone, whose numbers have one of their own, as told."""
        return self.settings.dtype or UNKNOWN if self.scores_alone else self.model.dtype

    @property
    def is_of_a_module(self) -> bool:
        """Was it made by ``record``: any module, on tensors?"""
        own_class = self.model.model_class != "" and not self.model.config_digest
        tokens = any(sample.prompt_ids for sample in self.tokens.samples)
        return own_class and not tokens and self.model.task == "encoder"

    @property
    def escalated_to(self) -> str | None:
        """Id of the run whose recorded inputs the escalated pass got: the repeated one, or this
        one. None where there is no such pass."""
        if "escalated" not in self.plan.passes:
            return None
        return self.plan.anchored_to or self.id

    @property
    def quantizes_activations(self) -> bool:
        """Do values become codes on their way, each a choice that rounding may flip?"""
        return self.model.quantization is not None and self.model.quantization.has_activations

    @property
    def processes(self) -> str:
        """``"4 ranks (dp 2 × tp 2)"``, or ``"1 process"``."""
        return "1 process" if self.mesh is None else str(self.mesh)
