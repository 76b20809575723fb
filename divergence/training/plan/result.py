"""What a training step needs on one rank: memory, and bytes over the links. Types alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.facts import Fact, Worded


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the memory that stays from step to step."""

    name: Literal["parameters", "gradients", "main weights", "moments"]
    formula: str
    """In Ψ, the number of parameters on a rank before ZeRO divides them, and N, the ranks that
    divide: ``2Ψ``, ``12Ψ/N``. Bytes."""
    bytes: int
    """On the rank that holds most."""


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward and backward hold beyond the parameters and the optimizer's state."""

    checkpointing: bool
    """Is each block's forward run again in the backward, in place of keeping its activations?"""
    saved_bytes: int
    """Held when the forward is done: what the backward needs, and the loss."""
    gathered_bytes: int
    """Parameters of other ranks that are held then too (ZeRO 3)."""
    peak_bytes: int
    """The most at any moment, with the gradients that are there by then."""


class Collective(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """The collectives of one kind, over one step."""

    TEXTS: ClassVar[Mapping[str, str]] = {"of": "sent"}

    operation: Literal["all-reduce", "reduce-scatter", "all-gather"]
    sent: Fact
    """Which tensors, and when."""
    of: str = ""
    """``gradients``, ``parameters, forward``, ``activations, backward``."""
    axis: str
    """Axis of the mesh whose ranks take part."""
    num_ranks: int
    tensor_bytes: int
    """The whole tensors', summed over the step."""
    bytes_per_rank: int
    """That each rank sends, and receives: (n-1)/n of the tensors, of an all-reduce twice that."""
    seconds: float | None
    """``bytes_per_rank`` at the link's rate."""


class TrainingPlan(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Memory and traffic of one training step, on the rank that holds most."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    num_parameters: int
    """Of the whole model."""
    num_ranks: int
    axes: dict[str, int]
    """Size of each axis of the mesh."""
    zero: int
    """Stage: 0 divides nothing, 1 the optimizer's state, 2 the gradients too, 3 all."""
    optimizer: str
    weight_dtype: str
    main_weights: bool
    """Does the optimizer keep weights in float32 beside those in 16 bits?"""
    autocast: str | None
    micro_batch: tuple[int, int]
    """Sequences of one forward on a rank, and tokens of each."""
    accumulates: bool
    """Do several micro-batches make a step, so that gradients stay between them?"""
    kept: list[Kept]
    kept_bytes: int
    """Sum of ``kept``."""
    activations: list[Activations]
    """Without and with checkpointing of blocks; empty where they could not be computed."""
    checkpointing: bool
    """Which of the two ``peak_bytes`` is of."""
    peak_bytes: int | None
    """The most at any moment of a step; None where the activations are not known."""
    traffic: list[Collective]
    link_rate: float | None
    """Bytes a second."""
    capture_bytes: int
    """Host memory that a capture of the step takes beside it."""
    dump_bytes: int
    """What it writes, at most."""
    remarks: list[Fact] = []
    """What is not counted, or otherwise elsewhere."""
    notes: list[str] = []
    """The same in words."""
