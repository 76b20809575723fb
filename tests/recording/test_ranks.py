"""Runs that several processes make together: two ranks on the CPU, which speak through gloo."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from divergence import Run, capture, compare
from divergence.errors import UsageError
from divergence.recording.engines.load import why_not
from divergence.recording.processes import _own_device, joined, parse_mesh
from divergence.run.ranks import unsharded

PROGRAM = Path(__file__).with_name("ranks_program.py")
PROMPTS = ["A bridge is built twice:", "Once on paper, where every beam is exact."]
COMMON = {"prompts": PROMPTS, "max_new_tokens": 3, "sites": ["modules"], "probe": False}
FAULT = "model.layers.1.mlp:out=scale:1.02@1"
PART = "model.layers.1.self_attn.q_proj:out=scale:1.5@1"


def torchrun(folder: Path, captures: list[dict[str, Any]], *, ranks: int = 2) -> str:
    """Run the program on that many ranks; returns what it said."""
    listed = folder / "captures.json"
    listed.write_text(json.dumps(captures, default=str))
    command = ["-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(PROGRAM), str(listed)]
    return said_by(command)


def forked(folder: Path, captures: list[dict[str, Any]], *, ranks: int = 2) -> str:
    """The same, without a launcher: what all ranks import is imported once."""
    listed = folder / "captures.json"
    listed.write_text(json.dumps(captures, default=str))
    return said_by([str(PROGRAM), str(listed), str(ranks)])


def said_by(command: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=600,  # vLLM takes a minute to start
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    return done.stdout + done.stderr


def make(
    folder: Path, listed: dict[str, dict[str, Any]], *, ranks: int = 2, start: Any = forked
) -> Callable[[str], Run]:
    """All of them in one go, since starting processes takes longest; then runs by name."""
    for name, options in listed.items():
        options["out"] = folder / name
    said = start(folder, list(listed.values()), ranks=ranks)

    def get(name: str) -> Run:
        said_there = "".join(path.read_text() for path in folder.glob(f"{name}.rank*.txt"))
        assert (folder / name / "manifest.json").exists(), said_there or said[-3000:]
        return Run.open(folder / name)

    get.folder = folder
    return get


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_model) -> Callable[[str], Run]:
    """Runs of one tiny Llama by name: ``one`` made here, the others by two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    model = str(tiny_model("llama", dtype="float32", num_blocks=2))
    one = capture(model, out=folder / "one", **COMMON)
    again = {"like": one.path, "probe": False}
    return make(
        folder,
        {
            "tp": {"model": model, "mesh": "tp", **COMMON},
            "tp-fault": {"mesh": "tp", "plants": [FAULT], **again, "max_new_tokens": 1},
        },
    )


@pytest.fixture(scope="module")
def more(tmp_path_factory, tiny_model) -> Callable[[str], Run]:
    """What takes longer than the fast tests may."""
    folder = tmp_path_factory.mktemp("more")
    model = str(tiny_model("llama", dtype="float32"))
    one = capture(model, out=folder / "one", **COMMON)
    tied = str(tiny_model("llama", dtype="bfloat16", tied=True))
    capture(tied, out=folder / "one-tied", **COMMON)
    again = {"like": one.path, "probe": False}
    single = capture(model, out=folder / "one-prompt", **COMMON | {"prompts": PROMPTS[:1]})
    again_one = {"like": single.path, "probe": False}
    shifted = {"plants": ["model.layers.0:out=scale:1.1@0"], "max_new_tokens": 1}
    gpt2 = str(tiny_model("gpt2", dtype="float32"))
    return make(
        folder,
        {
            "tp-like": {"mesh": "tp", **again},
            "tp-part": {"mesh": "tp", "plants": [PART], **again},
            "fsdp": {"model": model, "mesh": "fsdp", **COMMON},
            "fsdp-same": {"model": model, "mesh": "fsdp", **COMMON, "prompts": PROMPTS[:1]},
            "dp": {"model": model, "mesh": "dp", **COMMON},
            "dp-same": {"mesh": "dp", "plants": [FAULT], **again_one},
            "dp-fault": {"mesh": "dp", **shifted, **again},
            "pp": {"mesh": "pp", **again},
            "tp-tied": {"model": tied, "mesh": "tp", "whole": True, **COMMON},
            "gpt2": {"model": gpt2, "mesh": "tp", **COMMON},
            "ops": {"model": model, "mesh": "tp", **COMMON, "sites": ["ops@model.layers.0"]},
        },
    )


def whole_of(report) -> bool:
    """Were all tensors compared?"""
    return report.coverage.unmatched == []


