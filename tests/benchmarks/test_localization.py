"""The localization benchmark in small: every fault it plants here is found, block and side."""

import functools
import sys
from pathlib import Path

import pytest

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import localization
from benchmarks._faults import plant
from benchmarks._health import usage_of
from benchmarks._machines import planting
from benchmarks._rivals import RULES, block_rows, first_bad
from benchmarks._trials import upper
from divergence import Run, capture, compare
from divergence import truth as make_truth


class Here:
    """A machine in this process: what differs between two of them is the attention kernel."""

    def ask(self, what, *, fault=None, **values):
        if "model" in values:
            values["model"] = str(values["model"])
        if what == "truth":
            make_truth(values.pop("run"), force=True, **values)
            return
        if fault is not None:
            name, block, strength = fault
            values["prepare"] = planting(plant, name, block, strength)
        capture(values.pop("model", None), force=True, device="cpu", **values)

    def wait(self):
        pass

    run = ask


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """``bench(architecture, dtype)``"""

    @functools.cache
    def make(architecture, dtype):
        root = tmp_path_factory.mktemp("bench")
        return localization.Bench(root, architecture, dtype, Here(), Here())

    return make


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_pair_uses_less_than_its_limits(bench, architecture, dtype):
    """Other kernels come nowhere near a limit, where the rules of others alarm."""
    one = bench(architecture, dtype)
    runs = [one.root / "healthy" / name for name in ("a", "b", "truth")]
    report = compare(runs[0], runs[1], truth=runs[2])
    assert report.verdict.kind == "within_floor"
    assert usage_of(report) < 0.75
    forwards = block_rows(*map(Run.open, runs), one.blocks)
    assert first_bad("e > 3 e of the layer before", forwards) is not None


@pytest.mark.slow
@pytest.mark.parametrize("side", ["candidate", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture, dtype, fault, block",
    [
        ("llama", "bfloat16", "rope-base", 0),
        ("llama", "bfloat16", "weight-int8", 3),  # below the floor: by the escalated pass
        ("llama", "bfloat16", "kv-stale", 5),
        ("gpt2", "float32", "norm-bf16", 0),
        ("gpt2", "float32", "attention-scale", 5),
        ("gpt2", "bfloat16", "norm-eps", 3),
    ],
)
def test_a_fault_is_found_at_its_block_and_side(bench, architecture, dtype, fault, block, side):
    """Whatever machine it is on."""
    trial = bench(architecture, dtype).trial(fault, block, side, 1.0)
    assert (trial.exact, trial.side_said) == (True, side), trial
    assert trial.size > 0.1
    assert set(trial.rivals) == set(RULES)


@pytest.mark.slow
def test_the_size_of_a_fault_follows_its_strength(bench):
    """A tenth of the blend is a tenth of the floors."""
    one = bench("llama", "bfloat16")
    whole = one.trial("gate-up", 3, "candidate", 1.0)
    tenth = one.trial("gate-up", 3, "candidate", 0.1)
    assert whole.size / tenth.size == pytest.approx(10, rel=0.3)


def test_the_stored_trials_print_the_tables_of_the_page(capsys, monkeypatch):
    """No row of the page but what the program prints."""
    root = Path(__file__).resolve().parents[2]
    file = root / "benchmarks" / "localization.jsonl"
    monkeypatch.setattr(sys, "argv", ["localization.py", "--tables", str(file)])
    localization.main()
    printed = set(capsys.readouterr().out.splitlines())
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    part = page.partition("## Localization")[2].partition("Health, ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ") and "%" in line]
    assert len(rows) > 10
    assert [row for row in rows if row not in printed] == []


def test_bounds_of_a_rate():
    """No event in n trials: the rule of three, nearly."""
    assert upper(0, 300) == pytest.approx(3 / 300, rel=0.01)
    assert upper(0, 1) == pytest.approx(0.95)
    assert upper(5, 10) == pytest.approx(0.7776, abs=1e-3)  # tables of the binomial
    assert upper(3, 3) == pytest.approx(1.0)
