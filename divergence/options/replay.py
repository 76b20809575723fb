"""The options of ``replay``, which runs recorded operators again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from divergence.options.option import Option, Options
from divergence.options.shared import (
    Label,
    ModelOfWeights,
    Operators,
    TrustRemoteCode,
)

__all__ = ["ReplayOptions"]


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
