"""What each command may be told: one declaration for the command line and the API."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgspec

from divergence.errors import UsageError

# An option: one field of a typed struct, from which everything that knows options is derived.
#
#     class CaptureOptions(Options, frozen=True, kw_only=True):
#         seed: Annotated[
#             int | None,
#             Option("--seed N", "Seed of every generator.", REPEATING, setting=True,
#                    recorded="settings.seed"),
#         ] = None
#
# That is the whole declaration. Derived from it: the parameter of the command line (cli.signature),
# the key of the settings file and its DIVERGENCE_* variable (config), the check of what a caller
# of the Python API gave (recording.wishes), the place in the manifest where it is written
# and from where ``--like`` takes it (recording.request), whether a suite of operators may be
# given it (recording.suites), and the words of a command that is run elsewhere (experiments).
#
# The field's type is that of the plain value. Only the functions of the Python API repeat names and
# defaults, since type checkers and ``help()`` read nothing but a written signature; a test holds
# them equal to the struct. A key of the manifest is written down in run.schema.manifest as well:
# that is the format of files, which must not change because an option was renamed.


class Option(msgspec.Struct, frozen=True):
    """How an option is written, and what uses it.

    ``words``: its names and then the word for its value, as help prints them: ``--out -o RUN``.
    Without a name it is an argument. A switch called ``--no-...`` sets False.
    """

    words: str
    help: str
    panel: str | None = None
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    setting: bool = False
    """May be set in the settings file and as a variable, under its long name."""
    machine: bool = False
    """Its setting is this machine's: used for ``--like`` and for a suite of operators, too."""
    recorded: str | None = None
    """Where the manifest holds it, ``settings.seed``; ``--like`` takes it from there."""
    needs_like: bool = False
    suite: bool = False
    """Means something to a suite of operators."""
    commas: bool = False
    """A list that is written as one text, its parts divided by commas."""
    after: str | None = None
    """The parameter that it follows in help, where that is not the one before it."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(word for word in self.words.split() if word.startswith("-"))

    @property
    def metavar(self) -> str:
        return " ".join(word for word in self.words.split() if not word.startswith("-"))

    @property
    def word(self) -> str:
        """Its long name as an identifier: ``no_batch`` of ``--no-batch``."""
        long = next(name for name in self.names if name.startswith("--"))
        return long.removeprefix("--").replace("-", "_")

    @property
    def key(self) -> str:
        """What the settings file calls it."""
        return self.word.removeprefix("no_")

    @property
    def turns_on(self) -> bool:
        """What a switch sets: False for one called ``--no-...``."""
        return not self.word.startswith("no_")

    def but(self, **changes: Any) -> Option:
        """The same option where a command means a little more or less by it."""
        return msgspec.structs.replace(self, **changes)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one command, each with the default of the Python API."""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One option as code meets it. ``options``: how it is written; two for a switch that can be
    turned both ways."""

    name: str
    type: Any
    default: Any
    options: tuple[Option, ...]

    @property
    def option(self) -> Option:
        return self.options[0]

    @property
    def text_type(self) -> Any:
        """What its words on a command line or in a file are read as."""
        return text_type(self.type)

    def is_given(self, value: Any) -> bool:
        """Does a value of this option ask for anything? An empty list does not, nor False for what
        is not on anyhow."""
        if value is None or (value is False and self.default is not True):
            return False
        return bool(value != self.default and value not in ((), [], {}))


def kinds_of(type_: Any) -> tuple[Any, ...]:
    """The members of a union without None; of another type, itself."""
    if get_origin(type_) in (Union, types.UnionType):
        return tuple(member for member in get_args(type_) if member is not type(None))
    return (type_,)


def text_type(type_: Any) -> Any:
    """bool, int, str, Path, or a list of one: the first that a type takes."""
    first = kinds_of(type_)[0]
    if get_origin(first) is Sequence:
        (item,) = get_args(first)
        return list[int] if item is int else list[str]
    return first


def parted(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type of an annotation, and what else ``Annotated`` says."""
    if get_origin(annotation) is Annotated:
        type_, *rest = get_args(annotation)
        return type_, tuple(rest)
    return annotation, ()


