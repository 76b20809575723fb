"""A thread beside the model's: torch must not spread its work over threads of its own, and it
needs a device of its own choice.

OpenMP gives each thread that runs a parallel operator its own team. Two teams on the same cores
cost the model more than the work itself: whoever waits for a core holds up all of its team, and
GNU's runtime, once there are more threads than cores, sends them to sleep between any two
operators instead of letting them wait awake.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["set_device", "without_team"]


def set_device(device: torch.device | None) -> None:
    """The calling thread will touch ``device``; of a host, or None, nothing is done.

    Runtimes keep the current device by thread. On Ascend a thread that set none has no context
    ("ctx is NULL", 107002), and on CUDA its first call makes one on device 0, which takes memory
    there whatever device the model is on.
    """
    if device is None or device.type == "cpu":
        return
    import torch

    module = torch.get_device_module(device)
    if device.index is not None and hasattr(module, "set_device"):
        module.set_device(device)
    elif hasattr(module, "set_device"):
        module.set_device(module.current_device())


def without_team() -> None:
    """torch's operators on the calling thread run on it alone; other threads' stay as they are.

    (torch.set_num_threads would also tell MKL, which has one number for all threads.) Where no
    OpenMP can be asked nothing is done.
    """
    import torch

    torch.get_num_threads()  # first: torch sets a new thread's number when it is first needed
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
