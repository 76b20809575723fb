"""Files of other programs: hostile until proven otherwise, and nothing of them is executed."""

from __future__ import annotations

import math
import os
import pickletools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

from divergence.errors import DumpError, RunFormatError
from divergence.numerics.arrays import as_tensor, from_bytes
from divergence.numerics.formats import FORMATS
from divergence.outside import (
    MAX_VALUES,
    Budget,
    check_value,
    disk_bytes,
    inside,
    is_plain,
    json_value,
    lines,
    read_as,
    read_bytes,
)
from divergence.run.record import MAX_NUMEL, SHARD_DTYPES, expanded
from divergence.run.storage import Blob, MemoryBlob, Shard, members_of

# A dump's files. Names come from one walk that follows no symbolic link and refuses every one it
# meets, and whatever is no regular file. What a file may hold is the matter of divergence.outside.

_AGAIN = "dump again, and let the program end by itself"
SUFFIXES = (".pt", ".safetensors", ".npy")
LINES = (".jsonl", ".ndjson")
"""Of a file of JSON lines."""

_MAX_FILES = 2_000_000


class DumpFolder:
    """``names``: of all regular files, relative, with slashes, in natural order of the system's
    names. A single file is a folder that holds nothing else. ``budget``: of what all of them may
    become."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = given = expanded(path)
        self._place = str(given)
        if not os.path.exists(given):
            raise DumpError("there is no such file or folder", where=str(given))
        self.budget = Budget()
        if given.is_dir():
            self.root, self.names = given, sorted(_walk(given))
        else:
            self.root, self.names = given.parent, [given.name]
            inside(self.root, given.name)
        if not self.names:
            raise DumpError("the folder holds no file", where=str(given))

    def where(self, name: str) -> str:
        return str(self.root / name)

    def place(self) -> str:
        """The file, and line, that was read last: for what a reader trips over."""
        return self._place

    def json(self, name: str) -> Any:
        """A JSON file. Raises DumpError."""
        path = self.regular(name)
        return json_value(read_bytes(path), where=str(path), hint=_AGAIN)

    def lines(self, name: str) -> Iterator[bytes]:
        """A text file, line by line. Raises DumpError."""
        path = self.regular(name)
        for number, line in enumerate(lines(path), 1):
            self._place = f"{path}, line {number}"
            yield line

    def objects(self, *endings: str) -> Iterator[tuple[Any, str]]:
        """The JSON value of each line that is not blank, or of each entry of a ``.json`` that is
        one list, and where it stands, of all files that have one of these endings. Raises
        DumpError."""
        for name in self.names:
            if name.endswith(endings):
                is_list = self.is_list(name)
                rows = enumerate(self.json(name)) if is_list else self.rows(name)
                for number, item in rows:
                    yield item, f"{self.where(name)}, {'entry' if is_list else 'line'} {number}"

    def is_list(self, name: str) -> bool:
        """Is a file one JSON list, and not JSON lines?"""
        if not name.endswith(".json"):
            return False
        with self.regular(name).open("rb") as file:
            return file.read(64).lstrip().startswith(b"[")

    def rows(self, name: str) -> Iterator[tuple[int, Any]]:
        """Each line's number and JSON value, of one file. Raises DumpError."""
        file = self.where(name)
        for number, line in enumerate(self.lines(name), 1):
            if line.strip():
                hint = "write the file again, and let the program end by itself"
                yield number, json_value(line, where=f"{file}, line {number}", hint=hint)

    def first_fields(self, name: str) -> dict[str, Any]:
        """The fields of a file's first line; none where it cannot be read, or is no object."""
        try:
            _, item = next(self.rows(name))
        except (DumpError, StopIteration):
            return {}
        return item if isinstance(item, dict) else {}

    def regular(self, name: str) -> Path:
        """The file, which is one, is not empty and has no holes to speak of. Raises DumpError."""
        path = inside(self.root, name, hint=_AGAIN)
        self._place = str(path)
        size = path.stat().st_size
        if not size:
            raise DumpError(
                "the file is empty: the dump is half written", where=str(path), hint=_AGAIN
            )
        self.budget.expand(size, disk=disk_bytes(path), where=str(path))
        return path

    def value(self, name: str) -> Any:
        """Return what a tensor file holds: a tensor, or tensors and plain values by key."""
        return tensors_of(self.regular(name), self.budget)