@functools.cache
def fields_of(kind: type[Options]) -> tuple[Field, ...]:
    """The options of a command, in the order of its help."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = []
    for field in msgspec.structs.fields(kind):
        type_, options = parted(hints[field.name])
        fields.append(Field(name=field.name, type=type_, default=field.default, options=options))
    return tuple(fields)


def given_fields(options: Options) -> Iterator[Field]:
    """Those that ask for something else than their default."""
    for field in fields_of(type(options)):
        if field.is_given(getattr(options, field.name)):
            yield field


def recorded_in(options: Options, part: str, kind: type[Options]) -> dict[str, Any]:
    """What the manifest's ``settings`` or ``plan`` hold of the options, by the manifest's names."""
    recorded = {}
    for field in fields_of(kind):
        place, _, name = (field.option.recorded or "").partition(".")
        if place == part:
            recorded[name] = getattr(options, field.name)
    return recorded


def command_options(kind: type[Options], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options, in their order, as the keywords of ``run.command``:
    ``no_batch=True`` for ``batch=False``, and ``plant`` for the ``plants``."""
    fields = {field.name: field for field in fields_of(kind)}
    keywords: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, bool):
            ways = fields[name].options
            keywords |= {option.word: True for option in ways if option.turns_on == value}
        else:
            keywords[fields[name].option.word] = value
    return keywords


# The options of a training step: ``capture --train``.

TRAINING = "Training"
"""The panel of ``capture --help``."""


