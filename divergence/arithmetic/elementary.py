"""Elementary functions: how far from the true value, and whether a vector's lanes agree.

Error in units in the last place of the output's format at the true value R:
|y - R| / 2^(⌊log2 |R|⌋ - mantissa bits), the worst over inputs that are the same bytes everywhere.
R is the same function in float64 on the CPU, whose own error (under one float64 ulp) is 2^-29 of a
float32 ulp. Correct rounding gives at most 0.5. True values that are subnormal, or that the format
does not hold, are left out. The worst over some thousand inputs is a lower bound of the worst.

Lanes: the same element alone, at the end of an odd length and inside a long array must give the
same bits; where it does not, vector and scalar code differ and results depend on shape and place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from divergence.arithmetic.notebook import Notebook
from divergence.numerics.formats import format_of
from divergence.run.schema.fingerprint import digest_tensor

__all__ = ["FUNCTIONS", "inputs_of", "lanes", "probe_elementary", "worst_ulp"]

Unary = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, tuple[Unary, float, bool]] = {
    "exp": (torch.exp, 8.0, False),
    "log": (torch.log, 16.0, True),
    "sin": (torch.sin, 32.0, False),
    "cos": (torch.cos, 32.0, False),
    "tanh": (torch.tanh, 4.0, False),
    "erf": (torch.erf, 4.0, False),
    "sigmoid": (torch.sigmoid, 8.0, False),
    "sqrt": (torch.sqrt, 16.0, True),
    "rsqrt": (torch.rsqrt, 16.0, True),
    "reciprocal": (torch.reciprocal, 16.0, False),
    # not 3 / x, which torch makes of a reciprocal and a product
    "div": (lambda x: torch.full_like(x, 3.0) / x, 16.0, False),
    "silu": (torch.nn.functional.silu, 8.0, False),
}
"""Function → (itself, inputs reach up to, positive inputs only). Ranges are those of models."""


def inputs_of(name: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Exact inputs: whole multiples of the range / 2^(bits), never 0."""
    _, reach, positive = FUNCTIONS[name]
    bits = min(format_of(dtype).mantissa_bits + 1, 20)
    raw = np.random.PCG64(sum(name.encode())).random_raw(count)
    steps = 1 + (raw >> np.uint64(64 - bits)).astype(np.float64)
    sign = 1.0 if positive else np.where(raw & np.uint64(1), -1.0, 1.0)
    return torch.from_numpy(sign * steps * reach * 2.0**-bits).to(dtype)


def worst_ulp(function: Unary, given: torch.Tensor, got: torch.Tensor) -> float:
    """Largest error of ``got`` in ulp; inf where it is no number and the true value is one."""
    form = format_of(got.dtype)
    true = function(given.double()).numpy()
    normal = (np.abs(true) >= form.smallest_normal) & (np.abs(true) <= form.max)
    if not normal.any():
        return 0.0
    _, exponent = np.frexp(true)
    ulp = np.ldexp(1.0, exponent - 1 - form.mantissa_bits)
    error = np.abs(got.double().numpy() - true) / ulp
    return float(np.nan_to_num(error, nan=np.inf)[normal].max())


def lanes(function: Unary, given: torch.Tensor, device: str, *, count: int = 24) -> tuple[int, int]:
    """(elements that differ, elements looked at): in a long array against alone, and at the end of
    an odd length."""
    x = given[: 67 + count].to(device)
    long = function(x).cpu()
    differ, seen = 0, 0
    for place in range(count):
        alone = function(x[place : place + 1]).cpu()
        differ += int(_bits(alone) != _bits(long[place : place + 1]))
        seen += 1
    for length in (67, 35, 19, 7, 5, 3):
        tail = function(x[:length].clone()).cpu()
        last = min(length, 3)
        same = [
            _bits(tail[k : k + 1]) == _bits(long[k : k + 1]) for k in range(-last + length, length)
        ]
        differ, seen = differ + same.count(False), seen + len(same)
    return differ, seen


def _bits(one: torch.Tensor) -> bytes:
    return one.contiguous().view(torch.uint8).numpy().tobytes()


def probe_elementary(
    notebook: Notebook, device: str, dtypes: tuple[torch.dtype, ...], *, count: int
) -> None:
    """Each function in each dtype; ``count`` inputs."""
    for dtype in dtypes:
        kind = format_of(dtype).name
        for name, (function, _, _) in FUNCTIONS.items():
            subject = f"{name} {kind}"
            given = inputs_of(name, dtype, count)
            counted = f"{name} n={count} {kind}"
            try:
                got = function(given.to(device)).cpu()
                differ, seen = lanes(function, given, device)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                notebook.absent("ulp", counted, error)
                continue
            worst = worst_ulp(function, given, got)
            notebook.note(
                "ulp", counted, f"{worst:.3g} ulp", unit="ulp", numbers={"worst": worst},
                digest=digest_tensor(got), evidence=f"the worst of {count} inputs against float64",
            )  # fmt: skip
            notebook.note(
                "lanes", subject,
                "same bits alone and in a vector" if not differ
                else "other bits alone than in a vector",
                numbers={"differ": differ, "seen": seen},
                evidence=f"{differ} of {seen} elements differ",
            )  # fmt: skip
            notebook.keep("ulp", subject, **{"in": given, "out": got})
