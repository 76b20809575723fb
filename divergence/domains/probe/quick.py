"""Scalar probes, and the quick form of the probe that every capture notes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch

from divergence.domains.probe.additions import (
    FULL,
    QUICK,
    Notebook,
    OperatorOrders,
    exact_values,
    find_order,
    note_finding,
    summing,
)
from divergence.errors import first_line
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_of
from divergence.numerics.ulp import spacing
from divergence.run.manifest import ArithmeticFact, digest_tensor
from divergence.words import Progress, silent

if TYPE_CHECKING:
    from divergence.experiments.selftest import Bench

# Scalar probes: rounding, elementary functions, and whether a row depends on its neighbours.
#
# Inputs are chosen so that each possible arithmetic gives another answer:
#
# * rounding: values a quarter, a half and three quarters between neighbours, behind an even and an
#   odd one, of both signs: nearest even, nearest away, toward zero, up and down all differ;
# * subnormals: the smallest one times a power of two (lost on input?), the smallest normal number
#   halved (lost on output?);
# * fused: b·b + c with b = 1 + 2^-13, c = -(1 + 2^-12) is exactly 2^-26; a product rounded to
#   float32 first leaves 0 (2^-26 is below half a unit in the last place);
# * elementary functions: the error in units in the last place of the output's format at the true
#   value R, |y - R| / 2^(⌊log2 |R|⌋ - mantissa bits), the worst over inputs that are the same bytes
#   everywhere, so a lower bound. R is the function in float64 on the CPU, whose own error (under
#   one float64 ulp) is 2^-29 of a float32 ulp. Subnormal R, and R that the format does not hold,
#   are left out. Correct rounding gives at most 0.5;
# * lanes: an element alone, at the end of an odd length and inside a long array must give the same
#   bits; otherwise vector and scalar code differ, and results depend on shape and place;
# * rows: a row alone (M = 1, decoding), among 16 (prefill) and in batches of every size up to 17,
#   whose kernels have blocks, tails and switches. Rows are independent in exact arithmetic, so any
#   differing bit is another order of additions. Sizes that give the same bits stand together:
#   ``1 | 2-16 | 17``.

Unary = Callable[[torch.Tensor], torch.Tensor]

_REPEATS = 24
"""Each value stands so often in a row: long enough for a vector path."""


def _nearest(low: np.ndarray, high: np.ndarray, x: np.ndarray, *, up: np.ndarray) -> np.ndarray:
    middle = (low + high) / 2
    return np.where(x > middle, high, np.where(x < middle, low, np.where(up, high, low)))


MODES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "to nearest, ties to even": lambda low, high, x, odd: _nearest(low, high, x, up=odd),
    "to nearest, ties away from 0": lambda low, high, x, odd: _nearest(low, high, x, up=x > 0),
    "toward 0": lambda low, high, x, odd: np.where(x > 0, low, high),
    "up": lambda low, high, x, odd: high,
    "down": lambda low, high, x, odd: low,
}
"""Mode → its answer for values between neighbours ``low`` and ``high``; ``odd``: is low odd."""


def rounding_mode(got: np.ndarray, x: np.ndarray, ulp: float) -> str:
    """The mode that explains every ``got`` of exact ``x`` between multiples of ``ulp``."""
    low = np.floor(x / ulp) * ulp
    odd = np.floor(x / ulp) % 2 == 1
    fits = [
        name for name, mode in MODES.items() if np.array_equal(mode(low, low + ulp, x, odd), got)
    ]
    if fits:
        return fits[0]
    inside = np.all((got == low) | (got == low + ulp))
    return "neither neighbour by one rule" if inside else "not to a neighbour"


def probe_rounding(notebook: Notebook, device: str, dtype: torch.dtype) -> None:
    """Casts from float32, and additions."""
    form = format_of(dtype)
    ulp = 2.0**-form.mantissa_bits
    # exact values between neighbours in [1, 2), and their negatives
    steps = np.array([k + t for k in (0, 1, 2, 5) for t in (0.25, 0.5, 0.75)])
    x = np.repeat(1 + steps * ulp, _REPEATS)
    x = np.concatenate([x, -x])
    if form.name != "float32":
        subject = f"cast float32 to {form.name}"
        with notebook.attempt("rounding", subject):
            given = torch.from_numpy(x).float()  # exact: at most 10 + 3 bits
            got = given.to(device).to(dtype).cpu()
            notebook.note("rounding", subject, rounding_mode(got.double().numpy(), x, ulp))
            notebook.keep("rounding", subject, **{"in": given, "out": got})
    subject = f"add {form.name}"
    whole = np.trunc(x / ulp) * ulp
    with notebook.attempt("rounding", subject):
        augend, addend = torch.from_numpy(whole).to(dtype), torch.from_numpy(x - whole).to(dtype)
        got = (augend.to(device) + addend.to(device)).cpu()
        notebook.note("rounding", subject, rounding_mode(got.double().numpy(), x, ulp))
        notebook.keep("rounding", subject, **{"in": augend, "in_other": addend, "out": got})


def subnormals(scale: Callable[[torch.Tensor, float], torch.Tensor], dtype: torch.dtype) -> str:
    """``scale(x, by)``: multiplies by a power of two. What becomes of numbers below normal?"""
    form = format_of(dtype)
    small = torch.full((_REPEATS,), form.smallest_subnormal, dtype=torch.float64).to(dtype)
    normal = torch.full((_REPEATS,), form.smallest_normal, dtype=torch.float64).to(dtype)
    lift = 2.0**form.mantissa_bits  # to the smallest normal number
    kept_in = (scale(small, lift).double() == form.smallest_normal).tolist()
    kept_out = (scale(normal, 0.5).double() == form.smallest_normal / 2).tolist()
    words = {True: "kept", False: "flushed to 0"}
    sides = []
    for side, kept in (("in", kept_in), ("out", kept_out)):
        sides.append(f"{words[kept[0]] if len(set(kept)) == 1 else 'partly flushed'} {side}")
    return ", ".join(sides)


def probe_subnormals(notebook: Notebook, device: str, dtype: torch.dtype) -> None:
    """Elementwise products, and one-term products of a linear operator."""

    def elementwise(x: torch.Tensor, by: float) -> torch.Tensor:
        return (x.to(device) * torch.full_like(x, by).to(device)).cpu()

    def product(x: torch.Tensor, by: float) -> torch.Tensor:
        weight = torch.zeros(64, 64, dtype=x.dtype)
        weight[: len(x), 0] = x  # column by column one product, all other terms 0
        given = torch.zeros(16, 64, dtype=x.dtype)
        given[:, 0] = by
        out = torch.nn.functional.linear(given.to(device), weight.to(device)).cpu()
        return out[0, : len(x)]

    for name, call in (("mul", elementwise), ("linear", product)):
        subject = f"{name} {format_of(dtype).name}"
        with notebook.attempt("subnormals", subject):
            notebook.note("subnormals", subject, subnormals(call, dtype))


Elementwise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fused_elementwise(call: Elementwise) -> str:
    """``call(b, c)`` = b·b + c in float32: is the product rounded first?"""
    b = torch.full((_REPEATS,), 1 + 2.0**-13, dtype=torch.float32)
    c = torch.full((_REPEATS,), -(1 + 2.0**-12), dtype=torch.float32)
    left = set(call(b, c).double().tolist())
    return {frozenset({2.0**-26}): "fused", frozenset({0.0}): "rounded products"}.get(
        frozenset(left), "fused in places"
    )


def _there(call: Callable[..., torch.Tensor], device: str) -> Callable[..., torch.Tensor]:
    """The same on ``device``."""
    return lambda *given: call(*(tensor.to(device) for tensor in given)).cpu()


def probe_fused(notebook: Notebook, device: str) -> None:
    """Elementwise operators that multiply and add."""
    calls: dict[str, Elementwise] = {
        "addcmul": lambda b, c: torch.addcmul(c, b, b),
        "add alpha": lambda b, c: torch.add(c, b, alpha=float(b[0])),
        "mul, then add": lambda b, c: b * b + c,
    }
    for name, call in calls.items():
        with notebook.attempt("fma", f"{name} float32"):
            notebook.note("fma", f"{name} float32", fused_elementwise(_there(call, device)))


FUNCTIONS: dict[str, tuple[Unary, float, bool]] = {
    "exp": (torch.exp, 8.0, False),
    "log": (torch.log, 16.0, True),
    "sin": (torch.sin, 32.0, False),
    "cos": (torch.cos, 32.0, False),
    "tanh": (torch.tanh, 4.0, False),
    "erf": (torch.erf, 4.0, False),
    "sigmoid": (torch.sigmoid, 8.0, False),
    "sqrt": (torch.sqrt, 16.0, True),
    "rsqrt": (torch.rsqrt, 16.0, True),
    "reciprocal": (torch.reciprocal, 16.0, False),
    # not 3 / x, which torch makes of a reciprocal and a product
    "div": (lambda x: torch.full_like(x, 3.0) / x, 16.0, False),
    "silu": (torch.nn.functional.silu, 8.0, False),
}
"""Function → (itself, inputs reach up to, positive inputs only). Ranges are those of models."""


def inputs_of(name: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Exact inputs: whole multiples of the range / 2^(bits), never 0."""
    _, reach, positive = FUNCTIONS[name]
    bits = min(format_of(dtype).mantissa_bits + 1, 20)
    raw = np.random.PCG64(sum(name.encode())).random_raw(count)
    steps = 1 + (raw >> np.uint64(64 - bits)).astype(np.float64)
    sign = 1.0 if positive else np.where(raw & np.uint64(1), -1.0, 1.0)
    return torch.from_numpy(sign * steps * reach * 2.0**-bits).to(dtype)


