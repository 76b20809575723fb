"""What the engine refuses, and what it says."""

import sys
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from divergence import capture, compare  # noqa: E402
from divergence.errors import ModelError, UsageError  # noqa: E402
from tests.models.onnx_graphs import MODELS  # noqa: E402


def test_an_input_that_no_prompt_gives(damaged, recorded, again):
    """A graph that wants pictures is refused by that input's name."""

    def more(model: Any) -> None:
        model.graph.input.append(onnx.helper.make_tensor_value_info("pixel_values", 1, [1, 3]))

    with pytest.raises(ModelError, match="wants the input pixel_values"):
        again(recorded("llama", sites="blocks"), damaged(more))


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/hostname", ""])
def test_weights_outside_the_folder_are_not_read(place, damaged, recorded, again):
    """External data that lead out of the folder are refused."""
    path = damaged(lambda model: None)
    model = onnx.load(path)
    weight = max(model.graph.initializer, key=lambda one: len(one.raw_data))
    weight.raw_data = b""
    weight.data_location = 1
    weight.external_data.add(key="location", value=place)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="outside the model's folder"):
        again(recorded("llama", sites="blocks"), path)


def test_a_broken_file(graph_of, recorded, again, tmp_path):
    """What is no graph is refused as such."""
    run = recorded("llama", sites="blocks")
    data = graph_of("llama").read_bytes()
    for number, content in enumerate((b"", b"no graph at all", data[: len(data) // 2])):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read as an ONNX file"):
            again(run, path)
    with pytest.raises(ModelError, match="does not exist"):
        again(run, tmp_path / "nothing.onnx")
    with pytest.raises(ModelError, match="is a directory"):
        again(run, tmp_path)


@pytest.mark.slow
def test_a_file_of_another_model(graph_of, recorded, again, tmp_path, tiny_model):
    """Its config tells; and before it runs, its weights do."""
    checkpoint = tiny_model("llama", dtype="float32", num_blocks=2)
    with pytest.raises(ModelError, match=r"3 blocks, and the config in .* tells of 2"):
        again(
            recorded("llama", sites="blocks"),
            graph_of("llama"),
            engine_options={"tokenizer": str(checkpoint)},
        )
    run, said = recorded("llama", sites="blocks"), []
    other = again(run, graph_of("qwen3"), progress=lambda *args: said.append(args[3]))
    assert any("are not those of the recorded run" in text for text in said)
    assert compare(run, other).verdict.kind == "incomparable"

    said.clear()
    same = again(run, graph_of("llama"), progress=lambda *args: said.append(args[3]))
    back = {"like": same, "engine": "transformers", "model": tiny_model(**MODELS["llama"])}
    capture(**back, out=tmp_path / "back", progress=lambda *args: said.append(args[3]))
    assert not [text for text in said if "recorded run" in text]


def test_kernels_that_the_provider_lacks(graph_of, recorded, again):
    """A provider without a kernel for a node is named."""
    with pytest.raises(ModelError, match="CPUExecutionProvider has no kernel"):
        again(recorded("llama-bfloat16", sites="blocks"), graph_of("llama-bfloat16"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"provider": "cudaa"}, "there is no such execution provider"),
        ({"provider": "cann"}, "has no CANNExecutionProvider"),
        ({"optimization": "al"}, "there is no such level"),
        ({"provder": "cpu"}, "has no such option"),
        ({"threads": "many"}, "threads"),
    ],
)
def test_unknown_options(options, words, graph_of, recorded, again):
    """An option that the engine lacks is refused with what it has."""
    with pytest.raises(UsageError, match=words) as caught:
        again(recorded("llama", sites="blocks"), graph_of("llama"), engine_options=options)
    assert caught.value.hint


def test_providers_are_listed(graph_of, recorded, again):
    """A misspelt provider is answered with those that are installed."""
    with pytest.raises(UsageError) as caught:
        again(
            recorded("llama", sites="blocks"),
            graph_of("llama"),
            engine_options={"provider": "cudaa"},
        )
    assert "did you mean cuda?" in str(caught.value.hint)
    assert "CPUExecutionProvider" in str(caught.value.hint)


@pytest.mark.slow
def test_what_a_graph_cannot_do(graph_of, recorded, again):
    """What needs the model's code is refused, or left out and said."""
    run, file = recorded("llama", sites="blocks"), graph_of("llama")
    with pytest.raises(UsageError, match="operators"):
        again(run, file, sites="ops@model.layers.1")
    with pytest.raises(UsageError, match="--plant"):
        again(run, file, plants=["model.layers.1:out=scale:1.1"])
    with pytest.raises(UsageError, match="prepare: the engine onnx has none of it"):
        again(run, file, prepare=lambda module: None)
    notes: list[str] = []
    other = again(
        run,
        file,
        escalate=True,
        whole=True,
        progress=lambda event, done, total, text: notes.append(text),
    )
    assert other.manifest.plan.passes == ["free", "anchored"]
    assert any(note.startswith("no whole pass") for note in notes)


def test_packages_that_are_missing_or_old(graph_of, recorded, again, monkeypatch):
    """Which package is needed, and how it is installed, is said."""
    import onnxruntime

    run, file = recorded("llama", sites="blocks"), graph_of("llama")
    monkeypatch.setattr(onnxruntime, "__version__", "1.9.0")
    with pytest.raises(ModelError, match=r"onnxruntime 1\.20 or newer, and this is 1\.9\.0"):
        again(run, file)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match="needs onnxruntime") as caught:
        again(run, file)
    assert "divergence-debug[onnx]" in str(caught.value.hint)


def test_a_prompt_in_chunks_is_refused(graph_of, recorded, again):
    """Nothing is said to have run in chunks that ran whole."""
    with pytest.raises(UsageError, match="--prefill-chunk feeds a cache, and onnx runs without"):
        again(recorded("llama", sites="blocks"), graph_of("llama"), prefill_chunk=2)
