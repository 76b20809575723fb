"""Calibration: what enters each matrix, seen while the model runs in floating point.

*Static scales* come from the least and the largest number that entered. The largest of n tokens is
exceeded by the next one with probability 1 / (n + 1) at either end (tokens alike), so few prompts
give scales that clip.

*Migration* (SmoothQuant; Xiao et al., arXiv 2211.10438, equation 4) moves outlier channels from
activations into weights: s_j = max|X_j|^α / max|W_j|^(1 - α) for each channel j; inputs are divided
by s and columns of W multiplied with it, which leaves X Wᵀ as it is. s is one for all matrices that
read the output of one norm, where it can be folded into the norm's weight; others are left alone.

What a run needs again on another machine stands in its manifest with three digits, and those are
what is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from divergence.quantization.model import QuantizationTarget, install, uninstall
from divergence.quantization.scheme import Scheme
from divergence.run.schema.provenance import Calibration as Recorded

__all__ = ["CalibratedLimits", "Watch", "calibration_of", "watching"]

_LEAST = 1e-5
"""Of scales and of maxima of weights, as in SmoothQuant's own code."""


class CalibratedLimits:
    """Limits and divisors by name of a matrix."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.limits = recorded.limits

    def divisors(self, name: str) -> torch.Tensor | None:
        """(K,) what inputs of the matrix are divided by."""
        norm = self.recorded.fed_by.get(name)
        scales = None if norm is None else self.recorded.scales.get(norm)
        return None if scales is None else torch.tensor(scales, dtype=torch.float32)


class Watch:
    """What entered one target's matrices."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.least: torch.Tensor | None = None
        self.most: torch.Tensor | None = None
        self.fed_by: set[str | None] = set()

    def see(self, x: torch.Tensor, norm: str | None) -> None:
        """Rows (..., K) that entered."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if not rows.numel():
            return
        least, most = rows.amin(0), rows.amax(0)
        self.least = least if self.least is None else torch.minimum(self.least, least)
        self.most = most if self.most is None else torch.maximum(self.most, most)
        self.num_tokens += rows.shape[0]
        self.fed_by.add(norm)


class _Watched:
    """A target's own matrix, watched."""

    def __init__(self, weight: torch.Tensor, watch: Watch, norms: Mapping[int, str]) -> None:
        self._weight, self._watch, self._norms = weight, watch, norms

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self._watch.see(x, self._norms.get(x.untyped_storage().data_ptr()))
        return nn.functional.linear(x, self._weight, bias)


@contextmanager
def watching(
    model: nn.Module, targets: Mapping[str, QuantizationTarget], kind: type[Watch] = Watch
) -> Iterator[dict[str, Watch]]:
    """Watch the targets while the model runs; what was installed is out afterwards."""
    norms: dict[int, str] = {}
    held: dict[str, torch.Tensor] = {}

    def seen(path: str) -> Any:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            if isinstance(out, torch.Tensor):
                held[path] = out  # so that no other tensor comes to lie there meanwhile
                norms.clear()
                norms.update({t.untyped_storage().data_ptr(): p for p, t in held.items()})

        return hook

    watches = {name: kind() for name in targets}
    install({
        name: (target, [_Watched(w, watches[name], norms) for w in target.matrices])
        for name, target in targets.items()
    })  # fmt: skip
    with ExitStack() as stack:
        stack.callback(uninstall, model)
        for path, module in model.named_modules():
            kind_and_name = type(module).__name__.lower(), path.rpartition(".")[2].lower()
            if any("norm" in word for word in kind_and_name):
                stack.enter_context(module.register_forward_hook(seen(path)))
        yield watches


def calibration_of(
    watches: Mapping[str, Watch], targets: Mapping[str, QuantizationTarget], scheme: Scheme
) -> CalibratedLimits:
    """What the scheme needs of what was seen. ``targets``: those that are quantised."""
    seen = {name: watch for name, watch in watches.items() if name in targets}
    fed_by, scales = {}, {}
    if scheme.smooth is not None:
        fed_by = _fed_by(seen)
        for norm in dict.fromkeys(fed_by.values()):
            group = [name for name, fed in fed_by.items() if fed == norm]
            scales[norm] = _migration(group, seen, targets, scheme.smooth)
    limits = {}
    for name, watch in seen.items() if scheme.static else ():
        if watch.least is None or watch.most is None:
            continue
        divisors = torch.tensor(scales[fed_by[name]]) if name in fed_by else torch.ones(())
        divisors = divisors.to(watch.least)
        least, most = (watch.least / divisors).min(), (watch.most / divisors).max()
        limits[name] = [_outward(float(least)), _outward(float(most))]
    num_tokens = max((watch.num_tokens for watch in seen.values()), default=0)
    return CalibratedLimits(
        Recorded(num_tokens=num_tokens, limits=limits, scales=scales, fed_by=fed_by)
    )


def _fed_by(watches: Mapping[str, Watch]) -> dict[str, str]:
    """The norm that a matrix reads, where it always was one and the same."""
    alone = {name: next(iter(w.fed_by)) for name, w in watches.items() if len(w.fed_by) == 1}
    return {name: norm for name, norm in alone.items() if norm is not None}


def _migration(
    group: list[str],
    watches: Mapping[str, Watch],
    targets: Mapping[str, QuantizationTarget],
    alpha: float,
) -> list[float]:
    """s of the matrices that read one norm."""
    sizes, weights = [], []
    for name in group:
        least, most = watches[name].least, watches[name].most
        assert least is not None and most is not None
        sizes.append(torch.maximum(-least, most))
        weights += [matrix.detach().float().abs().amax(0) for matrix in targets[name].matrices]
    inputs = torch.stack(sizes).amax(0).cpu().double()
    columns = torch.stack(weights).amax(0).cpu().double().clamp(min=_LEAST)
    scales = (inputs**alpha / columns ** (1 - alpha)).clamp(min=_LEAST)
    return [_three_digits(scale) for scale in scales.tolist()]


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _outward(value: float) -> float:
    """Three digits, away from zero: the range holds what was seen."""
    if value == 0 or not math.isfinite(value):
        return value
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return _three_digits(math.copysign(math.ceil(abs(value) / step) * step, value))
