"""The truth: a float64 run that tells which side of a comparison is farther from what is right.

It must repeat the run whose inputs anchor the comparison: only then did every block of
all three runs get the same input. Operators that were replayed are judged by a replay in
float64 of the same run and pass, and by nothing else. TruthSamples gather, site by site and phase
by phase, how far each side is from it: blocks.blame judges them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from divergence.comparison.align.pairs import replayed_from
from divergence.comparison.align.pieces import Pair
from divergence.comparison.preflight.code import other_code
from divergence.comparison.results import SiteResult
from divergence.errors import IncomparableError, UsageError
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.record import Record

if TYPE_CHECKING:
    import numpy as np

    from divergence.numerics.pairs import AgainstTruth

__all__ = ["MIN_ROWS", "ChannelSums", "SamplesBySite", "Truth", "TruthSamples", "inputs_of"]


class Truth:
    """A truth run, checked to belong to the comparison of ``reference`` and ``candidate``.

    Raises UsageError where it is no truth or another run's, IncomparableError for other weights and
    for other code, where both manifests tell it.
    """

    def __init__(self, run: Run, reference: Run, candidate: Run) -> None:
        self.run = run
        manifest, a, b = run.manifest, reference.manifest, candidate.manifest
        replayed = replayed_from(a, b)
        make = command_line("truth", reference.path, o="TRUTH")
        if replayed is not None:
            source = next((side.path for side in (reference, candidate)
                           if side.manifest.id == replayed[0]), "RUN")  # fmt: skip
            make = command_line("replay", source, o="TRUTH", truth=True)
        if manifest.settings.compute_dtype != "float64":
            raise UsageError(
                f"{run.path} is no truth: it was computed in "
                f"{manifest.settings.compute_dtype or manifest.model.dtype}",
                hint=make,
            )
        if manifest.id in (a.id, b.id):
            raise UsageError(
                f"{run.path} is one of the two runs that are compared: it cannot judge itself",
                hint="divergence compare A B --truth TRUTH, with two other runs",
            )
        if manifest.like not in (a.id, b.id, a.plan.anchored_to, b.plan.anchored_to):
            raise UsageError(
                f"{run.path} is the truth of another run ({manifest.like})",
                hint=make,
            )
        repeated = a if manifest.like != b.id else b
        from divergence.comparison.preflight.weights import other_weights

        if other_weights(repeated, manifest):
            raise IncomparableError(
                "the truth was computed with other weights than the run it repeats",
                where=f"{run.path} ({manifest.model.digest[:12]}, "
                f"there {repeated.model.digest[:12]})",
                hint="divergence truth RUN -o TRUTH --model PATH, with the run's own weights",
            )
        made_otherwise = other_code(repeated, manifest)
        if made_otherwise:
            raise IncomparableError(
                "the truth was made by other code than the run it repeats: "
                + ", ".join(made_otherwise[:5]),
                where=str(run.path),
                hint=f"on the machine that made {repeated.id}: divergence truth RUN -o TRUTH",
            )
        self.path = None if run.path in (reference.path, candidate.path) else run.path
        """What names it in a command; None for what a run carries, which needs no name."""
        self._named_by_candidate = manifest.like == b.id
        self.anchored_pass = "anchored"
        inputs = _anchored_to(reference, candidate)
        self.anchors = inputs is not None and inputs == manifest.plan.anchored_to
        own = (manifest.plan.anchored_to, manifest.plan.replayed_pass)
        if manifest.plan.replayed_pass is not None or replayed is not None:
            self.anchored_pass, self.anchors = "replayed", own == replayed
        if replayed is not None and not self.anchors:
            raise UsageError(
                f"{run.path} is no truth of replayed operators: it did not run each by itself"
                if manifest.plan.replayed_pass is None
                else f"{run.path} holds the operators of the {own[1]} pass, not of the "
                f"{replayed[1]} pass",
                hint=make,
            )

    def record(self, pair: Pair) -> Record | None:
        """What is right at a pair's place; None where the truth does not hold it."""
        pass_ = "free" if pair.pass_ == "free" else self.anchored_pass
        if pass_ != "free" and not self.anchors:
            return None
        own = pair.candidate.record if self._named_by_candidate else pair.reference.record
        record = self.run.find((pass_, own.sample, own.step, own.site))
        if record is None or record.shape != own.shape or record.positions != own.positions:
            return None
        return record


