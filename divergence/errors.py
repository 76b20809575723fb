"""Every error a user can meet: what happened, where, and what to try.

The message is one sentence. ``where`` names the file, record, site or step and ``hint`` says what
to try; both are printed under the message. All three may quote a run, so each is made printable: no
text of a run can add a line.
"""

from __future__ import annotations

import re
import signal

from divergence.words import printable

_MAX_LETTERS = 2_000
"""Of each part of an error: names that it quotes may be of any length."""


def _cut(text: str) -> str:
    if len(text) > _MAX_LETTERS:  # what is wrong mostly stands behind the name
        text = f"{text[: _MAX_LETTERS // 2]} ... {text[-_MAX_LETTERS // 2 :]}"
    return printable(text)


class DivergenceError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the command line returns: 2 for
    what the user can change, 3 for a fault of this tool."""

    exit_code = 3

    def __init__(
        self, message: str, *, where: str | None = None, hint: str | tuple[str, ...] | None = None
    ) -> None:
        message = _cut(message)
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = self.message
        if self.where:
            text += f"\n  where: {_cut(self.where)}"
        if self.hint:
            lines = (self.hint,) if isinstance(self.hint, str) else self.hint
            text += "\n  try:   " + "\n         ".join(map(_cut, lines))
        return text


class UsageError(DivergenceError):
    """A request that cannot be carried out as it was put."""

    exit_code = 2


class RenamedWarning(UserWarning):
    """A name of an earlier version was used; the message says how it is written now."""


class ConfigError(UsageError):
    """A policy, preset, name map or settings file that cannot be read as such."""


class PlantError(UsageError):
    """A ``SITE=FAULT`` that cannot be parsed, or a site that cannot be planted."""


class ModelError(DivergenceError):
    """A model that cannot be found, loaded or run."""

    exit_code = 2


class PromptError(DivergenceError):
    """Prompts that cannot be read."""

    exit_code = 2


class RunError(DivergenceError):
    """A run on disk that cannot be read or written."""

    exit_code = 2


class DumpError(DivergenceError):
    """Something that another tool dumped cannot be read, or is not whole."""

    exit_code = 2


class EndpointError(DivergenceError):
    """A server that cannot be reached, refuses, or answers something else than was asked.
    ``status``: its code, where it gave one."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        where: str | None = None,
        hint: str | tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.status = status


class RunExistsError(RunError):
    """The output holds something already; it is never overwritten without ``--force``."""


class RunFormatError(RunError):
    """A manifest, record or shard that breaks docs/dump-format.md."""


class RunWriteError(RunError):
    """Writing failed (disk full, read-only); finished shards are intact and readable."""


class IncomparableError(DivergenceError):
    """The runs have nothing in common, so nothing was compared."""

    exit_code = 2


class FaultError(DivergenceError):
    """A fault of divergence itself; please report it."""


class ExhaustedError(DivergenceError):
    """Memory ran out, or a process was killed, which is most often the same."""


_SMALLER = "fewer or shorter prompts, fewer sites, --store sketch, or a machine with more memory"
_NO_MEMORY = re.compile(
    r"out of memory|allocate memory(?! in static)|bad_alloc|"
    r"enforce fail at alloc|failed to map segment|can't start new thread",
    re.IGNORECASE,
)


def exhausted(error: BaseException) -> ExhaustedError | None:
    """Return the error that says that memory ran out: ``error``, or what it was made of; None where
    none does."""
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return None
        text = str(link).strip()
        if (
            isinstance(link, MemoryError)
            or type(link).__name__ == "OutOfMemoryError"
            or (isinstance(link, RuntimeError | OSError | ImportError) and _NO_MEMORY.search(text))
        ):
            what = f": {text.splitlines()[0][:200]}" if text else ""
            return ExhaustedError(
                f"memory ran out{what}", hint=getattr(error, "hint", None) or _SMALLER
            )
        link = link.__cause__ or link.__context__
    return None


def missing(error: BaseException) -> UsageError | None:
    """Return the error that says that torch or transformers is not installed, where that is what
    went wrong."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name not in ("torch", "transformers"):
        return None
    return UsageError(
        f"this needs {name}, which is not installed here",
        hint=(
            "pip install torch transformers",
            "what needs neither: compare, check, inspect and view, of runs without operators",
        ),
    )


def check_process(code: int, what: str) -> None:
    """Raises ExhaustedError where the process ``what`` was killed, and KeyboardInterrupt where it
    was interrupted. ``code``: as subprocess returns it."""
    if code in (128 + signal.SIGINT, -signal.SIGINT):
        raise KeyboardInterrupt
    if code < 0:
        raise ExhaustedError(
            f"{what} was killed by signal {-code}",
            hint="most often memory ran out (the system's log says so): " + _SMALLER,
        )


def first_line(error: BaseException, *, most: int = 200) -> str:
    """Say what another library raised, in one line of at most so many characters; its type's name
    where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]
