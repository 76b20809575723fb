"""A device without float64, as MPS is: its tensors say where they lie, and refuse what MPS refuses.

Their numbers are a CPU's; torch is told that they lie on ``meta``, since it lets nobody name a
device that it was built without. An operator runs where all its operands lie: a tensor of another
device is refused beside them, but for numbers without dimensions, and so is float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

MPS = torch.device("meta")
_BETWEEN = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class OnMps(torch.Tensor):
    """``OnMps(tensor)``: the tensor, as if on such a device."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> OnMps:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(),
            dtype=data.dtype, device=MPS,
        )  # fmt: skip

    def __init__(self, data: torch.Tensor) -> None:
        if data.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        self.on_cpu = data

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        others = [tensor for tensor in tensors if not isinstance(tensor, cls) and tensor.ndim]
        if others and func not in _BETWEEN:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        stays = kwargs.get("device", MPS) == MPS
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.on_cpu, (args, kwargs))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            return tensors[0]
        return tree_map_only(torch.Tensor, cls, result) if stays else result


class Mps(TorchDispatchMode):
    """``with Mps():`` what is made on the device, or moved there, lies there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(isinstance(leaf, OnMps) for leaf in tree_leaves((args, kwargs))):
            return OnMps.__torch_dispatch__(func, types, args, kwargs)
        kwargs = dict(kwargs or {})
        if kwargs.get("device") != MPS:
            return func(*args, **kwargs)
        return OnMps(func(*args, **kwargs | {"device": torch.device("cpu")}))


def on_mps(model: torch.nn.Module) -> torch.nn.Module:
    """The same module, its parameters and buffers on the device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = torch.nn.Parameter(OnMps(parameter.data), requires_grad=False)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnMps(buffer)
    return model
