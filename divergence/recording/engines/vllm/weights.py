"""Digests of the weights as vLLM has read them, under transformers' names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch

from divergence.recording.engines.identity import identify
from divergence.recording.engines.load import LoadedModel
from divergence.recording.engines.vllm.names import ModulePlace
from divergence.run.schema.fingerprint import digest_many
from divergence.run.schema.manifest import UNKNOWN, ModelIdentity
from divergence.run.schema.site import escape_path

__all__ = ["identity_of"]


def identity_of(
    twin: LoadedModel,
    module: torch.nn.Module,
    places: Mapping[str, ModulePlace],
    more: Mapping[str, str],
    *,
    gather: Callable[[torch.Tensor], list[torch.Tensor]] | None = None,
) -> ModelIdentity:
    """Who the model is, by the weights of ``module``, which vLLM has read and not yet packed.

    ``twin``: transformers' model of the same checkpoint, without weights; ``more``: parameters
    whose modules have no place; ``gather``: every rank's part of a weight. A weight that is found
    nowhere, or in another form, is unknown.
    What code ran is told by the engine's version.
    """
    filled = copy.deepcopy(twin.module)
    names = set(twin.module.state_dict())
    theirs = dict(module.named_parameters(remove_duplicate=False))
    shared: dict[int, torch.nn.Parameter] = {}
    for path, part in filled.named_modules():
        place = places.get(escape_path(path))
        for name, empty in list(part._parameters.items()):
            if empty is None:
                continue
            if id(empty) not in shared:
                key = more.get(f"{path}.{name}")
                if key is None and place is not None and path:
                    key = f"{place.theirs}.{name}"
                rows = None if place is None else place.rows
                read = None if key not in theirs else _read(theirs[key], rows, empty, gather)
                if read is None:
                    part._parameters[name] = None
                    continue
                shared[id(empty)] = torch.nn.Parameter(read, requires_grad=False)
            part._parameters[name] = shared[id(empty)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = None
    identity = identify(replace(twin, module=filled, device=torch.device("cpu")))
    unknown = sorted(names - set(identity.digests))
    digests = identity.digests | dict.fromkeys(unknown, UNKNOWN)
    count = sum(weight.numel() for weight in twin.module.parameters())
    sizes: dict[str, Any] = {"num_parameters": count}
    if unknown:
        sizes |= {"digests": digests, "digest": digest_many(digests), "rounded_digests": {}}
    return msgspec.structs.replace(identity, code={}, attn_implementation=None, **sizes)


def _read(
    weight: torch.nn.Parameter,
    rows: slice | None,
    empty: torch.nn.Parameter,
    gather: Callable[[torch.Tensor], list[torch.Tensor]] | None,
) -> torch.Tensor | None:
    """The part of vLLM's weight that is transformers' ``empty``, put together of all ranks' and
    without rows that vLLM added (a vocabulary made longer); None where it has another form."""
    part = weight.detach() if rows is None else weight.detach()[rows]
    if part.ndim != empty.ndim or part.dtype != empty.dtype:
        return None
    if gather is not None:
        sizes = zip(part.shape, empty.shape, strict=True)
        divided = next((axis for axis, (here, whole) in enumerate(sizes) if here < whole), None)
        part = part if divided is None else torch.cat(gather(part), divided)
    part = part[: empty.shape[0]] if part.ndim else part
    return part if part.shape == empty.shape else None
