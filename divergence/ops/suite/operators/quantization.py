"""Quantisation to int8 and to 8-bit floats, and the linear layer on int8 codes.

Codes are round(·) to the nearest integer, half-way cases to the even one, as torch.round and
IEEE 754's default do; a result outside -128 to 127 is the nearer end.

8-bit floats: e4m3fn has no infinity and ends at 448, e5m2 ends at 57344 (Micikevicius et al.,
"FP8 Formats for Deep Learning", 2022; OCP 8-bit floating point specification 1.0). Beyond the
end the specification allows two conversions, saturating or not (nan in e4m3fn, infinity in e5m2),
and torch's ``.to`` has changed between versions, so the plain cast leaves it open there (nan in the
truth: not judged); the saturating cast clamps first and is judged everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from divergence.numerics.formats import format_named
from divergence.ops.suite.definition import (
    Arguments,
    Implementation,
    Operator,
    OperatorCase,
    Plan,
    TensorSource,
    Unavailable,
    cases_of,
    integers,
    to_tensor,
)

Shape = tuple[int, ...]
_LOW, _HIGH = -128, 127


def _run_quantize(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    scaled = x.float() * scale.float() + offset.float()
    return torch.round(scaled).clamp(_LOW, _HIGH).to(torch.int8)


def _truth_quantize(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """y = round(x · scale + offset), to int8 (the formula of Ascend's quantize operator). scale
    and offset hold one number, or one for each channel of the last axis."""
    return torch.round(x * scale + offset).clamp(_LOW, _HIGH).to(torch.int8)


def _run_dynamic_quant(x: Tensor, smooth: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = x.float() if smooth is None else x.float() * smooth.float()
    scale = wide.abs().amax(-1) / _HIGH
    codes = torch.round(wide / torch.where(scale == 0, 1.0, scale)[..., None])
    return codes.clamp(_LOW, _HIGH).to(torch.int8), scale


def _truth_dynamic_quant(x: Tensor, smooth: Tensor | None) -> tuple[Tensor, Tensor]:
    """scale = rowmax(|x|) / 127, y = round(x / scale), with x · smooth for x where there are smooth
    scales (the formula of Ascend's DynamicQuant). A row of zeros has scale 0 and codes 0."""
    wide = x if smooth is None else x * smooth
    scale = wide.abs().amax(-1) / _HIGH
    codes = torch.round(wide / torch.where(scale == 0, 1.0, scale)[..., None])
    return codes.clamp(_LOW, _HIGH).to(torch.int8), scale


def _run_w8a8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, out_dtype: str
) -> Tensor:
    if x.device.type == "npu":  # torch's own int8 product runs on the CPU there
        there: Tensor = _npu_quant_matmul()(x, weight, x_scale, weight_scale, out_dtype)
        return there
    product = _int_product(x, weight.T).float()
    return (product * x_scale[:, None] * weight_scale).to(getattr(torch, out_dtype))


def _int_product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of int8 codes in int32, exactly. Accelerators want at least 17 rows and even sides."""
    if x.device.type == "cpu":
        return x.int() @ y.int()
    if not hasattr(torch, "_int_mm"):
        raise Unavailable(f"torch {torch.__version__} has no product of int8 on {x.device.type}")
    rows, columns = x.shape[0], y.shape[1]
    wide = x.new_zeros(max(32, -(-rows // 8) * 8), -(-x.shape[1] // 8) * 8)
    wide[:rows, : x.shape[1]] = x
    other = y.new_zeros(-(-columns // 8) * 8, wide.shape[1])  # columns first: cuBLAS wants it so
    other[:columns, : y.shape[0]] = y.T
    return torch._int_mm(wide, other.T)[:rows, :columns]


def _truth_w8a8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, out_dtype: str
) -> Tensor:
    """y_mn = s_m t_n Σ_k x_mk w_nk: int8 codes, exactly summed, one scale for each token and one
    for each output channel."""
    return (x.double() @ weight.double().T) * x_scale[:, None] * weight_scale


_Cast = Callable[[Tensor], Tensor]


def _to_grid(x: Tensor, name: str) -> Tensor:
    """Float64 rounded to the 8-bit format, to nearest even, the range taken as endless."""
    form = format_named(name)
    _, exponent = torch.frexp(x)
    least = round(math.log2(form.smallest_subnormal))
    power = (exponent.double() - 1 - form.mantissa_bits).clamp_min(least)
    step = torch.exp2(power)
    return torch.round(x / step) * step


def _cast(name: str, *, saturating: bool) -> tuple[_Cast, _Cast]:
    """(run, truth) of a cast to the 8-bit format: to the nearest code, ties to even; beyond the
    largest one that code where it is ``saturating``, else open (nan in the truth)."""
    form, dtype = format_named(name), getattr(torch, name)

    def run(x: Tensor) -> Tensor:
        return (x.clamp(-form.max, form.max) if saturating else x).to(dtype)

    def truth(x: Tensor) -> Tensor:
        rounded = _to_grid(x, name)
        if saturating:
            return rounded.clamp(-form.max, form.max).to(dtype)
        return torch.where(rounded.abs() > form.max, math.nan, rounded).to(dtype)

    return run, truth


def _per_tensor(source: TensorSource, shape: Shape) -> Arguments:
    x = source.main("x", shape)
    ties = source.values == "ties"  # x · 2 + 1 is half-way between integers in half of the places
    scale, offset = (2.0, 1.0) if ties else (37.0, -3.0)
    one = torch.ones(1, dtype=x.dtype)
    return {"x": x, "scale": one * scale, "offset": one * offset}


def _per_channel(source: TensorSource, shape: Shape) -> Arguments:
    scale = source.plain("scale", shape[-1:], scale=4.0, mean=32.0)
    return {
        "x": source.main("x", shape), "scale": scale,
        "offset": source.plain("offset", shape[-1:], scale=8.0),
    }  # fmt: skip


def _quantize_cases() -> Iterator[OperatorCase]:
    plan: Plan = (
        ("decode", "normal"), ("odd", "normal"), ("odd", "outliers"), ("odd", "subnormals"),
        ("odd", "ties"), ("odd", "equal"), ("odd.strided", "normal"), ("prefill", "normal"),
    )  # fmt: skip
    yield from cases_of(_per_tensor, plan=plan, suffix="per_tensor")()
    few: Plan = (
        ("decode", "normal"), ("odd", "normal"), ("odd", "outliers"), ("prefill", "normal"),
    )  # fmt: skip
    yield from cases_of(_per_channel, plan=few, suffix="per_channel")()


def _dynamic(source: TensorSource, shape: Shape) -> Arguments:
    return {"x": source.main("x", shape), "smooth": None}


def _smoothed(source: TensorSource, shape: Shape) -> Arguments:
    smooth = source.plain("smooth", shape[-1:], scale=0.125, mean=1.0)
    return {"x": source.main("x", shape), "smooth": smooth}


def _zero_row(source: TensorSource, shape: Shape) -> Arguments:
    x = source.main("x", shape)
    x[2] = 0.0
    return {"x": x, "smooth": None}


def _dynamic_cases() -> Iterator[OperatorCase]:
    plan: Plan = (
        ("decode", "normal"), ("decode", "outliers"), ("odd", "normal"), ("odd", "outliers"),
        ("odd", "equal"), ("odd.strided", "normal"), ("prefill", "normal"),
        ("prefill", "outliers"),
    )  # fmt: skip
    yield from cases_of(_dynamic, plan=plan)()
    yield from cases_of(_smoothed, plan=[("odd", "normal")], suffix="smooth")()
    yield from cases_of(_zero_row, plan=[("odd", "normal")], suffix="zero_row")()


def _w8a8_inputs(source: TensorSource, shape: Shape) -> Arguments:
    m, k, n = shape
    codes = {
        "x": torch.from_numpy(integers("codes", (m, k), -127, 128)).to(torch.int8),
        "weight": torch.from_numpy(integers("weight codes", (n, k), -127, 128)).to(torch.int8),
    }
    scales = {
        name: to_tensor(integers(name, (size,), 1, 1 << 16) / 2.0**24, "float32")
        for name, size in (("x_scale", m), ("weight_scale", n))
    }
    return {**codes, **scales, "out_dtype": source.dtype}


def _cast_inputs(source: TensorSource, shape: Shape) -> Arguments:
    """Subnormals here are those of the 8-bit formats."""
    if source.values == "subnormals":
        return {"x": source.plain("x", shape, scale=2.0**-9)}
    return {"x": source.main("x", shape, scale=8.0)}


_CAST_PLAN: Plan = (
    ("decode", "normal"), ("odd", "normal"), ("odd", "outliers"), ("odd", "subnormals"),
    ("odd", "ties"), ("odd.strided", "normal"), ("prefill", "normal"),
)  # fmt: skip


def _casts() -> Iterator[Operator]:
    for short in ("e4m3fn", "e5m2"):
        for kind in ("", "_saturating"):
            run, truth = _cast(f"float8_{short}", saturating=bool(kind))
            yield Operator(
                name=f"cast_{short}{kind}", run=run, truth=truth,
                cases=cases_of(_cast_inputs, plan=_CAST_PLAN),
            )  # fmt: skip


def _npu_quantize() -> Implementation:
    import torch_npu

    return lambda x, scale, offset: torch_npu.npu_quantize(x, scale, offset, torch.qint8, -1, False)


def _npu_quant_matmul() -> Implementation:
    import torch_npu

    return lambda x, weight, x_scale, weight_scale, out_dtype: torch_npu.npu_quant_matmul(
        x, weight.T, weight_scale, pertoken_scale=x_scale, output_dtype=getattr(torch, out_dtype)
    )


def _npu_dynamic_quant() -> Implementation:
    import torch_npu

    return lambda x, smooth: torch_npu.npu_dynamic_quant(x, smooth_scales=smooth)


OPERATORS = (
    Operator(
        name="quantize", run=_run_quantize,
        truth=_truth_quantize, cases=_quantize_cases,
        implementations={"torch_npu": _npu_quantize},
    ),
    Operator(
        name="dynamic_quant", run=_run_dynamic_quant,
        truth=_truth_dynamic_quant, cases=_dynamic_cases,
        implementations={"torch_npu": _npu_dynamic_quant},
    ),
    Operator(
        name="w8a8_linear",
        run=_run_w8a8, truth=_truth_w8a8,
        cases=cases_of(
            _w8a8_inputs,
            shapes={
                "decode": (1, 1024, 256), "odd": (7, 129, 65), "prefill": (64, 512, 256),
                "large_k": (3, 16384, 32),
            },
            plan=[(shape, "normal") for shape in ("decode", "odd", "prefill", "large_k")],
        ),
        implementations={"torch_npu": _npu_quant_matmul},
    ),
    *_casts(),
)  # fmt: skip
