"""Outlier statistics of what enters each matrix, from one floating-point run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from divergence.experiments.quantization.result import Outliers
from divergence.experiments.quantization.trials import QuantizationTrials
from divergence.quantization.calibration import Watch, watching
from divergence.quantization.model import QuantizationTarget

__all__ = ["outliers_of"]

_MOST = 1 << 16
"""Numbers of a prompt that quartiles are taken from, evenly spaced."""


class _Numbers(Watch):
    def __init__(self) -> None:
        super().__init__()
        self.power_sums = torch.zeros(4, dtype=torch.float64)
        self.count = 0
        self.some: list[torch.Tensor] = []

    def see(self, x: torch.Tensor, norm: str | None) -> None:
        super().see(x, norm)
        flat = x.detach().reshape(-1).double().cpu()
        if not len(flat):
            return
        self.count += len(flat)
        self.power_sums += torch.stack([(flat**n).sum() for n in (1, 2, 3, 4)])
        self.some.append(flat[:: max(1, len(flat) // _MOST)])


def outliers_of(
    trials: QuantizationTrials, targets: Mapping[str, QuantizationTarget]
) -> dict[str, Outliers]:
    """By target, over all prompts; targets that nothing entered are left out."""
    with watching(trials.model, targets, kind=_Numbers) as watches:
        trials.run_plain()
    outliers = {}
    for name, watch in watches.items():
        assert isinstance(watch, _Numbers)
        if watch.least is not None and watch.most is not None:
            outliers[name] = _statistics(watch, torch.maximum(-watch.least, watch.most))
    return outliers


def _statistics(watch: _Numbers, by_channel: torch.Tensor) -> Outliers:
    mean, mean_square, three, four = (watch.power_sums / watch.count).tolist()
    variance = mean_square - mean * mean
    fourth = four - 4 * mean * three + 6 * mean * mean * mean_square - 3 * mean**4
    # not torch.quantile, which takes no more than 2^24 numbers
    first, third = np.quantile(torch.cat(watch.some).numpy(), [0.25, 0.75]).tolist()
    most, median = float(by_channel.max()), float(by_channel.median())
    return Outliers(
        max=most,
        kurtosis=fourth / variance**2 if variance > 0 else math.nan,
        quantile_score=2 * most / 254 / (third - first) if third > first else math.inf,
        range_ratio=most / median if median > 0 else math.inf,
    )
