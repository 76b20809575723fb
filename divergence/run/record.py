"""One line of records.jsonl: what was seen at one site in one forward.

A record names its tensor three times over: by coordinates (pass, sample, step,
site), by place (shard and key; equal tensors share both) and by value (xxh3 of
its bytes, and a summary that needs no bytes). Shapes are those of the tensor as
the module returned it; nothing is converted on the way to disk.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.numerics.summary import Summary

__all__ = ["Coordinates", "PassName", "Place", "Record", "Summary"]

PassName = Literal["free", "anchored", "escalated"]

Coordinates = tuple[str, int, int, str]
"""(pass, sample, step, site): unique within a run and rank."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the bytes are: a safetensors shard (relative to the run) and a key in it."""

    shard: str
    key: str


class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One captured tensor.

    ``positions``: the token index of each row of the tensor's token axis, where
    that is not simply every token of this forward (``--positions``, or logits of
    the deciding positions only).
    """

    pass_: PassName = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    order: int
    shape: tuple[int, ...]
    dtype: str
    place: Place
    xxh3: str
    summary: Summary
    rank: int = 0
    positions: tuple[int, ...] | None = None

    @property
    def coordinates(self) -> Coordinates:
        return (self.pass_, self.sample, self.step, self.site)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count
