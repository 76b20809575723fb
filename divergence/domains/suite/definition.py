"""A case of the suite: inputs, an operator, and its result in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from divergence.numerics.drawn import (
    OUTLIER_FACTOR,
    integers,
    normal,
    outlier_channels,
    to_tensor,
)
from divergence.numerics.floor import ACCUMULATOR_ROUNDOFF, ONE_ROUNDING
from divergence.numerics.formats import Format, format_named, format_of
from divergence.numerics.ulp import ROUNDING_RMS, spacing

# Distributions of input values: ``normal``; ``outliers``: some channels of the last axis times
# 1000, as trained models have them (Sun et al., "Massive Activations in Large Language Models",
# COLM 2024);
# ``subnormals``; ``cancelling``: neighbours that differ in sign and, by up to 2^-8, in size, so
# that sums lose their leading digits; ``equal``: one value everywhere; ``ties``: small multiples of
# 1/4, equal in many places and half-way between integers in many.

FLOATS = ("float32", "bfloat16", "float16")

_SUBNORMAL_EXPONENT = {"float32": -130, "bfloat16": -130, "float16": -18}
"""2^this times a normal value is subnormal: the smallest normals are 2^-126 and 2^-14."""


def cancel(x: np.ndarray, axis: int) -> np.ndarray:
    """Each odd element along ``axis`` is the one before it, negated and up to 2^-8 larger."""
    x = np.moveaxis(x.copy(), axis, -1)
    pairs = x.shape[-1] // 2 * 2
    change = np.abs(x[..., 1:pairs:2]) / 2.0**10  # |x| <= 6: below 2^-7
    x[..., 1:pairs:2] = -x[..., 0:pairs:2] * (1.0 + change)
    return np.moveaxis(x, -1, axis)


def draw(
    name: str, shape: tuple[int, ...], *, values: str, dtype: str, axis: int = -1
) -> np.ndarray:
    """Values of one distribution, float64, not yet rounded to ``dtype``. ``axis``: the one that
    the operator sums over, along which ``cancelling`` values cancel."""
    if values == "ties":
        return integers(name, shape, -8, 9) / 4.0
    if values == "equal":
        return np.full(shape, 0.7)
    x = normal(name, shape)
    if values == "outliers":
        x = x.copy()
        x[..., outlier_channels(shape[-1])] *= OUTLIER_FACTOR
    elif values == "subnormals":
        x = x * 2.0 ** _SUBNORMAL_EXPONENT[dtype]
    elif values == "cancelling":
        x = cancel(x, axis)
    return x


# What an operator of the suite is: a usual implementation, a definition, inputs.
#
# ``run`` is what a program on this machine would call; ``truth`` is the formula, written out
# plainly in elementary operations on float64 tensors, with its source in its docstring; it gets
# exactly the stored inputs, widened. ``stored(x)`` in it is an intermediate result that correct
# implementations may round to the dtype of the tensors.
#
# Kinds of output, by their dtype: values (float32 down to 16 bits), codes (int8 and 8-bit floats),
# indices (int64). For indices ``scores`` gives, in float64, the numbers among which the choice is
# made, so that a tie can be told from a fault; without it the choice is documented exactly.
#
# Cases have rows of ``decode`` (one token), ``odd`` (7 × 129: no multiple of any vector width) and
# ``prefill``; ``strided`` inputs are columns of a wider tensor, as q, k and v are of one
# projection.

PREFIX = "suite."
"""What the names of operators begin with in a run."""

Arguments = dict[str, Any]
"""Argument name → tensor, or a scalar that JSON can hold."""


Implementation = Callable[..., Any]
"""Takes an operator's arguments by name; what it returns, ``outputs_of`` makes a tuple of."""