def _walk(root: Path) -> list[str]:
    names: list[str] = []
    folders = [""]
    for folder in folders:  # which grows meanwhile
        try:
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/")
                    elif entry.is_file(follow_symlinks=False):
                        names.append(name)
                    else:
                        raise DumpError(
                            "a dump may hold no symbolic link, pipe or device",
                            where=entry.path,
                            hint="copy the files themselves (cp -rL)",
                        )
                    if len(names) + len(folders) > _MAX_FILES:
                        raise DumpError(f"more than {_MAX_FILES:,} files", where=str(root))
        except OSError as error:
            raise DumpError(
                f"cannot be read: {error.strerror}", where=str(root / folder)
            ) from error
    return names


# Tensors in files, each as a memory map: opening one reads its header alone; of torch.save's, which
# are read without torch.load, its pickle.
#
# ``.pt``           by ``load_torch``
# ``.safetensors``  the reader of the project's own shards (run.storage)
# ``.npy``          by its header, of which numpy would make Python's syntax
#
# A file that says more than it holds, or spreads out to more than ``budget`` allows, is refused.

_FORMS = {".npy": "numpy.save", ".safetensors": "safetensors"}  # torch.save's are many
_HALF_WRITTEN = "it may be half written: dump again"
_MAX_HEADER_BYTES = 10_000
_HEADER = re.compile(
    rb"\{(?:(?:(['\"])descr\1:(['\"])(?P<descr>[<>|=]?[a-zA-Z][0-9]{1,2})\2"
    rb"|(['\"])fortran_order\4:(?P<fortran>True|False)"
    rb"|(['\"])shape\6:\((?P<shape>[0-9L,]*)\)),?){3}\}"
)


def tensors_of(path: Path, budget: Budget, *, beside: bool = False) -> Any:
    """Return what a file holds: a tensor, or tensors and plain values by key. ``beside``: settings
    and random numbers that training programs store beside weights become None, and are not refused.
    Raises DumpError."""
    where, readers = str(path), {".npy": _npy, ".safetensors": _safetensors}
    with read_as(_FORMS.get(path.suffix, "torch.save"), where=where, hint=_HALF_WRITTEN):
        disk = disk_bytes(path)
        budget.expand(path.stat().st_size, disk=disk, where=where)  # less is there: it has holes
        # a private map: Python's own each keep the file open, and a dump may have more files than a
        # process may open
        size = path.stat().st_size
        mapped = torch.from_file(where, shared=False, size=size, dtype=torch.uint8)
        read: Callable[[Blob], Any] = partial(load_torch, beside=beside)
        read = readers.get(path.suffix, read)
        value = read(MemoryBlob(where, mapped.numpy().data))
        # each value takes a byte of a file that does not repeat them
        check_value(value, where=where, most=min(MAX_VALUES, size))
        num_bytes, parts = 0, [value]
        while parts:
            part = parts.pop()
            if isinstance(part, torch.Tensor):
                num_bytes += part.numel() * part.element_size()
                if math.prod(max(size, 1) for size in part.shape) > MAX_NUMEL:
                    raise DumpError(f"a tensor has the shape {list(part.shape)}", where=where)
            elif isinstance(part, dict):
                parts += part.values()
            elif isinstance(part, list | tuple):
                parts += part
        budget.expand(num_bytes, disk=disk, where=where)
        return value


