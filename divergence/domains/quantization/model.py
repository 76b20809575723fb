"""A model with quantised layers and caches, simulated on any device."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from divergence.domains.quantization.coding import (
    Quantizer,
    codes_of,
    grouped,
    scales_of,
    values_of,
)
from divergence.domains.quantization.scheme import Scheme
from divergence.domains.quantization.watching import INPUT
from divergence.errors import UsageError
from divergence.recording.structure import describe_modules, routing_modules
from divergence.run.manifest import Calibration
from divergence.run.site import did_you_mean, unescape_path

# Linear layers that follow a scheme, in exact integers where the scheme has integers.
#
# Both sides quantised to integers with one scale a row (or tensor): y = s_x s_w Σ_k (x_k -
# z_x)(w_k - z_w), the sum exact in every float32 machine: products of codes are whole numbers, and
# K is taken in pieces whose sums stay below 2^24, which are then added in int64. No kernel for
# int8 is asked for, and none of its faults gets in. In float64, as a truth computes, all of it is
# exact but the scales.
#
# Otherwise the codes' values are multiplied: in float32 where activations are quantised (8-bit
# floats, groups), in the model's dtype where weights alone are.
#
# Weights are quantised once, when the layer is made, from the numbers as loaded, in float32.

_EXACT = 1 << 24
"""Whole numbers up to here are float32 numbers."""


def exact_product(x: torch.Tensor, weight: torch.Tensor, *, most: int) -> torch.Tensor:
    """Σ_k x_mk w_nk of whole numbers, float32 (..., K) and (N, K), with |x|·|w| <= ``most``:
    exactly, then rounded once to float32."""
    piece = max(1, _EXACT // most)
    if x.shape[-1] <= piece:
        return nn.functional.linear(x, weight)
    total: torch.Tensor | None = None
    for part, other in zip(x.split(piece, dim=-1), weight.split(piece, dim=-1), strict=True):
        product = nn.functional.linear(part, other).to(torch.int64)
        total = product if total is None else total + product
    assert total is not None
    return total.to(torch.float32)


Watch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(codes less their zero point, what is recorded of them) → other codes, or None."""


class StoredWeight(Protocol):
    """Says what stands in place of a weight (N, K)."""

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) → (..., N), in the dtype of ``x``."""


Weights = Mapping[str, Sequence[StoredWeight]]
"""By parameter: its matrices, one or several stacked."""


class QuantizedWeight:
    """A weight (N, K) as codes, and the product of activations with it."""

    def __init__(
        self,
        weight: torch.Tensor,
        scheme: Scheme,
        *,
        smooth: torch.Tensor | None = None,
        limits: Sequence[float] | None = None,
    ) -> None:
        """Takes from calibration: ``smooth`` (K,), what inputs are divided by and weights
        multiplied with, and ``limits``, the least and the largest activation that enters."""
        self.scheme, self.smooth, self.limits = scheme, smooth, limits
        self.watch: Watch | None = None
        """Told of the codes of each input, and may give others to go on with."""
        assert scheme.weights is not None
        wide = weight.detach().float()
        if smooth is not None:
            wide = wide * smooth
        self.scale, self.zero = scales_of(wide, scheme.weights)
        self.codes = codes_of(wide, scheme.weights, self.scale, self.zero)

    def values(self) -> torch.Tensor:
        """Return what its codes stand for, float32 (N, K)."""
        assert self.scheme.weights is not None
        return values_of(self.codes, self.scheme.weights, self.scale, self.zero)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) → (..., N), in the dtype of ``x``."""
        scheme, dtype = self.scheme, x.dtype
        wide = x.float() if self.smooth is None else x.float() / self.smooth
        if scheme.activations is None:
            return nn.functional.linear(wide.to(dtype), self.values().to(dtype), bias)
        limits = None
        if scheme.static:
            assert self.limits is not None
            shape = (1,) * wide.ndim
            least, most = (torch.full(shape, x, device=wide.device) for x in self.limits)
            limits = least, most
        scale, zero = scales_of(wide, scheme.activations, limits=limits)
        codes = _less(codes_of(wide, scheme.activations, scale, zero), zero)
        if self.watch is not None:
            rounded = codes
            if wide.dtype == torch.float64:  # before rounding: how near is a tie?
                steps = torch.where(scale == 0, 1.0, scale)
                rounded = grouped(wide, scheme.activations) / steps
                if zero is not None:  # the range ends where it puts it
                    low, high = scheme.activations.ends
                    rounded = rounded.clamp(low - zero, high - zero)
                rounded = rounded.reshape(wide.shape)
            given = self.watch(codes, rounded)
            codes = codes if given is None else given.to(codes)
        both = scheme.weights, scheme.activations
        # whole numbers on both sides, and one scale a row
        if all(q is not None and not q.is_float and q.per != "group" for q in both):
            weights = _less(self.codes, self.zero).float()
            # the largest product of two codes, zero points taken off
            largest = math.prod(
                int(-q.ends[0] if q.symmetric else q.ends[1] - q.ends[0]) for q in both if q
            )
            out = exact_product(codes.float(), weights, most=largest)
            out = out * scale * self.scale.squeeze(-1)
        else:
            values = values_of(codes, scheme.activations, scale)
            out = nn.functional.linear(values, self.values())
        if bias is not None:
            out = out + bias.float()
        return out.to(dtype)


