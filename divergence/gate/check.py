"""`check`: a comparison held against a policy.

Every rule of the policy that is not met is one Failure. Runs that cannot be compared, and a golden
of which nothing was compared, are an error and never a pass. A run is not checked against itself,
nor against one that is no golden: a truth, or a run with planted faults or another run's results.

Coverage must be reached in each pass, for tensors, operators and tokens apart (comparison.align):
what is missing in one is not made up for by another. Where the golden has a whole pass, that of the
new run is held against its own decode steps (within.py) and must earn an allowed verdict too.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from divergence.comparison.result import (
    Coverage,
    PreflightLine,
    Report,
    TokenDifference,
    Verdict,
    VerdictKind,
)
from divergence.errors import IncomparableError
from divergence.facts import Fact, fact, sentence, worded
from divergence.gate.golden import choose_golden, refuse_unfit
from divergence.gate.known import Knowledge, excuse, place_of
from divergence.gate.policy import Policy, TokensPolicy, load_policy
from divergence.gate.result import CheckResult, Failure
from divergence.run.command import command_line
from divergence.run.site import did_you_mean, near_names
from divergence.words import HEADLINES, Progress

if TYPE_CHECKING:
    from divergence.run.reader import Run


class _NothingComparedError(IncomparableError):
    """Carries the report, so that the command line can show why."""

    report: Report | None = None


def check(
    golden: str | Path | Run,
    new: str | Path | Run,
    *,
    policy: Policy | str | os.PathLike[str] | None = None,
    name_map: str | Path | None = None,
    truth: str | Path | Run | None = None,
    floor: str | Path | Run | Sequence[str | Path | Run] = (),
    progress: Progress | None = None,
) -> CheckResult:
    """Compare ``new`` with ``golden`` and hold the report against ``policy`` (configs/ci.toml).

    ``golden`` may be a folder of goldens: the one that fits best is taken, which a note says.
    ``truth`` and ``floor`` as for compare; the policy's thresholds are used.

    Raises IncomparableError where preflight blocks or nothing was compared, and UsageError for a
    run checked against itself and for what is no golden.
    """
    from divergence.comparison.api import compare

    rules = load_policy(policy)
    chosen = choose_golden(golden, new) if isinstance(golden, str | os.PathLike) else None
    golden = golden if chosen is None else chosen.path
    report = compare(
        golden,
        new,
        name_map=name_map,
        truth=truth,
        floor=floor,
        thresholds=rules.thresholds,
        progress=progress,
    )
    refuse_unfit(report)
    if report.verdict.kind == "incomparable" or report.coverage.num_compared == 0:
        raise _nothing_compared(report)
    whole = None
    if any(row.pass_ == "whole" and row.num_elsewhere for row in report.coverage.passes):
        whole = compare(new, thresholds=rules.thresholds, progress=progress).verdict
    result = evaluate(report, rules, whole=whole)
    if chosen is None:
        return result
    remarks = [fact("gate.golden", what=chosen.text), *result.remarks]
    return msgspec.structs.replace(result, remarks=remarks, notes=list(map(sentence, remarks)))


def _nothing_compared(report: Report) -> _NothingComparedError:
    blocking = [
        fact(
            "gate.blocking",
            check=line.check,
            reference=line.reference,
            candidate=line.candidate,
            details=line.details,
        )
        for line in report.preflight
        if line.status == "blocking"
    ]
    stopped = report.verdict.kind == "incomparable"
    error = _NothingComparedError(
        report.verdict.summary if stopped else sentence(fact("gate.nothing_compared")),
        where="; ".join(map(sentence, blocking)) or None,
        hint=command_line("compare", report.reference.path, report.candidate.path),
    )
    error.report = report
    return error


def evaluate(
    report: Report,
    policy: Policy,
    *,
    whole: Verdict | None = None,
) -> CheckResult:
    """The rules of ``policy`` that ``report`` does not meet, in the order of the policy's keys.

    ``whole``: the verdict on the new run's own whole pass.
    """
    knowledge = excuse(report, policy)
    failures = [
        *_verdicts(report.verdict, whole, policy, knowledge),
        *_coverage(report.coverage, policy.min_coverage),
        *_inputs(report),
        *_preflight(report, policy),
        *_tokens(report, policy),
        *_tolerances(report, policy),
        *_failing_parts(report, policy),
    ]
    remarks = _notes(report, policy)
    return CheckResult(
        passed=not failures,
        failures=worded(failures),
        num_ties=_num_equal(report, policy)[1],
        excused=knowledge.excused,
        known=worded(knowledge.uses),
        remarks=remarks,
        notes=list(map(sentence, remarks)),
        report=report,
        policy=policy,
    )


def _verdicts(
    verdict: Verdict, whole: Verdict | None, policy: Policy, knowledge: Knowledge
) -> Iterator[Failure]:
    allowed = [_called(kind) for kind in policy.verdicts]

    def refused(rule: str, verdict: Verdict, what: Fact) -> Failure:
        return Failure(
            rule=rule,
            site=verdict.onset.site if verdict.onset else None,
            allowed=", ".join(map(sentence, allowed)),
            found=verdict.kind,
            fact=what,
        )

    if verdict.kind not in policy.verdicts and not knowledge.excused:
        tried = any(use.status != "unused" for use in knowledge.uses)
        what = fact(
            "gate.verdict_refused",
            kind=_called(verdict.kind),
            allowed=allowed,
            why_not=knowledge.why_not if tried else None,
        )
        yield refused("verdicts", verdict, what)
    if whole is not None and whole.kind not in policy.verdicts:
        what = fact("gate.whole_refused", kind=whole.kind, what=whole.headline)
        yield refused("whole", whole, what)


def _called(kind: VerdictKind) -> Fact:
    """Name a verdict as the screen calls it, and as policies and the JSON do."""
    return fact("gate.kind", word=HEADLINES[kind], kind=kind)


def _inputs(report: Report) -> Iterator[Failure]:
    """Refuses a run that was captured like another golden: no anchored pass compares it with this
    one, and free passes alone are not enough for a gate."""
    golden, other = report.reference, report.candidate.anchored_to
    compared = any(row.pass_ == "anchored" and row.num_compared for row in report.coverage.passes)
    if other is not None and other != golden.id and not compared:
        again = command_line("capture", like=golden.path, o=report.candidate.path, force=True)
        yield Failure(
            rule="anchored",
            allowed=golden.id,
            found=other,
            fact=fact("gate.other_inputs", again=again),
        )


def _coverage(coverage: Coverage, least: float) -> Iterator[Failure]:
    shares = [
        (
            row.share,
            fact(
                "gate.pass_compared",
                pass_=row.pass_,
                num=row.num_compared,
                what=row.what,
                num_left_out=row.num_missing + row.num_skipped,
                num_extra=row.num_extra,
                why=row.why,
            ),
        )
        for row in coverage.passes
    ]
    if not shares:  # a report that counts no passes: of all that the golden offered
        left_out = coverage.num_only_reference + coverage.num_skipped
        compared = fact("gate.records_compared", num=coverage.num_compared, num_left_out=left_out)
        total = coverage.num_compared + left_out
        shares = [(coverage.num_compared / total if total else 0.0, compared)]
    for share, what in shares:
        if not share >= least:
            yield Failure(
                rule="min_coverage",
                allowed=f">= {least:g}",
                found=f"{share:.6g}",
                fact=fact("gate.share_too_low", what=what, share=share, least=least),
            )


_OF_MACHINES = (
    "code, weights, prompt ids, labels, tokenizer, chat template, generated ids, dtype, "
    "batch shape, determinism, repeatability, driver, runtime, cpu, cpu model, architecture, "
    "torch build, threads, environment variables, planted faults, completeness"
).split(", ")
"""Checks whose difference gives a model's modules no other code and no other constants."""


