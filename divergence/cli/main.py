"""The command line: one app, one place where errors become exit codes.

0    done, or passed
1    diverged: only `check` and `compare --exit-code`, and nothing else ever
2    wrong usage, unreadable or incomparable input, nothing compared, no verdict
3    a fault of divergence itself
130  interrupted
"""

from __future__ import annotations

import errno
import keyword
import os
import shutil
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from divergence.cli.answers import ARGUMENTS, VERBOSE, Diverged
from divergence.cli.streams import (
    FAULT_CODE,
    interrupted,
    nowhere,
    open_streams,
    other_rank,
    rank0_output,
    stop_code,
)
from divergence.domain import Subcommand, additions, domains, placed
from divergence.errors import DivergenceError, UsageError, exhausted, missing
from divergence.words import printable, printable_lines

USAGE_CODE = 2
_OUTSIDE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
"""What the system refuses, wherever it was asked: no fault of this tool."""
_READER_GONE = (BrokenPipeError, SystemExit)
"""A closed pipe; rich turns it into SystemExit(1) where it prints a help text."""

EPILOG = """
Examples:

  divergence diff Qwen/Qwen3-0.6B --device cuda,cpu   # one machine, one command

  divergence capture Qwen/Qwen3-0.6B -o a    # machine A

  divergence capture --like a -o b           # machine B: the same tokens

  divergence compare a b                     # anywhere: rounding, or a fault?

  divergence truth a -o truth                # machine A: what is right

  divergence compare a b --truth truth       # which side is wrong

  divergence localize a b -o ab              # with the model: the operator

Exit codes: 0 done or passed; 1 diverged (only check, and compare --exit-code); \
2 wrong usage or incomparable runs; 3 a fault of divergence itself; 130 interrupted.
"""

COMMANDS = {
    "diff": ("experiments", "Compare a model under two settings of this machine, in one command."),
    "capture": ("capture", "Run a model and record what happens at chosen sites."),
    "compare": (
        "compare",
        "Compare two runs: the verdict, the first site where they part, and why.",
    ),
    "check": ("check", "Check a run against a golden under a policy."),
    "localize": (
        "experiments",
        "Go from the block to the operator, and prove it; captures what is missing.",
    ),
    "truth": ("capture", "Repeat a run in float64: what is right, and how wide rounding is."),
    "replay": ("runs", "Run each recorded operator again, alone, on its recorded inputs."),
    "sensitivity": (
        "experiments",
        "How small a fault would be seen: by dtype, prompts, passes and limits as they are.",
    ),
    "selfcheck": (
        "experiments",
        "Run a model in every way that must not matter, and see whether the numbers agree.",
    ),
    "repro": (
        "runs",
        "Write one operator as a script that runs anywhere, with its data and a bug report.",
    ),
    "inspect": (
        "runs",
        "Show what a run holds: what ran, where, whether it finished, and which sites.",
    ),
    "pack": (
        "runs",
        "Put a run into one file: a .tar or .zip that is read as it is, without unpacking.",
    ),
    "unpack": (
        "runs",
        "Put a run into a directory: out of an archive, or from a URL with all its bytes.",
    ),
    "bundle": (
        "runs",
        "Put what a vendor or a colleague needs to see of a comparison into one zip.",
    ),
    "env": (
        "runs",
        "Show this machine as a run records it: device, CPU, versions and variables.",
    ),
    "selftest": (
        "experiments",
        "Try every path that touches a device, against this machine's CPU; write one file to send.",
    ),
    "demo": (
        "demo",
        "Show the whole job offline: capture, repeat elsewhere, compare, find a planted fault.",
    ),
}
"""Each command of the core in the order of ``--help``: the module of divergence.cli that has the
function of its name, and the first line of its help, so that ``--help`` imports none of them."""

DAILY = ("diff", "capture", "compare", "check", "localize")
"""The commands that most users need; ``--help`` shows them first."""
_CONTEXT = {"help_option_names": ["-h", "--help"]}


def commands() -> dict[str, Subcommand]:
    """Those of the core and of the domains that are installed, in the order of ``--help``."""
    listed = [
        Subcommand(name, f"divergence.cli.{module}:{name}{'_' * keyword.iskeyword(name)}", line)
        for name, (module, line) in COMMANDS.items()
    ]
    for command in (command for domain in domains() for command in domain.commands):
        names = [other.name for other in listed]
        if command.name in names:
            warnings.warn(
                f"{command.function} is left out: there is a command {command.name} already",
                stacklevel=2,
            )
            continue
        place = names.index(command.after) + 1 if command.after in names else len(names)
        listed.insert(place, command)
    return {command.name: command for command in listed}


class _Command(TyperCommand):
    """A command whose module is imported when it is run."""

    def __init__(self, declared: Subcommand) -> None:
        panel = "Daily" if declared.name in DAILY else "Expert"
        super().__init__(declared.name, help=declared.line, rich_help_panel=panel)
        self.declared = declared

    def load(self) -> Any:
        """The command with its options."""
        from divergence.cli.signature import help_of, typer_command

        name, function = self.declared.name, placed(self.declared.function)
        added = additions(name)
        options = {key: placed(more.options) for key, more in added.items() if more.options}
        text, epilog = help_of(self.declared.line, function, tuple(added.values()))
        alone = typer.Typer(
            add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
        )
        alone.command(name, help=text, epilog=epilog, context_settings=_CONTEXT)(
            typer_command(function, options)
        )
        return get_command(alone)

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        return self.load().make_context(*arguments, **extra)