def inputs_of(reference: Run, candidate: Run) -> Run | None:
    """The run whose recorded inputs anchored the pairs, where it is one of the two."""
    a, b = reference.manifest, candidate.manifest
    if b.plan.anchored_to == a.id:
        return reference
    return candidate if a.plan.anchored_to == b.id else None


def _anchored_to(reference: Run, candidate: Run) -> str | None:
    """The id of the run whose inputs the anchored pairs got."""
    run = inputs_of(reference, candidate)
    if run is not None:
        return run.manifest.id
    a, b = reference.manifest.plan.anchored_to, candidate.manifest.plan.anchored_to
    return a if a == b else None


MIN_ROWS = 8
"""Fewer rows tell nothing about one channel, or about a scale."""


@functools.cache
def _no_channels() -> np.ndarray:
    import numpy as np

    return np.zeros((6, 0))  # a slice of the channels would keep them all


class ChannelSums:
    """Over the forwards of a site, column by column: what ``AgainstTruth.channels`` (6, D) of each
    come to. Those of all forwards would take 48 D bytes each."""

    def __init__(self) -> None:
        self.is_mixed = False
        """Do the forwards differ in D? Then the sums are of some of them."""
        self.num_alone = 0
        """Forwards of one row."""
        self._sums: np.ndarray | None = None

    def add(self, against: AgainstTruth) -> None:
        """One more forward."""
        import numpy as np

        channels = against.channels
        if not against.num_rows:
            return
        if self._sums is None:
            self._sums = np.zeros((10, channels.shape[1]))
        elif self._sums.shape[1] != channels.shape[1]:
            self.is_mixed = True
            return
        self._sums[:6] += channels
        if against.num_rows >= MIN_ROWS:
            self._sums[6:8] += channels[4:]
        elif against.num_rows == 1:
            self.num_alone += 1
            np.maximum(self._sums[8:], channels[:2], out=self._sums[8:])

    @property
    def total(self) -> np.ndarray:
        """(6, D): the sums over all forwards."""
        assert self._sums is not None
        return self._sums[:6]

    @property
    def largest_of_long(self) -> np.ndarray:
        """(2, D): of the forwards of MIN_ROWS rows or more, the sums of the largest row."""
        assert self._sums is not None
        return self._sums[6:8]

    @property
    def largest_alone(self) -> np.ndarray:
        """(2, D): of the forwards of one row, the largest."""
        assert self._sums is not None
        return self._sums[8:]


@dataclass(slots=True)
class TruthSamples:
    """One site in one pass and phase: ``forwards`` in order, without their channels but with each
    row's floor (T,)."""

    forwards: list[tuple[SiteResult, AgainstTruth, np.ndarray]] = field(default_factory=list)
    channels: ChannelSums = field(default_factory=ChannelSums)
    _gathered: list[Any] = field(default_factory=list)

    def add(self, result: SiteResult, against: AgainstTruth, floor: np.ndarray) -> None:
        """``floor`` (T,): of each row."""
        self.channels.add(against)
        rows = msgspec.structs.replace(against, channels=_no_channels())
        self.forwards.append((result, rows, floor))

    def once(self, gather: Callable[[TruthSamples], Any]) -> Any:
        """What ``gather``, always the same function, makes of this when it is complete."""
        if not self._gathered:
            self._gathered.append(gather(self))
        return self._gathered[0]


class SamplesBySite:
    """By (pass, site, phase)."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], TruthSamples] = {}

    def add(self, result: SiteResult, against: AgainstTruth, floor: np.ndarray) -> None:
        key = result.pass_, result.site, result.phase
        if key not in self._found:
            self._found[key] = TruthSamples()
        self._found[key].add(result, against, floor)

    def find(self, pass_: str, site: str, phase: str) -> TruthSamples | None:
        return self._found.get((pass_, site, phase))

    def with_changed(self, changed: SamplesBySite) -> SamplesBySite:
        """These, with those that ``changed`` holds in place of one's own."""
        both = SamplesBySite()
        both._found = self._found | changed._found
        return both
