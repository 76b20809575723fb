"""compare_many(): many runs, each with the first → a Matrix.

The first run is opened once and each candidate only while its turn lasts: what stays of it is a
row, its manifest and one digest, and its report where that is wanted. A candidate that cannot be
read or compared costs its own row and no other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from divergence._version import __version__
from divergence.comparison.api import compare
from divergence.comparison.measure.pipeline import measured_on
from divergence.comparison.result import Report, summary_of
from divergence.comparison.results.sites import SiteResult
from divergence.errors import DivergenceError, FaultError, UsageError
from divergence.fleet.agreement import (
    agreement_text,
    agrees,
    find_groups,
    fingerprints,
    only_there,
    outside,
)
from divergence.fleet.result import AgreementGroup, CrossCheck, Matrix, MatrixRow
from divergence.numerics.rounding.floor import THRESHOLDS, Thresholds
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.schema.layout import expanded
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.site import one_or_more
from divergence.run.unshard import unsharded
from divergence.words import Progress

__all__ = ["compare_many"]


def compare_many(
    reference: str | Path | Run,
    candidates: Sequence[str | Path | Run],
    *,
    force: bool = False,
    name_map: str | Path | None = None,
    truth: str | Path | Run | None = None,
    floor: Sequence[str | Path | Run] = (),
    thresholds: Thresholds = THRESHOLDS,
    device: str = "cpu",
    reports: str | Path | None = None,
    keep_reports: bool = True,
    progress: Progress | None = None,
) -> Matrix:
    """Compare each of ``candidates`` with ``reference``; the options are those of ``compare``.

    ``reports``: a directory for each pair's report as JSON, in place of ``row.report``.
    ``keep_reports``: False leaves the reports out of the rows, so that memory does not grow with
    their number.

    Raises RunFormatError where the first run, the truth or a trusted run cannot be read; whatever
    is wrong with a candidate is said in its row.
    """
    if not candidates:
        raise UsageError("there is no run to compare with", hint="divergence compare A B C")
    a = _opened(reference)
    right = None if truth is None else _opened(truth)
    if right is not None:
        _check_truth(right, a)
    trusted = [_opened(run) for run in one_or_more(floor)]
    folder = None if reports is None else _folder(reports)
    options = {
        "force": force, "name_map": name_map, "floor": trusted, "thresholds": thresholds,
        "device": device,
    }  # fmt: skip
    with measured_on(device):  # a device that cannot measure is no candidate's fault
        pass
    fleet = _Fleet(a, right, options, progress)
    rows = []
    for number, given in enumerate(candidates):
        if progress is not None:
            progress("runs", number, len(candidates), _path(given))
        row = fleet.row(given)
        report, row.report = row.report, row.report if keep_reports and folder is None else None
        if folder is not None and report is not None:
            row.report_path = str(_write(report, folder, number + 1, _path(given)))
        rows.append(row)
    fleet.check_truth()
    return fleet.matrix(rows)


@dataclass(slots=True)
class _Member:
    """A run that could be read and compared. ``kind``: the verdict against the first."""

    path: str
    given: Run | str | Path
    manifest: Manifest
    digest: str | None
    kind: str | None


class _Fleet:
    """The first run, and what is known of the others."""

    def __init__(
        self, first: Run, truth: Run | None, options: dict[str, Any], progress: Progress | None
    ) -> None:
        self._first, self._truth, self._options = first, truth, options
        self._progress = progress
        self._members: list[_Member] = [
            _Member(str(first.path), first, first.manifest, fingerprints([first])[0], None)
        ]
        self._checks: list[CrossCheck] = []
        self._known = _repeatable(first.manifest)

    def row(self, given: Run | str | Path) -> MatrixRow:
        """One candidate against the first run; its report is in the row."""
        row = MatrixRow(path=_path(given))
        run = None
        try:
            run = _opened(given)
            row.run = summary_of(run)
            self._known |= _repeatable(run.manifest)
            report = compare(
                self._first, run, truth=self._truth, progress=self._progress, **self._options
            )
            digest = fingerprints([self._first, run])[1]
        except FaultError:
            raise
        except DivergenceError as error:
            row.problem = str(error)
            return row
        finally:
            if run is not None and not isinstance(given, Run):
                run.close()
        _fill(row, report, self._first.manifest.plan.logits_site)
        self._members.append(_Member(row.path, given, run.manifest, digest, row.verdict))
        return row

    def check_truth(self) -> None:
        """After all rows: UsageError for the truth of a run that is none of these."""
        truth = self._truth
        if truth is None or truth.manifest.like is None:
            return
        like = truth.manifest.like
        if like not in self._known:
            raise UsageError(
                f"{truth.path} is the truth of none of these runs ({like})",
                hint=_make_truth(self._first),
            )

    def matrix(self, rows: list[MatrixRow]) -> Matrix:
        """Who belongs together, from all rows."""
        first, *others = self._members
        telling = [first, *(one for one in others if agrees(one.kind) is not None)]
        groups, left = find_groups(telling, self._agree)
        odd = outside(groups, left)
        largest = max(groups, key=len)
        return Matrix(
            tool_version=__version__,
            reference=summary_of(self._first),
            rows=rows,
            identical=_groups(self._members),
            groups=[
                AgreementGroup(runs=[one.path for one in group], identical=_identical(group))
                for group in groups
            ],
            cross_checks=self._checks,
            odd=[one.path for one in odd],
            agreement=agreement_text(
                [[one.path for one in group] for group in groups],
                [one.path for one in left],
                num_silent=len(rows) + 1 - len(telling),
                identical=_identical(largest),
            ),
            only_odd=only_there(
                [one.manifest for one in odd], [one.manifest for one in largest]
            ) if odd else [],
            next=self._next(odd, largest),
        )  # fmt: skip

    def _next(self, odd: list[_Member], group: list[_Member]) -> list[str]:
        """The page of the first pair that differs: where there is a group, one of it against the
        first odd run."""
        first, *others = self._members
        pairs = [(first, one) for one in others if agrees(one.kind) is False]
        if odd:
            pairs = [(group[0], odd[0])]
        truth = None if self._truth is None else self._truth.path
        return [
            command_line(
                "compare", one.path, two.path,
                truth=truth if self._truth_of(one, two) else None,
            )
            for one, two in pairs[:1]
        ]  # fmt: skip

    def _agree(self, pivot: _Member, other: _Member) -> bool | None:
        if pivot is self._members[0]:
            return agrees(other.kind)
        if _identical([pivot, other]):
            return True
        for known in self._checks:  # bit for bit the same as one that was asked
            if known.reference == pivot.path and _same_as(other, known.candidate, self._members):
                return agrees(known.verdict)
        verdict, problem = None, None
        runs: list[Run] = []
        try:
            for one in (pivot, other):
                runs.append(_opened(one.given))
                runs[-1].set_fallback(self._first)
            verdict = compare(
                *runs, truth=self._truth_of(pivot, other), progress=self._progress, **self._options
            ).verdict.kind
        except FaultError:
            raise
        except DivergenceError as error:
            problem = str(error)
        finally:
            for one, run in zip((pivot, other), runs, strict=False):
                if not isinstance(one.given, Run):
                    run.close()
        self._checks.append(
            CrossCheck(reference=pivot.path, candidate=other.path, verdict=verdict, problem=problem)
        )
        return agrees(verdict)

    def _truth_of(self, one: _Member, two: _Member) -> Run | None:
        """The truth, where it is one of these two as well: it repeats what anchored them."""
        known = _repeatable(one.manifest) | _repeatable(two.manifest)
        return self._truth if self._truth and self._truth.manifest.like in known else None


def _fill(row: MatrixRow, report: Report, logits_site: str | None) -> None:
    """The row's figures, from its report."""
    verdict, tokens = report.verdict, report.tokens
    row.run, row.report = report.candidate, report
    row.verdict, row.summary, row.confidence = verdict.kind, verdict.summary, verdict.confidence
    row.onset, row.side = verdict.onset, verdict.side
    used = [site.limit_usage for site in report.sites if site.limit_usage is not None]
    row.limit_usage = max(used, default=None)
    if verdict.kind == "incomparable":
        row.problem = verdict.summary
    if tokens is not None and tokens.num_tokens + tokens.num_missing:
        row.num_equal = tokens.num_equal
        row.num_tokens = tokens.num_tokens + tokens.num_missing
    found = [s for s in report.sites if s.site == logits_site and s.pass_ == "free"]
    apart = [site.rel_l2 for site in found if site.rel_l2 is not None]
    if found and len(apart) == len(found):
        row.logits_rel_l2 = max(apart)
    if found:
        row.top1_agreement = _top1(found)


