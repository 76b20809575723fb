"""A policy holds log-probabilities alone: what nobody tells is no failure, numbers have limits."""

import json
import random

import pytest

from divergence import check, import_dump
from tests import by_hand


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A rollout, and a trainer that is off by 0.02 nats."""
    folder, generator = tmp_path_factory.mktemp("check"), random.Random(1)
    lines = []
    for _ in range(12):
        values = [-generator.expovariate(1.2) for _ in range(20)]
        lines.append(
            {
                "tokens": [generator.randrange(900) for _ in range(25)],
                "response_length": 20,
                "rollout_log_probs": values,
                "log_probs": [min(0.0, value + generator.gauss(0, 0.02)) for value in values],
            }
        )
    file = folder / "r.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return (
        import_dump(file, out=folder / "a"),
        import_dump(file, out=folder / "b", layout="trainer"),
    )


def test_the_default_policy_passes_a_healthy_pair(runs):
    """The dtype of a file or a server is told by nobody."""
    result = check(*runs)
    assert result.passed, result.failures


def test_numbers_have_limits_by_their_names(runs):
    """Above, below, and a name that no comparison has."""
    rules = {
        "max": {"mean_abs": 0.1, "rollout_probs_diff_mean": 0.005, "k33": 1.0},
        "min": {"effective_sample_size": 0.3},
    }
    result = check(*runs, policy=by_hand.policy(parts={"logprobs": rules}))
    assert [one.rule for one in result.failures] == [
        "logprobs.max.rollout_probs_diff_mean",
        "logprobs.max.k33",
    ]
    assert "did you mean k3" in result.failures[1].text


def test_a_policy_file_holds_them(runs, tmp_path):
    """Limits of log-probabilities in a policy are rules of check."""
    path = tmp_path / "policy.toml"
    path.write_text("[tokens]\nmin_equal = 1.0\n[logprobs.max]\nmean_abs = 0.001\n")
    result = check(*runs, policy=path)
    rules = {one.rule for one in result.failures}
    assert "logprobs.max.mean_abs" in rules and "tokens.min_equal" not in rules
