"""What ran a model: engine, code, compiler, quantiser and training step, and how its machine
computes, as a manifest has them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from divergence.run.schema.record import Count

__all__ = [
    "NUM_SUMS",
    "ArithmeticFact",
    "Calibration",
    "CodeNote",
    "CompiledNote",
    "EngineNote",
    "EngineValue",
    "ParameterNote",
    "QuantizationNote",
    "QuantizedNumbers",
    "QuantizedScheme",
    "Training",
    "ValuesForm",
]  # fmt: skip

EngineValue = bool | int | float | str | None
"""One option of an engine."""


class Calibration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a simulated quantisation took from running the model in floating point before."""

    num_tokens: Count
    """Tokens that it ran on."""
    limits: dict[str, list[float]] = {}
    """By matrix: the least and the largest number that enters it."""
    scales: dict[str, list[float]] = {}
    """By norm: what each channel is divided by before it is quantised."""
    fed_by: dict[str, str] = {}
    """By matrix: the norm that feeds it."""


class EngineNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What ran the model."""

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
    attributes: dict[str, str] = {}
    """Plain numbers that the modules hold: the value that most have, then the modules that have
    another."""


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
    """How one kind of value is turned into codes: code = x / scale + zero point, rounded to the
    nearest code and kept in its range."""

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
        floats = any(codes is not None and codes.kind == "float" for codes in (self.weights,))
        return f"{'FP8 ' if floats and bits[0] == 8 else ''}W{bits[0]}A{bits[1]}"

    def __str__(self) -> str:
        """``W8A8: int8 weights per channel, int8 activations per token, dynamic``"""
        told = []
        for what, codes in (("weights", self.weights), ("activations", self.activations)):
            if codes is not None:
                code, _, rest = str(codes).partition(" ")
                told.append(f"{code} {what} {rest}")
        if self.activations is not None:
            told.append("dynamic" if self.activations.dynamic else "static")
        return f"{self.name}: {', '.join(told)}"


class QuantizationNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is quantised, as its configuration says and its modules show."""

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
        return (
            any(scheme.activations is not None for scheme in self.schemes) and not self.dequantized
        )

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
        told = [
            str(scheme) + (f" ({scheme.num_modules} modules)" if len(self.schemes) > 1 else "")
            for scheme in self.schemes
        ] or ([] if self.method == "simulated" else ["scheme not known"])
        if self.kv_cache is not None:
            told.append(f"KV cache {self.kv_cache}")
        if self.kept:
            told.append(f"not quantised: {', '.join(self.kept)}")
        if self.dequantized:
            told.append("dequantised when loaded")
        by = ", ".join(filter(None, (self.method, self.format)))
        return f"{'; '.join(told)} ({by})"


class StepPrecision(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """In which dtypes a training step kept what it has, and added it up: read from the tensors of
    the step, the most frequent dtype where there are several. None: it has none."""

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
                said = "ZeRO stage" if name == "zero" else name.replace("_", " ")
                lines.append((said, str(here or "none"), str(there or "none")))
        return lines  # type: ignore[return-value]  # three texts each

    def options_beside(self, other: Training) -> dict[str, bool | str | float]:
        """The settings in which this step differs from ``other``, which it repeats, by the names
        that capture() has for them. No option takes back what ``other`` alone has."""
        options = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            told = name in ("train", *_TOLD_ELSEWHERE)
            if value is not None and value != getattr(other, name) and not told:
                options[name] = value
        return options

    def __str__(self) -> str:
        """``forward and backward, adamw, learning rate 0.001``; ``none`` where there was none."""
        if not self.train:
            return "none"
        said = ["forward and backward"]
        said += [f"autocast {self.autocast}"] if self.autocast else []
        said += ["gradient checkpointing"] if self.gradient_checkpointing else []
        said += ["dropout"] if self.dropout else []
        said += [self.optimizer] if self.optimizer else []
        if self.reduce_dtype:
            said.append(f"reduced in {self.reduce_dtype}, {self.reduce_order}")
        said += [f"added up in {self.accumulate_dtype}"] if self.accumulate_dtype else []
        said += ["float32 main weights"] if self.main_weights else []
        said += [f"moments in {self.moments_dtype}"] if self.moments_dtype else []
        said += [f"buffers in {self.buffer_dtype}"] if self.buffer_dtype else []
        said += [f"ZeRO {self.zero}"] if self.zero else []
        for name in ("learning_rate", "weight_decay", "clip_grad_norm", "loss_scale"):
            value = getattr(self, name)
            said += [] if value is None else [f"{name.replace('_', ' ')} {value:g}"]
        return ", ".join(said)


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
        """What follows the probe's name."""
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
    sums: Annotated[list[float], msgspec.Meta(min_length=3 * NUM_SUMS, max_length=3 * NUM_SUMS)]
    """Sums with signs that are the same on every machine: four by column, four by row, four by
    both. Those by column are the same for any order of rows, and the other way round."""
    levels: Count | None = None
    """Its first numbers are whole multiples of one step, up to so many: it was quantised."""
    strides: list[Count] | None = None
    """By axis: how far apart in memory, in numbers, one element and the next lie. None where it is
    contiguous."""