class Unavailable(Exception):
    """This build or device has no such implementation; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCase:
    """One call: ``name`` as ``bfloat16.decode.outliers``; ``quick``: in the small suite too."""

    name: str
    make: Callable[[], Arguments]
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator. ``name``: without the prefix. ``implementations``: by name, beside ``run``,
    which is ``torch``; each imports what it needs (``capturing.PACKAGES``) when it is called.
    ``scores``: of an output of indices, see above."""

    name: str
    run: Callable[..., Any]
    truth: Callable[..., Any]
    cases: Callable[[], Iterator[OperatorCase]]
    scores: Callable[..., Tensor] | None = None
    implementations: Mapping[str, Implementation] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """An operator's results as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def output_port(number: int) -> str:
    """``out``, ``out.1``, ``out.2`` ..."""
    return "out" if number == 0 else f"out.{number}"


ROWS: dict[str, tuple[int, ...]] = {"decode": (1, 1024), "odd": (7, 129), "prefill": (64, 512)}

Plan = Mapping[str, str]
"""By shape, the distributions of its cases; a shape may end in ``.strided``."""

PLAN = {
    "decode": "normal outliers",
    "odd": "normal outliers subnormals cancelling equal",
    "odd.strided": "normal",
    "prefill": "normal outliers",
}

_QUICK_DTYPES = ("float32", "bfloat16")
_SLOW_SHAPES = ("prefill", "long", "large_k")


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Draws one case's tensors. A tensor's values depend on its name, its shape and the
    distribution alone, so operators share them (and a run stores them once)."""

    dtype: str
    values: str
    strided: bool = False

    def main(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, axis: int = -1
    ) -> Tensor:
        """The tensor that has the case's distribution. ``scale``: a power of two, or the tensor
        keeps more than 24 bits before it is rounded."""
        x = draw(name, shape, values=self.values, dtype=self.dtype, axis=axis)
        tensor = to_tensor(x * scale, self.dtype)
        if not self.strided:
            return tensor
        # the same values as columns of a wider tensor: not contiguous
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
        return wide[..., : tensor.shape[-1]].copy_(tensor)

    def plain(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        scale: float = 1.0,
        mean: float = 0.0,
    ) -> Tensor:
        """A contiguous tensor of normal values: weights, tables, the other operand."""
        return to_tensor(normal(name, shape) * scale + mean, self.dtype)

    def paired(self, name: str, shape: tuple[int, ...], *, scale: float = 1.0) -> Tensor:
        """Normal values; equal in pairs along the last axis where the other operand cancels."""
        x = normal(name, shape)
        if self.values == "cancelling":
            x = x.copy()
            pairs = shape[-1] // 2 * 2
            x[..., 1:pairs:2] = x[..., 0:pairs:2]
        return to_tensor(x * scale, self.dtype)


def cases_of(
    build: Callable[[TensorSource, tuple[int, ...]], Arguments],
    shapes: Mapping[str, tuple[int, ...]] = ROWS,
    plan: Plan = PLAN,
    suffix: str = "",
) -> Callable[[], Iterator[OperatorCase]]:
    """Cases ``DTYPE.SHAPE.DISTRIBUTION[.SUFFIX]`` for every dtype and entry of ``plan``.
    ``build(source, shape)`` makes the arguments."""

    def cases() -> Iterator[OperatorCase]:
        for dtype, (place, kinds) in product(FLOATS, plan.items()):
            shape, _, strided = place.partition(".")
            for values in kinds.split():
                source = TensorSource(dtype, values, bool(strided))
                yield OperatorCase(
                    name=f"{dtype}.{place}.{values}" + (f".{suffix}" if suffix else ""),
                    make=partial(build, source, shapes[shape]),
                    quick=dtype in _QUICK_DTYPES and shape not in _SLOW_SHAPES,
                )

    return cases


# The truth of a case in float64, and how far a correct implementation may be from it.
#
# A definition is run again in float64 a few times, with every elementary result changed at random
# by what rounding it in float32 would change it by; the spread of the final results is the error
# that the formula makes of the rounding of its own steps, with its cancellations and its condition,
# element by element. This is Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997; Févotte and
# Lathuilière, "VERROU", SCAN 2016) with these assumptions:
#
# - A result is off by 0.29 of the spacing of float32 there (uniform in half a spacing to either
#   side: 1/√12), and not at all where float32 holds it exactly.
# - Elementary functions are off by four times that: GPUs and NPUs promise 1 to 4 ulp for exp, erf,
#   tanh and rsqrt (CUDA C++ Programming Guide, "Mathematical Functions"), vector libraries 1.
# - A sum of K terms p is off by 0.41 u √(K/2) times √(R² + Σp²), with u = 2^-24: partial sums of
#   random sign grow like √k (see numerics.floor), those of one sign up to R. Equal terms round all
#   the same way; there the error is that of K roundings in one direction, up to K u |R| / 2, the
#   same everywhere. A running sum carries on the rounding of each of its steps.
# - Where the definition says ``stored(x)``, x is rounded to the tensors' own dtype as well.
#
# What is exact in every implementation (comparisons, maxima, selection, negation, moving values
# about) is left alone.

