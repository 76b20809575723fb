"""Progress bars on stderr, only where stderr is a terminal; warnings always."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from divergence.printable import printable
from divergence.words import Progress

__all__ = ["progress_bars"]


@contextlib.contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[Progress]:
    """A callback that draws one bar per event. The event ``note`` is a warning in ``detail``:
    printed on stderr whether or not there are bars. ``taken`` says there what is used of a run that
    is repeated: once for each run, and not if ``quiet``."""
    said: set[str] = set()

    def is_new(detail: str) -> bool:
        run = detail.partition(": ")[0]
        if quiet or run in said:
            return False
        said.add(run)
        return True

    if quiet or not sys.stderr.isatty():

        def only_text(event: str, done: int, total: int | None = None, detail: str = "") -> None:
            if event == "note":
                sys.stderr.write(f"warning: {printable(detail)}\n")
            elif event == "taken" and is_new(detail):
                sys.stderr.write(f"{printable(detail)}\n")

        yield only_text
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    # markup off: a detail is a module path or a file and may hold brackets
    bars = RichProgress(
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
        if event == "taken":
            if is_new(detail):
                bars.console.print(Text(printable(detail)), soft_wrap=True)
            return
        if event not in tasks:
            tasks[event] = bars.add_task(event, total=total, amount="", detail="")
        amount = f"{done:,}" if total is None else f"{done:,}/{total:,}"
        text = printable(str(detail))[-40:]
        bars.update(tasks[event], completed=done, total=total, amount=amount, detail=text)

    with bars:
        yield report
