"""The device of a thread: runtimes keep the current device by thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["set_device"]


def set_device(device: torch.device | None) -> None:
    """Makes ``device`` the calling thread's current one; nothing is done for a host, or None.

    On Ascend a thread that set no device has no context ("ctx is NULL", 107002). On CUDA its first
    call makes a context on device 0, which takes memory there whatever device the model is on.
    """
    if device is None or device.type == "cpu":
        return
    import torch

    module = torch.get_device_module(device)
    if device.index is not None and hasattr(module, "set_device"):
        module.set_device(device)
    elif hasattr(module, "set_device"):
        module.set_device(module.current_device())