NUM_SAMPLES = 6
_ELEMENTARY_FACTOR = 4.0
_INFINITY = torch.tensor(math.inf, dtype=torch.float64)

_ELEMENTARY = frozenset(
    "exp exp2 expm1 log log2 log1p erf erfc tanh sigmoid rsqrt sin cos pow softplus".split()
)
_EXACT = frozenset(
    "neg abs amax amin max min maximum minimum clamp where masked_fill gather index index_select "
    "clone copy _to_copy cat stack flip sort topk argmax round floor ceil trunc sign relu empty "
    "zeros zeros_like ones ones_like full full_like fill arange scalar_tensor lift_fresh embedding "
    "constant_pad_nd eq ne lt le gt ge isnan isfinite logical_and logical_or logical_not tril triu "
    "_unsafe_view repeat ldexp frexp new_zeros new_full empty_like nan_to_num bitwise_not "
    "bitwise_and detach copysign".split()
)
_PRODUCTS = frozenset("mm bmm mv dot".split())

_STORED: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar(
    "divergence_stored", default=None
)


def stored(x: Tensor) -> Tensor:
    """``x``, an intermediate result that implementations may round to the dtype of the tensors.
    Exactly ``x`` in the truth; off by a rounding where rounding is simulated."""
    change = _STORED.get()
    return x if change is None else change(x)


