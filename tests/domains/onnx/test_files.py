"""ONNX files of other exporters, with weights, a config and a cache beside them or not."""

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from divergence import compare  # noqa: E402
from divergence.errors import ModelError  # noqa: E402
from tests.models.onnx_graphs import scopes_of  # noqa: E402

HEALTHY = ("identical", "within_floor")


def without_names(model: Any) -> None:
    """As of an exporter that tells modules and no parameters."""
    for node in model.graph.node:
        kept = [one for one in node.metadata_props if not one.key.endswith("fx_node")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)


@pytest.mark.slow
def test_weights_that_are_not_told_are_no_other_weights(damaged, recorded, again):
    """A graph whose constants have no names says so, and is compared."""
    run = recorded("llama", sites="blocks")
    other = again(run, damaged(without_names))
    report = compare(run, other)
    assert report.verdict.kind in HEALTHY
    weights = next(line for line in report.preflight if line.check == "weights")
    assert weights.status == "unknown"
    assert "not every engine tells its weights" in weights.detail
    assert "constants have no parameter's name" in other.manifest.engine.facts["weights"]


def without_modules(model: Any) -> None:
    for node in model.graph.node:
        del node.metadata_props[:]


def test_a_file_without_modules_has_a_site_for_each_value(damaged, recorded, again):
    """A graph that tells no blocks is compared by its values."""
    run = recorded("llama", sites="blocks")
    notes: list[str] = []
    other = again(
        run,
        damaged(without_modules),
        sites="modules",
        progress=lambda event, done, total, text: notes.append(text),
    )
    assert other.manifest.plan.passes == ["free"]
    assert any("does not tell the blocks" in note for note in notes)
    report = compare(run, other)
    assert report.verdict.kind in (*HEALTHY, "undetermined")
    sites = {record.site for record in other.records}
    assert "embedding:out" in sites and ".:out" in sites


def scopes_in_names(model: Any) -> None:
    """As older exporters write them."""
    import ast

    without_names(model)
    for number, node in enumerate(model.graph.node):
        parts = ast.literal_eval(scopes_of(node) or "['', '']")[1:-1]
        short = [one.removeprefix(f"{before}.") for before, one in zip(["", *parts], parts)]  # noqa: B905
        node.name = "/" + "/".join([*short, f"{node.op_type}_{number}"])
        del node.metadata_props[:]


def test_modules_in_the_names_of_nodes(damaged, recorded, again):
    """Where nodes are named by modules the blocks are known."""
    run = recorded("llama", sites="blocks")
    other = again(run, damaged(scopes_in_names))
    report = compare(run, other)
    assert other.manifest.plan.passes == ["free", "anchored"]
    assert report.verdict.kind in HEALTHY, report.verdict.summary


@pytest.mark.slow
def test_weights_beside_the_file(damaged, recorded, again):
    """External data are read, and named where they are missing."""

    def apart(model: Any) -> None:
        onnx.external_data_helper.convert_model_to_external_data(
            model, location="model.onnx.data", size_threshold=1024
        )

    run = recorded("llama", sites="blocks")
    path = damaged(apart)
    assert path.stat().st_size < (path.parent / "model.onnx.data").stat().st_size
    report = compare(run, again(run, path))
    assert report.verdict.kind in HEALTHY
    assert next(one for one in report.preflight if one.check == "weights").status == "same"
    (path.parent / "model.onnx.data").unlink()
    with pytest.raises(ModelError, match="is missing"):
        again(run, path)


def wants_a_cache(model: Any) -> None:
    """Keys of earlier tokens, before those of the first block."""
    graph = model.graph
    widened = {
        n.input[0] for n in graph.node if n.op_type == "Expand" and "self_attn" in scopes_of(n)
    }
    wide = next(n for n in graph.node if n.op_type == "Unsqueeze" and n.output[0] in widened)
    keys, name = wide.input[0], "past_key_values.0.key"
    place = list(graph.node).index(wide)
    joined = onnx.helper.make_node("Concat", [name, keys], ["joined"], axis=2)
    joined.metadata_props.extend(wide.metadata_props)
    wide.input[0] = "joined"
    graph.node.insert(place, joined)
    shape = [
        "batch",
        2,
        "past",
        next(one for one in graph.value_info if one.name == keys)
        .type.tensor_type.shape.dim[3]
        .dim_value,
    ]
    graph.input.append(onnx.helper.make_tensor_value_info(name, 1, shape))


def test_a_cache_that_is_wanted_is_empty(damaged, recorded, again):
    """A graph that wants a cache is given an empty one."""
    run = recorded("llama", sites="blocks")
    assert compare(run, again(run, damaged(wants_a_cache))).verdict.kind in HEALTHY


def test_a_file_without_a_config(graph_of, recorded, again, tmp_path):
    """A graph that lies alone takes the configuration of the run."""
    path = tmp_path / "alone.onnx"
    path.write_bytes(graph_of("llama").read_bytes())
    run = recorded("llama", sites="blocks")
    assert compare(run, again(run, path)).verdict.kind in HEALTHY
