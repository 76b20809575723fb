"""The decision: findings in, one verdict out. Nothing else makes a verdict.

1. Of the findings that convict, the first of ``CLAIMS`` is the verdict; of those of one
   precedence, what happens first. The others stand beside it.
2. A rank that disagrees with its replicas is named where it comes first, or nothing else is wrong.
3. An operator makes the place more precise, or convicts where the blocks are quiet. Where it blames
   the other side in the same block, the evidence contradicts itself, and no side is named.
   A drift in forwards of which every part, given equal inputs, only rounds is no fault: the model
   enlarges rounding. It is evidence then, and confidence is medium.
4. What explains the verdict stands in its evidence. It changes neither kind nor onset.
5. The confidence is computed from the checks of all that the verdict rests on, never chosen: high
   where every check was met; medium where one was not made, or failed; low where a failed one is
   what the verdict stands on (no anchored pass, or numbers that are not known). So more evidence
   that agrees can only raise it.
6. Rounding that no recorded difference explains (machine, versions, settings and code are the same)
   clears neither side.
7. Settings that differ, force, and a run compared with itself qualify any verdict.

docs/verdicts.md has the same table, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from divergence.comparison.constants import FEWEST_SIBLINGS
from divergence.comparison.result import (
    Check,
    Finding,
    PreflightLine,
    SiteKey,
    Verdict,
    schemes_apart,
)
from divergence.domain import Claim, added, hook_places, placed
from divergence.facts import Fact, fact, plain
from divergence.run.command import Command
from divergence.run.reader import Run

_SEEN_IN_EQUAL_INPUTS = 40
CLAIMS: dict[str, Claim] = {
    # other weights, other blocks, other prompt tokens
    "other_experiment": Claim(10, measured=False, alone=True),
    # nan or inf where the other side, or any result, has none
    "nonfinite": Claim(30, measured=False, alone=True),
    # masks, positions, choices: they do not round
    "integers_differ": Claim(_SEEN_IN_EQUAL_INPUTS),
    # beyond its limit at one site; at most sites of one kind
    "error_made_here": Claim(_SEEN_IN_EQUAL_INPUTS),
    "error_everywhere_of_kind": Claim(_SEEN_IN_EQUAL_INPUTS),
    # seen in the escalated pass alone
    "error_below_floor": Claim(50),
    # made by the code between modules
    "error_between": Claim(60),
    # sampling
    "not_the_largest_logit": Claim(70),
    # every bit
    "equal": Claim(80, measured=False),
    # the free run ends farther off than its parts explain
    "drift": Claim(90),
    # no more than rounding explains; the two differ, and nobody knows by how much
    "within_rounding": Claim(100),
    "not_known": Claim(100),
    # no operator makes the error
    "operators_fine": Claim(110, measured=False),
}
"""What may be the verdict: a smaller precedence decides before a larger one. Of the claims of one
precedence the earliest in the run decides. Those of domains stand in their ``Domain.claims``. Other
findings are told beside one of these: replicas_disagree (ranks that must hold the same do not),
operator_off (an operator makes the error), context, explanation, side_not_told, stands_out (a place
to look)."""

_MADE = ("error_made_here", "error_everywhere_of_kind")
_QUIET = ("identical", "within_floor", "undetermined", "drift")
"""No place is named: every setting that differs is said first; beside a named place, the precision.
"""
_SIDES = {"reference", "candidate"}
_FIRST = (-1, -1, -1)

CONFIDENCE_ORDER = {"low": 0, "medium": 1, "high": 2}
_BASIS = frozenset(
    {
        "anchored",  # seen where both sides got the same inputs
        "apart",  # what is off is apart from the rest
        "measured",  # by how much the two differ is known
        "routed",  # most tokens went to the same experts, and are judged
        "told_by_truth",  # of operators: held against the truth, not against the other side
        "one_side_alone",  # between modules: one side hands on what it got
        "agreement",  # no level blames the other side
        "same_experiment",  # nothing that blocks a comparison was overridden
        "two_runs",  # the two are not one run
    }
)
"""Where one of these failed nothing better than low is left; or one of a domain's own
(``Claim.basis``)."""
_COMPUTED_OTHERWISE = ("dtype", "quantization", "attention", "batch shape", "engine")
"""Checks of preflight whose difference lets a correct machine compute other numbers."""
_PRECISION = ("dtype", "quantization")
_TOKENS = "generated ids"
"""Whether they were chosen or forced does not let the numbers differ."""
_AS_STORED = ("preflight.derived_dtypes", "preflight.strides")
"""How equal values may be stored otherwise."""
_EXPERIMENT = ("weights", "prompt ids", "media inputs")
"""Checks whose difference would make the two runs different experiments."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and the sites that are flagged for it beside those beyond their own limit."""

    verdict: Verdict
    flags: frozenset[SiteKey] = frozenset()


