"""Faults in a graph: the right block, and with a truth the right side."""

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import numpy as np  # noqa: E402
from onnx import numpy_helper  # noqa: E402

from divergence import Run, compare, truth  # noqa: E402
from tests.models.onnx_graphs import node_of  # noqa: E402


def scaled_weight(model: Any) -> None:
    taken = node_of(model, "model.layers.1.mlp.down_proj", "MatMul").input[1]
    weight = next(one for one in model.graph.initializer if one.name == taken)
    values = numpy_helper.to_array(weight).copy()
    values[:, :8] *= 1.05
    weight.raw_data = values.tobytes()


def wrong_epsilon(model: Any) -> None:
    add = node_of(model, "model.layers.1.post_attention_layernorm", "Add")
    model.graph.initializer.append(numpy_helper.from_array(np.array(1e-2, np.float32), "other"))
    add.input[1] = "other"


def other_function(model: Any) -> None:
    node_of(model, "model.layers.2.mlp.act_fn", "Sigmoid").op_type = "HardSigmoid"


def wrong_rotary_table(model: Any) -> None:
    table = next(one for one in model.graph.initializer if "inv_freq" in one.name)
    table.raw_data = (numpy_helper.to_array(table) * np.float32(1.02)).tobytes()


@pytest.fixture(scope="session")
def what_is_right(recorded, tmp_path_factory) -> Run:
    return truth(recorded("llama", sites="blocks"), out=tmp_path_factory.mktemp("truth-") / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "site"),
    [
        (wrong_epsilon, "model.layers.1:out"),
        (other_function, "model.layers.2:out"),
        (wrong_rotary_table, "model.rotary_emb:out"),
    ],
)
def test_a_fault_in_the_graph_is_found(change, site, damaged, recorded, again, what_is_right):
    """The block, and with a truth the side."""
    run = recorded("llama", sites="blocks")
    other = again(run, damaged(change))
    for right in (None, what_is_right):
        verdict = compare(run, other, truth=right).verdict
        assert verdict.kind == "localized"
        assert verdict.onset is not None
        assert verdict.onset.site == site
        assert verdict.side == (None if right is None else "candidate")


def test_other_weights_are_named_and_found_in_their_block(damaged, recorded, again):
    """A graph with one other weight is refused by its name, and found by force."""
    run = recorded("llama", sites="blocks")
    other = again(run, damaged(scaled_weight))
    verdict = compare(run, other).verdict
    assert verdict.kind == "incomparable"
    assert "model.layers.1.mlp.down_proj.weight" in str(verdict.evidence)
    forced = compare(run, other, force=True).verdict
    assert forced.onset is not None
    assert forced.onset.site == "model.layers.1:out"
