"""Blame, on errors drawn at random: what one side did in one block stands out, nothing else."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from divergence.analyses.blocks.sides import BlocksBeside, judge_family, questions, shared_by_all
from divergence.comparison.judge import limit_of
from divergence.comparison.measure.truth import TruthSamples, stats_of
from divergence.comparison.results import SiteResult
from divergence.numerics.floor import THRESHOLDS
from divergence.numerics.pairs import measure_against
from divergence.words import figure

ROWS, COLUMNS, FLOOR = 32, 256, 1e-3


def result(step=0):
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
    return SiteResult(
        pass_="anchored",
        sample=0,
        step=step,
        site="m.0:out",
        order=1,
        shape=(1, ROWS, COLUMNS),
        reference_dtype="bfloat16",
        candidate_dtype="bfloat16",
        identical=False,
        numel=ROWS * COLUMNS,
        **numbers,
    )


class Block:
    """One block's truth and both sides' rounding. ``hard``: this block's own difficulty, on both
    sides; ``coarse``: the candidate's kernels, in all blocks."""

    def __init__(self, seed, *, hard=1.0, coarse=1.0, steps=1):
        make = torch.Generator().manual_seed(seed)
        self.truth = torch.randn(steps, ROWS, COLUMNS, generator=make, dtype=torch.float64)
        self.sides = [
            self.truth
            * (1 + FLOOR * hard * size * torch.randn(self.truth.shape, generator=make).double())
            for size in (1.0, coarse)
        ]

    def stats(self, *, swap=False):
        sides = self.sides[::-1] if swap else self.sides
        samples = TruthSamples()
        for step in range(len(self.truth)):
            found = measure_against(sides[0][step], sides[1][step], self.truth[step])
            floor = torch.full((found.num_rows,), FLOOR)
            samples.add(result(step), found, floor.numpy())
        return stats_of(samples)


def judged(blocks, *, swap=False, routed=False, beside=None):
    family = [block.stats(swap=swap) for block in blocks]
    counts = {"site": 1, "forward": len(family[0].forwards), "row": family[0].num_rows}
    counts["channel"] = COLUMNS
    limits = {level: limit_of(len(family) * count) for level, count in counts.items()}
    return judge_family(family, limits, routed, THRESHOLDS, beside)


def asked(bad, others, *, swap=False, routed=False, **options):
    beside = (
        None
        if others
        else BlocksBeside(
            math.log(options.pop("w", 1.0)),
            {at: math.log(w) for at, w in options.pop("forwards", {}).items()},
        )
    )
    together = judged([bad, *others], swap=swap, routed=routed, beside=beside)
    widened = options.pop("widened", 1.0)
    assert not options
    return questions(together, 0, routed=routed, widened=widened, thresholds=THRESHOLDS)


def blamed(*args, **options):
    return next((one for one in asked(*args, **options) if one.limit_usage > 1), None)


def healthy(count=5, **options):
    return [Block(seed, **options) for seed in range(100, 100 + count)]


@pytest.mark.parametrize("coarse", [0.45, 1.0, 2.2])
@pytest.mark.parametrize("hard", [0.2, 1.0, 30.0])
def test_a_hard_block_and_coarse_kernels_blame_nobody(hard, coarse):
    """A block that is hard for both sides, on kernels that are coarser everywhere, is healthy, by
    whatever both differ; only being 6 × the rounding model away on both sides is not."""
    found = asked(Block(1, hard=hard, coarse=coarse), healthy(coarse=coarse))
    worst = max((one for one in found if one.why != "both"), key=lambda one: one.limit_usage)
    assert worst.limit_usage < 0.75, worst


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("size", [3.0, 10.0])
@pytest.mark.parametrize("coarse", [0.7, 1.0, 1.5])
def test_noise_of_three_floors_blames_its_side(size, swap, coarse):
    """Extra noise on the candidate blames the candidate; with the sides swapped, the reference."""
    bad = Block(2, coarse=coarse)
    make = torch.Generator().manual_seed(9)
    noise = torch.randn(bad.truth.shape, generator=make).double()
    bad.sides[1] = bad.sides[1] + size * coarse * FLOOR * noise
    found = blamed(bad, healthy(coarse=coarse), swap=swap)
    assert found is not None
    assert (found.side, found.why) == ("reference" if swap else "candidate", "typical")


