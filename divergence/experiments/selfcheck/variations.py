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
    changed: str
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
    reason: str | None = None
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
    how = "" if len(set(lengths)) == 1 else ", padded"
    chunk = max(1, min(lengths) // 3)
    pads = min(_MOST_PADS, max(lengths))
    alone = ", prefill alone" if task == "causal-lm" else ""
    few = None if len(samples) > 1 else "there is one prompt"
    return [
        Variation(name="again", changed="nothing: run again", same_bits=True),
        Variation(
            name="hooks", changed="no hooks in the model (logits, tokens)",
            options={"hooks": False}, same_bits=True,
        ),
        Variation(
            name="threads", changed=f"{other_threads} threads for {num_threads}",
            options={"threads": other_threads},
            reason=None if on_cpu and other_threads != num_threads
            else "one CPU core" if on_cpu else "the model does not run on the CPU",
        ),
        Variation(
            name="batch", changed=f"batches of {len(mates[0]) if few is None else 1}{how}",
            options={"batches": _text(batches)}, reason=few,
        ),
        Variation(
            name="place", changed="other places in the batch", against="batch",
            options={"batches": _text(place)}, reason=few,
        ),
        Variation(
            name="mates", changed=f"other prompts in the batch{how and ' and pads'}",
            against="batch", options={"batches": _text(mates)},
            reason=None if len(samples) > 3 else "it takes four prompts",
        ),
        Variation(
            name="pads-left", changed=f"{pads} pads on the left of each prompt",
            options={"pad_left": pads},
            reason=None if task == "causal-lm" else f"an {task} is padded on the right",
        ),
        Variation(
            name="pads-right", changed=f"{pads} pads on the right of each prompt{alone}",
            options={"pad_right": pads}, prefill=task == "causal-lm",
        ),
        Variation(
            name="whole", changed="decode steps as one forward over the whole text",
            options={"whole": True}, reason=no_steps,
        ),
        Variation(
            name="cache", changed="no cache: each step over the whole text",
            options={"use_cache": False}, reason=no_steps,
        ),
        Variation(
            name="chunks", changed=f"prompt fed in chunks of {chunk}",
            options={"prefill_chunk": chunk}, reason=_why_no_chunks(task, lengths),
        ),
        Variation(
            name="attention", changed=f"attention {there} for {here}",
            options={"attn_implementation": there}, anchor=True,
            reason=None if manifest.model.attn_implementation else "the model has no attention",
        ),
        Variation(
            name="compile", changed="blocks compiled by inductor", options={"engine": "compile"},
            anchor=True,
            reason=None if not on_cpu or shutil.which("g++") or shutil.which("clang++")
            else "no C++ compiler (g++) on this machine",
        ),
    ]  # fmt: skip


def _attention(recorded: str | None) -> tuple[str, str]:
    here = recorded or "eager"
    return here, "sdpa" if here == "eager" else "eager"


def _why_no_steps(task: str, samples: list[SampleTokens]) -> str | None:
    if task != "causal-lm":
        return f"an {task} has no such decode steps"
    if all(len(sample.generated_ids) < 2 for sample in samples):
        return "no decode step was made: every prompt ended after one token"
    return None


def _why_no_chunks(task: str, lengths: list[int]) -> str | None:
    if task != "causal-lm":
        return f"an {task} reads its prompt whole"
    return "a prompt has one token" if min(lengths) < 2 else None


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
