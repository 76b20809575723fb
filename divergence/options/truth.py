"""The options of ``truth``: what of a run is repeated in float64, and where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from divergence.options.option import Option, Options
from divergence.options.shared import COPY, OUTPUT, TrustRemoteCode

__all__ = ["TruthOptions"]


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
