"""The processor and the build of torch, which decide the kernels that run; and free memory.

The name that the processor gives itself (the brand string of cpuid, in Linux ``model name``) is
shortened by clouds; maker, family, model and stepping tell two processors of one name apart. An Arm
core has no brand string: implementer and part number have the names below
(Arm, "Main ID Register"; Linux ``arch/arm64/include/asm/cputype.h``; util-linux ``lscpu-arm.c``).

The machine's own count of free memory is not enough in a container: its control group (v2, or the
older v1, and every group around it) may allow less.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["cpu_model", "cpu_name", "free_bytes", "torch_build"]

_CPUINFO = Path("/proc/cpuinfo")
_MAKERS = {
    0x41: "Arm", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "Fujitsu", 0x48: "HiSilicon",
    0x4E: "NVIDIA", 0x50: "Ampere", 0x51: "Qualcomm", 0x61: "Apple", 0x6D: "Microsoft",
    0x70: "Phytium", 0xC0: "Ampere",
}  # fmt: skip
_PARTS = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD07): "Cortex-A57", (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73", (0x41, 0xD0A): "Cortex-A75", (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1", (0x41, 0xD40): "Neoverse-V1", (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2", (0x41, 0xD83): "Neoverse-V3AE", (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3", (0x43, 0x0AF): "ThunderX2-99xx", (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "TaiShan-v110", (0x48, 0xD02): "TaiShan-v120", (0x4E, 0x004): "Carmel",
    (0xC0, 0xAC3): "Ampere-1", (0xC0, 0xAC4): "Ampere-1a", (0x6D, 0xD49): "Azure Cobalt 100",
    (0x70, 0x663): "FTC663", (0x70, 0x862): "FTC862",
}  # fmt: skip
_BUILD = (
    ("compiler", r"^\s*-?\s*((?:GCC|clang|MSVC|Clang|AppleClang) \S+)"),
    ("C++", r"C\+\+ Version: (\d+)"),
    ("MKL", r"Math Kernel Library Version (\S+)"),
    ("oneDNN", r"MKL-DNN (v[\d.]+)"),
    ("OpenMP", r"OpenMP (\d+)"),
    ("BLAS", r"\bBLAS_INFO=(\w+)"),
    ("LAPACK", r"\bLAPACK_INFO=(\w+)"),
    ("ACL", r"\bUSE_ACL=(\w+)"),
    ("OpenBLAS", r"OpenBLAS (\d\S*)"),
    ("CUDA runtime", r"CUDA Runtime ([\d.]+)"),
    ("cuDNN", r"CuDNN ([\d.]+)"),
    ("MAGMA", r"Magma ([\d.]+)"),
    ("commit", r"COMMIT_SHA=([0-9a-f]{12})"),
    ("flags", r"CXX_FLAGS=.*?(-O\d)"),
)
"""Name → where it stands in torch.__config__.show()."""
_ODD_FLAGS = ("-ffast-math", "-funsafe-math-optimizations", "-ffp-contract=fast", "-march=native")


def cpu_name() -> str:
    """What the processor calls itself."""
    info = _cpuinfo()
    name = info.get("model name", "")
    if name and not name.startswith("ARM"):  # old Arm kernels: "ARMv8 Processor rev 1"
        return name
    return _arm(info) or info.get("Model") or platform.processor() or platform.machine()


def cpu_model() -> str | None:
    """``GenuineIntel family 6 model 143 stepping 8``; ``Arm Neoverse-V2 (0x41/0xd4f) r0p1``."""
    info = _cpuinfo()
    if "vendor_id" in info and "cpu family" in info:
        numbers = (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
        told = " ".join(f"{say} {info[key]}" for say, key in numbers if key in info)
        return f"{info['vendor_id']} {told}"
    core = _arm(info)
    if core is None:
        return None
    ids = f"{info['CPU implementer']}/{info['CPU part']}"
    variant = f"r{_number(info.get('CPU variant'))}p{_number(info.get('CPU revision'))}"
    return f"{core} ({ids}) {variant}"


def torch_build() -> dict[str, str]:
    """Compiler and linear algebra of this torch, by name; what it does not tell is left out."""
    text = torch.__config__.show()
    build = {}
    for name, pattern in _BUILD:
        match = re.search(pattern, text, re.MULTILINE)
        if match is not None:
            build[name] = match[1].rstrip(",")
    flags = [flag for flag in _ODD_FLAGS if flag in text]
    if flags:
        build["flags"] = " ".join([*filter(None, [build.get("flags")]), *flags])
    return build


def _arm(info: dict[str, str]) -> str | None:
    try:
        maker, part = int(info["CPU implementer"], 16), int(info["CPU part"], 16)
    except (KeyError, ValueError):
        return None
    maker_name = _MAKERS.get(maker, f"maker {maker:#x}")
    return f"{maker_name} {_PARTS.get((maker, part), f'part {part:#x}')}"


def _number(text: str | None) -> str:
    try:
        return str(int(text or "", 0))
    except ValueError:
        return "?"


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines; on machines with cores of two kinds, all parts are in the last
    ones' names alone, and the first stands for them."""
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that can be taken on ``device`` now; 0 where nobody tells."""
    if device.type != "cpu":
        asked = getattr(getattr(torch, device.type, None), "mem_get_info", None)
        try:  # of CUDA, torch_npu, XPU; a driver may refuse to tell
            return 0 if asked is None else int(asked(device)[0])
        except (RuntimeError, NotImplementedError, AttributeError):
            return 0
    available = _count(_MEMINFO, "MemAvailable:")
    return min([*([] if available is None else [available * 1024]), *_groups()], default=0)


def _groups() -> Iterator[int]:
    """What each control group of this process may still take."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            root, limit, used, cached = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = _GROUPS / "memory", "memory.limit_in_bytes"
            used, cached = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            allowed, taken = _count(folder / limit), _count(folder / used)
            if allowed is not None and taken is not None:
                # pages of files that nobody reads now are given back when asked for
                taken -= _count(folder / "memory.stat", cached) or 0
                yield max(0, allowed - taken)


def _count(path: Path, key: str | None = None) -> int | None:
    """The number in a file, or beside ``key`` in it; None where there is none, or ``max``."""
    try:
        words = path.read_text().split()
        return int(words[0 if key is None else words.index(key) + 1])
    except (OSError, ValueError, IndexError):
        return None
