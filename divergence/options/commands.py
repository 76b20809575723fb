"""Each command's options: one declaration for the command line and the API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from divergence.domain import additions, placed
from divergence.errors import UsageError
from divergence.options.option import Option, Options, but, fields_of, option
from divergence.run.site import did_you_mean

# The options of every command but ``capture``, and those that several commands have.

MODEL, PROMPTS, RECORDED = "Model", "Prompts", "What is recorded"
REPEATING, OUTPUT = "Repeating a run", "Output"
CASES = "A suite in place of a model"
FORMS = "Other forms of the same forwards"
"""What `selfcheck` compares with each other; hardly anybody sets it by hand."""

DEVICE = option("--device DEVICE", "auto, cpu, cuda:0, npu:0, xpu, mps.", default="auto")
TRUST = option("--trust-remote-code", "Run code that comes with the model.", default=False)
COPY = option("--model PATH", "Where this machine has the model.")
LIMITS = option("--policy FILE", "Take the thresholds table of a policy: multiples of the floor.")
QUIET = option("--quiet -q", "Print the answer alone, no progress.", OUTPUT, default=False)
VERBOSE = option("--verbose -v", "Print more, and tracebacks with errors.", OUTPUT, default=False)


@dataclass(frozen=True, kw_only=True)
class Output(Options):
    """Says how an answer is printed: the options that nearly every command has."""

    json: bool = option(
        "--json",
        "Print the answer as JSON: stable, versioned, nan and inf as strings.",
        OUTPUT,
        default=False,
    )
    quiet: bool = QUIET
    verbose: bool = VERBOSE

    @property
    def silent(self) -> bool:
        """Is no word of progress printed?"""
        return self.json or self.quiet


OUT = option("--out -o RUN", "Directory, archive or URL; needed.")
FORCE = option("--force", "Replace an existing run.", default=False)
LABEL = option(
    "--label TEXT", "What to call this machine.", OUTPUT, setting=True, machine=True, suite="too"
)
NAME_MAP = option(
    "--map FILE", "Name map (TOML) from the first run's module paths to the second's.", setting=True
)
MODEL_OF_WEIGHTS = option(
    "--model PATH", "Where this machine has the model, for weights that the run does not hold."
)
OPERATORS = option(
    "--operators NAMESPACE",
    "Also run a package's own operators (vllm, flash_attn), on inputs that RUN chose; "
    "repeatable. Default: torch's, transformers' and the device's.",
    default=(),
)
TRUTH = option(
    "--truth TRUTH",
    "A float64 run of `divergence truth`, or a run that carries its truth: it tells the side "
    "that is wrong. Default: the truth that the first run carries.",
)
FLOOR_RUNS = option(
    "--floor RUN",
    "A trusted run like the first: what it shows widens the limits; repeatable.",
    default=(),
)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    force: bool = option(
        "--force", "Compare even where preflight says it is pointless.", default=False
    )
    truth: str | None = TRUTH
    floor: Sequence[str] = FLOOR_RUNS
    layers: Sequence[str] = option(
        "--layers RUN",
        "A run with layers of a side that holds log-probabilities alone; repeatable.",
        default=(),
    )
    name_map: Path | None = NAME_MAP
    device: str = option(
        "--device DEVICE",
        "Where tensors are measured: cpu, or an accelerator that has float64, as cuda:0.",
        default="cpu",
    )


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    policy: str | None = option(
        "--policy FILE", "Policy file, or the name of one: ci (default), strict.", setting=True
    )
    truth: str | None = TRUTH
    floor: Sequence[str] = FLOOR_RUNS
    name_map: Path | None = NAME_MAP


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(Options):
    """Says what two runs are held against, beside each other."""

    truth: str | None = TRUTH
    floor: Sequence[str] = FLOOR_RUNS
    name_map: Path | None = NAME_MAP


@dataclass(frozen=True, kw_only=True)
class TruthOptions(Options):
    model: str | Path | None = COPY
    sites: Sequence[str] = option(
        "--sites SITES",
        "What is recorded, as in capture; repeatable. Default: what the run recorded.",
        default=(),
    )
    max_new_tokens: int | None = option(
        "--max-new-tokens N", "Fewer forwards. Default: as many as the run has."
    )
    device: str = option(
        "--device DEVICE", "cpu, or a device that has float64.", suite="too", default="cpu"
    )
    attn_implementation: str | None = option(
        "--attn-implementation NAME",
        "eager or sdpa. Default: as recorded; eager for fused kernels.",
    )
    trust_remote_code: bool = TRUST
    label: str | None = option(
        "--label TEXT", "What to call it. Default: float64 truth.", OUTPUT, suite="too"
    )


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Options):
    sites: Sequence[str] = option(
        "--site SITE",
        "An operator's site, a glob or re:REGEX; repeatable. Default: all.",
        default=(),
    )
    device: str = option(
        "--device DEVICE",
        "auto, cpu, cuda:0, npu:0, xpu, mps. auto is cpu with --truth.",
        default="auto",
    )
    truth: bool = option("--truth", "Compute in float64: makes a truth.", default=False)
    model: str | None = MODEL_OF_WEIGHTS
    replayed_pass: str | None = option(
        "--pass PASS", "free, anchored or escalated. Default: anchored where it holds operators."
    )
    trust_remote_code: bool = TRUST
    operators: Sequence[str] = OPERATORS
    label: str | None = LABEL


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


@dataclass(frozen=True, kw_only=True)
class MainOptions(Options):
    """Holds what a user of ``capture`` thinks of first: parameters of the function itself."""

    dtype: str | None = option(
        "--dtype DTYPE",
        "float32, bfloat16, float16. Default: auto, as the checkpoint says.",
        MODEL,
        setting=True,
        recorded="settings.dtype",
    )
    device: str = but(DEVICE, panel=MODEL, setting=True, machine=True, suite="too")
    engine: str | None = option(
        "--engine NAME",
        "What runs the model: transformers, compile (torch.compile, block by block), or another "
        "that is installed (a wrong name lists them). Default: transformers, or the recorded one.",
        MODEL,
        setting=True,
        recorded="engine.name",
    )
    attn_implementation: str | None = option(
        "--attn-implementation NAME",
        "eager, sdpa, flash_attention_2. Default: eager, or the recorded one.",
        MODEL,
        setting=True,
        recorded="settings.attn_implementation",
    )
    prompts: Sequence[Any] = option("--prompt TEXT", "A prompt; repeatable.", PROMPTS, default=())
    max_new_tokens: int | None = option(
        "--max-new-tokens N",
        "Tokens to generate: prefill and N - 1 decode steps. Default: 16, or as recorded.",
        PROMPTS,
        minimum=0,
        setting=True,
        recorded="settings.max_new_tokens",
    )
    seed: int | None = option(
        "--seed N",
        "Seed of every generator. Default: 0.",
        REPEATING,
        setting=True,
        recorded="settings.seed",
        suite="too",
    )
    sites: Sequence[str] = option(
        "--sites SITES",
        "blocks, modules, a preset (attention, mlp, norms), a glob, re:REGEX, or ops@MODULE "
        "for every operator inside it (with --train of its backward too); repeatable.",
        RECORDED,
        setting=True,
        recorded="plan.sites",
        suite="too",
        default=(),
    )
    store: str | None = option(
        "--store MODE",
        "full: every byte; sketch: 1-2% of them, differences are estimated; stats: statistics; "
        "hash: digests. Default: full, or as recorded.",
        RECORDED,
        choices=("full", "sketch", "stats", "hash"),
        recorded="plan.store",
    )
    truth: str | None = option(
        "--truth MODE",
        "The run's own anchored pass in float64, which tells the side that is wrong: auto, as "
        "many forwards as fit half of the capture's time, prefills first; full, all, and the "
        "free run; floor, as auto, the sums of A's own error alone (what auto and full keep "
        "with another --store than full); no. Default: auto, with --like no.",
        RECORDED,
        choices=("auto", "full", "floor", "no"),
        setting=True,
    )


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """Says how ``capture`` loads the model, and what may run in it."""

    task: str = option(
        "--task TASK",
        "auto, causal-lm, encoder or encoder-decoder.",
        MODEL,
        choices=("auto", "causal-lm", "encoder", "encoder-decoder"),
        setting=True,
        recorded="model.task",
        default="auto",
    )
    revision: str | None = option(
        "--revision REV", "Branch, tag or commit on the hub.", MODEL, recorded="model.revision"
    )
    device_map: str | Mapping[str, str | int] | None = option(
        "--device-map MAP",
        "Spread the model over devices and disk: auto, balanced, or a JSON file of module to "
        "device (0, cpu, disk).",
        MODEL,
        setting=True,
        machine=True,
    )
    engine_options: Sequence[str] | Mapping[str, str | int | float | bool | None] = option(
        "--engine-option KEY=VALUE",
        "An option of the engine, such as mode=max-autotune; repeatable.",
        MODEL,
        recorded="engine.options",
        default=(),
    )
    trust_remote_code: bool = but(TRUST, panel=MODEL)
    mesh: str | None = option(
        "--mesh AXES",
        "Under torchrun, how its processes divide the work: tp, fsdp, dp, pp, or several with "
        "their sizes: dp=2,tp=4.",
        MODEL,
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options):
    """Says how ``capture`` feeds the prompts: as text of a file or a chat, in batches, padded, in
    chunks."""

    prompts_file: Path | str | None = option(
        "--prompts FILE", "A file of prompts: .txt (one a line), .jsonl or .json.", PROMPTS
    )
    chat: bool = option("--chat", "Put prompts through the chat template.", PROMPTS, default=False)
    batch: bool | None = option(
        "--batch",
        "Run all prompts in one padded batch; with --like also those that ran singly.",
        PROMPTS,
        recorded="settings.batch",
        also=Option(
            "--no-batch",
            "With --like: run each prompt by itself, whatever batch it ran in.",
            REPEATING,
            needs_like=True,
        ),
    )
    batches: str | None = option(
        "--batches LIST",
        "Which prompts run together, and in which places: '0,1 2,3' or '1,0 3,2'.",
        FORMS,
        late=1,
    )
    pad_left: int = option(
        "--pad-left N",
        "N pads more before each prompt than its batch needs.",
        FORMS,
        minimum=0,
        default=0,
        late=1,
    )
    pad_right: int = option(
        "--pad-right N",
        "With --like: N pads behind each prompt, and those that its batch needs; of a causal "
        "language model the prefill alone.",
        FORMS,
        minimum=0,
        default=0,
        late=1,
    )
    use_cache: bool | None = option(
        "--no-cache",
        "Decode without a cache: each step is a forward over the whole sequence, of which its "
        "own token is recorded.",
        FORMS,
        recorded="settings.use_cache",
        late=1,
    )
    prefill_chunk: int | None = option(
        "--prefill-chunk N",
        "Feed the prompt in chunks of N tokens, recorded as one prefill.",
        FORMS,
        minimum=1,
        recorded="settings.prefill_chunk",
        late=1,
    )


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Options):
    """Says what ``capture`` records, in which passes, and what it puts in place of results."""

    steps: str | None = option(
        "--steps STEPS",
        "Forwards to record: 0,4-8 or prefill or decode; 0 is the prefill. Default: all.",
        RECORDED,
        recorded="plan.steps",
    )
    positions: str | None = option(
        "--positions TOKENS",
        "Token positions to record: 0,4-8 or -1 or last:16. Default: all.",
        RECORDED,
        recorded="plan.positions",
    )
    weights: bool = option(
        "--weights",
        "Store the weights that recorded operators use, so that replay needs no model.",
        RECORDED,
        default=False,
    )
    only_changed: bool = option(
        "--only-changed",
        "With --like: store no bytes of tensors that RUN holds bit for bit.",
        REPEATING,
        needs_like=True,
        default=False,
    )
    plants: Sequence[object] = option(
        "--plant SITE=FAULT",
        "Plant a fault, to see that it is found; repeatable. @sample=2,step=5 behind it: in "
        "that prompt's step alone. Of a suite on ranks: CASE=FAULT@RANK.",
        REPEATING,
        default=(),
    )
    substitutes: Sequence[str] | Mapping[str, object] | None = option(
        "--substitute SITE=RUN",
        "Put RUN's recorded result in the place of this operator's; repeatable.",
        REPEATING,
    )
    whole: bool = option(
        "--whole",
        "One more pass: prompt and generated tokens in one forward, to hold the decode steps "
        "against (divergence compare RUN).",
        RECORDED,
        default=False,
    )
    hooks: bool | None = option(
        "--no-hooks",
        "Record what the model returns alone, with no hook in it: to see that hooks change no bit.",
        FORMS,
        recorded="settings.hooks",
        late=1,
    )
    repeat: int = option(
        "--repeat K",
        "Run K times and say whether this machine repeats itself. Default: 1.",
        REPEATING,
        minimum=1,
        suite="too",
        default=1,
    )
    anchor: bool = option(
        "--no-anchor",
        "With --like: leave out the anchored pass.",
        REPEATING,
        needs_like=True,
        default=True,
    )
    escalate: bool = option(
        "--escalate",
        "One more pass, in float32, that sees faults of formula and data below a 16-bit floor: "
        "anchored to the run of --like, or else to this run's own free pass.",
        REPEATING,
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options):
    """Says what ``capture`` does with this machine: threads, switches, memory, processes."""

    threads: int | None = option(
        "--threads N",
        "Threads of torch on the CPU. Default: as many as the process has.",
        MODEL,
        minimum=1,
        setting=True,
        machine=True,
    )
    deterministic: bool | None = option(
        "--no-deterministic",
        "Leave the determinism switches alone.",
        REPEATING,
        setting=True,
        recorded="settings.deterministic",
        suite="too",
    )
    buffer: str | int = option(
        "--buffer SIZE",
        "Host memory that the capture may take beside the model: 64MiB, 2GiB. Default: 512MiB.",
        OUTPUT,
        default="512MiB",
    )
    label: str | None = LABEL
    probe: bool = option(
        "--no-probe", "Leave out the probe of this machine's arithmetic.", suite="too", default=True
    )


@dataclass(frozen=True, kw_only=True)
class CaseOptions(Options):
    """Says what ``capture`` is told of a suite of cases, and of no model."""

    impl: Sequence[str] | Mapping[str, Callable[..., object]] = option(
        "--impl [OP=]NAME",
        "Of a suite: which implementation runs, NAME or OP=MODULE:FUNCTION; repeatable.",
        CASES,
        suite="alone",
        late=1,
        default=(),
    )
    ranks: int | None = option(
        "--ranks N",
        "Of a suite on ranks: start N processes on this machine, in place of torchrun.",
        CASES,
        minimum=2,
        suite="alone",
        late=1,
    )
    link_rate: str | None = option(
        "--link-rate RATE",
        "The stated rate of one link, 400Gb/s or 50GB/s. Of a suite on ranks: to hold the "
        "measured bandwidth against; with --dry-run --train: the time of a step's collectives.",
        CASES,
        suite="alone",
        late=1,
    )


_ADDED: dict[str, type[Options]] = {
    name: placed(place)
    for more in additions("capture").values()
    for name, place in more.groups.items()
}
"""What domains add to ``capture``: their groups."""
_Kind = TypeVar("_Kind", bound=type[Options])


def _with_added(kind: _Kind) -> _Kind:
    """The class with the options of domains, which are fields of it like its own."""
    namespace = {"__module__": __name__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (*_ADDED.values(), kind), namespace)
    return cast(_Kind, dataclass(frozen=True, kw_only=True)(made))


@_with_added
@dataclass(frozen=True, kw_only=True)
class CaptureOptions(
    CaseOptions,
    MachineOptions,
    RecordOptions,
    BatchOptions,
    LoadOptions,
    MainOptions,
):
    """All of them, the last class's first: in the order of ``divergence capture --help``. Those of
    domains come last."""


GROUPS: Mapping[str, type[Options]] = {
    "loading": LoadOptions,
    "batching": BatchOptions,
    "recording": RecordOptions,
    "machine": MachineOptions,
    "cases": CaseOptions,
    **_ADDED,
}
"""The parameters of ``capture`` that take several options each."""


def ungrouped(groups: Mapping[str, Options | None]) -> dict[str, Any]:
    """The options in the groups that were given, by name. Raises UsageError for another type."""
    values: dict[str, Any] = {}
    for name, group in groups.items():
        if group is None:
            continue
        if type(group) is not GROUPS[name]:
            raise UsageError(
                f"{name}={group!r:.60} is {type(group).__name__}, not {GROUPS[name].__name__}",
                hint=f"{name}={GROUPS[name].__name__}(...), of divergence",
            )
        values |= {field.name: getattr(group, field.name) for field in fields_of(GROUPS[name])}
    return values


def renamed(function: str, old: Mapping[str, object], *, beside: Iterable[str]) -> str:
    """Say in one line how ``old`` arguments are written in groups. Raises TypeError for a name that
    is neither an option nor among the other parameters, ``beside``."""
    moved: dict[str, list[str]] = {}
    for name in old:
        place = next((g for g, kind in GROUPS.items() if name in kind.__dataclass_fields__), None)
        if place is None:
            every = [field.name for field in fields_of(CaptureOptions)]
            near = did_you_mean(name, [*beside, *every], count=1)
            raise TypeError(
                f"{function}() has no parameter {name!r}" + (f"; {near}" if near else "")
            )
        moved.setdefault(place, []).append(name)
    groups = (
        f"{place}={GROUPS[place].__name__}({', '.join(f'{name}=...' for name in names)})"
        for place, names in moved.items()
    )
    return (
        f"{function}({', '.join(f'{name}=...' for name in old)}) is now written {', '.join(groups)}"
    )


# The options of what makes runs in order to compare them, and of `repro`.

KEEP = option("--keep DIR", "Keep the runs there; else they are removed.")


@dataclass(frozen=True, kw_only=True)
class LocalizeOptions(Options):
    truth: str | None = option(
        "--truth TRUTH",
        "The float64 run of `divergence truth`, made on A's machine. Default: what A carries, "
        "or made in DIR, there.",
    )
    block: str | None = option("--block PATH", "Go into this block, whatever the comparison says.")
    model: str | None = COPY
    device: str = DEVICE
    here: str = option(
        "--here SIDE",
        "Whose machine this is: reference (A), candidate (B), both, none; auto asks "
        "the runs. What is made must have that run's bits.",
        choices=("auto", "reference", "candidate", "both", "none"),
        default="auto",
    )
    force: bool = option(
        "--force", "Replace what DIR holds of another pair of runs.", default=False
    )
    trust_remote_code: bool = TRUST
    operators: Sequence[str] = OPERATORS


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(Options):
    candidate: str | None = option(
        "--candidate B", "A healthy run captured like RUN. Default: made here, of other kernels."
    )
    truth: str | None = TRUTH
    floor: Sequence[str] = FLOOR_RUNS
    blocks: Sequence[str] = option(
        "--blocks LIST",
        "first, middle, last, all, numbers from 0 or module paths; by commas.",
        commas=True,
        default=("first", "middle", "last"),
    )
    faults: Sequence[str] = option(
        "--faults LIST",
        "scale, update-scale, noise, bias, channel, zero; by commas.",
        commas=True,
        default=("scale", "update-scale", "noise", "bias", "channel"),
    )
    confirm: bool = option(
        "--confirm",
        "Also plant the found sizes in the running model, in one block; needs the model.",
        default=False,
    )
    model: str | None = COPY
    device: str = DEVICE
    trust_remote_code: bool = TRUST


@dataclass(frozen=True, kw_only=True)
class SelfcheckOptions(Options):
    prompts: Sequence[str] = option(
        "--prompt TEXT", "A prompt; repeatable. Default: four of 16 tokens at most.", default=()
    )
    prompts_file: Path | None = option(
        "--prompts FILE", "A file of prompts: .txt (one a line), .jsonl or .json."
    )
    chat: bool = option("--chat", "Put prompts through the chat template.", default=False)
    max_new_tokens: int = option(
        "--max-new-tokens N",
        "Tokens to generate for each prompt. Default: 3.",
        minimum=1,
        default=3,
    )
    dtype: str | None = option("--dtype DTYPE", "float32, bfloat16, float16. Default: auto.")
    device: str = DEVICE
    attn_implementation: str | None = option(
        "--attn-implementation NAME", "Of the base run: eager (default), sdpa."
    )
    only: Sequence[str] = option(
        "--only LIST",
        "again, hooks, threads, batch, place, mates, pads, whole, cache, chunks, attention, "
        "compile; by commas. Default: all but compile, which takes minutes.",
        commas=True,
        default=(),
    )
    truth: bool = option(
        "--truth", "Make the float64 truth too: tells which side of a line is wrong.", default=False
    )
    keep: str | Path | None = KEEP
    trust_remote_code: bool = TRUST


@dataclass(frozen=True, kw_only=True)
class SelftestOptions(Options):
    device: str = DEVICE
    quick: bool = option("--quick", "Leave out the longest steps.", default=False)
    keep: str | Path | None = KEEP


@dataclass(frozen=True, kw_only=True)
class ReproOptions(Options):
    against: str | None = option(
        "--against RUN2", "The other machine's run, best a replay of RUN: its figures stand beside."
    )
    truth: str | None = option("--truth TRUTH", "A float64 replay of RUN. Default: computed here.")
    sample: int | None = option("--sample N", "Which prompt's call.", minimum=0)
    step: int | None = option(
        "--step N",
        "Which forward's call. Default: where RUN2 differs most, else the first.",
        minimum=0,
    )
    model: str | None = MODEL_OF_WEIGHTS
    trust_remote_code: bool = TRUST
    operators: Sequence[str] = OPERATORS
    force: bool = option("--force", "Replace an existing reproducer.", default=False)
