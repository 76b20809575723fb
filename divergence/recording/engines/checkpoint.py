"""A checkpoint that a run names, and not the user: read only where it is data alone.

Weights in safetensors are data. Pickled ones (``pytorch_model.bin``) are read by torch with
``weights_only``, which allows tensors and plain containers; still a pickle is a program, so that
only the user can choose it. An adapter (PEFT) names another model and Python modules. What
transformers reads of a checkpoint otherwise (config, tokenizer, chat template in jinja's sandbox)
is data to it as long as ``trust_remote_code`` is not given.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from divergence.errors import ModelError
from divergence.run.schema.layout import expanded

__all__ = ["ADAPTER", "INDEX", "SINGLE", "check_data_alone"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"


def check_data_alone(source: str, *, revision: str | None) -> None:
    """Raise ModelError where loading ``source`` reads a pickle or an adapter.

    What is not there at all (no config, no weights) is left to the loader, which says so.
    """
    config = _file(source, revision, "config.json")
    if config is None:
        return
    if _takes_adapters() and _file(source, revision, ADAPTER) is not None:
        raise _refused(source, f"comes with an adapter ({ADAPTER})")
    weights = _weights(source, revision, config)
    if weights is None:
        return
    others = [name for name in weights if not name.endswith(".safetensors")]
    if others:
        raise _refused(source, f"has pickled weights ({others[0]})")


def _weights(source: str, revision: str | None, config: Path) -> list[str] | None:
    """The files that transformers takes weights from, in its order; None where it finds none."""
    named = _json(config).get("transformers_weights")  # of the config; comes before the usual names
    if isinstance(named, str):
        if not named.endswith(".index.json"):
            return [named]
        return _indexed(_file(source, revision, named))
    if _file(source, revision, SINGLE) is not None:
        return [SINGLE]
    index = _file(source, revision, INDEX)
    if index is not None:
        return _indexed(index)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if _file(source, revision, name) is not None:
            return [name]
    return None


def _indexed(index: Path | None) -> list[str]:
    """The files that an index names: they need not be safetensors because it is called so."""
    found = {} if index is None else _json(index).get("weight_map")
    return [str(name) for name in found.values()] if isinstance(found, dict) else []


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the loader says what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}


def _file(source: str, revision: str | None, name: str) -> Path | None:
    """A file of the checkpoint on this machine, fetched from the hub where the loader would."""
    folder = expanded(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(os.path.expanduser(source), name, revision=revision)
    except (OSError, ValueError):  # no such file or repository, or the hub is out of reach
        return None
    return None if found is None else Path(found)


def _takes_adapters() -> bool:
    """Does transformers load adapters here? Without PEFT it passes them over."""
    from transformers.utils import is_peft_available

    return bool(is_peft_available())


def _refused(source: str, what: str) -> ModelError:
    return ModelError(
        f"{source} {what}, and the run alone names it",
        where="what a run names is loaded as data: config, tokenizer and safetensors",
        hint=f"if you trust that model, name it yourself: --model {source}",
    )