def test_tensor_parallel_is_the_same_run(made):
    """Two ranks with halves of every matrix: each of the sites is compared with one process', and
    differs by rounding alone; so do the tokens' probabilities; the weights are the same."""
    one, two = made("one"), made("tp")
    report = compare(one, two)
    assert report.verdict.kind == "within_floor"
    assert whole_of(report) and report.coverage.num_compared == len(one.records)
    assert two.manifest.complete and [a.name for a in two.manifest.mesh.axes] == ["tp"]
    assert {line.status for line in report.preflight if line.check == "code"} == {"same"}
    assert msgspec.structs.replace(two.manifest.model, code={}) == (
        msgspec.structs.replace(one.manifest.model, code={})
    )
    (check,) = report.replicas
    assert check.num_different == 0 and check.num_tensors > 200
    shared = unsharded(two)
    for site, dim in [
        ("model.layers.0.mlp.act_fn:out", 2),
        ("model.layers.0.self_attn.q_proj:out", 2),
        ("model.layers.0.self_attn.o_proj:in", 2),
        ("model.layers.0.self_attn:out.1", 1),
    ]:
        record = next(r for r in two.records if r.site == site)
        assert record.placement == (f"shard:{dim}",)
        assert shared.at_site(site)[0].shape == one.at_site(site)[0].shape
    for site in ("model.embed_tokens:out", "lm_head:out", "model.layers.1:in", ".:in"):
        assert two.at_site(site)[0].placement == ("replicate",), site


@pytest.mark.slow
def test_tensor_parallel_in_bfloat16_with_tied_embeddings(more):
    """In a 16-bit dtype too, with one matrix for embedding and head, and with a whole pass."""
    report = compare(more("one-tied"), more("tp-tied"))
    assert report.verdict.kind == "within_floor" and whole_of(report)
    assert more("tp-tied").manifest.model.digests == more("one-tied").manifest.model.digests
    assert compare(more("tp-tied")).verdict.kind in ("identical", "within_floor")


@pytest.mark.slow
def test_anchored_pass_on_two_ranks(more):
    """Each block of each rank gets the recorded input of the one process, and repeats it."""
    one, two = more("one"), more("tp-like")
    report = compare(one, two)
    assert report.verdict.kind == "within_floor" and whole_of(report)
    assert two.manifest.plan.anchored_to == one.manifest.id
    assert {site.pass_ for site in report.sites} == {"free", "anchored"}


@pytest.mark.slow
def test_a_run_of_two_ranks_is_repeated_by_one(made, tmp_path):
    """The recorded parts are put together to anchor a single process."""
    two = made("tp")
    again = capture(like=two, out=tmp_path / "again", probe=False)
    report = compare(two, again)
    assert report.verdict.kind == "within_floor" and whole_of(report)
    assert again.manifest.plan.anchored_to == two.manifest.id


def test_a_fault_on_one_rank_is_named(made):
    """A rank whose replica is off is named, at the place where it happened, not where the next
    sum over ranks spread it."""
    report = compare(made("one"), made("tp-fault"))
    verdict = report.verdict
    assert verdict.kind == "localized" and verdict.side == "candidate"
    assert verdict.onset.site == "model.layers.1.mlp:out" and verdict.onset.pass_ == "anchored"
    assert "rank 1 of B disagrees with rank 0" in verdict.summary
    (check,) = report.replicas
    assert check.num_different > 0
    first = next(diff for diff in check.first if diff.pass_ == "anchored")
    assert (first.ranks, first.peers, first.told_by) == ((1,), (0,), "other run")
    assert first.rel_l2 == pytest.approx(0.02, rel=0.01)


@pytest.mark.slow
def test_a_fault_in_one_share_is_named(more):
    """Of a matrix that ranks divide, the rank with the wrong share is named."""
    verdict = compare(more("one"), more("tp-part")).verdict
    assert verdict.kind == "localized"
    assert verdict.onset.site == "model.layers.1.self_attn.q_proj:out"
    assert verdict.summary.endswith("in the share of rank 1")


