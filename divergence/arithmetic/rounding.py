"""Rounding, subnormal numbers and fused multiply-adds of elementwise operators.

Inputs are chosen so that each possible arithmetic gives another answer:

* rounding: values a quarter, a half and three quarters between neighbours, behind an even and an
  odd one, of both signs: nearest even, nearest away, toward zero, up and down all differ;
* subnormals: the smallest one times a power of two (lost on input?), the smallest normal number
  halved (lost on output?);
* fused: b·b + c with b = 1 + 2^-13, c = -(1 + 2^-12) is exactly 2^-26; a product rounded to
  float32 first leaves 0 (2^-26 is below half a unit in the last place).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from divergence.arithmetic.notebook import Notebook
from divergence.numerics.formats import format_of

__all__ = [
    "MODES",
    "fused_elementwise",
    "probe_fused",
    "probe_rounding",
    "probe_subnormals",
    "rounding_mode",
    "subnormals",
]

Unary = Callable[[torch.Tensor], torch.Tensor]

_REPEATS = 24
"""Each value stands so often in a row: long enough for a vector path."""


def _nearest(low: np.ndarray, high: np.ndarray, x: np.ndarray, *, up: np.ndarray) -> np.ndarray:
    middle = (low + high) / 2
    return np.where(x > middle, high, np.where(x < middle, low, np.where(up, high, low)))


MODES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "to nearest, ties to even": lambda low, high, x, odd: _nearest(low, high, x, up=odd),
    "to nearest, ties away from 0": lambda low, high, x, odd: _nearest(low, high, x, up=x > 0),
    "toward 0": lambda low, high, x, odd: np.where(x > 0, low, high),
    "up": lambda low, high, x, odd: high,
    "down": lambda low, high, x, odd: low,
}
"""Mode → its answer for values between neighbours ``low`` and ``high``; ``odd``: is low odd."""


def rounding_mode(got: np.ndarray, x: np.ndarray, ulp: float) -> str:
    """The mode that explains every ``got`` of exact ``x`` between multiples of ``ulp``."""
    low = np.floor(x / ulp) * ulp
    odd = np.floor(x / ulp) % 2 == 1
    fits = [
        name for name, mode in MODES.items() if np.array_equal(mode(low, low + ulp, x, odd), got)
    ]
    if fits:
        return fits[0]
    inside = np.all((got == low) | (got == low + ulp))
    return "neither neighbour by one rule" if inside else "not to a neighbour"


def _between(ulp: float) -> np.ndarray:
    """Exact values between neighbours in [1, 2), and their negatives."""
    steps = np.array([k + t for k in (0, 1, 2, 5) for t in (0.25, 0.5, 0.75)])
    x = np.repeat(1 + steps * ulp, _REPEATS)
    return np.concatenate([x, -x])


def probe_rounding(notebook: Notebook, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Casts from float32, and additions in each dtype."""
    for dtype in dtypes:
        form = format_of(dtype)
        ulp = 2.0**-form.mantissa_bits
        x = _between(ulp)
        if form.name != "float32":
            subject = f"cast float32 to {form.name}"
            try:
                given = torch.from_numpy(x).float()  # exact: at most 10 + 3 bits
                got = given.to(device).to(dtype).cpu()
            except (RuntimeError, TypeError) as error:
                notebook.absent("rounding", subject, error)
                continue
            notebook.note("rounding", subject, rounding_mode(got.double().numpy(), x, ulp))
            notebook.keep("rounding", subject, **{"in": given, "out": got})
        subject = f"add {form.name}"
        whole = np.trunc(x / ulp) * ulp
        try:
            one, two = torch.from_numpy(whole).to(dtype), torch.from_numpy(x - whole).to(dtype)
            got = (one.to(device) + two.to(device)).cpu()
        except (RuntimeError, TypeError) as error:
            notebook.absent("rounding", subject, error)
            continue
        notebook.note("rounding", subject, rounding_mode(got.double().numpy(), x, ulp))
        notebook.keep("rounding", subject, **{"in": one, "in_other": two, "out": got})


def subnormals(scale: Callable[[torch.Tensor, float], torch.Tensor], dtype: torch.dtype) -> str:
    """``scale(x, by)``: multiplies by a power of two. What becomes of numbers below normal?"""
    form = format_of(dtype)
    small = torch.full((_REPEATS,), form.smallest_subnormal, dtype=torch.float64).to(dtype)
    normal = torch.full((_REPEATS,), form.smallest_normal, dtype=torch.float64).to(dtype)
    lift = 2.0**form.mantissa_bits  # to the smallest normal number
    kept_in = (scale(small, lift).double() == form.smallest_normal).tolist()
    kept_out = (scale(normal, 0.5).double() == form.smallest_normal / 2).tolist()
    words = {True: "kept", False: "flushed to 0"}
    sides = []
    for side, kept in (("in", kept_in), ("out", kept_out)):
        sides.append(f"{words[kept[0]] if len(set(kept)) == 1 else 'partly flushed'} {side}")
    return ", ".join(sides)


def probe_subnormals(notebook: Notebook, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Elementwise products, and one-term products of a linear operator."""

    def elementwise(x: torch.Tensor, by: float) -> torch.Tensor:
        return (x.to(device) * torch.full_like(x, by).to(device)).cpu()

    def product(x: torch.Tensor, by: float) -> torch.Tensor:
        weight = torch.zeros(64, 64, dtype=x.dtype)
        weight[: len(x), 0] = x  # column by column one product, all other terms 0
        given = torch.zeros(16, 64, dtype=x.dtype)
        given[:, 0] = by
        out = torch.nn.functional.linear(given.to(device), weight.to(device)).cpu()
        return out[0, : len(x)]

    for dtype in dtypes:
        for name, call in (("mul", elementwise), ("linear", product)):
            subject = f"{name} {format_of(dtype).name}"
            try:
                notebook.note("subnormals", subject, subnormals(call, dtype))
            except (RuntimeError, TypeError) as error:
                notebook.absent("subnormals", subject, error)


Elementwise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fused_elementwise(call: Elementwise) -> str:
    """``call(b, c)`` = b·b + c in float32: is the product rounded first?"""
    b = torch.full((_REPEATS,), 1 + 2.0**-13, dtype=torch.float32)
    c = torch.full((_REPEATS,), -(1 + 2.0**-12), dtype=torch.float32)
    left = set(call(b, c).double().tolist())
    return {frozenset({2.0**-26}): "fused", frozenset({0.0}): "rounded products"}.get(
        frozenset(left), "fused in places"
    )


def _there(call: Elementwise, device: str) -> Elementwise:
    """The same on ``device``."""
    return lambda b, c: call(b.to(device), c.to(device)).cpu()


def probe_fused(notebook: Notebook, device: str) -> None:
    """Elementwise operators that multiply and add."""
    calls: dict[str, Elementwise] = {
        "addcmul": lambda b, c: torch.addcmul(c, b, b),
        "add alpha": lambda b, c: torch.add(c, b, alpha=float(b[0])),
        "mul, then add": lambda b, c: b * b + c,
    }
    for name, call in calls.items():
        try:
            value = fused_elementwise(_there(call, device))
            notebook.note("fma", f"{name} float32", value)
        except (RuntimeError, TypeError) as error:
            notebook.absent("fma", f"{name} float32", error)
