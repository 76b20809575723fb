"""What ran a model: the engine's part of a manifest."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.run.schema.record import Count

__all__ = ["Calibration", "CompiledNote", "EngineNote", "EngineValue"]

EngineValue = bool | int | float | str | None
"""One option of an engine."""


class Calibration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a simulated quantisation took from running the model in floating point before."""

    num_tokens: Count
    """Tokens that it ran on."""
    limits: dict[str, list[float]] = {}
    """By matrix: the least and the largest number that enters it."""
    scales: dict[str, list[float]] = {}
    """By norm: what each channel is divided by before it is quantised."""
    fed_by: dict[str, str] = {}
    """By matrix: the norm that feeds it."""


class EngineNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What ran the model."""

    name: str
    """``transformers``, ``compile``, or another engine's name."""
    version: str
    """Of the engine's package."""
    options: dict[str, EngineValue] = {}
    """The engine's own options as used, defaults included."""
    facts: dict[str, str] = {}
    """Its switches as found, and what it said of itself: ``prefix caching`` → ``off``. Where there
    is ``weights`` or ``blocks``, it does not tell all of them."""
    calibration: Calibration | None = None
    """Of a simulated quantisation whose scales come from calibration."""


class CompiledNote(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A module that was given to ``torch.compile``, and what became of it."""

    backend: str
    state: Literal["compiled", "partly", "eager", "unknown"]
    """``compiled``; ``partly``: some of its code ran eager; ``eager``: all of it did; ``unknown``:
    this torch does not tell."""
    num_graphs: Count = 0
    """Number of compiled pieces. Modules of one class share their code: of all of them."""
    num_recompilations: Count = 0
    """How often that code was compiled again, for inputs of another kind or another module."""
    graph_breaks: list[str] = []
    """Why code was left to Python between two compiled pieces, each reason once."""
    reason: str | None = None
    """Why it is not compiled in one piece."""
