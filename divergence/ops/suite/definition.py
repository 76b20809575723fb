"""What an operator of the suite is: a usual implementation, a definition, inputs.

``run`` is what a program on this machine would call; ``truth`` is the formula, written out plainly
in elementary operations on float64 tensors, with its source in its docstring. The truth gets
exactly the stored inputs, widened. What a definition writes as ``stored(x)`` is an intermediate
result that correct implementations may round to the dtype of the tensors.

Kinds of output, by their dtype: values (float32 and narrower down to 16 bits), codes (int8 and
8-bit floats: compared as codes), indices (int64). For indices ``scores`` gives, in float64, the
numbers among which the choice is made, so that a tie can be told from a fault; without it the
choice is documented exactly, ties included.

Cases have rows of ``decode`` (one token), ``odd`` (7 × 129: no multiple of any vector width) and
``prefill``; ``strided`` inputs are columns cut out of a wider tensor, as q, k and v are out of one
projection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from divergence.ops.suite.values import FLOATS, Values, draw, integers, normal, to_tensor

__all__ = [
    "PLAN",
    "PREFIX",
    "ROWS",
    "Arguments",
    "Implementation",
    "Operator",
    "OperatorCase",
    "Plan",
    "TensorSource",
    "Unavailable",
    "cases_of",
    "output_port",
    "outputs_of",
]  # fmt: skip

PREFIX = "suite."
"""What the names of operators begin with in a run."""

Arguments = dict[str, Any]
"""Argument name → tensor, or a scalar that JSON can hold."""


Implementation = Callable[..., Any]
"""Takes an operator's arguments by position; what it returns, ``outputs_of`` makes a tuple of."""


class Unavailable(Exception):
    """This build or device has no such implementation; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCase:
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
    run: Callable[..., Any]
    truth: Callable[..., Any]
    cases: Callable[[], Iterator[OperatorCase]]
    scores: Callable[..., torch.Tensor] | None = None
    implementations: Mapping[str, Callable[[], Implementation]] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of what the truth takes; each implementation is given the same by name."""
        parameters = inspect.signature(self.truth).parameters.values()
        return tuple(
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.KEYWORD_ONLY
        )

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def outputs_of(result: Any) -> tuple[torch.Tensor, ...]:
    """An operator's results as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def output_port(number: int) -> str:
    """``out``, ``out.1``, ``out.2`` ..."""
    return "out" if number == 0 else f"out.{number}"


ROWS: dict[str, tuple[int, ...]] = {"decode": (1, 1024), "odd": (7, 129), "prefill": (64, 512)}

Plan = Sequence[tuple[str, Values]]
"""(shape, distribution) of each case; a shape may end in ``.strided``."""

PLAN: Plan = (
    ("decode", "normal"),
    ("decode", "outliers"),
    ("odd", "normal"),
    ("odd", "outliers"),
    ("odd", "subnormals"),
    ("odd", "cancelling"),
    ("odd", "equal"),
    ("odd.strided", "normal"),
    ("prefill", "normal"),
    ("prefill", "outliers"),
)

_QUICK_DTYPES = ("float32", "bfloat16")
_SLOW_SHAPES = ("prefill", "long", "large_k")


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Draws one case's tensors. A tensor's values depend on its name, its shape and the
    distribution alone, so operators share them (and a run stores them once)."""

    dtype: str
    values: Values
    strided: bool = False

    def main(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, axis: int = -1
    ) -> torch.Tensor:
        """The tensor that has the case's distribution. ``scale``: a power of two, or the tensor
        keeps more than 24 bits before it is rounded."""
        x = draw(name, shape, values=self.values, dtype=self.dtype, axis=axis)
        tensor = to_tensor(x * scale, self.dtype)
        return cut_out(tensor) if self.strided else tensor

    def plain(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        scale: float = 1.0,
        mean: float = 0.0,
        dtype: str | None = None,
    ) -> torch.Tensor:
        """A contiguous tensor of normal values: weights, tables, the other operand."""
        return to_tensor(normal(name, shape) * scale + mean, dtype or self.dtype)

    def paired(self, name: str, shape: tuple[int, ...], *, scale: float = 1.0) -> torch.Tensor:
        """Normal values; equal in pairs along the last axis where the other operand cancels."""
        x = normal(name, shape)
        if self.values == "cancelling":
            x = x.copy()
            pairs = shape[-1] // 2 * 2
            x[..., 1:pairs:2] = x[..., 0:pairs:2]
        return to_tensor(x * scale, self.dtype)

    def indices(self, name: str, shape: tuple[int, ...], high: int) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(integers(name, shape, 0, high)))


def cut_out(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as columns of a wider tensor: not contiguous."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def cases_of(
    build: Callable[[TensorSource, tuple[int, ...]], Arguments],
    *,
    shapes: Mapping[str, tuple[int, ...]] = ROWS,
    plan: Plan = PLAN,
    dtypes: Sequence[str] = FLOATS,
    suffix: str = "",
) -> Callable[[], Iterator[OperatorCase]]:
    """Cases ``DTYPE.SHAPE.DISTRIBUTION[.SUFFIX]`` for every dtype and entry of ``plan``.

    ``build(source, shape)`` makes the arguments.
    """

    def cases() -> Iterator[OperatorCase]:
        for dtype in dtypes:
            for place, values in plan:
                shape, _, strided = place.partition(".")
                source = TensorSource(dtype, values, bool(strided))
                yield OperatorCase(
                    name=f"{dtype}.{place}.{values}" + (f".{suffix}" if suffix else ""),
                    make=partial(build, source, shapes[shape]),
                    quick=dtype in _QUICK_DTYPES and shape not in _SLOW_SHAPES,
                )

    return cases
