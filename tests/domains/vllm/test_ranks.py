"""A model that vLLM divides among two processes: one run, whole tensors, replicas that agree."""

import importlib.util

import pytest

from divergence import BatchOptions, capture, compare, truth
from tests.models.families import build
from tests.recording.test_ranks import make, torchrun

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)

PART = "model.layers.1.mlp.up_proj:out=scale:1.5@1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """transformers' run of one process, its truth, and by name what two processes of vLLM make."""
    folder = tmp_path_factory.mktemp("ranks")
    model = build("llama", folder / "model", dtype="bfloat16", hidden=128)
    a = capture(
        model,
        out=folder / "a",
        prompts=["Hello there", [5, 6, 7]],
        batching=BatchOptions(batch=True),
        max_new_tokens=3,
        sites="modules",
        probe=False,
    )
    again = {"like": a.path, "engine": "vllm", "mesh": "tp", "probe": False}
    made = make(
        folder,
        {
            "tp": again,
            "fault": {**again, "plants": [PART]},
            "count": {**again, "engine_options": {"tensor_parallel_size": 4}},
        },
        start=torchrun,
    )
    return a, truth(a, out=folder / "truth"), made


def line(report, check):
    return next(line for line in report.preflight if line.check == check)


def test_two_processes_are_one_run(runs):
    """Their shares are put together, their copies agree bit for bit, their weights are one's."""
    a, wide, made = runs
    b = made("tp")
    report = compare(a, b, truth=wide)
    assert report.verdict.kind == "within_floor", report.verdict.summary
    assert line(report, "weights").status == "same"
    placed = {record.site: record.placement for record in b.records if record.rank == 1}
    block = "model.layers.1"
    assert {placed[f"{block}{one}"] for one in (":in", ":out", ".self_attn.o_proj:out")} == {
        ("replicate",)
    }
    assert {
        placed[f"{block}{one}"]
        for one in (".self_attn.q_proj:out", ".self_attn.v_proj:out", ".mlp.down_proj:in")
    } == {("shard:2",)}
    open_ = {site for site, placement in placed.items() if placement is None}
    assert open_ == {"model.rotary_emb:out", "model.rotary_emb:out.1"}, "one for all prompts there"
    assert all(site.rel_l2 is not None for site in report.sites if site.site.endswith("_proj:out"))


def test_a_fault_on_one_rank(runs):
    """The site and the rank whose share is wrong."""
    a, wide, made = runs
    verdict = compare(a, made("fault"), truth=wide).verdict
    assert verdict.kind == "localized" and verdict.side == "candidate"
    assert verdict.onset.site == "model.layers.1.mlp.up_proj:out"
    assert "share of rank 1" in verdict.summary


def test_another_number_of_processes(runs):
    """What the option says must be what torchrun started."""
    _, _, made = runs
    with pytest.raises(AssertionError, match="tensor_parallel_size=4: --mesh tp has 2 processes"):
        made("count")
