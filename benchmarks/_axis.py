"""How many prompts and steps hide a fault: the smallest size found in one of 1, 8, 64.

The fault lies in one prompt, or one decode step, of many, at a block's output. Its size is searched
on a grid of 15%: the smallest that is found at that block, and stays found at the next size.
Healthy pairs of the same runs are counted beside it: more looks must not mean more alarms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from divergence import MachineOptions
from divergence.comparison.api import compare
from divergence.recording.api import capture
from tests.models.tiny import build

__all__ = ["axis"]

COUNTS = (1, 8, 64)
GRID = 1.15
SMALLEST, LARGEST = 1e-8, 0.6
BLOCK = "model.layers.1"
TEXTS = (
    "The quick brown fox jumps over the lazy dog, number {}.",
    "In {} it was said that every body attracts every other body.",
    "What is {} times seven, and why?",
    "A list of {} colours: red, green, blue, and then some more of them.",
)
GROSS = 0.2
"""A change of a fifth of a block's output is found wherever it lies."""


def axis(root: Path, dtypes: list[str], names: list[str]) -> None:
    """Prints the table of smallest sizes by axis (``prompts``, ``steps``), count, fault and
    dtype."""
    columns = [f"{dtype} {fault}" for dtype in dtypes for fault in ("scale", "noise")]
    print(
        "| one of | "
        + " | ".join(columns)
        + " | healthy alarms |\n|---|"
        + "---|" * (len(columns) + 1)
    )
    gross: list[str] = []
    before: dict[tuple[str, str, str], float | None] = {}
    for name in names:
        for count in COUNTS:
            cells, alarms, pairs = [], 0, 0
            for dtype in dtypes:
                where = root / f"{dtype}-{name}-{count}"
                model = root / f"{dtype}-model"
                if not model.exists():
                    build("llama", model, dtype=dtype, num_blocks=4)
                a, place = _reference(model, where / "a", name, count)
                quiet = compare(a, _other(a, where / "healthy"))
                alarms += quiet.verdict.kind not in ("identical", "within_floor")
                pairs += 1
                for fault in ("scale", "noise"):

                    def found(size: float, a=a, where=where, fault=fault, place=place) -> bool:
                        value = 1 + size if fault == "scale" else size
                        plant = f"{BLOCK}:out={fault}:{value!r}@{place}"
                        return _found(compare(a, _other(a, where / "b", plants=[plant])))

                    key = (name, dtype, fault)
                    smallest = before[key] = smallest_found(found, near=before.get(key))
                    cells.append(f"{100 * smallest:.3g}%" if smallest else "-")
                    if not found(GROSS):
                        gross.append(f"{dtype} {fault} in {place} of {count} {name}")
            print(
                f"| {count} {name} | " + " | ".join(cells) + f" | {alarms} of {pairs} |", flush=True
            )
    print(f"\n20% at one of many, not found: {', '.join(gross) or 'none'}")


def _reference(model: Path, out: Path, name: str, count: int) -> tuple[Any, str]:
    """The healthy run, and the place of the fault in the words of a plant."""
    if name == "prompts":
        prompts = [TEXTS[n % len(TEXTS)].format(n) for n in range(count)]
        place, tokens = f"sample={count // 2}", 2
        if count > 1:  # the same prompt as where it is alone
            prompts[0], prompts[count // 2] = prompts[count // 2], prompts[0]
    else:
        prompts, tokens = [TEXTS[0].format(0)], count + 1
        place = f"step={count // 2 + 1}"
    a = capture(
        str(model),
        out=out,
        prompts=prompts,
        max_new_tokens=tokens,
        device="cpu",
        machine=MachineOptions(probe=False),
    )
    return a, place


def _other(a: Any, out: Path, **values: Any) -> Any:
    return capture(
        like=a,
        out=out,
        force=True,
        device="cpu",
        machine=MachineOptions(probe=False),
        attn_implementation="sdpa",
        **values,
    )


def _found(report: Any) -> bool:
    verdict, onset = report.verdict, report.verdict.onset
    return verdict.kind == "localized" and onset is not None and onset.block == BLOCK


def smallest_found(found: Callable[[float], bool], *, near: float | None = None) -> float | None:
    """The smallest size on the grid that is found with the next; None where none is. ``near``: it
    is looked for about there first, a third smaller to six times larger."""
    low, high = 0, math.ceil(math.log(LARGEST / SMALLEST) / math.log(GRID))
    known: dict[int, bool] = {}

    def one(number: int) -> bool:
        if number not in known:
            known[number] = found(SMALLEST * GRID**number)
        return known[number]

    def seen(number: int) -> bool:
        return one(number) and (number >= high or one(number + 1))

    if near is not None:
        place = round(math.log(near / SMALLEST) / math.log(GRID))
        below, above = max(low, place - 3), min(high, place + 13)
        low = low if seen(below) else below + 1
        high = above if seen(above) else high
    if not seen(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seen(middle) else (middle + 1, high)
    return SMALLEST * GRID**low
