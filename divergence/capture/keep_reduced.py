"""Keeping digests, statistics and projections of what lies on an accelerator, not its bytes.

They are computed where the tensor is, on the stream that it was made on: nothing is copied to
the host and nothing waited for in the hook. The writer's thread fetches them, a batch at a time
(divergence.run.reduction). On hosts the inner keeper's copy goes to that thread, which reduces it
there: the model goes on meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from divergence.numerics.fold import fold_sums
from divergence.numerics.formats import format_of
from divergence.numerics.sketch import num_projections, sketch_tensor, sum_dtype_name
from divergence.numerics.summary_device import statistics_on_device
from divergence.run.item import Item, Reduced

if TYPE_CHECKING:
    from divergence.capture.keep import Keeper
    from divergence.run.manifest import Store

__all__ = ["ReducedKeeper"]


class ReducedKeeper:
    """``inner`` keeps what must stay whole. ``hosts``: reduce host tensors in the hook as well."""

    def __init__(self, store: Store, inner: Keeper, *, hosts: bool = False) -> None:
        self.inner = inner
        self._store, self._hosts = store, hosts

    def keep(self, tensor: torch.Tensor) -> Item:
        if tensor.device.type == "cpu" and not self._hosts:
            return self.inner.keep(tensor)
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        k = None
        if self._store == "sketch":
            k = num_projections(tensor.shape, format_of(tensor.dtype))
            if k is None:
                return self.inner.keep(tensor)
        item = Item(tensor)
        item.tensor = None
        item.reduced = Reduced(
            sums=fold_sums(tensor),
            statistics=None if self._store == "hash" else statistics_on_device(tensor),
            projections=None if k is None else sketch_tensor(tensor, k),
            sum_dtype=sum_dtype_name(str(tensor.device)),
        )
        return item
