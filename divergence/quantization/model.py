"""A model under a scheme: which of its matrices are quantised, and putting that in and out.

A matrix has the name of its module, with the parameter behind it where that is not ``weight``
(``model.layers.3.mlp.experts.down_proj``: all experts' together). Quantised are the matrices of the
blocks. Kept as they are, unless asked for: the head, routers (they decide which expert a token
goes to, and are small), embeddings and norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from divergence.errors import UsageError
from divergence.quantization.linear import (
    Limits,
    QuantizedWeight,
    StoredWeight,
    is_transposed,
    put_in,
    take_out,
)
from divergence.quantization.scheme import Scheme
from divergence.recording.model.structure import describe_modules, routing_modules
from divergence.run.schema.site import did_you_mean, unescape_path

__all__ = [
    "QuantizationTarget", "chosen", "install", "matching", "quantized_weight", "targets_of",
    "uninstall", "use_plain_experts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizationTarget:
    """A matrix, or stacked ones, that a scheme may quantise."""

    name: str
    module: nn.Module
    parameter: str
    part: str
    """``linear``, ``experts``, ``router`` or ``head``."""
    block: str | None
    """Path of the block that it is in."""

    @property
    def matrices(self) -> list[torch.Tensor]:
        """(N, K) each."""
        weight = self.module._parameters[self.parameter]
        assert weight is not None
        if is_transposed(type(self.module)):
            return [weight.T]
        return [weight] if weight.ndim == 2 else list(weight)


def targets_of(model: nn.Module) -> dict[str, QuantizationTarget]:
    """Every matrix that inputs are multiplied with, by name, in the order of the modules."""
    notes = describe_modules(model)
    routing = {unescape_path(path): part for path, part in routing_modules(notes).items()}
    blocks = [unescape_path(path) for path, note in notes.items() if note.role == "block"]
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    targets: dict[str, QuantizationTarget] = {}
    for path, module in model.named_modules():
        linear = isinstance(module, nn.Linear) or is_transposed(type(module))
        block = next((root for root in blocks if path == root or path.startswith(f"{root}.")), None)
        part = "head" if module is head else routing.get(path, "linear" if linear else "")
        if not part:
            continue
        for name, weight in module._parameters.items():
            if weight is None or weight.ndim != (3 if part == "experts" else 2):
                continue
            full = path if name == "weight" else f"{path}.{name}"
            targets[full] = QuantizationTarget(full, module, name, part, block)
    return targets


def chosen(
    targets: Mapping[str, QuantizationTarget], keep: Sequence[str]
) -> list[QuantizationTarget]:
    """The targets that are quantised: those in blocks but routers, without those in ``keep``.

    ``keep``: names, ``re:`` and a regular expression, or class names of modules, as in the
    ``ignore`` list of compressed-tensors; ``!NAME`` quantises what is kept otherwise.
    Raises UsageError for one that fits nothing.
    """
    wanted = {pattern[1:] for pattern in keep if pattern.startswith("!")}
    forced = set(matching(targets, wanted))
    kept = set(matching(targets, [pattern for pattern in keep if not pattern.startswith("!")]))
    usual = {t.name for t in targets.values() if t.part in ("linear", "experts") and t.block}
    return [t for t in targets.values() if t.name in (usual | forced) - kept]


def matching(targets: Mapping[str, QuantizationTarget], patterns: Iterable[str]) -> Iterator[str]:
    """Names that patterns fit. Raises UsageError for a pattern that fits none."""
    for pattern in patterns:
        names = [name for name, target in targets.items() if _fits(pattern, name, target)]
        if not names:
            raise UsageError(
                f"{pattern!r} fits no matrix of the model",
                hint=did_you_mean(pattern, targets, count=2)
                or "a name, re: and a regular expression, or the class of a module",
            )
        yield from names


def _fits(pattern: str, name: str, target: QuantizationTarget) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise UsageError(f"{pattern!r} is no regular expression: {error}") from error
    kinds = {kind.__name__ for kind in type(target.module).__mro__[:2]}
    return pattern == name or pattern in kinds or name.startswith(f"{pattern}.")


def quantized_weight(
    target: QuantizationTarget, scheme: Scheme, *, smooth: torch.Tensor | None = None,
    limits: Sequence[float] | None = None,
) -> list[QuantizedWeight]:  # fmt: skip
    """A target's matrices under the scheme. ``smooth``, ``limits``: from calibration.

    Raises UsageError for weights that are not finite, for groups that do not divide their rows,
    and for static scales that no calibration gave.
    """
    if scheme.static and limits is None:
        raise UsageError(
            f"{target.name}: nothing entered it during calibration, so it has no static scale",
            hint=f"more prompts, a dynamic scheme, or --keep {target.name}",
        )
    known: Limits | None = None if limits is None else (limits[0], limits[1])
    made = []
    for number, weight in enumerate(target.matrices):
        if not bool(torch.isfinite(weight).all()):
            at = f" (matrix {number})" if len(target.matrices) > 1 else ""
            raise UsageError(
                f"{target.name}{at} holds weights that are not finite: no scale fits them",
                hint="the checkpoint is damaged; or keep the module in floating point",
            )
        divisors = None if smooth is None else smooth.to(weight.device)
        try:
            made.append(QuantizedWeight(weight, scheme, smooth=divisors, limits=known))
        except UsageError as error:
            error.where = target.name
            raise
    return made


def install(weights: Mapping[str, tuple[QuantizationTarget, Sequence[StoredWeight]]]) -> None:
    """Put matrices in place of targets' own, by name; of every module all at once."""
    by_module: dict[int, tuple[nn.Module, dict[str, Sequence[StoredWeight]]]] = {}
    for target, matrices in weights.values():
        module, held = by_module.setdefault(id(target.module), (target.module, {}))
        held[target.parameter] = matrices
    for module, held in by_module.values():
        put_in(module, held)


def uninstall(model: nn.Module) -> None:
    """The model's own matrices again."""
    for module in model.modules():
        take_out(module)


def use_plain_experts(model: Any) -> None:
    """Have experts multiplied one by one: the other ways do not go through ``linear``."""
    change = getattr(model, "set_experts_implementation", None)
    if change is not None and any(t.part == "experts" for t in targets_of(model).values()):
        change("eager")
