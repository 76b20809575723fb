"""Graphs of tiny models as torch's exporter writes them, so that tests need no exporter.

``tests/fixtures/onnx.tar.xz`` holds the graphs without their matrices and vectors, and for each of
these which parameter it is. ``build`` puts in the parameters of the tiny model, which are the same
on every machine.

    python tests/models/onnx_graphs.py [NAME ...]     # exports them anew; needs onnxscript
"""

import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "onnx.tar.xz"
MODELS = {
    "llama": {"architecture": "llama", "dtype": "float32"},
    "llama-float16": {"architecture": "llama", "dtype": "float16"},
    "llama-bfloat16": {"architecture": "llama", "dtype": "bfloat16"},
    "qwen3": {"architecture": "qwen3", "dtype": "float32"},
    "qwen3-float16": {"architecture": "qwen3", "dtype": "float16"},
    "gpt2": {"architecture": "gpt2", "dtype": "float32"},
    "bert": {"architecture": "bert", "dtype": "float32"},
}
"""What ``tiny_model`` takes, by name."""
_KEPT = ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy", "pkg.torch.onnx.fx_node")


def build(name: str, checkpoint: Path, folder: Path) -> Path:
    """``folder/model.onnx`` with the checkpoint's weights, its config and tokenizer beside it."""
    import onnx
    from safetensors.torch import load_file

    with tarfile.open(ARCHIVE) as archive:
        read = {one: archive.extractfile(f"{name}{one}").read() for one in (".onnx", ".json")}
    model, names = onnx.load_from_string(read[".onnx"]), json.loads(read[".json"])
    stored = load_file(checkpoint / "model.safetensors")
    for constant in model.graph.initializer:
        if constant.name in names:
            parameter, transposed = names[constant.name]
            constant.raw_data = _bytes(stored[parameter], transposed)
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def _bytes(tensor: Any, transposed: bool) -> bytes:
    import torch

    if transposed:
        tensor = tensor.T
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def scopes_of(node: Any) -> str:
    """The modules that a node was traced in, as the exporter wrote them."""
    found = (one.value for one in node.metadata_props if one.key.endswith("name_scopes"))
    return next(found, "")


def node_of(model: Any, path: str, operator: str) -> Any:
    """The first node of that operator in the module."""
    nodes = (node for node in model.graph.node if node.op_type == operator)
    return next(node for node in nodes if f"'{path}'" in scopes_of(node))


def export(checkpoint: Path, folder: Path, *, dtype: str = "auto") -> Path:
    """``folder/model.onnx`` as torch's exporter makes it, its weights, config and tokenizer beside
    it. Needs onnxscript."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    _program(checkpoint, dtype).save(folder / "model.onnx", external_data=True)
    return folder / "model.onnx"


def _program(checkpoint: Path, dtype: str = "auto") -> Any:
    import torch
    import transformers

    encoder = "bert" in (checkpoint / "config.json").read_text(encoding="utf-8")
    factory = transformers.AutoModelForMaskedLM if encoder else transformers.AutoModelForCausalLM
    model = factory.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()
    model.config.use_cache = False
    ids = torch.arange(12).reshape(2, 6)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(6)[None].expand(2, 6),
    }
    if encoder:
        given["token_type_ids"] = torch.zeros_like(ids)
    return torch.onnx.export(
        model, kwargs=given, dynamo=True, dynamic_shapes=dict.fromkeys(given, axes), verbose=False
    )


def _export(checkpoint: Path) -> tuple[bytes, dict[str, tuple[str, bool]]]:
    import onnx
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        _program(checkpoint).save(Path(folder) / "model.onnx")
        graph = onnx.load(Path(folder) / "model.onnx")
    for node in graph.graph.node:
        kept = [one for one in node.metadata_props if one.key in _KEPT]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    names: dict[str, tuple[str, bool]] = {}
    by_bytes = {
        _bytes(tensor, transposed): (parameter, transposed)
        for parameter, tensor in load_file(checkpoint / "model.safetensors").items()
        for transposed in ((False, True) if tensor.ndim == 2 else (False,))
    }
    for constant in graph.graph.initializer:
        found = by_bytes.get(constant.raw_data)
        if found is not None:
            names[constant.name] = found
            constant.raw_data = b""
    return graph.SerializeToString(), names


def main(names: Sequence[str] = ()) -> None:
    """Writes the graphs of ``names`` (default: all) anew; the others stay."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.models import tiny

    found: dict[str, bytes] = {}
    if names:
        with tarfile.open(ARCHIVE) as archive:
            found = {one.name: archive.extractfile(one).read() for one in archive}
    with tempfile.TemporaryDirectory() as place:
        for name in names or MODELS:
            options = MODELS[name]
            rest = {key: value for key, value in options.items() if key != "architecture"}
            checkpoint = tiny.build(options["architecture"], Path(place) / name, **rest)
            graph, constants = _export(checkpoint)
            found |= {f"{name}.onnx": graph, f"{name}.json": json.dumps(constants).encode()}
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for name, data in sorted(found.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main(sys.argv[1:])
