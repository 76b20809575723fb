"""`check`: a comparison held against a policy.

A policy is met or not; every rule that is not met is one Failure with what was
allowed and what was found. Runs that cannot be compared are an error and never a
pass, nor is a golden of which nothing was compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from divergence.compare.policy import Policy, load_policy
from divergence.compare.result import Coverage, Report, TokenDifference
from divergence.errors import IncomparableError

__all__ = ["CheckResult", "Failure", "check", "coverage_share", "evaluate", "is_tie"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of the policy that is not met. ``allowed`` and ``found`` as text for people."""

    rule: str
    site: str | None = None
    allowed: str
    found: str
    text: str


class CheckResult(msgspec.Struct, kw_only=True):
    """The answer of `check`. ``tie``: the first flipped token is one, by the policy's margin."""

    passed: bool
    failures: list[Failure]
    num_ties: int = 0
    report: Report
    policy: Policy


class _NothingComparedError(IncomparableError):
    """Carries the report, so that the command line can show why."""

    report: Report | None = None


def check(
    golden: Any,
    new: Any,
    *,
    policy: Policy | str | os.PathLike[str] | None = None,
    name_map: Any = None,
    truth: Any = None,
    floor: Sequence[Any] = (),
    progress: Callable[..., None] | None = None,
) -> CheckResult:
    """Compare ``new`` with ``golden`` and hold the report against ``policy`` (configs/ci.toml).

    ``truth`` and ``floor`` as for compare; the policy's thresholds are used.

    Raises IncomparableError where preflight blocks or nothing was compared.
    """
    from divergence.compare.api import compare

    rules = load_policy(policy)
    report = compare(
        golden,
        new,
        name_map=name_map,
        truth=truth,
        floor=floor,
        thresholds=rules.thresholds,
        progress=progress,
    )
    if report.verdict.kind == "incomparable" or report.coverage.num_compared == 0:
        blocking = [line for line in report.preflight if line.status == "blocking"]
        error = _NothingComparedError(
            report.verdict.summary
            if report.verdict.kind == "incomparable"
            else "nothing was compared, so nothing was checked",
            where="; ".join(
                f"{line.check}: {line.reference} in the golden, {line.candidate} in the new run"
                for line in blocking
            )
            or None,
            hint=f"divergence compare {report.reference.path} {report.candidate.path}",
        )
        error.report = report
        raise error
    return evaluate(report, rules)


def evaluate(report: Report, policy: Policy) -> CheckResult:
    """The rules of ``policy`` that ``report`` does not meet, in the order of the policy's keys."""
    failures = [
        *_verdict(report, policy),
        *_coverage(report.coverage, policy),
        *_preflight(report, policy),
        *_tokens(report, policy),
        *_tolerances(report, policy),
    ]
    num_ties = _num_equal(report, policy)[1] if report.tokens else 0
    return CheckResult(
        passed=not failures,
        failures=failures,
        num_ties=num_ties,
        report=report,
        policy=policy,
    )


def _verdict(report: Report, policy: Policy) -> list[Failure]:
    verdict = report.verdict
    if verdict.kind in policy.verdicts:
        return []
    allowed = ", ".join(policy.verdicts)
    return [
        Failure(
            rule="verdicts",
            site=verdict.onset.site if verdict.onset else None,
            allowed=allowed,
            found=verdict.kind,
            text=f"the verdict is {verdict.kind}; the policy allows {allowed}",
        )
    ]


def coverage_share(coverage: Coverage) -> float:
    """Compared over all that the golden offered: compared + only there + skipped; 0 if nothing."""
    total = coverage.num_compared + coverage.num_only_reference + coverage.num_skipped
    return coverage.num_compared / total if total else 0.0