@pytest.mark.slow
def test_fsdp_deals_the_prompts(more):
    """Weights in pieces, prompts divided: together the ranks hold what one process holds, but
    its truth, and why they hold none."""
    one, two = more("one"), more("fsdp")
    assert two.manifest.plan.truth.stopped_by.startswith("the work is divided between processes")
    assert not any(two.manifest.plan.truth.num_steps)
    report = compare(one, two)
    assert report.verdict.kind in ("within_floor", "identical") and whole_of(report)
    assert {(r.rank, r.sample, r.placement) for r in two.records} == {
        (0, 0, ("single",)),
        (1, 1, ("single",)),
    }
    assert two.manifest.tokens == one.manifest.tokens
    assert {line.status for line in report.preflight if line.check == "code"} == {"same"}
    assert msgspec.structs.replace(two.manifest.model, code={}) == (
        msgspec.structs.replace(one.manifest.model, code={})
    )
    assert two.manifest.plan.modules == one.manifest.plan.modules


@pytest.mark.slow
def test_fewer_prompts_than_ranks_are_run_by_all(more):
    """Then the ranks are a check of one another."""
    two = more("fsdp-same")
    assert {(r.rank, r.placement) for r in two.records} == {
        (0, ("replicate",)),
        (1, ("replicate",)),
    }
    assert unsharded(two).disagreements == []


@pytest.mark.slow
def test_data_parallel_is_bit_identical(more):
    """The same operators on the same machine, only elsewhere."""
    report = compare(more("one"), more("dp"))
    assert report.verdict.kind == "identical" and whole_of(report)


@pytest.mark.slow
def test_nodes_without_a_common_disk(tmp_path, more):
    """Each writes its own files; put together they are the run. What lies there from before is not
    added to."""
    one, out = more("one"), tmp_path / "node-RANK" / "run"
    listed = [{"like": one.path, "out": out, "mesh": "dp", "probe": False}]
    for again in ("", "exists already"):
        said = torchrun(tmp_path, listed)
        for rank in (0, 1):
            error = tmp_path / f"node-{rank}" / f"run.rank{rank}.txt"
            assert error.exists() == bool(again), said
            assert again in (error.read_text() if again else "")
    shutil.copytree(tmp_path / "node-1" / "run", tmp_path / "node-0" / "run", dirs_exist_ok=True)
    assert compare(one, tmp_path / "node-0" / "run").verdict.kind == "identical"


@pytest.mark.slow
def test_devices_are_held_against_one_another(more):
    """One prompt on every device: the one that computes otherwise is named, at its block."""
    verdict = compare(more("one-prompt"), more("dp-same")).verdict
    assert verdict.kind == "localized" and verdict.onset.site == "model.layers.1.mlp:out"
    assert "rank 1 of B disagrees with rank 0" in verdict.summary


@pytest.mark.slow
def test_a_fault_of_a_data_parallel_rank(more):
    """A rank with prompts of its own has no replica: its fault is a fault of its prompts."""
    report = compare(more("one"), more("dp-fault"))
    assert report.verdict.kind == "localized"
    assert report.verdict.onset.block == "model.layers.0" and report.verdict.onset.sample == 0
    assert report.replicas[0].num_tensors == 0


@pytest.mark.slow
def test_pipeline_stages_each_have_their_blocks(more):
    """Two stages hold what one process holds: each tensor once, bit for bit. (Masks of decode steps
    are built otherwise on a later stage, whose first cache is empty: they are counted.)"""
    one, two = more("one"), more("pp")
    report = compare(one, two)
    assert report.verdict.kind == "identical"
    assert all("attention_mask" in item.site for item in report.coverage.unmatched)
    stages = {r.site.split(":")[0]: r.rank for r in two.records}
    assert stages["model.layers.0"] == 0 and stages["lm_head"] == 1
    assert {line.status for line in report.preflight if line.check == "code"} == {"same"}
    assert msgspec.structs.replace(two.manifest.model, code={}) == (
        msgspec.structs.replace(one.manifest.model, code={})
    )
    assert two.manifest.plan.modules == one.manifest.plan.modules


@pytest.mark.slow
def test_a_model_without_a_plan(more):
    """GPT-2 cannot be divided: said by name, with what can be done, and nothing is written."""
    error = (more.folder / "gpt2.rank0.txt").read_text()
    assert "GPT2LMHeadModel has no plan for --mesh tp" in error and "--mesh dp" in error
    assert not (more.folder / "gpt2").exists()


@pytest.mark.slow
def test_operators_are_not_recorded_by_ranks(more):
    """An operator is seen whole in one process alone: asked for, it is refused before anything."""
    assert (
        "ops@ sites cannot be combined with --mesh" in (more.folder / "ops.rank1.txt").read_text()
    )
    assert not (more.folder / "ops").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_dies_leaves_a_readable_run(tmp_path, tiny_model, how):
    """The other rank stops with word of who it was; what was written before can be read."""
    model = str(tiny_model("llama", dtype="float32"))
    out = tmp_path / "run"
    listed = [{"model": model, "out": out, "mesh": "tp", "fails": [1, 3, how], **COMMON}]
    torchrun(tmp_path, listed)
    run = Run.open(out)
    assert not run.manifest.complete and len(run.records) > 20
    word = "rank 1 stopped" if how == "raise" else "another rank is gone"
    assert word in run.manifest.stopped_by
    assert word in Path(f"{out}.rank0.txt").read_text()
    assert unsharded(run).at_site("model.layers.0:out")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3-moe", "gemma3", "mixtral"])
