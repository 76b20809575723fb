"""What passes for Ascend's torch_npu: ``torch.npu`` over the simulated device.

Put this folder on PYTHONPATH, and ``import torch_npu`` makes ``npu:0`` and ``npu:1``. Their faults
are switched on by ``SIMULATED_NPU`` (``name=value,name=value``; names of operators are joined by
``+``), or by ``configure`` at any time:

schedule            none, copies, kernels or both: what runs as late as it may
strict_threads      a thread that never set its device has no context
no_pinned           no page-locked host memory
pinned_by_base      page-locked memory is recognised by the address of its first byte alone
no_streams          torch.npu has no Stream
no_float64          no tensor of that dtype
no_float64_products no matrix product of that dtype
short_products      float32 operands of matrix products keep 10 fraction bits
max_bytes           of memory on each device
missing, fallback   operators that are not there, or that are computed on the host with a warning
wrong               operators whose results are multiplied by 1.02
"""

import contextlib
import ctypes
import os
import sys
import types
from collections import namedtuple

import simulated_build
import torch
import torch.distributed as dist

__version__ = "2.0.0+simulated"
SCHEDULES = ("none", "copies", "kernels", "both")
_NUMBERS = (
    "strict_threads",
    "no_pinned",
    "pinned_by_base",
    "no_float64",
    "no_float64_products",
    "short_products",
    "max_bytes",
)
_NAMES = ("missing", "fallback", "wrong")

_library = ctypes.CDLL(str(simulated_build.library()))
_library.sim_set_number.argtypes = [ctypes.c_char_p, ctypes.c_int64]
_library.sim_number.restype = ctypes.c_int64
for _name in ("sim_allocated", "sim_peak"):
    getattr(_library, _name).restype = ctypes.c_int64
_library.sim_seed.argtypes = [ctypes.c_int, ctypes.c_int64]


def configure(
    *, schedule: str = "both", no_streams: bool = False, **switches: bool | int | str
) -> None:
    """Set all switches; those not named are off."""
    unknown = set(switches) - set(_NUMBERS) - set(_NAMES)
    if unknown or schedule not in SCHEDULES:
        raise ValueError(f"no such switch of the simulated device: {unknown or schedule}")
    _library.sim_set_number(b"copies_late", schedule in ("copies", "both"))
    _library.sim_set_number(b"kernels_late", schedule in ("kernels", "both"))
    for name in _NUMBERS:
        _library.sim_set_number(name.encode(), int(switches.get(name, 0)))
    for name in _NAMES:
        named = [f"aten::{one}" for one in str(switches.get(name, "")).split("+") if one]
        _library.sim_set_text(name.encode(), ",".join(named).encode())
    for name in ("Stream", "stream"):
        if no_streams:
            vars(npu).pop(name, None)
        else:
            setattr(npu, name, globals()[name])


def counted(name: str) -> int:
    """How often something happened: ``num_run`` (work), ``num_waits`` (of the first thread, and
    ``num_waits_elsewhere``), ``num_reused`` (blocks of memory), ``num_waiting_operators`` (their
    shapes depend on values), ``num_unpinned`` (copies to memory that is not page-locked, which
    were waited for)."""
    return int(_library.sim_number(name.encode()))


class Stream(torch.Stream):
    def __new__(cls, device: torch.device | int | None = None, priority: int = 0, **kwargs):
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, _device(device), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False):
        return super().__new__(cls, "npu", enable_timing=enable_timing, blocking=blocking)


@contextlib.contextmanager
def stream(wanted: torch.Stream | None):
    if wanted is None:
        yield
        return
    device, before = torch.accelerator.current_device_index(), current_stream(wanted.device)
    torch.accelerator.set_stream(wanted)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        set_device(device)


def _device(device: torch.device | str | int | None) -> torch.device:
    return torch.device("npu", _index(device))


def _index(device: torch.device | str | int | None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def current_stream(device: torch.device | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_device(device))


def set_device(device: torch.device | str | int) -> None:
    torch.accelerator.set_device_index(_index(device))


_Properties = namedtuple("_Properties", "name total_memory")
_TOTAL_BYTES = 4 << 30


def get_device_properties(device=None) -> _Properties:
    return _Properties("Ascend910 (simulated)", counted("max_bytes") or _TOTAL_BYTES)


def mem_get_info(device=None) -> tuple[int, int]:
    total = get_device_properties(device).total_memory
    return total - memory_allocated(device), total


def memory_allocated(device=None) -> int:
    return _library.sim_allocated(_index(device))


def max_memory_allocated(device=None) -> int:
    return _library.sim_peak(_index(device))


def reset_peak_memory_stats(device=None) -> None:
    _library.sim_reset_peak(_index(device))


def manual_seed(seed: int) -> None:
    _library.sim_seed(_index(None), seed)


def manual_seed_all(seed: int) -> None:
    for index in range(2):
        _library.sim_seed(index, seed)


def npu_fusion_attention(*args, **kwargs):
    """transformers imports it; there is no such kernel here."""
    raise NotImplementedError("the simulated device has no fused attention")


def npu_rms_norm(self, gamma, epsilon=1e-6):
    """The vendor's own, by its schema: (y, rstd), added up in float32."""
    wide = self.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(self.dtype), rstd


def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    total = x1 + x2
    normed, rstd = npu_rms_norm(total, gamma, epsilon)
    return normed, rstd, total


def npu_swiglu(self, dim=-1):
    gate, up = self.chunk(2, dim)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(self.dtype)


def _collectives(store, rank: int, size: int, timeout):
    """What HCCL is here: the host's own; nothing of the device's goes through it."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _module() -> types.ModuleType:
    """torch.npu, as far as torch, transformers and divergence ask for it."""
    made = types.ModuleType("torch.npu")
    for function in (
        Event,
        Stream,
        stream,
        current_stream,
        get_device_properties,
        manual_seed,
        manual_seed_all,
        max_memory_allocated,
        mem_get_info,
        memory_allocated,
        reset_peak_memory_stats,
        set_device,
    ):
        setattr(made, function.__name__, function)
    made.device_count = lambda: 2
    made.is_available = made.is_bf16_supported = lambda: True
    made.is_initialized = lambda: counted("num_run") > 0
    made._is_in_bad_fork = lambda: False
    made.current_device = lambda: torch.accelerator.current_device_index()
    made.empty_cache = lambda: None
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    made.get_device_name = lambda device=None: get_device_properties(device).name
    made.synchronize = lambda device=None: torch.accelerator.synchronize(_device(device))
    made.matmul = types.SimpleNamespace(allow_hf32=True)
    made.conv = types.SimpleNamespace(allow_hf32=True)
    return made


npu = _module()
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
_library.sim_start()
torch.utils.generate_methods_for_privateuse1_backend()
sys.modules["torch.npu"] = npu
dist.Backend.register_backend("hccl", _collectives, devices=["npu"])
configure(
    **dict(part.split("=", 1) for part in os.environ.get("SIMULATED_NPU", "").split(",") if part)
)
