"""Weights that a run recorded by digest alone, found again in a checkpoint.

One tensor costs one tensor, read from its file; where the files name or hold it otherwise (fused
experts, tied or computed tensors) the model is loaded as a capture loads it. Only a tensor with the
recorded digest is given out.
"""

from __future__ import annotations

from pathlib import Path

import torch

from divergence.recording.engines.load import INDEX, SINGLE, Loading, load_model, weight_map
from divergence.run.manifest import Manifest, digest_tensor
from divergence.run.record import expanded
from divergence.run.trust import recorded_attention, recorded_revision


class Weights:
    """The weights of ``source`` (a directory or hub id), as ``manifest`` says they were loaded.
    Raises ModelError, from ``find``, where the model must be loaded and cannot be."""

    def __init__(self, source: str, manifest: Manifest, *, trust_remote_code: bool = False) -> None:
        self._source, self._manifest, self._trust = source, manifest, trust_remote_code
        # by name, the file of each tensor; of "" the only file
        root = expanded(source)
        if (root / SINGLE).is_file():
            self._files = {"": root / SINGLE}
        else:
            index = root / INDEX
            places = weight_map(index if index.is_file() else None).items()
            self._files = {name: root / file for name, file in places if Path(file).name == file}
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
        if file is None or not file.is_file():
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor
        except (SafetensorError, OSError):  # under another name, or not there: the model knows
            return None

    def _in_model(self, name: str) -> torch.Tensor | None:
        if self._loaded is None:
            model = self._manifest.model
            module = load_model(
                Loading(
                    self._source,
                    task=model.task,
                    # whose code is trusted is read at the revision that the user sees
                    revision=None if self._trust else recorded_revision(self._manifest),
                    dtype=model.dtype,
                    attn_implementation=recorded_attention(self._manifest) or "eager",
                    trust_remote_code=self._trust,
                )
            ).module
            self._loaded = dict(module.named_parameters(remove_duplicate=False))
            self._loaded |= dict(module.named_buffers(remove_duplicate=False))
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.detach()
