"""What sampling settings make of log-probabilities is named: a temperature, and the unlikely tokens
left out."""

import math

import pytest


@pytest.mark.parametrize("noise", [1e-6, 0.02])
@pytest.mark.parametrize(("temperature", "bound"), [(0.6, "at most 0.6"), (1.4, "at least 1.4")])
def test_a_temperature_of_chosen_tokens_is_bounded(pair, temperature, bound, noise):
    """Of the chosen tokens alone log p goes with its size; by how much bounds the temperature."""
    report = pair(lambda s, n, v, r: v / temperature + r.gauss(0, noise))
    assert report.verdict.kind == "systematic"
    assert f"B = A at a temperature of {bound}" in report.verdict.summary


@pytest.mark.parametrize("noise", [1e-7, 0.01])
@pytest.mark.parametrize(
    ("share", "side"), [(0.9, "candidate"), (0.9, "reference"), (0.8, "candidate")]
)
def test_tokens_left_out_are_told_by_their_sign(pair, share, side, noise):
    """All tokens are told too high on the side that renormalises, by what the others held."""

    def change(s, n, value, generator):
        held = share + (1 - share) * generator.random() / 3
        value += math.log(held) * (1 if side == "reference" else -1)
        return min(value, -1e-9) + generator.gauss(0, noise)

    report = pair(lambda s, n, v, r: change(s, n, v - 0.5, r) + 0.5)
    whose = "B" if side == "candidate" else "A"
    assert report.verdict.kind == "systematic"
    assert f"as where {whose} leaves out the unlikely tokens" in report.verdict.summary


@pytest.mark.slow
def test_another_model_is_no_setting(pair):
    """Differences of one sign with a long tail, and those of both, are not named after settings."""
    for change in (
        lambda s, n, v, r: v - r.expovariate(1.5),
        lambda s, n, v, r: v + r.gauss(0, 0.35),
    ):
        summary = pair(change).verdict.summary
        assert "leaves out" not in summary
        assert "temperature of" not in summary
