"""What commands print: the answer on stdout, progress and warnings on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from divergence.words import Progress, printable, printable_lines, shortened

if TYPE_CHECKING:
    from divergence.document import Document
    from divergence.options.commands import Output

ARGUMENTS = "divergence.arguments"
"""Context key: the command line as it was given."""
_LONGEST = 2_000
VERBOSE = "divergence.verbose"
"""Context key: whether errors print their traceback."""


class Diverged(typer.Exit):
    """Exit code 1: an answer. Whatever else ends with 1 did not give it (main.py)."""

    def __init__(self) -> None:
        super().__init__(1)


def exit_with(code: int) -> NoReturn:
    """Ends a command with the exit code of its answer."""
    raise Diverged if code == 1 else typer.Exit(code)


def show(text: str) -> None:
    """One answer in text form, to stdout."""
    from divergence.layout import write_text

    write_text(printable_lines(text.removesuffix("\n")) + "\n")


def show_document(
    document: Document, output: Output, *, json: Callable[[], str], quiet: str | None = None
) -> None:
    """An answer as JSON, as its headline with ``--quiet`` (or what ``quiet`` is), or whole."""
    from divergence.layout import print_lines
    from divergence.report.text import document_lines, headline_lines

    if output.json:
        show(json())
    elif output.quiet and quiet is not None:
        show(quiet)
    elif output.quiet:
        print_lines(headline_lines(document.headline), whole=True)
    else:
        print_lines(document_lines(document, verbose=output.verbose, every=output.verbose))


def answer_json(**parts: Any) -> str:
    """The JSON of what has no class of its own."""
    import msgspec

    from divergence.comparison.result import strict_json

    return strict_json({"schema_version": 1, **msgspec.to_builtins(parts, enc_hook=str)})


def write_text(text: str, path: Path, *, what: str) -> None:
    """A file beside the answer; ``-`` is stdout."""
    if str(path) == "-":
        show(text)
    else:
        from divergence.output import write_output

        write_output(text, path, what=what)


def show_made(run: Any, output: Output, document: Document) -> None:
    """A run that was made: its path with ``--quiet``, path and manifest as JSON."""
    if run.manifest.mesh is not None and os.environ.get("RANK", "0") != "0":
        return  # the first rank speaks for all
    path = str(run.path)
    show_document(
        document, output, json=lambda: answer_json(path=path, manifest=run.manifest), quiet=path
    )


def show_captured(run: Any, output: Output, *, like: str | None) -> None:
    """A run that was captured. ``like``: the run that it repeats."""
    from divergence.report.capturing import captured_document

    show_made(run, output, captured_document(str(run.path), run.manifest, run.records, like=like))


def show_copy(what: str, run: Any, output: Output) -> None:
    """A run that was ``what``: packed, unpacked."""
    from divergence.report.capturing import copied_document

    path, num = str(run.path), len(run.records)
    show_made(run, output, copied_document(what, path, run.manifest, num))


@contextlib.contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[Progress]:
    """A callback that draws one bar per event. The event ``note`` is a warning in ``detail``:
    printed on stderr whether or not there are bars. The detail of ``taken`` says what is used of a
    run that is repeated: printed once for each run, and not if ``quiet``."""
    named: set[str] = set()

    def message(event: str, detail: str) -> str | None:
        if event == "note":
            return f"warning: {shortened(printable(detail), _LONGEST)}"
        run = detail.partition(": ")[0]
        if event != "taken" or quiet or run in named:
            return None
        named.add(run)
        return shortened(printable(detail), _LONGEST)

    if quiet or not sys.stderr.isatty():

        def only_text(event: str, done: int, total: int | None = None, detail: str = "") -> None:
            if text := message(event, detail):
                sys.stderr.write(f"{text}\n")

        yield only_text
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
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
        if event in ("note", "taken"):
            if text := message(event, detail):
                bars.console.print(Text(text))
            return
        if event not in tasks:
            tasks[event] = bars.add_task(event, total=total, amount="", detail="")
        amount = f"{done:,}" if total is None else f"{done:,}/{total:,}"
        shown = printable(str(detail))[-40:]
        bars.update(tasks[event], completed=done, total=total, amount=amount, detail=shown)

    with bars:
        yield report
