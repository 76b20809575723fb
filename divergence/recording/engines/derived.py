"""Tensors that a model computes with and no checkpoint stores: modules make them when they are
built (rotary frequencies, masks, tables).

All weights may agree and these differ: frequencies made anew as an empty tensor, a theta read from
the wrong key, a table cast to 16 bits. They are read when the model is loaded, and small ones again
behind each group of prompts, since a server may lose them while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from divergence.run.manifest import DerivedNote, digest_tensor

_WATCHED_BYTES = 1 << 20
"""What is larger is not digested again while the model runs."""
_NUM_VALUES = 64


def derived_state(module: torch.nn.Module) -> dict[str, DerivedNote]:
    """Note, by dotted name, buffers that are not in the state dict and tensors that are plain
    attributes of modules. What lies on no device, or in pieces on several, is left out."""
    notes = {}
    for name, tensor in _tensors(module):
        values = tensor.flatten()[:_NUM_VALUES].tolist()
        notes[name] = DerivedNote(
            digest=digest_tensor(tensor),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            values=[value if math.isfinite(value) else str(value) for value in values],
        )
    return notes


def note_changes(module: torch.nn.Module, notes: Mapping[str, DerivedNote], sample: int) -> None:
    """Sets ``changed_after`` of those that are no longer what their note says. ``sample``: the
    prompt that has just run."""
    tensors = dict(_tensors(module)) if notes else {}
    for name, note in notes.items():
        tensor = tensors.get(name)
        if note.changed_after is None and tensor is not None and tensor.nbytes <= _WATCHED_BYTES:
            note.changed_after = sample if digest_tensor(tensor) != note.digest else None


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        stored = part._buffers.keys() - part._non_persistent_buffers_set
        for name, tensor in (*part._buffers.items(), *vars(part).items()):
            # of a DTensor each rank has a piece
            if type(tensor) is torch.Tensor and name not in stored and not tensor.is_meta:
                yield f"{path}.{name}".lstrip("."), tensor.detach()
