"""An ONNX file: read, checked, and its tensors as torch's, without a copy where that can be.

A file is data. Weights may lie in files beside it, in its own folder or below, and nowhere else;
operators that ONNX Runtime does not have itself are not loaded from anywhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from divergence.errors import ModelError, first_line
from divergence.numerics.formats import format_named
from divergence.outside import inside, is_plain, read_bytes

__all__ = ["data_file", "read_model", "tensor_of"]

_EXTERNAL = 1
"""``data_location`` of a tensor whose bytes lie in a file beside the model's."""
_MAX_BYTES = 1 << 31
"""What protobuf reads; more weights lie in files beside."""
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
    10: "float16", 11: "float64", 16: "bfloat16",
}  # fmt: skip


def read_model(path: Path) -> Any:
    """The file's ``ModelProto``, its weights left where they lie. Raises ModelError."""
    import onnx

    if not path.is_file():
        missing = "is a directory" if path.is_dir() else "does not exist"
        raise ModelError(
            f"no ONNX file: {path} {missing}", hint="give the .onnx file: --model DIR/model.onnx"
        )
    data = read_bytes(path, most=_MAX_BYTES, error=ModelError)
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own kinds
        raise _broken(path, first_line(error, most=200)) from error
    graph = model.graph
    if not graph.node or not graph.output or not graph.input:
        raise _broken(path, "there is no graph in it")
    for tensor in _tensors(model):
        if min(tensor.dims, default=0) < 0:
            raise _broken(path, f"the weight {tensor.name[:80]} has a negative size")
        if tensor.data_location == _EXTERNAL:
            data_file(tensor, path.parent)
    for tensor in graph.initializer:
        lies_here = tensor.data_type in _DTYPES and tensor.data_location != _EXTERNAL
        if lies_here and _size(tensor) and not _has_values(tensor):
            raise _broken(path, f"the weight {tensor.name} has no values")
    return model


def data_file(tensor: Any, folder: Path) -> tuple[Path, int, int | None]:
    """(file, offset, length) of a tensor that lies beside the model. Raises ModelError where that
    is not in the model's folder, or not there."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = entries.get("location", "").removeprefix("./")
    if not is_plain(name):
        raise ModelError(
            f"the weight {tensor.name} is said to lie in {name!r}, outside the model's folder",
            hint="weights of an ONNX file are read from its own folder alone",
        )
    place = inside(folder, name, error=ModelError, hint=(
        "copy the weights of the ONNX file beside it; the exporter wrote both"
    ))  # fmt: skip
    try:
        offset, length = int(entries.get("offset", 0)), entries.get("length")
        count = None if length is None else int(length)
    except ValueError:
        offset, count = -1, None
    if offset < 0 or offset + (count or 0) > place.stat().st_size:
        raise _broken(place, f"it ends before the weight {tensor.name}")
    return place, offset, count


def tensor_of(tensor: Any, folder: Path) -> Any:
    """The values as a torch tensor that must not be written to; None for a type that torch does not
    have (4-bit numbers, text)."""
    from onnx import numpy_helper

    name = _DTYPES.get(tensor.data_type)
    if name is None:
        return None
    dtype = torch.bool if name == "bool" else format_named(name).torch_dtype
    shape = tuple(tensor.dims)
    num_bytes = _size(tensor) * dtype.itemsize
    if tensor.data_location == _EXTERNAL:
        place, offset, _ = data_file(tensor, folder)
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        if offset + num_bytes > place.stat().st_size:
            raise _broken(place, f"it ends before the weight {tensor.name}")
        data: Any = np.memmap(place, mode="c", offset=offset, shape=(num_bytes,), dtype=np.uint8)
    elif tensor.raw_data:
        data = np.frombuffer(tensor.raw_data, dtype=np.uint8)
    else:
        data = np.array(numpy_helper.to_array(tensor)).reshape(-1).view(np.uint8)
    if data.size != num_bytes:
        raise ModelError(
            f"the weight {tensor.name} has {data.size} bytes, and its shape {list(shape)} takes "
            f"{num_bytes}", hint="the ONNX file is damaged; export it again",
        )  # fmt: skip
    with warnings.catch_warnings():  # that it must not be written to
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data).view(dtype).reshape(shape)


def _tensors(model: Any) -> Iterator[Any]:
    """Every tensor in it: of the graph, of the graphs in its nodes, and of its functions. ONNX
    Runtime reads what any of them names."""
    waiting: list[Any] = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        if hasattr(graph, "initializer"):
            yield from graph.initializer
            sparse = [*graph.sparse_initializer]
        else:
            sparse = []
        for node in graph.node:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                sparse += (attribute.sparse_tensor, *attribute.sparse_tensors)
                waiting += (attribute.g, *attribute.graphs)
        for tensor in sparse:
            yield from (tensor.values, tensor.indices)


def _size(tensor: Any) -> int:
    return math.prod(tensor.dims)


def _has_values(tensor: Any) -> bool:
    fields = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    return any(len(getattr(tensor, field)) for field in fields)


def _broken(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path} cannot be read as an ONNX file: {why}",
        hint="it is damaged or of another kind; export it again",
    )
