"""A training step on several gloo ranks against one process: healthy, and with faults of the loop.

The reference is one process. Four prompts; rank 1 of two has the prompts 1 and 3.
"""

from collections.abc import Callable

import pytest

from divergence import Run, TrainOptions, capture, compare
from divergence.run.ranks import unsharded
from divergence.run.site import OPTIMIZER, is_of_parameter
from tests.domains.training.step.rank_faults import BLOCK
from tests.recording.test_ranks import make

pytestmark = pytest.mark.slow
"""Six runs of two processes; recording/test_ranks.py is the fast one of ranks."""

IDS = [
    [5, 9, 33, 21, 77, 100, 43, 12, 6, 91, 18],
    [45, 99, 33, 21, 17, 20, 43, 112, 66],
    [7, 14, 21, 28, 35, 42, 49],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
]
STEP = {"train": True, "optimizer": "adamw", "clip_grad_norm": 0.5, "probe": False}
MESHES = ("dp", "fsdp")
STAGES = {1: "dp", 2: "fsdp"}
"""Stage of ZeRO, beside those that the meshes have by themselves: mesh."""
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
    updated = {site for *_, site in ours if f"{OPTIMIZER}:out." in site} - moments
    assert len(updated) >= 15
    assert len(moments) == (2 * len(updated) if one.manifest.training.optimizer == "adamw" else 0)
    compared = {site.site for site in report.sites if is_of_parameter(site.site)}
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
    return make(
        folder, {"fsdp": {"mesh": "fsdp", **again}, "zero-1": {"mesh": "dp", "zero": 1, **again}}
    )


@pytest.mark.parametrize("how", ["fsdp", "zero-1"])
def test_two_ranks_make_the_step_of_one_process(how, one, two_ranks):
    """The optimizer's state alone is divided, or all is. (Other ways: below.)"""
    healthy(one, two_ranks(how))


def test_the_stage_of_zero_is_recorded(one, two_ranks):
    """Also where the mesh alone says it; it goes with the mesh, and one process has none."""
    told = [run.manifest.training.zero for run in (one, two_ranks("fsdp"), two_ranks("zero-1"))]
    assert told == [None, 3, 1]
    training = str(two_ranks("zero-1").manifest.training)
    assert training.startswith("forward and backward, adamw, ZeRO 1,")
    report = compare(two_ranks("zero-1"), two_ranks("fsdp"))
    (line,) = [line for line in report.preflight if line.check == "ZeRO stage"]
    assert (line.reference, line.candidate, line.status) == ("1", "3", "differs")
    assert report.verdict.kind == "within_floor"


def test_the_first_stage_has_each_moment_on_one_rank(two_ranks):
    """And the new values on both."""
    run = two_ranks("zero-1")
    held: dict[str, set[int]] = {}
    for record in run.records:
        if record.pass_ == "free" and ":out.weight" in record.site and OPTIMIZER in record.site:
            held.setdefault(record.site, set()).add(record.rank)
    moments = {site: ranks for site, ranks in held.items() if "exp_avg" in site}
    assert {len(ranks) for ranks in moments.values()} == {1}
    assert set.union(*moments.values()) == {0, 1}
    assert all(ranks == {0, 1} for site, ranks in held.items() if site not in moments)
    orders = [record.order for record in unsharded(run).records if OPTIMIZER in record.site]
    assert len(set(orders)) == len(orders) // 2  # alike in both passes, and else no two


def test_ranks_hold_parts_or_copies(two_ranks):
    """Gradients are shards under FSDP and copies under the first stage of ZeRO."""
    placed = {
        how: {r.placement for r in two_ranks(how).records if r.site.endswith("backward:out.weight")}
        for how in ("fsdp", "zero-1")
    }
    assert placed == {"fsdp": {("shard:0",)}, "zero-1": {("replicate",)}}


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
        {
            f"{mesh}-{n}": {"mesh": mesh, "like": one.path, "probe": False}
            for n, one in four.items()
            for mesh in MESHES
        },
        ranks=ranks,
    )
    for n, one in four.items():
        for mesh in MESHES:
            healthy(one, made(f"{mesh}-{n}"))


ARCHITECTURES = {
    "llama": ({"dtype": "bfloat16", "tied": True}, {"optimizer": "adamw"}),
    "gpt2": ({"dtype": "float32"}, {"optimizer": "sgd", "autocast": "bfloat16"}),
    "qwen3-moe": (
        {"dtype": "float32"},
        {"optimizer": "adamw", "loss_scale": 256.0, "gradient_checkpointing": True},
    ),
}
"""transformers divides all of gpt2 as one part: its plan for FSDP names no module of it."""


@pytest.mark.slow
def test_other_models_and_settings(tiny_model, tmp_path):
    """Tied and 16-bit weights, experts, a scaled loss; completions alone have labels."""
    labels = [{"completion_from": n} for n in (8, 3, 6)]
    ones, listed = {}, {}
    for name, (made_of, options) in ARCHITECTURES.items():
        one = ones[name] = capture(
            str(tiny_model(name, num_blocks=2, **made_of)),
            out=tmp_path / name,
            training=TrainOptions(train=True, labels=labels),
            prompts=IDS[:3],
            probe=False,
            **options,
        )
        for stage, mesh in ((0, "dp"), (1, "dp"), (2, "fsdp"), (3, "fsdp")):
            listed[f"{name} {stage}"] = {
                "mesh": mesh,
                "zero": stage,
                "like": one.path,
                "probe": False,
            }
    made = make(tmp_path, listed)
    for name, one in ones.items():
        for stage in range(4):
            healthy(one, made(f"{name} {stage}"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, four) -> Callable[[str], Run]:
    folder, again = tmp_path_factory.mktemp("faults"), {"like": four[4].path, "probe": False}
    return make(
        folder,
        {
            f"{mesh} {fault}": {"mesh": mesh, "fault": fault, **again}
            for mesh in MESHES
            for fault in FAULTS
            if (mesh, fault) != ("fsdp", "early")
        },
    )


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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_stages_of_zero_on_more_ranks(ranks, four, tmp_path):
    """Among them new values that are not sent to the other ranks: each of these disagrees."""
    again = {"like": four[4].path, "probe": False}
    listed = {str(n): {"mesh": mesh, "zero": n, **again} for n, mesh in STAGES.items()}
    listed["unsent"] = listed["1"] | {"fault": "unsent"}
    made = make(tmp_path, listed, ranks=ranks)
    for n in STAGES:
        healthy(four[4], made(str(n)))
    verdict = compare(four[4], made("unsent")).verdict
    assert (verdict.kind, verdict.side) == ("localized", "candidate"), verdict.summary
    assert "of B disagree" in verdict.summary and f"{OPTIMIZER}:out" in verdict.summary
