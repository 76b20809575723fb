"""Sizes of subtrees, measured: FPRev's masks in the number format of an operator.

A mask is a row of terms: M at i, -M at j, units elsewhere. M must not overflow, and must swallow
all units added to it: units · count <= M · 2^-26 for a float32 accumulator. float32 and bfloat16
have exponents to spare (M = 2^100, unit 1); float16 has 2^15 and 2^-24, so that its unit is a
subnormal number, or, where those are flushed, only 16 units may stand in a row at once. An output
with few bits cannot count beyond 2^(mantissa + 1) either. So units are laid out in portions, one
call for each, and the counts added: exact, at the price of more calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from divergence.arithmetic.additions.fprev import NotATreeError
from divergence.arithmetic.additions.summing import Summing
from divergence.numerics.formats import format_of

__all__ = ["Encoding", "find_encoding", "num_portions", "size_measure"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """``big`` and ``unit`` as leaves; every leaf is multiplied with ``partner``; at most ``most``
    units in one row."""

    big: float
    unit: float
    partner: float
    most: int


def _encodings(operator: Summing) -> list[Encoding]:
    form = format_of(operator.dtype)
    counts = 2 ** (form.mantissa_bits + 1)
    if form.name != "float16":
        return [Encoding(2.0**100, 1.0, 1.0, counts)]
    partner = 2.0**10 if operator.products else 1.0
    found = [
        Encoding(2.0**15, 2.0**-24, partner, counts // 2),
        Encoding(2.0**15, 2.0**-14, 1.0, 16),
    ]
    if operator.even:  # one unit must remain a number after the division by n
        unit = 2.0**-24 * operator.terms
        found = [Encoding(2.0**15, unit, 1.0, max(1, int(2.0 ** (15 - 26) / unit)))]
    return found


def _portions(terms: int, encoding: Encoding, dtype: torch.dtype) -> list[torch.Tensor]:
    """One row of units for each portion; zeros elsewhere."""
    rows = []
    for start in range(0, terms, encoding.most):
        row = torch.zeros(terms, dtype=dtype)
        row[start : start + encoding.most] = encoding.unit
        rows.append(row)
    return rows


def num_portions(operator: Summing, encoding: Encoding) -> int:
    """Calls that one measurement takes."""
    return -(-operator.terms // encoding.most)


def find_encoding(operator: Summing) -> Encoding:
    """The first encoding whose units are all counted and whose big terms cancel.

    Raises NotATreeError where there is none.
    """
    for encoding in _encodings(operator):
        partner = torch.full((operator.rows, operator.terms), encoding.partner).to(operator.dtype)
        rows = _portions(operator.terms, encoding, operator.dtype)
        probes = [*rows]
        if operator.terms > 1:
            pair = torch.zeros(operator.terms, dtype=operator.dtype)
            pair[0], pair[-1] = encoding.big, -encoding.big
            probes.append(pair)
        wanted = [float((row != 0).sum()) for row in rows] + [0.0] * (len(probes) - len(rows))
        found: list[float] = []
        for start in range(0, len(probes), operator.columns):
            leaves = torch.zeros(operator.columns, operator.terms, dtype=operator.dtype)
            part = probes[start : start + operator.columns]
            leaves[: len(part)] = torch.stack(part)
            found += _counts(operator, operator.call(leaves, partner)[0], encoding)[: len(part)]
        if found == wanted:
            return encoding
    raise NotATreeError("its units are not counted, or M - M is not 0")


def _counts(operator: Summing, output: torch.Tensor, encoding: Encoding) -> list[float]:
    scale = encoding.unit * encoding.partner / (operator.terms if operator.even else 1)
    return (output.double() / scale).tolist()


def size_measure(
    operator: Summing, encoding: Encoding, *, row: int = 0, columns: Sequence[int] | None = None
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(i, j) → leaves of the smallest subtree with both, for ``fprev.reveal``.

    ``row``, ``columns``: which outputs are looked at, where not all are made alike.
    """
    terms = operator.terms
    columns = range(operator.columns) if columns is None else columns
    partner = torch.full((operator.rows, terms), encoding.partner).to(operator.dtype)
    rows = _portions(terms, encoding, operator.dtype)
    laid_out = [units.repeat(operator.columns, 1) for units in rows]
    place = torch.tensor(list(columns))
    width = len(place)

    def measure(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        sizes = np.empty(len(i), dtype=np.int64)
        for start in range(0, len(i), width):
            one = torch.from_numpy(i[start : start + width])
            two = torch.from_numpy(j[start : start + width])
            at, counted = place[: len(one)], np.zeros(len(one))
            for units, leaves in zip(rows, laid_out, strict=True):
                leaves[at, one], leaves[at, two] = encoding.big, -encoding.big
                output = operator.call(leaves, partner)[row, at]
                leaves[at, one], leaves[at, two] = units[one], units[two]
                counted += np.array(_counts(operator, output, encoding))
            whole = np.rint(counted)
            if not np.array_equal(whole, counted):
                raise NotATreeError("an output is no count of units: M did not swallow them")
            sizes[start : start + len(one)] = terms - whole.astype(np.int64)
        return sizes

    return measure
