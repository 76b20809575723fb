"""Rounding sends tokens to other experts where scores nearly tie: few tokens, and far off."""

import json

import pytest


def rerouted(share):
    """Rounding, and tokens that other experts were asked for."""

    def change(sequence, n, value, noise):
        return value + (noise.gauss(0, 3) if noise.random() < share else noise.gauss(0, 0.04))

    return change


SAYS = {
    True: {"model": {"config": {"num_local_experts": 8}}},
    False: {"model": {"config": {"num_local_experts": 0, "hidden_size": 8}}},
    None: {},
}
"""What both sides say of their model: has it experts? None: nothing, as a server."""


@pytest.mark.parametrize("share", [0.03, 0.1, 0.25])
@pytest.mark.parametrize("experts", [True, None])
def test_a_tail_that_routing_explains_is_no_fault(pair, experts, share):
    """Most tokens of every prompt are within rounding: never DIVERGED, never OK with confidence."""
    verdict = pair(rerouted(share), manifest=SAYS[experts]).verdict
    assert verdict.kind in ("undetermined", "within_floor"), verdict
    assert verdict.kind == "undetermined" or verdict.confidence == "low"
    assert any(check.name == "experts" for check in verdict.checks)


@pytest.mark.slow
def test_of_a_model_without_experts_it_is_one(pair):
    """A few tokens are named; many are another precision or a fault."""
    few, many = (pair(rerouted(share), manifest=SAYS[False]) for share in (0.03, 0.1))
    assert (few.verdict.kind, few.logprobs.pattern) == ("localized", "positions")
    assert many.verdict.kind in ("drift", "systematic")


@pytest.mark.slow
@pytest.mark.parametrize("experts", [True, None, False])
def test_what_moves_most_tokens_is_seen_whatever_the_model(pair, experts):
    """Half the prompts, or all: routing does not move the typical token."""
    for sizes in (0.02, 0.9), (0.4, 0.4):
        change = lambda s, n, v, r, sizes=sizes: v + r.gauss(0, sizes[s % 2])  # noqa: E731
        report = pair(change, manifest=SAYS[experts])
        assert (report.verdict.kind, report.logprobs.pattern) == ("drift", "everywhere")
    assert report.verdict.confidence == {True: "low", None: "medium", False: "medium"}[experts]


@pytest.mark.slow
def test_a_tail_that_a_trusted_machine_shows_too_is_none(pair, tmp_path):
    """The floor run tells how many tokens usually differ so far."""
    pair(rerouted(0.04), manifest=SAYS[False])
    (tmp_path / "trainer").rename(tmp_path / "trusted")
    usual = lambda s, n, v, r: rerouted(0.04)(s + 1000, n, v, r)  # noqa: E731
    report = pair(usual, floor=tmp_path / "trusted", manifest=SAYS[False])
    assert report.logprobs.pattern == "within", report.verdict


@pytest.mark.parametrize(
    ("model", "parts"),
    [("llama", {"model": "config", "plan": "modules"})]
    + [("mixtral", {part: field}) for part, field in (("model", "config"), ("plan", "modules"))],
)
def test_captures_tell_whether_a_model_has_experts(model, parts, shared_run, pair):
    """By their modules, and by their configuration."""
    run = shared_run(model, prompts=["a"], max_new_tokens=1, probe=False)
    said = json.loads((run.path / "manifest.json").read_text())
    manifest = {part: {field: said[part][field]} for part, field in parts.items()}
    if model == "llama":
        assert pair(rerouted(0.1), manifest=manifest).verdict.kind in ("drift", "systematic")
    else:  # where nothing is known of experts, confidence is medium
        shifted = pair(lambda s, n, v, r: v + r.gauss(0, 0.4), manifest=manifest).verdict
        assert (shifted.kind, shifted.confidence) == ("drift", "low")
