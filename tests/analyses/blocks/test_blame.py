"""Blame, on errors drawn at random: what one side did in one block stands out, nothing else."""

import math
import statistics

import pytest
import torch

from divergence.numerics.pairs import measure_against
from divergence.words import figure
from tests.by_hand import measured

ROWS, COLUMNS, FLOOR = 32, 256, 1e-3


class Block:
    """One block's truth and both sides' rounding. ``hard``: this block's own difficulty, on both
    sides; ``coarse``: the candidate's kernels, in all blocks; ``steps``: its forwards."""

    def __init__(self, seed, *, hard=1.0, coarse=1.0, steps=1, rows=ROWS, columns=COLUMNS):
        make = torch.Generator().manual_seed(seed)
        self.truth = torch.randn(steps, rows, columns, generator=make, dtype=torch.float64)
        self.sides = [
            self.truth
            * (1 + FLOOR * hard * size * torch.randn(self.truth.shape, generator=make).double())
            for size in (1.0, coarse)
        ]


def healthy(count=5, **options):
    return [Block(seed, **options) for seed in range(100, 100 + count)]


@pytest.fixture
def report_of(judged):
    """``report_of(blocks)``: of two runs and a truth with these blocks; ``alone``: of what stands
    beside them. ``swap``: the sides in each other's place. ``ratio``: how far apart they are in
    the first block."""

    def report(blocks, *, alone=None, swap=False, ratio=0.9, **changes):
        sites, against = [], []
        named = [(f"h.{number}:out", block) for number, block in enumerate(blocks)]
        named += [] if alone is None else [("embed:out", alone)]
        for name, block in named:
            a, b = block.sides[::-1] if swap else block.sides
            for step in range(len(block.truth)):
                rows, columns = block.truth[step].shape
                apart = 0.0 if torch.equal(a[step], b[step]) else 0.9
                apart = ratio if name == "h.0:out" else apart
                site = measured(
                    name,
                    apart,
                    step=step,
                    order=len(sites),
                    rows=rows,
                    features=columns,
                    kind="Embedding" if name == "embed:out" else "Block",
                    reference_dtype="bfloat16",
                    candidate_dtype="bfloat16",
                )
                sites.append(site)
                errors = measure_against(a[step], b[step], block.truth[step])
                against.append((site, errors, torch.full((rows,), FLOOR).numpy()))
        return judged(sites, **{"against": against} | changes)

    return report


@pytest.fixture
def blamed(report_of):
    """``blamed(bad, others)``: (side, the words for why) of the block that is named; None where
    none is."""

    def ask(bad, others, **options):
        verdict = report_of([bad, *others], **options).verdict
        if verdict.onset is None:
            return None
        assert verdict.onset.site == "h.0:out", verdict
        return verdict.side, " ".join(item.text for item in verdict.evidence)

    return ask


SIDES = {False: "candidate", True: "reference"}
"""By whether the sides stand in each other's place: which is wrong."""


@pytest.mark.parametrize("coarse", [0.45, 1.0, 2.2])
@pytest.mark.parametrize("hard", [0.2, 1.0, 5.0])
def test_a_hard_block_and_coarse_kernels_blame_nobody(report_of, hard, coarse):
    """A block that is hard for both sides, on kernels that are coarser everywhere, is healthy, by
    whatever both differ; only being 6 × the rounding model away on both sides is not."""
    report = report_of([Block(1, hard=hard, coarse=coarse), *healthy(coarse=coarse)])
    assert report.verdict.kind == "within_floor"


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("size", [3.0, 10.0])
@pytest.mark.parametrize("coarse", [0.7, 1.0, 1.5])
def test_noise_of_three_floors_blames_its_side(blamed, size, swap, coarse):
    """Extra noise on the candidate blames the candidate; with the sides swapped, the reference."""
    bad = Block(2, coarse=coarse)
    make = torch.Generator().manual_seed(9)
    noise = torch.randn(bad.truth.shape, generator=make).double()
    bad.sides[1] = bad.sides[1] + size * coarse * FLOOR * noise
    side, _ = blamed(bad, healthy(coarse=coarse), swap=swap)
    assert side == SIDES[swap]


def test_both_far_from_the_truth_are_both_to_blame(report_of):
    """Equal errors of ten times the rounding model clear nobody, and are no sure fault."""
    bad = Block(3)
    bad.sides = [side + 10 * FLOOR * bad.truth for side in bad.sides]
    verdict = report_of([bad, *healthy()]).verdict
    assert (verdict.onset.site, verdict.side) == ("h.0:out", "both")
    assert verdict.confidence != "high"