def test_both_far_from_the_truth_are_both_to_blame():
    """Equal errors of ten times the rounding model clear nobody."""
    bad = Block(3)
    bad.sides = [side + 10 * FLOOR * bad.truth for side in bad.sides]
    found = blamed(bad, healthy())
    assert (found.side, found.why) == ("both", "both")


@pytest.mark.parametrize("swap", [False, True])
def test_a_scale_error_below_the_floor_shows_in_the_gain(swap):
    """Half a floor of scale moves no row's norm, but all rows alike."""
    bad = Block(4)
    bad.sides[1] = bad.sides[1] * (1 + 1.5 * FLOOR)
    found = blamed(bad, healthy(), swap=swap)
    assert (found.side, found.why) == ("reference" if swap else "candidate", "gain")
    assert found.scaled in ("output", "update") and f"{found.factor:.4g}" == "1.001"


@pytest.mark.parametrize("swap", [False, True])
def test_one_wrong_channel_shows(swap):
    """One channel of 256, at ten floors of its own: in the row's norm less than one floor."""
    bad = Block(5)
    bad.sides[1][..., 7] += 10 * FLOOR
    found = blamed(bad, healthy(), swap=swap)
    assert (found.side, found.why) == ("reference" if swap else "candidate", "channel")


def test_one_wrong_token_shows_but_not_where_experts_are_chosen():
    """A single token at thirty floors; in a routed block rounding may have sent it elsewhere."""
    bad = Block(6)
    bad.sides[1][:, 11] *= 1 + 30 * FLOOR
    assert blamed(bad, healthy()).why == "token"
    assert blamed(bad, healthy(), routed=True) is None


def test_one_wrong_step_shows_and_is_named():
    """The third of six forwards at eight floors: not typical, but its own."""
    bad = Block(7, steps=6)
    bad.sides[1][2] *= 1 + 8 * FLOOR
    found = blamed(bad, healthy(steps=6))
    assert (found.why, found.at.step, found.side) == ("forward", 2, "candidate")


def test_a_site_without_siblings_is_held_to_the_blocks():
    """Four times off is allowed to it, and the kernels' own W counts."""
    assert blamed(Block(8, coarse=2.0), [], w=2.0) is None
    bad = Block(9)
    bad.sides[1] = bad.sides[1] + 10 * FLOOR * torch.randn(bad.truth.shape).double()
    assert blamed(bad, [], w=1.0).side == "candidate"


@pytest.mark.parametrize("blocks", [20.0, 0.05])
@pytest.mark.parametrize("steps", [1, 6])
def test_blocks_that_are_all_wrong_blame_no_site_without_siblings(blocks, steps):
    """An embedding that is equal on both sides, or rounded alike, is not what is wrong then."""
    alike, equal = Block(12, steps=steps), Block(13, steps=steps)
    equal.sides = [equal.sides[0]] * 2
    at_blocks = dict.fromkeys(alike.stats().forwards, blocks)
    for block in (alike, equal):
        found = asked(block, [], w=blocks, forwards=at_blocks)
        assert max(one.limit_usage for one in found) < 0.75


def test_a_trusted_run_widens_every_limit():
    """What --floor runs showed is allowed, and half as much again."""
    bad = Block(10)
    bad.sides[1] = bad.sides[1] + 4 * FLOOR * torch.randn(bad.truth.shape).double()
    assert blamed(bad, healthy()) is not None
    assert blamed(bad, healthy(), widened=3.0) is None


def test_exact_on_both_sides_is_no_error():
    """Two sides that equal the truth have W = 1."""
    block = Block(11)
    block.sides = [block.truth, block.truth]
    stats = block.stats()
    assert stats.typical == {"reference": 0.0, "candidate": 0.0}
    assert max(one.limit_usage for one in asked(block, healthy())) < 1