class _Group(TyperGroup):
    """Turns every way in which a command can end into an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: _Command(declared) for name, declared in commands().items()}

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        given = list(args)
        try:
            context = super().make_context(info_name, args, *rest, **extra)
        except _READER_GONE:  # --help into `head`
            raise _reader_gone() from None
        context.meta[ARGUMENTS] = given
        return context

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except _READER_GONE:
            raise _reader_gone() from None
        except BaseException as error:
            raise self._ending(ctx, error) from None

    def _ending(self, ctx: Any, error: BaseException) -> BaseException:
        """Prints an error of a command; returns what to raise for its exit code."""
        # a library may have made an error of an interruption
        if interrupted() or isinstance(error, KeyboardInterrupt | EOFError | typer.Abort):
            left = [str(item) for item in error.args if isinstance(item, Path) and item.exists()]
            so_far = f"; what was recorded so far is in {' and '.join(left)}" if left else ""
            _say(f"interrupted{so_far}")
            return typer.Exit(stop_code())
        if spent := exhausted(error):
            if not ctx.meta.get(VERBOSE):
                traceback.clear_frames(error.__traceback__)  # frees what they hold
            error = spent.with_traceback(error.__traceback__)
        elif lacking := missing(error):
            error = lacking.with_traceback(error.__traceback__)
        elif isinstance(error, OSError) and error.errno in _OUTSIDE:
            where = error.filename and os.fsdecode(error.filename)[:500]
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            error = UsageError(
                f"the system refuses: {os.strerror(error.errno)}",
                where=where,
                hint=f"{'free some space, or ' * full}choose another place",
            )
        if isinstance(error, DivergenceError):
            if ctx.meta.get(VERBOSE):
                _say(traceback.format_exc())
            _say(f"error: {error}", fault=error.exit_code == FAULT_CODE)
            return typer.Exit(error.exit_code)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            # typer's own: it prints the usage, and 1 is not its to give
            error.exit_code = max(error.exit_code, USAGE_CODE)
            return error
        if ctx.meta.get(VERBOSE):
            _say(traceback.format_exc())
            hint = "report this with the traceback above"
        else:
            hint = "run the command again with -v for the traceback, and report it"
        text = printable(str(error)[:500])
        text = f"fault in divergence: {type(error).__name__}: {text}\n  try:   {hint}"
        _say(text, fault=True)
        return typer.Exit(FAULT_CODE)


def _reader_gone() -> typer.Exit:
    """The exit after `| head` has read enough: not 1, which is an answer, and not 0, since the
    answer was not delivered."""
    nowhere()
    return typer.Exit(USAGE_CODE)


def _say(text: str, *, fault: bool = False) -> None:
    """Prints to stderr. Ranks other than 0 print faults alone, which are their own."""
    from divergence.layout import write_text

    rank = other_rank() if fault else None
    if rank is not None and sys.__stderr__ is not None:
        write_text(printable_lines(f"rank {rank}: {text}") + "\n", file=sys.__stderr__)
        return
    write_text(_folded(printable_lines(text)) + "\n", file=sys.stderr)


def _folded(text: str) -> str:
    """Fold sentences for a terminal and leave commands as they are, so that they can be copied."""
    if not sys.stderr.isatty():
        return text
    from divergence.layout import MAX_WIDTH, Line, Span, fold

    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    lines = []
    for line in text.split("\n"):
        lead = line[: len(line) - len(line.lstrip())]
        hang = None if "divergence " in line else len(lead) + 9 * line.startswith("  try:")
        item = Line((Span(lead), Span(line[len(lead) :])), hang=hang)
        lines += [piece.text for piece in fold(item, width)]
    return "\n".join(lines)


app = typer.Typer(
    name="divergence",
    cls=_Group,
    no_args_is_help=True,
    epilog=EPILOG,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=_CONTEXT,
)


def _version(value: bool) -> None:
    if value:
        from divergence import __version__

        sys.stdout.write(f"divergence {__version__}\n")
        raise typer.Exit


@app.callback()
def divergence(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, metavar="", help="Print the version."
        ),
    ] = False,
) -> None:
    """Find why the same language model gives different numbers on different hardware.

    A run is one execution of a model, recorded; every question is a comparison of runs.
    """


_library_text = warnings.formatwarning


def _warning_text(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Our own warnings in one line; those of libraries with the place that Python names."""
    if not filename.startswith(os.path.dirname(os.path.dirname(__file__)) + os.sep):
        return _library_text(message, category, filename, lineno, line)
    return f"warning: {printable(str(message))}\n"


def run() -> None:
    """The console script, which ends with 1 for a verdict alone: Python and its libraries end with
    1 for whatever nobody caught."""
    open_streams()
    warnings.formatwarning = _warning_text
    try:
        with rank0_output():
            try:
                app(prog_name="divergence")
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        nowhere()
        sys.exit(USAGE_CODE)
    except SystemExit as ended:
        code = ended.code
        if code == 1 and not isinstance(ended.__context__, Diverged):
            code = FAULT_CODE
        # typer knows of Ctrl-C alone
        sys.exit(stop_code() if interrupted() and code in (130, FAULT_CODE) else code)
    except DivergenceError as error:  # a help text that had nowhere to go
        _say(f"error: {error}")
        sys.exit(error.exit_code)