def _unexplained_code(report: Report) -> PreflightLine | None:
    """The line of code, where it differs at otherwise equal settings and versions."""
    differ = [line for line in report.preflight if line.status == "differs"]
    if any(line.check not in _OF_MACHINES for line in differ):
        return None
    return next((line for line in differ if line.check == "code"), None)


def _preflight(report: Report, policy: Policy) -> Iterator[Failure]:
    code = _unexplained_code(report) if policy.preflight.code == "fail" else None
    is_told = all(part.is_told for part in report.parts.values() if part)
    for line in report.preflight:
        allowed = line.status != "blocking" and policy.preflight.allows(line.check)
        allowed = allowed and line is not code
        if not is_told and line.status == "unknown":
            continue  # nobody tells it of a server, or of a file
        if line.status != "same" and not allowed:
            yield Failure(
                rule="preflight",
                allowed=sentence(fact("gate.the_same")),
                found=f"{line.reference} / {line.candidate}",
                fact=fact(
                    "gate.setting_differs",
                    check=line.check,
                    status=line.status,
                    reference=line.reference,
                    candidate=line.candidate,
                    details=(line.details or None) if line.reference == line.candidate else None,
                ),
            )


def is_tie(difference: TokenDifference, margin: float | None, z: float | None = None) -> bool:
    """Say whether both sides preferred their own token by no more than ``margin`` logits, or the
    gap was at most ``z`` standard deviations of what rounding makes of these logits: of the floor
    where a truth shows it, of the rounding model otherwise; never of the two sides' own
    difference."""
    judged = difference.z_of in ("floor", "model")
    if judged and z is not None and difference.z is not None and difference.z <= z:
        return True
    if margin is None or difference.margin is None:
        return False
    other = difference.candidate_margin
    return difference.margin <= margin and (other is None or other <= margin)


