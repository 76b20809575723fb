"""A checkpoint's contents, tensor by tensor: nothing of it is run, and one tensor at a time is
read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from divergence.errors import UsageError
from divergence.numerics.formats import format_named
from divergence.outside import Budget, json_value, read_bytes
from divergence.run.tensor_files import tensors_of

_ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint. ``dtype``: torch's name, or GGUF's of a type of its own, whose
    numbers ``read`` gives in float32."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """``form``: how it is stored, for people. ``architecture``: of a GGUF file, which has names of
    its own, with the number of its blocks."""

    source: str
    form: str
    tensors: dict[str, Stored]
    architecture: tuple[str, int] | None = None

    @property
    def num_elements(self) -> int:
        """Count the elements of all tensors together."""
        return sum(torch.Size(stored.shape).numel() for stored in self.tensors.values())


def open_checkpoint(source: str) -> StoredWeights:
    """A directory with safetensors or ``torch.save`` files, or one file of these or of GGUF.

    Raises UsageError where there is none, and DumpError for a file that is damaged or would run
    code.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _stored_in(source, [path])
    if not path.is_dir():
        raise UsageError(
            f"{source} is no file and no directory",
            hint="a checkpoint's directory, or a .safetensors, .gguf, .bin or .pt file; of a hub "
            "id the directory that `hf download` prints",
        )
    for index in _INDEXES:
        if (path / index).is_file():
            return _stored_in(source, _sharded(path / index))
    for pattern in ("*.safetensors", "*.gguf", "pytorch_model*.bin", "*.pt", "*.pth", "*.bin"):
        if files := sorted(path.glob(pattern)):
            return _stored_in(source, files)
    raise UsageError(
        f"{source} holds no weights",
        hint="files of safetensors, GGUF or torch.save: model.safetensors, *.gguf, *.bin, *.pt",
    )


def _sharded(index: Path) -> list[Path]:
    table = json_value(read_bytes(index, error=UsageError), where=str(index), error=UsageError)
    try:
        names = sorted(set(table["weight_map"].values()))
        files = [index.parent / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} names no files: {error}", hint="download it again") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UsageError(
            f"{index.parent} lacks {len(missing)} of its {len(files)} files: {missing[0]}",
            hint="a download that was cut short? what is there can be compared file by file",
        )
    return files


def _stored_in(source: str, files: list[Path]) -> StoredWeights:
    kind = files[0].suffix
    if kind not in _ENDINGS:
        raise UsageError(
            f"{files[0]} is no file of weights by its name", hint=f"one of {', '.join(_ENDINGS)}"
        )
    if kind == ".gguf":
        if len(files) > 1:
            raise UsageError(f"{source} holds {len(files)} GGUF files", hint="name one of them")
        return _gguf(source, files[0])
    read = _safetensors if kind == ".safetensors" else _torch
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in read(file):
            if name in tensors:
                raise UsageError(f"{source}: {name} is stored twice, again in {file.name}")
            tensors[name] = stored
    if not tensors:
        raise UsageError(f"{source} stores no tensors")
    form = "safetensors" if kind == ".safetensors" else "torch.save"
    return StoredWeights(
        source, form + (f", {len(files)} files" if len(files) > 1 else ""), tensors
    )


def _safetensors(file: Path) -> Iterator[tuple[str, Stored]]:
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            part = opened.get_slice(name)
            dtype = format_named(part.get_dtype()).name
            yield name, Stored(tuple(part.get_shape()), dtype, partial(opened.get_tensor, name))
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{file} cannot be read: {error}", hint="a download that was cut short? get it again"
        ) from error


def _torch(file: Path) -> Iterator[tuple[str, Stored]]:
    """Tensors of a state dict, under ``state_dict`` or ``model`` too: read without its pickle."""
    value = tensors_of(file, Budget())
    for key in ("state_dict", "model", "module"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    for name, tensor in value.items() if isinstance(value, dict) else ():
        if isinstance(tensor, torch.Tensor):
            form = str(tensor.dtype).removeprefix("torch.")
            yield str(name), Stored(tuple(tensor.shape), form, tensor.detach)


def _gguf(source: str, file: Path) -> StoredWeights:
    try:
        import gguf
    except ImportError as error:
        raise UsageError(
            "GGUF files are read by the package gguf", hint="pip install 'divergence-debug[gguf]'"
        ) from error
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(
            f"{file} is no GGUF file that can be read: {error}",
            hint="a download that was cut short? get it again",
        ) from error

    def read(tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        values = np.require(gguf.dequantize(tensor.data, tensor.tensor_type), requirements="W")
        return torch.from_numpy(values).reshape(shape)

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        dtype = names.get(tensor.tensor_type.name, tensor.tensor_type.name)
        tensors[tensor.name] = Stored(shape, dtype, partial(read, tensor, shape))
    kind = reader.get_field("general.architecture")
    architecture = None if kind is None else str(kind.contents())
    blocks = None if kind is None else reader.get_field(f"{architecture}.block_count")
    number = 0 if blocks is None else int(blocks.contents())
    return StoredWeights(
        source, "GGUF", tensors, None if architecture is None else (architecture, number)
    )


def gguf_names(names: list[str], architecture: tuple[str, int]) -> dict[str, str]:
    """Names of Hugging Face → those of a GGUF file of that architecture, where it has one."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture[0] not in kinds:
        return {}
    table = gguf.get_tensor_name_map(kinds[architecture[0]], architecture[1])
    there = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    return {name: other for name, other in there.items() if other is not None}
