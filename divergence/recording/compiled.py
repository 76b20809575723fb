"""A watch notes what torch compiled while a capture ran, region by region.

Whether a module really ran compiled is taken from torch: its list of compilations, and its warnings
that a limit of recompilations was reached, after which calls run eager. Torch does not say it call
by call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from divergence.recording.code import layers
from divergence.recording.structure import compiled_regions, inside, listed
from divergence.run.manifest import CompiledNote
from divergence.run.site import ROOT

_LIMIT = "torch._dynamo hit config."
_MOST_EVENTS = 1 << 14


class CompiledWatch:
    """Watches what torch compiles while a capture runs; ``notes()`` then says it by region. Costs
    nothing, and imports nothing of torch's compiler, where no module was given to it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._regions = compiled_regions(model)
        self._events: Callable[[], list[Any]] | None = None
        self._before = 0
        self._limits: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[CompiledWatch]:
        """Note what is compiled meanwhile."""
        if not self._regions:
            yield self
            return
        import torch._dynamo.utils as dynamo

        logger = logging.getLogger("torch._dynamo.convert_frame")
        handler = _Limits(self._limits)
        try:
            dynamo.set_compilation_metrics_limit(_MOST_EVENTS)
            self._before = len(dynamo.get_compilation_metrics())
            self._events = dynamo.get_compilation_metrics
        except AttributeError:  # a torch that counts otherwise
            self._events = None
        logger.addHandler(handler)
        try:
            yield self
        finally:
            logger.removeHandler(handler)

    def beforehand(self, operators: set[str], recorded: set[str]) -> list[str]:
        """Say in words what cannot be recorded of compiled modules. ``operators``: modules whose
        operators are recorded; ``recorded``: modules whose tensors are."""
        notes = []
        among = [
            path
            for path in self._regions
            if inside(path, operators) or any(inside(root, (path,)) for root in operators)
        ]
        if among:
            notes.append(
                f"{listed(among)} runs through torch.compile: while operators are recorded torch "
                "runs it uncompiled, so they are not those of its compiled kernels"
            )
        divided = [
            path
            for path in self._regions
            if path not in among and any(sub != path and inside(sub, (path,)) for sub in recorded)
        ]
        if divided:
            notes.append(
                f"{listed(divided)} runs through torch.compile, and modules inside are recorded: "
                "there its graph is divided, and kernels that would span such a place are not seen"
            )
        return notes

    def afterwards(self) -> list[str]:
        """Say in words what did not run compiled."""
        groups: dict[tuple[str, str | None], list[str]] = {}
        for path, note in self.notes().items():
            if note.state in ("eager", "partly"):
                groups.setdefault((note.state, note.reason), []).append(path)
        say = {"eager": "ran eager", "partly": "ran eager in part"}
        return [
            f"given to torch.compile, but {say[state]}: {listed(paths)} ({reason})"
            for (state, reason), paths in groups.items()
        ]

    def notes(self) -> dict[str, CompiledNote]:
        """Note what became of each region, by path."""
        return {path: self._note(path, backend) for path, backend in self._regions.items()}

    def _note(self, path: str, backend: str) -> CompiledNote:
        if self._events is None:
            return CompiledNote(
                backend=backend, state="unknown", reason="this torch does not tell what it compiled"
            )
        codes, seen = self._codes(path), list(self._events())[self._before :]
        events = [event for event in seen if _code_of(event) in codes]
        made = [event for event in events if not getattr(event, "fail_type", None)]
        graphs = sum(1 for event in made if getattr(event, "graph_op_count", None))
        lost = [event for event in seen if _code_of(event)[0] is None]  # of any region
        failed = [event for event in (*events, *lost) if getattr(event, "fail_type", None)]
        places = {f"{file}:{line}" for file, line in codes}
        limits = [limit for limit, place in self._limits if place in places]
        if graphs == 0:
            why = _reason(failed) or "torch compiled nothing of it here"
            return CompiledNote(backend=backend, state="eager", reason=why)
        reason = _reason(failed)
        if limits:
            reason = f"{limits[0]} was reached: calls beyond it ran eager"
        elif not any(event in events for event in failed):
            reason = None
        return CompiledNote(
            backend=backend,
            state="compiled" if reason is None else "partly",
            num_graphs=graphs,
            num_recompilations=sum(
                1 for event in made if getattr(event, "recompile_reason", None) is not None
            ),
            graph_breaks=sorted({text for event in made for text in _graph_breaks(event)}),
            reason=reason,
        )

    def _codes(self, path: str) -> set[tuple[str, int]]:
        """File and line of each function that may be compiled as a frame of this region."""
        module = self._model.get_submodule("" if path == ROOT else path)
        codes = set()
        for submodule in module.modules():
            for function in (submodule.__dict__.get("forward"), type(submodule).forward):
                for each in layers(function):
                    codes.add((each.__code__.co_filename, each.__code__.co_firstlineno))
        return codes


def _code_of(event: Any) -> tuple[str | None, int | None]:
    return (getattr(event, "co_filename", None), getattr(event, "co_firstlineno", None))


def _graph_breaks(event: Any) -> Iterator[str]:
    """Yield why code was left to Python, each reason in a line. (torch also starts anew for reasons
    of its own; it explains those of its user's code.)"""
    for reason in getattr(event, "restart_reasons", None) or ():
        head, explained, _ = str(reason).partition("Explanation:")
        if explained:
            yield head.strip()[:160]


def _reason(failed: list[Any]) -> str | None:
    """Say why torch did not compile, in one line and without a directory."""
    if not failed:
        return None
    text = getattr(failed[0], "fail_reason", None) or failed[0].fail_type
    line = (str(text).strip().splitlines() or ["no reason given"])[0]
    return f"torch could not compile it: {line[:160]}"


class _Limits(logging.Handler):
    """Keeps torch's warnings that a limit of recompilations was reached: (limit, place)."""

    def __init__(self, limits: list[tuple[str, str]]) -> None:
        super().__init__(logging.WARNING)
        self._found = limits

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(_LIMIT) or not isinstance(record.args, tuple):
            return
        name, value, function, *_ = (*record.args, "", "", "")
        place = str(function).rpartition("(")[2].rstrip(")")
        self._found.append((f"torch._dynamo.config.{name} ({value})", place))