def _npy(blob: Blob) -> torch.Tensor:
    head = blob.read(0, 12)
    begin = 10 if head[6:7] == b"\1" else 12
    length = int.from_bytes(head[8:begin], "little")
    text = blob.read(begin, min(length, _MAX_HEADER_BYTES))
    match = _HEADER.fullmatch(b"".join(text.split()))
    if head[:6] != b"\x93NUMPY" or match is None or None in match.groups()[2::2]:
        raise DumpError(
            "the file cannot be read as one array of numbers",
            where=blob.name,
            hint="it may be half written, an archive of several arrays, or hold objects",
        )
    shape = tuple(int(size.rstrip(b"L")) for size in match["shape"].split(b",") if size)
    dtype = numpy.dtype(match["descr"].decode())
    num_bytes = math.prod(shape) * dtype.itemsize
    if dtype.kind not in "biufc" or begin + length + num_bytes > blob.size:
        raise DumpError(
            f"the file cannot be read as one array of {dtype}: it is to hold {num_bytes:,} bytes",
            where=blob.name,
            hint=_HALF_WRITTEN,
        )
    order: Literal["F", "C"] = "F" if match["fortran"] == b"True" else "C"
    array: numpy.ndarray = numpy.frombuffer(blob.view(begin + length, num_bytes), dtype)
    array = array.reshape(shape, order=order)
    is_plain = array.flags.aligned and dtype.isnative
    return torch.from_numpy(array if is_plain else array.astype(dtype.newbyteorder("=")))


def _safetensors(blob: Blob) -> dict[str, torch.Tensor]:
    names = {code: name for name, code in SHARD_DTYPES.items()}
    try:
        shard = Shard(blob)
        tensors = {}
        for key, entry in shard.entries.items():
            if entry.dtype not in names or min(entry.shape, default=0) < 0:
                raise DumpError(
                    f"tensor {key} is of dtype {entry.dtype} and shape {list(entry.shape)}, which "
                    "is not known",
                    where=blob.name,
                )
            form = FORMATS[names[entry.dtype]]
            if entry.num_bytes != math.prod(entry.shape) * form.itemsize:
                raise DumpError(
                    f"tensor {key} has {entry.num_bytes} bytes for a shape of {list(entry.shape)}",
                    where=blob.name,
                )
            tensors[key] = as_tensor(
                from_bytes(shard.stretch(key, entry.num_bytes), form, entry.shape)
            )
        return tensors
    except RunFormatError as error:
        raise DumpError(
            error.message.replace("shard", "the file", 1), where=blob.name, hint=_HALF_WRITTEN
        ) from error


# The file is a zip of stored members: a pickle, and the bytes of each storage. The pickle is gone
# through here, opcode by opcode, so that nothing is called but what stands in ``_MAKERS``, nothing
# becomes larger than the file says it, and a tensor is a view of the map of its storage. Whatever
# else a pickle may name (``weights_only=True`` also knows sparse, nested and quantised tensors,
# subclasses, counters, codecs) is refused with its name.

_MAX_STEPS = 2 * MAX_VALUES
"""Opcodes of one pickle: a tensor takes some 40, a number of a rollout's list one."""
_MAX_AXES = 64
_ALIGNED = 16
_MAX_KEY = 1 << 32
"""Python's hashes of larger integers can be made equal, and a table of such keys takes forever."""
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