class TrainOptions(Options, frozen=True, kw_only=True):
    """None means "as recorded" with ``--like``, and the default without."""

    train: Annotated[
        bool | None,
        Option(
            "--train",
            "Forward and backward on the prompts, each token's label being the next one: the loss, "
            "the gradients of blocks and parameters. Nothing is generated.",
            TRAINING,
            recorded="training.train",
        ),
    ] = None
    autocast: Annotated[
        str | None,
        Option(
            "--autocast DTYPE",
            "The forward under torch.autocast in bfloat16 or float16.",
            TRAINING,
            recorded="training.autocast",
        ),
    ] = None
    gradient_checkpointing: Annotated[
        bool | None,
        Option(
            "--gradient-checkpointing",
            "Run each block's forward again in the backward, in place of keeping activations.",
            TRAINING,
            recorded="training.gradient_checkpointing",
        ),
    ] = None
    dropout: Annotated[
        bool | None,
        Option(
            "--dropout",
            "Keep the model's dropout, which draws from this machine's generator. Default: off.",
            TRAINING,
            recorded="training.dropout",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        Option(
            "--optimizer-step NAME",
            "One step of adamw or sgd behind the backward: moments and updates are recorded.",
            TRAINING,
            recorded="training.optimizer",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Option(
            "--learning-rate RATE",
            "Of the optimizer. Default: 1e-3.",
            TRAINING,
            recorded="training.learning_rate",
        ),
    ] = None
    weight_decay: Annotated[
        float | None,
        Option(
            "--weight-decay SHARE",
            "Of the optimizer, on matrices alone. Default: 0.01 of adamw, 0 of sgd.",
            TRAINING,
            recorded="training.weight_decay",
        ),
    ] = None
    clip_grad_norm: Annotated[
        float | None,
        Option(
            "--clip-grad-norm NORM",
            "Scale the gradients down to this norm before the optimizer's step.",
            TRAINING,
            recorded="training.clip_grad_norm",
        ),
    ] = None
    loss_scale: Annotated[
        float | None,
        Option(
            "--loss-scale FACTOR",
            "Multiply the loss before the backward, and divide the gradients behind it, as mixed "
            "precision in float16 does.",
            TRAINING,
            recorded="training.loss_scale",
        ),
    ] = None
    reduce_dtype: Annotated[
        str | None,
        Option(
            "--reduce-dtype DTYPE",
            "Add up the prompts' gradients as so many ranks would, sending float32, bfloat16 or "
            "float16.",
            TRAINING,
            recorded="training.reduce_dtype",
        ),
    ] = None
    reduce_order: Annotated[
        str | None,
        Option(
            "--reduce-order ORDER",
            "With --reduce-dtype: ring or tree. Default: ring.",
            TRAINING,
            recorded="training.reduce_order",
        ),
    ] = None
    accumulate_dtype: Annotated[
        str | None,
        Option(
            "--accumulate-dtype DTYPE",
            "Add up the prompts' gradients in float32, bfloat16 or float16. Default: the "
            "parameters' dtype.",
            TRAINING,
            recorded="training.accumulate_dtype",
        ),
    ] = None
    main_weights: Annotated[
        bool | None,
        Option(
            "--main-weights",
            "The optimizer steps float32 copies of weights in 16 bits. Default: off, as in torch; "
            "on with --dry-run.",
            TRAINING,
            recorded="training.main_weights",
        ),
        Option("--no-main-weights", "The optimizer steps the weights themselves.", TRAINING),
    ] = None
    moments_dtype: Annotated[
        str | None,
        Option(
            "--moments-dtype DTYPE",
            "In which the optimizer keeps its moments. Default: that of the weights it steps.",
            TRAINING,
            recorded="training.moments_dtype",
        ),
    ] = None
    buffer_dtype: Annotated[
        str | None,
        Option(
            "--buffer-dtype DTYPE",
            "Cast the model's floating-point buffers (rotary frequencies), as FSDP's buffer_dtype "
            "does.",
            TRAINING,
            recorded="training.buffer_dtype",
        ),
    ] = None
    precision_policy: Annotated[
        str | None,
        Option(
            "--precision-policy POLICY",
            "Take these dtypes from a DeepSpeed configuration, Megatron-LM's arguments or log "
            "(files), or FSDP's policy as text: MixedPrecisionPolicy(param_dtype=bfloat16, ...).",
            TRAINING,
            recorded="training.precision_policy",
        ),
    ] = None
    zero: Annotated[
        int | None,
        Option(
            "--zero STAGE",
            "With --mesh: what ranks divide, as the stages of ZeRO do. dp: 0 nothing, 1 the "
            "optimizer's state; fsdp: 2 gradients too, 3 parameters too. Default: 3 of a mesh with "
            "fsdp, else 0.",
            TRAINING,
            minimum=0,
        ),
    ] = None
    labels: Annotated[
        Path | str | Sequence[object] | None,
        Option(
            "--labels FILE",
            "What the tokens are to be predicted as, where not as themselves: JSON lines, for each "
            "prompt a list of token ids, -100 for a token without a label, or "
            '{"completion_from": N}: tokens from N on.',
            TRAINING,
        ),
    ] = None


class PlanOptions(Options, frozen=True, kw_only=True):
    """What ``--dry-run --train`` alone is told: how a step would be kept and fed."""

    micro_batch_size: Annotated[
        int | None,
        Option(
            "--micro-batch-size N",
            "With --dry-run: sequences of one forward on a rank. Default: as the prompts.",
            TRAINING,
            minimum=1,
        ),
    ] = None
    sequence_length: Annotated[
        int | None,
        Option(
            "--sequence-length N",
            "With --dry-run: tokens of each sequence. Default: as the prompts.",
            TRAINING,
            minimum=2,
        ),
    ] = None


# The options of every command but ``capture``, and those that several commands have.

MODEL, PROMPTS, RECORDED = "Model", "Prompts", "What is recorded"
REPEATING, OUTPUT = "Repeating a run", "Output"
SERVER = "A server in place of a model"

DEVICE = Option("--device DEVICE", "auto, cpu, cuda:0, npu:0, xpu, mps.")
TRUST = Option("--trust-remote-code", "Run code that comes with the model.")
COPY = Option("--model PATH", "Where this machine has the model.")
LIMITS = Option("--policy FILE", "Take the thresholds table of a policy: multiples of the floor.")

Device = Annotated[str, DEVICE]
TrustRemoteCode = Annotated[bool, TRUST]
Json = Annotated[
    bool,
    Option(
        "--json", "Print the answer as JSON: stable, versioned, nan and inf as strings.", OUTPUT
    ),
]
Quiet = Annotated[bool, Option("--quiet -q", "Print the answer alone, no progress.", OUTPUT)]
Verbose = Annotated[bool, Option("--verbose -v", "Print more, and tracebacks with errors.", OUTPUT)]


class Output(NamedTuple):
    """How an answer is printed: the options that nearly every command has."""

    json: Json
    quiet: Quiet
    verbose: Verbose

    @property
    def silent(self) -> bool:
        """Without a word of progress."""
        return self.json or self.quiet


Out = Annotated[str | None, Option("--out -o RUN", "Directory, archive or URL; needed.")]
Force = Annotated[bool, Option("--force", "Replace an existing run.")]
Label = Annotated[
    str | None,
    Option(
        "--label TEXT", "What to call this machine.", OUTPUT, setting=True, machine=True, suite=True
    ),
]
Ranks = Annotated[
    int | None,
    Option(
        "--ranks N",
        "Of suite:collectives: start N processes on this machine, in place of torchrun.",
        MODEL,
        minimum=2,
        suite=True,
    ),
]
LinkRate = Annotated[
    str | None,
    Option(
        "--link-rate RATE",
        "The stated rate of one link, 400Gb/s or 50GB/s. Of suite:collectives: to hold the "
        "measured bandwidth against; with --dry-run --train: the time of a step's collectives.",
        MODEL,
        suite=True,
    ),
]
NameMap = Annotated[
    Path | None,
    Option(
        "--map FILE",
        "Name map (TOML) from the first run's module paths to the second's.",
        setting=True,
    ),
]
Model = Annotated[str | None, COPY]
ModelOfWeights = Annotated[
    str | None,
    Option(
        "--model PATH", "Where this machine has the model, for weights that the run does not hold."
    ),
]
Operators = Annotated[
    Sequence[str],
    Option(
        "--operators NAMESPACE",
        "Also run a package's own operators (vllm, flash_attn), on inputs that RUN chose; "
        "repeatable. Default: torch's, transformers' and the device's.",
    ),
]
Truth = Annotated[
    str | None,
    Option(
        "--truth TRUTH",
        "A float64 run of `divergence truth`, or a run that carries its truth: it tells the side "
        "that is wrong. Default: the truth that the first run carries.",
    ),
]
FloorRuns = Annotated[
    Sequence[str],
    Option(
        "--floor RUN", "A trusted run like the first: what it shows widens the limits; repeatable."
    ),
]


Layers = Annotated[
    Sequence[str],
    Option(
        "--layers RUN",
        "For a side that holds log-probabilities alone: a run of it with layers; repeatable.",
    ),
]


class CompareOptions(Options, frozen=True, kw_only=True):
    force: Annotated[
        bool, Option("--force", "Compare even where preflight says it is pointless.")
    ] = False
    truth: Truth = None
    floor: FloorRuns = ()
    layers: Layers = ()
    name_map: NameMap = None
    device: Annotated[
        str,
        Option(
            "--device DEVICE",
            "Where tensors are measured: cpu, or an accelerator that has float64, as cuda:0.",
        ),
    ] = "cpu"


class CheckOptions(Options, frozen=True, kw_only=True):
    policy: Annotated[
        str | None,
        Option(
            "--policy FILE", "Policy file, or the name of one: ci (default), strict.", setting=True
        ),
    ] = None
    truth: Truth = None
    floor: FloorRuns = ()
    name_map: NameMap = None


class DoctorOptions(Options, frozen=True, kw_only=True):
    truth: Truth = None
    floor: FloorRuns = ()
    name_map: NameMap = None


class TruthOptions(Options, frozen=True, kw_only=True):
    model: Annotated[str | Path | None, COPY] = None
    sites: Annotated[
        Sequence[str],
        Option(
            "--sites SITES",
            "What is recorded, as in capture; repeatable. Default: what the run recorded.",
        ),
    ] = ()
    max_new_tokens: Annotated[
        int | None, Option("--max-new-tokens N", "Fewer forwards. Default: as many as the run has.")
    ] = None
    device: Annotated[
        str, Option("--device DEVICE", "cpu, or a device that has float64.", suite=True)
    ] = "cpu"
    attn_implementation: Annotated[
        str | None,
        Option(
            "--attn-implementation NAME",
            "eager or sdpa. Default: as recorded; eager for fused kernels.",
        ),
    ] = None
    trust_remote_code: TrustRemoteCode = False
    label: Annotated[
        str | None,
        Option("--label TEXT", "What to call it. Default: float64 truth.", OUTPUT, suite=True),
    ] = None


class ReplayOptions(Options, frozen=True, kw_only=True):
    sites: Annotated[
        Sequence[str],
        Option("--site SITE", "An operator's site, a glob or re:REGEX; repeatable. Default: all."),
    ] = ()
    device: Annotated[
        str,
        Option("--device DEVICE", "auto, cpu, cuda:0, npu:0, xpu, mps. auto is cpu with --truth."),
    ] = "auto"
    truth: Annotated[bool, Option("--truth", "Compute in float64: makes a truth.")] = False
    model: ModelOfWeights = None
    replayed_pass: Annotated[
        str | None,
        Option(
            "--pass PASS",
            "free, anchored or escalated. Default: anchored where it holds operators.",
        ),
    ] = None
    trust_remote_code: TrustRemoteCode = False
    operators: Operators = ()
    label: Label = None


class ProbeOptions(Options, frozen=True, kw_only=True):
    device: Device = "auto"
    quick: Annotated[bool, Option("--quick", "The short form, as every capture makes it.")] = False
    terms: Annotated[
        Sequence[int],
        Option(
            "--terms N",
            "Length of the sums whose order is looked for, a power of two up to 4096; "
            "repeatable. Default: 64, 1024 and 4096; with --quick 512.",
        ),
    ] = ()
    deterministic: Annotated[
        bool,
        Option(
            "--no-deterministic",
            "Probe the machine as it stands; else under the switches that a capture sets.",
        ),
    ] = True
    svg: Annotated[Path | None, Option("--svg DIR", "Draw each tree there.", OUTPUT)] = None
    label: Label = None


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b|bits?)(?:/s|ps)", re.IGNORECASE)


def link_rate(text: str) -> float:
    """``--link-rate`` in bytes a second: of ``50GB/s``, ``25GiB/s``, ``400Gb/s``, ``100Mbps``.
    Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(
            f"--link-rate {text!r} is no rate", hint="for example 50GB/s, 25GiB/s or 400Gbit/s"
        )
    power = " kmgt".index(match[2].lower() or " ")
    rate = float(match[1]) * float((1024 if match[3] else 1000) ** power)
    return rate if match[4] == "B" else rate / 8  # b and bit, as in 400Gb/s


# The options of ``capture``: what runs, on what, and what of it is recorded.
#
# In the order of ``divergence capture --help``. None means "as recorded" with ``--like``, and the
# default without. Where the run is written, and what is run or repeated, are not options but
# parameters of ``capture`` itself.


class CaptureOptions(TrainOptions, frozen=True, kw_only=True):
    task: Annotated[
        str,
        Option(
            "--task TASK",
            "auto, causal-lm, encoder or encoder-decoder.",
            MODEL,
            choices=("auto", "causal-lm", "encoder", "encoder-decoder"),
            setting=True,
            recorded="model.task",
        ),
    ] = "auto"
    revision: Annotated[
        str | None,
        Option(
            "--revision REV", "Branch, tag or commit on the hub.", MODEL, recorded="model.revision"
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            "--dtype DTYPE",
            "float32, bfloat16, float16. Default: auto, as the checkpoint says.",
            MODEL,
            setting=True,
            recorded="settings.dtype",
        ),
    ] = None
    device: Annotated[str, DEVICE.but(panel=MODEL, setting=True, machine=True, suite=True)] = "auto"
    device_map: Annotated[
        str | Mapping[str, str | int] | None,
        Option(
            "--device-map MAP",
            "Spread the model over devices and disk: auto, balanced, or a JSON file of module to "
            "device (0, cpu, disk).",
            MODEL,
            setting=True,
            machine=True,
        ),
    ] = None
    engine: Annotated[
        str | None,
        Option(
            "--engine NAME",
            "What runs the model: transformers, compile (torch.compile, block by block), onnx "
            "(ONNX Runtime), or an installed one. Default: transformers, or the recorded one.",
            MODEL,
            setting=True,
            recorded="engine.name",
        ),
    ] = None
    engine_options: Annotated[
        Sequence[str] | Mapping[str, Any],
        Option(
            "--engine-option KEY=VALUE",
            "An option of the engine, such as mode=max-autotune; repeatable.",
            MODEL,
            recorded="engine.options",
        ),
    ] = ()
    attn_implementation: Annotated[
        str | None,
        Option(
            "--attn-implementation NAME",
            "eager, sdpa, flash_attention_2. Default: eager, or the recorded one.",
            MODEL,
            setting=True,
            recorded="settings.attn_implementation",
        ),
    ] = None
    threads: Annotated[
        int | None,
        Option(
            "--threads N",
            "Threads of torch on the CPU. Default: as many as the process has.",
            MODEL,
            minimum=1,
            setting=True,
            machine=True,
        ),
    ] = None
    trust_remote_code: Annotated[bool, TRUST.but(panel=MODEL)] = False
    endpoint: Annotated[
        str | None,
        Option(
            "--endpoint URL",
            "A server to ask in place of running a model: the log-probabilities of its answers. "
            "A key is read from OPENAI_API_KEY.",
            SERVER,
        ),
    ] = None
    top_logprobs: Annotated[
        int, Option("--top-logprobs N", "Likeliest tokens a server is asked for at each.", SERVER)
    ] = 20
    answers: Annotated[
        int,
        Option("--answers N", "Draw N answers to each prompt; 0: the greedy one alone.", SERVER),
    ] = 0
    concurrency: Annotated[
        int,
        Option("--concurrency N", "Prompts that a server is asked at a time.", SERVER, minimum=1),
    ] = 4
    resume: Annotated[
        bool,
        Option(
            "--resume", "Go on with an interrupted capture of a server: ask what it lacks.", SERVER
        ),
    ] = False
    prompts: Annotated[
        Sequence[Any], Option("--prompt TEXT", "A prompt; repeatable.", PROMPTS)
    ] = ()
    prompts_file: Annotated[
        Path | str | None,
        Option("--prompts FILE", "A file of prompts: .txt (one a line), .jsonl or .json.", PROMPTS),
    ] = None
    chat: Annotated[bool, Option("--chat", "Put prompts through the chat template.", PROMPTS)] = (
        False
    )
    batch: Annotated[
        bool | None,
        Option(
            "--batch",
            "Run all prompts in one padded batch; with --like also those that ran singly.",
            PROMPTS,
            recorded="settings.batch",
        ),
        Option(
            "--no-batch",
            "With --like: run each prompt by itself, whatever batch it ran in.",
            REPEATING,
            needs_like=True,
        ),
    ] = None
    batches: Annotated[
        str | None,
        Option(
            "--batches LIST",
            "Which prompts run together, and in which places: '0,1 2,3' or '1,0 3,2'.",
            PROMPTS,
        ),
    ] = None
    pad_left: Annotated[
        int,
        Option(
            "--pad-left N",
            "N pads more before each prompt than its batch needs.",
            PROMPTS,
            minimum=0,
        ),
    ] = 0
    pad_right: Annotated[
        int,
        Option(
            "--pad-right N",
            "With --like: N pads behind each prompt, and those that its batch needs; of a causal "
            "language model the prefill alone.",
            REPEATING,
            minimum=0,
        ),
    ] = 0
    use_cache: Annotated[
        bool | None,
        Option(
            "--no-cache",
            "Decode without a cache: each step is a forward over the whole sequence, of which its "
            "own token is recorded.",
            PROMPTS,
            recorded="settings.use_cache",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        Option(
            "--prefill-chunk N",
            "Feed the prompt in chunks of N tokens, recorded as one prefill.",
            PROMPTS,
            minimum=1,
            recorded="settings.prefill_chunk",
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        Option(
            "--max-new-tokens N",
            "Tokens to generate: prefill and N - 1 decode steps. Default: 16, or as recorded.",
            PROMPTS,
            minimum=0,
            setting=True,
            recorded="settings.max_new_tokens",
        ),
    ] = None
    sites: Annotated[
        Sequence[str],
        Option(
            "--sites SITES",
            "blocks, modules, a preset (attention, mlp, norms), a glob, re:REGEX, or ops@MODULE "
            "for every operator inside it (with --train of its backward too); repeatable.",
            RECORDED,
            setting=True,
            recorded="plan.sites",
            suite=True,
        ),
    ] = ()
    steps: Annotated[
        str | None,
        Option(
            "--steps STEPS",
            "Forwards to record: 0,4-8 or prefill or decode; 0 is the prefill. Default: all.",
            RECORDED,
            recorded="plan.steps",
        ),
    ] = None
    positions: Annotated[
        str | None,
        Option(
            "--positions TOKENS",
            "Token positions to record: 0,4-8 or -1 or last:16. Default: all.",
            RECORDED,
            recorded="plan.positions",
        ),
    ] = None
    weights: Annotated[
        bool,
        Option(
            "--weights",
            "Store the weights that recorded operators use, so that replay needs no model.",
            RECORDED,
        ),
    ] = False
    store: Annotated[
        str | None,
        Option(
            "--store MODE",
            "full: every byte; sketch: 1-2% of them, differences are estimated; stats: statistics; "
            "hash: digests. Default: full, or as recorded.",
            RECORDED,
            choices=("full", "sketch", "stats", "hash"),
            recorded="plan.store",
        ),
    ] = None
    only_changed: Annotated[
        bool,
        Option(
            "--only-changed",
            "With --like: store no bytes of tensors that RUN holds bit for bit.",
            REPEATING,
            needs_like=True,
        ),
    ] = False
    substitutes: Annotated[
        Sequence[str] | Mapping[str, Any] | None,
        Option(
            "--substitute SITE=RUN",
            "Put RUN's recorded result in the place of this operator's; repeatable.",
            REPEATING,
        ),
    ] = None
    whole: Annotated[
        bool,
        Option(
            "--whole",
            "One more pass: prompt and generated tokens in one forward, to hold the decode steps "
            "against (divergence compare RUN).",
            RECORDED,
        ),
    ] = False
    truth: Annotated[
        str | None,
        Option(
            "--truth MODE",
            "The run's own anchored pass in float64, which tells the side that is wrong: auto, as "
            "many forwards as fit half of the capture's time, prefills first; full, all, and the "
            "free run; floor, as auto, the sums of A's own error alone (what auto and full keep "
            "with another --store than full); no. Default: auto, with --like no.",
            RECORDED,
            choices=("auto", "full", "floor", "no"),
            setting=True,
        ),
    ] = None
    hooks: Annotated[
        bool | None,
        Option(
            "--no-hooks",
            "Record what the model returns alone, with no hook in it: to see that hooks change no "
            "bit.",
            RECORDED,
            recorded="settings.hooks",
        ),
    ] = None
    deterministic: Annotated[
        bool | None,
        Option(
            "--no-deterministic",
            "Leave the determinism switches alone.",
            REPEATING,
            setting=True,
            recorded="settings.deterministic",
            suite=True,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            "--seed N",
            "Seed of every generator. Default: 0.",
            REPEATING,
            setting=True,
            recorded="settings.seed",
            suite=True,
        ),
    ] = None
    repeat: Annotated[
        int,
        Option(
            "--repeat K",
            "Run K times and say whether this machine repeats itself. Default: 1.",
            REPEATING,
            minimum=1,
            suite=True,
        ),
    ] = 1
    anchor: Annotated[
        bool,
        Option(
            "--no-anchor", "With --like: leave out the anchored pass.", REPEATING, needs_like=True
        ),
    ] = True
    escalate: Annotated[
        bool,
        Option(
            "--escalate",
            "One more pass, in float32, that sees faults of formula and data below a 16-bit floor: "
            "anchored to the run of --like, or else to this run's own free pass.",
            REPEATING,
        ),
    ] = False
    impl: Annotated[
        Sequence[str] | Mapping[str, Any],
        Option(
            "--impl [OP=]NAME",
            "Of a suite: which implementation runs, flash_attn or rms_norm=MODULE:FUNCTION; "
            "repeatable.",
            MODEL,
            suite=True,
        ),
    ] = ()
    plants: Annotated[
        Sequence[Any],
        Option(
            "--plant SITE=FAULT",
            "Plant a fault, to see that it is found; repeatable. @sample=2,step=5 behind it: in "
            "that prompt's step alone. Of suite:collectives: COLLECTIVE=FAULT@RANK.",
            REPEATING,
            suite=True,
        ),
    ] = ()
    label: Label = None
    mesh: Annotated[
        str | None,
        Option(
            "--mesh AXES",
            "Under torchrun, how its processes divide the work: tp, fsdp, dp, pp, or several with "
            "their sizes: dp=2,tp=4.",
            MODEL,
        ),
    ] = None
    ranks: Ranks = None
    link_rate: LinkRate = None
    buffer: Annotated[
        str | int,
        Option(
            "--buffer SIZE",
            "Host memory that the capture may take beside the model: 64MiB, 2GiB. Default: 512MiB.",
            OUTPUT,
        ),
    ] = "512MiB"
    probe: Annotated[
        bool, Option("--no-probe", "Leave out the probe of this machine's arithmetic.", suite=True)
    ] = True


# The options of what makes runs in order to compare them, and of `repro`.

Keep = Annotated[
    str | Path | None, Option("--keep DIR", "Keep the runs there; else they are removed.")
]


class LocalizeOptions(Options, frozen=True, kw_only=True):
    truth: Annotated[
        str | None,
        Option(
            "--truth TRUTH",
            "The float64 run of `divergence truth`, made on A's machine. Default: what A carries, "
            "or made in DIR, there.",
        ),
    ] = None
    block: Annotated[
        str | None, Option("--block PATH", "Go into this block, whatever the comparison says.")
    ] = None
    model: Model = None
    device: Device = "auto"
    here: Annotated[
        str,
        Option(
            "--here SIDE",
            "Whose machine this is: reference (A), candidate (B), both, none; auto asks "
            "the runs. What is made must have that run's bits.",
            choices=("auto", "reference", "candidate", "both", "none"),
        ),
    ] = "auto"
    force: Annotated[bool, Option("--force", "Replace what DIR holds of another pair of runs.")] = (
        False
    )
    trust_remote_code: TrustRemoteCode = False
    operators: Operators = ()


class SensitivityOptions(Options, frozen=True, kw_only=True):
    candidate: Annotated[
        str | None,
        Option(
            "--candidate B",
            "A healthy run captured like RUN. Default: made here, of other kernels.",
        ),
    ] = None
    truth: Truth = None
    floor: FloorRuns = ()
    blocks: Annotated[
        Sequence[str],
        Option(
            "--blocks LIST", "first, middle, last, all, numbers from 0 or module paths; by commas.",
            commas=True,
        ),
    ] = ("first", "middle", "last")  # fmt: skip
    faults: Annotated[
        Sequence[str],
        Option(
            "--faults LIST", "scale, update-scale, noise, bias, channel, zero; by commas.",
            commas=True,
        ),
    ] = ("scale", "update-scale", "noise", "bias", "channel")  # fmt: skip
    confirm: Annotated[
        bool,
        Option(
            "--confirm",
            "Also plant the found sizes in the running model, in one block; needs the model.",
        ),
    ] = False
    model: Model = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False


_SCHEME = "The scheme"


class QuantizationOptions(Options, frozen=True, kw_only=True):
    each: Annotated[
        bool, Option("--each", "Also quantise every matrix alone: half a forward for each.")
    ] = False
    target: Annotated[
        float | None,
        Option("--target NATS", "Find what must stay in floating point to cost at most this."),
    ] = None
    measure: Annotated[
        str,
        Option(
            "--measure NAME", "Held against the target: mean KL, or mean |Δ log p|.",
            choices=("kl", "logprob"),
        ),
    ] = "kl"  # fmt: skip
    scheme: Annotated[
        str,
        Option(
            "--scheme NAME",
            "w8a8, w8a8-static, w8a16, w4a16, w4a16-g32, w4a8, fp8, fp8-static, kv8; w8a8+kv8.",
            _SCHEME,
        ),
    ] = "w8a8"
    smooth: Annotated[
        float | None,
        Option(
            "--smooth ALPHA", "Migrate outliers into the weights, as SmoothQuant: 0.5.", _SCHEME
        ),
    ] = None
    asymmetric: Annotated[
        str, Option("--asymmetric WHAT", "A zero point for weights, activations, both.", _SCHEME)
    ] = ""
    weights_per: Annotated[
        str, Option("--weights-per WHAT", "A scale for each tensor, channel, group:128.", _SCHEME)
    ] = ""
    activations_per: Annotated[
        str, Option("--activations-per WHAT", "A scale for each tensor, token, group:128.", _SCHEME)
    ] = ""
    keep: Annotated[
        Sequence[str],
        Option(
            "--keep NAME",
            "Leave in floating point: a matrix, re:EXPRESSION, or a class; repeatable. !NAME "
            "quantises what is kept otherwise (head, routers).",
            _SCHEME,
        ),
    ] = ()
    prompts: Annotated[
        Sequence[str], Option("--prompt TEXT", "Of a model: a prompt; repeatable.")
    ] = ()
    prompts_file: Annotated[
        Path | None, Option("--prompts FILE", "Of a model: .txt (one a line), .jsonl or .json.")
    ] = None
    model: Model = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False


class SelfcheckOptions(Options, frozen=True, kw_only=True):
    prompts: Annotated[
        Sequence[str],
        Option("--prompt TEXT", "A prompt; repeatable. Default: four of 16 tokens at most."),
    ] = ()
    prompts_file: Annotated[
        Path | None,
        Option("--prompts FILE", "A file of prompts: .txt (one a line), .jsonl or .json."),
    ] = None
    chat: Annotated[bool, Option("--chat", "Put prompts through the chat template.")] = False
    max_new_tokens: Annotated[
        int,
        Option(
            "--max-new-tokens N", "Tokens to generate for each prompt. Default: 3.", minimum=1
        ),
    ] = 3  # fmt: skip
    dtype: Annotated[
        str | None, Option("--dtype DTYPE", "float32, bfloat16, float16. Default: auto.")
    ] = None
    device: Device = "auto"
    attn_implementation: Annotated[
        str | None, Option("--attn-implementation NAME", "Of the base run: eager (default), sdpa.")
    ] = None
    only: Annotated[
        Sequence[str],
        Option(
            "--only LIST",
            "again, hooks, threads, batch, place, mates, pads, whole, cache, chunks, attention, "
            "compile; by commas. Default: all but compile, which takes minutes.",
            commas=True,
        ),
    ] = ()
    truth: Annotated[
        bool, Option("--truth", "Make the float64 truth too: tells which side of a line is wrong.")
    ] = False
    keep: Keep = None
    trust_remote_code: TrustRemoteCode = False


class SelftestOptions(Options, frozen=True, kw_only=True):
    device: Device = "auto"
    quick: Annotated[bool, Option("--quick", "Leave out the suite of operators.")] = False
    keep: Keep = None


class ReproOptions(Options, frozen=True, kw_only=True):
    against: Annotated[
        str | None,
        Option(
            "--against RUN2",
            "The other machine's run, best a replay of RUN: its figures stand beside.",
        ),
    ] = None
    truth: Annotated[
        str | None, Option("--truth TRUTH", "A float64 replay of RUN. Default: computed here.")
    ] = None
    sample: Annotated[int | None, Option("--sample N", "Which prompt's call.", minimum=0)] = None
    step: Annotated[
        int | None,
        Option(
            "--step N",
            "Which forward's call. Default: where RUN2 differs most, else the first.",
            minimum=0,
        ),
    ] = None
    model: ModelOfWeights = None
    trust_remote_code: TrustRemoteCode = False
    operators: Operators = ()
    force: Annotated[bool, Option("--force", "Replace an existing reproducer.")] = False
