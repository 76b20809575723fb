"""Recorded calls of a run: where they stand, and the values that their operands had."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from divergence.errors import UsageError
from divergence.numerics.formats import format_named
from divergence.ops.allowed import Refusal
from divergence.ops.arguments import contiguous_stride, span_of
from divergence.recording.engines.checkpoint import Weights
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.schema.contents import call_passes
from divergence.run.schema.record import Call, Operand, PassName, Record
from divergence.run.schema.site import compile_patterns, did_you_mean

__all__ = ["RecordedCall", "operand_value", "operand_values", "recorded_calls", "replayable_pass"]

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

    Raises UsageError where the run holds none.
    """
    held: set[PassName] = call_passes(run.records)
    if run.manifest.plan.replayed_pass is not None:
        raise UsageError(
            f"{run.path} is a replay itself",
            hint=f"give the run whose operators it ran again ({run.manifest.plan.anchored_to})",
        )
    if wanted is not None:
        if wanted not in held:
            raise UsageError(
                f"{run.path} holds no operators of a pass {wanted!r}",
                hint=f"it holds {', '.join(sorted(held))}" if held else _make(run),
            )
        return wanted
    for name in _PASSES:
        if name in held:
            return name
    raise UsageError(
        f"{run.path} holds no operators"
        + (f", only those of the {', '.join(sorted(held))} pass" if held else ""),
        hint=command_line("replay", run.path, o="RUN2", pass_="escalated")
        if "escalated" in held
        else _make(run),
    )


def _make(run: Run) -> str:
    block = next(
        (path for path, note in run.manifest.plan.modules.items() if note.role == "block"), "MODULE"
    )
    return command_line("capture", like=run.path, o="RUN2", sites=f"ops@{block}", weights=True)


def recorded_calls(run: Run, pass_: str, sites: Sequence[str] = ()) -> list[RecordedCall]:
    """The calls of one pass in the order of capture; ``sites``: patterns of what is wanted.

    Raises UsageError where the patterns match none.
    """
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
    """The values of the call's operands, each in its shape; their layout is not restored.

    Raises Refusal where one is not there.
    """
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
