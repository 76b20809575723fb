"""A trainer–rollout pair: each planted cause is told from the others, and from rounding."""

import pytest

from divergence import localize
from divergence.errors import UsageError
from divergence.layout import print_lines
from divergence.report.summary import report_lines

CAUSES = {
    "rounding": (lambda s, n, v, r: v + r.gauss(0, 0.02), "within_floor", "within"),
    "the same": (lambda s, n, v, r: v, "identical", "equal"),
    "quantised": (lambda s, n, v, r: v + r.gauss(0, 0.35), "drift", "everywhere"),
    "one prompt": (
        lambda s, n, v, r: v + r.gauss(0, 1.5 if s == 7 else 0.02),
        "localized",
        "sequences",
    ),
    "an expert": (
        lambda s, n, v, r: v + (r.choice((-3, 3)) if r.random() < 0.02 else r.gauss(0, 0.02)),
        "undetermined",
        "positions",
    ),
    "a place": (lambda s, n, v, r: v + r.gauss(0, 0.02) - (n == 17), "localized", "places"),
    "every last token": (
        lambda s, n, v, r: v + r.gauss(0, 0.02) - (n == 59) / 2,
        "localized",
        "places",
    ),
    "a cache": (lambda s, n, v, r: v + r.gauss(0, 0.01 + n * 0.01), "drift", "growing"),
    "another model": (lambda s, n, v, r: v - abs(r.gauss(0.8, 0.5)), "systematic", "shifted"),
    "a temperature": (lambda s, n, v, r: v / 0.7 + r.gauss(0, 0.02), "systematic", "shifted"),
    "not a number": (
        lambda s, n, v, r: -float("inf") if (s, n) == (3, 9) else v,
        "nonfinite",
        "equal",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_told(pair, cause):
    """Each cause has its verdict and pattern, and what is only assumed is not sure."""
    change, kind, pattern = CAUSES[cause]
    report = pair(change)
    assert (report.verdict.kind, report.logprobs.pattern) == (kind, pattern), report.verdict
    assert (
        report.verdict.confidence != "high"
        or kind in ("identical", "nonfinite")
        or (report.logprobs.pattern not in ("within", "everywhere"))
    )


@pytest.mark.parametrize(
    "cause", [one for one in CAUSES if CAUSES[one][1] in ("drift", "localized")]
)
def test_few_prompts_tell_no_kind(pair, cause):
    """Three prompts: what differs beyond rounding is said, of what kind it is not."""
    report = pair(CAUSES[cause][0], num=3, length=200)
    assert report.verdict.confidence == "low"
    assert report.verdict.kind in ("undetermined", "within_floor")
    assert report.logprobs.shift.p_value is None


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param(lambda v, r: v / 1.3 + r.gauss(0, 0.02), "systematic", id="temperature above"),
        pytest.param(lambda v, r: v / 0.7 + r.gauss(0, 0.02), "systematic", id="temperature below"),
        pytest.param(lambda v, r: v - 0.4 - 0.1 * r.random(), "systematic", id="another template"),
        pytest.param(lambda v, r: v + r.gauss(0.1, 0.35), "undetermined", id="quantised"),
        pytest.param(lambda v, r: v - 0.01 * r.random(), "within_floor", id="within rounding"),
    ],
)
def test_tokens_that_all_lie_on_one_side_need_no_many_prompts(pair, change, kind):
    """No precision moves all tokens one way, and of how many prompts they are does not matter."""
    for num in (4, 12):
        report = pair(lambda s, n, v, r: change(v, r), num=num, length=24)
        expected = "drift" if (kind, num) == ("undetermined", 12) else kind
        assert report.verdict.kind == expected, report.verdict
    if kind == "systematic":
        assert "farther than any precision" not in report.verdict.summary


def test_a_token_that_differs_alone_is_told(pair):
    """Where all others are equal, half a nat of one token is no rounding of kernels."""
    report = pair(lambda s, n, v, r: v - 0.5 * ((s, n) == (3, 20)))
    assert report.verdict.kind == "within_floor"
    assert "1 token alone" in report.verdict.summary


def test_names_and_limits_of_trainers(pair):
    """Each number by the name and the limit of its framework, and bad ones in the evidence."""
    report = pair(CAUSES["quantised"][0])
    checks = {one.name: one for one in report.logprobs.checks}
    assert checks["rollout_probs_diff_mean"].state == "bad"
    assert checks["rollout_probs_diff_mean"].framework == "verl"
    assert checks["token_mult_prob_error"].framework == "NeMo-RL"
    assert checks["train_rollout_logprob_abs_diff"].value == pytest.approx(0.27, abs=0.04)
    said = " ".join(fact.text for fact in report.verdict.evidence)
    assert "verl's rollout_probs_diff_mean" in said and "normal < 0.005" in said


@pytest.mark.slow
def test_a_floor_run_says_what_rounding_is(pair, tmp_path):
    """With a trusted pair the scale is measured, and a small difference beyond it is seen;
    that another machine's rounding is no larger, it does not tell."""
    pair(lambda s, n, v, r: v + r.gauss(0, 0.0005))
    (tmp_path / "trainer").rename(tmp_path / "trusted")
    report = pair(lambda s, n, v, r: v + r.gauss(0, 0.01), floor=tmp_path / "trusted")
    assert report.logprobs.explained == pytest.approx(1.5 * 0.0004, rel=0.2)
    assert (report.verdict.kind, report.verdict.confidence) == ("drift", "low")


@pytest.mark.slow
def test_shown_and_as_a_page(pair, capsys):
    """The numbers stand in the terminal, in the JSON and on the page."""
    report = pair(CAUSES["one prompt"][0])
    print_lines(report_lines(report))
    shown = capsys.readouterr().out
    for text in ("1 prompt of 24", "rollout_probs_diff_mean", "effective_sample_size", "prompt"):
        assert text in shown
    page = report.html()
    assert "token_mult_prob_error" in page and "Log-probabilities" in page
    assert '"rollout_probs_diff_mean"' in report.to_json()


def test_localize_goes_into_no_log_probabilities(pair, tmp_path):
    """No machine could go on from there: it says so, and what can be asked."""
    report = pair(lambda s, n, v, r: v + r.gauss(0, 0.02), num=4)
    runs = report.reference.path, report.candidate.path
    with pytest.raises(UsageError, match="holds log-probabilities alone") as raised:
        localize(*runs, out=tmp_path / "places")
    assert str(raised.value.hint).startswith("divergence compare")
