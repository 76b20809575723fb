"""Weights in host memory and on disk: accelerate brings them in where they are used."""

import json
import sys

import msgspec
import pytest

from divergence import LoadOptions, RecordOptions, capture, compare
from divergence.errors import ModelError, UsageError
from divergence.recording.engines.load import device_map_of, map_text

COMMON = {"prompts": ["A bridge is built twice:"], "max_new_tokens": 3, "probe": False}
ON_DISK = {
    "model.embed_tokens": "disk",
    "model.rotary_emb": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.layers.2": "disk",
    "model.norm": "disk",
    "lm_head": "disk",
}


@pytest.fixture
def accelerate():
    return pytest.importorskip("accelerate", reason="--device-map needs accelerate")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
def test_weights_on_disk_are_digested_and_used(accelerate, tiny_model, tmp_path, tied):
    """The same weights by digest, though they are never all there, and the same bits everywhere;
    the map travels in the manifest."""
    model = str(tiny_model("llama", dtype="float32", tied=tied))
    one = capture(model, out=tmp_path / "one", sites=["modules"], **COMMON)
    away = capture(
        model,
        out=tmp_path / "away",
        sites=["modules"],
        loading=LoadOptions(device_map=ON_DISK),
        **COMMON,
    )
    code = away.manifest.model.code
    assert code["Linear"].wrapped[0].startswith("accelerate: AlignDevicesHook")
    assert {n: msgspec.structs.replace(c, wrapped=[]) for n, c in code.items()} == (
        one.manifest.model.code
    )
    mine, theirs = (
        msgspec.structs.replace(run.manifest.model, code={}, tied=[]) for run in (one, away)
    )
    assert mine == theirs
    assert json.loads(away.manifest.settings.device_map) == ON_DISK
    report = compare(one, away)
    assert {line.status for line in report.preflight if line.check == "code"} == {"same"}
    assert report.verdict.kind == "identical" and not report.coverage.unmatched


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_passes_over_weights_on_disk(accelerate, tiny_model, tmp_path):
    """Anchored and escalated passes see the values, not the placeholders; and a map in a file is
    one in the call."""
    model = str(tiny_model("llama", dtype="bfloat16"))
    one = capture(model, out=tmp_path / "one", **COMMON)
    (tmp_path / "map.json").write_text(json.dumps(ON_DISK))
    away = capture(
        like=one,
        out=tmp_path / "away",
        loading=LoadOptions(device_map=str(tmp_path / "map.json")),
        recording=RecordOptions(escalate=True),
        probe=False,
    )
    here = capture(
        like=one, out=tmp_path / "here", recording=RecordOptions(escalate=True), probe=False
    )
    assert away.manifest.plan.passes == ["free", "anchored", "escalated"]
    assert compare(one, away).verdict.kind == "identical"
    for record in here.records:
        other = away.find(record.coordinates)
        assert (other.xxh3, other.dtype) == (record.xxh3, record.dtype), record.coordinates


def test_without_accelerate(tiny_model, tmp_path, monkeypatch):
    """A missing package is named, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setattr(
        "transformers.integrations.accelerate.is_accelerate_available", lambda: False
    )
    model = str(tiny_model("llama", dtype="float32"))
    with pytest.raises(ModelError, match="needs the accelerate package") as caught:
        capture(model, out=tmp_path / "run", loading=LoadOptions(device_map="auto"), **COMMON)
    assert "pip install" in caught.value.hint


def test_words_of_a_device_map(tmp_path):
    """Words of transformers pass through; a file or text of JSON becomes a map."""
    assert device_map_of("auto") == "auto" and device_map_of("cuda:1") == "cuda:1"
    assert device_map_of('{"": "cpu"}') == {"": "cpu"} == device_map_of({"": "cpu"})
    assert map_text({"b": 1, "a": "disk"}) == '{"a": "disk", "b": 1}'
    assert map_text("auto") == "auto" and map_text(None) is None
    for text in ("{", '{"a": [1]}', str(tmp_path / "none.json")):
        with pytest.raises(UsageError) as caught:
            device_map_of(text)
        assert "--device-map" in str(caught.value)