@pytest.mark.parametrize("against", [None, ()])
def test_a_truth_that_agrees_does_not_lower_the_confidence_of_a_fault(report_of, against):
    """Far over the limit of the difference, just over that of the truth: as sure as without one."""
    bad = Block(2)
    make = torch.Generator().manual_seed(9)
    bad.sides[1] = bad.sides[1] + 3 * FLOOR * torch.randn(bad.truth.shape, generator=make).double()
    options = {} if against is None else {"against": against}
    verdict = report_of([bad, *healthy()], ratio=30.0, **options).verdict
    assert (verdict.onset.site, verdict.confidence) == ("h.0:out", "high")


@pytest.mark.parametrize("swap", [False, True])
def test_a_side_that_is_better_in_one_block_accuses_nobody(blamed, swap):
    """Whose error it is: the farther side's, being larger than in its other blocks. A side that is
    nearer to the truth in one block alone makes no fault of the other."""
    assert blamed(Block(20, coarse=0.4), healthy(), swap=swap) is None


@pytest.mark.parametrize("coarse", [3.3, 20.0])
@pytest.mark.parametrize("swap", [False, True])
def test_an_easy_block_excuses_no_error(blamed, coarse, swap):
    """A's error is smaller than in other blocks, and B's so many times A's: it is B's."""
    assert blamed(Block(21, hard=0.15, coarse=coarse), healthy(), swap=swap)[0] == SIDES[swap]


def scaled(block):
    """Half a floor of scale moves no row's norm, but all rows alike."""
    block.sides[1] = block.sides[1] * (1 + 1.5 * FLOOR)


def one_channel(block):
    """One channel of 256, at ten floors of its own: in the row's norm less than one floor."""
    block.sides[1][..., 7] += 10 * FLOOR


def one_token(block):
    block.sides[1][:, 11] *= 1 + 30 * FLOOR


def one_step(block):
    """The third of six forwards at eight floors: not typical, but its own."""
    block.sides[1][2] *= 1 + 8 * FLOOR


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("change", "steps", "words"),
    [
        (scaled, 1, "1.001"),
        (one_channel, 1, "channel"),
        (one_token, 1, "token"),
        (one_step, 6, "step 2"),
    ],
)
def test_what_a_norm_hides_shows_by_itself(blamed, change, steps, words, swap):
    """A scale error below the floor, one channel, one token, one step: named, on its side."""
    bad = Block(4, steps=steps)
    change(bad)
    side, text = blamed(bad, healthy(steps=steps), swap=swap)
    assert side == SIDES[swap]
    assert words in text


def test_one_token_where_experts_are_chosen_shows_nothing(blamed):
    """In a routed block rounding may have sent it elsewhere."""
    bad = Block(6)
    one_token(bad)
    assert blamed(bad, healthy(), routed=frozenset({"h.0"})) is None


def test_a_site_without_siblings_is_held_to_the_blocks(report_of):
    """Four times off is allowed to it, and the kernels' own W counts."""
    coarse = healthy(coarse=2.0)
    assert report_of(coarse, alone=Block(8, coarse=2.0)).verdict.kind == "within_floor"
    bad = Block(9)
    make = torch.Generator().manual_seed(1)
    bad.sides[1] = bad.sides[1] + 10 * FLOOR * torch.randn(bad.truth.shape, generator=make).double()
    verdict = report_of(healthy(), alone=bad).verdict
    assert (verdict.onset.site, verdict.side) == ("embed:out", "candidate")


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("steps", [1, 6])
def test_blocks_that_are_all_wrong_blame_no_site_without_siblings(report_of, swap, steps):
    """An embedding that is equal on both sides, or rounded alike, is not what is wrong then."""
    alike, equal = Block(12, steps=steps), Block(13, steps=steps)
    equal.sides = [equal.sides[0]] * 2
    for alone in (alike, equal):
        report = report_of(healthy(coarse=20.0, steps=steps), alone=alone, swap=swap)
        assert "embed:out" not in {site.site for site in report.sites if site.flagged}
        assert report.verdict.side == SIDES[swap]


def test_a_trusted_run_widens_every_limit(blamed):
    """What --floor runs showed is allowed, and half as much again."""
    bad = Block(10)
    make = torch.Generator().manual_seed(2)
    bad.sides[1] = bad.sides[1] + 4 * FLOOR * torch.randn(bad.truth.shape, generator=make).double()
    shown = {("anchored", "h.0:out", "prefill"): 2.0}
    assert blamed(bad, healthy()) is not None
    assert blamed(bad, healthy(), shown=shown) is None


def test_exact_on_both_sides_is_no_error(blamed):
    """Two sides that equal the truth have W = 1."""
    block = Block(11)
    block.sides = [block.truth, block.truth]
    assert blamed(block, healthy()) is None


