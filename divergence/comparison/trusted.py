"""Trusted runs (``--floor``): which run may be one, and what it did to the limits, in words.

The candidate is no measure for itself: a run that is it, or has its very bits, would widen every
limit to what is to be judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from divergence.comparison.align import opened
from divergence.comparison.analysis import Measured, Shown, limits_used
from divergence.comparison.measure.pairs import Measuring, aligned, measure_tensors
from divergence.comparison.measure.reduced import equal_contents
from divergence.comparison.preflight import preflight
from divergence.comparison.result import SiteResult
from divergence.errors import UsageError
from divergence.facts import Fact, fact
from divergence.numerics.floor import Thresholds
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.words import letter


def refuse_compared(run: Run, reference: Run, candidate: Run) -> None:
    """UsageError where ``run`` is one of the two compared."""
    for side, other in (("reference", reference), ("candidate", candidate)):
        if run.manifest.id == other.manifest.id:
            raise _no_floor(run, f"is {letter(side)} itself", reference)


def _no_floor(run: Run, why: str, reference: Run) -> UsageError:
    return UsageError(
        f"{run.path} {why}: it is no floor for it",
        hint=command_line("capture", like=reference.path, o="RUN") + " on a machine that you trust",
    )


def _equalities(run: Run, other: Run) -> Iterator[bool]:
    """Say of each tensor of both whose bits are known whether they are the same."""
    for record in run.records:
        partner = other.find(record.coordinates)
        equal = None if partner is None else equal_contents(run, record, other, partner)
        if equal is not None:
            yield equal


def trusted_limits(
    measured: Measured,
    runs: Sequence[str | Path | Run],
    *,
    measuring: Measuring,
) -> Shown:
    """Tell what trusted runs use of their limits against the reference, the most by site.

    Raises UsageError for a run that is no trusted one, or has nothing in common with it.
    """
    a, b = measured.reference, measured.candidate
    shown: dict[tuple[str, str, str], float] = {}
    for run in map(opened, runs):
        refuse_compared(run, a, b)
        equal = _equalities(run, b)
        if next(equal, False) and all(equal) and not all(_equalities(run, a)):
            raise _no_floor(run, "has the bits of B", a)
        blocking = [line.check for line in preflight(a, run) if line.status == "blocking"]
        run.set_fallback(a)
        alignment = aligned(a, run, None)  # named as A is, whose capture it repeats
        if blocking or not alignment.pairs:
            raise UsageError(
                f"{run.path} shows no floor for {a.path}: "
                + (f"other {' and '.join(blocking)}" if blocking else "no tensor in common"),
                hint=command_line("capture", like=a.path, o="RUN") + " on a trusted machine",
            )
        trusted = measure_tensors(
            a,
            run,
            alignment,
            truth=measured.truth,
            floor=a if measured.floor is a else None,
            thresholds=measured.thresholds,
            measuring=measuring,
        )
        for key, used in limits_used(trusted).items():
            shown[key] = max(used, shown.get(key, 0.0))
    return shown


def widening_notes(
    shown: Shown | None, sites: Sequence[SiteResult], num_runs: int, thresholds: Thresholds
) -> list[Fact]:
    """Say what ``--floor`` widened, and the most of it in numbers. Nothing without such runs."""
    if shown is None:
        return []
    factors = {key: thresholds.widen * used for key, used in shown.items()}
    factors = {key: factor for key, factor in factors.items() if factor > 1}
    if not factors:
        return [fact("measure.none_widened", runs=num_runs)]
    (pass_, site, phase), most = max(factors.items(), key=lambda item: item[1])
    here = (s.limit for s in sites if (s.pass_, s.site, s.phase) == (pass_, site, phase))
    limit = next((limit for limit in here if limit is not None), None)
    return [
        fact(
            "measure.widened",
            runs=num_runs,
            num=len(factors),
            site=site,
            phase=phase,
            times=most,
            before=limit and limit / most,
            limit=limit,
            beyond=any(used > 1 for used in shown.values()),
        )
    ]
