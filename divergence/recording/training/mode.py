"""Training mode of a model, with or without its dropout and checkpointing of its blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from divergence.errors import UsageError

__all__ = ["training_mode"]


@contextlib.contextmanager
def training_mode(
    model: torch.nn.Module, *, on: bool = True, dropout: bool, checkpointing: bool
) -> Iterator[None]:
    """``on``: else the model stays in the mode that it is in. Without ``dropout`` all rates are 0.
    Raises UsageError for ``checkpointing`` of a model that has none."""
    was = model.training
    rates: list[tuple[torch.nn.Module, str, float]] = []
    for module in () if dropout else model.modules():
        own = isinstance(module, torch.nn.Dropout)
        rates += [
            (module, name, value)
            for name, value in vars(module).items()
            if isinstance(value, float) and ("dropout" in name or (own and name == "p"))
        ]
    if on:
        model.train()
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    if checkpointing:
        _checkpoint(model)
    try:
        yield
    finally:
        if checkpointing:
            _checkpoint(model, on=False)
        for module, name, rate in rates:
            setattr(module, name, rate)
        model.train(was)


def _checkpoint(model: Any, *, on: bool = True) -> None:
    """Switch checkpointing of blocks, by the name that this release of transformers has for it."""
    switch, kind = "enable" if on else "disable", "activation"
    if not hasattr(model, f"{kind}_checkpointing_{switch}"):
        kind = "gradient"
    change = getattr(model, f"{kind}_checkpointing_{switch}", None)
    if change is None:
        raise UsageError(f"--gradient-checkpointing: {type(model).__name__} has none")
    change(**({f"{kind}_checkpointing_kwargs": {"use_reentrant": False}} if on else {}))
