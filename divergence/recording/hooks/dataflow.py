"""Dataflow inside a block: which record holds the value that lies in a piece of memory.

A value is recognised by the memory it lies in (storage, offset, shape, stride, dtype), and
forgotten when an operator writes there. Beside it stands where the memory came from
(``origin``: the site whose result or argument it is) and which views were taken of that.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Dataflow", "lies_inside", "misalignment_bytes", "storage_of", "tensors_in"]

View = tuple[int, int | torch.SymInt, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Storage, offset, shape, stride, dtype: one way of looking at one piece of memory."""


class Dataflow:
    """What is known of a block's memory while the block runs."""

    def __init__(self) -> None:
        self._known: dict[View, str] = {}
        self._via: dict[View, tuple[str, ...]] = {}
        self._origins: dict[int, str | None] = {}
        self._held: list[torch.Tensor] = []  # so that no other tensor comes to lie there

    def enter(self, tensor: torch.Tensor, site: str) -> None:
        """Notes an argument of the block: not recorded yet, but known by its name."""
        self._origins.setdefault(storage_of(tensor), site)
        self._held.append(tensor)

    def site_of(self, tensor: torch.Tensor) -> str | None:
        """The record that holds this value, if one does."""
        return self._known.get(_view_of(tensor))

    def origin_of(self, tensor: torch.Tensor) -> str | None:
        """The site whose memory this is; None where it is unknown, or written by several."""
        return self._origins.get(storage_of(tensor))

    def via(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The views that were taken of its origin."""
        return self._via.get(_view_of(tensor), ())

    def holds(self, tensor: torch.Tensor, site: str) -> None:
        """Notes that the record ``site`` holds this value."""
        self._known[_view_of(tensor)] = site
        self._held.append(tensor)

    def made(self, tensor: torch.Tensor, site: str) -> None:
        """Notes an operator's result, recorded as ``site``."""
        storage = storage_of(tensor)
        self._origins[storage] = self._origins.get(storage, site) and site
        self._via.setdefault(_view_of(tensor), ())
        self.holds(tensor, site)

    def looked_at(self, tensor: torch.Tensor, step: str, source: torch.Tensor | None) -> None:
        """Notes that ``tensor`` is a view of ``source``, made by ``step``."""
        view = _view_of(tensor)
        if source is not None and view == _view_of(source):
            return  # another shape at most: the same bytes
        before = () if source is None else self.via(source)
        self._via[view] = (*before, step)
        self._held.append(tensor)

    def written_to(self, tensor: torch.Tensor) -> None:
        """Forgets what was known of this memory."""
        storage = storage_of(tensor)
        self._known = {view: site for view, site in self._known.items() if view[0] != storage}
        if tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
            self._origins[storage] = None  # in part this, in part that
        else:
            self._origins.pop(storage, None)


def storage_of(tensor: torch.Tensor) -> int:
    """What tells one piece of living memory from another."""
    try:
        number: int = tensor.untyped_storage()._cdata
        return number
    except (RuntimeError, NotImplementedError):  # sparse and other layouts have none
        return id(tensor)


def _view_of(tensor: torch.Tensor) -> View:
    """What tells one view from another. Contiguous ones are the same whatever their shape: they
    have the same bytes."""
    storage, shape = storage_of(tensor), tuple(tensor.shape)
    if tensor.layout != torch.strided:
        return storage, 0, shape, (), tensor.dtype
    if tensor.is_contiguous():
        return storage, tensor.storage_offset(), (tensor.numel(),), (1,), tensor.dtype
    return storage, tensor.storage_offset(), shape, tuple(tensor.stride()), tensor.dtype


def lies_inside(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Are the elements of ``tensor`` all elements of ``whole``, in whose memory it lies? Only of a
    contiguous whole, whose memory and values have one order."""
    if tensor.layout != torch.strided or whole.layout != torch.strided:
        return False
    if tensor.dtype != whole.dtype or not whole.is_contiguous():
        return False
    first = tensor.storage_offset() - whole.storage_offset()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum(max(size - 1, 0) * step for size, step in sizes)
    return first >= 0 and last < max(whole.numel(), 1)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def misalignment_bytes(tensor: torch.Tensor) -> int:
    """How far its memory begins beyond a multiple of 64 bytes; 0 where it has no address."""
    try:
        return tensor.data_ptr() % 64
    except (RuntimeError, NotImplementedError):
        return 0
