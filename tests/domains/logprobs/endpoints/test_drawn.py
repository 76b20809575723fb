"""--answers: texts drawn at temperature 1, held together as distributions."""

import pytest

from divergence import ServerOptions, capture, compare
from divergence.errors import UsageError

PROMPTS = [f"prompt number {n}" for n in range(8)]
GIVEN = {"prompts": PROMPTS, "max_new_tokens": 12, "answers": 6}


@pytest.mark.slow
@pytest.mark.parametrize("speaks", ["vllm", "llama.cpp", "sglang", "tgi"])
def test_one_distribution_is_no_alarm_and_another_is_seen(stub, serve, speaks):
    """Another machine draws other texts of the same model; other weights are another model."""
    stub.speaks = speaks
    a, stub.machine = serve("a"), 1
    same = compare(a, serve("b"))
    assert a.manifest.engine.facts["tokens"] == "drawn"
    assert (same.verdict.kind, same.verdict.confidence) == ("within_floor", "low"), same.verdict
    assert same.logprobs.texts.p_value > 0.01 and same.logprobs.num_flips == 0
    assert f"{same.logprobs.texts.smallest_share:.0%}" in same.verdict.summary
    stub.weights = 1
    other = compare(a, serve("c"))
    assert other.logprobs.texts.p_value < 0.01 and other.verdict.kind == "systematic"


@pytest.mark.slow
def test_a_server_of_text_alone(stub, serve):
    """Characters are compared; neither cause nor equality is claimed with confidence."""
    stub.lacks = {"ids", "logprobs", "prompt_logprobs"}
    a, stub.machine = serve("a"), 1
    assert compare(a, serve("b")).verdict.kind == "within_floor"
    stub.weights = 1
    other = compare(a, serve("c"))
    assert (other.verdict.kind, other.verdict.confidence) == ("systematic", "low"), other.verdict
    assert "another distribution" in other.verdict.summary


def test_few_answers_make_no_test(stub, serve):
    """Two texts of one prompt are too few for a verdict."""
    stub.lacks = {"ids", "logprobs", "prompt_logprobs"}
    a, stub.machine = serve("a", prompts=PROMPTS[:1], answers=2), 1
    report = compare(a, serve("b", prompts=PROMPTS[:1], answers=2))
    assert report.verdict.kind == "undetermined" and "too few" in report.verdict.summary


@pytest.mark.slow
def test_drawn_against_greedy_stops(serve):
    """Drawn answers are not compared with greedy ones."""
    report = compare(
        serve("a"), serve("b", prompts=[p for p in PROMPTS for _ in range(6)], answers=0)
    )
    assert report.verdict.kind == "incomparable" and "were drawn" in report.verdict.summary


@pytest.mark.slow
def test_drawn_answers_are_scored_elsewhere(stub, serve, tmp_path):
    """--like scores them as any; with --answers it is refused."""
    a, stub.noise = serve("a"), 0.01
    b = capture("tiny", server=ServerOptions(endpoint=stub.url), out=tmp_path / "b", like=a)
    report = compare(a, b)
    assert b.manifest.engine.facts["tokens"] == "given" and report.logprobs.texts is None
    assert (report.logprobs.num_equal, report.verdict.kind) == (8 * 6 * 12, "within_floor")
    with pytest.raises(UsageError, match="scores their answers"):
        serve("c", prompts=(), like=a)
    with pytest.raises(UsageError, match="--answers 5000"):
        serve("c", answers=5000)
