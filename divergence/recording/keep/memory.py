"""How much memory is left, so that caches stay out of the way.

The machine's own count is not enough in a container: its control group (v2, or the older
v1, and every group around it) may allow less.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["free_bytes"]

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that can be taken on ``device`` now; 0 where nobody tells."""
    import torch

    if device.type != "cpu":
        asked = getattr(getattr(torch, device.type, None), "mem_get_info", None)
        try:  # of CUDA, torch_npu, XPU; a driver may refuse to tell
            return 0 if asked is None else int(asked(device)[0])
        except (RuntimeError, NotImplementedError, AttributeError):
            return 0
    return min((*_meminfo(), *_groups()), default=0)


def _meminfo() -> Iterator[int]:
    value = _count(_MEMINFO, "MemAvailable:")
    if value is not None:
        yield value * 1024


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
            root, limit, used, cached = (
                _GROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
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
