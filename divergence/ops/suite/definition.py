"""What an operator of the suite is: a usual implementation, a definition, inputs.

``run`` is what a program on this machine would call; ``truth`` is the formula, written out plainly
in elementary operations on float64 tensors, with its source in its docstring. The truth gets
exactly the stored inputs, widened. What a definition writes as ``stored(x)`` is an intermediate
result that correct implementations may round to the dtype of the tensors.

Kinds of output, by their dtype: values (float32 and narrower down to 16 bits), codes (int8 and
8-bit floats: compared as codes), indices (int64). For indices ``scores`` gives, in float64, the
numbers among which the choice is made, so that a tie can be told from a fault; without it the
choice is documented exactly, ties included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["PREFIX", "Arguments", "Case", "Implementation", "Operator", "Unavailable", "outputs_of"]

PREFIX = "suite."
"""What the names of operators begin with in a run."""

Arguments = dict[str, Any]
"""Argument name → tensor, or a scalar that JSON can hold."""


Implementation = Callable[..., Any]
"""Takes an operator's arguments by position; what it returns, ``outputs_of`` makes a tuple of."""


class Unavailable(Exception):
    """This build or device has no such implementation; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call: ``name`` as ``bfloat16.decode.outliers``; ``quick``: in the small suite too."""

    name: str
    make: Callable[[], Arguments]
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator. ``name``: without the prefix. ``implementations``: name → a function that
    imports and returns the implementation, and raises ImportError or Unavailable where it is
    not there; ``torch`` is ``run``. ``scores``: of an output of indices, see above."""

    name: str
    arguments: tuple[str, ...]
    run: Callable[..., Any]
    truth: Callable[..., Any]
    cases: Callable[[], Iterator[Case]]
    scores: Callable[..., torch.Tensor] | None = None
    implementations: Mapping[str, Callable[[], Implementation]] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def outputs_of(result: Any) -> tuple[torch.Tensor, ...]:
    """An operator's results as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)