def _less(codes: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Codes without their zero point: a choice of its own, which would move those of a row."""
    return codes if zero is None else (codes.to(torch.int16) - zero).to(torch.int16)


class _InPlace(TorchFunctionMode):
    """Products with some weights, wherever a module's own forward makes them."""

    def __init__(self, owner: nn.Module, weights: Weights) -> None:
        super().__init__()
        self._table = {}
        for name, quantized in weights.items():
            parameter = owner._parameters[name]
            assert parameter is not None
            self._table[parameter.untyped_storage().data_ptr()] = parameter, quantized

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and len(args) >= 2:
            weight = args[1]
            codes = self._table.get(weight.untyped_storage().data_ptr())
            if codes is not None and weight.shape == codes[0].shape[-2:]:
                parameter, quantized = codes
                number = (weight.storage_offset() - parameter.storage_offset()) // weight.numel()
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return quantized[number].product(args[0], bias)
        return func(*args, **kwargs)


def put_in(module: nn.Module, weights: Weights) -> None:
    """Make a module's own forward multiply with ``weights``. Its class becomes one of the name
    ``Quantized...``; parameters, hooks and place stay. ``take_out`` undoes it."""
    take_out(module)
    module.__dict__["_quantized"] = weights
    match weights.get("weight"):
        case [QuantizedWeight() as weight] if weight.scheme.activations is not None:
            module.__dict__[INPUT] = weight
    kind: Any = type(module)
    module.__class__ = _class_for(kind)


def take_out(module: nn.Module) -> None:
    """Undo ``put_in``, where it was done."""
    module.__dict__.pop(INPUT, None)
    if module.__dict__.pop("_quantized", None) is not None:
        module.__class__ = type(module).__mro__[1]


@functools.cache
def _class_for(kind: Any) -> Any:
    plain = issubclass(kind, nn.Linear) or is_transposed(kind)
    return type(
        f"Quantized{kind.__name__}",
        (kind,),
        {
            "forward": _linear_forward if plain else _own_forward,
        },
    )


def is_transposed(kind: type) -> bool:
    """Does this layer of transformers hold its weight as (K, N)?"""
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _linear_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self._quantized["weight"][0].product(input, self.bias)
    return out


def _own_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _InPlace(self, self._quantized):
        return super(type(self), self).forward(*args, **kwargs)


# Keys and values that go through codes before a cache of transformers holds them.

CacheWatch = Callable[[int, str, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(layer, ``k`` or ``v``, codes, what is recorded of them) → the codes to go on with, or None for
the own ones; all (B, heads, T, D)."""


class QuantizedCache:
    """Says what stands between a model and its caches; a scale for each token and head."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.filled: set[int] = set()
        """The numbers of the layers that filled a cache."""
        self.watch: CacheWatch | None = None
        """Told of the codes of each layer's keys and values, and may give others to go on with."""

    def through(self, layer: int, what: str, x: torch.Tensor) -> torch.Tensor:
        """Keys or values (B, heads, T, D), as the cache is to hold them."""
        self.filled.add(layer)
        wide = x.float()
        scale, zero = scales_of(wide, self.quantizer)
        codes = codes_of(wide, self.quantizer, scale, zero)
        if self.watch is not None:
            scaled = codes
            if wide.dtype == torch.float64:  # before rounding: how near is a tie?
                scaled = wide / torch.where(scale == 0, 1.0, scale)
            given = self.watch(layer, what, codes, scaled)
            codes = codes if given is None else given.to(codes)
        return values_of(codes, self.quantizer, scale, zero).to(x.dtype)


# A model under a scheme: which of its matrices are quantised, and putting that in and out.
#
# A matrix has the name of its module, with the parameter behind it where that is not ``weight``
# (``model.layers.3.mlp.experts.down_proj``: all experts' together). Quantised are the matrices of
# the blocks. Kept as they are, unless asked for: the head, routers (they decide which expert a
# token goes to, and are small), embeddings and norms.


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
    target: QuantizationTarget, scheme: Scheme, calibration: Calibration | None = None
) -> list[QuantizedWeight]:
    """A target's matrices under the scheme. Raises UsageError for weights that are not finite, for
    groups that do not divide their rows, and for static scales that no calibration gave."""
    limits = None if calibration is None else calibration.limits.get(target.name)
    if scheme.static and limits is None:
        raise UsageError(
            f"{target.name}: nothing entered it during calibration, so it has no static scale",
            hint=f"more prompts, a dynamic scheme, or --keep {target.name}",
        )
    norm = None if calibration is None else calibration.fed_by.get(target.name)
    scales = None if calibration is None or norm is None else calibration.scales.get(norm)
    made = []
    for number, weight in enumerate(target.matrices):
        if not bool(torch.isfinite(weight).all()):
            at = f" (matrix {number})" if len(target.matrices) > 1 else ""
            raise UsageError(
                f"{target.name}{at} holds weights that are not finite: no scale fits them",
                hint="the checkpoint is damaged; or keep the module in floating point",
            )
        smooth = None if scales is None else torch.tensor(scales, device=weight.device)
        try:
            made.append(QuantizedWeight(weight, scheme, smooth=smooth, limits=limits))
        except UsageError as error:
            error.where = target.name
            raise
    return made


def install(weights: Mapping[str, tuple[QuantizationTarget, Sequence[StoredWeight]]]) -> None:
    """Put matrices in place of targets' own, by name; of every module all at once."""
    by_module: dict[int, tuple[nn.Module, dict[str, Sequence[StoredWeight]]]] = {}
    for target, matrices in weights.values():
        module, own_weights = by_module.setdefault(id(target.module), (target.module, {}))
        own_weights[target.parameter] = matrices
    for module, own_weights in by_module.values():
        put_in(module, own_weights)


def uninstall(model: nn.Module) -> None:
    """The model's own matrices again."""
    for module in model.modules():
        take_out(module)


def use_plain_experts(model: Any) -> None:
    """Have experts multiplied one by one: the other ways do not go through ``linear``."""
    change = getattr(model, "set_experts_implementation", None)
    if change is not None and any(t.part == "experts" for t in targets_of(model).values()):
        change("eager")


# Calibration: what enters each matrix, seen while the model runs in floating point.
#
# *Static scales* come from the least and the largest number that entered. The largest of n tokens
# is exceeded by the next one with probability 1 / (n + 1) at either end (tokens alike), so few
# prompts give scales that clip.
#
# *Migration* (SmoothQuant; Xiao et al., arXiv 2211.10438, equation 4) moves outlier channels from
# activations into weights: s_j = max|X_j|^α / max|W_j|^(1 - α) for each channel j; inputs are
# divided by s and columns of W multiplied with it, which leaves X Wᵀ as it is. s is one for all
# matrices that read the output of one norm, where it can be folded into the norm's weight; others
# are left alone.
#
# What a run needs again on another machine stands in its manifest with three digits, and those are
# what is used.

_LEAST = 1e-5
"""Of scales and of maxima of weights, as in SmoothQuant's own code."""


class CalibrationWatch:
    """Says what entered one target's matrices."""

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

    def __init__(
        self, weight: torch.Tensor, watch: CalibrationWatch, norms: Mapping[int, str]
    ) -> None:
        self._weight, self._watch, self._norms = weight, watch, norms

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self._watch.see(x, self._norms.get(x.untyped_storage().data_ptr()))
        return nn.functional.linear(x, self._weight, bias)


@contextmanager
def watching(
    model: nn.Module,
    targets: Mapping[str, QuantizationTarget],
    kind: type[CalibrationWatch] = CalibrationWatch,
) -> Iterator[dict[str, CalibrationWatch]]:
    """Watch the targets while the model runs; what was installed is out afterwards."""
    norms: dict[int, str] = {}
    outputs: dict[str, torch.Tensor] = {}

    def seen(path: str) -> Any:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            if isinstance(out, torch.Tensor):
                outputs[path] = out  # so that no other tensor comes to lie there meanwhile
                norms.clear()
                norms.update({t.untyped_storage().data_ptr(): p for p, t in outputs.items()})

        return hook

    watches = {name: kind() for name in targets}
    install(
        {
            name: (target, [_Watched(w, watches[name], norms) for w in target.matrices])
            for name, target in targets.items()
        }
    )
    with ExitStack() as stack:
        stack.callback(uninstall, model)
        for path, module in model.named_modules():
            kind_and_name = type(module).__name__.lower(), path.rpartition(".")[2].lower()
            if any("norm" in word for word in kind_and_name):
                stack.enter_context(module.register_forward_hook(seen(path)))
        yield watches


def calibration_of(
    watches: Mapping[str, CalibrationWatch],
    targets: Mapping[str, QuantizationTarget],
    scheme: Scheme,
) -> Calibration:
    """Return what the scheme needs of what was seen. ``targets``: those that are quantised."""
    seen = {name: watch for name, watch in watches.items() if name in targets}
    fed_by: dict[str, str] = {}
    scales: dict[str, list[float]] = {}
    if scheme.smooth is not None:
        # the norm that a matrix reads, where it always was one and the same
        alone = {name: next(iter(w.fed_by)) for name, w in seen.items() if len(w.fed_by) == 1}
        fed_by = {name: norm for name, norm in alone.items() if norm is not None}
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
    return Calibration(num_tokens=num_tokens, limits=limits, scales=scales, fed_by=fed_by)


def _migration(
    group: list[str],
    watches: Mapping[str, CalibrationWatch],
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
