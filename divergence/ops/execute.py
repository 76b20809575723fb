"""One recorded operator, run again alone: on this machine, in its own dtype or in float64.

Operands are laid out in fresh memory as the operator saw them, arguments are rebuilt by its schema
(ops.arguments), and what it returns or writes comes back contiguous on the CPU. An operator that
writes in place writes into its own copy.

In float64 every floating-point operand is widened first and the operator runs under
``recording.widening``, so that ``dtype=`` arguments and casts inside composite operators are
widened too. Operators whose kernels have no float64 are written out below: fused attention is
softmax(scale·q·kᵀ + mask)·v by its definition (Vaswani et al. 2017), with the causal mask aligned
at the top left as torch defines it; scaled matrix products are those of their dequantised operands.
These take the call's arguments by name, floating-point ones widened already. Integer results
(argmax, top-k indices) are then the float64 computation's as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from divergence.errors import first_line
from divergence.ops.allowed import (
    Refusal,
    check_namespace,
    check_operator,
    find_operator,
    is_uninitialised,
    short_name,
    suite_function,
)
from divergence.ops.arguments import check_names, decoded, fitted, laid_out
from divergence.ops.backward import BACKWARD_DEFINITIONS, attention_scores
from divergence.ops.bounds import Checking, check_bounds
from divergence.ops.fitting import Bound
from divergence.recording.hooks.arguments import draws_random_numbers, written_arguments
from divergence.recording.hooks.dataflow import tensors_in
from divergence.recording.widening import Widening
from divergence.run.schema.fingerprint import plain_tensor
from divergence.run.schema.manifest import NO_TENSOR
from divergence.run.schema.record import Call, Operand

__all__ = ["RANDOM", "UNINITIALISED", "execute_ports"]

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
    laid = [
        _prepared(value, operand, device, compute_dtype, aligned=aligned)
        for value, operand in zip(operands, call.operands, strict=True)
    ]
    if call.operator.startswith("suite."):
        return _suite(call, laid, device, compute_dtype)
    operator = find_operator(call.operator)
    args, kwargs = fitted(operator, call.arguments, laid, device)
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    bound = dict(zip(names, args, strict=True)) | kwargs
    if draws_random_numbers(operator, bound):
        raise Refusal(RANDOM)
    check_operator(operator)
    check_bounds(operator, bound)
    results = _run(call, operator, args, kwargs, bound, device, compute_dtype)
    written = [
        tensor for name in written_arguments(operator) for tensor in tensors_in(bound.get(name))
    ]
    return _by_port(results, written, call.operator)


def _prepared(
    value: torch.Tensor,
    operand: Operand,
    device: str | torch.device,
    compute_dtype: torch.dtype | None,
    *,
    aligned: bool,
) -> torch.Tensor:
    if compute_dtype is not None:
        aligned = True
        if value.is_floating_point() and value.itemsize >= 2:  # 8-bit codes stay what they are
            value = value.to(compute_dtype)
        elif value.is_complex():
            value = value.to(_COMPLEX[compute_dtype])
    return laid_out(
        value,
        operand.stride,
        device=device,
        misalignment_bytes=0 if aligned else operand.misalignment_bytes,
    )


def _run(
    call: Call, operator: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any],
    bound: dict[str, Any], device: str | torch.device, compute_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    name, where = short_name(call.operator), torch.device(device).type
    if compute_dtype is None:
        with _refusals(f"{name} does not run on {where}"):
            return operator(*args, **kwargs)
    dtype = str(compute_dtype).removeprefix("torch.")
    with _refusals(f"{name} has no {dtype} kernel on {where}"), Widening(compute_dtype):
        own = _DEFINITIONS.get(call.operator)
        if own is None:
            return operator(*args, **kwargs)
        with Checking():
            return own(bound, call.operands)


@contextlib.contextmanager
def _refusals(why: str) -> Iterator[None]:
    """What a kernel raises, as a Refusal."""
    try:
        with torch.no_grad():
            yield
    except torch.OutOfMemoryError as error:
        raise Refusal("it does not fit into memory", detail=first_line(error)) from error
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError) as error:
        raise Refusal(why, detail=first_line(error)) from error


def _suite(
    call: Call,
    tensors: list[torch.Tensor],
    device: str | torch.device,
    compute_dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """An operator of a suite: its named implementation, or its float64 definition."""
    function = suite_function(call.operator, truth=compute_dtype is not None)
    values = {name: decoded(value, tensors, device) for name, value in call.arguments.items()}
    with _refusals(f"{call.operator} does not run on {torch.device(device).type}"), Checking():
        results = function(**values)
    return _by_port(results, [], call.operator)


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


def _attention(bound: Bound, _: Sequence[Operand]) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, logsumexp). q (B, H, T, D), k and v (B, G, S, D) with H a multiple of G."""
    query, key, value = bound["query"], bound["key"], bound["value"]
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=-3)
        value = value.repeat_interleave(groups, dim=-3)
    scores = attention_scores(bound, query, key)[0]
    return torch.softmax(scores, -1) @ value, scores.logsumexp(-1)


def _softmax(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    """``half_to_float`` asks for a float32 result of narrower input: here all is wide."""
    return torch.softmax(bound["self"], bound["dim"])


def _log_softmax(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    return torch.log_softmax(bound["self"], bound["dim"])


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


_DEFINITIONS: dict[str, Definition] = {
    **{
        f"aten._scaled_dot_product_{name}.default": _attention
        for name in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    **BACKWARD_DEFINITIONS,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _log_softmax,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._scaled_mm.default": _scaled_mm,
    "aten._weight_int8pack_mm.default": _int8pack,
}
