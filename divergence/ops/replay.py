"""Recorded calls, executed again from their recorded operands."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from divergence.errors import UsageError, first_line
from divergence.numerics.formats import format_named
from divergence.ops.allowed import (
    Refusal,
    Unsafe,
    asked_for,
    check_namespace,
    check_operator,
    find_operator,
    is_function,
    is_uninitialised,
    plain_function,
    schema_name,
    short_name,
)
from divergence.ops.bounds import FUSED_ATTENTION, Bound, Checking, check_bounds
from divergence.ops.weights import Weights
from divergence.recording.dispatch import draws_random_numbers, tensors_in, written_arguments
from divergence.recording.machine import deterministic_settings, resolve_device
from divergence.recording.new_run import check_output, probed, provenance
from divergence.recording.request import plain_arguments, taken_from
from divergence.recording.widening import Widening
from divergence.run.captured import CapturedTensor
from divergence.run.command import command_line
from divergence.run.contents import call_passes
from divergence.run.manifest import NO_TENSOR, Manifest, Plan, plain_tensor
from divergence.run.reader import Run
from divergence.run.record import Call, Operand, PassName, Record
from divergence.run.site import compile_patterns, did_you_mean
from divergence.run.storage import location_of
from divergence.run.trust import recorded_seed
from divergence.run.writer import RunWriter
from divergence.words import Progress, silent

# Arguments: a recorded call's JSON and tensors as the values that the operator takes.
#
# The operator's own schema gives order and defaults; the recorded device is replaced by the one at
# hand. Kernels are chosen by layout, and so is the order of their additions: recorded values, which
# lie contiguous on disk, are put back under the strides that the operator saw, and axes that share
# memory (stride 0) share it again. So is the address: vector kernels handle what lies before the
# first aligned element apart, and where memory begins modulo 64 bytes changes the order of
# additions (a float32 matrix-vector product gives four results by the weight's address:
# benchmarks/alignment.py; weights mapped from a safetensors file are not aligned). Always fresh
# memory, so that an operator may write to it.

_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def decoded(value: Any, tensors: Sequence[Any], device: str | torch.device) -> Any:
    """One recorded argument as a Python value; ``{"tensor": n}`` is ``tensors[n]``."""
    if isinstance(value, list):
        return [decoded(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "tensor" and type(inner) is int and 0 <= inner < len(tensors):
            return tensors[inner]
        if kind == "device":
            return torch.device(device)
        if kind == "float" and isinstance(inner, str) and inner in _FLOATS:
            return _FLOATS[inner]
        if kind == "complex" and isinstance(inner, list) and len(inner) == 2:
            parts = [decoded(part, tensors, device) for part in inner]
            if all(isinstance(part, int | float) for part in parts):
                return complex(*parts)
        if kind in _KINDS and isinstance(inner, str):
            constant = getattr(torch, inner.removeprefix("torch."), None)
            if isinstance(constant, _KINDS[kind]):
                return constant
            raise Refusal(f"this torch has no {kind} {inner}")
    raise Refusal("its arguments cannot be read", detail=repr(value)[:80])


def check_names(call: Call) -> None:
    """Are all arguments of the call its operator's, by torch's schema or a domain's own function?
    Raises Refusal, which names the first that is not, or where there is no such operator."""
    if is_function(call.operator):
        function = plain_function(call.operator, truth=True)  # one that runs may take any
        parameters = inspect.signature(function).parameters.items()
        names = {name for name, kind in parameters if kind.kind is not kind.KEYWORD_ONLY}
    else:
        names = {argument.name for argument in find_operator(call.operator)._schema.arguments}
    strange = sorted(name for name in call.arguments if name not in names)
    if strange:
        name = call.operator if is_function(call.operator) else short_name(call.operator)
        raise Unsafe(f"{name} has no argument {strange[0][:80]!r} here")


def fitted(
    operator: torch._ops.OpOverload,
    arguments: Mapping[str, Any],
    tensors: Sequence[Any],
    device: str | torch.device,
) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a call of the operator, by its schema. Raises Refusal where one is missing
    that this torch's operator needs."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        if argument.name in arguments:
            value = decoded(arguments[argument.name], tensors, device)
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise Refusal(
                f"{schema_name(operator)} needs an argument {argument.name!r} in this torch"
            )
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


ALIGNED_BYTES = 64
"""A cache line: what torch's CPU allocator aligns to (others to more)."""
SPAN_BYTES = 1 << 30
"""A layout may span this much memory, or ``SPAN_RATIO`` times what the values take."""
SPAN_RATIO = 64


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, both counted; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def laid_out(
    values: torch.Tensor,
    stride: Sequence[int] | None,
    *,
    device: str | torch.device = "cpu",
    misalignment_bytes: int = 0,
) -> torch.Tensor:
    """A fresh copy of ``values`` on ``device`` under ``stride`` (None: contiguous)."""
    shape = tuple(values.shape)
    if stride is None or 0 in shape:
        stride = contiguous_stride(shape)
    if len(stride) != len(shape):
        raise Unsafe("its operands' layout is damaged", detail=f"{stride} for shape {shape}")
    span = span_of(shape, stride)
    if span * values.itemsize > max(SPAN_BYTES, SPAN_RATIO * values.nbytes):
        raise Unsafe("its operands' layout spans too much memory", detail=f"{span} elements")
    room = ALIGNED_BYTES // values.itemsize
    memory = torch.zeros(span + room, dtype=values.dtype, device=device)
    # torch aligns what it allocates; an address between two elements cannot be had
    start = (misalignment_bytes - memory.data_ptr()) % ALIGNED_BYTES // values.itemsize
    fresh = memory.as_strided(shape, stride, start)
    if not _overlaps(shape, stride):
        fresh.copy_(values)
        return fresh
    # Elements that share memory: all of them hold the same value, so any may be the last written.
    places = torch.full(shape, start, dtype=torch.int64)
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        view = [1] * len(shape)
        view[axis] = size
        places += (torch.arange(size) * step).reshape(view)
    memory[places.reshape(-1).to(device)] = values.reshape(-1).to(device)
    return fresh


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major: ``(2, 3, 4)`` → ``(12, 4, 1)``."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """May two elements lie at one place? (Sorted by stride, each axis must step over the last.)"""
    reach = 0
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


# Recorded calls of a run: where they stand, and the values that their operands had.

_PASSES: tuple[PassName, ...] = ("anchored", "free")
NO_WEIGHT = "its weight was not stored (capture --weights, or --model PATH)"
OTHER_WEIGHT = "--model has another weight of that name"
NO_VALUE = "the value of an operand was not recorded"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call: the record of its first result, and those of all its results by port."""

    first: Record
    results: dict[str, Record]

    @property
    def call(self) -> Call:
        assert self.first.call is not None
        return self.first.call

    @property
    def path(self) -> str:
        """``model.layers.3.mlp/aten.mm#2``."""
        return self.first.site.partition(":")[0]


