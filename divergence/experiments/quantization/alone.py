"""Each matrix of a model quantised alone: those of the scheme, and those that it keeps, so that one
sees why; and outliers of what enters each. Embeddings and norms, which no scheme quantises, go
through codes as weights alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from divergence.experiments.quantization.result import MatrixCost, Outliers
from divergence.experiments.quantization.trials import QuantizationTrials
from divergence.numerics.codes import Quantizer, codes_of, scales_of, values_of
from divergence.quantization.model import CalibrationWatch as Watch
from divergence.quantization.model import QuantizationTarget, targets_of, watching
from divergence.words import Progress, silent

__all__ = ["each_alone", "outliers_of"]


@dataclass(frozen=True, slots=True)
class _Table:
    """A weight that no inputs are multiplied with."""

    name: str
    module: nn.Module
    part: str
    number: int | None
    """Its block."""


def each_alone(trials: QuantizationTrials, progress: Progress | None = None) -> list[MatrixCost]:
    """In order of execution: what each costs alone. Cost: half a forward for each."""
    tell = progress or silent
    targets = targets_of(trials.model)
    tables = _tables(trials)
    total = len(targets) + len(tables)
    outliers = outliers_of(trials, targets)
    floors: dict[int, float] = {}
    costs: list[MatrixCost] = []
    for target in targets.values():
        tell("each", len(costs), total, target.name)
        number = trials.number_of(target)
        cost, error = trials.alone(target)
        if number is not None and number not in floors:
            floors[number] = trials.floor(number)
        costs.append(MatrixCost(
            name=target.name, part=target.part, block=target.block,
            by_default=target.name in trials.session.targets,
            num_weights=sum(matrix.numel() for matrix in target.matrices),
            block_error=error, floor=None if number is None else floors[number], cost=cost,
            outliers=outliers.get(target.name),
        ))  # fmt: skip
    for table in tables:
        tell("each", len(costs), total, table.name)
        with _through_codes(table, trials.scheme.weights):
            cost, error = trials.from_block(table.number)
        weight = table.module._parameters["weight"]
        costs.append(MatrixCost(
            name=table.name, part=table.part, block=None, by_default=False,
            num_weights=0 if weight is None else weight.numel(), block_error=error,
            floor=None if table.number is None else floors.get(table.number), cost=cost,
        ))  # fmt: skip
    return costs


def _tables(trials: QuantizationTrials) -> list[_Table]:
    if trials.scheme.weights is None:
        return []
    numbers = {
        id(module): number
        for number, block in enumerate(trials.blocks)
        for module in block.modules()
    }
    tables = []
    for path, module in trials.model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if isinstance(module, nn.Embedding):
            tables.append(_Table(path, module, "embedding", None))
        elif weight.ndim == 1 and "norm" in type(module).__name__.lower():
            tables.append(_Table(path, module, "norm", numbers.get(id(module))))
    return tables


@contextlib.contextmanager
def _through_codes(table: _Table, quantizer: Quantizer | None) -> Iterator[None]:
    """An embedding's rows with a scale each, a norm's weight with one; a matrix that shares its
    memory with it stays as it is."""
    weight = table.module._parameters["weight"]
    assert weight is not None and quantizer is not None
    per = Quantizer(format=quantizer.format, per="channel" if weight.ndim == 2 else "tensor",
                    symmetric=quantizer.symmetric)  # fmt: skip
    wide = weight.detach().float()
    scale, zero = scales_of(wide, per)
    values = values_of(codes_of(wide, per, scale, zero), per, scale, zero).to(weight.dtype)
    table.module._parameters["weight"] = nn.Parameter(values, requires_grad=False)
    try:
        with torch.no_grad():
            yield
    finally:
        table.module._parameters["weight"] = weight


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
        flat = x.detach().reshape(-1).cpu().double()
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
