"""Other ways to store what a model's modules compute: plain hooks, and the tools people use.

Each is a function (model, ids, new, folder) that generates ``new`` tokens and leaves the tensors
under ``folder``; its ``bare`` does the same without recording. Those of this file that need a
package import it when they are made, so that a missing one is told and nothing else fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig

Way = Callable[[torch.nn.Module, torch.Tensor, int, Path], None]


def generate(model: torch.nn.Module, ids: torch.Tensor, new: int, folder: Path) -> None:
    """Greedy, nothing else."""
    config = GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0, use_cache=True)
    with torch.no_grad():
        model.generate(inputs=ids, attention_mask=torch.ones_like(ids), generation_config=config)


def steps(forward: Callable, ids: torch.Tensor, new: int) -> None:
    """The same forwards one by one, for tools that wrap a forward and not generate()."""
    past = None
    with torch.no_grad():
        for _ in range(new):
            out = forward(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)


def stepwise(model: torch.nn.Module, ids: torch.Tensor, new: int, folder: Path) -> None:
    steps(model, ids, new)


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def hooks(paths: str) -> Way:
    """Clones of every block's output (``blocks``), or of every module's inputs and outputs
    (``modules``; what comes by twice is cloned once a forward), and one torch.save."""

    def way(model: torch.nn.Module, ids: torch.Tensor, new: int, folder: Path) -> None:
        kept: list[torch.Tensor] = []
        seen: dict[int, torch.Tensor] = {}

        def keep(value: object) -> None:
            for tensor in _tensors(value):
                if seen.get(id(tensor)) is not tensor:
                    seen[id(tensor)] = tensor
                    kept.append(tensor.detach().clone())

        def keep_all(_module: object, args: tuple, kwargs: dict, output: object) -> None:
            keep(args)
            keep(list(kwargs.values()))
            keep(output)

        if paths == "blocks":
            handles = [
                block.register_forward_hook(lambda _m, _a, output: keep(output))
                for block in model.model.layers
            ]
        else:
            handles = [
                module.register_forward_hook(keep_all, with_kwargs=True)
                for module in model.modules()
            ]
        handles.append(model.register_forward_hook(lambda *_: seen.clear()))
        try:
            generate(model, ids, new, folder)
            torch.save(kept, folder / "kept.pt")
        finally:
            for handle in handles:
                handle.remove()

    return way


def empty_hooks() -> Way:
    """A hook before and one after every module that do nothing: what is the least there is."""

    def way(model: torch.nn.Module, ids: torch.Tensor, new: int, folder: Path) -> None:
        handles = []
        for module in model.modules():
            handles += [
                module.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
                module.register_forward_hook(lambda *_: None, with_kwargs=True),
            ]
        try:
            generate(model, ids, new, folder)
        finally:
            for handle in handles:
                handle.remove()

    return way


def copying_hooks() -> Way:
    """The empty hooks with the copies that a capture of every module makes, each tensor once a
    forward, into memory that is reserved once; nothing is written: what no capture can go below."""

    def way(model: torch.nn.Module, ids: torch.Tensor, new: int, folder: Path) -> None:
        memory = torch.frombuffer(mmap.mmap(-1, _RESERVED_BYTES), dtype=torch.uint8)
        begin, at = memory.data_ptr(), 0
        seen: dict[int, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> None:
            nonlocal at
            if seen.get(id(tensor)) is tensor:
                return
            seen[id(tensor)] = tensor
            num_bytes = tensor.nbytes
            if at + num_bytes > _RESERVED_BYTES:
                at = 0
            ctypes.memmove(begin + at, tensor.contiguous().data_ptr(), num_bytes)
            at += num_bytes

        def before(_module: object, args: tuple, kwargs: dict) -> None:
            for value in (*args, *kwargs.values()):
                for tensor in _tensors(value):
                    copy(tensor)

        def after(_module: object, _args: tuple, _kwargs: dict, output: object) -> None:
            for tensor in _tensors(output):
                copy(tensor)

        handles = []
        for module in model.modules():
            handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ]
        handles.append(model.register_forward_hook(lambda *_: seen.clear()))
        try:
            generate(model, ids, new, folder)
        finally:
            for handle in handles:
                handle.remove()

    return way


_RESERVED_BYTES = 432 << 20
"""As the ring of a capture."""


def debugger() -> Way:
    """transformers' own, with full tensors. Each forward overwrites the files of the last."""
    from transformers import model_addition_debugger_context

    def way(model: torch.nn.Module, ids: torch.Tensor, new: int, folder: Path) -> None:
        with model_addition_debugger_context(
            model, debug_path=str(folder), do_prune_layers=False, use_repr=False
        ):
            steps(model.forward, ids, new)

    return way


def nnsight() -> Way:
    """Every module's input and output saved in a trace a forward, and one torch.save. It keeps
    references to the tensors, not copies."""
    import nnsight as library

    def way(model: torch.nn.Module, ids: torch.Tensor, new: int, folder: Path) -> None:
        order = _execution_order(model)
        wrapped = library.NNsight(model)
        modules = {path: wrapped.get(path) if path else wrapped for path in set(dict(order))}
        stored = []

        def forward(**inputs: object) -> object:
            with wrapped.trace(**inputs):
                kept = list().save()
                for path, what in order:
                    module = modules[path]
                    kept.append(module.input if what == "input" else module.output)
                out = wrapped.output.save()
            stored.append([_tensors(value) for value in kept])
            return out

        steps(forward, ids, new)
        torch.save(stored, folder / "kept.pt")

    return way


def _execution_order(model: torch.nn.Module) -> list[tuple[str, str]]:
    """(path, "input" or "output") as one forward comes by; values must be asked for in order."""
    order: list[tuple[str, str]] = []
    handles = []
    for path, module in model.named_modules():
        if path:
            handles += [
                module.register_forward_pre_hook(
                    lambda _m, args, p=path: order.append((p, "input")) if args else None
                ),
                module.register_forward_hook(
                    lambda _m, _a, _o, p=path: order.append((p, "output"))
                ),
            ]
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))
    for handle in handles:
        handle.remove()
    return order


def msprobe() -> Way:
    """Huawei's mindstudio-probe, level L0 (modules), task tensor: a .pt file a tensor, the weights
    again at every step."""
    from msprobe.pytorch import PrecisionDebugger

    made: list = []  # one debugger a process, as it wants it

    def way(model: torch.nn.Module, ids: torch.Tensor, new: int, folder: Path) -> None:
        if not made:
            config = folder.parent / "msprobe.json"
            settings = {
                "task": "tensor",
                "dump_path": str(folder.parent / "msprobe"),
                "rank": [],
                "step": [],
                "level": "L0",
                "async_dump": False,
                "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
            }
            config.write_text(json.dumps(settings))
            made.append(PrecisionDebugger(config_path=str(config)))

        def forward(**inputs: object) -> object:
            made[0].start(model=model)
            out = model(**inputs)
            made[0].stop()
            made[0].step()
            return out

        with contextlib.redirect_stdout(sys.stderr):
            steps(forward, ids, new)

    return way


PEERS: dict[str, tuple[Callable[[], Way], Way]] = {
    "hooks": (lambda: hooks("blocks"), generate),
    "hooks modules": (lambda: hooks("modules"), generate),
    "empty hooks": (empty_hooks, generate),
    "copying hooks": (copying_hooks, generate),
    "debugger": (debugger, stepwise),
    "nnsight": (nnsight, stepwise),
    "msprobe": (msprobe, stepwise),
}
"""Name → what makes it, and the same work without recording."""