def _coverage(coverage: Coverage, policy: Policy) -> list[Failure]:
    share = coverage_share(coverage)
    if share >= policy.min_coverage:
        return []
    left_out = coverage.num_only_reference + coverage.num_skipped
    return [
        Failure(
            rule="min_coverage",
            allowed=f">= {policy.min_coverage:g}",
            found=f"{share:.6g}",
            text=f"{coverage.num_compared} records of the golden were compared and {left_out} "
            f"were not: a share of {share:.4g}, and the policy wants {policy.min_coverage:g}",
        )
    ]


def _preflight(report: Report, policy: Policy) -> list[Failure]:
    return [
        Failure(
            rule="preflight",
            allowed="the same",
            found=f"{line.reference} / {line.candidate}",
            text=f"{line.check} differs: {line.reference} in the golden, "
            f"{line.candidate} in the new run",
        )
        for line in report.preflight
        if line.status == "blocking"
        or (line.status == "differs" and not policy.preflight.allows(line.check))
    ]


def is_tie(difference: TokenDifference, margin: float | None, z: float | None = None) -> bool:
    """Whether both sides preferred their own token by no more than ``margin`` logits, or the gap
    was at most ``z`` standard deviations of what rounding makes of these logits: of the floor where
    a truth shows it, of the rounding model otherwise; never of the two sides' own difference."""
    judged = difference.z_of in ("floor", "model") and difference.z is not None
    if z is not None and judged and difference.z <= z:
        return True
    if margin is None or difference.margin is None:
        return False
    other = difference.candidate_margin
    return difference.margin <= margin and (other is None or other <= margin)


def _tokens(report: Report, policy: Policy) -> list[Failure]:
    rules, tokens = policy.tokens, report.tokens
    wanted = rules.min_equal is not None or rules.min_equal_count is not None
    if tokens is None or tokens.num_tokens == 0 or not wanted:
        return []
    num_equal, num_ties = _num_equal(report, policy)
    share = num_equal / tokens.num_tokens
    failures = []
    for rule, least, found in (
        ("tokens.min_equal", rules.min_equal, share),
        ("tokens.min_equal_count", rules.min_equal_count, num_equal),
    ):
        if least is not None and found < least:
            counted = f" ({num_ties} more were ties)" if num_ties else ""
            failures.append(
                Failure(
                    rule=rule,
                    allowed=f">= {least:g}",
                    found=f"{found:.6g}",
                    text=f"{tokens.num_equal} of {tokens.num_tokens} generated tokens are "
                    f"equal{counted}; the policy wants {least:g}",
                )
            )
    return failures


def _num_equal(report: Report, policy: Policy) -> tuple[int, int]:
    """Equal tokens with ties counted in, and the number of ties.

    A tie is one whatever the verdict, since its unit is rounding and no fault moves it. Tokens not
    forced: what follows a tie continues another text, so nothing after it counts against the
    candidate.
    """
    tokens, rules = report.tokens, policy.tokens
    margin = rules.tie_margin_for(report.reference.dtype)
    ties = sum(is_tie(flip, margin, rules.tie_z) for flip in tokens.differences)
    if ties and not tokens.forced and ties == len(tokens.differences):
        return tokens.num_tokens, ties
    return tokens.num_equal + ties, ties


def _tolerances(report: Report, policy: Policy) -> list[Failure]:
    failures = []
    for site in report.sites:
        tolerance = policy.tolerance_for(site)
        for name, limit in (tolerance.limits() if tolerance else {}).items():
            found = getattr(site, name)
            # written as "not <=", so that a nan is above every limit
            if site.identical or (found is not None and found <= limit):
                continue
            place = f"{site.site} ({site.pass_}, sample {site.sample}, step {site.step})"
            failures.append(
                Failure(
                    rule=f"tolerance.{name}",
                    site=site.site,
                    allowed=f"<= {limit:g}",
                    found="unknown" if found is None else f"{found:.6g}",
                    text=f"{name} is unknown at {place}, "
                    + (
                        "where there is no floor"
                        if name.startswith("ratio")
                        else "where not both sides keep what it takes (--store)"
                    )
                    if found is None
                    else f"{name} is {found:.3g} at {place}; the policy allows {limit:g}",
                )
            )
    return failures