def test_other_architectures_under_tensor_parallelism(tmp_path, tiny_model, architecture):
    """Experts, norms of heads, sliding windows: every tensor is placed and compared."""
    model = str(tiny_model(architecture, dtype="float32"))
    one = capture(model, out=tmp_path / "one", **COMMON)
    torchrun(tmp_path, [{"model": model, "out": tmp_path / "two", "mesh": "tp", **COMMON}])
    report = compare(one, tmp_path / "two")
    assert report.verdict.kind == "within_floor" and whole_of(report)


@pytest.mark.slow
def test_a_mesh_of_two_axes(tmp_path, tiny_model):
    """Four ranks, prompts dealt over two pairs that divide the matrices; against two ranks."""
    model = str(tiny_model("llama", dtype="float32"))
    one = capture(model, out=tmp_path / "one", **COMMON)
    for name, mesh, ranks in (("four", "dp=2,tp=2", 4), ("two", "fsdp", 2)):
        listed = [{"model": model, "out": tmp_path / name, "mesh": mesh, **COMMON}]
        said = torchrun(tmp_path, listed, ranks=ranks)
        assert (tmp_path / name / "manifest.json").exists(), said[-2000:]
    for a, b in ((one.path, tmp_path / "four"), (tmp_path / "four", tmp_path / "two")):
        report = compare(a, b)
        assert report.verdict.kind in ("identical", "within_floor") and whole_of(report)


@pytest.mark.parametrize(
    ("text", "ranks", "axes"),
    [
        ("tp", 2, [("tp", 2)]),
        ("tp=4,dp=2", 8, [("dp", 2), ("tp", 4)]),
        ("dp=2,tp", 8, [("dp", 2), ("tp", 4)]),
        ("fsdp=1,tp", 4, [("tp", 4)]),
    ],
)
def test_mesh_words(text, ranks, axes):
    """Axes come in transformers' order, whatever the order they are given in."""
    assert [(a.name, a.size) for a in parse_mesh(text, ranks).axes] == axes


@pytest.mark.parametrize("text", ["", "xp", "tp=x", "tp,tp", "tp=3", "tp,dp", "tp=0", "tp=2,"])
def test_mesh_words_that_mean_nothing(text):
    """A mesh that is misspelt or does not fit the ranks is refused with the axes there are."""
    with pytest.raises(UsageError):
        parse_mesh(text, 4)


def test_a_mesh_without_ranks(monkeypatch):
    """--mesh in a single process names the command that starts several."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="one process for each") as caught:
        joined("tp=2", "cpu").__enter__()
    assert "torchrun --nproc-per-node" in caught.value.hint


def test_ranks_without_a_mesh(monkeypatch):
    """Several processes that would all write one run are stopped before they do."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one of 2 processes"):
        joined(None, "cpu").__enter__()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined(None, "cpu") as no_mesh, joined("tp", "cpu") as single:
        assert no_mesh is None and single is None


def test_more_processes_than_devices(monkeypatch):
    """Each process takes a device of its own, by its number in the node; one too many is told."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _own_device("cuda") == "cuda:1" and _own_device("cpu") == "cpu"
    assert _own_device("cuda:0") == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="there are 2") as caught:
        _own_device("cuda")
    assert caught.value.hint == "--nproc-per-node 2, or --device cpu"


@pytest.mark.parametrize(
    ("error", "sizes", "axis"),
    [
        (ValueError("`tp_size=2` was requested, but `X` has no `tp_plan`."), {"tp": 2}, "tp"),
        (AttributeError("'GPT2Model' object has no attribute 'layers'"), {"pp": 2}, "pp"),
        (AttributeError("something else"), {"tp": 2}, None),
    ],
)
def test_why_a_model_cannot_be_divided(error, sizes, axis):
    """What transformers says of a missing plan becomes a word about --mesh; the rest stays."""
    found = why_not("GPT2LMHeadModel", error, SimpleNamespace(sizes=sizes))
    assert (found is None) if axis is None else f"no plan for --mesh {axis}" in found.message