def _tokens(report: Report, policy: Policy) -> Iterator[Failure]:
    rules, tokens = policy.tokens, report.tokens
    if rules.min_equal is None and rules.min_equal_count is None:
        return
    for part in report.parts.values():
        if part is not None and part.agreement is not None:
            yield from _too_few(rules, *part.agreement, 0)
            return
    total = 0 if tokens is None else tokens.num_tokens + tokens.num_missing
    if total == 0 and report.reference.generates and (rules.min_equal or 1) > 0:
        yield Failure(
            rule="tokens.min_equal",
            allowed=sentence(fact("gate.some_tokens")),
            found="0",
            fact=fact("gate.no_token_in_golden"),
        )
    if tokens is None or total == 0:
        return
    num_equal, num_ties = _num_equal(report, policy)
    counted_ties = num_equal - tokens.num_equal
    yield from _too_few(
        rules, tokens.num_equal, counted_ties, total, tokens.num_missing, num_ties=num_ties
    )


def _too_few(
    rules: TokensPolicy,
    equal: int,
    ties: int,
    total: int,
    missing: int,
    *,
    num_ties: int | None = None,
) -> Iterator[Failure]:
    """``ties`` count as equal; ``num_ties``: what to say of them, where those are not all."""
    num_ties = ties if num_ties is None else num_ties
    for rule, least, share in (
        ("tokens.min_equal", rules.min_equal, (equal + ties) / total if total else 0.0),
        ("tokens.min_equal_count", rules.min_equal_count, equal + ties),
    ):
        if least is not None and share < least:
            yield Failure(
                rule=rule,
                allowed=f">= {least:g}",
                found=f"{share:.6g}",
                fact=fact(
                    "gate.tokens_too_few",
                    num_equal=equal,
                    total=total,
                    num_ties=num_ties,
                    num_missing=missing,
                    least=least,
                ),
            )


