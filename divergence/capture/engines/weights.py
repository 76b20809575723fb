"""Weights by name: what a run recorded by digest alone, found again in a model on this machine.

A checkpoint's own files are asked first, so that one tensor costs one tensor; where they name or
hold it otherwise (fused experts, tied or computed tensors) the model is loaded as a capture loads
it. Only a tensor with the recorded digest is given out: no other weight stands in for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from divergence.capture.engines.load import load_model
from divergence.run.fingerprint import digest_tensor
from divergence.run.layout import expanded
from divergence.run.manifest import ModelIdentity

if TYPE_CHECKING:
    import torch

__all__ = ["Weights"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Weights:
    """The weights of ``source`` (a directory or hub id), as ``model`` says they were loaded.

    Raises ModelError, from ``find``, where the model must be loaded and cannot be.
    """

    def __init__(
        self, source: str, model: ModelIdentity, *, trust_remote_code: bool = False
    ) -> None:
        self._source, self._model, self._trust = source, model, trust_remote_code
        self._files = _files(expanded(source))
        self._loaded: dict[str, torch.Tensor] | None = None

    def find(self, name: str, dtype: torch.dtype, digest: str | None) -> torch.Tensor | None:
        """The weight of that name in ``dtype``; None where none has that digest."""
        for stored in (self._stored, self._in_model):
            tensor = stored(name)
            if tensor is None:
                continue
            tensor = tensor.to(dtype)
            if digest is None or digest_tensor(tensor) == digest:
                return tensor
        return None

    def _stored(self, name: str) -> torch.Tensor | None:
        from safetensors import SafetensorError, safe_open

        file = self._files.get(name, self._files.get(""))
        if file is None:
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                return opened.get_tensor(name)
        except (SafetensorError, OSError):  # under another name, or not there: the model knows
            return None

    def _in_model(self, name: str) -> torch.Tensor | None:
        if self._loaded is None:
            module = load_model(
                self._source,
                task=self._model.task,
                revision=self._model.revision,
                dtype=self._model.dtype,
                attn_implementation=self._model.attn_implementation or "eager",
                trust_remote_code=self._trust,
            ).module
            self._loaded = dict(module.named_parameters(remove_duplicate=False))
            self._loaded |= dict(module.named_buffers(remove_duplicate=False))
        found = self._loaded.get(name)
        return None if found is None else found.detach()


def _files(root: Path) -> dict[str, Path]:
    """Tensor name → file; ``""`` → the only file."""
    try:
        if (root / _SINGLE).is_file():
            return {"": root / _SINGLE}
        named = json.loads((root / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: root / file for name, file in named.items() if Path(file).name == file}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}
