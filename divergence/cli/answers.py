"""Commands print through here: the answer on stdout, progress and warnings on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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


def show_json(parts: Iterable[str]) -> None:
    """One answer as JSON, which is printable as it is, in pieces to stdout."""
    from divergence.layout import write_text

    for part in parts:
        write_text(part)
    write_text("\n")


def show_document(
    document: Document, output: Output, *, json: Callable[[], str], quiet: str | None = None
) -> None:
    """An answer as JSON, as its headline with ``--quiet`` (or what ``quiet`` is), or whole."""
    from divergence.layout import print_lines
    from divergence.report.text import document_lines, headline_lines

    if output.json:
        show_json([json()])
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
        wanted = not quiet and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "0") in ("", "0")
        lines = _Lines() if wanted else None

        def only_text(event: str, done: int, total: int | None = None, detail: str = "") -> None:
            if text := message(event, detail):
                sys.stderr.write(f"{text}\n")
            elif event not in _SAID:
                _begin(event)
                if lines is not None:
                    lines.note(event, done, total, detail)

        with contextlib.nullcontext() if lines is None else lines.printed():
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
        if event in _SAID:
            if text := message(event, detail):
                bars.console.print(Text(text))
            return
        _begin(event)
        if event not in tasks:
            tasks[event] = bars.add_task(event, total=total, amount="", detail="")
        amount = _amount(done, total)
        shown = printable(str(detail))[-40:]
        bars.update(tasks[event], completed=done, total=total, amount=amount, detail=shown)

    with bars:
        yield report


_SAID = ("note", "taken")
"""Events that are sentences, not parts of the work."""


def _begin(event: str) -> None:
    """Once the model is loaded, what was imported stays."""
    if event != "load":
        from divergence.cli.garbage import release

        release()


def _amount(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


class _Lines:
    """Progress where stderr is no terminal: once the work has taken two seconds a line at the start
    of each part, and one every 15 s, also of a part that says nothing for minutes."""

    AFTER_S, EVERY_S = 2.0, 15.0

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._done, self._lock = threading.Event(), threading.Lock()
        self._event = self._text = "begin"
        self._printed_event = ""

    def note(self, event: str, done: int, total: int | None, detail: str) -> None:
        amount = "" if total is None and not done else _amount(done, total)
        text = ", ".join(filter(None, [amount, printable(str(detail))[-60:]]))
        self._event, self._text = event, f"{event}: {text}" if text else event
        if event != self._printed_event and time.monotonic() - self._begun > self.AFTER_S:
            self._print(again=False)

    @contextlib.contextmanager
    def printed(self) -> Iterator[None]:
        thread = threading.Thread(target=self._tick, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _tick(self) -> None:
        if not self._done.wait(self.AFTER_S):
            self._print(again=False)
        while not self._done.wait(self.EVERY_S):
            self._print(again=True)

    def _print(self, *, again: bool) -> None:
        with self._lock:
            if again or self._event != self._printed_event:
                self._printed_event = self._event
                sys.stderr.write(f"{self._text} ({time.monotonic() - self._begun:.0f} s)\n")