def replayable_pass(run: Run, wanted: str | None = None) -> PassName:
    """The pass whose operators are run again: the anchored one if it holds any, else the free one.
    Raises UsageError where the run holds none."""
    passes: set[PassName] = call_passes(run.records)
    if run.manifest.plan.replayed_pass is not None:
        raise UsageError(
            f"{run.path} is a replay itself",
            hint=f"give the run whose operators it ran again ({run.manifest.plan.anchored_to})",
        )
    if wanted is not None:
        if wanted not in passes:
            raise UsageError(
                f"{run.path} holds no operators of a pass {wanted!r}",
                hint=f"it holds {', '.join(sorted(passes))}" if passes else _make(run),
            )
        return wanted
    for name in _PASSES:
        if name in passes:
            return name
    raise UsageError(
        f"{run.path} holds no operators"
        + (f", only those of the {', '.join(sorted(passes))} pass" if passes else ""),
        hint=command_line("replay", run.path, o="RUN2", pass_="escalated")
        if "escalated" in passes
        else _make(run),
    )


def _make(run: Run) -> str:
    block = next(
        (path for path, note in run.manifest.plan.modules.items() if note.role == "block"), "MODULE"
    )
    return command_line("capture", like=run.path, o="RUN2", sites=f"ops@{block}", weights=True)


def recorded_calls(run: Run, pass_: str, sites: Sequence[str] = ()) -> list[RecordedCall]:
    """The calls of one pass in the order of capture; ``sites``: patterns of what is wanted. Raises
    UsageError where the patterns match none."""
    results: dict[tuple[int, int, str, int], dict[str, Record]] = {}
    firsts: dict[tuple[int, int, str, int], Record] = {}
    for record in run.records:
        path, _, port = record.site.partition(":")
        if record.pass_ != pass_ or "/" not in path or not port.startswith("out"):
            continue
        key = (record.sample, record.step, path, record.rank)
        results.setdefault(key, {})[port] = record
        if record.call is not None:
            firsts[key] = record
    calls = [RecordedCall(first, results[key]) for key, first in firsts.items()]
    if sites:
        matches = compile_patterns(sites)
        kept = [
            call
            for call in calls
            if any(matches(record.site) for record in call.results.values()) or call.path in sites
        ]
        if not kept:
            raise UsageError(
                f"no operator at {', '.join(sites)} in {run.path}",
                hint=did_you_mean(sites[0], {call.first.site for call in calls})
                or f"`{command_line('inspect', run.path, v=True)}` lists the sites",
            )
        calls = kept
    return calls