def load_torch(archive: Blob, *, beside: bool = False) -> Any:
    """Return what a file holds: a tensor, or tensors and plain values in lists and tables. Raises
    DumpError, and whatever bytes that torch.save never wrote lead to."""
    where = archive.name
    if archive.read(0, 2) != b"PK":
        raise DumpError(
            "the file is none of torch.save, or a bare pickle, which could run code",
            where=where,
            hint="save it by torch.save as torch does since 1.6",
        )
    try:
        members = members_of(archive, "zip")
        if any(member.deflated for member in members.values()):
            raise DumpError(
                "the file holds compressed members; torch.save writes none", where=where
            )
        files = {name: member.part(archive, name) for name, member in members.items()}
    except RunFormatError as error:
        raise DumpError(
            error.message.replace("archive", "file"),
            where=where,
            hint=f"it may have been cut off: {_AGAIN}",
        ) from error
    pickles = [name for name in files if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise DumpError(
            f"the file holds {len(pickles)} members called data.pkl, not one",
            where=where,
            hint="save it by torch.save",
        )
    folder = pickles[0].removesuffix("data.pkl")
    order = files.get(f"{folder}byteorder")
    if order is not None and order.read(0, 9) != b"little":
        raise DumpError(
            "the file was written by a big-endian machine, and is not read",
            where=where,
            hint="save it on a little-endian machine",
        )
    return _Pickle(files, folder, where, beside).value(files[pickles[0]])


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes of one storage, and what they are elements of."""

    bytes: torch.Tensor
    dtype: torch.dtype


class _Pickle:
    """The machine that a pickle is a program of, without all that torch.save does not use."""

    def __init__(self, files: dict[str, Blob], folder: str, where: str, beside: bool) -> None:
        self._files, self._folder, self._where, self._beside = files, folder, where, beside
        self._bytes: dict[str, torch.Tensor] = {}

    def value(self, blob: Blob) -> Any:
        """Return what the program leaves."""
        stack: list[Any] = []
        outer: list[list[Any]] = []
        memo: dict[int, Any] = {}
        arg: Any
        for step, (code, arg, _) in enumerate(pickletools.genops(blob.read(0, blob.size))):
            if step >= _MAX_STEPS:
                raise DumpError(f"its pickle has over {_MAX_STEPS:,} steps", where=self._where)
            match code.name:
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return stack.pop()
                case "MARK":
                    outer.append(stack)
                    stack = []
                case "TUPLE" | "APPENDS" | "SETITEMS" | "ADDITEMS":
                    items, stack = stack, outer.pop()
                    if code.name == "TUPLE":
                        stack.append(tuple(items))
                    else:
                        self._add(stack[-1], items)
                case "APPEND" | "SETITEM":
                    count = 1 if code.name == "APPEND" else 2
                    items, stack[-count:] = stack[-count:], []
                    self._add(stack[-1], items)
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    count = int(code.name[-1])
                    stack[-count:] = [tuple(stack[-count:])]
                case "EMPTY_TUPLE" | "NONE" | "NEWTRUE" | "NEWFALSE":
                    stack.append(_SINGLE[code.name])
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST" | "EMPTY_SET":
                    stack.append([])
                case "BINPUT" | "LONG_BINPUT":
                    memo[arg] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[arg])
                case "GLOBAL":
                    stack.append(self._global(*arg.split(" ", 1)))
                case "STACK_GLOBAL":
                    name, module = stack.pop(), stack.pop()
                    stack.append(self._global(module, name))
                case "REDUCE" | "NEWOBJ":
                    arguments = stack.pop()
                    stack[-1] = stack[-1](self, *arguments)
                case "BUILD":  # attributes of a table or tensor, which are none of its numbers
                    stack.pop()
                case "BINPERSID":
                    stack.append(self._storage(*stack.pop()))
                case name if name in _CONSTANTS:
                    stack.append(arg)
                case name:
                    raise DumpError(
                        f"its pickle holds {name}, which torch.save does not write",
                        where=self._where,
                    )
        raise DumpError("its pickle has no end", where=self._where, hint=_AGAIN)

    def _add(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, list):
            target += items
            return
        if not isinstance(target, dict):
            raise DumpError("its pickle adds to what is no list or table", where=self._where)
        for key, item in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < _MAX_KEY):
                raise DumpError(
                    f"a table in it has a key of type {type(key).__name__}", where=self._where
                )
            target[key] = item

    def _global(self, module: str, name: str) -> Any:
        """Return what stands for a name of Python's in the pickle."""
        maker = _MAKERS.get(f"{module}.{name}")
        if maker is not None:
            return maker
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if f"{module}.{name}".startswith(("torch._utils._rebuild_", "torch._tensor._rebuild_")):
            raise DumpError(
                "the file holds a sparse, quantised, nested or empty tensor, or one of a class of "
                f"its own, not plain numbers: {name}",
                where=self._where,
                hint="save tensor.detach().cpu().to_dense()",
            )
        if self._beside and f"{module}.{name}".startswith(_BESIDE):
            return lambda _, *rest: None
        raise DumpError(
            f"the file is not plain tensors: it names {module}.{name}, which is code",
            where=self._where,
            hint="save tensors alone: nothing that a file names is called",
        )

    def _storage(self, kind: str, dtype: Any, key: str, location: str, num: int) -> _Storage:
        """A storage by what the pickle says of it. ``num``: of its elements; torch writes more
        bytes for none, so it is not gone by."""
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not is_plain(key):
            raise DumpError("its pickle names what is no storage", where=self._where)
        blob = self._files.get(f"{self._folder}data/{key}")
        if blob is None or location == "meta":
            raise DumpError(
                f"the bytes of storage {key!r} are missing", where=self._where, hint=_AGAIN
            )
        if key not in self._bytes:
            data = torch.empty(0, dtype=torch.uint8)
            if blob.size:
                data = torch.frombuffer(blob.view(0, blob.size), dtype=torch.uint8)
            # torch aligns what it writes; others need not
            self._bytes[key] = data.clone() if data.data_ptr() % _ALIGNED else data
        return _Storage(self._bytes[key], dtype)

    def tensor(
        self,
        storage: _Storage,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        requires_grad: bool = False,
        hooks: Any = None,
        metadata: Any = None,
    ) -> torch.Tensor:
        """A tensor of a storage (torch._utils._rebuild_tensor_v2)."""
        return self.tensor_v3(storage, offset, size, stride, False, None, storage.dtype, metadata)

    def tensor_v3(
        self,
        storage: _Storage,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        requires_grad: bool,
        hooks: Any,
        dtype: torch.dtype,
        metadata: Any = None,
    ) -> torch.Tensor:
        """The same, of a dtype that has no storage of its own name."""
        if metadata:
            raise DumpError(
                "the file holds a conjugated or negated view of a tensor, not plain numbers",
                where=self._where,
                hint="save tensor.resolve_conj().resolve_neg()",
            )
        if len(size) != len(stride) or len(size) > _MAX_AXES:
            raise DumpError(
                f"the file holds a tensor of {len(size)} axes and {len(stride)} strides",
                where=self._where,
            )
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *size, *stride)):
            raise DumpError(
                "the file holds a tensor whose shape, strides or offset are negative "
                "or no integers",
                where=self._where,
            )
        num = storage.bytes.numel() // dtype.itemsize
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if math.prod(size) == 0:
            return torch.empty(tuple(size), dtype=dtype)
        if last >= num:
            raise DumpError(
                f"a tensor of shape {list(size)} ends at element {last + 1} of {num} in its "
                "storage",
                where=self._where,
                hint=_AGAIN,
            )
        flat = storage.bytes[: num * dtype.itemsize].view(dtype)
        return flat.as_strided(tuple(size), tuple(stride), offset)


