"""What stands in the place of a part of a model or of a library, and is taken out again.

Whatever this tool changes in objects that are not its own is changed here, or by torch's hooks,
whose handles are context managers themselves: on any exit all is as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["patched", "swapped"]


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``value`` as an attribute of an object, a class or a module; afterwards what was there. Where
    the object had none of its own, its class's is seen again."""
    own = vars(owner)
    held, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if held:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def swapped(
    model: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """What ``change`` makes of each parameter and buffer, in its place; it is asked once of one
    that several modules share, and leaves alone what it gives back."""
    made: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in model.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = change(tensor)
                if made[id(tensor)] is not tensor:
                    places.append((held, name, tensor))
    for held, name, tensor in places:
        held[name] = made[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor
