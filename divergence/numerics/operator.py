"""One operator's result against what is right: errors per row and column, and its own floor.

a = reference, b = candidate, R = truth. The floor of one operator is what a correct
implementation of it must make: the ideal store error ‖round(R) - R‖, R rounded once to the
dtype that the result is stored in, and the rounding of the additions. A sum of K terms of
random sign makes 0.41 u32 √(K/2) relative to its result (numerics.floor); elementary functions
are within 1 ulp of float32 (2 u32).

Rows are the last axis. Masked scores are left out: elements that are beyond half of the largest
finite number of their dtype on both sides, and infinities that both sides have. What is masked on
one side alone is counted, and left out too: it is another mask, and no error of a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from divergence.numerics.floor import ACCUMULATOR_ROUNDOFF, ONE_ROUNDING
from divergence.numerics.formats import format_of
from divergence.numerics.ulp import spacing

_OPEN = -1e4
"""Below it a score may be masked as well, by another number."""
_WIDE = 16
"""A row that is masked but for fewer numbers is in no column's sum: one of them may be off by many
times its own size, as scores of a first token are."""


Columns = tuple[torch.Tensor, int]


@dataclass(frozen=True, slots=True)
class Masked:
    """Numbers that one side alone masks. ``by``: how many each side does, ``wrong``: on how many of
    them each is not as the truth; ``first``: the index of the first."""

    by: tuple[int, int]
    wrong: tuple[int, int]
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperatorErrors:
    """How far two sides of an operator's result are from the truth R, and from one another: T rows
    of D columns, in float64. Errors of a row are relative to its ‖R‖; where a gradient has rows
    smaller than its median one, to that one's."""

    reference: torch.Tensor
    """(T,): the reference's error."""
    candidate: torch.Tensor
    """(T,): the candidate's."""
    between: torch.Tensor
    """(T,): the two sides' difference."""
    floor: torch.Tensor
    """(T,): what rounding explains, in the coarser of both sides' dtypes that the reference
    stores."""
    numbers: torch.Tensor
    """(2, T): of how many numbers each side's error is made."""
    columns: Columns | None
    """(D,) and a number: sums of R², and over how many rows, of all forwards so far."""
    column_reference: torch.Tensor
    """(D,): sums of the reference's squared relative errors."""
    column_candidate: torch.Tensor
    """(D,): of the candidate's."""
    column_floor: torch.Tensor
    """(D,): of the floor's."""
    column_fourth: torch.Tensor
    """(2, D): sums of each side's fourth powers."""
    num_nonfinite: tuple[int, int]
    """Elements that are nan or inf on that side alone."""
    over_1_ulp: tuple[float, float]
    """Share of elements more than one ulp from R, on each side."""
    rows: torch.Tensor
    """(T,): the numbers of these rows among all; those of R = 0, or masked altogether, are left
    out."""
    shape: tuple[int, ...]
    """The axes that number the rows."""
    norm: torch.Tensor
    """(T,): the rows' ‖R‖."""
    counts: torch.Tensor
    """(T,): elements of each that were not masked."""
    masked: Masked | None = None
    """What one side alone masks."""


def sum_rounding(num_terms: int) -> float:
    """Relative rounding error of a sum of ``num_terms`` products in float32, or of one
    elementary function where that is 1. Higham 2002, sections 2.8 and 4.5."""
    if num_terms <= 1:
        return 2 * ACCUMULATOR_ROUNDOFF
    return ONE_ROUNDING * ACCUMULATOR_ROUNDOFF * math.sqrt(num_terms / 2)


def measure_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    truth: torch.Tensor | None,
    *,
    num_terms: int = 1,
    of_gradient: bool = False,
    cancels: bool = False,
    before: Columns | None = None,
) -> OperatorErrors | None:
    """None where nothing finite is left. All have equally many numbers, in the same order.

    ``of_gradient``: rows below the median one are held against that. Terms of a gradient cancel
    (the gradient of a softmax by its scores is g·y less a mean of it, and 0 for the first token),
    and where they do the row is small and the rounding of its terms is not.

    ``cancels``: large terms may be gone from a result, and their errors not.
    ``before``: of the forwards before, which tell as well what is usual in a column.

    Without a truth R = a: the reference's error is then 0, and the store error is not measured
    but 0.41 u, that of a uniform rounding error (numerics.floor)."""
    if a.numel() == 0:
        return None
    width = a.shape[-1] if a.ndim else 1
    exact = a if truth is None else truth
    x, y, r = (t.reshape(-1, width).to(torch.float64) for t in (a, b, exact))
    limits = [_largest(t.dtype) for t in (a, b)]
    masked = (x.abs() >= limits[0] / 2) & (y.abs() >= limits[1] / 2) & (x.sign() == y.sign())
    masked |= ~r.isfinite() & (x.isfinite() == y.isfinite())
    bad = [(~t.isfinite() & ~masked) for t in (x, y)]
    counts = int((bad[0] & ~bad[1]).sum()), int((bad[1] & ~bad[0]).sum())
    others, alone = _masked_alone((x, limits[0]), (y, limits[1]), r, tuple(a.shape))
    away = masked | bad[0] | bad[1] | ~r.isfinite() | alone
    x, y, r = (t.masked_fill(away, 0.0) for t in (x, y, r))
    norm = r.norm(dim=1)
    kept = (norm > 0) & ~away.all(1)
    if of_gradient and bool(kept.any()):
        usual = norm[kept].median()
        kept |= (x.abs().amax(1) > 0) | (y.abs().amax(1) > 0)
        norm = norm.clamp_min(usual)
    if not bool(kept.any()) and not any(counts) and others is None:
        return None
    x, y, r, norm = x[kept], y[kept], r[kept], norm[kept][:, None]
    rounding = sum_rounding(num_terms)
    if truth is None:
        rounding = math.hypot(rounding, ONE_ROUNDING * torch.finfo(a.dtype).eps / 2)
    kept_in = b.dtype if a.dtype == torch.float64 else a.dtype  # a truth is stored exactly
    own = (r.to(kept_in).to(torch.float64) - r) / norm
    floor = torch.hypot(own.norm(dim=1), torch.tensor(rounding, dtype=torch.float64))
    da, db = (x - r) / norm, (y - r) / norm
    num_kept = (~away).sum(1)[kept]
    columns = r.square().sum(0), len(r)
    if before is not None and len(before[0]) == r.shape[1]:
        columns = columns[0] + before[0], columns[1] + before[1]
    # of how many numbers it is at least where each is off in proportion to its size, or to what is
    # usual in its column: a large number may be small in one row by chance, and its error is not.
    # So an error in a few of many like numbers is no chance
    usual = columns[0] / columns[1]
    least = torch.ones_like(floor)
    if not cancels:
        least = _numbers(r.square().maximum(usual).sqrt())
    wide = num_kept >= min(_WIDE, width)
    return OperatorErrors(
        reference=da.norm(dim=1),
        candidate=db.norm(dim=1),
        between=((x - y) / norm).norm(dim=1),
        floor=floor,
        numbers=torch.stack([_numbers(error).maximum(least) for error in (da, db)]),
        columns=columns,
        column_reference=da[wide].square().sum(0),
        column_candidate=db[wide].square().sum(0),
        column_floor=own[wide].square().sum(0) + int(wide.sum()) * rounding**2 / r.shape[1],
        column_fourth=torch.stack([error[wide].pow(4).sum(0) for error in (da, db)]),
        num_nonfinite=counts,
        over_1_ulp=(_over(x, r, a.dtype), _over(y, r, b.dtype)),
        rows=kept.nonzero().flatten(),
        shape=tuple(a.shape[:-1]),
        norm=norm[:, 0],
        counts=num_kept,
        masked=others,
    )


def numbers_of(squares: torch.Tensor, fourth: torch.Tensor) -> torch.Tensor:
    """Tell of how many numbers errors are made, from the sums of their squares and fourth powers.
    Of n normal numbers the participation ratio (Σe²)² / Σe⁴ is (n + 2) / 3 on average."""
    ratio = squares.square() / fourth.clamp_min(torch.finfo(fourth.dtype).tiny)
    return (3 * ratio - 2).clamp_min(1.0)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return numbers_of(values.square().sum(1), values.pow(4).sum(1))


def _masked_alone(
    a: tuple[torch.Tensor, float],
    b: tuple[torch.Tensor, float],
    truth: torch.Tensor,
    shape: tuple[int, ...],
) -> tuple[Masked | None, torch.Tensor]:
    """Find what one side masks while the other has a score there, and where. ``a``, ``b``: values
    (T, D) and the largest finite number of the dtype. A number of either is right where the truth
    has the like."""
    hidden = [values <= -largest / 2 for values, largest in (a, b)]
    seen = [values > _OPEN for values, _ in (a, b)]
    alone = hidden[0] & seen[1], hidden[1] & seen[0]
    where = alone[0] | alone[1]
    if not bool(where.any()):
        return None, where
    true = truth <= -min(a[1], b[1]) / 2
    wrong = [int((where & (side != true)).sum()) for side in hidden]
    first = torch.nonzero(where.reshape(shape))[0].tolist()
    by = int(alone[0].sum()), int(alone[1].sum())
    return Masked(by, (wrong[0], wrong[1]), tuple(first)), where


def slices_of(errors: Sequence[OperatorErrors], *, least: int) -> list[torch.Tensor]:
    """Rows that belong together, one head for example: all that have one index of one axis in
    common, over all of ``errors``. Positions among their rows laid end to end; slices of fewer
    than ``least`` rows, and axes that are not equally long throughout, are left out."""
    if not errors or len({len(error.shape) for error in errors}) > 1:
        return []
    slices: list[torch.Tensor] = []
    for axis in range(len(errors[0].shape)):
        size = errors[0].shape[axis]
        if size < 2 or any(error.shape[axis] != size for error in errors):
            continue
        index = torch.cat(
            [error.rows // math.prod(error.shape[axis + 1 :]) % size for error in errors]
        )
        counts = torch.bincount(index, minlength=size)
        slices += [(index == n).nonzero().flatten() for n in range(size) if counts[n] >= least]
    return slices


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else math.inf


def _over(value: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """Share of the elements more than one ulp of ``dtype`` from the truth; those far below the
    others, where cancellation makes millions of ulp of nothing, are left out."""
    if not dtype.is_floating_point:
        return 0.0
    counted = truth.abs() > torch.finfo(dtype).eps / 2 * truth.square().mean().sqrt()
    if not bool(counted.any()):
        return 0.0
    beyond = (value - truth).abs() > spacing(truth, format_of(dtype))
    return float((beyond & counted).sum() / counted.sum())
