"""A checkpoint's contents, tensor by tensor: nothing of it is run, and one tensor at a time is
read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from divergence.errors import UsageError
from divergence.numerics.formats import format_named
from divergence.outside import Budget, json_value, read_as, read_bytes
from divergence.run.foreign import tensors_of

_ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
_MOST_PARTS = 10_000
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint. ``dtype``: torch's name, or GGUF's of a type of its own, whose
    numbers ``read`` gives in float32. ``row``: reads one number of the first axis alone."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]
    row: Callable[[int], torch.Tensor] | None = None


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
    patterns = ("*.safetensors", "*.gguf", "pytorch_model*.bin", "*.pt", "*.pth", "*.bin", "*.ckpt")
    for pattern in (*patterns, *(f"mp_rank_*/{name}" for name in patterns)):
        if files := sorted(path.glob(pattern)):
            return _stored_in(source, files)
    if steps := sorted(path.glob("iter_*")):
        if len(steps) > 1:
            raise UsageError(
                f"{source} holds {len(steps)} checkpoints of Megatron",
                hint=f"name one of them: {steps[-1]}",
            )
        return open_checkpoint(str(steps[0]))
    if files := sorted(path.glob("*.distcp")):
        raise UsageError(
            f"{source} is a checkpoint of torch.distributed.checkpoint, which is not read here",
            hint="python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY "
            "model.pt makes one file of it",
        )
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
    return _complete(files)


def _complete(files: list[Path]) -> list[Path]:
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UsageError(
            f"{files[0].parent} lacks {len(missing)} of its {len(files)} files: {missing[0]}",
            hint="a download that was cut short? get the rest"
            + ("" if files[0].suffix == ".gguf" else ", or compare what is there file by file"),
        )
    return files


_PART = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")


def _parts(file: Path) -> list[Path]:
    """The files of which this one is a part, as llama.cpp's gguf-split names them."""
    match = _PART.search(file.name)
    if match is None:
        return [file]
    numbers = range(1, min(int(match[1]), _MOST_PARTS) + 1)
    names = [_PART.sub(f"-{number:05d}-of-{match[1]}", file.name) for number in numbers]
    return _complete([file.with_name(name) for name in names])


def _stored_in(source: str, files: list[Path]) -> StoredWeights:
    if other := [file for file in files if not file.is_file()]:
        raise UsageError(f"{other[0]} is no regular file")
    kind = files[0].suffix
    if kind not in _ENDINGS:
        raise UsageError(
            f"{files[0]} is no file of weights by its name", hint=f"one of {', '.join(_ENDINGS)}"
        )
    if kind == ".gguf":
        if len({_PART.sub("", file.name) for file in files}) > 1:
            raise UsageError(f"{source} holds {len(files)} GGUF files", hint="name one of them")
        return _gguf(source, _parts(files[0]))
    read = _safetensors if kind == ".safetensors" else _torch
    ranks = [_RANK.search("/".join(file.parts[-2:])) for file in files]
    if None not in ranks and len(files) > 1:
        places = [[int(n) for n in re.findall(r"\d+", rank[0])] for rank in ranks if rank]
        axes = [set(axis) for axis in zip(*places, strict=False)]
        if any(axis != {*range(len(axis))} for axis in axes) or math.prod(map(len, axes)) > len(
            files
        ):
            raise UsageError(
                f"{source} lacks a rank: there are {', '.join(rank[0] for rank in ranks if rank)}",
                hint="copy the folders of all ranks together",
            )
        tensors = _of_ranks([rank[0] for rank in ranks if rank], [dict(read(f)) for f in files])
    else:
        tensors = {}
        for file in files:
            for name, stored in read(file):
                if name in tensors:
                    raise UsageError(f"{source}: {name} is stored twice, again in {file.name}")
                tensors[name] = stored
    tensors = _scaled(tensors)
    if not tensors:
        raise UsageError(f"{source} stores no tensors")
    form = "safetensors" if kind == ".safetensors" else "torch.save"
    form += f", {len(files)} files" if len(files) > 1 else ONE_RANK if ranks[0] else ""
    return StoredWeights(source, form, tensors)


ONE_RANK = ", one rank"
_RANK = re.compile(r"mp_rank_(\d+)(_(\d+))?|consolidated\.(\d+)")
_BLOCK = re.compile(r"\blayers\.(\d+)\.")


def _of_ranks(names: list[str], shards: list[dict[str, Stored]]) -> dict[str, Stored]:
    """Ranks of tensor parallelism joined, stages of pipeline parallelism one after another: each
    counts its blocks from 0."""
    stages: dict[str, list[dict[str, Stored]]] = {}
    for name, shard in zip(names, shards, strict=True):
        match = _RANK.fullmatch(name)
        stages.setdefault((match and match[3]) or "", []).append(shard)
    tensors: dict[str, Stored] = {}
    for _, stage in sorted(stages.items()):
        blocks = [int(number) for name in tensors for number in _BLOCK.findall(name)]
        before = max(blocks, default=-1) + 1
        for name, stored in _of_stage(stage).items():
            number = _BLOCK.search(name)
            if number is not None:
                name = _BLOCK.sub(f"layers.{int(number[1]) + before}.", name)
            tensors.setdefault(name, stored)
    return tensors


