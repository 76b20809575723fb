"""The decision: hand-made findings in, one verdict out. No model runs."""

import itertools
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.comparison import decide as deciding
from divergence.comparison.decide import (
    CLAIMS,
    CONFIDENCE_ORDER,
    Decision,
    check,
    confidence_of,
    explained,
)
from divergence.comparison.result import Check, Finding, Onset, PreflightLine
from divergence.domain import Claim, Domain
from divergence.facts import fact, in_one, plain, worded


def decide(findings, preflight=(), **options):
    """The decision, with the sentences of its verdict."""
    decision = deciding.decide(findings, preflight, **options)
    return Decision(worded(decision.verdict), decision.flags)


LINES = [
    [name for name, claim in CLAIMS.items() if claim.precedence == precedence]
    for precedence in sorted({claim.precedence for claim in CLAIMS.values()})
]
"""Claims by precedence."""
DOCS = Path(__file__).parents[2] / "docs"

KINDS = {
    "other_experiment": "incomparable",
    "nonfinite": "nonfinite",
    "integers_differ": "localized",
    "error_made_here": "localized",
    "error_everywhere_of_kind": "systematic",
    "error_below_floor": "localized",
    "error_between": "localized",
    "not_the_largest_logit": "localized",
    "equal": "identical",
    "drift": "drift",
    "within_rounding": "within_floor",
    "not_known": "undetermined",
    "operators_fine": "within_floor",
}


def onset(block="h.3", site=None, pass_="anchored"):
    return Onset(
        site=site or f"{block}:out", block=block, sample=0, step=0, position=None, pass_=pass_
    )


def finding(claim, *, order=0, equal_inputs=False, side=None, met=True, block="h.3"):
    """A finding that convicts, as an analysis would make it."""
    quiet = claim in ("equal", "drift", "within_rounding", "not_known", "operators_fine")
    return Finding(
        claim=claim,
        kind=KINDS[claim],
        headline=[plain(claim)],
        onset=None if quiet else onset(block),
        place=(0, 0, order),
        equal_inputs=equal_inputs,
        side=side,
        rests_on=[check("clear", met, "near its limit")],
        evidence=[plain(f"{claim}!")],
        beside=[plain(f"also {claim}")],
    )


def operator(side, *, block="h.3", met=True):
    return Finding(
        claim="operator_off",
        role="refines",
        kind="localized",
        headline=[plain("an operator")],
        onset=onset(block, f"{block}/aten.mm:out"),
        equal_inputs=True,
        side=side,
        rests_on=[check("clear", met, "")],
        evidence=[plain("operator!")],
    )


def rank(*, order=0, block="h.3", site=None):
    return Finding(
        claim="replicas_disagree",
        kind="localized",
        headline=[plain("rank 1 disagrees")],
        onset=onset(block, site),
        place=(0, 0, order),
        equal_inputs=True,
        side="candidate",
        rests_on=[check("bytes", True, "")],
        evidence=[plain("rank!")],
        addition=[plain("rank 1 disagrees")],
    )


HINT = Finding(claim="stands_out", role="hints", evidence=[plain("look at h.5")])
CONTEXT = Finding(claim="context", role="context", evidence=[plain("estimated")])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pair
        for one, two in itertools.combinations(LINES, 2)
        for pair in itertools.product(one, two)
        if "error_between" not in pair
    ],
)
def test_the_table_decides(first, second):
    """Of two claims of different lines the upper one is the verdict, whatever happens first."""
    verdict = decide([finding(second, order=0), finding(first, order=9)]).verdict
    assert (verdict.summary, verdict.kind) == (first, KINDS[first])


def test_every_claim_of_the_table_has_a_kind_here():
    """A claim that is new needs its kind in KINDS above, so that the tests below ask it too."""
    assert set(KINDS) == set(CLAIMS)


@pytest.mark.parametrize("unexplained", [True, False])
def test_rounding_that_nothing_recorded_explains_clears_neither_side(unexplained):
    """Same machine, versions, settings and code, and other numbers: what differs is not known."""
    verdict = decide([finding("within_rounding", side="neither")], alike=unexplained).verdict
    assert verdict.kind == "within_floor"
    assert verdict.side == (None if unexplained else "neither")
    assert verdict.confidence == ("medium" if unexplained else "high")
    assert ("nothing that is recorded of the two explains it" in verdict.summary) == unexplained