def operand_values(run: Run, call: RecordedCall, weights: Weights | None) -> list[torch.Tensor]:
    """The values of the call's operands, each in its shape; their layout is not restored. Raises
    Refusal where one is not there."""
    return [operand_value(run, call.first, operand, weights) for operand in call.call.operands]


def operand_value(run: Run, at: Record, operand: Operand, weights: Weights | None) -> torch.Tensor:
    """One operand of the call that stands on the record ``at``. Raises Refusal where it is not
    there."""
    if operand.site is not None:
        record = run.find((at.pass_, at.sample, at.step, operand.site))
        if record is None:
            if operand.weight is None:
                raise Refusal(NO_VALUE, detail=operand.site)
        elif record.dtype != operand.dtype:
            raise Refusal("an operand was recorded in another dtype", detail=operand.site)
        elif operand.weight is not None and record.xxh3 == operand.xxh3:
            return _part(run.read(record), operand)  # the whole weight was stored
        elif record.numel != math.prod(operand.shape):
            raise Refusal("an operand was recorded in another shape", detail=operand.site)
        else:
            return run.read(record).reshape(operand.shape)
    if operand.weight is None:
        raise Refusal(NO_VALUE)
    if weights is None:
        raise Refusal(NO_WEIGHT, detail=operand.weight)
    weight = weights.find(operand.weight, format_named(operand.dtype).torch_dtype, operand.xxh3)
    if weight is None:
        raise Refusal(OTHER_WEIGHT, detail=operand.weight)
    return _part(weight, operand)


def _part(weight: torch.Tensor, operand: Operand) -> torch.Tensor:
    """The operand as a view of its weight."""
    stride = contiguous_stride(operand.shape) if operand.stride is None else operand.stride
    flat = weight.contiguous().reshape(-1)
    if len(stride) != len(operand.shape) or (
        operand.offset + span_of(operand.shape, stride) > flat.numel()
    ):
        raise Refusal("an operand lies outside its weight", detail=operand.weight)
    return flat.as_strided(operand.shape, stride, operand.offset)


# One recorded operator, run again alone: on this machine, in its own dtype or in float64.
#
# What it returns or writes comes back contiguous on the CPU. In float64 every floating-point
# operand is widened first and the operator runs under ``recording.widening``, so that ``dtype=``
# arguments and casts inside composite operators are widened too. Operators whose kernels have no
# float64 are written out below; they take the call's arguments by name, widened already. Fused
# attention is softmax(scale·q·kᵀ + mask)·v by its definition (Vaswani et al. 2017), the causal mask
# aligned at the top left as torch defines it; scaled matrix products are those of their dequantised
# operands.
#
# Of a backward g is the gradient of the loss by the forward's result. Of a softmax
# y = exp(x) / Σ exp(x) the gradient by x is y · (g - Σ g·y), of its logarithm g - exp(y) · Σ g. Of
# fused attention it is made of the result and of the logarithm of the sum that the forward kept:
# P = exp(scale·q·kᵀ + mask - logsumexp), dv = Pᵀ·g, dS = P · (g·vᵀ - Σ g·out), dq = scale · dS·k,
# dk = scale · dSᵀ·q (Dao et al. 2022, algorithm 4, without its tiles).

