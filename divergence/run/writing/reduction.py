"""What is kept of a tensor in place of its bytes: digest, statistics and projections.

On the writer's thread a ``Reducer`` completes the items of which no bytes are to be stored, by mode
(``--store``) or because another run holds them (``--only-changed``), and returns the rest to the
writer. In the mode

``full``    nothing is taken over but what ``held`` holds;
``sketch``  floats are sketched (numerics.sketch says which), other tensors stay whole;
``stats``   summary and digest; ``hash``: the digest alone.

An item that a device has reduced already (``CapturedTensor.reduced``, recording.keeper) has
its numbers on the device: they are fetched here, those of a batch in one transfer a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from divergence.numerics.formats import format_named
from divergence.numerics.kernels import Kernel
from divergence.numerics.on_device import summaries_of
from divergence.numerics.summaries.fold import fold_many, folds_of
from divergence.numerics.summaries.sketch import (
    Projections,
    grid_of,
    num_pooled,
    num_projections,
    sketch_many,
)
from divergence.numerics.summaries.summary import summarize_many
from divergence.run.schema.contents import Content, contents_of
from divergence.run.schema.record import Sketch
from divergence.run.writing.captured_tensor import ShardEntry, flat_parts, piece_of, piece_of_item

if TYPE_CHECKING:
    import torch

    from divergence.numerics.summaries.sketch import SumDtype
    from divergence.run.reader import Run
    from divergence.run.schema.manifest import StoreMode
    from divergence.run.schema.record import Place, Summary
    from divergence.run.writing.captured_tensor import CapturedTensor, Reduced

__all__ = ["Reducer", "reducer_for", "wants_fold"]

StoreBytes = Callable[[str, ShardEntry], "Place"]

_REMEMBERED = 4096
"""Reduced tensors kept for recognition: an output comes by again as the next input, or not."""


def wants_fold(run: Run | None) -> bool:
    """Does ``run`` hold digests of the kind that accelerators make?"""
    return run is not None and any(record.fold is not None for record in run.records)


def reducer_for(
    store: StoreMode, *, like: Run | None, only_changed: bool, kernel: Kernel = "numpy"
) -> Reducer | None:
    """The reducer of a capture, or None where the writer keeps everything by itself."""
    fold = wants_fold(like) or store == "sketch"  # sketches are no proof that two are equal
    if store == "full" and not only_changed and not fold:
        return None
    records = like.records if only_changed and like is not None else ()
    held = frozenset(content for record in records for content in contents_of(record))
    return Reducer(store, fold=fold, held=held, kernel=kernel)


class Reducer:
    """``take(items, store)`` completes items, and returns those whose bytes are to be stored.

    ``fold``: note the device digest as well. ``held``: contents whose bytes another run has.
    """

    def __init__(
        self,
        store: StoreMode,
        *,
        fold: bool = False,
        held: frozenset[Content] = frozenset(),
        kernel: Kernel = "numpy",
    ) -> None:
        self._store_mode, self._fold, self._held, self._kernel = store, fold, held, kernel
        self._known: dict[Content, tuple[Summary | None, Sketch | None]] = {}

    def take(self, items: Sequence[CapturedTensor], store: StoreBytes) -> list[CapturedTensor]:
        """``store(digest, piece)`` says where bytes will be."""
        self._fetch([(item, item.reduced) for item in items if item.reduced is not None], store)
        whole: list[CapturedTensor] = []
        reduced: list[tuple[CapturedTensor, ShardEntry]] = []
        there: dict[int, tuple[CapturedTensor, ShardEntry]] = {}  # an item may come twice
        for item in items:
            if item.has_bytes and id(item) not in there:  # else it was reduced before
                there[id(item)] = (item, piece_of_item(item))
        if self._fold:
            folds = fold_many([piece.data for _, piece in there.values()], kernel=self._kernel)
            for (item, _), fold in zip(there.values(), folds, strict=True):
                item.fold = fold
        for item, piece in there.values():
            item.digest = piece.digest().hex()
            if self._stays_whole(item) and not self._is_held(item):
                whole.append(item)
                continue
            item.tensor = None
            reduced.append((item, piece))
        self._complete(reduced, store)
        return whole

    def _fetch(self, items: list[tuple[CapturedTensor, Reduced]], store: StoreBytes) -> None:
        """What devices made of tensors, to the host: one transfer for each kind of number."""
        by_device: dict[str, dict[int, tuple[CapturedTensor, Reduced]]] = {}
        for item, reduced in items:
            device = str(reduced.sums[0].device)
            by_device.setdefault(device, {})[id(item)] = (item, reduced)
        for group in by_device.values():
            _fetch(list(group.values()), store)

    def _stays_whole(self, item: CapturedTensor) -> bool:
        if self._store_mode == "sketch":
            return num_projections(item.shape, format_named(item.dtype)) is None
        return self._store_mode == "full"

    def _is_held(self, item: CapturedTensor) -> bool:
        return any(
            (digest, item.dtype, item.shape) in self._held for digest in (item.digest, item.fold)
        )

    def _complete(self, items: list[tuple[CapturedTensor, ShardEntry]], store: StoreBytes) -> None:
        fresh: dict[Content, ShardEntry] = {}
        for item, piece in items:
            content = _content(item)
            if content not in self._known:
                fresh[content] = piece
        if self._store_mode == "hash":
            self._known |= dict.fromkeys(fresh, (None, None))
        else:
            tensors = [(piece.dtype, piece.data) for piece in fresh.values()]
            summaries = summarize_many(tensors, kernel=self._kernel)
            sketches = self._sketches(fresh, store)
            for content, summary in zip(fresh, summaries, strict=True):
                self._known[content] = (summary, sketches.get(content))
        for item, _ in items:
            item.summary, item.sketch = self._known[_content(item)]
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _sketches(
        self, pieces: dict[Content, ShardEntry], store: StoreBytes
    ) -> dict[Content, Sketch]:
        if self._store_mode != "sketch":
            return {}
        sketches: dict[Content, Sketch] = {}
        contents = iter(pieces)
        for part in flat_parts(pieces.values()):
            flat = {content: tensor for tensor, content in zip(part, contents, strict=False)}
            sketches |= self._sketched(flat, store)
        return sketches

    def _sketched(
        self, flat: dict[Content, torch.Tensor], store: StoreBytes
    ) -> dict[Content, Sketch]:
        """By content, of its elements on one axis."""
        wanted = {
            content: k
            for content in flat
            if (k := num_projections(content[2], format_named(content[1]))) is not None
        }
        tensors = [flat[content].view(grid_of(content[2])) for content in wanted]
        pooled = [num_pooled(content[2], k) for content, k in wanted.items()]
        sketches = sketch_many(tensors, list(wanted.values()), pooled, kernel=self._kernel)
        return {
            content: stored_sketch(sketch, store, sums="float64")
            for content, sketch in zip(wanted, sketches, strict=True)
        }


def _fetch(items: list[tuple[CapturedTensor, Reduced]], store: StoreBytes) -> None:
    """Complete items whose numbers lie on one device."""
    import torch

    folds = folds_of([reduced.sums for _, reduced in items])
    for (item, _), fold in zip(items, folds, strict=True):
        item.fold, item.reduced = fold, None
    counted = [(item, res.statistics) for item, res in items if res.statistics is not None]
    summaries = summaries_of([statistics for _, statistics in counted])
    for (item, _), summary in zip(counted, summaries, strict=True):
        item.summary = summary
    sketched = [
        (item, res.projections, res.sum_dtype) for item, res in items if res.projections is not None
    ]
    if not sketched:
        return
    joined = [projections.joined() for _, projections, _ in sketched]
    flat = torch.cat([tensor.reshape(-1) for tensor in joined]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in joined])
    for (item, there, sums), part in zip(sketched, parts, strict=True):
        k, num_pooled = there.rows.shape[1] - 2, there.pooled.shape[1]
        here = Projections.of(part.clone(), item.shape, k, num_pooled)
        item.sketch = stored_sketch(here, store, sums=sums)


def stored_sketch(projections: Projections, store: StoreBytes, *, sums: SumDtype) -> Sketch:
    """Queue a sketch's own bytes, and say where they will be."""
    piece = piece_of(projections.joined())
    digest = piece.digest().hex()
    return Sketch(
        place=store(digest, piece),
        xxh3=digest,
        num_projections=projections.rows.shape[1] - 2,
        sums=sums,
        num_pooled=projections.pooled.shape[1],
    )


def _content(item: CapturedTensor) -> Content:
    return (item.digest or item.fold or "", item.dtype, item.shape)
