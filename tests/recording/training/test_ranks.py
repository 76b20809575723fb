"""A training step on several gloo ranks against one process: healthy, and with faults of the loop.

The reference is one process. Four prompts; rank 1 of two has the prompts 1 and 3.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from divergence.comparison.api import compare
from divergence.recording.api import capture
from divergence.run.reader import Run
from divergence.run.schema.site import OPTIMIZER, of_parameter
from divergence.run.unshard import unsharded
from tests.recording.test_ranks import make
from tests.recording.training.rank_faults import BLOCK

IDS = [
    [5, 9, 33, 21, 77, 100, 43, 12, 6, 91, 18],
    [45, 99, 33, 21, 17, 20, 43, 112, 66],
    [7, 14, 21, 28, 35, 42, 49],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
]
STEP = {"train": True, "optimizer": "adamw", "clip_grad_norm": 0.5, "probe": False}
MESHES = ("dp", "fsdp")
FAULTS = {
    "skipped": "loss#backward:out",
    "forgotten": "lm_head#backward:out.weight",
    "averaged": "lm_head#backward:out.weight",
    "one divides": "lm_head#backward:out.weight",
    "stale": f"{BLOCK}.post_attention_layernorm#backward:out.weight",
    "early": f"{BLOCK}.post_attention_layernorm#backward:out.weight",
}
"""Fault → where it begins. (Gradients are recorded from the last module to the first.)"""


def healthy(one: Run, several: Run) -> None:
    """Every tensor of the step is compared, the state of the optimizer included."""
    report = compare(one, several)
    assert report.verdict.kind in ("within_floor", "identical"), report.verdict.summary
    assert report.coverage.unmatched == []
    whole = unsharded(several)
    assert whole.disagreements == [] and not whole.unmade
    ours = {record.coordinates for record in one.records}
    assert ours <= {record.coordinates for record in whole.records}
    moments = {site for *_, site in ours if site.endswith(("exp_avg", "exp_avg_sq"))}
    updated = {site for *_, site in ours if OPTIMIZER in site and site.endswith(":out.weight")}
    assert len(moments) == 2 * len(updated) == 2 * 21  # of so many parameters
    compared = {site.site for site in report.sites if of_parameter(site.site)}
    assert moments | updated <= compared


@pytest.fixture(scope="module")
def model(tiny_model) -> str:
    return str(tiny_model("llama", dtype="float32", num_blocks=2))


@pytest.fixture(scope="module")
def one(tmp_path_factory, model) -> Run:
    """One process, three prompts: not divisible by two ranks."""
    folder = tmp_path_factory.mktemp("step")
    return capture(model, prompts=IDS[:3], out=folder / "one", **STEP)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, one) -> Callable[[str], Run]:
    folder, again = tmp_path_factory.mktemp("ranks"), {"like": one.path, "probe": False}
    return make(folder, {mesh: {"mesh": mesh, **again} for mesh in MESHES})


@pytest.mark.parametrize("mesh", MESHES)
def test_two_ranks_make_the_step_of_one_process(mesh, one, two_ranks):
    healthy(one, two_ranks(mesh))


def test_ranks_hold_parts_or_copies(one, two_ranks):
    placed = {
        mesh: {r.placement for r in two_ranks(mesh).records if r.site.endswith("out.weight")}
        for mesh in MESHES
    }
    assert placed == {"dp": {("replicate",)}, "fsdp": {("shard:0",)}}


# --- what takes longer than the fast tests may --------------------------------------------------


@pytest.fixture(scope="module")
def four(tmp_path_factory, model) -> dict[int, Run]:
    """One process, by number of prompts."""
    folder = tmp_path_factory.mktemp("references")
    return {n: capture(model, prompts=IDS[:n], out=folder / str(n), **STEP) for n in (1, 3, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_and_prompts(ranks, four, tmp_path):
    """Prompts that the ranks divide evenly, unevenly, and fewer prompts than ranks."""
    made = make(
        tmp_path,
        {f"{mesh}-{n}": {"mesh": mesh, "like": one.path, "probe": False}
         for n, one in four.items() for mesh in MESHES},
        ranks=ranks,
    )  # fmt: skip
    for n, one in four.items():
        for mesh in MESHES:
            healthy(one, made(f"{mesh}-{n}"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, four) -> Callable[[str], Run]:
    folder, again = tmp_path_factory.mktemp("faults"), {"like": four[4].path, "probe": False}
    return make(
        folder,
        {f"{mesh} {fault}": {"mesh": mesh, "fault": fault, **again}
         for mesh in MESHES for fault in FAULTS if (mesh, fault) != ("fsdp", "early")},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_loop_over_ranks_is_found(fault, mesh, four, faulty):
    """Named are its place and the rank, where it is one rank's; and the side, whichever it is."""
    if (mesh, fault) == ("fsdp", "early"):
        pytest.skip("each backward of FSDP sends what it has made")
    good, bad = four[4], faulty(f"{mesh} {fault}")
    for a, b, side in ((good, bad, "candidate"), (bad, good, "reference")):
        verdict = compare(a, b).verdict
        assert verdict.kind == "localized", verdict.summary
        assert verdict.onset.site == FAULTS[fault]
        assert verdict.side in (side, None)
        if fault in ("stale", "one divides"):
            word = "B" if side == "candidate" else "A"
            told = f"rank 1 of {word} disagrees" if mesh == "dp" else "in the share of rank 1"
            assert told in verdict.summary
