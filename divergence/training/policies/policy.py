"""What a framework's settings say of the dtypes of a training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from divergence.errors import UsageError
from divergence.numerics.formats import format_named

__all__ = ["PrecisionPolicy", "half", "named_dtype", "number"]

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """``framework``: its name. ``options``: of ``capture``, by name. ``switches``: what of the
    settings said so, as it is written there."""

    framework: str
    options: Mapping[str, Any]
    switches: tuple[str, ...]

    def __str__(self) -> str:
        """``DeepSpeed: bf16.enabled, communication_data_type=fp32``."""
        return f"{self.framework}: {', '.join(self.switches) or 'defaults'}"


def named_dtype(value: Any, where: str) -> str:
    """``bf16``, ``torch.bfloat16`` → ``bfloat16``. Raises UsageError for what no simulation of a
    step keeps gradients or weights in."""
    name = format_named(str(value)).name
    if name not in _DTYPES:
        raise UsageError(
            f"{where} is {value}: only {', '.join(_DTYPES)} can be tried on this machine",
            hint="leave it out of the policy",
        )
    return name


def number(value: Any, where: str) -> float:
    """Raises UsageError for what is no finite number."""
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if isinstance(value, bool) or not math.isfinite(parsed):
        raise UsageError(f"{where} is {value!r}: no number", hint="correct the policy")
    return parsed


def half(dtype: str | None) -> bool:
    """Is it one of 16 bits?"""
    return dtype in ("bfloat16", "float16")
