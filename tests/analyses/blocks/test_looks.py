"""Looks: each forward of each prompt has the right to convict, and healthy ones do not alarm."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from divergence import RecordOptions
from divergence.analyses.blocks.onset import is_everywhere, only_in
from divergence.analyses.blocks.sides import judge
from divergence.analyses.blocks.units import Escalation, build_units
from divergence.comparison.results import PromptRatio, SiteResult
from divergence.facts import sentence
from divergence.numerics.floor import spread

ROWS, FEATURES = 16, 64


def site(block: int, ratio: float, *, sample=0, step=0, rows=ROWS, **changes) -> SiteResult:
    numbers = dict.fromkeys(
        (
            "rel_l2",
            "cosine",
            "one_minus_cosine",
            "sqnr_db",
            "max_abs",
            "reference_norm",
            "candidate_norm",
            "gain",
            "gain_se",
            "token_rel_l2_median",
            "token_rel_l2_p99",
            "token_rel_l2_max",
            "channel_rel_l2_max",
        ),
        0.0,
    )
    values = {
        "pass_": "anchored",
        "sample": sample,
        "step": step,
        "site": f"h.{block}:out",
        "order": block,
        "block": f"h.{block}",
        "role": "block",
        "kind": "Block",
        "shape": (1, rows, FEATURES),
        "numel": rows * FEATURES,
        "reference_dtype": "bfloat16",
        "candidate_dtype": "bfloat16",
        "identical": False,
        "ratio": ratio,
        "ratio_max": ratio,
    }
    return SiteResult(**(numbers | values | changes))


def drawn(*, blocks=6, places, rows=ROWS, seed=0) -> dict[tuple, SiteResult]:
    """A healthy pair: ratios of about 0.8, varied as those of tokens were measured to vary."""
    random = np.random.default_rng(seed)
    tokens = {place: math.exp(random.normal(0, 0.2)) for place in places}  # hard for all blocks
    return {
        (block, *place): site(
            block,
            0.8 * tokens[place] * math.exp(random.normal(0, 0.25 / math.sqrt(rows))),
            sample=place[0],
            step=place[1],
            rows=rows,
        )
        for block in range(blocks)
        for place in places
    }


def change(sites, key, **fields):
    """Another result in the place of one."""
    sites[key] = msgspec.structs.replace(sites[key], **fields)


def flagged(sites, **options):
    return judge(build_units(sites, "anchored"), **options)


PROMPTS = [(sample, 0) for sample in range(8)]
STEPS = [(0, step) for step in range(1, 65)]


def test_a_fault_in_one_prompt_of_many_is_flagged_and_named():
    """The median over eight prompts hides it; its own forward does not."""
    sites = drawn(places=PROMPTS)
    change(sites, (3, 2, 0), ratio=6.8, ratio_max=6.8)
    (unit,) = flagged(sites.values())
    assert (unit.site, unit.why) == ("h.3:out", "forward")
    assert unit.typical < 2
    assert unit.first.sample == 2
    assert sentence(only_in(unit)) == " in prompt 2 alone (of 8)"


def test_a_fault_in_one_decode_step_of_64_is_flagged_and_named():
    """At a size at most twice what is found in a run of that step alone."""
    sites = drawn(places=STEPS, rows=1)
    alone = build_units(
        [result for (_, _, step), result in sites.items() if step == 17], "anchored"
    )
    judge(alone)
    ratio = 2 * alone[4].limit
    change(sites, (4, 0, 17), ratio=ratio, ratio_max=ratio)
    (unit,) = flagged(sites.values())
    assert (unit.site, unit.why) == ("h.4:out", "forward")
    assert sentence(only_in(unit)) == " in decode step 17 alone (of 64)"


def test_others_that_are_near_to_their_limits_are_not_said_to_be_fine():
    """A fault of all prompts may be above the limit in one of them."""
    sites = drawn(places=PROMPTS)
    for sample, ratio in ((2, 4.6), (6, 2.9)):
        change(sites, (3, sample, 0), ratio=ratio, ratio_max=ratio)
    (unit,) = flagged(sites.values())
    near = sorted(look.usage for look in unit.looks)
    assert near[-1] / 2 < near[-2] < 1 < near[-1]
    assert sentence(only_in(unit)) == " seen in prompt 2 (of 8)"


def test_what_float32_shows_everywhere_is_not_said_to_be_in_some_forwards_alone():
    """16 bits hide it in the others: only where the float32 pass shows it in the same ones, or not
    at all, is it in them alone."""
    sites = drawn(places=PROMPTS)
    change(sites, (3, 2, 0), ratio=6.8, ratio_max=6.8)
    (unit,) = flagged(sites.values())
    deep = {key: msgspec.structs.replace(at, pass_="escalated") for key, at in sites.items()}

    def everywhere(samples):
        changed = dict(deep)
        for sample in samples:
            change(changed, (3, sample, 0), ratio=80.0, ratio_max=80.0)
        units = build_units(changed.values(), "escalated")
        judge(units)
        return is_everywhere(unit, Escalation(units, {"candidate"}))

    assert everywhere(range(8))
    assert not everywhere([2])
    assert not everywhere([])


@pytest.mark.parametrize(("ratio", "is_fault"), [(1.3, False), (4.0, True)])
def test_a_few_bits_of_one_token_are_no_fault(ratio, is_fault):
    """Of two kernels that mostly agree bit for bit, one step's error is a bit or none."""
    sites = {at: site(at[0], 0.0, step=at[2], rows=1) for at in drawn(places=STEPS, rows=1)}
    change(sites, (1, 0, 19), ratio=ratio, ratio_max=ratio)
    assert bool(flagged(sites.values())) == is_fault