def worst_ulp(function: Unary, given: torch.Tensor, got: torch.Tensor) -> float:
    """Largest error of ``got`` in ulp; inf where it is no number and the true value is one."""
    form = format_of(got.dtype)
    true = function(given.double())
    normal = (true.abs() >= form.smallest_normal) & (true.abs() <= form.max)
    error = ((got.double() - true).abs() / spacing(true, form)).nan_to_num(torch.inf)[normal]
    return float(error.max()) if error.numel() else 0.0


def lanes(function: Unary, given: torch.Tensor, device: str) -> tuple[int, int]:
    """(elements that differ, elements looked at): in a long array against alone, and at the end of
    an odd length."""
    x = given[:91].to(device)
    long = function(x).cpu()
    same = []
    for place in range(24):
        alone = function(x[place : place + 1]).cpu()
        same.append(_bits(alone) == _bits(long[place : place + 1]))
    for length in (67, 35, 19, 7, 5, 3):
        tail = function(x[:length].clone()).cpu()
        last = zip(tail[-3:].split(1), long[length - 3 : length].split(1), strict=True)
        same += [_bits(short) == _bits(wide) for short, wide in last]
    return same.count(False), len(same)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def probe_elementary(notebook: Notebook, device: str, dtype: torch.dtype, *, count: int) -> None:
    """Each function on ``count`` inputs."""
    kind = format_of(dtype).name
    for name, (function, _, _) in FUNCTIONS.items():
        subject = f"{name} {kind}"
        given = inputs_of(name, dtype, count)
        counted = f"{name} n={count} {kind}"
        with notebook.attempt("ulp", counted):
            got = function(given.to(device)).cpu()
            differ, seen = lanes(function, given, device)
            worst = worst_ulp(function, given, got)
            notebook.note(
                "ulp",
                counted,
                f"{worst:.3g} ulp",
                unit="ulp",
                numbers={"worst": worst},
                digest=digest_tensor(got),
                evidence=f"the worst of {count} inputs against float64",
            )
            notebook.note(
                "lanes",
                subject,
                "same bits alone and in a vector"
                if not differ
                else "other bits alone than in a vector",
                numbers={"differ": differ, "seen": seen},
                evidence=f"{differ} of {seen} elements differ",
            )
            notebook.keep("ulp", subject, **{"in": given, "out": got})


