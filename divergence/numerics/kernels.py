"""Which loops measure: numpy's, always there, or compiled ones (numba, the extra ``fast``).

Compiled loops are several times faster and cost their start: numba's import, and compiling for
this processor once (the machine code is kept on disk). So they are taken where the tensors are
large enough to pay for it. Both measure the same (divergence.numerics.compiled). On a device
torch measures, in a thread that has set it: runtimes keep the current device by thread.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from divergence.numerics.formats import Format

Kernel = Literal["numpy", "compiled"]

READABLE = frozenset({"bfloat16", "float16", "float32", "float64"})
"""The formats that compiled loops read."""

WORTH_BYTES = 1 << 30
"""From this many bytes on compiled loops pay for their start (benchmarks/compare_kernel.py)."""

RESIDENT_BYTES = 112 << 20
"""What numba and the machine code take of memory (benchmarks/compare_kernel.py)."""


@functools.cache
def has_compiled() -> bool:
    """Whether compiled loops can be had here; imports nothing."""
    return importlib.util.find_spec("numba") is not None


def kernel_for(num_bytes: int) -> Kernel:
    """The faster one for ``num_bytes`` of tensors, both sides."""
    return "compiled" if num_bytes >= WORTH_BYTES and has_compiled() else "numpy"


def chosen(kernel: Kernel, *formats: Format) -> Kernel:
    """``kernel`` where it reads all of ``formats``, else numpy."""
    return kernel if all(form.name in READABLE for form in formats) else "numpy"


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