def decide(
    findings: Sequence[Finding], preflight: Sequence[PreflightLine] = (), *, alike: bool = False
) -> Decision:
    """One verdict of all findings. ``preflight``: settings that differ, or that were overridden.
    ``alike``: nothing recorded lets the two runs differ (``nothing_explains``)."""
    convicting = [f for f in findings if f.role == "convicts" and f.claim != "replicas_disagree"]
    # what is seen at the end of free forwards of which every part is known to only round
    only_rounds = {
        sample: steps
        for f in convicting
        if f.claim == "within_rounding"
        for sample, steps in f.only_rounds.items()
    }
    enlarged = [
        f
        for f in convicting
        if f.accumulated_at and all(step < only_rounds.get(at, 0) for at, step in f.accumulated_at)
    ]
    convicting = [finding for finding in convicting if finding not in enlarged]

    def precedence(finding: Finding) -> tuple[int, tuple[int, int, int], bool]:
        """By the precedence of its claim, then when it happens."""
        own = claim_named(finding.claim).precedence
        # What lies between modules is seen in free runs; beside what was seen in equal inputs it
        # comes later.
        if finding.claim == "error_between" and not any(
            other.equal_inputs and claim_named(other.claim).precedence < own for other in convicting
        ):
            own = _SEEN_IN_EQUAL_INPUTS
        # at one place, what is exact comes before what is measured
        return own, finding.place or _FIRST, finding.claim in _MADE

    first = min(convicting, key=precedence, default=None)
    verdict, place, flags = None, None, frozenset[SiteKey]()
    if first is not None:
        verdict = _verdict_of(first)
        if claim_named(first.claim).measured:
            others = [f for f in findings if f.claim != "replicas_disagree"]
            for role in ("hints", "context"):
                verdict = _with(verdict, *(x for f in others if f.role == role for x in f.evidence))
        if enlarged and first.claim == "within_rounding":
            verdict = _with(verdict, *(fact("enlarged", what=f.headline) for f in enlarged))
            verdict = _unsure(verdict, check("free_runs", False, fact("free_runs_part")))
        if not claim_named(first.claim).alone:
            verdict = _with(verdict, *(item for f in convicting for item in f.beside))
        place = (not first.equal_inputs, *(first.place or _FIRST))
        flags = frozenset(first.flags)
    for finding in findings:
        if finding.claim != "replicas_disagree":
            continue
        if finding.role == "hints":
            verdict = _with(verdict or _verdict_of(finding), *finding.evidence)
            continue
        verdict, is_first = _beside_odd_rank(verdict, place, finding)
        if is_first:
            flags |= frozenset(finding.flags)
    for finding in findings:
        if finding.role == "refines":
            verdict = _refined(verdict, finding)
    if verdict is None:
        checks = [check("measured", False, fact("no_analysis"))]
        verdict = Verdict(
            kind="undetermined", headline=[fact("nothing_judged")], confidence="low", checks=checks
        )
    rounding = first is not None and first.claim == "within_rounding"
    if rounding and alike and verdict.kind == "within_floor":
        verdict = _unsure(
            verdict,
            check("explained", False, fact("nothing_differs")),
            headline=[*verdict.headline, fact("nothing_explains")],
            side=None,
        )
    return Decision(_qualified(verdict, preflight), flags)


