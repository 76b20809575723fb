"""What is judged of measured numbers, and how wide the limits are: by siblings, rows and looks.

Each forward of each prompt has the right to convict, and healthy ones do not alarm.
"""

import math

import msgspec
import numpy as np
import pytest
import torch

from divergence import RecordOptions, capture, check, compare
from divergence.comparison.result import PromptRatio
from divergence.numerics.floor import THRESHOLDS, spread
from divergence.numerics.sums import Estimate
from tests.by_hand import measured

ROWS = 16


def blocks(*ratios: float, **changes):
    return [measured(f"h.{n}:out", ratio, order=n, **changes) for n, ratio in enumerate(ratios)]


def test_the_absolute_limit_needs_no_siblings(flagged):
    """A site that has none is held against the model alone."""
    limit = THRESHOLDS.typical
    assert flagged([measured("head:out", 1.01 * limit)]) == {"head:out"}
    assert flagged([measured("head:out", 0.99 * limit)]) == set()


@pytest.mark.parametrize(
    ("others", "ratio", "is_fault"),
    [
        (0.5, 2.1, True),  # four times as wrong, below the absolute limit
        (0.5, 1.5, False),  # three times as wrong as those that make no error to speak of
        (0.0, 1.0, False),  # where the others agree bit for bit, a floor is still rounding
        (0.0, 1.5, True),
    ],
)
def test_siblings_are_controls(flagged, others, ratio, is_fault):
    """A block is held against the others of its kind."""
    wrong = {"h.2:out"} if is_fault else set()
    assert flagged(blocks(others, others, ratio, others)) == wrong


@pytest.mark.parametrize(("usual", "limit"), [(0.0, 1.2), (0.5, 1.8), (1.0, 2.9)])
def test_the_limits_that_siblings_make_are_those_that_the_docs_tell(judged, usual, limit):
    """Of a few blocks of 512 numbers."""
    report = judged(blocks(usual, usual, usual, usual))
    assert [round(site.limit, 1) for site in report.sites] == [limit] * 4


@pytest.mark.parametrize(("rows", "features"), [(1, 2), (1, 4), (2, 8), (1, 16)])
def test_few_numbers_have_wider_limits(flagged, rows, features):
    """The relative error of a router's four logits varies more than that of a hidden state."""
    few = {"rows": rows, "features": features}
    assert flagged(blocks(0.5, 0.5, 2.5, 0.5)) == {"h.2:out"}
    assert flagged(blocks(0.5, 0.5, 2.5, 0.5, **few)) == set()
    assert flagged(blocks(0.5, 0.5, 1e4, 0.5, **few)) == {"h.2:out"}


def test_the_width_is_that_of_the_f_distribution():
    """Ratios of two independent norms over n numbers, drawn: at most one in 1,000 lies beyond the
    width, whatever n is; and the largest of many does as rarely as one."""
    assert spread(64) == spread(10**6) == 1.0
    assert spread(64, num_looks=64) > 1.0
    draw = torch.Generator().manual_seed(0)
    for n in (4, 8, 16, 32):
        one, two = (torch.randn(200_000, n, generator=draw).norm(dim=1) for _ in range(2))
        beyond = (one / two > 1.6 * spread(n)).double().mean()  # 1.6: the width at 64
        assert beyond < 1e-3
    for n, looks in ((16, 8), (64, 64)):
        one, two = (torch.randn(4_000, looks, n, generator=draw).norm(dim=2) for _ in range(2))
        beyond = ((one / two).amax(1) > 1.6 * spread(n, num_looks=looks)).double().mean()
        assert beyond < 2e-3