@pytest.mark.parametrize("num", [1, 2])
def test_rounding_beside_other_derived_tensors_names_them(num):
    """However many ways they differ in: several are one detail."""
    how = [fact("preflight.derived_behind", num=n) for n in range(num)]
    derived = [fact("preflight.derived", names=[f"m.{n}"], how=how[n]) for n in range(num)]
    line = PreflightLine(
        check="derived tensors",
        status="differs",
        reference="1",
        candidate="2",
        details=in_one(derived),
    )
    headline = [fact("only_rounding", sure=True, numbers=None)]
    rounding = msgspec.structs.replace(finding("within_rounding"), headline=headline)
    (told,) = deciding.decide([rounding], [line]).verdict.headline
    assert told["numbers"] == derived


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=5,
        unique_by=lambda one: one[0],
    )
)
@settings(max_examples=300)
def test_a_claim_of_a_lower_line_never_changes_the_verdict(chosen):
    """What stands below the verdict's claim in the table may be told beside it, and no more."""
    line = {claim: CLAIMS[claim].precedence for claim in CLAIMS}
    findings = [finding(claim, order=n, equal_inputs=equal) for claim, n, equal in chosen]
    verdict = decide(findings).verdict
    if verdict.summary == "error_between":
        return  # it may stand with free runs above its line
    kept = [
        f for f in findings if line[f.claim] <= max(line[verdict.summary], line["error_between"])
    ]
    assert decide(kept).verdict.summary == verdict.summary


@given(
    st.permutations([*(finding(claim, order=n) for n, claim in enumerate(KINDS)), HINT, CONTEXT])
)
@settings(max_examples=50)
def test_the_order_of_findings_does_not_matter(findings):
    """Kind, onset, side and confidence are those of the same findings in any order."""
    one, two = decide(findings).verdict, decide(list(reversed(findings))).verdict
    for name in ("kind", "summary", "onset", "side", "confidence"):
        assert getattr(one, name) == getattr(two, name)


@pytest.mark.parametrize("claim", KINDS)
def test_a_hint_never_changes_the_kind(claim):
    """It is a place to look."""
    for hint in (HINT, CONTEXT):
        without, with_hint = (
            decide(found).verdict for found in ([finding(claim)], [finding(claim), hint])
        )
        assert (without.kind, without.confidence) == (with_hint.kind, with_hint.confidence)


def test_of_one_line_the_earliest_decides_and_the_exact_one_where_they_meet():
    """An integer that differs before a block is its cause; behind it, a consequence."""
    block = finding("error_made_here", order=4, equal_inputs=True)
    for order, summary in ((3, "integers_differ"), (4, "integers_differ"), (5, "error_made_here")):
        found = decide([block, finding("integers_differ", order=order)]).verdict
        assert found.summary == summary
        assert "also integers_differ" in [fact.text for fact in found.evidence]


def test_what_lies_between_modules_yields_to_equal_inputs_alone():
    """It is seen in free runs: as early as what they show, and behind what an anchor shows."""
    seam = finding("error_between", order=1)
    free = finding("error_made_here", order=2)
    assert decide([free, seam]).verdict.summary == "error_between"
    anchored = finding("error_made_here", order=2, equal_inputs=True)
    assert decide([anchored, seam]).verdict.summary == "error_made_here"


@pytest.mark.parametrize("claim", [c for c in KINDS if KINDS[c] == "localized"])
@pytest.mark.parametrize("met", [True, False])
def test_an_operator_that_agrees_never_lowers_confidence(claim, met):
    """In the same block and by the same side, it tells where to look."""
    block = finding(claim, side="candidate")
    alone = decide([block]).verdict
    both = decide([block, operator("candidate", met=met)]).verdict
    assert CONFIDENCE_ORDER[both.confidence] >= CONFIDENCE_ORDER[alone.confidence]
    assert (both.side, both.onset.site) == ("candidate", "h.3/aten.mm:out")


@pytest.mark.parametrize("sides", [("candidate", "reference"), ("reference", "candidate")])
def test_a_contradiction_names_no_side(sides):
    """One fault does not make a block wrong by one side, and an operator in it by the other."""
    found = decide([finding("error_made_here", side=sides[0]), operator(sides[1])]).verdict
    assert (found.side, found.confidence) == (None, "low")
    assert "contradicts itself" in found.summary


def test_an_operator_of_another_block_stands_beside():
    """The verdict stays with the block that comes first."""
    found = decide([finding("error_made_here"), operator("candidate", block="h.7")]).verdict
    assert found.onset.site == "h.3:out"
    assert found.evidence[-1].text == "operator!"


