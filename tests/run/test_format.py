"""The documented format is the real one, and runs of older versions still open.

UPDATE_SCHEMAS=1 python -m pytest tests/run/test_format.py    # after a change of the types
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from divergence import Run, compare
from divergence.numerics import sketches as fold
from divergence.numerics import sketches as sketch
from divergence.numerics.formats import FORMATS
from divergence.numerics.summary import Summary
from divergence.run import manifest as manifest_types
from divergence.run.manifest import (
    SCHEMA_VERSION,
    ArithmeticFact,
    Manifest,
    QuantizedNumbers,
    QuantizedScheme,
)
from divergence.run.record import Call, Operand, Place, Record, Sketch
from tests.json_page import described

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/dump-format.md").read_text(encoding="utf-8")
FIXTURES = ROOT / "tests/fixtures"
SCHEMAS = {"dump-format.schema.json": Manifest, "record.schema.json": Record}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_is_that_of_the_types(name):
    """docs/*.schema.json are generated; UPDATE_SCHEMAS=1 writes them anew."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= msgspec.json.schema(SCHEMAS[name])
    for kind in [*documented_types(), ArithmeticFact, Sketch]:
        properties = schema["$defs"].get(kind.__name__, {}).get("properties", {})
        for key, text in described(kind).items() if properties else ():
            if text:
                properties[key]["description"] = text
    text = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    path = ROOT / "docs" / name
    if os.environ.get("UPDATE_SCHEMAS"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, f"{name} is stale: UPDATE_SCHEMAS=1"


def documented_types():
    structs = [
        kind
        for kind in vars(manifest_types).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == manifest_types.__name__
    ]
    return [*structs, QuantizedNumbers, QuantizedScheme, Record, Place, Summary, Call, Operand]


@pytest.mark.parametrize("kind", documented_types(), ids=lambda kind: kind.__name__)
def test_every_key_is_documented(kind):
    """A key that neither the page nor the schema explains is a key that others cannot write."""
    assert kind.__struct_config__.forbid_unknown_fields
    explained = {name for name, text in described(kind).items() if text}
    missing = [
        name
        for name in kind.__struct_encode_fields__
        if name not in explained and f"`{name}`" not in PAGE
    ]
    assert not missing


def test_every_dtype_is_documented():
    """And only those."""
    listed = re.search(r"^dtypes: (.*?)\n\n", PAGE, re.M | re.S)[1]
    assert set(re.findall(r"`(\w+)`", listed)) == set(FORMATS)


def test_the_documented_example_writes_a_valid_run(tmp_path):
    """Without divergence: and the run opens, verifies and is identical to itself."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert "divergence" not in code
    assert len(code.splitlines()) < 35
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    run = Run.open(tmp_path / "by-hand")
    assert run.manifest.complete
    assert run.verify() == []
    assert run.read(run.records[0]).shape == (1, 6, 4)
    report = compare(run, Run.open(tmp_path / "by-hand"))
    assert all(site.identical for site in report.sites)
    assert report.coverage.num_compared == 1


def test_the_documented_version_is_the_current_one():
    """A change of the format changes the page."""
    assert PAGE.startswith(f"# The dump format, version {SCHEMA_VERSION}\n")


# --- runs of every version ---------------------------------------------------------------------


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_stored_run_of_every_version_opens(version):
    """It opens, every byte has its checksum, and it compares with itself."""
    path = FIXTURES / f"run-v{version}"
    assert json.loads((path / "manifest.json").read_text())["schema_version"] == version
    run = Run.open(path)
    assert run.manifest.complete
    assert run.verify() == []
    for record in run.records:
        if run.has_bytes(record):
            assert tuple(run.read(record).shape) == record.shape
    report = compare(run, path)
    assert all(site.identical for site in report.sites)  # also of parts without bytes
    assert report.verdict.kind == "undetermined"  # a run compared with itself proves nothing


def test_what_the_first_version_holds():
    """Its parts keep their meaning: passes, batches, positions, shared bytes."""
    run = Run.open(FIXTURES / "run-v1")
    manifest = run.manifest
    assert manifest.model.source == "tiny-llama"
    assert manifest.tokens.groups == [[0, 1]]
    assert [len(sample.generated_ids) for sample in manifest.tokens.samples] == [2, 2]
    assert manifest.plan.passes == ["free", "anchored"]
    assert manifest.plan.anchored_to == manifest.like == manifest.tokens.forced_by
    assert [override.name for override in manifest.overrides] == ["attn_implementation"]
    assert {record.pass_ for record in run.records} == {"free", "anchored"}
    assert {record.step for record in run.records} == {0, 1}
    logits = run.find(("free", 0, 0, ".:out"))
    assert (logits.shape, logits.positions) == ((2, 1, 512), (8,))
    assert len({record.place for record in run.records}) < len(run.records)


def test_what_the_second_version_holds():
    """Operators with their calls, the weights that they use, and what the machine's arithmetic
    does."""
    run = Run.open(FIXTURES / "run-v2")
    calls = [record for record in run.records if record.call is not None]
    assert {record.pass_ for record in calls} == {"anchored"}
    product = run.find(("anchored", 0, 0, "model.layers.1.mlp.down_proj/aten.mm:out"))
    given, weight = product.call.operands
    assert run.find(("anchored", 0, 0, given.site)) is not None
    assert (weight.weight, weight.via) == ("model.layers.1.mlp.down_proj.weight", ("t()",))
    assert run.find(("anchored", 0, 0, weight.site)).shape == (16, 48)
    assert any(fact.verified for fact in run.manifest.arithmetic)


def test_what_the_third_version_holds():
    """Two ranks with their parts, projections in place of bytes, and what was kept all the same."""
    run = Run.open(FIXTURES / "run-v3")
    assert [(axis.name, axis.size) for axis in run.manifest.mesh.axes] == [("tp", 2)]
    assert (run.manifest.plan.store, run.manifest.plan.only_changed) == ("sketch", None)
    assert {record.rank for record in run.records} == {0, 1}
    part = next(r for r in run.records if r.site == "model.layers.0.self_attn.q_proj:out")
    assert (part.placement, part.shape) == (("shard:2",), (1, 23, 128))
    whole = run.find(("free", 0, 0, "model.layers.0:out"))
    assert (whole.placement, whole.place) == (("replicate",), None)
    assert run.read_sketch(whole).rows.shape == (23, whole.sketch.num_projections + 2)
    assert any(record.place is not None for record in run.records)  # token ids, short rows


def test_what_the_fourth_version_holds():
    """Which code ran, the configuration as data, and how the machine's torch was built."""
    manifest = Run.open(FIXTURES / "run-v4").manifest
    mlp = manifest.model.code["LlamaMLP"]
    assert mlp.replaced == [
        "LlamaMLP.forward was replaced by vendor_plugin.py:5 in model.layers.1.mlp"
    ]
    assert set(mlp.odd) == {"model.layers.1.mlp"}
    assert mlp.origin == "transformers.models.llama.modeling_llama"
    assert manifest.model.config["rope_parameters.rope_theta"] == 10000.0
    assert (manifest.model.embedding_rows, manifest.model.tokenizer_size) == (512, 512)
    assert "U1" in manifest.model.chat_example
    assert manifest.plan.compiled["model.layers.0.mlp"].backend == "eager"
    assert manifest.environment.torch_build["compiler"]


def test_what_the_fifth_version_holds():
    """Sums of all rows of a prompt, beside those of each row."""
    run = Run.open(FIXTURES / "run-v5")
    record = run.find(("free", 0, 0, "model.layers.0.mlp.up_proj:out"))
    assert (record.shape, record.sketch.num_projections) == ((2, 40, 768), 8)
    assert record.sketch.num_pooled == 64
    found = run.read_sketch(record)
    assert (found.rows.shape, found.pooled.shape) == ((80, 10), (2, 64))


def test_what_the_eighth_version_holds():
    """Digests that close it; earlier ones have none."""
    manifest = Run.open(FIXTURES / "run-v8").manifest
    assert len(manifest.digest) == 32
    assert list(manifest.record_digests) == ["records.jsonl"]
    assert Run.open(FIXTURES / "run-v7").manifest.digest is None


@pytest.mark.parametrize("name", ["run-v1", "run-v2", "run-v3", "run-v4", "run-v5", "run-v8"])
def test_the_stored_run_names_no_path_of_a_machine(name):
    """Small, portable, and nobody's home."""
    files = [path for path in (FIXTURES / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000
    text = (FIXTURES / name / "manifest.json").read_text()
    assert not re.search(r'": "(/|~|[A-Za-z]:\\)', text)
    assert not {"tmp", "home", "root"} & set(re.findall(r"/(\w+)/", text))


def test_the_examples_of_reduced_runs_are_right():
    """The digest and the projections that the page works out."""
    import torch

    text = " ".join(PAGE.split())
    assert f"`{fold.fold_tensor(torch.arange(8, dtype=torch.uint8))}`" in text
    rows = sketch.sketch_tensor(torch.arange(1.0, 17.0).expand(1, 2, 16), 8).rows
    first = [int(value) for value in rows[0, :8]]
    assert ", ".join(map(str, first)) in text
    assert torch.equal(rows[1, :8], -rows[0, :8])
    pooled = sketch.sketch_tensor(torch.arange(1.0, 17.0).expand(1, 2, 16), 8, num_pooled=16)
    assert ", ".join(str(int(value)) for value in pooled.pooled[0]) in text
    for number in (*fold.SEEDS, sketch.SIGMA, sketch.TAU):
        assert f"0x{number:016x}" in text
    assert f"{fold.CHUNK:,} words" in text
