"""A rotary table that every block reads, in runs of an engine that does not let it be replaced."""

import json
import shutil

import pytest

from divergence import Run, capture, compare, truth
from tests.digests import without_digests


def without_tables(run):
    """The run, of whose blocks the tables are not recorded: no anchored pass replaces them."""
    without_digests(run.path)
    file, manifest = run.path / "records.jsonl", run.path / "manifest.json"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if ":in.position_embeddings" not in line]
    file.write_text("".join(kept))
    content = json.loads(manifest.read_text())
    content["sizes"]["num_records"] = len(kept)
    manifest.write_text(json.dumps(content))
    return Run.open(run.path)


def faster(model):
    model.model.rotary_emb.inv_freq.mul_(1.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_table_is_named_and_not_the_blocks_that_read_it(llama, tmp_path, dtype):
    """Nor an embedding or a head, whose numbers are the same on both sides."""
    how = {"probe": False, "store": "full"}
    prompts = ["A bridge is built twice: once on paper, where every beam is exact.", "Hello"]
    a = capture(llama, out=tmp_path / "a", dtype=dtype, prompts=prompts, max_new_tokens=4, **how)
    right = truth(a, out=tmp_path / "truth")
    shutil.copytree(a.path, tmp_path / "like")
    like = without_tables(Run.open(tmp_path / "like"))
    b = without_tables(capture(like=like, out=tmp_path / "b", prepare=faster, **how))
    report = compare(a, b, truth=right)

    assert report.verdict.kind == "localized" and report.verdict.side == "candidate"
    assert report.verdict.onset.site == "model.rotary_emb:out"
    flagged = {one.site for one in report.sites if one.flagged}
    assert flagged.isdisjoint({"model.embed_tokens:out", "model.norm:out", "lm_head:out", ".:out"})
    if dtype == "float32":  # every block differs, and says so
        assert {f"model.layers.{n}:out" for n in range(3)} <= flagged
        assert any("read this table" in one.text for one in report.verdict.evidence)