def nothing_explains(reference: Run, candidate: Run, preflight: Sequence[PreflightLine]) -> bool:
    """Does nothing that two runs recorded let their numbers differ: machine, versions, settings,
    code, pads, and operators that do not repeat themselves?"""
    a, b = reference.manifest, candidate.manifest
    pads = [
        [(each.num_left_pad, each.num_right_pad) for each in manifest.tokens.samples]
        for manifest in (a, b)
    ]
    return (
        a.id != b.id
        and all(
            line.status == "same" and (line.check == _TOKENS or not line.details)
            for line in preflight
        )
        and not (a.settings.nondeterministic_warnings or b.settings.nondeterministic_warnings)
        and (a.tokens.groups, pads[0]) == (b.tokens.groups, pads[1])
    )


def explained(verdict: Verdict, findings: Sequence[Finding]) -> Verdict:
    """The verdict with what explains it: of one kind and onset; side and certainty may go."""
    evidence = list(verdict.evidence)
    for finding in findings:
        if finding.role == "abstains":
            verdict = replace(verdict, side=None, headline=without_side(verdict.headline))
        verdict = _unsure(verdict, *finding.rests_on) if finding.rests_on else verdict
        if finding.addition:
            verdict = replace(verdict, headline=[*verdict.headline, *finding.addition])
        if finding.leads:
            evidence = [*finding.evidence, *evidence]
        elif finding.about_onset:
            rest = [item for item in evidence[1:] if item not in finding.evidence]
            evidence = [*evidence[:1], *finding.evidence, *rest]
        else:
            evidence += finding.evidence
    return replace(verdict, evidence=evidence)


def claim_named(name: str) -> Claim:
    """Raises KeyError for one that may be no verdict."""
    claim: Claim = (CLAIMS | added("claims"))[name]
    return claim


def _verdict_of(finding: Finding) -> Verdict:
    return Verdict(
        kind=finding.kind or "undetermined",
        headline=finding.headline,
        onset=finding.onset,
        confidence=confidence_of(finding.rests_on),
        side=finding.side,
        evidence=list(finding.evidence),
        commands=finding.commands,
        checks=finding.rests_on,
    )


def _with(verdict: Verdict, *evidence: Fact) -> Verdict:
    """Adds evidence behind a verdict's own, each sentence once."""
    new: list[Fact] = []
    for item in evidence:
        if item not in verdict.evidence and item not in new:
            new.append(item)
    return replace(verdict, evidence=[*verdict.evidence, *new])


def _beside_odd_rank(
    verdict: Verdict | None, place: tuple[bool, int, int, int] | None, finding: Finding
) -> tuple[Verdict, bool]:
    """A rank that disagrees with its replicas: beside what comes before it, in the place of what
    comes after it. (The verdict, is it the rank's?)"""
    if verdict is None:
        return _verdict_of(finding), True
    onset, here = verdict.onset, (not finding.equal_inputs, *(finding.place or _FIRST))
    if onset is not None and place is not None and (finding.place is None or place < here):
        same = finding.onset is not None and (
            onset.site == finding.onset.site
            or (onset.block is not None and onset.block == finding.onset.block)
        )
        if not same:
            return _with(verdict, *finding.evidence), False
        return replace(
            verdict,
            headline=[*verdict.headline, fact("inside"), *finding.addition],
            evidence=[*finding.evidence, *verdict.evidence],
        ), False
    # what is off behind a rank that disagrees: in the same block it need not be made where it is
    # seen
    rank, behind = finding.onset, [fact("behind_rank", what=verdict.headline)]
    if verdict.kind in ("identical", "within_floor"):
        behind = []
    elif onset is not None and rank is not None and onset.block is not None:
        same = onset.block == rank.block and onset.site != rank.site
        if same and verdict.kind == "localized":
            behind = [fact("behind_rank_off", site=onset.site)]
    return replace(
        _verdict_of(finding),
        headline=[*finding.headline, *behind],
        evidence=[*finding.evidence, *verdict.evidence],
        commands=verdict.commands,
    ), True


