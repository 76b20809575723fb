"""How many bytes of tensors live at each moment, counted while operators run on fake tensors.

Each operator's results are storages; one is counted when it is first seen, and no more when it is
freed. Run under torch's FakeTensorMode nothing is allocated, and sizes and lifetimes are those of a
real step: also of what autograd saves, of gradients of activations, of what is computed again.

Not seen: memory that a kernel takes inside itself (workspaces), and what an allocator rounds up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered. ``now`` and ``peak``: bytes of storages made since then, and
    of what ``hold`` adds; ``held``: of these alone, now."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.held = 0
        self._held: dict[object, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Not counted: it was there before."""
        storage = tensor.untyped_storage()
        self._storages[id(storage)] = weakref.ref(storage, self._forgetting(id(storage), 0))

    def hold(self, key: object, num_bytes: int) -> None:
        """Count ``num_bytes`` that no operator made, until ``release``; once for a key."""
        if key not in self._held:
            self._held[key] = num_bytes
            self.held += num_bytes
            self._add(num_bytes)

    def release(self, key: object) -> None:
        num_bytes = self._held.pop(key, 0)
        self.held -= num_bytes
        self.now -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # of one that lives; forgotten with it
        if key in self._storages:
            return
        num_bytes = storage.nbytes()
        self._storages[key] = weakref.ref(storage, self._forgetting(key, num_bytes))
        self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _forgetting(self, key: int, num_bytes: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self.now -= num_bytes
            self._storages.pop(key, None)

        return forget
