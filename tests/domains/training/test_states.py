"""Parameters, gradients and optimizer state follow ZeRO's formulas."""

import pytest

from divergence.domains.training.plan import RankParameter, kept_parts, whole_parameters_bytes
from divergence.errors import UsageError

PSI, N = 8 * 4096, 8


def total(itemsize, zero, *, main_weights=True, optimizer="adamw", num_ranks=N):
    pieces = [RankParameter(name="w", shape=(4096, 8), itemsize=itemsize)]
    parts = kept_parts(
        pieces, optimizer=optimizer, main_weights=main_weights, zero=zero, num_ranks=num_ranks
    )
    return sum(part.bytes for part in parts), {part.name: part.formula for part in parts}


@pytest.mark.parametrize(
    ("zero", "bytes_each"), [(0, 16), (1, 4 + 12 / N), (2, 2 + 14 / N), (3, 16 / N)]
)
def test_mixed_precision_is_that_of_the_paper(zero, bytes_each):
    """16Ψ; 4Ψ + 12Ψ/N; 2Ψ + 14Ψ/N; 16Ψ/N (arXiv 1910.02054)."""
    found, _ = total(2, zero)
    assert found == bytes_each * PSI


@pytest.mark.parametrize(
    ("zero", "bytes_each"), [(0, 16), (1, 8 + 8 / N), (2, 4 + 12 / N), (3, 16 / N)]
)
def test_float32_has_no_main_weights(zero, bytes_each):
    """4 + 4 + 8, divided as the stage says."""
    found, formulas = total(4, zero)
    assert found == bytes_each * PSI
    assert "main weights" not in formulas


def test_16_bits_alone_and_sgd():
    """2 + 2 + 4 without main weights; no moments with SGD."""
    assert total(2, 0, main_weights=False)[0] == 8 * PSI
    assert total(2, 0, optimizer="sgd")[0] == (2 + 2 + 4) * PSI
    assert total(4, 0, optimizer="sgd")[0] == 8 * PSI


def test_the_formula_says_what_is_divided():
    """In the words of the report."""
    assert total(2, 2)[1] == {
        "parameters": "2Ψ",
        "gradients": "2Ψ/N",
        "main weights": "4Ψ/N",
        "moments": "8Ψ/N",
    }


def test_rows_are_not_split():
    """fully_shard gives the first ranks ceil(rows / N) whole rows."""
    piece = RankParameter(name="norm", shape=(3, 10), itemsize=4)
    assert piece.rows_numel(2) == 20
    assert RankParameter(name="scalar", shape=(), itemsize=4).rows_numel(2) == 1


def test_a_frozen_parameter_costs_itself_alone():
    """No gradient, no state."""
    pieces = [RankParameter(name="w", shape=(4, 4), itemsize=4, trained=False)]
    parts = kept_parts(pieces, optimizer="adamw", main_weights=False, zero=0, num_ranks=1)
    assert [part.bytes for part in parts] == [64, 0, 0]


def test_whole_parameters_go_to_the_rank_with_least():
    """As ZeroRedundancyOptimizer deals them."""
    pieces = [RankParameter(name=str(n), shape=(n,), itemsize=4) for n in (10, 6, 5)]
    assert whole_parameters_bytes(pieces, optimizer="adamw", num_ranks=2) == 2 * 4 * 11


@pytest.mark.parametrize(("optimizer", "zero"), [("lion", 0), ("adamw", 4)])
def test_what_is_not_known_is_refused(optimizer, zero):
    """With what there is."""
    with pytest.raises(UsageError):
        total(4, zero, optimizer=optimizer)