def test_chance_alone_blames_nobody():
    """Two hundred healthy blocks of few rows and columns, three of a kind: no alarm, and room."""
    shares = []
    for seed in range(0, 600, 3):
        family = [Block(1000 + seed + k) for k in range(3)]
        for block in family:
            block.truth = block.truth[:, :9, :16].contiguous()
            block.sides = [side[:, :9, :16] for side in block.sides]
        for block in family[:1]:
            shares.append(max(one.limit_usage for one in asked(block, family[1:])))
    assert max(shares) < 1
    assert statistics.median(shares) < 0.6


def test_long_figures_are_short():
    """No digits that say nothing."""
    assert [figure(x) for x in (6.81, 1204.6, 401876146.3, math.inf)] == [
        "6.8",
        "1204.6",
        "4.0e+08",
        "inf",
    ]


class Decoded(Block):
    """Forwards of one row, ``together`` or apart; in one of them, one element holds nearly all of
    the row, and the candidate's rounding of it is 4 times the usual."""

    def __init__(self, seed, *, massive=False, together=False):
        super().__init__(seed)
        if massive:
            self.truth[0, 3, 7] = 300.0
            for side, size in zip(self.sides, (0.3, 4.0), strict=True):
                side[0, 3, 7] = 300.0 * (1 + size * FLOOR)
        if not together:
            self.truth = self.truth.reshape(ROWS, 1, COLUMNS)
            self.sides = [side.reshape(ROWS, 1, COLUMNS) for side in self.sides]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_one_massive_activation_is_no_bad_channel(together, swap):
    """In decode steps each row is a forward, and no outlier among its like."""
    others = [Decoded(seed, together=together) for seed in range(100, 105)]
    found = asked(Decoded(1, massive=True, together=together), others, swap=swap)

    channel = next(one for one in found if one.why == "channel")
    assert channel.limit_usage < 0.9
    assert not [one for one in found if one.limit_usage > 1]


@pytest.mark.parametrize("swap", [False, True])
def test_one_element_in_each_of_many_prompts_is_no_bad_channel(swap):
    """Prompts that begin alike have the same first token, with the same rounding: one fact."""
    others = [Block(seed, steps=4) for seed in range(100, 105)]
    bad = Block(1, steps=4)
    bad.sides[1][:, 0, 20] += 12 * FLOOR
    found = asked(bad, others, swap=swap)
    assert next(one for one in found if one.why == "channel").limit_usage < 0.9

    bad.sides[1][:, :, 20] += 12 * FLOOR
    assert blamed(bad, others, swap=swap).why == "channel"


@pytest.mark.parametrize("together", [False, True])
def test_a_bad_channel_is_found_beside_a_massive_activation(together):
    others = [Decoded(seed, together=together) for seed in range(100, 105)]
    bad = Decoded(1, massive=True, together=together)
    bad.sides[1][..., 20] += 12 * FLOOR

    assert blamed(bad, others).why == "channel"


@pytest.mark.parametrize("swap", [False, True])
def test_one_token_that_every_block_gets_wrong_shows(swap):
    """Siblings excuse what is hard for all; a token of which no digit is right is not hard."""
    blocks = [Block(seed) for seed in range(4)]
    for block in blocks:
        block.sides[1][:, 5] *= 1 + 1e4 * FLOOR
    (blames,) = shared_by_all(judged(blocks, swap=swap), 1.0, THRESHOLDS)
    assert {(blame.side, blame.why) for blame in blames} == {
        ("reference" if swap else "candidate", "token")
    }


def test_rows_that_are_hard_on_both_sides_blame_nobody():
    """Sharp attention enlarges the rounding of a few scores: one number by which a whole row is
    off, another one on each side. A row that is as far off on one side alone is its fault."""
    hard, alone = Block(14), Block(15)
    direction = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(3)).double()
    for side, sizes in enumerate(([17, 14, 13, 12], [6, 5, 4, 4])):
        for row, size in enumerate(sizes):
            hard.sides[side][:, row] += size * FLOOR * direction
    assert blamed(hard, healthy()) is None
    alone.sides[1][:, 0] += 17 * FLOOR * direction
    assert (blamed(alone, healthy()).side, blamed(alone, healthy()).why) == ("candidate", "token")
