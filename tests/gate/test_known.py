"""Known differences of a policy: what they excuse, and that they excuse nothing else."""

import datetime

import msgspec
import pytest

from divergence import capture, check
from tests import by_hand

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact."]
FAULT = "model.layers.1.mlp:out=scale:1.05"
ENTRY = {"sites": "model.layers.1:out", "max": {"rel_l2": 0.5}, "reason": "vendor kernel, seen"}
LATER = datetime.date(9999, 1, 31)


@pytest.fixture
def golden(shared_run):
    return shared_run(model={"dtype": "float32"}, prompts=PROMPTS, max_new_tokens=2)


@pytest.fixture
def again(golden, shared_run):
    """``again(*plants)`` → the golden repeated with faults."""

    def make(*plants, **options):
        return shared_run(like=golden, plants=plants, **options)

    return make


def policy(*entries, **rest):
    return by_hand.policy(preflight={"allow": ["*"]}, known=list(entries), **rest)


def test_a_known_difference_passes_and_is_printed(golden, again, printed):
    """All that is flagged is known and no larger: passed, and the use stands in text and JSON."""
    new = again(FAULT)
    assert not check(golden, new, policy=policy()).passed
    result = check(golden, new, policy=policy(ENTRY | {"until": LATER}))
    assert (result.passed, result.excused) == (True, True), result.failures
    (use,) = result.known
    assert (use.status, use.reason) == ("used", "vendor kernel, seen")
    assert 0 < use.found["rel_l2"] <= use.allowed["rel_l2"] == 0.5
    for options in ([], ["-q"]):
        text = " ".join(printed(result, *options).split())
        assert "known: model.layers.1:out: used" in text
        assert "vendor kernel, seen" in text and "9999-01-31" in text
    answer = msgspec.json.decode(printed(result, "--json"))
    assert answer["excused"] and answer["known"][0]["until"] == "9999-01-31"
    assert answer["report"]["verdict"]["kind"] == "localized"


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"max": {"rel_l2": 1e-6}}, "exceeded", "larger than known"),
        ({"max": {"rel_l2": 0.5, "ratio": 1.0}}, "exceeded", "ratio"),
        ({"until": datetime.date(2001, 1, 30)}, "expired", "2001-01-30"),
        ({"sites": "model.layers.2:out"}, "unused", "nothing that is flagged"),
        ({"pass": "free"}, "unused", "nothing that is flagged"),
        ({"dtype": "bfloat16"}, "unused", "nothing that is flagged"),
    ],
)
def test_what_does_not_cover_it_excuses_nothing(golden, again, printed, change, status, told):
    """A larger difference, a past date, another site, pass or dtype: the check fails."""
    result = check(golden, again(FAULT), policy=policy(ENTRY | change))
    assert [failure.rule for failure in result.failures] == ["verdicts"]
    assert (result.known[0].status, result.excused) == (status, False)
    assert told in " ".join(printed(result).split())


def test_a_fault_beside_a_known_difference_fails(golden, again):
    """Everything flagged must be known: a second block is named."""
    new = again(FAULT, "model.layers.2.mlp:out=scale:1.05")
    result = check(golden, new, policy=policy(ENTRY))
    (failure,) = result.failures
    assert failure.rule == "verdicts"
    assert "not known: model.layers.2:out" in failure.text
    both = ENTRY | {"sites": ["model.layers.1:out", "model.layers.2:out"]}
    assert check(golden, new, policy=policy(both)).passed


@pytest.mark.slow
def test_operators_in_a_known_block_are_known(golden, again, checked, tmp_path_factory):
    """What they make ends in the block's output, which is no larger than known; in another block
    they are not."""
    sites = {"sites": ["blocks", "ops@model.layers.1"]}
    base = capture(
        golden.manifest.model.source,
        out=tmp_path_factory.mktemp("o") / "run",
        prompts=PROMPTS,
        max_new_tokens=2,
        **sites,
    )
    new = capture(like=base, out=tmp_path_factory.mktemp("o") / "run", plants=[FAULT])
    result = check(base, new, policy=policy(ENTRY))
    assert "/" in result.report.verdict.onset.site
    assert result.passed and result.excused
    operators = result.report.operators.results
    operators[:] = [msgspec.structs.replace(one, block="model.layers.0") for one in operators]
    result = checked(result.report, policy(ENTRY))
    (failure,) = result.failures
    assert "operator" in failure.text
    assert result.known[0].status == "matched"


def test_an_unused_entry_is_noted(golden, again, printed):
    """On a healthy run the check passes, and says that the difference was not seen."""
    result = check(golden, again(), policy=policy(ENTRY))
    assert result.passed and not result.excused
    assert result.known[0].status == "unused"
    assert "take the entry out" in " ".join(printed(result).split())


def test_nan_is_never_known(golden, again):
    """Whatever an entry allows, nan on one side fails."""
    everything = ENTRY | {"sites": "*", "max": {"rel_l2": 2.0}}
    result = check(golden, again("model.layers.1:out=nan:7"), policy=policy(everything))
    assert "verdicts" in [failure.rule for failure in result.failures]
    assert not result.excused


def test_coverage_and_tokens_are_never_excused(golden, again):
    """A known difference stands for the verdict alone."""
    new = again(FAULT, max_new_tokens=1)
    result = check(golden, new, policy=policy(ENTRY, tokens={"min_equal": 1.0}))
    assert result.excused
    rules = {failure.rule for failure in result.failures}
    assert rules == {"min_coverage", "tokens.min_equal"}


def test_drift_beside_a_known_difference_fails(golden, again, checked):
    """The free run may be as far off as the known block makes it, and no farther."""
    result = check(golden, again(FAULT), policy=policy(ENTRY))
    report = result.report
    last = max(
        (
            s
            for s in report.sites
            if s.pass_ == "free" and s.role == "block" and s.step == 0 and s.site.endswith(":out")
        ),
        key=lambda s: s.order,
    )
    number = report.sites.index(last)
    far = 1e6 * last.token_rel_l2_median
    report.sites[number] = msgspec.structs.replace(last, token_rel_l2_median=far)
    (failure,) = checked(report, policy(ENTRY)).failures
    assert "beside what is known" in failure.text


def test_a_tolerance_holds_at_known_sites(golden, again):
    """Its limit is another rule: an entry does not lift it."""
    rules = policy(ENTRY, tolerance=[{"sites": "model.layers.1:out", "rel_l2": 1e-5}])
    failures = check(golden, again(FAULT), policy=rules).failures
    assert {failure.rule for failure in failures} == {"tolerance.rel_l2"}


def test_the_verdict_of_ranks_and_operators_is_not_known(golden, again, checked):
    """What is no flagged record cannot be known: an abstention, a drift, an operator."""
    report = check(golden, again(FAULT), policy=policy(ENTRY)).report
    report.sites[:] = [msgspec.structs.replace(site, flagged=False) for site in report.sites]
    result = checked(report, policy(ENTRY))
    assert not result.passed and result.known[0].status == "unused"
