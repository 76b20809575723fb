"""Progress bars on stderr, only where stderr is a terminal; warnings always."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from divergence.printable import printable

__all__ = ["Progress", "progress_bars"]

Progress = Callable[..., None]
"""``progress(event, done, total, detail)``: what is done, how far, of how much, and where."""


@contextlib.contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[Progress]:
    """A callback that draws one bar per event. The event ``note`` is a warning in ``detail``:
    printed on stderr whether or not there are bars."""
    if quiet or not sys.stderr.isatty():
        yield _only_notes
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    # markup off: a detail is a module path or a file and may hold brackets
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def report(event: str, done: int, total: int | None = None, detail: str = "") -> None:
        if event == "note":
            bars.console.print(Text(f"warning: {printable(detail)}"), soft_wrap=True)
            return
        if event not in tasks:
            tasks[event] = bars.add_task(event, total=total, amount="", detail="")
        amount = f"{done:,}" if total is None else f"{done:,}/{total:,}"
        text = printable(str(detail))[-40:]
        bars.update(tasks[event], completed=done, total=total, amount=amount, detail=text)

    with bars:
        yield report


def _only_notes(event: str, done: int, total: int | None = None, detail: str = "") -> None:
    if event == "note":
        sys.stderr.write(f"warning: {printable(detail)}\n")