NAMES = {
    "encoder and decoder blocks run at other shapes": (
        [*blocks(0.5, 0.5), *(measured(f"g.{n}:out", 2.1) for n in range(2))],
        set(),
    ),
    "a block's inputs answer for nothing": (
        [measured("h.0:in", 100.0), measured("h.0:in.rotary.0", 100.0)],
        set(),
    ),
    "a module's input does": ([measured("h.0.mlp:in", 100.0)], {"h.0.mlp:in"}),
    "rows inside experts are not tokens": ([measured("h.0.experts.act:in", 100.0)], set()),
    "they are judged where they come together": (
        [measured("h.0.experts:out", 100.0)],
        {"h.0.experts:out"},
    ),
    "free runs have no controls": (
        [measured(f"h.{n}:out", r, pass_="free") for n, r in enumerate((2.1, 0.3, 0.3, 0.3))],
        set(),
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_what_is_judged_beside_what(flagged, case):
    """Only what is made in equal inputs, beside others of its kind."""
    sites, wrong = NAMES[case]
    assert flagged(sites) == wrong


def test_single_tokens_count_unless_they_are_routed(flagged):
    """One token far out is a fault, but in a block with experts it may have met another expert."""
    sites = blocks(0.5, 0.5, 0.5, 0.5)
    sites[1] = msgspec.structs.replace(sites[1], ratio_max=30.0)
    routed = {"routed": frozenset({"h.1"})}
    assert flagged(sites) == {"h.1:out"}
    assert flagged(sites, **routed) == set()
    assert flagged(blocks(0.5, 30.0, 0.5), **routed) == {"h.1:out"}


@pytest.mark.parametrize(("worst", "is_fault"), [(9.0, False), (20.0, True), (1e5, True)])
def test_siblings_do_not_excuse_a_token_of_which_nothing_is_right(flagged, worst, is_fault):
    """A kernel that gets one token wrong gets it wrong in every block."""
    sites = blocks(*[0.8] * 6)
    sites = [msgspec.structs.replace(site, ratio_max=worst) for site in sites]
    assert len(flagged(sites)) == 6 * is_fault


@pytest.mark.parametrize(("elsewhere", "is_fault"), [(0.0, True), (1.0, False)])
def test_a_lone_gradient_is_held_to_those_of_the_blocks(flagged, elsewhere, is_fault):
    """Prompts in another batch: blocks' results are equal, and sums of gradients are not."""
    sites = [measured(f"h.{n}#backward:out", 0.0, role="block") for n in range(4)]
    sites += [measured(f"h.{n}.mlp#backward:out.weight", elsewhere, role="inner") for n in range(4)]
    sites.append(measured("norm#backward:out.weight", 3.0, kind="Norm"))
    assert flagged(sites) == ({"norm#backward:out.weight"} if is_fault else set())


def test_the_last_bit_of_a_massive_channel_convicts_nothing(flagged):
    """One decode step of one block is off by the last bit of its largest number, near 173, where
    bfloat16 steps by 1; by eight it is judged."""

    def step_site(block, ratio, step, *, large=0.0, off=1.0, norm=1.25):
        return measured(
            f"h.{block}:out",
            ratio,
            step=step,
            rows=1,
            rel_l2=norm / 180,
            reference_norm=180.0,
            max_abs=off,
            max_abs_reference=large,
            max_abs_candidate=large + off,
            ulp_format="bfloat16",
            reference_dtype="bfloat16",
            candidate_dtype="bfloat16",
        )

    for off, wrong in ((1.0, set()), (8.0, {"h.2:out"})):
        results = [
            step_site(block, 0.4, step)
            if (block, step) != (2, 3)
            else step_site(block, 9.0 * off, step, large=173.0, off=off, norm=1.1 * off)
            for block in range(6)
            for step in range(1, 9)
        ]
        assert flagged(results) == wrong


# --- many forwards -----------------------------------------------------------------------------

PROMPTS = [(sample, 0) for sample in range(8)]
STEPS = [(0, step) for step in range(1, 65)]


def drawn(places, *, rows=ROWS, seed=0, ratio=0.8, **changes):
    """A healthy pair of six blocks: ratios of about 0.8, varied as those of tokens were measured to
    vary; ``ratio=0.0``: equal bit for bit."""
    random = np.random.default_rng(seed)
    tokens = {place: math.exp(random.normal(0, 0.2)) for place in places}  # hard for all blocks
    return {
        (block, *place): measured(
            f"h.{block}:out",
            ratio * tokens[place] * math.exp(random.normal(0, 0.25 / math.sqrt(rows))),
            sample=place[0],
            step=place[1],
            order=block,
            rows=rows,
            **changes,
        )
        for block in range(6)
        for place in places
    }


def change(sites, key, ratio):
    sites[key] = msgspec.structs.replace(sites[key], ratio=ratio, ratio_max=ratio)


def test_a_fault_in_one_prompt_of_many_is_flagged_and_named(judged):
    """The median over eight prompts hides it; its own forward does not."""
    sites = drawn(PROMPTS)
    change(sites, (3, 2, 0), 6.8)
    verdict = judged(sites.values()).verdict
    assert (verdict.onset.site, verdict.onset.sample) == ("h.3:out", 2)
    assert "in prompt 2 alone (of 8)" in verdict.summary


def test_a_fault_in_one_decode_step_of_64_is_flagged_and_named(judged):
    """At a size at most twice what is found in a run of that step alone."""
    sites = drawn(STEPS, rows=1)
    alone = judged(site for (_, _, step), site in sites.items() if step == 17)
    change(sites, (4, 0, 17), 2 * next(s.limit for s in alone.sites if s.site == "h.4:out"))
    verdict = judged(sites.values()).verdict
    assert verdict.onset.site == "h.4:out"
    assert "in decode step 17 alone (of 64)" in verdict.summary


def test_others_that_are_near_to_their_limits_are_not_said_to_be_fine(judged):
    """A fault of all prompts may be above the limit in one of them."""
    sites = drawn(PROMPTS)
    change(sites, (3, 2, 0), 4.6)
    change(sites, (3, 6, 0), 2.9)
    summary = judged(sites.values()).verdict.summary
    assert "seen in prompt 2 (of 8)" in summary and "alone" not in summary


def test_what_float32_shows_everywhere_is_not_said_to_be_in_some_forwards_alone(judged):
    """16 bits hide it in the others: only where the float32 pass shows it in the same ones is it
    in them alone."""
    sites = drawn(PROMPTS)
    change(sites, (3, 2, 0), 6.8)
    for samples, alone in ((range(8), False), ([2], True)):
        deep = {key: msgspec.structs.replace(at, pass_="escalated") for key, at in sites.items()}
        for sample in samples:
            change(deep, (3, sample, 0), 80.0)
        summary = judged([*sites.values(), *deep.values()]).verdict.summary
        assert ("in prompt 2 alone" in summary) == alone, summary


@pytest.mark.parametrize(
    ("usual", "role", "ratio", "is_fault"),
    [
        (0.0, "block", 1.3, False),  # two kernels agree but for a few bits of one token
        (0.0, "block", 4.0, True),
        (0.1, "inner", 3.0, False),  # what a module gets of one token may cancel there
        (0.1, "inner", 6.0, True),
    ],
)
def test_few_rows_are_held_to_a_whole_floor(flagged, usual, role, ratio, is_fault):
    """One step's error is a bit or none, which the rounding model does not know."""
    sites = drawn(STEPS, rows=1, ratio=0.0, role=role)
    for key in sites:
        change(sites, key, usual)
    change(sites, (1, 0, 19), ratio)
    assert bool(flagged(sites.values())) == is_fault


def test_steps_from_one_on_are_said_as_such(judged):
    """A cache that goes wrong stays wrong."""
    sites = drawn(STEPS, rows=1)
    for step in range(60, 65):
        change(sites, (4, 0, step), 11.0)
    assert "from decode step 60 on" in judged(sites.values()).verdict.summary


@pytest.mark.parametrize("rows", [1, 16])
def test_healthy_looks_do_not_alarm_however_many_there_are(flagged, rows):
    """75 healthy pairs of 8 to 64 looks in 6 blocks: the largest of many is large by chance."""
    for seed in range(25):
        for places in (PROMPTS, STEPS[:16], STEPS):
            assert not flagged(drawn(places, rows=rows, seed=seed).values())


def test_what_is_hard_for_all_blocks_is_no_fault_of_one(judged):
    """A prompt with ratios five times the usual in every block, below the absolute limit; beyond
    it no sibling is a control."""
    sites = drawn(PROMPTS)
    for block in range(6):
        change(sites, (block, 5, 0), 5 * sites[block, 5, 0].ratio)
    assert judged(sites.values()).verdict.kind == "within_floor"
    for block in range(6):
        change(sites, (block, 5, 0), 9.0)
    report = judged(sites.values())
    assert {site.site for site in report.sites if site.flagged} == {f"h.{n}:out" for n in range(6)}
    assert "prompt 5" in report.verdict.summary


def test_prompts_of_one_batch_are_judged_apart(judged):
    """Their rows lie in one tensor; the fault of one of them is no smaller for it."""

    def batch(block: int, off: int | None):
        ratios = [7.0 if number == off else 0.8 for number in range(8)]
        prompts = [
            PromptRatio(sample=number, ratio=ratio, num_rows=ROWS)
            for number, ratio in enumerate(ratios)
        ]
        return measured(f"h.{block}:out", 0.8, prompts=prompts, shape=(8, ROWS, 64), order=block)

    assert judged(batch(block, None) for block in range(6)).verdict.kind == "within_floor"
    verdict = judged(batch(block, 6 if block == 2 else None) for block in range(6)).verdict
    assert verdict.onset.site == "h.2:out"
    assert "in prompt 6 alone (of 8)" in verdict.summary


def test_decode_steps_of_one_batch_are_judged_apart(judged):
    """A prompt that is hard in every block is held against itself there, not against another one;
    the same error of an easy prompt, in one block, is its fault."""

    def decoded(off: tuple[int, int] | None):
        sites = []
        for block, step in ((block, step) for step in range(7) for block in range(6)):
            rows = 1 if step else 16
            ratios = [0.5, 4.0 if (block, step) == off else 0.5, 5.0 if step else 0.5]
            prompts = [
                PromptRatio(sample=number, ratio=ratio, num_rows=rows, ratio_max=ratio)
                for number, ratio in enumerate(ratios)
            ]
            changes = {"prompts": prompts, "shape": (3, rows, 64), "ratio_max": max(ratios)}
            sites.append(measured(f"h.{block}:out", 0.5, order=block, step=step, **changes))
        return sites

    assert judged(decoded(None)).verdict.kind == "within_floor"
    verdict = judged(decoded((2, 3))).verdict
    assert verdict.onset.site == "h.2:out"
    assert "in prompt 1" in verdict.summary and "step 3" in verdict.summary


def test_one_step_of_routed_blocks_is_no_fault(flagged):
    """There rounding may send the only token to another expert."""
    sites = drawn(STEPS, rows=1)
    change(sites, (4, 0, 17), 60.0)
    assert flagged(sites.values())
    assert not flagged(sites.values(), routed=frozenset({"h.4"}))


# --- what is said of it ------------------------------------------------------------------------


def test_a_whole_kind_is_beyond_its_limit_by_as_much_as_its_least(judged):
    """Where all blocks are off, the evidence says by how much the least of them is."""
    sites = blocks(*(12.0 + 6 * number for number in range(5)), ratio_max=None)
    verdict = judged(sites).verdict
    assert (verdict.kind, verdict.confidence) == ("systematic", "medium")  # twice its limit
    texts = [item.text for item in verdict.evidence]
    assert "5 of 5 Block are beyond their limit, the least by 2.0 ×" in texts


def test_a_kind_is_judged_over_prefill_and_decode(judged):
    """Some blocks are off in their prefill alone, the others in a decode step: all of a kind are,
    and it is nothing that is kept between steps."""
    places = [(prompt, step) for prompt in range(3) for step in range(3)]
    sites = drawn(places, rows=1) | drawn([(prompt, 0) for prompt in range(3)])
    for block in range(6):
        change(sites, (block, 0, int(block not in (1, 4))), 40.0)
    verdict = judged(sites.values()).verdict
    assert verdict.summary.startswith("every Block differs by more than rounding, first at h.1:out")
    assert "in prompt 0 alone (of 3)" in verdict.summary and "kept" not in verdict.summary


def test_forwards_that_are_equal_are_not_among_those_that_may_be_off(judged):
    """All decode steps together are beyond a limit; the first is equal bit for bit."""
    steps = [(prompt, step) for prompt in range(3) for step in range(1, 5)]
    sites = drawn(steps, rows=1, ratio=0.0)
    for prompt, step in steps:
        change(sites, (2, prompt, step), 0.0 if step == 1 else 1.6)
    verdict = judged(sites.values()).verdict
    assert verdict.summary.endswith("made at h.2:out, seen from decode step 2 on")


def test_others_that_are_off_by_more_than_rounding_may_be_off_as_well(judged):
    """One step is beyond its limit; the others are within theirs, and no healthy ones."""
    sites = drawn([(0, step) for step in range(1, 5)], rows=1, ratio=1.2)
    for step, ratio in enumerate((42.0, 2.5, 2.6, 2.5), start=1):
        change(sites, (0, 0, step), ratio)
    assert "seen in decode step 1 (of 4)" in judged(sites.values()).verdict.summary


@pytest.mark.parametrize(("others", "kind"), [(1.2, "localized"), (1.4, "undetermined")])
def test_a_block_beside_others_that_are_off_is_no_answer(judged, others, kind):
    """The first block adds the most to a small stream: what all do wrong is seen there first."""
    verdict = judged(blocks(4.8, *[others] * 5, rows=64, features=512)).verdict
    assert (verdict.kind, verdict.onset.site) == (kind, "h.0:out")
    if kind == "undetermined":
        assert "is wrong alone, or all are; a truth tells them apart" in verdict.summary
        assert "truth" in verdict.next[0]


def test_what_lies_before_the_first_place_of_a_kind_may_be_what_is_off(judged):
    """Nothing is known of what enters it, unless that was recorded."""
    routers = [
        measured(
            f"h.{n}.gate:out", 40.0, order=2 * n + 1, role="inner", kind="Router", block=f"h.{n}"
        )
        for n in range(5)
    ]
    entering = [
        msgspec.structs.replace(
            r, site=r.site[:-3] + "in", order=r.order - 1, ratio=0.5, ratio_max=0.5
        )
        for r in routers
    ]
    words = "every gate (Router), or what lies between the block's input and it, differs"
    assert words in judged(routers).verdict.summary
    assert "every gate (Router) differs" in judged([*entering, *routers]).verdict.summary


def test_estimates_of_prefill_and_decode_steps_are_told_apart(judged):
    """A decode step has one row, and is known worse: the prefill's figure is its own."""
    sites = []
    for step, error in ((0, 0.02), (0, 0.04), (1, 0.2), (2, None)):
        estimated = error and Estimate(
            **dict.fromkeys(Estimate.__struct_fields__, 1) | {"relative_error": error}
        )
        number = len(sites)
        sites.append(measured(f"h.{number}:out", 0.5, step=step, estimated=estimated, rel_l2=0.1))
    (item,) = [one for one in judged(sites).verdict.evidence if one.code == "blocks.estimated"]
    assert item["num_estimated"] == 3 and item.text.startswith("3 of 4 ")
    typical = {error["phase"]: error["typical"] for error in item["errors"]}
    assert typical == {"prefill": 0.03, "decode": 0.2}
    assert "in the prefill ±3% (at worst ±4%), in the decode ±20% (at worst ±20%)" in item.text


def test_the_most_that_statistics_prove_is_told(judged):
    """Of what was not measured; what is equal, or was, does not count."""
    sites = [
        measured("h.0:out", None, rel_l2=None, at_least=0.1),
        measured("h.1:out", None, rel_l2=None, at_least=0.3),
        measured("h.2:out", None, rel_l2=None),
        measured("h.3:out", 0.0, identical=True),
        measured("h.4:out", 0.5, rel_l2=0.5, at_least=0.9),
    ]
    evidence = judged(sites).verdict.evidence
    assert [item["num_unmeasured"] for item in evidence if "num_unmeasured" in item.values] == [3]
    (most,) = [item for item in evidence if "at_least" in item.values]
    assert most["at_least"] == 0.3 and "h.1:out" in most.text


@pytest.mark.parametrize(("prompt", "kind"), [(1, "drift"), (2, "within_floor")])
def test_a_free_run_that_is_off_in_one_prompt_says_nothing_of_the_others(judged, prompt, kind):
    """What only rounds in the anchored pass is known by prompt, as far as its own free run goes:
    a free run that ends far off is enlarged rounding then."""

    def site(pass_, sample, step, block):
        place = pass_, sample, step, block
        return measured(
            f"h.{block}:out",
            90.0 if place == ("free", 1, 1, 3) else 0.9,
            pass_=pass_,
            sample=sample,
            step=step,
            order=block,
            floor=1e-3,
            token_rel_l2_median=0.5 if place == ("free", prompt, 1, 5) else 1e-3,
        )

    report = judged(
        site(pass_, sample, step, block)
        for pass_ in ("anchored", "free")
        for sample in range(5)
        for step in (0, 1)
        for block in range(6)
    )
    assert "drift" in [finding.kind for finding in report.findings]
    assert report.verdict.kind == kind


def test_a_prefill_that_was_not_recorded_is_said(llama, tmp_path):
    """Of a golden of decode steps alone: compare and check say what they have not seen."""
    a = capture(
        llama,
        out=tmp_path / "a",
        prompts=["One."],
        max_new_tokens=3,
        recording=RecordOptions(steps="decode"),
        device="cpu",
    )
    b = capture(like=a, out=tmp_path / "b", device="cpu")
    for answer in (compare(a, b), check(a, b)):
        assert any("the prefill was not recorded" in note for note in answer.notes)