SIZES = tuple(range(1, 18))
FEW_SIZES = (1, 2, 3, 4, 5, 8, 12, 16, 17)
"""For the quick form: where kernels switch, as far as was seen."""
_COLUMNS = 64


def row_share(call: Unary, x: torch.Tensor, *, every: int = 1) -> tuple[int, int]:
    """(outputs that differ, outputs) of row 0, ``every``, … alone against all rows together."""
    rows = range(0, len(x), every)
    together = call(x)[::every]
    alone = torch.cat([call(x[row : row + 1]) for row in rows])
    return int((alone != together).sum()), together.numel()


def batch_groups(call: Unary, x: torch.Tensor, sizes: tuple[int, ...] = SIZES) -> list[list[int]]:
    """Batch sizes that give row 0 the same bits, in order of their smallest."""
    groups: dict[bytes, list[int]] = {}
    for size in sizes:
        bits = _bits(call(x[:size])[0])
        groups.setdefault(bits, []).append(size)
    return list(groups.values())


def spans(groups: list[list[int]]) -> str:
    """``[[1], [2, 3, 4], [5, 7]]`` → ``1 | 2-4 | 5, 7``."""
    texts = []
    for group in groups:
        runs: list[list[int]] = []
        for size in group:
            if runs and size == runs[-1][-1] + 1:
                runs[-1].append(size)
            else:
                runs.append([size])
        texts.append(
            ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        )
    return " | ".join(texts)


