"""The cases of ``suite:collectives``: which collective, on which dtype, size and values.

What a collective means is said here once, for whoever runs it and for whoever judges it. n ranks,
x_r what rank r puts in, N its elements, c = N / n:

    all_reduce        N → N     every rank: Σ x_r
    reduce            N → N     rank 0: Σ x_r; what the others hold is not defined
    reduce_scatter    N → c     rank r: its r-th part of Σ x_r
    rs_ag             N → N     reduce_scatter, then all_gather of its parts: an all_reduce
    all_gather        c → N     every rank: x_0, x_1, … behind one another
    broadcast         N → N     every rank: x_0
    all_to_all        N → N     rank r: the r-th part of x_0, of x_1, …
    send_recv         c → c     rank r: x of rank r - 1 (rank 0: of the last)

Sizes: ``tiny`` has fewer elements than there may be ranks, ``odd`` divides by nothing, ``even`` is
129 elements for each rank, ``large`` 8192 for each of up to 8, 2^16 for all of more. ``huge`` has
2^20: the order of addition alone is looked for there, since libraries choose their algorithm by
size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from divergence.numerics.drawn import (
    OUTLIER_FACTOR,
    integers,
    normal,
    outlier_channels,
    to_tensor,
)
from divergence.numerics.formats import format_named
from divergence.run.record import Placement

# What each rank puts in: the same bytes on every machine, made of (values, rank, size) alone.
#
# ``random``       nearly normal, variance about 1, every digit of the significand in use
# ``cancelling``   ranks 2k and 2k + 1 differ in sign and, by up to 2^-8, in size: the sum loses its
#                  leading digits. The last of an odd number of ranks holds values 2^-12 as big
# ``outlier``      random, and every 43rd element of one rank (another for each) times 1000
# ``subnormal``    below the dtype's smallest normal value: are they flushed to zero?
# ``integers``     so small that every partial sum is exact: any other bit is wrong
# ``rank_coded``   where ranks are added, rank r puts in 2^r, so that the binary digits of a result
#                  tell whose terms are in it (element e codes only some ranks, where there are more
#                  than digits). Else another number for each piece of each rank

Values = Literal["random", "cancelling", "outlier", "subnormal", "integers", "rank_coded"]

_SUBNORMAL_EXPONENT = {"float64": -1030, "float32": -130, "bfloat16": -130, "float16": -18}


def draw(
    values: Values, dtype: str, size: int, *, rank: int, num_ranks: int, adds: bool = True
) -> torch.Tensor:
    """(size,): what ``rank`` of ``num_ranks`` puts in. ``adds``: are the ranks' values added?"""
    form = format_named(dtype)
    if form.kind != "float":  # sums fit, whatever the order
        kind = getattr(torch, dtype)
        most = min(torch.iinfo(kind).max // max(1, num_ranks), 2**20)
        low = 0 if torch.iinfo(kind).min == 0 else -most
        name = f"collective.{zlib.crc32(values.encode())}.{rank}"
        return torch.from_numpy(integers(name, (size,), low, most + 1)).to(kind)
    name, digits = f"collective.{rank}", form.mantissa_bits + 1
    if values == "integers":
        most = max(1, 2**digits // max(1, num_ranks) // 2)
        x = integers(name, (size,), -min(most, 2**20), min(most, 2**20) + 1).astype(np.float64)
    elif values == "rank_coded" and adds:
        group, place = divmod(rank, digits)
        coded = np.arange(size) % -(-num_ranks // digits) == group
        x = np.where(coded, 2.0**place, 0.0)
    elif values == "rank_coded":
        pieces = np.arange(size) * num_ranks // max(1, size)
        x = 1.0 + (rank * num_ranks + pieces) % (2**digits - 1)
    elif values == "cancelling":
        x = _full(f"collective.pair.{rank // 2}", size)
        if rank % 2:  # |normal| <= 6, so by less than 2^-7
            x = -x * (1.0 + np.abs(normal(f"collective.{rank}", (size,))) / 2.0**10)
        elif rank == num_ranks - 1:
            x = x / 2.0**12
    else:
        x = _full(name, size)
        if values == "outlier":
            outliers = np.zeros(size, dtype=bool)
            outliers[outlier_channels(size)] = True
            x[outliers & (np.arange(size) % num_ranks == rank)] *= OUTLIER_FACTOR
        elif values == "subnormal":
            x = np.ldexp(x, _SUBNORMAL_EXPONENT.get(dtype, -130))
    return to_tensor(x, dtype)


def _full(name: str, size: int) -> np.ndarray:
    """Nearly normal values whose significands fill float64: ``normal`` alone lies on a grid of
    2^-20, on which few ranks' sums are exact. Products of two float64 are rounded in one way."""
    factors = [1.0 + np.abs(normal(f"{name}.{k}", (size,))) / 16.0 for k in (1, 2)]
    x: np.ndarray = normal(name, (size,)) * factors[0] * factors[1]
    return x


PREFIX = "collective."
"""Before a collective's name in a record's call."""
ROOT_RANK = 0
"""Of broadcast and reduce."""

Collective = Literal[
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "rs_ag",
    "all_gather",
    "broadcast",
    "all_to_all",
    "send_recv",
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
ADDING = ("all_reduce", "reduce", "reduce_scatter", "rs_ag")
"""Those that add the ranks' values."""

_PLACEMENTS: dict[Collective, tuple[Placement, Placement]] = {
    "all_reduce": ("partial:sum", "replicate"),
    "reduce": ("partial:sum", "single"),
    "reduce_scatter": ("partial:sum", "shard:0"),
    "rs_ag": ("partial:sum", "replicate"),
    "all_gather": ("shard:0", "replicate"),
    "broadcast": ("single", "replicate"),
    "all_to_all": ("shard:0", "shard:0"),
    "send_recv": ("shard:0", "shard:0"),
}
SIZES = ("tiny", "odd", "even", "large", "huge")
_FIXED = {"tiny": 3, "odd": 1037}
_PER_RANK = {"tiny": 1, "odd": 129, "even": 129, "large": 8192}
_LARGE = 2**16
"""Elements of a large buffer at most: many ranks record as much as a few."""
_WHOLE = ("all_reduce", "reduce", "broadcast")
"""Their buffers need not divide by the number of ranks."""

Plan = tuple[tuple[str, tuple[str, ...], tuple[Values, ...]], ...]
FLOATS = ("float32", "bfloat16", "float16", "float64")
_SUMS: tuple[Values, ...] = get_args(Values)
_FEW: Plan = (
    ("tiny", ("float32", "bfloat16"), ("random", "rank_coded")),
    ("large", ("float32", "bfloat16"), ("random",)),
    ("large", ("float32",), ("rank_coded",)),
)
_MOVED: Plan = (
    ("odd", FLOATS, ("random", "subnormal", "rank_coded")),
    ("odd", ("int64", "uint8", "float8_e4m3fn"), ("random",)),
    ("tiny", ("float32",), ("random",)),
    ("large", ("float32", "bfloat16"), ("random",)),
)
_PLANS: dict[Collective, Plan] = {
    "all_reduce": (
        ("odd", FLOATS, _SUMS),
        ("odd", ("int32",), ("integers",)),
        ("odd", ("float8_e4m3fn",), ("random",)),
        ("even", ("float32", "bfloat16", "float16"), ("random", "cancelling")),
        *_FEW,
    ),
    "reduce": (
        ("odd", FLOATS, ("random", "integers", "rank_coded")),
        ("large", ("float32",), ("random",)),
    ),
    "reduce_scatter": (
        ("even", FLOATS, _SUMS),
        ("even", ("int32",), ("integers",)),
        ("even", ("float8_e4m3fn",), ("random",)),
        *_FEW,
    ),
    "rs_ag": (
        ("even", ("float32", "bfloat16", "float16"), ("random", "cancelling")),
        ("large", ("float32", "bfloat16"), ("random",)),
    ),
    "all_gather": _MOVED,
    "broadcast": _MOVED,
    "all_to_all": _MOVED,
    "send_recv": _MOVED,
}

NOT_SUPPORTED = " is not supported: "
"""In a recorded reason, between ``COLLECTIVE of DTYPE`` and what the library says."""


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    """One collective on one dtype, size and kind of values."""

    collective: Collective
    dtype: str
    size: str
    values: Values

    @property
    def path(self) -> str:
        """Return what stands for a module's path in its sites."""
        return f"{self.collective}.{self.dtype}.{self.size}.{self.values}"

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what has one order of addition."""
        return self.collective, self.dtype, self.size

    @property
    def order_path(self) -> str:
        """The same, of what masks give in it."""
        return f"order.{self.collective}.{self.dtype}.{self.size}"

    @property
    def adds(self) -> bool:
        return self.collective in ADDING

    @property
    def placements(self) -> tuple[Placement, Placement]:
        """Return what of the whole a rank's input and result are."""
        return _PLACEMENTS[self.collective]

    def elements(self, num_ranks: int) -> int:
        """Count the elements of one rank's input."""
        if self.size == "huge":
            return 2**20 // num_ranks * num_ranks
        if self.collective in _WHOLE and self.size in _FIXED:
            return _FIXED[self.size]
        each = _PER_RANK[self.size]
        if self.size == "large":
            each = min(each, max(1, _LARGE // num_ranks))
        return each if self.collective in ("all_gather", "send_recv") else each * num_ranks


def all_cases() -> Iterator[CollectiveCase]:
    """Every case, in order."""
    for collective, plan in _PLANS.items():
        for size, dtypes, values in plan:
            for dtype in dtypes:
                for kind in values:
                    yield CollectiveCase(collective, dtype, size, kind)


def order_cases() -> Iterator[CollectiveCase]:
    """The collectives, dtypes and sizes of which the order of addition is looked for."""
    seen = set()
    for case in all_cases():
        orders = case.dtype in FLOATS and case.collective != "rs_ag" and case.size != "tiny"
        if case.adds and orders and case.key not in seen:
            seen.add(case.key)
            yield case
    yield CollectiveCase("all_reduce", "float32", "huge", "random")
