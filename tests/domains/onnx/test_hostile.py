"""ONNX files that were made to harm whoever runs them: nothing outside their folder is read, and
no number in them is believed."""

import os
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import numpy as np  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from divergence import capture  # noqa: E402
from divergence.errors import ModelError  # noqa: E402
from divergence.recording.prompts import Prompt  # noqa: E402

FLOAT, INT64, STRING = 1, 7, 8


def value(name: str, kind: int = FLOAT, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def gather(name: str = "/model/embed/Gather") -> Any:
    return helper.make_node("Gather", ["model.embed.weight", "input_ids"], ["logits"], name=name)


def model(
    *nodes: Any,
    constants: tuple[Any, ...] = (),
    inputs: tuple[Any, ...] = (),
    kind: int = FLOAT,
    shape: Any = ("b", "t", 16),
) -> Any:
    """A table of 16 rows looked up, or other nodes."""
    weight = numpy_helper.from_array(np.eye(16, dtype=np.float32), "model.embed.weight")
    graph = helper.make_graph(
        nodes or [gather()],
        "g",
        [value("input_ids", INT64, ["b", "t"]), *inputs],
        [value("logits", kind, shape)],
        [weight, *constants],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def beside(location: str, *, dims: tuple[int, ...] = (4,), **entries: Any) -> Any:
    tensor = TensorProto(name="x", data_type=FLOAT, dims=dims, data_location=1)
    for key, entry in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(entry))
    return tensor


def inner(tensor: Any) -> Any:
    """A node with a graph in it that has the tensor."""
    node = helper.make_node("Identity", ["x"], ["q"])
    graph = helper.make_graph([node], "inner", [], [value("q")], [tensor])
    return helper.make_node("If", ["c"], ["k"], then_branch=graph, else_branch=graph)


def sized(*dims: int) -> Any:
    return TensorProto(name="x", data_type=FLOAT, dims=dims, raw_data=bytes(16))


def within(depth: int) -> Any:
    """Graphs in nodes in graphs."""
    node = helper.make_node("Identity", ["input_ids"], ["k"])
    for _ in range(depth):
        graph = helper.make_graph([node], "inner", [], [value("k", INT64)])
        node = helper.make_node("If", ["c"], ["k"], then_branch=graph)
    return node


def many(num: int) -> Any:
    made = model()
    node = helper.make_node("Identity", ["input_ids"], ["k"])
    made.graph.node.extend([node] * num)
    return made


OUTSIDE = "outside the model's folder"
HOSTILE: dict[str, tuple[Any, str]] = {
    "upwards": (model(constants=(beside("../../etc/passwd"),)), OUTSIDE),
    "absolute": (model(constants=(beside("/etc/passwd"),)), OUTSIDE),
    "NUL": (model(constants=(beside("a\0b"),)), OUTSIDE),
    "a link": (model(constants=(beside("link"),)), "symbolic link"),
    "through a link": (model(constants=(beside("up/hostname"),)), "symbolic link"),
    "a pipe": (model(constants=(beside("pipe"),)), "a pipe"),
    "in a constant": (
        model(gather(), helper.make_node("Constant", [], ["k"], value=beside("/etc/passwd"))),
        OUTSIDE,
    ),
    "in a graph within": (model(gather(), inner(beside("../x"))), OUTSIDE),
    "offset": (model(constants=(beside("bytes", offset=2**62),)), "it ends before"),
    "negative offset": (model(constants=(beside("bytes", offset=-4),)), "it ends before"),
    "length": (model(constants=(beside("bytes", length=2**62),)), "it ends before"),
    "digits": (model(constants=(beside("bytes", offset="9" * 5000),)), "it ends before"),
    "negative sizes": (model(constants=(sized(-2, -2),)), "negative size"),
    "cycle": (
        model(
            gather(),
            helper.make_node("Add", ["a", "b"], ["b"]),
            helper.make_node("Identity", ["b"], ["a"]),
        ),
        "not acyclic",
    ),
    "twice": (model(gather(), gather()), "cannot load the graph"),
    "graphs within": (model(gather(), within(28)), "cannot load the graph"),
    "module of python": (model(gather("/forward/__class__/Gather")), "no module can be called"),
    "dots": (model(gather("/" + "a." * 3000 + "/Gather")), "nested more than 100"),
    "nodes": (many(200_001), "more than 200,000"),
    "cache": (model(inputs=(value("past_key_values.0", FLOAT, [1, 2**40]),)), "the input past"),
    "no shape": (model(inputs=(value("past_key_values.0", FLOAT, []),)), "forward pass failed"),
    "a vector": (
        model(helper.make_node("Shape", ["input_ids"], ["logits"]), kind=INT64, shape=[2]),
        "forward pass failed",
    ),
    "a matrix": (
        model(helper.make_node("Cast", ["input_ids"], ["logits"], to=FLOAT), shape=["b", "t"]),
        "forward pass failed",
    ),
    "texts": (
        model(
            helper.make_node("Cast", ["input_ids"], ["logits"], to=STRING),
            kind=STRING,
            shape=["b", "t"],
        ),
        "forward pass failed",
    ),
}
HARMLESS = {
    "sizes that no memory has": model(constants=(sized(2**30, 2**30),)),
    "many folders": model(gather("/a" * 300_000 + "/Gather")),
    "a long name": model(gather("/" + "n" * 100_000 + "/Gather")),
    "names that are obeyed": model(gather("/\x1b[2J[red]/\u202e#id/Gather")),
}


def record(made: Any, folder: Path) -> Any:
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    (folder / "bytes").write_bytes(bytes(64))
    (folder / "link").symlink_to("/etc/hostname")
    (folder / "up").symlink_to("/etc")
    os.mkfifo(folder / "pipe")
    return capture(
        path,
        engine="onnx",
        prompts=[Prompt(input_ids=(1, 2, 3))],
        max_new_tokens=2,
        out=folder / "run",
        probe=False,
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name, tmp_path):
    """Each is one error, which says what is wrong with it."""
    made, words = HOSTILE[name]
    with pytest.raises(ModelError, match=words):
        record(made, tmp_path)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_files(name, tmp_path):
    """What is never taken at its word does no harm: the model runs."""
    run = record(HARMLESS[name], tmp_path)
    assert run.manifest.tokens.samples[0].generated_ids == [3, 3]