RANDOM = "draws random numbers"
UNINITIALISED = "its result is uninitialised memory: nothing to compare"

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def execute_ports(
    call: Call,
    operands: Sequence[torch.Tensor],
    *,
    device: str | torch.device,
    compute_dtype: torch.dtype | None = None,
    aligned: bool = False,
    namespaces: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The results of ``call`` on ``operands``, by port: ``out``, then ``out.N`` with N
    the number among the tensors.

    ``operands``: the values of ``call.operands``, in any layout; those that the call names are
    restored. ``aligned``: not their addresses (another kind of device has its own).
    ``namespaces``: of operators that may be run beside torch's own; None: any that this process
    has. Raises Refusal with the reason where it cannot be run or would prove nothing, and Unsafe
    where it could reach beyond its operands.
    """
    if call.note is not None:
        raise Refusal(call.note)
    if is_uninitialised(call.operator):
        raise Refusal(UNINITIALISED)
    check_namespace(call.operator, namespaces)
    check_names(call)
    laid = []
    for value, operand in zip(operands, call.operands, strict=True):
        wide = value
        if compute_dtype is not None and value.is_complex():
            wide = value.to(_COMPLEX[compute_dtype])
        elif compute_dtype is not None and value.is_floating_point() and value.itemsize >= 2:
            wide = value.to(compute_dtype)  # 8-bit codes stay what they are
        address = 0 if aligned or compute_dtype is not None else operand.misalignment_bytes
        laid.append(laid_out(wide, operand.stride, device=device, misalignment_bytes=address))
    if is_function(call.operator):  # its usual implementation, or its float64 definition
        function = plain_function(call.operator, truth=compute_dtype is not None)
        values = {name: decoded(value, laid, device) for name, value in call.arguments.items()}
        why = f"{call.operator} does not run on {torch.device(device).type}"
        with _refusals(why), Checking():
            results = function(**values)
        return _by_port(results, [], call.operator)
    operator = find_operator(call.operator)
    args, kwargs = fitted(operator, call.arguments, laid, device)
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    bound = dict(zip(names, args, strict=True)) | kwargs
    if draws_random_numbers(operator, bound):
        raise Refusal(RANDOM)
    check_operator(operator)
    check_bounds(operator, bound)
    name, where = short_name(call.operator), torch.device(device).type
    if compute_dtype is None:
        with _refusals(f"{name} does not run on {where}"):
            results = operator(*args, **kwargs)
    else:
        dtype, own = str(compute_dtype).removeprefix("torch."), _DEFINITIONS.get(call.operator)
        with _refusals(f"{name} has no {dtype} kernel on {where}"), Widening(compute_dtype):
            if own is None:
                results = operator(*args, **kwargs)
            else:
                with Checking():
                    results = own(bound, call.operands)
    written = [
        tensor for name in written_arguments(operator) for tensor in tensors_in(bound.get(name))
    ]
    return _by_port(results, written, call.operator)


@contextlib.contextmanager
def _refusals(why: str) -> Iterator[None]:
    """Raise what a kernel raises as a Refusal."""
    try:
        with torch.no_grad():
            yield
    except torch.OutOfMemoryError as error:
        raise Refusal("it does not fit into memory", detail=first_line(error)) from error
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError) as error:
        raise Refusal(why, detail=first_line(error)) from error


def _by_port(results: Any, written: list[torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The tensors of the results as capture numbers them; what was written where none is given."""
    tensors = tensors_in(results) or written
    if not tensors:
        raise Refusal(f"{short_name(name)} {NO_TENSOR}")
    ports = ["out", *(f"out.{number}" for number in range(1, len(tensors)))]
    return {
        port: plain_tensor(tensor.detach()) for port, tensor in zip(ports, tensors, strict=True)
    }


Definition = Callable[[Bound, Sequence[Operand]], Any]


def _attention_scores(
    bound: Bound, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """(scale·q·kᵀ + mask, scale), the causal mask aligned at the top left as torch defines it."""
    if bound.get("dropout_p"):
        raise NotImplementedError("attention with dropout")
    scale = bound.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale  # (B, H, T, S)
    if bound.get("is_causal"):
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    mask = bound.get("attn_mask", bound.get("attn_bias"))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores, scale


def _attention(bound: Bound, _: Sequence[Operand]) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, logsumexp). q (B, H, T, D), k and v (B, G, S, D) with H a multiple of G."""
    query, key, value = bound["query"], bound["key"], bound["value"]
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=-3)
        value = value.repeat_interleave(groups, dim=-3)
    scores = _attention_scores(bound, query, key)[0]
    return torch.softmax(scores, -1) @ value, scores.logsumexp(-1)


def _rms_norm(bound: Bound, operands: Sequence[Operand]) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, 1/rms). Without eps it is that of what torch computes the norm in: float32 for
    narrower inputs."""
    values, weight, eps = bound["input"], bound.get("weight"), bound.get("eps")
    if eps is None:
        wide = operands and operands[0].dtype == "float64"
        eps = torch.finfo(torch.float64 if wide else torch.float32).eps
    axes = tuple(range(-len(bound["normalized_shape"]), 0))
    inverse = (values.square().mean(axes, keepdim=True) + eps).rsqrt()
    normed = values * inverse
    return normed if weight is None else normed * weight, inverse


def _scaled_mm(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    """(M, K) × (K, N) codes with a scale each per tensor, per row (M, 1) or column (1, N)."""
    left, right = bound["self"].double(), bound["mat2"].double()
    a, b = bound["scale_a"], bound["scale_b"]
    fits = (a.numel() == 1 or tuple(a.shape) == (left.shape[0], 1)) and (
        b.numel() == 1 or tuple(b.shape) == (1, right.shape[1])
    )
    if not fits or bound.get("scale_result") is not None:
        raise NotImplementedError("a scaled matrix product with scales in blocks")
    out: torch.Tensor = (left @ right) * a * b
    return out if bound.get("bias") is None else out + bound["bias"]


def _int8pack(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    """(M, K) × int8 codes (N, K)ᵀ, scaled by column."""
    out: torch.Tensor = (bound["self"] @ bound["mat2"].double().t()) * bound["scales"]
    return out


def _softmax_gradient(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    gradient, result, dim = bound["grad_output"], bound["output"], bound["dim"]
    out: torch.Tensor = result * (gradient - (gradient * result).sum(dim, keepdim=True))
    return out


def _log_softmax_gradient(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    gradient, result, dim = bound["grad_output"], bound["output"], bound["dim"]
    out: torch.Tensor = gradient - result.exp() * gradient.sum(dim, keepdim=True)
    return out


def _attention_gradient(
    bound: Bound, _: Sequence[Operand]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(by q, by k, by v)."""
    gradient, query, key, value = (bound[n] for n in ("grad_out", "query", "key", "value"))
    scores, scale = _attention_scores(bound, query, key)
    sums = bound["logsumexp"].unsqueeze(-1)
    weights = (scores - sums).exp().masked_fill(~sums.isfinite(), 0.0)
    along = (gradient * bound["out"]).sum(-1, keepdim=True)
    by_scores = weights * (gradient @ value.transpose(-2, -1) - along) * scale
    by_key = by_scores.transpose(-2, -1) @ query
    return by_scores @ key, by_key, weights.transpose(-2, -1) @ gradient


_DEFINITIONS: dict[str, Definition] = {
    **{f"aten.{name}.default": _attention for name in FUSED_ATTENTION},
    "aten._softmax_backward_data.default": _softmax_gradient,
    "aten._log_softmax_backward_data.default": _log_softmax_gradient,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_gradient,
    # ``half_to_float`` asks for a float32 result of narrower input: here all is wide
    "aten._softmax.default": lambda bound, _: torch.softmax(bound["self"], bound["dim"]),
    "aten._log_softmax.default": lambda bound, _: torch.log_softmax(bound["self"], bound["dim"]),
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._scaled_mm.default": _scaled_mm,
    "aten._weight_int8pack_mm.default": _int8pack,
}


# replay(): each recorded operator of a run, run again alone on its recorded inputs.
#
# No model is needed, and no error is inherited: any difference was made by that operator on this
# machine. The result is a run of the pass ``replayed`` at the same sites, without the inputs. What
# cannot be run again alone is counted by reason in ``plan.skipped_operators``. On the same machine
# under the same settings a replay gives the recorded bits: the recording is complete.

_SHOWN = 3  # particulars named behind a reason


def replay(
    run: str | Path | Run,
    *,
    out: str | Path,
    sites: Sequence[str] = (),
    device: str = "auto",
    model: str | Path | None = None,
    truth: bool = False,
    replayed_pass: str | None = None,
    trust_remote_code: bool = False,
    operators: Sequence[str] = (),
    label: str | None = None,
    force: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run the recorded operators of ``run`` again and record them in the directory ``out``.

    ``sites``: patterns of operator sites; all without. ``model``: where this machine has the
    model, for weights that were recorded by digest alone. ``truth``: in float64, on the CPU
    unless a device is named. ``replayed_pass``: the pass whose operators are run; the anchored one
    where it holds any, else the free one. ``operators``: namespaces of operators that may be run
    beside torch's, transformers' and the device's own.

    Raises UsageError for a run without operators and for sites that it does not hold,
    RunFormatError, ModelError (of ``model``), RunExistsError and RunWriteError. Whatever
    interrupts it, a readable run is left behind.
    """
    given = plain_arguments(
        sites=sites,
        device=device,
        trust_remote_code=trust_remote_code,
        label=label,
        force=force,
        command=command,
    )
    sites, device = given["sites"], given["device"]
    source = Run.open(run)
    if source.manifest.settings.compute_dtype is not None:
        raise UsageError(
            f"{source.path} was computed in {source.manifest.settings.compute_dtype} itself",
            hint="give the run that was captured in the model's own dtype",
        )
    pass_ = replayable_pass(source, replayed_pass)
    calls = recorded_calls(source, pass_, sites)
    device = resolve_device("cpu" if truth and device == "auto" else device)
    place = location_of(out)
    check_output(place, force=force, like=source)
    weights = None
    if model is not None:
        weights = Weights(str(model), source.manifest, trust_remote_code=trust_remote_code)
    recorded = source.manifest
    on_progress: Progress = progress or silent
    seed = recorded_seed(recorded)
    phrases = [f"{len(calls)} operators with their recorded inputs", f"seed {seed}"]
    on_progress("taken", 0, None, taken_from(source.path, phrases))
    with deterministic_settings(
        device.partition(":")[0], seed=seed, enabled=recorded.settings.deterministic
    ) as determinism:
        # the source's model and tokens; this machine's environment and switches
        settings = msgspec.structs.replace(
            recorded.settings,
            device=device,
            device_map=None,
            switches=determinism.switches,
            nondeterministic_warnings=[],
            cpu_fallbacks=[],
            compute_dtype="float64" if truth else None,
        )
        label = label or ("float64 truth" if truth else None)
        manifest = Manifest(
            **provenance(device, command=command, like=recorded, label=label),
            model=recorded.model,
            tokens=recorded.tokens,
            settings=settings,
            arithmetic=[] if truth else probed(device, silent),
            plan=Plan(
                passes=["replayed"],
                sites=list(sites) or recorded.plan.sites,
                steps=recorded.plan.steps,
                positions=recorded.plan.positions,
                anchored_to=recorded.id,
                replayed_pass=pass_,
                modules=recorded.plan.modules,
            ),
        )
        with RunWriter(place, manifest, force=force) as writer:
            skipped = manifest.plan.skipped_operators
            details: dict[str, list[str]] = defaultdict(list)
            for number, call in enumerate(calls):
                on_progress("replay", number, len(calls), call.path)
                try:
                    _run_one(
                        source,
                        call,
                        weights,
                        writer,
                        device,
                        asked_for(operators, device),
                        truth=truth,
                    )
                except Refusal as refusal:
                    skipped[refusal.reason] = skipped.get(refusal.reason, 0) + 1
                    details[refusal.reason] += (
                        [refusal.detail] if refusal.detail is not None else []
                    )
            determinism.note_in(manifest.settings)
            lines = []  # what was left out: one for each reason, with the first few particulars
            for reason, num in skipped.items():
                named = list(dict.fromkeys(details[reason]))
                text = f": {', '.join(named[:_SHOWN])}" if named else ""
                more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
                were = "operator call was" if num == 1 else "operator calls were"
                lines.append(f"{num} {were} not run again: {reason}{text}{more}")
            for text in lines:
                on_progress("note", 0, None, text)
            if sum(skipped.values()) == len(calls):
                raise UsageError(
                    f"none of the {len(calls)} operators could be run again",
                    where=lines[0],
                    hint="give --model PATH, or another --device",
                )
            on_progress("replay", len(calls), len(calls), "")
    return Run.open(place)


def _run_one(
    source: Run,
    call: RecordedCall,
    weights: Weights | None,
    writer: RunWriter,
    device: str,
    namespaces: frozenset[str],
    *,
    truth: bool,
) -> None:
    """One operator: its results go to the writer, and nothing of it is kept."""
    if call.first.rank:
        raise Refusal("it was recorded by another process of a distributed run")
    wide = call.first.pass_ == "escalated" and not truth  # as that pass ran it
    with Widening(torch.float32) if wide else contextlib.nullcontext():
        results = execute_ports(
            call.call,
            operand_values(source, call, weights),
            device=device,
            compute_dtype=torch.float64 if truth else None,
            aligned=source.manifest.environment.device_type != device.partition(":")[0],
            namespaces=namespaces,
        )
    missing = sorted(set(call.results) - set(results))
    if missing:
        raise Refusal("it returned other results than were recorded", detail=call.path)
    for port, record in call.results.items():
        writer.put(
            CapturedTensor(results[port]),
            pass_="replayed",
            sample=record.sample,
            step=record.step,
            site=record.site,
            order=record.order,
            positions=record.positions,
            call=record.call,
        )