def test_an_operator_convicts_where_the_blocks_are_quiet():
    """What a block's output hides is seen in the operator alone."""
    found = decide([finding("within_rounding"), operator("candidate")]).verdict
    assert (found.kind, found.side) == ("localized", "candidate")


def test_a_rank_comes_first_or_stands_beside():
    """Earlier it is the verdict, in the same block it is named, later it is told."""
    block = finding("error_made_here", order=4, equal_inputs=True)
    early = decide([block, rank(order=2, block="h.1")]).verdict
    assert early.summary == "rank 1 disagrees (error_made_here)"
    same = decide([block, rank(order=6)]).verdict
    assert same.summary == "error_made_here: rank 1 disagrees"
    late = decide([block, rank(order=6, block="h.9")]).verdict
    assert (late.summary, late.evidence[-1].text) == ("error_made_here", "rank!")


def test_what_is_off_behind_a_rank_in_its_own_block_is_not_said_to_be_made_there():
    """It may follow from what that rank got wrong before."""
    block = finding("error_made_here", order=4, equal_inputs=True)
    found = decide([block, rank(order=2, site="h.3.norm:out")]).verdict
    assert found.summary == f"rank 1 disagrees (behind it {block.onset.site} is off)"


def test_explanations_change_neither_kind_nor_onset():
    """They say why. One that abstains takes the side away, and with it some confidence."""
    verdict = decide([finding("error_made_here", side="candidate")]).verdict
    why = Finding(claim="explanation", role="explains", about_onset=True, evidence=[plain("why")])
    told = worded(explained(verdict, [why]))
    assert (told.kind, told.onset, told.confidence) == (
        verdict.kind,
        verdict.onset,
        verdict.confidence,
    )
    assert [fact.text for fact in told.evidence][:2] == ["error_made_here!", "why"]
    unsure = Finding(
        claim="side_not_told",
        role="abstains",
        rests_on=[check("truth_of_reference_code", False, "")],
    )
    told = worded(explained(verdict, [unsure]))
    assert (told.side, told.confidence) == (None, "medium")


def test_force_leaves_neither_side_nor_confidence():
    """Other weights explain whatever is found, in an operator too."""
    lines = [PreflightLine(check="weights", status="blocking", reference="a", candidate="b")]
    found = decide(
        [finding("error_made_here", side="candidate"), operator("candidate")], lines
    ).verdict
    assert (found.side, found.confidence) == (None, "low")
    assert "compared by force: other weights" in found.summary


@pytest.mark.parametrize("check", ["weights", "prompt ids"])
def test_what_a_side_does_not_tell_takes_certainty(check):
    """Unknown weights may be other ones; equal bits are equal whoever made them."""
    lines = [PreflightLine(check=check, status="unknown", reference="a", candidate="unknown")]
    found = decide([finding("error_made_here", side="candidate")], lines).verdict
    assert found.confidence == "medium"
    assert found.checks[-1].detail == f"the {check} of a side are not known"
    assert decide([finding("equal")], lines).verdict.confidence == "high"


def test_confidence_is_that_of_the_checks():
    """No verdict has another."""
    for claims in itertools.combinations(KINDS, 2):
        for met in (True, False):
            verdict = decide([finding(claim, met=met) for claim in claims]).verdict
            assert verdict.confidence == confidence_of(verdict.checks)


def test_nothing_found_is_undetermined():
    """No analysis applied."""
    assert decide([]).verdict.kind == "undetermined"


def test_the_documented_table_is_the_one_in_the_code():
    """docs/verdicts.md lists the claims in the order of their ranks, and every claim once."""
    text = (DOCS / "verdicts.md").read_text(encoding="utf-8")
    table = text.partition("<!-- precedence -->")[2].partition("<!-- end -->")[0]
    rows = [
        re.findall(r"`([a-z_]+)`", row.split("|")[2])
        for row in table.splitlines()
        if row.startswith("| ") and "`" in row
    ]
    assert rows == LINES
    told = set(re.findall(r"`([a-z_]+)`", text))
    made = {
        name
        for path in (DOCS.parent / "divergence").rglob("*.py")
        for name in re.findall(r'\bclaim="([a-z_]+)"', path.read_text(encoding="utf-8"))
    }
    assert set(CLAIMS) < made <= told


