"""Where a capture puts what it sees: the writer, its buffer and the keeper between, made to fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from divergence.numerics.kernels import RESIDENT_BYTES, Kernel, kernel_for
from divergence.numerics.summaries.sketch import sketch_tensor
from divergence.numerics.summaries.summary import summarize
from divergence.recording.keeper import BufferKeeper, Keeper, ReducedKeeper, can_pin
from divergence.recording.ranks.divided import LocalKeeper
from divergence.recording.ranks.processes import Ranks, started
from divergence.recording.request import Request
from divergence.run.schema.manifest import Manifest, SampleTokens, StoreMode
from divergence.run.schema.site import escape_path
from divergence.run.storage.location import Location
from divergence.run.writing.buffer import Buffer, BufferLimits
from divergence.run.writing.reduction import reducer_for, wants_fold
from divergence.run.writing.writer import RunWriter

__all__ = ["about_bytes", "storage"]

_SHARE = 4
"""Compiled loops may take this part of the buffer."""


@contextlib.contextmanager
def storage(
    request: Request,
    out: Location,
    manifest: Manifest,
    *,
    device: torch.device,
    num_bytes: int,
    ranks: Ranks | None = None,
    force: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[RunWriter, Keeper]]:
    """The writer of this rank's part of ``out``, and the keeper that fills its buffer.

    ``num_bytes``: of tensors, about as many as will be seen. ``note``: told what is done otherwise
    than usual.
    """
    kernel = _kernel(num_bytes, buffer_bytes=request.buffer_bytes)
    if kernel == "compiled":
        _load_compiled(request.store)
    buffer = Buffer(BufferLimits.of(request.buffer_bytes, kernel=kernel), pinned=can_pin(device))
    reducer = reducer_for(
        request.store, like=request.like, only_changed=request.only_changed, kernel=kernel
    )
    rank = 0 if ranks is None else ranks.rank
    with started(
        ranks,
        lambda: RunWriter(
            out, manifest, force=force, rank=rank, reducer=reducer, buffer=buffer, device=device
        ),
    ) as writer:
        keeper: Keeper = BufferKeeper(writer, buffer)
        if request.store != "full" and not _wants_host_digests(request):
            keeper = ReducedKeeper(request.store, keeper, note=note)
        yield writer, keeper if ranks is None else LocalKeeper(keeper)


def _wants_host_digests(request: Request) -> bool:
    """Does the run to be repeated hold nothing but hosts' digests of what is not to be kept?

    A device's own could then be held against nothing: its tensors go to the host, and are reduced
    there. (Hosts that keep sketches note both kinds.)
    """
    return (
        request.like is not None
        and request.store in ("stats", "hash")
        and not wants_fold(request.like)
        and any(record.place is None for record in request.like.records)
    )


def _kernel(num_bytes: int, *, buffer_bytes: int) -> Kernel:
    """Compiled loops where they pay, and where their memory is a small part of the buffer, in whose
    bound it is."""
    return kernel_for(num_bytes) if buffer_bytes >= _SHARE * RESIDENT_BYTES else "numpy"


def _load_compiled(store: StoreMode) -> None:
    """Now, and not on the writer's thread, which would keep Python's lock from the model."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensor = torch.ones(1, 16, dtype=dtype)
        summarize(tensor, kernel="compiled")
        if store == "sketch":
            sketch_tensor(tensor, 8, kernel="compiled")


def about_bytes(
    module: torch.nn.Module,
    hooked: Collection[str],
    samples: Sequence[SampleTokens],
    max_new_tokens: int,
) -> int:
    """Bytes of all inputs and outputs of the ``hooked`` modules in one pass over ``samples``: their
    order of magnitude, before a forward is made.

    A matrix (out, in) makes rows of ``out`` features of rows of ``in``; a module without one of its
    own (a block, a norm) takes and gives rows as wide as the last axis of its first parameter.
    """
    num_tokens = sum(len(sample.prompt_ids) + max_new_tokens for sample in samples)
    total = 0
    for path, part in module.named_modules():
        if escape_path(path) not in hooked:
            continue
        own = getattr(part, "weight", None)
        weight = own if own is not None else next(part.parameters(), None)
        if weight is None or weight.ndim == 0:
            continue
        features = sum(weight.shape) if own is not None and own.ndim == 2 else 2 * weight.shape[-1]
        total += num_tokens * features * weight.element_size()
    return total
