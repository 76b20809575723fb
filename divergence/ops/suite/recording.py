"""A case in a run: its sites, its inputs and outputs as records, and how it is read back.

Case ``rms_norm.bfloat16.odd.equal`` of operator ``suite.rms_norm``:

    rms_norm.bfloat16.odd.equal/suite.rms_norm:in.x       each tensor argument
    rms_norm.bfloat16.odd.equal/suite.rms_norm:out        the first result, with the call
    rms_norm.bfloat16.odd.equal/suite.rms_norm:out.1      the second

and in a truth, beside results in float64, what they are judged by:

    ...:out.floor     standard deviation of a correct implementation's error before the last
                      rounding, element by element; of codes the probability of another code
    ...:out.gain      the same of the scale of each row, <d, R> / ‖R‖², the last rounding included
    ...:out.scores    of indices: the numbers among which they choose; out.floor is theirs
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from divergence.errors import RunFormatError
from divergence.numerics.formats import format_of
from divergence.ops.arguments import span_of
from divergence.ops.suite.definition import Arguments
from divergence.run.reader import Run
from divergence.run.schema.record import Call, Operand, PassName, Placement, Record
from divergence.run.schema.site import join_site, operator_path
from divergence.run.writing.writer import CapturedTensor, RunWriter

__all__ = ["CaseWriter", "arguments_of", "calls_in"]


@dataclass(slots=True)
class CaseWriter:
    """Puts cases into a run, in order. ``pass_``: of this run."""

    writer: RunWriter
    pass_: PassName
    order: int = 0

    def inputs(self, path: str, operator: str, arguments: Arguments) -> Call:
        """Record the tensors among ``arguments``; returns the call that uses them."""
        place = operator_path(path, operator, 1)
        operands: list[Operand] = []
        plain: dict[str, Any] = {}
        for name, value in arguments.items():
            if not isinstance(value, torch.Tensor):
                plain[name] = value
                continue
            site = join_site(place, f"in.{name}")
            self.put(site, value)
            plain[name] = {"tensor": len(operands)}
            operands.append(
                Operand(
                    site=site,
                    shape=tuple(value.shape),
                    dtype=format_of(value.dtype).name,
                    stride=None if value.is_contiguous() else tuple(value.stride()),
                )
            )
        return Call(operator=operator, arguments=plain, operands=tuple(operands))

    def put(
        self, site: str, tensor: torch.Tensor, call: Call | None = None, *,
        placement: Placement | None = None,
    ) -> None:  # fmt: skip
        """``placement``: of what several ranks record, which part this one is."""
        item = CapturedTensor(tensor.detach().to("cpu", copy=True).contiguous())
        self.writer.put(
            item, pass_=self.pass_, sample=0, step=0, site=site, order=self.order, call=call,
            placement=None if placement is None else (placement,),
        )  # fmt: skip
        self.order += 1


def calls_in(run: Run) -> list[Record]:
    """The records of a run that carry a suite's calls, in order."""
    return [record for record in run.records if record.call is not None]


def arguments_of(run: Run, record: Record, *, known: Collection[str] | None = None) -> Arguments:
    """The recorded arguments of a call, with their recorded strides. ``known``: those that the
    operator has."""
    call = record.call
    assert call is not None
    strange = [] if known is None else sorted(set(call.arguments) - set(known))
    if strange:
        raise _damaged(run, record, f"it has no argument {strange[0][:80]!r}")
    operands = [_operand(run, record, operand) for operand in call.operands]
    arguments: Arguments = {}
    for name, value in call.arguments.items():
        if isinstance(value, dict):
            number = value.get("tensor")
            if (
                set(value) != {"tensor"}
                or not isinstance(number, int)
                or number not in range(len(operands))
            ):
                raise _damaged(run, record, f"argument {name} is no operand of the call")
            value = operands[number]
        arguments[name] = value
    return arguments


def _operand(run: Run, record: Record, operand: Operand) -> torch.Tensor:
    operand_record = (
        None
        if operand.site is None
        else run.find((record.pass_, record.sample, record.step, operand.site))
    )
    if operand_record is None:
        raise _damaged(run, record, f"the run does not hold its operand {operand.site}")
    if operand_record.shape != operand.shape or operand_record.dtype != operand.dtype:
        raise _damaged(run, record, f"{operand.site} is not of the operand's shape and dtype")
    values = run.read(operand_record)
    if operand.stride is None:
        return values.clone()
    known = len(operand.stride) == len(operand.shape) and 0 not in operand.stride
    if not known or span_of(operand.shape, operand.stride) > 64 * max(1, operand_record.numel):
        raise _damaged(run, record, f"{operand.site} has impossible strides")
    strided = torch.empty_strided(operand.shape, operand.stride, dtype=values.dtype)
    return strided.copy_(values)


def _damaged(run: Run, record: Record, what: str) -> RunFormatError:
    return RunFormatError(
        f"a call of the suite cannot be repeated: {what}", where=f"{run.path}, {record.site}"
    )
