"""The truth of one case: results in float64, and what they are judged by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from divergence.numerics.formats import Format, format_named, format_of
from divergence.numerics.rounding.spacing import ROUNDING_RMS, spacing
from divergence.ops.suite.definition import Arguments, Operator, outputs_of
from divergence.ops.suite.noise import samples
from divergence.ops.suite.recording import output_port

__all__ = ["truth_of", "widened"]


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

    ``equal``: the inputs are all one value, see ops.suite.noise.
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
        found = [trial[number] for trial in trials]
        if truth.dtype == torch.float64:
            floor, gain = _floor(truth, found), _gain(truth, found, form, equal=equal)
            yield f"{port}.floor", floor.float()
            yield f"{port}.gain", gain.float()
        elif truth.dtype != torch.int64:
            codes = truth.float()
            other = [(trial.float() != codes) & ~codes.isnan() for trial in found]
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
    right = _rounded(truth, form)
    norm2 = right.square().sum(-1)
    least = torch.where(norm2 > 0, norm2, 1.0)
    drawn = [
        (torch.where(right == 0, 0.0, _difference(right, _rounded(trial, form))) * right).sum(-1)
        / least
        for trial in trials
    ]
    spread = torch.stack(drawn).square().mean(0)
    steps = (right * spacing(right, form)).abs() * ROUNDING_RMS
    stores = steps.sum(-1).square() if equal else steps.square().sum(-1)
    return (spread + stores / least.square()).sqrt()


def _rounded(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Rounded to the dtype, what overflows left out."""
    rounded = x.to(form.torch_dtype).double()
    return torch.where(rounded.isfinite(), rounded, 0.0)
