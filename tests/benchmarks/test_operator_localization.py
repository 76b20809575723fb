"""The operator benchmark in small: what it plants is found, operator and side, and nothing else."""

import functools
import sys
from pathlib import Path

import pytest

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import operator_localization
from benchmarks._machines import planting
from benchmarks._operator_faults import FAULTS, ROLES, plant, site_of
from divergence import capture, compare
from divergence import truth as make_truth


class Here:
    """A machine that is this process."""

    def run(self, what, *, operator_fault=None, **values):
        if what == "truth":
            make_truth(values.pop("run"), force=True, **values)
            return
        if operator_fault is not None:
            name, site, strength = operator_fault
            values["prepare"] = planting(plant, name, site, strength)
        capture(values.pop("model", None), force=True, device="cpu", **values)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """``bench(architecture, dtype, ties)``: eager on A, sdpa on B."""

    @functools.cache
    def make(architecture, dtype, ties=False):
        return operator_localization.Bench(
            tmp_path_factory.mktemp("bench"),
            architecture,
            dtype,
            ("here", "eager", "there", "sdpa"),
            1,
            ties=ties,
            machines={"here": Here(), "there": Here()},
        )

    return make


@pytest.mark.slow
def test_a_healthy_pair_blames_no_operator(bench):
    """Eager against sdpa, with the truth and without."""
    root = bench("llama", "bfloat16").root
    for truth in (root / "truth", None):
        report = compare(root / "a", root / "b", truth=truth)
        assert report.operators.onset is None
        assert report.operators.num_matched > 30


@pytest.mark.slow
@pytest.mark.parametrize("side", ["candidate", "reference"])
@pytest.mark.parametrize(
    ("architecture", "dtype", "fault", "role", "strength"),
    [
        ("llama", "bfloat16", "mantissa", "down", 3),
        ("llama", "bfloat16", "statistics-bf16", "first-statistics", 1.0),
        ("llama", "bfloat16", "kv-stale", "keys", 1.0),
        ("llama", "bfloat16", "rope-pairing", "half", 1.0),
        ("gpt2", "float32", "norm-eps", "eps", 1.0),
        ("gpt2", "float32", "zero-tile", "up", 1.0),
    ],
)
def test_a_fault_is_found_at_its_operator_and_side(
    bench, architecture, dtype, fault, role, strength, side
):
    """Whatever machine it is on."""
    trial = bench(architecture, dtype).trial(fault, role, side, strength)
    assert (trial.exact, trial.side_said) == (True, side), trial
    assert trial.size > 3


@pytest.mark.slow
def test_the_order_of_ties_is_found(bench):
    """Two experts with equal scores, the other one first."""
    trial = bench("qwen3-moe", "float32", ties=True).trial("topk-ties", "topk", "candidate", 1.0)
    assert trial.site.endswith("mlp.gate/aten.topk")
    assert (trial.exact, trial.side_said) == (True, "candidate")


@pytest.mark.slow
def test_inside_a_fused_kernel_its_end_is_expected(bench):
    """Sdpa has no softmax to compare with; both have what attention gives."""
    trial = bench("llama", "bfloat16").trial("softmax-sum", "softmax", "reference", 1.0)
    assert trial.fused
    assert trial.site.endswith("self_attn/aten.bmm#2")


@pytest.mark.slow
def test_a_place_that_the_block_lacks(bench):
    """No trial: sdpa calls no softmax, llama has no router."""
    assert bench("llama", "bfloat16").trial("softmax-sum", "softmax", "candidate", 1.0) is None
    assert bench("llama", "bfloat16").trial("mantissa", "router", "candidate", 1.0) is None


def test_roles_are_whole_names_inside_the_block():
    """``|``: the first of the roles that there is; another block's operators are none of it."""
    paths = ["m.1.mlp.gate_proj/aten.mm", "m.1.attn/aten._softmax", "m.11.attn/aten._softmax"]
    assert site_of("scaled|softmax", "m.1", paths) == "m.1.attn/aten._softmax"
    assert site_of("router", "m.1", paths) is None
    assert {name for f in FAULTS.values() for r in f.roles for name in r.split("|")} <= set(ROLES)


def test_the_stored_trials_print_the_tables_of_the_page(capsys, monkeypatch):
    """No row of the page but what the program prints."""
    root = Path(__file__).resolve().parents[2]
    file = root / "benchmarks" / "operator_localization.jsonl"
    monkeypatch.setattr(sys, "argv", ["operator_localization.py", "--tables", str(file)])
    operator_localization.main()
    printed = set(capsys.readouterr().out.splitlines())
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    part = page.partition("## Operator localization")[2].partition("Healthy pairs")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ") and "%" in line]
    assert len(rows) == 3
    assert [row for row in rows if row not in printed] == []


def test_intervals_of_a_rate():
    """Clopper and Pearson: from tables of the binomial."""
    assert operator_localization.interval(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-3)
    assert operator_localization.interval(10, 10) == pytest.approx((0.6915, 1.0), abs=1e-3)