def _refined(verdict: Verdict | None, finding: Finding) -> Verdict:
    """An operator that is off: inside the block that is, or alone, or speaking against it."""
    own = _verdict_of(finding)
    if verdict is None:
        return own
    here, onset = finding.onset, verdict.onset
    assert here is not None
    same_block = onset is not None and onset.block in (None, here.block)
    sides = {verdict.side, finding.side}
    if same_block and sides == _SIDES:
        return _contradicted(verdict, finding)
    elsewhere = onset is not None and not same_block
    if verdict.kind == "systematic" or (elsewhere and verdict.kind == "localized"):
        return replace(verdict, evidence=[*verdict.evidence, *finding.evidence])
    if verdict.kind in _QUIET:
        return replace(own, evidence=[*finding.evidence, *finding.beside])
    if (
        verdict.kind == "localized"
        and CONFIDENCE_ORDER[verdict.confidence] > CONFIDENCE_ORDER[own.confidence]
    ):
        # that the block is wrong is as sure as it was; the operator only tells where to look in it
        own = replace(
            own,
            headline=[*verdict.headline, fact("inside_it"), *finding.headline],
            confidence=verdict.confidence,
            checks=verdict.checks,
        )
    return replace(
        own,
        side=finding.side if finding.side is not None else verdict.side,
        evidence=[*finding.evidence, *verdict.evidence],
    )


def _contradicted(verdict: Verdict, finding: Finding) -> Verdict:
    """The verdict of the blocks, with what speaks against it, and without a side: one fault does
    not make a block wrong by one side and an operator inside it by the other."""
    assert verdict.onset is not None and finding.onset is not None
    levels = [
        fact("level", site=level.onset.site, side=level.side)
        for level in (verdict, finding)
        if level.onset
    ]
    return _unsure(
        verdict,
        Check(name="agreement", state="failed"),
        headline=[fact("evidence_contradicts", levels=levels)],
        side=None,
        # they meet the same difference; the descent takes one experiment, whatever is forced
        commands=[
            command.with_options(force=True) if command.name == "compare" else command
            for command in verdict.commands
            if command.name != "localize"
        ],
        evidence=[fact("levels_blame_apart", levels=levels), *verdict.evidence, *finding.evidence],
    )


def tells(verdict: Verdict, finding: Finding) -> bool:
    """Is what the finding claims in the verdict's summary, whoever is to blame?"""
    headline = without_side(verdict.headline)
    return all(item in headline for item in without_side(finding.headline))


def without_side(headline: Sequence[Fact]) -> list[Fact]:
    """A headline without the side that is to blame."""
    return [item.with_values(by=None) if item["by"] else item for item in headline]


def _unsure(verdict: Verdict, *checks: Check, **changes: Any) -> Verdict:
    """Adds checks that were not met to a verdict, and what else changes by them."""
    together = [*verdict.checks, *checks]
    return replace(verdict, checks=together, confidence=confidence_of(together), **changes)


def confidence_of(checks: Sequence[Check]) -> Literal["high", "medium", "low"]:
    """One word for the checks of a verdict."""
    basis = _BASIS.union(*(claim.basis for claim in added("claims").values()))
    if any(check.state == "failed" and check.name in basis for check in checks):
        return "low"
    return "high" if all(check.state == "met" for check in checks) else "medium"


def in_most(num: int, total: int) -> bool:
    """Is so much of a kind off that the kind is, and not one of it?"""
    return num >= FEWEST_SIBLINGS and 2 * num > total


def check(name: str, met: bool, lacking: Fact | str | None = None, *, made: bool = True) -> Check:
    """Makes a check. ``lacking``: what to say where it is not met. ``made``: could it be made at
    all?"""
    if met:
        return Check(name=name, state="met")
    if isinstance(lacking, str):
        lacking = plain(lacking) if lacking else None
    return Check(name=name, state="failed" if made else "not_made", lacking=lacking)


