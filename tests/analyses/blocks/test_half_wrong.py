"""Half of the siblings are wrong: the healthy half is blamed on nobody."""

import pytest

from divergence import capture, compare

PROMPTS = [[7 * n + k * (n + 1) for k in range(3, 19)] for n in range(8)]
LAYERS = [f"model.layers.{number}" for number in range(4)]
BLOCKS = [f"{LAYERS[number]}:out=scale:1.1" for number in (0, 2)]
ONE = [f"{LAYERS[number]}:out=scale:1.1" for number in (1, 2, 3)]
SAMPLES = [f"{layer}:out=scale:1.1@sample={n}" for layer in LAYERS for n in (4, 5, 6, 7)]


@pytest.fixture(params=["float32", "bfloat16"])
def pair(request, shared_run, shared_truth):
    """(a run, its truth)."""
    options = {"prompts": PROMPTS, "max_new_tokens": 2, "probe": False, "dtype": request.param}
    a = shared_run(model={"num_blocks": 4}, **options)
    return a, shared_truth(a)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plants", "wrong"), [(BLOCKS, LAYERS[::2]), (ONE, LAYERS[1:])], ids=["two of four", "three"]
)
def test_healthy_blocks_are_not_blamed(pair, plants, wrong, answer):
    """The planted blocks alone are flagged, and the side is B's."""
    a, true = pair
    report = answer(a, truth=true, plants=plants, attn_implementation="sdpa")
    assert (report.verdict.side, report.verdict.confidence) == ("candidate", "high")
    assert report.verdict.onset.block == wrong[0]
    outputs = [f"{layer}:out" for layer in LAYERS]
    assert {site.block for site in report.sites if site.flagged and site.site in outputs} == set(
        wrong
    )


@pytest.mark.slow
def test_healthy_prompts_are_not_blamed(pair, answer):
    """Every block, in half of the prompts: these alone, and the side is B's."""
    a, true = pair
    verdict = answer(a, truth=true, plants=SAMPLES, attn_implementation="sdpa").verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate")
    assert verdict.onset.sample == 4
    assert "in prompts 4, 5, 6, 7 (of 8)" in verdict.summary


@pytest.mark.slow
def test_the_side_that_is_nearer_is_not_excused_by_the_other(pair, tmp_path):
    """Both are far off in one block, A twenty times as far: each is named with its own number."""
    healthy, true = pair
    narrow = healthy.manifest.model.dtype == "bfloat16"
    a, b = (
        capture(
            like=healthy,
            out=tmp_path / name,
            plants=[f"{LAYERS[2]}:out=scale:{1 + size}"],
            probe=False,
        )
        for name, size in (("a", 0.8 if narrow else 2e-2), ("b", 0.15 if narrow else 1e-3))
    )
    verdict = compare(a, b, truth=true).verdict
    assert (verdict.side, verdict.onset.block) == ("both", LAYERS[2])
    off = next(item for item in verdict.evidence if item.code == "both_off")
    assert off["reference"] > 4 * off["candidate"] > 24


@pytest.mark.parametrize(("block", "head"), [(1, True), (3, False)])
def test_a_fault_of_the_head_is_told_beside_a_blocks(pair, answer, block, head):
    """What is given what passes makes its own error; what follows a bad last block inherits it."""
    a, true = pair
    plants = [f"{LAYERS[block]}:out=scale:1.3", *["lm_head:out=scale:1.3"] * head]
    verdict = answer(a, truth=true, plants=plants).verdict
    assert (verdict.side, verdict.onset.block) == ("candidate", LAYERS[block])
    assert ("; another in lm_head" in verdict.summary) == head
    assert ";" not in verdict.summary or head
