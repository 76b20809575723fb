"""Rounding sends tokens to other experts where scores nearly tie: few tokens, and far off."""

from __future__ import annotations

import pytest

from divergence import capture
from divergence.domains.logprobs import compare as compare_module
from divergence.domains.logprobs.compare import has_experts


def rerouted(share):
    """Rounding, and tokens that other experts were asked for."""

    def change(sequence, n, value, noise):
        return value + (noise.gauss(0, 3) if noise.random() < share else noise.gauss(0, 0.04))

    return change


@pytest.fixture
def told(monkeypatch):
    """``told(experts)``: what a side says of its model."""

    def say(experts):
        monkeypatch.setattr(compare_module, "has_experts", lambda runs: experts)

    return say


@pytest.mark.parametrize("share", [0.03, 0.1, 0.25])
@pytest.mark.parametrize("experts", [True, None])
def test_a_tail_that_routing_explains_is_no_fault(pair, told, experts, share):
    """Most tokens of every prompt are within rounding: never DIVERGED, never OK with confidence."""
    told(experts)
    verdict = pair(rerouted(share)).verdict
    assert verdict.kind in ("undetermined", "within_floor"), verdict
    assert verdict.kind == "undetermined" or verdict.confidence == "low"
    assert any(check.name == "experts" for check in verdict.checks)


def test_of_a_model_without_experts_it_is_one(pair, told):
    """A few tokens are named; many are another precision or a fault."""
    told(False)
    few, many = pair(rerouted(0.03)), pair(rerouted(0.1))
    assert (few.verdict.kind, few.logprobs.pattern) == ("localized", "positions")
    assert many.verdict.kind in ("drift", "systematic")


@pytest.mark.parametrize("experts", [True, None, False])
def test_what_moves_most_tokens_is_seen_whatever_the_model(pair, told, experts):
    """Half the prompts, or all: routing does not move the typical token."""
    told(experts)
    report = pair(lambda s, n, v, r: v + r.gauss(0, 0.9 if s % 2 else 0.02))
    assert (report.verdict.kind, report.logprobs.pattern) == ("drift", "everywhere")
    report = pair(lambda s, n, v, r: v + r.gauss(0, 0.4))
    assert (report.verdict.kind, report.logprobs.pattern) == ("drift", "everywhere")
    assert report.verdict.confidence == {True: "low", None: "medium", False: "medium"}[experts]


def test_a_tail_that_a_trusted_machine_shows_too_is_none(pair, told, tmp_path):
    """The floor run tells how many tokens usually differ so far."""
    told(False)
    pair(rerouted(0.04))
    (tmp_path / "trainer").rename(tmp_path / "trusted")
    usual = lambda s, n, v, r: rerouted(0.04)(s + 1000, n, v, r)  # noqa: E731
    report = pair(usual, floor=tmp_path / "trusted")
    assert report.logprobs.pattern == "within", report.verdict


def test_captures_tell_whether_a_model_has_experts(tiny_model, tmp_path):
    """By their modules and their configuration; a run of log-probabilities alone does not."""
    runs = {
        name: capture(tiny_model(name), out=tmp_path / name, prompts=["a"], max_new_tokens=1)
        for name in ("llama", "mixtral")
    }
    assert has_experts([runs["llama"]]) is False
    assert has_experts([runs["mixtral"]]) is True
    assert has_experts([]) is None
