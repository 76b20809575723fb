"""A run without some of its passes, to be copied: the other records, and the shards they need; and
the truth that a run carries, as a run of its own.

Shards are copied whole. A capture writes one pass after the other, so at most one shard holds bytes
of a pass that was left out.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator

import msgspec
import xxhash

from divergence.run.reader import Run
from divergence.run.schema.contents import each_of, sizes_of
from divergence.run.schema.layout import MANIFEST, records_name
from divergence.run.schema.record import OWN_TRUTH
from divergence.run.storage.blob import Bytes

__all__ = ["own_truth", "without_passes"]


def own_truth(run: Run) -> Run | None:
    """The truth that ``run`` carries, as a truth that was made apart would be: a float64 run that
    repeats it, anchored to it, and free where that was made. None where it carries none."""
    manifest = run.manifest
    passes = [OWN_TRUTH[name] for name in OWN_TRUTH if name in manifest.plan.passes]
    if not passes:
        return None
    replaced, note = msgspec.structs.replace, manifest.plan.truth
    stopped_by = manifest.stopped_by
    if note is not None:
        forwards = [
            max(1, len(manifest.tokens.samples[group[0]].generated_ids))
            for group in manifest.tokens.groups
        ]
        fewer = any(made < num for made, num in zip(note.num_steps, forwards, strict=False))
        stopped_by = note.stopped_by or ("the time it was given" if fewer else stopped_by)
    records = [
        replaced(record, pass_=OWN_TRUTH[record.pass_])
        for record in each_of(run.records)
        if record.pass_ in OWN_TRUTH
    ]
    return Run(
        run.path,
        replaced(
            manifest, id=f"{manifest.id} (its own truth)", like=manifest.id,
            complete=manifest.complete and stopped_by is None, stopped_by=stopped_by,
            settings=replaced(manifest.settings, compute_dtype="float64"),
            plan=replaced(
                manifest.plan, passes=passes[::-1],  # free first
                anchored_to=manifest.id if "anchored" in passes else None,
                plants=[], substitutes=[], truth=None,
            ),
        ),
        records,
        store=run._opened(),
    )  # fmt: skip


def without_passes(run: Run, passes: Collection[str]) -> Run:
    """``run`` as it would be without ``passes``; itself where it has none of them. It reads from
    the same files."""
    if not any(record.pass_ in passes for record in each_of(run.records)):
        return run
    records = [record for record in each_of(run.records) if record.pass_ not in passes]
    manifest = copy.deepcopy(run.manifest)
    manifest.plan.passes = [name for name in manifest.plan.passes if name not in passes]
    if OWN_TRUTH.keys() <= set(passes) and manifest.plan.truth is not None:
        floor = msgspec.structs.replace(manifest.plan.truth, mode="floor")
        manifest.plan.truth = floor if "floor" in manifest.plan.passes else None
    manifest.sizes = sizes_of(records)
    return _Partial(run.path, manifest, records, store=run._opened())


class _Partial(Run):
    """Its manifest and lines are its own; its shards are those of the run that it is a part of."""

    def _own(self) -> dict[str, bytes]:
        encoder = msgspec.json.Encoder()
        own: dict[str, bytes] = {}
        for rank in range(self.manifest.num_ranks):
            lines = [record for record in self.records if record.rank == rank]
            own[records_name(rank)] = encoder.encode_lines(lines)
        digests = {name: xxhash.xxh3_128_hexdigest(data) for name, data in own.items()}
        self.manifest.record_digests = digests
        return {MANIFEST: self.manifest.encode()} | own

    def files(self) -> dict[str, int]:
        return super().files() | {name: len(data) for name, data in self._own().items()}

    def whole_files(self) -> Iterator[tuple[str, int, Iterator[Bytes]]]:
        own = self._own()
        for name, size in self.files().items():
            pieces = iter([own[name]]) if name in own else self._opened().whole(name)
            yield name, size, pieces
