"""Options that several commands have: one definition each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from divergence.options.option import Option

__all__ = [
    "COPY",
    "DEVICE",
    "LIMITS",
    "MODEL",
    "OUTPUT",
    "PROMPTS",
    "RECORDED",
    "REPEATING",
    "TRUST",
    "Device",
    "FloorRuns",
    "Force",
    "Json",
    "Label",
    "Model",
    "ModelOfWeights",
    "NameMap",
    "Operators",
    "Out",
    "Quiet",
    "TrustRemoteCode",
    "Truth",
    "Verbose",
]

MODEL, PROMPTS, RECORDED = "Model", "Prompts", "What is recorded"
REPEATING, OUTPUT = "Repeating a run", "Output"

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
Out = Annotated[str | None, Option("--out -o RUN", "Directory, archive or URL; needed.")]
Force = Annotated[bool, Option("--force", "Replace an existing run.")]
Label = Annotated[
    str | None,
    Option(
        "--label TEXT", "What to call this machine.", OUTPUT, setting=True, machine=True, suite=True
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
    Option("--truth TRUTH", "The float64 run of `divergence truth`: tells which side is wrong."),
]
FloorRuns = Annotated[
    Sequence[str],
    Option(
        "--floor RUN",
        "A trusted run like the first: what it shows widens the limits; repeatable.",
    ),
]