class RoundingNoise(TorchDispatchMode):
    """Puts float64 results off by a random rounding while entered. ``form``: the tensors' own
    dtype. ``equal``: addends are all the same, so their roundings are."""

    def __init__(self, form: Format, *, seed: int, equal: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._form, self._equal = form, equal
        self._single = format_named("float32")
        self._random = torch.Generator().manual_seed(seed)
        self._token: Any = None

    def __enter__(self) -> RoundingNoise:
        self._token = _STORED.set(self._store)
        super().__enter__()  # type: ignore[no-untyped-call]  # the same
        return self

    def __exit__(self, *error: Any) -> Any:
        _STORED.reset(self._token)
        return super().__exit__(*error)  # type: ignore[no-untyped-call]  # the same

    def _store(self, x: Tensor) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            return self._off(x, spacing(x, self._form) * ROUNDING_RMS, self._form)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if func.is_view or name in _EXACT or not isinstance(result, Tensor):
            return result
        if result.dtype != torch.float64:
            return result
        if name == "cumsum":
            # a running sum carries on the rounding of each step; all in one direction where the
            # addends are equal
            shape = [1] * result.ndim if self._equal else result.shape
            noise = torch.randn(shape, generator=self._random, dtype=torch.float64)
            steps = spacing(result, self._single) * ROUNDING_RMS
            return result + torch.where(result.isfinite(), (steps * noise).cumsum(args[1]), 0.0)
        moved = self._off(result, self._error(name, result, args, kwargs or {}), self._single)
        if self._equal and name in ("sum", "mean", *_PRODUCTS):
            length = args[0].shape[-1] if name in _PRODUCTS else _ratio(args[0], result)
            one_way = torch.randn((), generator=self._random, dtype=torch.float64)
            moved = moved * (1.0 + ACCUMULATOR_ROUNDOFF * length / 2 * one_way)
        return moved

    def _error(self, name: str, result: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Standard deviation of the result's error."""
        if name in _PRODUCTS:
            a, b = args[0], args[1]
            product = getattr(torch, name)
            return self._sum_error(a.shape[-1], result, product(a.square(), b.square()))
        if name in ("sum", "mean"):
            addends, rest = args[0].square(), args[1:]
            terms = torch.sum(addends, *rest, **kwargs)
            length = _ratio(args[0], result)
            scale = length if name == "mean" else 1
            return self._sum_error(length, result, terms / scale**2)
        error = spacing(result, self._single) * ROUNDING_RMS
        error = torch.where(result.float().double() == result, 0.0, error)
        return error * _ELEMENTARY_FACTOR if name in _ELEMENTARY else error

    def _sum_error(self, length: int, result: Tensor, squares: Tensor) -> Tensor:
        typical = ONE_ROUNDING * math.sqrt(length / 2) * (result.square() + squares).sqrt()
        # the spacing of subnormals does not shrink with the result
        least = self._single.smallest_subnormal * ROUNDING_RMS
        return (ACCUMULATOR_ROUNDOFF * typical).clamp_min(least * math.sqrt(length))

    def _off(self, x: Tensor, error: Tensor, form: Format) -> Tensor:
        """``x`` with an error of that size; beyond the range of ``form``, infinite."""
        noise = torch.randn(x.shape, generator=self._random, dtype=torch.float64)
        moved = torch.where(x.isfinite(), x + noise * error, x)
        if moved.numel() and float(moved.abs().amax()) > form.max:
            moved = torch.where(moved.abs() > form.max, torch.copysign(_INFINITY, moved), moved)
        return moved


def _ratio(addends: Tensor, result: Tensor) -> int:
    """Return how many addends go into one result."""
    return addends.numel() // max(1, result.numel())


def samples(
    function: Callable[[], Any], form: Format, *, equal: bool = False, count: int = NUM_SAMPLES
) -> Iterator[Any]:
    """Results of ``function`` with simulated rounding, ``count`` of them, always the same ones."""
    for number in range(count):
        with RoundingNoise(form, seed=number, equal=equal):
            result = function()
        yield result


def widened(arguments: Arguments) -> Arguments:
    """The arguments in float64: exactly the stored values. Integers stay what they are."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def truth_of(
    operator: Operator, arguments: Arguments, *, equal: bool
) -> Iterator[tuple[str, Tensor]]:
    """(port, tensor) of everything a truth records of a case (domains.suite.capturing).
    ``equal``: the inputs are all one value, see RoundingNoise."""
    wide = widened(arguments)
    forms = [
        format_of(value.dtype)
        for value in arguments.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    asked = arguments.get("out_dtype")
    if isinstance(asked, str):
        forms.append(format_named(asked))
    form = min(forms, key=lambda form: form.mantissa_bits, default=format_named("float32"))
    truths = outputs_of(operator.truth(**wide))
    trials = [
        outputs_of(result) for result in samples(lambda: operator.truth(**wide), form, equal=equal)
    ]
    for number, truth in enumerate(truths):
        port = output_port(number)
        yield port, truth
        results = [trial[number] for trial in trials]
        if truth.dtype == torch.float64:
            floor, gain = _floor(truth, results), _gain(truth, results, form, equal=equal)
            yield f"{port}.floor", floor.float()
            yield f"{port}.gain", gain.float()
        elif truth.dtype != torch.int64:
            codes = truth.float()
            other = [(trial.float() != codes) & ~codes.isnan() for trial in results]
            yield f"{port}.floor", torch.stack(other).float().mean(0)
        elif operator.scores is not None:
            scores_of = partial(operator.scores, **wide)
            scores = scores_of()
            drawn = list(samples(scores_of, form, equal=equal))
            yield f"{port}.scores", scores
            yield f"{port}.floor", _floor(scores, drawn).float()


def _difference(truth: Tensor, trial: Tensor) -> Tensor:
    """trial - truth, 0 where both are the same infinity."""
    return torch.where(trial == truth, 0.0, trial - truth)


def _floor(truth: Tensor, trials: list[Tensor]) -> Tensor:
    squares = [_difference(truth, trial).square() for trial in trials]
    return torch.stack(squares).mean(0).sqrt()


def _gain(truth: Tensor, trials: list[Tensor], form: Format, *, equal: bool) -> Tensor:
    """Per row (all axes but the last): standard deviation of <x - round(R), R> / ‖R‖², x and R
    rounded to the dtype. One more rounding of each element is allowed for, independent of the
    others' unless the values are all ``equal``. 0 for rows of zeros."""
    rounded = _rounded(truth, form)
    norm2 = rounded.square().sum(-1)
    least = torch.where(norm2 > 0, norm2, 1.0)
    drawn = [
        (torch.where(rounded == 0, 0.0, _difference(rounded, _rounded(trial, form))) * rounded).sum(
            -1
        )
        / least
        for trial in trials
    ]
    spread = torch.stack(drawn).square().mean(0)
    steps = (rounded * spacing(rounded, form)).abs() * ROUNDING_RMS
    stores = steps.sum(-1).square() if equal else steps.square().sum(-1)
    return (spread + stores / least.square()).sqrt()


def _rounded(x: Tensor, form: Format) -> Tensor:
    """Rounded to the dtype, what overflows left out."""
    rounded = x.to(form.torch_dtype).double()
    return torch.where(rounded.isfinite(), rounded, 0.0)
