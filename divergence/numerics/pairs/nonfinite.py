"""Elements that are no finite number: how many, where the two sides do not agree, who is alone.

Two elements agree where both are finite, both are nan (whatever their payload), or both are the
same infinity: place and sign count, not the number. -inf against a finite value below -10,000
is counted apart (``mask_alike``): in an attention mask both say "never", since exp(-10,000) is 0
in every format up to float64, and masks are written with -inf, with the lowest finite number or
with -10,000 (BERT, GPT-2). Whether a site is a mask is not known here.
"""

from __future__ import annotations

import numpy as np

__all__ = ["NEVER", "NONFINITE", "count_nonfinite"]

NONFINITE = (
    "a_nan", "a_inf", "a_neginf", "b_nan", "b_inf", "b_neginf",
    "differ", "a_alone", "b_alone", "mask_alike",
)  # fmt: skip
"""What is counted. ``a_inf``: infinities of both signs, ``a_neginf`` those below; ``differ``:
places where the sides do not agree; ``a_alone``: of them, those where b is finite."""

NEVER = -10_000.0


def count_nonfinite(a: np.ndarray, b: np.ndarray, *, scale: float = 1.0) -> dict[str, int]:
    """The counts of one block, by the names of ``NONFINITE``; its values were multiplied by
    ``scale``."""
    found: dict[str, int] = {}
    nan, low, high, finite = {}, {}, {}, {}
    for side, x in (("a", a), ("b", b)):
        nan[side], finite[side] = np.isnan(x), np.isfinite(x)
        low[side], high[side] = np.isneginf(x), np.isposinf(x)
        found[f"{side}_nan"] = int(nan[side].sum())
        found[f"{side}_neginf"] = int(low[side].sum())
        found[f"{side}_inf"] = found[f"{side}_neginf"] + int(high[side].sum())
    differ = (nan["a"] != nan["b"]) | (low["a"] != low["b"]) | (high["a"] != high["b"])
    found["differ"] = int(differ.sum())
    found["a_alone"] = int((~finite["a"] & finite["b"]).sum())
    found["b_alone"] = int((~finite["b"] & finite["a"]).sum())
    most = NEVER * scale
    with np.errstate(invalid="ignore"):
        never = (low["a"] & finite["b"] & (b <= most)) | (low["b"] & finite["a"] & (a <= most))
    found["mask_alike"] = int(never.sum())
    return found
