"""The ways of running that a selfcheck tries: each one ordinary capture, like the base run.

A variation changes one thing. It is compared with the base run, or, where it changes one thing
of another variation (the other prompts of a batch), with that one's run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from divergence.facts import Fact, fact
from divergence.run.manifest import SampleTokens
from divergence.run.reader import Run

__all__ = ["BASE", "NAMES", "UNASKED", "Variation", "variations"]

BASE = "base"
NAMES = (
    "again", "hooks", "threads", "batch", "place", "mates", "pads-left", "pads-right", "whole",
    "cache", "chunks", "attention", "compile",
)  # fmt: skip
"""Every variation, in the order in which they are tried."""
UNASKED = tuple(name for name in NAMES if name != "compile")
"""Those that are tried where none is named: compiling takes longer than all others together."""
_MOST_PADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One line of the answer, before it is made."""

    name: str
    change: Fact
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of capture, beside ``like``."""
    against: str = BASE
    anchor: bool = False
    """Other kernels run: the anchored pass, which tells where other bits are made, is made at once.
    """
    prefill: bool = False
    """Decode steps are left out."""
    same_bits: bool = False
    """The same kernels get the same operands in the same shapes."""
    obstacle: Fact | None = None
    """Why it cannot be made."""


def variations(base: Run) -> list[Variation]:
    """What can be changed of this run, and what cannot with the reason."""
    manifest = base.manifest
    samples, task = manifest.tokens.samples, manifest.model.task
    lengths = [len(sample.prompt_ids) for sample in samples]
    here, there = _attention(manifest.model.attn_implementation)
    num_threads = manifest.environment.num_threads
    other_threads = 1 if num_threads > 1 else len(os.sched_getaffinity(0))
    on_cpu = manifest.environment.device_type == "cpu"
    no_steps = _why_no_steps(task, samples)
    batches, place, mates = _batches(len(samples))
    padded = len(set(lengths)) > 1
    chunk = max(1, min(lengths) // 3)
    pads = min(_MOST_PADS, max(lengths))
    decodes = task == "causal-lm"
    few = None if len(samples) > 1 else _obstacle("one_prompt")
    return [
        Variation(name="again", change=_way("again"), same_bits=True),
        Variation(
            name="hooks", change=_way("hooks"),
            options={"hooks": False}, same_bits=True,
        ),
        Variation(
            name="threads", change=_way("threads", num=other_threads, of=num_threads),
            options={"threads": other_threads},
            obstacle=None if on_cpu and other_threads != num_threads
            else _obstacle("one_core" if on_cpu else "off_cpu"),
        ),
        Variation(
            name="batch", options={"batches": _text(batches)}, obstacle=few,
            change=_way("batch", size=len(mates[0]) if few is None else 1, padded=padded),
        ),
        Variation(
            name="place", change=_way("place"), against="batch",
            options={"batches": _text(place)}, obstacle=few,
        ),
        Variation(
            name="mates", change=_way("mates", padded=padded), against="batch",
            options={"batches": _text(mates)},
            obstacle=None if len(samples) > 3 else _obstacle("too_few_prompts"),
        ),
        Variation(
            name="pads-left", change=_way("pads_left", num=pads),
            options={"pad_left": pads},
            obstacle=None if decodes else _obstacle("padded_right", task=task),
        ),
        Variation(
            name="pads-right", change=_way("pads_right", num=pads, prefill=decodes),
            options={"pad_right": pads}, prefill=decodes,
        ),
        Variation(
            name="whole", change=_way("whole"), options={"whole": True}, obstacle=no_steps,
        ),
        Variation(
            name="cache", change=_way("cache"), options={"use_cache": False}, obstacle=no_steps,
        ),
        Variation(
            name="chunks", change=_way("chunks", size=chunk),
            options={"prefill_chunk": chunk}, obstacle=_why_no_chunks(task, lengths),
        ),
        Variation(
            name="attention", change=_way("attention", kernel=there, other=here),
            options={"attn_implementation": there}, anchor=True,
            obstacle=None if manifest.model.attn_implementation else _obstacle("no_attention"),
        ),
        Variation(
            name="compile", change=_way("compile"), options={"engine": "compile"},
            anchor=True,
            obstacle=None if not on_cpu or shutil.which("g++") or shutil.which("clang++")
            else _obstacle("no_compiler"),
        ),
    ]  # fmt: skip


def _way(code: str, **values: Any) -> Fact:
    return fact(f"experiments.way_{code}", **values)


def _obstacle(code: str, **values: Any) -> Fact:
    return fact(f"experiments.no_way_{code}", **values)


def _attention(recorded: str | None) -> tuple[str, str]:
    here = recorded or "eager"
    return here, "sdpa" if here == "eager" else "eager"


def _why_no_steps(task: str, samples: list[SampleTokens]) -> Fact | None:
    if task != "causal-lm":
        return _obstacle("stepwise", task=task)
    if all(len(sample.generated_ids) < 2 for sample in samples):
        return _obstacle("decoded")
    return None


def _why_no_chunks(task: str, lengths: list[int]) -> Fact | None:
    if task != "causal-lm":
        return _obstacle("in_chunks", task=task)
    return _obstacle("one_token") if min(lengths) < 2 else None


def _batches(num: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Batches of half of the prompts; the same with the prompts of each in other places; and with
    other prompts in each, of which as many as possible keep their place."""
    half = max((num + 1) // 2, min(num, 2))
    plain = [list(range(half)), list(range(half, num))] if num > half else [list(range(num))]
    turned = [group[1:] + group[:1] for group in plain]
    mixed = [list(group) for group in plain]
    if num > 3:
        for place in range(1, len(plain[1])):
            mixed[0][place], mixed[1][place] = plain[1][place], plain[0][place]
    return plain, turned, mixed


def _text(groups: list[list[int]]) -> str:
    return " ".join(",".join(map(str, group)) for group in groups)
