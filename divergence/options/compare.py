"""The options of ``compare``, and those of ``check``, which compares under a policy."""

from __future__ import annotations

from typing import Annotated

from divergence.options.option import Option, Options
from divergence.options.shared import FloorRuns, NameMap, Truth

__all__ = ["CheckOptions", "CompareOptions"]


class CompareOptions(Options, frozen=True, kw_only=True):
    force: Annotated[
        bool, Option("--force", "Compare even where preflight says it is pointless.")
    ] = False
    truth: Truth = None
    floor: FloorRuns = ()
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