def probe_rows(
    notebook: Notebook,
    device: str,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    *,
    few: bool = False,
) -> None:
    """Linear, and the sums that norms and softmax make over a row. ``few``: fewer of
    them, which the names of the facts tell."""
    for length in lengths:
        weight = exact_values(7, (_COLUMNS, length), dtype).to(device)
        x = exact_values(8, (max(SIZES), length), dtype)
        calls: dict[str, Unary] = {
            f"linear K={length} N={_COLUMNS}": partial(torch.nn.functional.linear, weight=weight),
            f"sum n={length}": lambda rows: rows.sum(-1, keepdim=True),
            f"softmax n={length}": lambda rows: rows.softmax(-1),
            f"layer_norm n={length}": partial(
                torch.nn.functional.layer_norm, normalized_shape=(length,)
            ),
        }
        for name, call in calls.items():
            there = _there(call, device)
            sizes = FEW_SIZES if few else SIZES
            subject = f"{name} sizes={len(sizes)} {format_of(dtype).name}"
            with notebook.attempt("rows", subject):
                differ, total = row_share(there, x[:16], every=5 if few else 1)
                groups = batch_groups(there, x, sizes)
                notebook.note(
                    "rows",
                    subject,
                    "the same bits at M=1 and M=16"
                    if not differ
                    else "other bits at M=1 than at M=16",
                    numbers={"differ": differ, "outputs": total},
                    evidence=f"{differ} of {total} outputs differ",
                )
                notebook.note(
                    "batch",
                    subject,
                    "invariant" if len(groups) == 1 else f"varies with the batch: {spans(groups)}",
                    numbers={"groups": len(groups), "sizes": len(sizes)},
                )


# The quick form: what every capture notes about the arithmetic that it ran on.
#
# Scalar probes and the orders of the commonest sums at one length: always the same ones, however
# long the machine takes, so that two captures of one machine hold the same facts. About 0.6 s of
# one core (benchmarks/probe.py); a machine whose cores are taken, with threads that wait for each
# other, takes some seconds. ``divergence probe`` looks at more. It draws no random numbers, sets no
# switch, shows no warning and fails no capture: a machine that refuses the probes has one fact that
# says why. What was found is kept for the process, by device, threads and precision switches.

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK_TERMS = 512
"""Long enough to pass the first block of most kernels (192 and 384 were seen), and a model's head
size or a tiny model's width; short enough for a second."""

_cache: dict[tuple[object, ...], list[ArithmeticFact]] = {}


def quick_facts(device: str) -> list[ArithmeticFact]:
    """The facts of ``device`` under the switches as they stand. Never raises an Exception."""
    key = (device, *_switches())
    if key not in _cache:
        try:
            notebook = Notebook(keep_tensors=False)
            probe_all(notebook, device, (QUICK_TERMS,), quick=True)
            _cache[key] = notebook.facts
        except Exception as error:  # any: a capture does not depend on it
            failed = ArithmeticFact(
                name="probe: quick form",
                value="failed",
                verified=False,
                evidence=first_line(error),
            )
            return [failed]
    return list(_cache[key])


def probe_all(
    notebook: Notebook,
    device: str,
    lengths: tuple[int, ...],
    *,
    quick: bool = False,
    progress: Progress = silent,
) -> list[OperatorOrders]:
    """Everything, at sums of ``lengths``; what was found of their orders."""
    wanted = [
        summing(name, length, dtype, device)
        for length in lengths
        for dtype in DTYPES
        for name in (QUICK if quick else FULL)
    ]
    progress("probe", 0, len(wanted) + 1, "elementary functions")
    findings = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in DTYPES:
            probe_rounding(notebook, device, dtype)
            probe_subnormals(notebook, device, dtype)
            if dtype == torch.float32:
                probe_fused(notebook, device)
            probe_elementary(notebook, device, dtype, count=2048 if quick else 65536)
            probe_rows(notebook, device, dtype, lengths, few=quick)
        for number, operator in enumerate(wanted, 1):
            progress("probe", number, len(wanted) + 1, operator.title)
            findings.append(find_order(operator))
            note_finding(notebook, findings[-1])
    return findings


def _switches() -> tuple[object, ...]:
    """Return what changes arithmetic within a process."""
    settings: list[object] = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()]
    for name in (
        "backends.fp32_precision",
        "backends.mkldnn.matmul.fp32_precision",
        "backends.cuda.matmul.fp32_precision",
        "backends.cuda.matmul.allow_tf32",
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        "backends.cuda.matmul.allow_fp16_accumulation",
        "npu.matmul.allow_hf32",
    ):
        try:
            settings.append(attrgetter(name)(torch))
        except (AttributeError, RuntimeError, AssertionError, ImportError):
            settings.append(None)  # this torch has it not, or refuses to mix two generations of it
    # a tiny product of subnormal numbers: torch.set_flush_denormal has no getter
    small = torch.full((1,), 2.0**-140, dtype=torch.float32)
    return (*settings, bool(small * 1.0 == 0))


def tried(bench: Bench) -> Fact:
    """Return what the device's arithmetic does otherwise than the CPU's: noted by `selftest`, never
    a failure."""
    here, there = (
        {item.name: item.value for item in quick_facts(device)} for device in ("cpu", bench.device)
    )
    odd = [name for name, value in there.items() if name in here and here[name] != value]
    return fact(
        "probe.seen_arithmetic",
        num=len(there),
        num_odd=len(odd),
        odd=[f"{name}: {here[name]} / {there[name]}" for name in odd[:6]],
        num_more=max(0, len(odd) - 6) or None,
    )
