"""compare_many(): many runs, each with the first → a Matrix.

The first run is opened once and each candidate only while its turn lasts: what stays of it is a
row, its manifest and one digest, and its report where that is wanted. A candidate that cannot be
read or compared costs its own row and no other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from divergence._version import __version__
from divergence.comparison.align import opened, opened_truth
from divergence.comparison.api import compare
from divergence.comparison.measure.pairs import Measuring, measuring_on
from divergence.comparison.result import Report, VerdictKind, summary_of
from divergence.errors import DivergenceError, FaultError, UsageError
from divergence.facts import Fact, fact, worded
from divergence.fleet.result import AgreementGroup, CrossCheck, Matrix, MatrixRow
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.output import output_folder, write_output
from divergence.run.command import command_line
from divergence.run.contents import Digests
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record, expanded
from divergence.run.site import one_or_more
from divergence.words import Progress, silent

# Which of many runs belong together, and who is odd.
#
# Two runs agree where what differs between them is rounding or nothing. That is no equivalence: two
# runs may each be within the floor of a third and not of each other. So a group is named by the run
# that all its members were held against, and nothing is claimed beyond that. The first group is
# that of the first run, which costs nothing: every run was compared with it. Only where it holds no
# majority are the others compared among themselves, each with the first of them that is left, until
# some group holds more than half or none can any more.
#
# Runs that are bit for bit the same have one answer, so one of each such group is compared.

_AGREEING = frozenset({"identical", "within_floor"})
_TELLING = _AGREEING | {"systematic", "localized", "drift", "nonfinite"}

Key = TypeVar("Key")


def agrees(kind: str | None) -> bool | None:
    """Return what a verdict says of agreement; None where it abstains."""
    return kind in _AGREEING if kind in _TELLING else None


def find_groups(
    nodes: Sequence[Key], agree: Callable[[Key, Key], bool | None]
) -> tuple[list[list[Key]], list[Key]]:
    """(groups in order, nodes that were not asked any more).

    ``nodes[0]`` is the first run; ``agree(pivot, other)`` is asked only as long as an answer can
    change which group, if any, holds more than half of all.
    """
    groups: list[list[Key]] = []
    left = list(nodes)
    while left:
        pivot, *others = left
        group = [pivot, *(other for other in others if agree(pivot, other))]
        groups.append(group)
        left = [other for other in others if other not in group]
        if 2 * len(group) > len(nodes) or 2 * len(left) <= len(nodes):
            break
    return groups, left


def fingerprints(runs: Sequence[Run]) -> list[str | None]:
    """Make one digest a run, over what its own forward gave at each site that the first run
    recorded.

    Equal ones mean equal bits, as far as recorded digests go: no tensor is read. None for a run
    that lacks the digest of one of these tensors (of the kind that the first run has), and for one
    without any of these sites: of those nothing can be said.
    """
    # by place; a suite's repeat holds as ``replayed`` what a fresh run holds as ``free``, and no
    # run holds both of a site
    all_contents: list[dict[tuple[int, int, str], tuple[Record, Digests]]] = [
        {
            (record.sample, record.step, record.site): (record, run.digests(record))
            for record in run.records
            if record.pass_ in ("free", "replayed")
        }
        for run in runs
    ]
    first = all_contents[0]
    kinds = {at: "xxh3" if first[at][1].xxh3 else "fold" for at in sorted(first)}
    digests: list[str | None] = []
    for contents in all_contents:
        state, num_known, lacking = xxhash.xxh3_128(), 0, False
        for at, kind in kinds.items():
            identity = None
            if at in contents:
                record, all_digests = contents[at]
                own = getattr(all_digests, kind)
                lacking = lacking or own is None
                identity = own, all_digests.cuts, record.dtype, record.shape, record.positions
                num_known += 1
            state.update(repr((at, identity)).encode())
        digests.append(state.hexdigest() if num_known and not lacking else None)
    return digests


def _traits(manifest: Manifest) -> dict[str, str]:
    """Return what a manifest says of the machine and how it was set, by name."""
    at, model = manifest.environment, manifest.model
    traits = {
        "device": f"{at.device_type}: {at.device_name}",
        "driver": at.driver or "-",
        "runtime": at.runtime or "-",
        "cpu": f"{at.cpu} {at.cpu_capability}",
        "threads": str(at.num_threads),
        "platform": at.platform,
        "python": at.python,
        "dtype": model.dtype,
        "attention": model.attn_implementation or "none",
        "quantization": str(model.quantization or "none"),
        "planted faults": ", ".join(manifest.plan.plants) or "none",
        "substituted operators": ", ".join(manifest.plan.substitutes) or "none",
    }
    traits |= {name: version for name, version in at.versions.items()}
    traits |= at.variables
    traits |= {f"torch's {name}": value for name, value in at.torch_build.items()}
    if at.cpu_model is not None:
        traits["cpu model"] = at.cpu_model
    for name, note in model.code.items():
        traits[f"code of {name}"] = "; ".join(note.replaced) or note.digest[:12]
    traits |= {f"config {key}": str(value) for key, value in model.config.items()}
    for switch in manifest.settings.switches:
        traits[switch.name] = f"{switch.asked} ({switch.status})"
    return traits


def only_there(odd: Sequence[Manifest], group: Sequence[Manifest]) -> list[Fact]:
    """Return what all odd machines share and no machine of the group has."""
    traits_of_odd, others = ([_traits(manifest) for manifest in them] for them in (odd, group))
    shared = []
    for name in dict.fromkeys(name for traits in (*traits_of_odd, *others) for name in traits):
        here = {traits.get(name, "-") for traits in traits_of_odd}
        there = {traits.get(name, "-") for traits in others}
        if len(here) == len(there) == 1 and here != there:
            shared.append(fact("fleet.only_there", name=name, here=here.pop(), others=there.pop()))
    return shared


def agreement_of(
    groups: Sequence[Sequence[str]], left: Sequence[str], *, num_silent: int, identical: bool
) -> Fact:
    """Say who agrees with whom. ``num_silent``: runs that could not tell, ``identical``: the
    largest group is so bit for bit."""
    total = sum(map(len, groups)) + len(left)
    num = max(map(len, groups))
    if total < 2:
        return fact("fleet.none_told_apart", num_silent=num_silent)
    if num == total:
        return fact(
            "fleet.all_agree",
            total=total,
            num_runs=total + num_silent,
            num_silent=num_silent,
            identical=identical,
        )
    odd = outside(groups, left)
    if not odd:
        return fact(
            "fleet.no_majority", total=total, num=num, num_silent=num_silent, identical=identical
        )
    names = fact("fleet.few", runs=odd)
    if len(odd) > 3:
        names = fact("fleet.many", runs=odd[:3], num_more=len(odd) - 3)
    return fact(
        "fleet.majority",
        total=total,
        num=num,
        num_silent=num_silent,
        identical=identical,
        odd=names,
        num_odd=len(odd),
    )


def outside(groups: Sequence[Sequence[Key]], left: Sequence[Key]) -> list[Key]:
    """The runs that are not of the group that holds more than half; none where no group does."""
    total = sum(map(len, groups)) + len(left)
    largest = max(groups, key=len)
    if 2 * len(largest) <= total:
        return []
    return [run for group in groups if group is not largest for run in group] + list(left)


def compare_many(
    reference: str | Path | Run,
    candidates: Sequence[str | Path | Run],
    *,
    force: bool = False,
    name_map: str | Path | None = None,
    truth: str | Path | Run | None = None,
    floor: Sequence[str | Path | Run] = (),
    layers: Sequence[str | Path | Run] = (),
    thresholds: Thresholds = THRESHOLDS,
    device: str | Measuring = "cpu",
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
    first = opened(reference)
    float64 = None if truth is None else opened_truth(truth)
    if float64 is not None and float64.manifest.settings.compute_dtype is None:
        raise UsageError(  # said once, whatever it is held against
            f"{float64.path} is no truth: it was computed in {float64.manifest.model.dtype}",
            hint=_make_truth(first),
        )
    options = {
        "force": force,
        "name_map": name_map,
        "floor": [opened(run) for run in one_or_more(floor)],
        "layers": [opened(run) for run in one_or_more(layers)],
        "thresholds": thresholds,
        "device": measuring_on(device),  # one that cannot measure is no candidate's fault
        "progress": progress,
    }
    folder = None
    if reports is not None:
        folder = output_folder(expanded(reports), what="reports")
        if any(folder.iterdir()):
            raise UsageError(
                "the directory for the reports is not empty",
                where=str(folder),
                hint="give a new one",
            )
    fleet = _Fleet(first, float64, options)
    rows = []
    for number, given in enumerate(candidates):
        (progress or silent)("runs", number, len(candidates), _path(given))
        row = fleet.row(given)
        if row.report is not None and folder is not None:
            name = os.path.basename(os.path.normpath(row.path))
            text, file = row.report.to_json(indent=2) + "\n", f"{number + 1:04d}-{name}.json"
            file = str(write_output(text, folder / file, what="report"))
            row = msgspec.structs.replace(row, report=None, report_path=file)
        elif not keep_reports:
            row = msgspec.structs.replace(row, report=None)
        rows.append(row)
    fleet.check_truth()
    return fleet.matrix(rows)


@dataclass(frozen=True, slots=True)
class _Member:
    """A run that could be read and compared. ``kind``: the verdict against the first."""

    path: str
    given: Run | str | Path
    manifest: Manifest
    digest: str | None
    kind: VerdictKind | None


class _Fleet:
    """The first run, and what is known of the others. ``options``: of each comparison."""

    def __init__(self, first: Run, truth: Run | None, options: dict[str, Any]) -> None:
        self._first, self._truth, self._options = first, truth, options
        self._members: list[_Member] = [
            _Member(str(first.path), first, first.manifest, fingerprints([first])[0], None)
        ]
        self._checks: list[CrossCheck] = []
        self._known = _repeatable(first.manifest)

    def row(self, given: Run | str | Path) -> MatrixRow:
        """One candidate against the first run; its report is in the row."""
        path, summary = _path(given), None
        try:
            with _opened_for_a_while(given) as run:
                summary = summary_of(run)
                self._known |= _repeatable(run.manifest)
                report = compare(self._first, run, truth=self._truth, **self._options)
                digest = fingerprints([self._first, run])[1]
        except FaultError:
            raise
        except DivergenceError as error:
            return MatrixRow(path=path, run=summary, problem=str(error))
        self._members.append(_Member(path, given, run.manifest, digest, report.verdict.kind))
        return _row(path, report, self._first.manifest.plan.logits_site)

    def check_truth(self) -> None:
        """Raise UsageError, after all rows, for the truth of a run that is none of these."""
        like = None if self._truth is None else self._truth.manifest.like
        if self._truth is not None and like is not None and like not in self._known:
            raise UsageError(
                f"{self._truth.path} is the truth of none of these runs ({like})",
                hint=_make_truth(self._first),
            )

    def matrix(self, rows: list[MatrixRow]) -> Matrix:
        """Say who belongs together, from all rows."""
        first, *others = self._members
        telling = [first, *(other for other in others if agrees(other.kind) is not None)]
        groups, left = find_groups(telling, self._agree)
        odd = outside(groups, left)
        largest = max(groups, key=len)
        by_digest: dict[str, list[str]] = {}
        for member in self._members:
            if member.digest is not None:
                by_digest.setdefault(member.digest, []).append(member.path)
        matrix = Matrix(
            tool_version=__version__,
            reference=summary_of(self._first),
            rows=rows,
            identical=[paths for paths in by_digest.values() if len(paths) > 1],
            groups=[
                AgreementGroup(runs=[member.path for member in group], identical=_identical(group))
                for group in groups
            ],
            cross_checks=self._checks,
            odd=[member.path for member in odd],
            consensus=agreement_of(
                [[member.path for member in group] for group in groups],
                [member.path for member in left],
                num_silent=len(rows) + 1 - len(telling),
                identical=_identical(largest),
            ),
            odd_traits=only_there(
                [member.manifest for member in odd], [member.manifest for member in largest]
            )
            if odd
            else [],
            next=self._next(odd, largest),
        )
        return worded(matrix)

    def _next(self, odd: list[_Member], group: list[_Member]) -> list[str]:
        """The page of the first pair that differs: where there is a group, one of it against the
        first odd run."""
        first, *others = self._members
        pairs = [(first, other) for other in others if agrees(other.kind) is False]
        if odd:
            pairs = [(group[0], odd[0])]
        truth = None if self._truth is None else self._truth.path
        return [
            command_line(
                "compare",
                reference.path,
                candidate.path,
                truth=truth if self._truth_of(reference, candidate) else None,
            )
            for reference, candidate in pairs[:1]
        ]

    def _agree(self, pivot: _Member, other: _Member) -> bool | None:
        if pivot is self._members[0]:
            return agrees(other.kind)
        if _identical([pivot, other]):
            return True
        same = {member.path for member in self._members if _identical([other, member])}
        for cross_check in self._checks:  # bit for bit the same as one that was asked
            if cross_check.reference == pivot.path and cross_check.candidate in same:
                return agrees(cross_check.verdict)
        verdict, problem = None, None
        try:
            with _opened_for_a_while(pivot.given) as a, _opened_for_a_while(other.given) as b:
                a.set_fallback(self._first)
                b.set_fallback(self._first)
                truth = self._truth_of(pivot, other)
                verdict = compare(a, b, truth=truth, **self._options).verdict.kind
        except FaultError:
            raise
        except DivergenceError as error:
            problem = str(error)
        self._checks.append(
            CrossCheck(reference=pivot.path, candidate=other.path, verdict=verdict, problem=problem)
        )
        return agrees(verdict)

    def _truth_of(self, reference: _Member, candidate: _Member) -> Run | None:
        """The truth, where it is one of these two as well: it repeats what anchored them."""
        repeatable = _repeatable(reference.manifest) | _repeatable(candidate.manifest)
        return self._truth if self._truth and self._truth.manifest.like in repeatable else None


def _row(path: str, report: Report, logits_site: str | None) -> MatrixRow:
    """A candidate's figures, from its report."""
    verdict, tokens = report.verdict, report.tokens
    num_tokens = 0 if tokens is None else tokens.num_tokens + tokens.num_missing
    # as the comparison of this pair alone tells it: of single forwards, where some are beyond
    used = [site.usage for site in report.sites if site.usage is not None and site.usage > 1]
    used = used or [site.limit_usage for site in report.sites if site.limit_usage is not None]
    logits = [s for s in report.sites if s.site == logits_site and s.pass_ == "free"]
    apart = [site.rel_l2 for site in logits if site.rel_l2 is not None]
    # the share of positions with the same first choice, over all forwards
    measured = all(site.identical or site.logits is not None for site in logits)
    same = total = 0.0
    for site in logits:
        num = site.numel // max(1, site.shape[-1] if site.shape else 1)
        same += num * (1.0 if site.logits is None else site.logits.top1_agreement)
        total += num
    return MatrixRow(
        path=path,
        run=report.candidate,
        verdict=verdict.kind,
        summary=verdict.summary,
        confidence=verdict.confidence,
        onset=verdict.onset,
        side=verdict.side,
        limit_usage=max(used, default=None),
        logits_rel_l2=max(apart, default=None) if len(apart) == len(logits) else None,
        top1_agreement=same / total if total and measured else None,
        num_equal=tokens.num_equal if tokens is not None and num_tokens else None,
        num_tokens=num_tokens or None,
        problem=verdict.summary if verdict.kind == "incomparable" else None,
        report=report,
    )


def _identical(members: list[_Member]) -> bool:
    digests = {member.digest for member in members}
    return len(members) > 1 and len(digests) == 1 and None not in digests


def _repeatable(manifest: Manifest) -> set[str | None]:
    """The ids of the runs whose truth may judge this one."""
    return {manifest.id, manifest.plan.anchored_to}


def _make_truth(first: Run) -> str:
    return command_line("truth", first.path, o="TRUTH")


@contextlib.contextmanager
def _opened_for_a_while(given: str | Path | Run) -> Iterator[Run]:
    """A run that is closed again, unless it was given open."""
    run = opened(given)
    try:
        yield run
    finally:
        if not isinstance(given, Run):
            run.close()


def _path(run: str | Path | Run) -> str:
    return str(run.path if isinstance(run, Run) else run)
