"""One safetensors shard, read without copying: a checked header and a private memory map.

The header is parsed here, and not by the safetensors library, because a damaged
shard must be named precisely (which tensor, how many bytes are missing) and
because tensors are handed out as views of the map, so that a comparison can
stream through dumps larger than memory. Writing goes through the library.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from divergence.errors import RunFormatError

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "Shard"]

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor lies in the file."""

    begin: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


class Shard:
    """An open shard. ``entries`` by key; ``view`` gives a tensor over the map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_header(path)
        self._map: mmap.mmap | None = None

    def view(self, key: str, *, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor at ``key`` as a view (never write to it). Raises RunFormatError."""
        import torch

        entry = self.entries[key]
        wanted = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        if entry.num_bytes != wanted:
            raise RunFormatError(
                f"tensor {key} holds {entry.num_bytes} bytes, its record needs {wanted}",
                where=str(self.path),
            )
        if wanted == 0:
            return torch.empty(shape, dtype=dtype)
        if self._map is None:
            with open(self.path, "rb") as file:
                # Private copy-on-write: torch wants a writable buffer, the file stays as it is.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=wanted, offset=entry.begin)
        if entry.begin % torch.empty((), dtype=dtype).element_size():
            raw = raw.clone()  # an unaligned writer: view() below needs alignment
        return raw.view(dtype).view(shape) if shape else raw.view(dtype)[0]

    def close(self) -> None:
        """Drop the map; views that are still alive keep it open."""
        self._map = None


def _read_header(path: Path) -> dict[str, Entry]:
    size = os.stat(path).st_size
    where = str(path)

    def damaged(what: str) -> RunFormatError:
        return RunFormatError(
            f"shard is damaged: {what}",
            where=where,
            hint="copy it again from the machine that wrote it (divergence inspect RUN --verify)",
        )

    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise damaged(f"{size} bytes, too short for a header")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise damaged(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise damaged(f"header is not JSON ({error})") from error
    except OSError as error:
        raise damaged(f"cannot be read ({error.strerror})") from error
    if not isinstance(header, dict):
        raise damaged("header is not a JSON object")
    header.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    for key, value in header.items():
        try:
            begin, end = value["data_offsets"]
            entry = Entry(
                begin=8 + length + int(begin),
                num_bytes=int(end) - int(begin),
                dtype=str(value["dtype"]),
                shape=tuple(int(n) for n in value["shape"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"entry {key!r} is malformed") from error
        if entry.num_bytes < 0 or begin < 0:
            raise damaged(f"entry {key!r} has negative offsets")
        if entry.begin + entry.num_bytes > size:
            missing = entry.begin + entry.num_bytes - size
            raise damaged(f"tensor {key} is cut off, {missing} bytes are missing (truncated file)")
        entries[key] = entry
    return entries
