"""A dump's files, which are hostile until proven otherwise: nothing of them is executed.

Names come from one walk that follows no symbolic link and refuses every one it meets. Tensors are
memory maps: opening a file reads its header alone, and no header is believed beyond the file's end.

``.pt``           a zip of stored members, its pickle read with ``weights_only=True``
``.safetensors``  the reader of the project's own shards (run.storage.shard)
``.npy``          without pickle
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divergence.errors import DumpError, RunFormatError, first_line
from divergence.numerics.formats import FORMATS
from divergence.run.schema.layout import SHARD_DTYPES, expanded

if TYPE_CHECKING:
    import torch

__all__ = ["SUFFIXES", "DumpFolder"]

SUFFIXES = (".pt", ".safetensors", ".npy")

_MAX_FILES = 2_000_000
_MAX_JSON_BYTES = 1 << 30
_MAX_LINE_BYTES = 1 << 28
_MAX_SPREAD_BYTES = 256 << 20
"""A view may repeat elements (an expanded mask); beyond this it may be no larger than its file."""


class DumpFolder:
    """``names``: of all regular files, relative, with slashes, in natural order of the system's
    names. A single file is a folder that holds nothing else."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        given = expanded(path)
        if not given.exists():
            raise DumpError("there is no such file or folder", where=str(given))
        self.path = given
        if given.is_file():
            self.root, self.names = given.parent, [given.name]
        else:
            self.root, self.names = given, sorted(_walk(given))
        if not self.names:
            raise DumpError("the folder holds no file", where=str(given))

    def where(self, name: str) -> str:
        return str(self.root / name)

    def json(self, name: str) -> Any:
        """A JSON file. Raises DumpError."""
        path = self._checked(name)
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise DumpError("the file is too long for a description of a dump", where=str(path))
        try:
            return json.loads(path.read_bytes())  # msgspec refuses the NaN that Python writes
        except (ValueError, RecursionError) as error:
            raise DumpError(
                f"the file is no JSON, or was cut off: {first_line(error)}", where=str(path),
                hint="dump again, and let the program end by itself",
            ) from error  # fmt: skip

    def lines(self, name: str) -> Iterator[bytes]:
        """A text file, line by line. Raises DumpError."""
        path = self._checked(name)
        with open(path, "rb") as file:
            while line := file.readline(_MAX_LINE_BYTES + 1):
                if len(line) > _MAX_LINE_BYTES:
                    raise DumpError(f"a line is longer than {_MAX_LINE_BYTES:,} bytes",
                                    where=str(path))  # fmt: skip
                yield line

    def regular(self, name: str) -> Path:
        """The file, which is one and is not empty. Raises DumpError."""
        return self._checked(name)

    def value(self, name: str) -> Any:
        """What a tensor file holds: a tensor, or tensors and plain values by key."""
        path = self._checked(name)
        if path.suffix == ".safetensors":
            return _safetensors(path)
        return _npy(path) if path.suffix == ".npy" else _pt(path)

    def _checked(self, name: str) -> Path:
        path = self.root / name
        try:
            status = os.lstat(path)
        except OSError as error:
            raise DumpError(
                "the file is missing, although the dump names it", where=str(path),
                hint="dump again, and let the program end by itself",
            ) from error  # fmt: skip
        if not stat.S_ISREG(status.st_mode):
            raise DumpError("this is no regular file", where=str(path))
        if status.st_size == 0:
            raise DumpError(
                "the file is empty: the dump is half written", where=str(path),
                hint="dump again, and let the program end by itself",
            )  # fmt: skip
        return path


def _walk(root: Path) -> list[str]:
    names: list[str] = []
    for folder, folders, files in os.walk(root, onerror=_refuse):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                raise DumpError(
                    "a dump may hold no symbolic link", where=str(path),
                    hint="copy the files themselves (cp -rL)",
                )  # fmt: skip
        names += [Path(folder, name).relative_to(root).as_posix() for name in files]
        if len(names) > _MAX_FILES:
            raise DumpError(f"more than {_MAX_FILES:,} files", where=str(root))
    return names


def _refuse(error: OSError) -> None:
    raise DumpError(f"cannot be read: {error.strerror}", where=str(error.filename)) from error


def _pt(path: Path) -> Any:
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            packed = [item for item in archive.infolist() if item.compress_type]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise _not_torch(path) from error
    if packed:
        raise DumpError("the file holds compressed members; torch.save writes none",
                        where=str(path))  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever hostile bytes make torch raise
        text = " ".join(str(error).split())
        code = re.search(r"GLOBAL ([\w.]+)", text) or re.search(r"class ([\w.]+)", text)
        if code:
            raise DumpError(
                f"the file is not plain tensors: it names {code[1]}, which is code",
                where=str(path),
                hint="save tensors alone: only what weights_only=True accepts is read",
            ) from error
        raise DumpError(
            f"the file cannot be read as tensors: {text[:200] or type(error).__name__}",
            where=str(path), hint="it may be half written: dump again",
        ) from error  # fmt: skip
    _check_tensors(value, path)
    return value


def _not_torch(path: Path) -> DumpError:
    with open(path, "rb") as file:
        head = file.read(2)
    if head == b"PK":
        return DumpError(
            "the file was cut off: the dump is half written", where=str(path),
            hint="dump again, and let the program end by itself",
        )  # fmt: skip
    return DumpError(
        "the file is none of torch.save, or a bare pickle, which could run code", where=str(path),
        hint="save it by torch.save as torch does since 1.6",
    )  # fmt: skip


def _check_tensors(value: Any, path: Path) -> None:
    """Refuses what is no plain tensor, and views that repeat elements beyond any bound."""
    import torch

    limit = max(path.stat().st_size, _MAX_SPREAD_BYTES)
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            if part.layout != torch.strided or part.is_quantized or part.device.type != "cpu":
                raise DumpError(
                    "the file holds a sparse, quantised or empty tensor, not plain numbers",
                    where=str(path),
                )
            if part.numel() * part.element_size() > limit:
                raise DumpError(
                    f"a tensor of shape {list(part.shape)} is larger than its file", where=str(path)
                )
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part


def _npy(path: Path) -> torch.Tensor:
    import numpy
    import torch

    try:
        array = numpy.load(path, mmap_mode="c", allow_pickle=False)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("="))
        return torch.from_numpy(numpy.asarray(array))
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise DumpError(
            f"the file cannot be read as one array: {first_line(error)}", where=str(path),
            hint="it may be half written, or hold objects or a dtype that numpy has not",
        ) from error  # fmt: skip


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    from divergence.run.storage.blob import LocalBlob
    from divergence.run.storage.shard import Shard

    names = {code: name for name, code in SHARD_DTYPES.items()}
    try:
        shard = Shard(LocalBlob(path))
        tensors = {}
        for key, entry in shard.entries.items():
            if entry.dtype not in names or min(entry.shape, default=0) < 0:
                raise DumpError(
                    f"tensor {key} is of dtype {entry.dtype}, which is not known", where=str(path)
                )
            form = FORMATS[names[entry.dtype]]
            if entry.num_bytes != math.prod(entry.shape) * form.itemsize:
                raise DumpError(
                    f"tensor {key} has {entry.num_bytes} bytes for a shape of {list(entry.shape)}",
                    where=str(path),
                )
            tensors[key] = shard.view(key, dtype=form.torch_dtype, shape=entry.shape)
        return tensors
    except RunFormatError as error:
        raise DumpError(
            error.message.replace("shard", "the file", 1), where=str(path),
            hint="it may be half written: dump again",
        ) from error  # fmt: skip
