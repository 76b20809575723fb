"""The engines' benchmark in small: each kind of fault, in modules, in weights and in a graph."""

import sys
from pathlib import Path

import pytest

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import _engine_faults, engines
from benchmarks._machines import planting
from divergence import capture
from divergence import truth as make_truth
from tests.models import tiny


class Here:
    """A machine in this process."""

    def run(self, what, *, engine_fault=None, **values):
        if what == "truth":
            make_truth(values.pop("run"), **values)
            return
        if engine_fault is not None:
            name, block, strength = engine_fault
            values["prepare"] = planting(_engine_faults.plant, name, block, strength)
        capture(values.pop("model"), force=True, device="cpu", **values)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    home = tmp_path_factory.mktemp("engines")
    checkpoint = tiny.build("qwen3", home / "model", dtype="float32")
    machines = dict.fromkeys(["transformers", "onnx"], Here())
    made = engines.Bench("qwen3", "float32", checkpoint, home, machines, is_random=True)
    made.start(2)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", pytest.param("onnx", marks=pytest.mark.whole)])
def test_faults_are_found_alike_in_every_engine(bench, engine):
    """The block, and the side; the healthy pair raises no alarm."""
    if engine == "onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    row = engines.healthy_row(bench, engine)
    assert "`within_floor`" in row or "`identical`" in row
    for fault, block in (("queries", 0), ("activation", 1), ("epsilon", 2), ("rotary", 0)):
        answer = bench.faulty(engine, fault, block, 1.0)
        assert answer.is_there and answer.side == "candidate", answer


def test_every_fault_changes_what_it_names(bench):
    """And no other parameter."""
    from safetensors.torch import load_file

    state = load_file(bench.checkpoint / "model.safetensors")
    for name in _engine_faults.WEIGHTS:
        out = _engine_faults.faulty_checkpoint(bench.checkpoint, bench.home / name, name, 1, 0.5)
        wrong = load_file(out / "model.safetensors")
        (changed,) = [one for one in state if not wrong[one].equal(state[one])]
        assert changed.startswith("model.layers.1."), name
