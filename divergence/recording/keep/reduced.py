"""Keeping digests, statistics and projections of what lies on an accelerator, not its bytes.

They are computed where the tensor is, on the stream that it was made on: nothing is copied to
the host and nothing waited for in the hook. The writer's thread fetches them, a batch at a time
(run.writing.reduction). A device that lacks an operator for it has its tensors copied to the
host and reduced there. On hosts the inner keeper's copy goes to that thread, which reduces it
there: the model goes on meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from divergence.numerics.formats import format_of
from divergence.numerics.summaries.fold import fold_sums, is_exact_on
from divergence.numerics.summaries.on_device import statistics_on_device
from divergence.numerics.summaries.sketch import num_projections, sketch_tensor, sum_dtype_name
from divergence.run.writing.captured_tensor import CapturedTensor, Reduced

if TYPE_CHECKING:
    from collections.abc import Callable

    from divergence.recording.keep.keeper import Keeper
    from divergence.run.schema.manifest import StoreMode

__all__ = ["ReducedKeeper"]


class ReducedKeeper:
    """``inner`` keeps what must stay whole. ``hosts``: reduce host tensors in the hook as well.
    ``note``: told of a device whose tensors go to the host, and why."""

    def __init__(
        self,
        store: StoreMode,
        inner: Keeper,
        *,
        hosts: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.inner = inner
        self._store, self._hosts, self._note = store, hosts, note
        self._lacking: set[torch.device] = set()

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        device = tensor.device
        if device in self._lacking or (device.type == "cpu" and not self._hosts):
            return self.inner.keep(tensor)
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        k = None
        if self._store == "sketch":
            k = num_projections(tensor.shape, format_of(tensor.dtype))
            if k is None:
                return self.inner.keep(tensor)
        item = CapturedTensor(tensor)
        try:
            item.reduced = self._reduce(tensor, k)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:  # no fault of the model's
            self._lacking.add(device)
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            self._note(
                f"{device} cannot compute what --store {self._store} keeps; its tensors are "
                f"copied to the host and reduced there, which is slower: {reason}"
            )
            return self.inner.keep(tensor)
        item.tensor = None
        return item

    def _reduce(self, tensor: torch.Tensor, k: int | None) -> Reduced:
        if not is_exact_on(str(tensor.device)):
            raise RuntimeError("its 64-bit integer arithmetic is wrong")
        return Reduced(
            sums=fold_sums(tensor),
            statistics=None if self._store == "hash" else statistics_on_device(tensor),
            projections=None if k is None else sketch_tensor(tensor, k),
            sum_dtype=sum_dtype_name(str(tensor.device)),
        )