@pytest.mark.parametrize(("ratio", "is_fault"), [(3.0, False), (6.0, True)])
def test_inside_a_block_few_rows_are_held_to_a_whole_floor(ratio, is_fault):
    """What a module gets of one token may cancel there, as the rounding model does not know."""
    sites = {
        at: site(at[0], 0.1, step=at[2], rows=1, role="inner") for at in drawn(places=STEPS, rows=1)
    }
    change(sites, (1, 0, 19), ratio=ratio, ratio_max=ratio)
    assert bool(flagged(sites.values())) == is_fault


def test_steps_from_one_on_are_said_as_such():
    """A cache that goes wrong stays wrong."""
    sites = drawn(places=STEPS, rows=1)
    for step in range(60, 65):
        change(sites, (4, 0, step), ratio=11.0)
    (unit,) = flagged(sites.values())
    assert sentence(only_in(unit)) == " from decode step 60 on"


@pytest.mark.parametrize("rows", [1, 16])
def test_healthy_looks_do_not_alarm_however_many_there_are(rows):
    """600 healthy pairs of 8 to 64 looks in 6 blocks: the largest of many is large by chance."""
    for seed in range(200):
        for places in (PROMPTS, STEPS[:16], STEPS):
            sites = drawn(places=places, rows=rows, seed=seed)
            assert not flagged(sites.values())


def test_what_is_hard_for_all_blocks_is_no_fault_of_one():
    """A prompt with ratios five times the usual in every block, below the absolute limit."""
    sites = drawn(places=PROMPTS)
    for block in range(6):
        change(sites, (block, 5, 0), ratio=5 * sites[block, 5, 0].ratio)
    assert not flagged(sites.values())


def test_one_prompt_wrong_in_every_block_is_flagged():
    """No sibling is a control then: the absolute limit holds for each look."""
    sites = drawn(places=PROMPTS)
    for block in range(6):
        change(sites, (block, 5, 0), ratio=9.0)
    units = flagged(sites.values())
    assert [unit.why for unit in units] == ["forward"] * 6
    assert sentence(only_in(units[0])) == " in prompt 5 alone (of 8)"


def test_prompts_of_one_batch_are_judged_apart():
    """Their rows lie in one tensor; the fault of one of them is no smaller for it."""

    def batch(block: int, off: int | None) -> SiteResult:
        prompts = [
            PromptRatio(sample=n, ratio=7.0 if n == off else 0.8, num_rows=ROWS) for n in range(8)
        ]
        return site(block, 0.8, prompts=prompts, shape=(8, ROWS, FEATURES))

    assert not flagged([batch(block, None) for block in range(6)])
    (unit,) = flagged([batch(block, 6 if block == 2 else None) for block in range(6)])
    assert (unit.site, sentence(only_in(unit))) == ("h.2:out", " in prompt 6 alone (of 8)")


