"""The options of every command but ``capture``, and those that several commands have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from divergence.errors import UsageError
from divergence.options.option import Option, Options

__all__ = [
    "DEVICE",
    "LIMITS",
    "MODEL",
    "OUTPUT",
    "PROMPTS",
    "RECORDED",
    "REPEATING",
    "SERVER",
    "TRUST",
    "CheckOptions",
    "CompareOptions",
    "Device",
    "DoctorOptions",
    "FloorRuns",
    "Force",
    "Json",
    "Label",
    "Model",
    "ModelOfWeights",
    "Operators",
    "Out",
    "Output",
    "ProbeOptions",
    "Quiet",
    "ReplayOptions",
    "TrustRemoteCode",
    "Truth",
    "TruthOptions",
    "Verbose",
    "link_rate",
]

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
        "--model PATH",
        "Where this machine has the model, for weights that the run does not hold.",
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
        "A float64 run of `divergence truth`, which tells the side that is wrong. Default: the "
        "truth that the first run carries.",
    ),
]
FloorRuns = Annotated[
    Sequence[str],
    Option(
        "--floor RUN",
        "A trusted run like the first: what it shows widens the limits; repeatable.",
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
            "--policy FILE",
            "Policy file, or the name of one: ci (default), strict.",
            setting=True,
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
        int | None,
        Option("--max-new-tokens N", "Fewer forwards. Default: as many as the run has."),
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