_BESIDE = tuple(
    "argparse.Namespace megatron. numpy.core. numpy._core. numpy.ndarray numpy.dtype "
    "signal.".split()
)
"""Names in Megatron's checkpoints that stand for no tensor. Nothing is called by them either."""
_SINGLE: dict[str, Any] = {"EMPTY_TUPLE": (), "NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONSTANTS = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES "
    "SHORT_BINBYTES BINBYTES8".split()
)
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _Pickle.tensor,
    "torch._utils._rebuild_tensor_v2": _Pickle.tensor,
    "torch._utils._rebuild_tensor_v3": _Pickle.tensor_v3,
    "torch._utils._rebuild_parameter": lambda _, tensor, *rest: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda _, tensor, *rest: tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda _, tensor, *rest: tensor,
    "collections.OrderedDict": lambda _: {},
    "torch.Size": lambda _, sizes=(): sizes,
    "torch.device": lambda _, *parts: None,
    "_codecs.encode": lambda _, text, encoding: text,
    **{
        f"{module}.{name}": lambda _, items=(), *rest: items
        for module in ("builtins", "__builtin__")
        for name in ("set", "bytearray", "complex")
    },
}
"""By name: what is made in its place. What is not asked for stays as it was written, and nothing is
copied: a pickle may call a thing a million times."""
