"""What is recorded of a parameter beside its digest (run.schema.provenance), from one reading."""

from __future__ import annotations

from typing import cast, get_args

import torch

from divergence.numerics.formats import format_named, format_of
from divergence.run.schema.fingerprint import digest_tensor
from divergence.run.schema.provenance import NUM_SUMS, ParameterNote, ValuesForm

__all__ = ["parameter_note"]

_MOST_AT_ONCE = 1 << 20
_FIRST = 32
"""Numbers that a group of codes with one scale holds at least."""
_MOST_LEVELS = 128


def parameter_note(tensor: torch.Tensor, digest: str) -> ParameterNote | None:
    """``digest``: of its own bytes. None for what is no floating-point number of 16 bits or more,
    and for one without bytes."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or tensor.is_meta:
        return None
    own = format_of(tensor.dtype).name
    forms: tuple[ValuesForm, ...] = get_args(ValuesForm)
    rounded: dict[ValuesForm, str] = {}
    form: ValuesForm = cast(ValuesForm, own)
    values = digest
    for target in forms[: forms.index(own) if own in forms else 0]:
        narrow = tensor.to(format_named(target).torch_dtype)
        told = digest_tensor(narrow)
        if _is_exact(narrow, tensor):
            form, values = target, told
            break
        rounded[target] = told
    norm, sums = _sums(tensor)
    return ParameterNote(
        dtype=own, shape=list(tensor.shape), form=form, values=values, rounded=rounded, norm=norm,
        sums=sums, levels=_levels(tensor),
        strides=None if tensor.is_contiguous() else list(tensor.stride()),
    )  # fmt: skip


def _is_exact(narrow: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Does the narrower copy hold the very values? The first piece tells it of most tensors."""
    pieces = zip(
        narrow.reshape(-1).split(_MOST_AT_ONCE), tensor.reshape(-1).split(_MOST_AT_ONCE),
        strict=True,
    )  # fmt: skip
    return all(
        bool(((small.to(tensor.dtype) == piece) | piece.isnan()).all()) for small, piece in pieces
    )


def _sums(tensor: torch.Tensor) -> tuple[float, list[float]]:
    """The norm, and the sums with signs, in one product a piece."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    columns = _signs(rows.shape[1], 2, tensor.device).to(wide)
    columns = torch.cat([columns, torch.ones_like(columns[:, :1])], 1)
    totals = torch.zeros(3 * NUM_SUMS, dtype=torch.float64)
    square = 0.0
    step = max(1, _MOST_AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].to(wide)
        signs = _signs(len(part), 2, tensor.device, start).to(wide)
        square += float(torch.linalg.vector_norm(part)) ** 2
        by_column, by_both, total = (part @ columns).split([NUM_SUMS, NUM_SUMS, 1], 1)
        by_row, by_both = total * signs[:, :NUM_SUMS], by_both * signs[:, NUM_SUMS:]
        totals += torch.cat([by_column.sum(0), by_row.sum(0), by_both.sum(0)]).cpu().double()
    return square**0.5, totals.tolist()


def _signs(count: int, kinds: int, device: torch.device, start: int = 0) -> torch.Tensor:
    """(count, kinds · NUM_SUMS) of -1 and 1, by place alone (splitmix64's first rounds)."""
    mixed = torch.arange(start + 1, start + count + 1, dtype=torch.int64) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = mixed ^ (mixed >> 27)
    bits = mixed[:, None] >> torch.arange(20, 20 + kinds * NUM_SUMS)
    return ((bits & 1) * 2 - 1).to(device=device, dtype=torch.float32)


def _levels(tensor: torch.Tensor) -> int | None:
    """How many steps the largest of its first numbers is, where all are whole steps."""
    row = tensor.detach().reshape(-1)[: tensor.shape[-1] if tensor.ndim else 0]
    if len(row) < _FIRST:
        return None
    first = row[:_FIRST].cpu().double()
    largest = float(first.abs().max())
    if not 0 < largest < float("inf") or len(first.unique()) < 4:
        return None
    counts = torch.arange(2, _MOST_LEVELS + 1, dtype=torch.float64)[:, None]
    steps = first * (counts / largest)
    rounding = 2 * torch.finfo(tensor.dtype).eps * steps.abs() + 1e-9
    whole = ((steps - steps.round()).abs() <= rounding).all(1).nonzero().flatten()
    return int(counts[whole[0], 0]) if len(whole) else None
