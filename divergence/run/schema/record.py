"""One line of records.jsonl: what was seen at one site in one forward.

A record names its tensor three times over: by coordinates (pass, sample, step,
site), by place (shard and key; equal tensors share both) and by value (a digest of
its bytes, and a summary that needs no bytes). Shapes are those of the tensor as
the module returned it; nothing is converted on the way to disk. Where a run keeps no
bytes (``--store``), there is no place, perhaps a sketch, and the digest that was asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from divergence.numerics.formats import FORMATS
from divergence.numerics.summaries.summary import Summary
from divergence.run.schema.call import Call
from divergence.run.schema.layout import SHARD_PATTERN

__all__ = ["Coordinates", "Count", "PassName", "Place", "Placement", "Record", "Sketch", "Summary"]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things, a size or an index: what torch holds in 64 bits."""

SiteName = Annotated[
    str,
    # no control characters: a site is printed as it stands, also in terminals
    msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]+:(in|out)(\.[^\x00-\x1f\x7f-\x9f]+)?$"),
]
DtypeName = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(FORMATS)})]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
ShardName = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": SHARD_PATTERN})]

PassName = Literal["free", "anchored", "escalated", "whole", "replayed"]

Coordinates = tuple[str, int, int, str]
"""(pass, sample, step, site): unique within a run and rank."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the bytes are: a safetensors shard (relative to the run) and a key in it."""

    shard: ShardName
    key: str


class Sketch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of a tensor in place of its bytes: random projections and norms, row by row.
    divergence.numerics.summaries.sketch defines the matrix and the rows."""

    place: Place
    """A float32 tensor (rows, ``num_projections`` + 2). The last two columns hold each row's norm
    as high and low part."""
    xxh3: Digest
    """Digest of that tensor's bytes."""
    num_projections: Count
    sums: Literal["float64", "float32"] = "float64"
    """The precision that the projections were added up in."""


Placement = Annotated[
    str, msgspec.Meta(pattern=r"^(replicate|single|shard:[0-9]{1,2}|partial:(sum|mean|max|min))$")
]
"""What a rank holds of a tensor along one axis of the mesh: an equal copy, the only one, its part
along a dimension, or a term."""


class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One captured tensor.

    At least one of ``xxh3`` and ``fold`` is set.
    """

    pass_: PassName = msgspec.field(name="pass")
    sample: Count
    step: Count
    site: SiteName
    order: Count
    """Execution order within the forward."""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    """The tensor's shape; in a run of several ranks, of the part that this rank holds."""
    dtype: DtypeName
    summary: Summary | None = None
    """Statistics. None where digests alone are kept."""
    place: Place | None = None
    """Where the bytes are. None where no bytes are kept."""
    xxh3: Digest | None = None
    """Digest of the bytes."""
    fold: Digest | None = None
    """Digest of the bytes by numerics.summaries.fold, for devices that xxh3 does not run on."""
    sketch: Sketch | None = None
    """What is kept in place of the bytes, with ``--store sketch``."""
    rank: Count = 0
    positions: tuple[Count, ...] | None = None
    """Token index of each row of the token axis. None where the rows are simply every token of this
    forward; set for ``--positions``, or for logits of the deciding positions only."""
    call: Call | None = None
    """How the operator was called. On the record of an operator's first result only."""
    placement: tuple[Placement, ...] | None = None
    """In a run of several ranks: what of the tensor this record holds, for each axis of the
    manifest's mesh."""

    @property
    def coordinates(self) -> Coordinates:
        return (self.pass_, self.sample, self.step, self.site)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count
