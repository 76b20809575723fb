"""The quick form: what every capture notes about the arithmetic that it ran on.

Scalar probes and the orders of the commonest sums at one length: always the same ones, however long
the machine takes, so that two captures of one machine hold the same facts. About 0.6 s of one core
(benchmarks/probe.py); a machine whose cores are taken, with threads that wait for each other, takes
some seconds. ``divergence probe`` looks at more. It draws no random numbers, sets no switch, shows
no warning and fails no capture: a machine that refuses the probes has one fact that says why. What
was found is kept for the process, by device, threads and precision switches.
"""

from __future__ import annotations

import warnings
from operator import attrgetter

import torch

from divergence.arithmetic.additions import QUICK, operators, probe_orders
from divergence.arithmetic.notebook import Notebook
from divergence.arithmetic.scalar import (
    probe_elementary,
    probe_fused,
    probe_rounding,
    probe_rows,
    probe_subnormals,
)
from divergence.errors import first_line
from divergence.run.manifest import ArithmeticFact

__all__ = ["DTYPES", "QUICK_TERMS", "probe_scalars", "quick_facts"]

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
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                _cache[key] = _probe(device)
        except Exception as error:  # any: a capture does not depend on it
            fact = ArithmeticFact(
                name="probe: quick form", value="failed", verified=False,
                evidence=first_line(error),
            )  # fmt: skip
            return [fact]
    return list(_cache[key])


def probe_scalars(
    notebook: Notebook,
    device: str,
    dtype: torch.dtype,
    *,
    count: int,
    lengths: tuple[int, ...],
    few: bool = False,
) -> None:
    """Everything but orders, in one dtype. ``count``: inputs of elementary functions; ``lengths``:
    of rows; ``few``: fewer rows."""
    probe_rounding(notebook, device, dtype)
    probe_subnormals(notebook, device, dtype)
    if dtype == torch.float32:
        probe_fused(notebook, device)
    probe_elementary(notebook, device, dtype, count=count)
    probe_rows(notebook, device, dtype, lengths, few=few)


def _probe(device: str) -> list[ArithmeticFact]:
    notebook = Notebook(keep_tensors=False)
    for dtype in DTYPES:
        probe_orders(notebook, operators(QUICK, QUICK_TERMS, dtype, device))
        probe_scalars(notebook, device, dtype, count=2048, lengths=(QUICK_TERMS,), few=True)
    return notebook.facts


def _switches() -> tuple[object, ...]:
    """What changes arithmetic within a process."""
    settings: list[object] = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()]
    for name in ("backends.fp32_precision", "backends.mkldnn.matmul.fp32_precision",
                 "backends.cuda.matmul.fp32_precision", "backends.cuda.matmul.allow_tf32",
                 "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
                 "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
                 "backends.cuda.matmul.allow_fp16_accumulation",
                 "npu.matmul.allow_hf32"):  # fmt: skip
        try:
            settings.append(attrgetter(name)(torch))
        except (AttributeError, RuntimeError, AssertionError, ImportError):
            settings.append(None)  # this torch has it not, or refuses to mix two generations of it
    # a tiny product of subnormal numbers: torch.set_flush_denormal has no getter
    small = torch.full((1,), 2.0**-140, dtype=torch.float32)
    return (*settings, bool(small * 1.0 == 0))
