"""The answer of `weights` about two checkpoints, as typed data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from divergence.comparison.result import JsonAnswer
from divergence.facts import Fact, Worded


class WeightsSide(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint."""

    source: str
    form: str
    """``safetensors``, ``GGUF``, ``torch.save`` or ``run``."""
    num_parameters: int
    num_elements: int
    dtypes: dict[str, int]
    """How many parameters have which dtype."""


class WeightsRelation(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One way in which parameters of the two belong together."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "facts"}

    name: str
    """``equal``, ``dtype``, ``rounded``, ``cut_off``, ``reordered``, ``turned``, ``unturned``,
    ``transposed``, ``reshaped``, ``padded``, ``fused``, ``ungrouped`` (fused, in an order that may
    be right), ``tied``, ``copy``, ``moved``, ``scaled``, ``shifted``, ``one_vector``, ``rounding``,
    ``low_rank``, ``quantised``, ``some``, ``near``, ``rotated``, ``unrelated``, ``zeros``,
    ``constant``, ``nonfinite``, ``codes``, ``packed``, ``shapes``, ``other`` or ``alone``."""
    same: bool
    """Do they hold the same weights, stored otherwise?"""
    num_parameters: int
    names: list[str]
    """A's names (of what B alone stores, B's), ``*`` for the numbers of all, ``{0,2}`` of some."""
    first: str
    """The first of these parameters."""
    facts: list[Fact]
    """What holds of the first."""
    text: str = ""
    percent: list[float] | None = None
    """100 ‖A - B‖ / ‖A‖ of the least and the most that they are apart, where it is measured."""


class WeightsReport(msgspec.Struct, JsonAnswer, Worded, frozen=True, kw_only=True):
    """The answer of `compare_weights`."""

    TEXTS: ClassVar[Mapping[str, str]] = {"matching": "facts"}

    schema_version: int = 1
    tool_version: str
    reference: WeightsSide
    candidate: WeightsSide
    num_compared: int
    """Parameters of A that have a partner."""
    num_equal: int
    """Equal bit for bit."""
    facts: list[Fact]
    """How names were read."""
    matching: list[str] = []
    relations: list[WeightsRelation]
    """Of what is not equal: other weights first, the most parameters first."""

    @property
    def same(self) -> bool:
        """Do both hold the same weights, however they are stored?"""
        return not self.others

    @property
    def others(self) -> list[WeightsRelation]:
        """Those of other weights, and of what one side alone stores."""
        return [relation for relation in self.relations if not relation.same]

    @property
    def equal(self) -> bool:
        """Are all parameters equal bit for bit, and none alone?"""
        return not self.relations

    def __repr__(self) -> str:
        """``<WeightsReport a b: 224 of 272 parameters equal>``"""
        sides = f"{self.reference.source} {self.candidate.source}"
        return f"<WeightsReport {sides}: {self.num_equal} of {self.num_compared} parameters equal>"