def _num_equal(report: Report, policy: Policy) -> tuple[int, int]:
    """Equal tokens with ties counted in, and the number of ties.

    A tie is one whatever the verdict, since its unit is rounding and no fault moves it. Tokens not
    forced: what follows a tie continues another text, so nothing after it counts against the
    candidate.
    """
    tokens, rules = report.tokens, policy.tokens
    if tokens is None:
        return 0, 0
    margin = rules.tie_margin
    if isinstance(margin, dict):
        margin = margin.get(report.reference.dtype.removeprefix("torch."))
    ties = sum(is_tie(flip, margin, rules.tie_z) for flip in tokens.differences)
    if ties and not tokens.forced and ties == len(tokens.differences):
        return tokens.num_tokens, ties
    return tokens.num_equal + ties, ties


def _tolerances(report: Report, policy: Policy) -> Iterator[Failure]:
    for number, tolerance in enumerate(policy.tolerance):
        if tolerance.optional or not report.sites or any(map(tolerance.names, report.sites)):
            continue
        meant = tolerance.sites if isinstance(tolerance.sites, str) else list(tolerance.sites)
        yield Failure(
            rule=f"tolerance[{number}]",
            tolerance=number,
            allowed=sentence(fact("gate.a_site")),
            found="none",
            fact=fact("gate.no_site_meant", sites=repr(meant), pass_=tolerance.pass_),
        )
    for site in report.sites:
        tolerance_here = next((item for item in policy.tolerance if item.matches(site)), None)
        if tolerance_here is None:
            continue
        for name, limit in tolerance_here.limits().items():
            value = getattr(site, name)
            # written as "not <=", so that a nan is above every limit
            if site.identical or (value is not None and value <= limit):
                continue
            place = place_of(site)
            what = fact("gate.number_beyond", name=name, value=value, place=place, limit=limit)
            if value is None:
                of_floor = name.startswith("ratio")
                what = fact("gate.number_unknown", name=name, place=place, of_floor=of_floor)
            yield Failure(
                rule=f"tolerance.{name}",
                site=site.site,
                allowed=f"<= {limit:g}",
                found="unknown" if value is None else f"{value:.6g}",
                fact=what,
                tolerance=policy.tolerance.index(tolerance_here),
            )


def _notes(report: Report, policy: Policy) -> list[Fact]:
    """Names of preflight checks in the policy that this comparison lacks: misspelt, perhaps."""
    checks = [line.check for line in report.preflight]
    notes = [note for note in report.remarks if note.code == "measure.no_prefill"]
    code = _unexplained_code(report) if policy.preflight.code == "warn" else None
    if code is not None:
        notes.append(fact("gate.other_code", details=code.details))
    for key in ("allow", "refuse"):
        for pattern in getattr(policy.preflight, key):
            if not fnmatch.filter(checks, pattern):
                hint = did_you_mean(pattern, checks)
                notes.append(fact("gate.no_such_check", key=key, pattern=repr(pattern), hint=hint))
    return notes


def _failing_parts(report: Report, policy: Policy) -> Iterator[Failure]:
    """A number that no comparison has is a failure too: nothing was held against its limit."""
    limits = [
        (part, key, sign, name, limit)
        for part, table in policy.parts.items()
        for key, bounds, sign in (("max", table.max, 1), ("min", table.min, -1))
        for name, limit in bounds.items()
    ]
    for part, key, sign, name, limit in limits:
        result = report.parts.get(part)
        value = None if result is None else result.numbers.get(name)
        if result is None or (value is not None and sign * value <= sign * limit):
            continue
        allowed = f"{'<=' if sign > 0 else '>='} {limit:g}"
        if value is None:
            near = near_names(name, sorted(result.numbers))
            what = fact("gate.not_known_here", name=name, near=near)
        else:
            what = fact("gate.number_off", name=name, value=value, allowed=allowed)
        yield Failure(
            rule=f"{part}.{key}.{name}",
            allowed=allowed,
            found="unknown" if value is None else f"{value:.6g}",
            fact=what,
        )
