"""The options of ``probe``: which arithmetic is looked at, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from divergence.options.option import Option, Options
from divergence.options.shared import OUTPUT, Device, Label

__all__ = ["ProbeOptions"]


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