def _top1(sites: list[SiteResult]) -> float | None:
    """The share of positions with the same first choice, over all forwards."""
    same = total = 0.0
    for site in sites:
        if not site.identical and site.logits is None:
            return None
        num_rows = site.numel // max(1, site.shape[-1] if site.shape else 1)
        same += num_rows * (1.0 if site.logits is None else site.logits.top1_agreement)
        total += num_rows
    return same / total if total else None


def _groups(members: list[_Member]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for one in members:
        if one.digest is not None:
            groups.setdefault(one.digest, []).append(one.path)
    return [group for group in groups.values() if len(group) > 1]


def _identical(members: list[_Member]) -> bool:
    digests = {one.digest for one in members}
    return len(members) > 1 and len(digests) == 1 and None not in digests


def _same_as(member: _Member, path: str, members: list[_Member]) -> bool:
    return any(_identical([member, one]) for one in members if one.path == path)


def _check_truth(truth: Run, first: Run) -> None:
    """What is wrong with it whatever it is held against is said once, and not of each run."""
    settings = truth.manifest.settings
    if settings.compute_dtype is None:
        raise UsageError(
            f"{truth.path} is no truth: it was computed in {truth.manifest.model.dtype}",
            hint=_make_truth(first),
        )


def _repeatable(manifest: Manifest) -> set[str | None]:
    """The ids of the runs whose truth may judge this one."""
    return {manifest.id, manifest.plan.anchored_to}


def _make_truth(first: Run) -> str:
    return command_line("truth", first.path, o="TRUTH")


def _opened(run: str | Path | Run) -> Run:
    return unsharded(run if isinstance(run, Run) else Run.open(run))


def _path(run: str | Path | Run) -> str:
    return str(run.path if isinstance(run, Run) else run)


def _folder(path: str | Path) -> Path:
    folder = expanded(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(
                "the directory for the reports is not empty", where=str(folder),
                hint="give a new one",
            )  # fmt: skip
    except OSError as error:
        raise UsageError(
            f"no directory for the reports: {error.strerror}", where=str(folder)
        ) from error
    return folder


def _write(report: Report, folder: Path, number: int, path: str) -> Path:
    file = folder / f"{number:04d}-{os.path.basename(os.path.normpath(path))}.json"
    try:
        file.write_text(report.to_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            file.unlink()  # half of one is none
        raise UsageError(
            f"the report cannot be written: {error.strerror}", where=str(file),
            hint="free some space, or choose another place with --reports",
        ) from error  # fmt: skip
    return file