_CUT_IN_COLUMNS = re.compile(
    r"\.(linear_proj|linear_fc2|dense|dense_4h_to_h|o_proj|down_proj|wo|w2|tok_embeddings)\.weight$"
)
_GATED = re.compile(r"\.(linear_fc1|dense_h_to_4h)\.")


def _of_stage(shards: list[dict[str, Stored]]) -> dict[str, Stored]:
    """Ranks of tensor parallelism as one: layers are cut in columns where they sum over ranks, else
    in rows; what is equal on all, and has one axis, was not cut."""
    whole: dict[str, Stored] = {}
    for name, first in shards[0].items():
        parts = [shard[name] for shard in shards if name in shard]
        if len(parts) < len(shards) or not first.shape:
            whole[name] = first
            continue
        axis = 1 if _CUT_IN_COLUMNS.search(name) and len(first.shape) == 2 else 0
        is_norm = len(first.shape) == 1 and ("norm" in name or _CUT_IN_COLUMNS.search(name))
        if is_norm or name.endswith((".gate.weight", "router.weight")):
            whole[name] = first
            continue
        shape = list(first.shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        read = partial(_joined, parts, axis, 2 if _GATED.search(name) else 1)
        whole[name] = replace(first, shape=tuple(shape), read=read, row=None)
    return whole


def _joined(parts: list[Stored], axis: int, num: int) -> torch.Tensor:
    """``num``: of a gate and what it gates each rank has a part of its own."""
    tensors = [part.read().chunk(num, axis) for part in parts]
    return torch.cat([each for column in zip(*tensors, strict=True) for each in column], axis)


_SCALE = re.compile(r"_scale(_inv)?$")


def _scaled(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Codes of 8 bits with the scale that stands beside them: one number, of each row, or of blocks
    of rows and columns."""
    scales = {name: _SCALE.sub("", name) for name in tensors if _SCALE.search(name)}
    whole = dict(tensors)
    for name, own in scales.items():
        codes = tensors.get(own)
        if codes is not None and codes.dtype.startswith(("float8", "int8")):
            whole[own] = replace(codes, read=partial(_times, codes, tensors[name]), row=None)
            del whole[name]
    return whole


def _times(codes: Stored, scale: Stored) -> torch.Tensor:
    values, factors = codes.read().float(), scale.read().float()
    if factors.numel() > 1:
        for axis, size in enumerate(factors.shape):
            repeats = -(-values.shape[axis] // size)
            factors = factors.repeat_interleave(repeats, axis).narrow(axis, 0, values.shape[axis])
    return values * factors


def _safetensors(file: Path) -> Iterator[tuple[str, Stored]]:
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            part = opened.get_slice(name)
            dtype = format_named(part.get_dtype()).name
            read, row = partial(opened.get_tensor, name), part.__getitem__
            yield name, Stored(tuple(part.get_shape()), dtype, read, row)
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{file} cannot be read: {error}", hint="a download that was cut short? get it again"
        ) from error


def _torch(file: Path) -> Iterator[tuple[str, Stored]]:
    """Tensors of a state dict, under ``state_dict`` or ``model`` too: read without its pickle."""
    value = tensors_of(file, Budget(), beside=True)
    for key in ("state_dict", "model", "module"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    for name, tensor in value.items() if isinstance(value, dict) else ():
        if isinstance(tensor, torch.Tensor):
            form = str(tensor.dtype).removeprefix("torch.")
            yield str(name), Stored(tuple(tensor.shape), form, tensor.detach)


def _gguf(source: str, files: list[Path]) -> StoredWeights:
    try:
        import gguf
    except ImportError as error:
        raise UsageError(
            "GGUF files are read by the package gguf", hint="pip install 'divergence-debug[gguf]'"
        ) from error
    readers = []
    for part in files:
        hint = "a download that was cut short? get it again"
        with read_as("a GGUF's writer", where=str(part), error=UsageError, hint=hint):
            readers.append(gguf.GGUFReader(part))
    reader = readers[0]

    def read(tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        values = np.require(gguf.dequantize(tensor.data, tensor.tensor_type), requirements="W")
        form = getattr(torch, names.get(tensor.tensor_type.name, "float32"))
        return torch.from_numpy(values).reshape(shape).to(form)

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
    tensors = {}
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        shape = tuple(int(size) for size in reversed(tensor.shape))
        dtype = names.get(tensor.tensor_type.name, tensor.tensor_type.name)
        tensors[tensor.name] = Stored(shape, dtype, partial(read, tensor, shape))
    kind = reader.get_field("general.architecture")
    architecture = None if kind is None else str(kind.contents())
    blocks = None if kind is None else reader.get_field(f"{architecture}.block_count")
    number = 0 if blocks is None else int(blocks.contents())
    form = "GGUF" + (f", {len(files)} files" if len(files) > 1 else "")
    return StoredWeights(
        source, form, tensors, None if architecture is None else (architecture, number)
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