@pytest.mark.slow
def test_chance_alone_blames_nobody(report_of):
    """Forty healthy families of few rows and columns, three of a kind: no alarm, and room."""
    shares = []
    for seed in range(0, 120, 3):
        report = report_of([Block(1000 + seed + k, rows=9, columns=16) for k in range(3)])
        shares.append(max(site.limit_usage for site in report.sites))
    assert max(shares) < 1
    assert statistics.median(shares) < 0.7


def test_long_figures_are_short():
    """No digits that say nothing."""
    assert [figure(x) for x in (6.81, 1204.6, 401876146.3, math.inf)] == [
        "6.8",
        "1204.6",
        "4.0e+08",
        "inf",
    ]


def decoded(seed, *, massive=False, together=False):
    """Forwards of one row, ``together`` or apart; in one of them, one element holds nearly all of
    the row, and the candidate's rounding of it is 4 times the usual."""
    block = Block(seed)
    if massive:
        block.truth[0, 3, 7] = 300.0
        for side, size in zip(block.sides, (0.3, 4.0), strict=True):
            side[0, 3, 7] = 300.0 * (1 + size * FLOOR)
    if not together:
        block.truth = block.truth.reshape(ROWS, 1, COLUMNS)
        block.sides = [side.reshape(ROWS, 1, COLUMNS) for side in block.sides]
    return block


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_one_massive_activation_is_no_bad_channel(blamed, together, swap):
    """In decode steps each row is a forward, and no outlier among its like; a bad channel is found
    beside it."""
    others = [decoded(seed, together=together) for seed in range(100, 105)]
    bad = decoded(1, massive=True, together=together)
    assert blamed(bad, others, swap=swap) is None
    bad.sides[1][..., 20] += 12 * FLOOR
    side, text = blamed(bad, others, swap=swap)
    assert side == SIDES[swap] and "channel" in text


@pytest.mark.parametrize("swap", [False, True])
def test_one_element_in_each_of_many_prompts_is_no_bad_channel(blamed, swap):
    """Prompts that begin alike have the same first token, with the same rounding: one fact."""
    others = [Block(seed, steps=4) for seed in range(100, 105)]
    bad = Block(1, steps=4)
    bad.sides[1][:, 0, 20] += 12 * FLOOR
    assert blamed(bad, others, swap=swap) is None
    bad.sides[1][:, :, 20] += 12 * FLOOR
    assert "channel" in blamed(bad, others, swap=swap)[1]


@pytest.mark.parametrize("swap", [False, True])
def test_one_token_that_every_block_gets_wrong_shows(report_of, swap):
    """Siblings excuse what is hard for all; a token of which no digit is right is not hard."""
    blocks = [Block(seed) for seed in range(4)]
    for block in blocks:
        block.sides[1][:, 5] *= 1 + 1e4 * FLOOR
    verdict = report_of(blocks, swap=swap).verdict
    assert verdict.side == SIDES[swap]
    assert "token" in " ".join(item.text for item in verdict.evidence)


def test_rows_that_are_hard_on_both_sides_blame_nobody(blamed):
    """Sharp attention enlarges the rounding of a few scores: one number by which a whole row is
    off, another one on each side. A row that is as far off on one side alone is its fault."""
    hard, alone = Block(14), Block(15)
    direction = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(3)).double()
    for side, sizes in enumerate(([17, 14, 13, 12], [6, 5, 4, 4])):
        for row, size in enumerate(sizes):
            hard.sides[side][:, row] += size * FLOOR * direction
    assert blamed(hard, healthy()) is None
    alone.sides[1][:, 0] += 17 * FLOOR * direction
    side, text = blamed(alone, healthy())
    assert side == "candidate" and "token" in text


def test_what_has_no_siblings_is_not_said_to_be_a_block(report_of):
    """It is held against the blocks."""
    bad = Block(1)
    bad.sides[1] = bad.truth + 12 * (bad.sides[1] - bad.truth)
    verdict = report_of(healthy(), alone=bad).verdict
    assert verdict.onset.site == "embed:out"
    assert "; in the blocks 1.02 × (limit" in verdict.evidence[0].text


def test_one_of_two_blocks_is_held_against_nothing(report_of):
    """The other is no control, and there are no blocks beside them whose median would be one."""
    bad = Block(1)
    bad.sides[1] = bad.truth + 12 * (bad.sides[1] - bad.truth)
    verdict = report_of([Block(2), bad]).verdict
    assert verdict.onset.block == "h.1"
    assert "in the blocks" not in verdict.evidence[0].text