def test_one_step_of_routed_blocks_is_no_fault():
    """There rounding may send the only token to another expert."""
    sites = drawn(places=STEPS, rows=1)
    change(sites, (4, 0, 17), ratio=60.0)
    assert not flagged(sites.values(), routed=frozenset({"h.4"}))


def test_the_limit_of_the_largest_holds_for_the_number_of_looks():
    """Drawn: the largest of N ratios of independent norms exceeds its width as rarely as one."""
    import torch

    draw = torch.Generator().manual_seed(0)
    for n, looks in ((16, 8), (64, 64)):
        one, two = (torch.randn(4_000, looks, n, generator=draw).norm(dim=2) for _ in range(2))
        beyond = ((one / two).amax(1) > 1.6 * spread(n, num_looks=looks)).double().mean()
        assert beyond < 2e-3
    assert spread(64, num_looks=64) > spread(64) == 1.0


def test_a_prefill_that_was_not_recorded_is_said(tmp_path):
    """Of a golden of decode steps alone: compare and check say what they have not seen."""
    from divergence import capture, check, compare
    from tests.models.tiny import build

    model = build("llama", tmp_path / "model")
    a = capture(
        str(model),
        out=tmp_path / "a",
        prompts=["One."],
        max_new_tokens=3,
        recording=RecordOptions(steps="decode"),
        device="cpu",
    )
    b = capture(like=a, out=tmp_path / "b", device="cpu")
    assert any("the prefill was not recorded" in note for note in compare(a, b).notes)
    assert any("the prefill was not recorded" in note for note in check(a, b).notes)


def step_site(block, ratio, step, *, large=0.0, off=1.0, norm=1.25, form="bfloat16"):
    """One token; a number near 173, where bfloat16 steps by 1, is off by ``off``."""
    values = {
        "rel_l2": norm / 180,
        "reference_norm": 180.0,
        "max_abs": off,
        "max_abs_reference": large,
        "max_abs_candidate": large + off,
        "ulp_format": form,
    }
    return site(block, ratio, step=step, rows=1, **values)


def test_the_last_bit_of_a_massive_channel_convicts_nothing():
    """One decode step of one block is off by the last bit of its largest number; by two it is
    judged."""
    for off, expected in ((1.0, []), (8.0, ["h.2:out"])):
        results = [
            step_site(block, 0.4, step)
            if (block, step) != (2, 3)
            else step_site(block, 9.0 * off, step, large=173.0, off=off, norm=1.1 * off)
            for block in range(6)
            for step in range(1, 9)
        ]
        assert [unit.site for unit in judge(build_units(results, "anchored"))] == expected


@pytest.mark.parametrize(("elsewhere", "is_fault"), [(0.0, True), (1.0, False)])
def test_a_lone_gradient_is_held_to_those_of_the_blocks(elsewhere, is_fault):
    """Prompts in another batch: blocks' results are equal, and sums of gradients are not."""
    sites = [site(block, 0.0, step=0, site=f"h.{block}#backward:out") for block in range(4)]
    sites += [
        site(block, elsewhere, role="inner", site=f"h.{block}.mlp#backward:out.weight")
        for block in range(4)
    ]
    lone = {"block": None, "role": "trunk", "site": "norm#backward:out.weight", "kind": "Norm"}
    sites.append(msgspec.structs.replace(site(9, 3.0), **lone))
    assert [unit.site for unit in flagged(sites)] == is_fault * ["norm#backward:out.weight"]


@pytest.mark.parametrize(("worst", "is_fault"), [(9.0, False), (20.0, True), (1e5, True)])
def test_siblings_do_not_excuse_a_token_of_which_nothing_is_right(worst, is_fault):
    """A kernel that gets one token wrong gets it wrong in every block."""
    sites = [site(block, 0.8, ratio_max=worst) for block in range(6)]
    assert len(flagged(sites)) == 6 * is_fault
