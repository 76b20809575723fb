"""The truth of a case in float64, and how far a correct implementation may be from it.

A definition is run again in float64 a few times, with every elementary result changed at random
by what rounding it in float32 would change it by; the spread of the final results is the error
that the formula makes of the rounding of its own steps, with its cancellations and its condition,
element by element. This is Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997; Févotte and
Lathuilière, "VERROU", SCAN 2016) with these assumptions:

- A result is off by 0.29 of the spacing of float32 there (uniform in half a spacing to either
  side: 1/√12), and not at all where float32 holds it exactly.
- Elementary functions are off by four times that: GPUs and NPUs promise 1 to 4 ulp for exp, erf,
  tanh and rsqrt (CUDA C++ Programming Guide, "Mathematical Functions"), vector libraries 1.
- A sum of K terms p is off by 0.41 u √(K/2) times √(R² + Σp²), with u = 2^-24: partial sums of
  random sign grow like √k (see numerics.floor), those of one sign up to R. Equal terms round all
  the same way; there the error is that of K roundings in one direction, up to K u |R| / 2, the
  same everywhere. A running sum carries on the rounding of each of its steps.
- Where the definition says ``stored(x)``, x is rounded to the tensors' own dtype as well.

What is exact in every implementation (comparisons, maxima, selection, negation, moving values
about) is left alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from divergence.numerics.formats import Format, format_named, format_of
from divergence.numerics.pairs.ulp import ROUNDING_RMS, spacing
from divergence.ops.suite.definition import Arguments, Operator, output_port, outputs_of

__all__ = ["RoundingNoise", "samples", "stored", "truth_of", "widened"]

NUM_SAMPLES = 6
_ELEMENTARY_FACTOR = 4.0
_SUM_FACTOR = 0.41
_ROUNDOFF = 2.0**-24
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

_STORED: ContextVar[Callable[[torch.Tensor], torch.Tensor] | None] = ContextVar(
    "divergence_stored", default=None
)


def stored(x: torch.Tensor) -> torch.Tensor:
    """``x``, an intermediate result that implementations may round to the dtype of the tensors.

    Exactly ``x`` in the truth; off by a rounding where rounding is simulated.
    """
    change = _STORED.get()
    return x if change is None else change(x)


class RoundingNoise(TorchDispatchMode):
    """While entered, float64 results are off by a random rounding. ``form``: the tensors' own
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

    def _store(self, x: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            return self._off(x, spacing(x, self._form) * ROUNDING_RMS, self._form)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if func.is_view or name in _EXACT or not isinstance(result, torch.Tensor):
            return result
        if result.dtype != torch.float64:
            return result
        if name == "cumsum":
            return result + self._running_error(result, args[1])
        moved = self._off(result, self._error(name, result, args, kwargs or {}), self._single)
        if self._equal and name in ("sum", "mean", *_PRODUCTS):
            length = args[0].shape[-1] if name in _PRODUCTS else _ratio(args[0], result)
            one_way = torch.randn((), generator=self._random, dtype=torch.float64)
            moved = moved * (1.0 + _ROUNDOFF * length / 2 * one_way)
        return moved

    def _error(
        self, name: str, result: torch.Tensor, args: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
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

    def _sum_error(self, length: int, result: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        typical = _SUM_FACTOR * math.sqrt(length / 2) * (result.square() + squares).sqrt()
        # the spacing of subnormals does not shrink with the result
        least = self._single.smallest_subnormal * ROUNDING_RMS
        return (_ROUNDOFF * typical).clamp_min(least * math.sqrt(length))

    def _running_error(self, result: torch.Tensor, axis: int) -> torch.Tensor:
        """A running sum carries on the rounding of each step; all in one direction where the
        addends are equal."""
        shape = [1] * result.ndim if self._equal else result.shape
        noise = torch.randn(shape, generator=self._random, dtype=torch.float64)
        steps = spacing(result, self._single) * ROUNDING_RMS
        return torch.where(result.isfinite(), (steps * noise).cumsum(axis), 0.0)

    def _off(self, x: torch.Tensor, error: torch.Tensor, form: Format) -> torch.Tensor:
        """``x`` with an error of that size; beyond the range of ``form``, infinite."""
        noise = torch.randn(x.shape, generator=self._random, dtype=torch.float64)
        moved = torch.where(x.isfinite(), x + noise * error, x)
        if moved.numel() and float(moved.abs().amax()) > form.max:
            moved = torch.where(moved.abs() > form.max, torch.copysign(_INFINITY, moved), moved)
        return moved


def _ratio(addends: torch.Tensor, result: torch.Tensor) -> int:
    """How many addends go into one result."""
    return addends.numel() // max(1, result.numel())


def samples(
    function: Callable[[], Any], form: Format, *, equal: bool = False, count: int = NUM_SAMPLES
) -> Iterator[Any]:
    """Results of ``function`` with simulated rounding, ``count`` of them, always the same ones."""
    for number in range(count):
        with contextlib.ExitStack() as stack:
            stack.enter_context(RoundingNoise(form, seed=number, equal=equal))
            result = function()
        yield result


def widened(arguments: Arguments) -> Arguments:
    """The arguments in float64: exactly the stored values. Integers stay what they are."""
    return {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }


def truth_of(
    operator: Operator, arguments: Arguments, *, equal: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """(port, tensor) of everything a truth records of a case; see ops.suite.recording.

    ``equal``: the inputs are all one value, see RoundingNoise.
    """
    wide = widened(arguments)
    form = _narrowest(arguments)
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


def _narrowest(arguments: Arguments) -> Format:
    """The format of the floating-point tensors; float32 where there is none."""
    forms = [
        format_of(value.dtype)
        for value in arguments.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    asked = arguments.get("out_dtype")
    if isinstance(asked, str):
        forms.append(format_named(asked))
    return min(forms, key=lambda form: form.mantissa_bits, default=format_named("float32"))


def _difference(truth: torch.Tensor, trial: torch.Tensor) -> torch.Tensor:
    """trial - truth, 0 where both are the same infinity."""
    return torch.where(trial == truth, 0.0, trial - truth)


def _floor(truth: torch.Tensor, trials: list[torch.Tensor]) -> torch.Tensor:
    squares = [_difference(truth, trial).square() for trial in trials]
    return torch.stack(squares).mean(0).sqrt()


def _gain(
    truth: torch.Tensor, trials: list[torch.Tensor], form: Format, *, equal: bool
) -> torch.Tensor:
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


def _rounded(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Rounded to the dtype, what overflows left out."""
    rounded = x.to(form.torch_dtype).double()
    return torch.where(rounded.isfinite(), rounded, 0.0)
