"""Which modules a pass never called: nothing of what they would make was recorded.

A module that nobody called may have been read all the same: a parent's own code multiplies with a
matrix of a child's. So a module without children is counted only where nothing called its parent
either, and a parameter that a called module shares is in no count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from divergence.recording.engines.load import LoadedModel
from divergence.recording.model.compiled import compiled_regions
from divergence.run.schema.site import escape_path
from divergence.run.writing.writer import RunWriter

__all__ = ["noting_calls"]


@contextlib.contextmanager
def noting_calls(loaded: LoadedModel, writer: RunWriter | None) -> Iterator[None]:
    """Writes what was not called into the manifest's plan; nothing without a writer, where several
    ranks hold the model, and where modules were compiled, whose children are called by no hook."""
    model = loaded.module
    if writer is None or loaded.ranks is not None or compiled_regions(model):
        yield
        return
    own, called = {id(module) for module in model.modules()}, set[int]()

    def note(module: torch.nn.Module, args: Any) -> None:
        if id(module) in own:
            called.add(id(module))

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    writer.manifest.plan.not_called = _not_called(model, called)


def _not_called(model: torch.nn.Module, called: set[int]) -> dict[str, int]:
    """By path of the outermost such module: how many numbers its own parameters hold."""
    reached = {
        id(parameter)
        for module in model.modules() if id(module) in called
        for parameter in module.parameters(recurse=False)
    }  # fmt: skip
    counts: dict[str, int] = {}

    def visit(module: torch.nn.Module, path: str, parent_called: bool) -> None:
        rests = all(id(part) not in called for part in module.modules())
        leaf = next(module.children(), None) is None
        if rests and not (leaf and parent_called):
            sizes = [p.numel() for p in module.parameters() if id(p) not in reached]
            if path and sizes:
                counts[escape_path(path)] = sum(sizes)
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, id(module) in called)

    if called:
        visit(model, "", False)
    return counts
