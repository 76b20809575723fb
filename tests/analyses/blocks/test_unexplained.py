"""Where nothing that is recorded lets two runs differ, there are no other kernels to leave room
for; and a side is wrong by an error of its own, not because the other is better."""

import functools

import pytest
import torch
import torch.nn.functional as F

from benchmarks._hidden import hidden
from benchmarks._machines import planting

PROMPTS = [[(13 * n + 7 * k) % 500 + 3 for k in range(count)] for n, count in enumerate((20, 33))]


def coarse(x, weight, num_parts=8):
    """Partial sums, each kept and added up in the runs' dtype."""
    parts = zip(x.chunk(num_parts, -1), weight.chunk(num_parts, -1), strict=True)
    return functools.reduce(torch.add, [F.linear(*part) for part in parts])


def shuffled(x, weight):
    """The same additions in another order: as good a sum."""
    order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(0))
    return F.linear(x[..., order], weight[:, order].contiguous())


def exact(x, weight):
    return F.linear(x.double(), weight.double()).to(x.dtype)


def replace_sums(model, name, blocks, *, strength):
    """All products of these blocks, by the function of that name, and no code tells it."""
    product = {"coarse": coarse, "shuffled": shuffled, "exact": exact}[name]
    for number in blocks:
        for linear in model.model.layers[number].modules():
            if isinstance(linear, torch.nn.Linear):

                @hidden(linear.forward)
                def forward(x, weight):
                    return product(x, weight)

                linear.forward = functools.partial(forward, weight=linear.weight)


@pytest.fixture
def verdict_of(drawn_model, shared_run, answer):
    """``verdict_of(dtype, product, blocks, **options)``: of a Llama whose blocks do much."""

    def verdict(dtype, product, blocks, **options):
        a = shared_run(drawn_model(), dtype=dtype, prompts=PROMPTS, truth="full", max_new_tokens=3)
        return answer(a, planting(replace_sums, product, blocks, 1.0), **options).verdict

    return verdict


@pytest.mark.slow
def test_coarse_sums_in_one_block_of_one_machine_are_found(verdict_of):
    """The other blocks are equal bit for bit, so an error 1.5 times as large is no chance."""
    verdict = verdict_of("bfloat16", "coarse", [2])

    assert (verdict.kind, verdict.side) == ("localized", "candidate"), verdict.summary
    assert verdict.onset.block == "model.layers.2"


@pytest.mark.slow
def test_coarse_sums_in_all_blocks_of_one_machine_are_found(verdict_of):
    """On one machine, where nothing explains it, sums that are coarser in every block are a fault
    of B."""
    verdict = verdict_of("bfloat16", "coarse", range(6))

    assert (verdict.kind, verdict.side) == ("systematic", "candidate"), verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("product", ["coarse", "exact"])
def test_sums_of_float32_round_by_their_order(product, verdict_of):
    """In eight parts or exactly: another right kernel, of which no side is wrong."""
    verdict = verdict_of("float32", product, range(6))

    assert (verdict.kind, verdict.side) == ("within_floor", None), verdict.summary


@pytest.mark.slow
def test_a_half_that_is_wrong_begins_where_it_begins(verdict_of):
    """The median block is between a right and a wrong one."""
    verdict = verdict_of("bfloat16", "coarse", [3, 4, 5])

    assert (verdict.kind, verdict.onset.block) == ("localized", "model.layers.3"), verdict.summary


@pytest.mark.slow
def test_the_blocks_that_are_equal_bit_for_bit_are_no_part_of_it(verdict_of):
    """Half of the blocks are coarse, so that the middle block is."""
    verdict = verdict_of("bfloat16", "coarse", [1, 3, 5])

    assert (verdict.kind, verdict.onset.block) == ("localized", "model.layers.1"), verdict.summary
    assert not any(f"model.layers.{number}" in verdict.summary for number in (0, 2, 4))


@pytest.mark.parametrize("blocks", [[2], range(6)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_as_good_in_another_order_are_rounding(dtype, blocks, verdict_of):
    """Nothing explains them, and they are no fault: no side, and no high confidence."""
    verdict = verdict_of(dtype, "shuffled", blocks)

    assert verdict.kind in ("identical", "within_floor"), verdict.summary
    if verdict.kind == "within_floor":
        assert "nothing that is recorded of the two explains it" in verdict.summary
        assert (verdict.side, verdict.confidence) == (None, "medium")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, pytest.param({"probe": False}, marks=pytest.mark.whole)])
def test_a_block_that_is_better_on_one_side_accuses_nobody_for_sure(verdict_of, options):
    """B's products are exact in one block: A's error is none of its own. Where one machine was
    probed and the other was not, they may be two."""
    verdict = verdict_of("float32", "exact", [2], **options)

    assert verdict.confidence != "high"
    assert ("nothing that is recorded" in verdict.summary) == (not options)


@pytest.mark.slow
def test_a_block_that_stands_out_from_coarse_ones_is_named(drawn_model, shared_run, answer):
    """Without a truth: sums in 64 parts are off in all blocks, and one MLP is three times too
    large."""
    a = shared_run(drawn_model(hidden_size=64), dtype="bfloat16", prompts=PROMPTS, truth="no")

    def plant(model, name, blocks, *, strength):
        for number in blocks:
            for path, linear in model.model.layers[number].named_modules():
                if isinstance(linear, torch.nn.Linear):
                    factor = strength if number == 3 and path == "mlp.down_proj" else 1.0

                    @hidden(linear.forward)
                    def forward(x, weight, factor):
                        return coarse(x, weight, 64) * factor

                    values = {"weight": linear.weight, "factor": factor}
                    linear.forward = functools.partial(forward, **values)

    verdict = answer(a, planting(plant, "", range(6), 3.0)).verdict

    assert (verdict.kind, verdict.onset.block) == ("localized", "model.layers.3"), verdict.summary