def test_a_claim_of_a_domain_stands_where_it_says(monkeypatch):
    """Nothing of the core names it."""
    mine = Domain(name="mine", claims={"mine": Claim(35, alone=True)})
    monkeypatch.setattr("divergence.comparison.decide.added", lambda kind: getattr(mine, kind))
    own = msgspec.structs.replace(finding("drift"), claim="mine", headline=[plain("mine")])
    for other, first in (("error_made_here", "mine"), ("nonfinite", "nonfinite")):
        assert decide([finding(other), own]).verdict.summary == first


@pytest.mark.parametrize("kind", ["error_made_here", "within_rounding"])
def test_other_codes_explain_what_differs(kind):
    """No side is wrong by it, nothing is certain, and no kernel is blamed in the first sentence."""
    line = PreflightLine(
        check="quantization",
        status="differs",
        reference="none",
        candidate="W8A8: int8 weights per channel",
    )
    found = finding(kind, side="candidate" if kind == "error_made_here" else None)
    verdict = decide([found], [line]).verdict
    assert verdict.summary.startswith("A is not quantised and B is W8A8: what differs is what")
    assert verdict.side is None
    assert verdict.kind == KINDS[kind]
    if kind == "error_made_here":
        assert verdict.confidence == "low"
        assert not any(command.startswith("divergence localize") for command in verdict.next)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            "W8A8: int8 weights per channel, int8 activations per token, dynamic (by)",
            "W8A8: int8 weights per channel, int8 activations per tensor, dynamic (by)",
            "A is W8A8 (int8 activations per token) and B is W8A8 (int8 activations per tensor): ",
        ),
        (
            "W8A8: int8 weights per channel; not quantised: lm_head (by)",
            "W8A8: int8 weights per channel; not quantised: lm_head, a.b (by)",
            "A is W8A8 (not quantised: lm_head) and B is W8A8 (not quantised: lm_head, a.b): ",
        ),
        (
            "W8A8: int8 weights per channel (by)",
            "W8A8: int8 weights per channel, asymmetric (by)",
            "A is W8A8 and B is W8A8 (asymmetric): ",
        ),
        (
            "scheme not known; not quantised: lm_head; dequantised when loaded (gguf)",
            "none",
            "A is quantised (gguf) and B is not quantised: ",
        ),
    ],
)
def test_schemes_of_one_name_are_told_apart(one, other, said):
    """Where both are W8A8, that alone says nothing."""
    line = PreflightLine(check="quantization", status="differs", reference=one, candidate=other)
    verdict = decide([finding("within_rounding")], [line]).verdict
    assert verdict.summary.startswith(said)


@pytest.mark.parametrize(
    ("at", "only_rounds", "kind"),
    [
        ([(1, 2)], {0: 9, 1: 3}, "within_floor"),
        ([(1, 3)], {1: 3}, "drift"),
        ([(0, 2), (1, 3)], {0: 9, 1: 3}, "drift"),
        ([], {0: 9}, "drift"),
    ],
)
def test_a_drift_where_every_part_only_rounds_is_the_models_own(at, only_rounds, kind):
    """The last parts of free runs enlarge rounding: it is said, and confidence is medium."""
    quiet = Finding(
        claim="within_rounding",
        kind="within_floor",
        headline=[plain("only rounding")],
        only_rounds=only_rounds,
        side="neither",
    )
    drift = Finding(
        claim="drift",
        kind="drift",
        headline=[plain("a token flips")],
        accumulated_at=at,
        rests_on=[check("anchored", False, plain("seen in free runs"))],
    )
    verdict = decide([quiet, drift]).verdict
    assert verdict.kind == kind
    assert [item.code for item in verdict.evidence].count("enlarged") == (kind != "drift")
    assert verdict.confidence == ("low" if kind == "drift" else "medium")


@pytest.mark.parametrize("names", [*itertools.product(("anchored", "clear", "truth"), repeat=2)])
def test_meeting_a_check_never_lowers_confidence(names):
    """For every pair of checks in every state: met is at least as good as anything else."""
    for states in itertools.product(("met", "failed", "not_made"), repeat=2):
        checks = [Check(name=n, state=s) for n, s in zip(names, states, strict=True)]
        better = [Check(name=names[0], state="met"), checks[1]]
        assert CONFIDENCE_ORDER[confidence_of(better)] >= CONFIDENCE_ORDER[confidence_of(checks)]


def test_high_needs_every_check_and_free_runs_alone_are_low():
    """The three words."""
    met = check("anchored", True, "")
    assert confidence_of([met, check("clear", True, "")]) == "high"
    assert confidence_of([met, check("truth", False, "no truth", made=False)]) == "medium"
    assert confidence_of([check("anchored", False, "free runs"), met]) == "low"