def _qualified(verdict: Verdict, preflight: Sequence[PreflightLine]) -> Verdict:
    """Puts the settings that differ at the head of its summary, and without certainty
    where a blocking difference was overridden: that explains whatever is found."""
    later = [how for line in preflight if line.check == "later weights" for how in line.details]
    changed = [how for how in later if how["side"] is not None]  # both sides' are a training's
    if changed and verdict.kind in ("identical", "within_floor"):
        verdict = _unsure(
            verdict,
            check("same_experiment", False, fact("other", checks=["later weights"])),
            kind="undetermined",
            headline=[fact("weights_apart", how=changed[0]), *verdict.headline],
            side=None,
        )
    checks = _COMPUTED_OTHERWISE if verdict.kind in _QUIET else _PRECISION
    differing = [
        fact("setting", check=line.check, reference=line.reference, candidate=line.candidate)
        for line in preflight
        if line.check in checks and line.status == "differs"
    ]
    codes = next((entry for entry in preflight if entry.check == "quantization"), None)
    compared = verdict.kind not in ("incomparable", "identical")
    if codes and codes.status == "differs" and compared:
        verdict = _codes_verdict(verdict, codes, differing)
    elif differing and compared:
        precise = any(line.check in _PRECISION for line in preflight if line.status == "differs")
        settings = fact(
            "settings_differ", settings=differing, beyond=precise or verdict.kind not in _QUIET
        )
        verdict = replace(verdict, headline=[settings, *verdict.headline])
    numbers = [
        item
        for line in preflight
        for detail in line.details
        for item in (*(detail["differences"] or detail["facts"] or ()), detail)
        if isinstance(item, Fact)
        and (
            item.code == "preflight.attribute"
            or (item.code == "preflight.derived" and item["how"].code not in _AS_STORED)
        )
    ]
    if numbers:
        verdict = replace(
            verdict,
            headline=[
                item.with_values(numbers=numbers) if item.code == "only_rounding" else item
                for item in verdict.headline
            ],
        )
    untold = [line.check for line in preflight if line.status == "unknown"]
    untold = [check for check in _EXPERIMENT if check in untold]
    if untold and compared:
        lacking = fact("side_not_known", checks=untold)
        verdict = _unsure(verdict, check("same_experiment", False, lacking, made=False))
    forced = [line.check for line in preflight if line.status == "blocking"]
    if not forced:
        return verdict
    return _unsure(
        verdict,
        check("same_experiment", False, fact("other", checks=forced)),
        headline=[*without_side(verdict.headline), fact("compared_by_force", checks=forced)],
        side=None,
        evidence=[fact("other_explains_all", checks=forced), *verdict.evidence],
    )


def _codes_verdict(verdict: Verdict, codes: PreflightLine, differing: list[Fact]) -> Verdict:
    """One side's numbers go through codes and the other's do not, or through others: that explains
    what differs, and no side is wrong by it."""
    others = [item for item in differing if item["check"] not in (codes.check, "engine")]
    reference, candidate = schemes_apart(codes.reference, codes.candidate)
    costs = fact(
        "codes_cost",
        reference=reference,
        candidate=candidate,
        others=others,
        within=verdict.kind == "within_floor",
    )
    if verdict.kind == "within_floor":
        return replace(verdict, headline=[costs])
    unnamed = without_side(verdict.headline)
    told_by = [item for place in hook_places("other_codes").values() for item in placed(place)()]
    return _unsure(
        verdict,
        check("same_experiment", False, fact("other_codes")),
        headline=[costs],
        side=None,
        commands=[],
        evidence=[
            fact("codes_hide_faults", what=unnamed),
            *verdict.evidence,
            fact("codes_cost_where", told_by=told_by),
        ],
    )


def one_run_verdict(
    verdict: Verdict, run_id: str, *, judged_by_truth: bool, num_held: int, commands: list[Command]
) -> Verdict:
    """The verdict on two runs of one id: equal bits are no finding then. What differs all the same
    (a damaged copy, ranks that disagree), and what a truth says of both, stays. ``num_held``:
    tensors that several ranks hold and agree on."""
    not_two = Check(name="two_runs", state="failed")
    if verdict.kind == "within_floor" or judged_by_truth:
        verdict = _unsure(verdict, not_two)
    elif verdict.kind in ("identical", "undetermined"):
        far = verdict.side == "both"
        verdict = _unsure(
            verdict,
            not_two,
            kind="undetermined",
            headline=[fact("with_itself", num_held=num_held or None, far=far)],
            side="both" if far else None,
            onset=None,
            commands=commands,
        )
    return replace(verdict, evidence=[fact("one_run", run=run_id), *verdict.evidence])
