"""A checkpoint's files: are they data alone, and the weights in them by name.

A checkpoint that a run names, and not the user, is read only where it is data alone. Weights in
safetensors are data. Pickled ones (``pytorch_model.bin``) are read by torch with ``weights_only``,
which allows tensors and plain containers; still a pickle is a program, so that only the user can
choose it. An adapter (PEFT) names another model and Python modules. What transformers reads of a
checkpoint otherwise (config, tokenizer, chat template in jinja's sandbox) is data to it as long as
``trust_remote_code`` is not given.

Weights that a run recorded by digest alone are found again in the files, so that one tensor costs
one tensor; where they name or hold it otherwise (fused experts, tied or computed tensors) the model
is loaded as a capture loads it. Only a tensor with the recorded digest is given out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from divergence.errors import ModelError
from divergence.outside import MAX_LINE_BYTES, is_plain, json_value, read_bytes
from divergence.recording.engines.load import Loading, is_gguf, load_model
from divergence.run.schema.fingerprint import digest_tensor
from divergence.run.schema.layout import expanded
from divergence.run.schema.manifest import Manifest
from divergence.run.trust import recorded_attention, recorded_revision

__all__ = ["Weights", "check_data_alone"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


def check_data_alone(source: str, *, revision: str | None) -> None:
    """Raise ModelError where loading ``source`` reads a pickle or an adapter.

    What is not there at all (no config, no weights) is left to the loader, which says so.
    """
    config = None if is_gguf(source) else _file(source, revision, "config.json")
    if config is None:  # or GGUF, which is data
        return
    from transformers.utils import is_peft_available  # without PEFT adapters are passed over

    if is_peft_available() and _file(source, revision, _ADAPTER) is not None:
        raise _refused(source, f"comes with an adapter ({_ADAPTER})")
    weights = _weights(source, revision, config)
    others = [name for name in weights if not name.endswith(".safetensors")]
    if away := [name for name in weights if not is_plain(name)]:
        raise _refused(source, f"names weights outside its folder ({away[0][:80]})")
    if others:
        raise _refused(source, f"has pickled weights ({others[0]})")


def _weights(source: str, revision: str | None, config: Path) -> list[str]:
    """The files that transformers takes weights from, in its order."""
    named = _json(config).get("transformers_weights")  # of the config; comes before the usual names
    if isinstance(named, str):
        if not named.endswith(".index.json") or not is_plain(named):
            return [named]
        return _indexed(_file(source, revision, named))
    if _file(source, revision, _SINGLE) is not None:
        return [_SINGLE]
    index = _file(source, revision, _INDEX)
    if index is not None:
        return _indexed(index)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if _file(source, revision, name) is not None:
            return [name]
    return []


def _indexed(index: Path | None) -> list[str]:
    """The files that an index names: they need not be safetensors because it is called so."""
    weight_map = {} if index is None else _json(index).get("weight_map")
    return [str(name) for name in weight_map.values()] if isinstance(weight_map, dict) else []


def _json(path: Path) -> dict[str, Any]:
    """Refused where it cannot be read: the loader might read it all the same."""
    data = read_bytes(path, most=MAX_LINE_BYTES, error=ModelError)
    content = json_value(data, where=str(path), error=ModelError)
    return content if isinstance(content, dict) else {}


def _file(source: str, revision: str | None, name: str) -> Path | None:
    """A file of the checkpoint on this machine, fetched from the hub where the loader would."""
    folder = expanded(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils import cached_file

    try:
        file = cached_file(os.path.expanduser(source), name, revision=revision)
    except (OSError, ValueError):  # no such file or repository, or the hub is out of reach
        return None
    return None if file is None else Path(file)


def _refused(source: str, what: str) -> ModelError:
    return ModelError(
        f"{source} {what}, and the run alone names it",
        where="what a run names is loaded as data: config, tokenizer and safetensors",
        hint=f"if you trust that model, name it yourself: --model {source}",
    )


class Weights:
    """The weights of ``source`` (a directory or hub id), as ``manifest`` says they were loaded.

    Raises ModelError, from ``find``, where the model must be loaded and cannot be.
    """

    def __init__(self, source: str, manifest: Manifest, *, trust_remote_code: bool = False) -> None:
        self._source, self._manifest, self._trust = source, manifest, trust_remote_code
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
            module = load_model(Loading(
                self._source,
                task=model.task,
                # whose code is trusted is read at the revision that the user sees, not the run's
                revision=None if self._trust else recorded_revision(self._manifest),
                dtype=model.dtype,
                attn_implementation=recorded_attention(self._manifest) or "eager",
                trust_remote_code=self._trust,
            )).module  # fmt: skip
            self._loaded = dict(module.named_parameters(remove_duplicate=False))
            self._loaded |= dict(module.named_buffers(remove_duplicate=False))
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.detach()


def _files(root: Path) -> dict[str, Path]:
    """Tensor name → file; ``""`` → the only file."""
    if (root / _SINGLE).is_file():
        return {"": root / _SINGLE}
    index = root / _INDEX
    named = _json(index).get("weight_map") if index.is_file() else None
    places = named.items() if isinstance(named, dict) else ()
    return {name: root / file for name, file in places if Path(str(file)).name == file}
