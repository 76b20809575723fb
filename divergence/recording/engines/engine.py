"""What runs a model: an *engine* loads it, and a *session* takes tokens and gives forwards.

An engine is a class with three things (docs/extending.md walks through one):

``name``      what ``--engine`` calls it;
``Options``   a struct with a field for each ``--engine-option KEY=VALUE``: names, types, defaults.
              They are recorded in the manifest, and ``--like`` takes them from there;
``load``      makes a session of a model.

``sessions.TorchSession`` is the session of any engine whose modules lie in this process and can be
hooked; an engine that differs in one thing overrides one method. Built-in engines stand in
``BUILT_IN``; an installed package adds one by an entry point of the group ``divergence.engines``:

    [project.entry-points."divergence.engines"]
    mine = "my_package.engine:MyEngine"
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from divergence.errors import UsageError
from divergence.recording.engines.generate import GroupResult
from divergence.recording.engines.load import LoadedModel, Loading
from divergence.recording.hooks.modules import Recorder
from divergence.run.schema.manifest import (
    EngineNote,
    EngineValue,
    Manifest,
    ModelIdentity,
    ModuleNote,
    SampleTokens,
)
from divergence.run.schema.site import did_you_mean
from divergence.run.trust import recorded_engine_options

__all__ = ["BUILT_IN", "DEFAULT", "QUANTIZE", "Engine", "EngineOptions", "Feature", "Loading",
           "Session", "engine_named", "given_options", "options_for", "recorded_options",
           "refuse_lacking"]  # fmt: skip

DEFAULT, QUANTIZE = "transformers", "quantize"
BUILT_IN = {
    "transformers": "divergence.recording.engines.sessions:TransformersEngine",
    "compile": "divergence.recording.engines.compile:CompileEngine",
    "quantize": "divergence.recording.engines.quantize:QuantizeEngine",
    "onnx": "divergence.recording.engines.onnx_runtime.engine:OnnxEngine",
    "vllm": "divergence.recording.engines.vllm.engine:VllmEngine",
}
"""By name: module and class. A module is imported when its engine is used."""
_GROUP = "divergence.engines"

Feature = Literal["anchor", "escalate", "whole", "operators", "plants", "batch", "pads_right",
                  "prepare"]  # fmt: skip
"""What a capture may ask for and an engine may lack. (What cannot be loaded, ``load`` refuses.)"""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine: bool, int, float, str, and ``X | None``."""

    opens_files: ClassVar[bool] = True
    """May a text be the name of a file? Those of a run are then taken only where they are none."""


class Session(Protocol):
    """A loaded model, ready to run. What it records it gives to the recorder that it made."""

    loaded: LoadedModel
    lacks: Mapping[Feature, str]
    """What this engine cannot do, each with the reason in a few words."""

    def settle(
        self, samples: Sequence[SampleTokens], forced: list[list[int]] | None, like: Manifest | None
    ) -> None:
        """Called first, once the tokens are known: what of the model depends on them. ``like``: of
        the run that is repeated."""

    def notes(self) -> dict[str, ModuleNote]:
        """The modules that sites may name, by path in the names of transformers; class and role."""

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        """Which model this is. What cannot be known (digests of weights) is left empty."""

    def check_ids(self, samples: Sequence[SampleTokens], max_new_tokens: int) -> None:
        """Raise ModelError for a token id that the model does not have, and UsageError for more
        tokens than this engine was made for."""

    def num_bytes(
        self, hooked: Collection[str], samples: Sequence[SampleTokens], max_new_tokens: int
    ) -> int:
        """Bytes of all inputs and outputs of the ``hooked`` modules in one pass: their order of
        magnitude."""

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        """What records one pass: hooks, or their equal. ``how``: the arguments of ``Recorder``."""

    def run_group(
        self,
        recorder: Recorder,
        samples: list[SampleTokens],
        *,
        max_new_tokens: int,
        forced: list[list[int]] | None = None,
        num_logits: int | None = None,
    ) -> GroupResult:
        """Run prompts of one (padded) length under the recorder: the prefill, then one forward for
        each further token, greedily or with the ``forced`` ones.

        ``num_logits``: of how many last positions the prefill gives logits; None: the engine's own
        choice. Raises ModelError when a forward fails.
        """

    def note(self) -> EngineNote:
        """For the manifest: asked before the first pass and after the last."""

    def close(self) -> None:
        """Called once, whatever happened: lets processes and memory go."""


class Engine(Protocol):
    """Loads models."""

    name: ClassVar[str]
    Options: ClassVar[type[EngineOptions]]

    def load(self, loading: Loading, options: Any) -> Session:
        """``options``: an ``Options``. Raises ModelError for a model that it cannot load, and
        UsageError for what it cannot do; both for a package that is not installed."""


def engine_named(name: str, *, built_in_alone: bool = False) -> Engine:
    """The engine. Raises UsageError for a name that there is none of, with near ones.

    ``built_in_alone``: what a run names is no reason to import somebody's package.
    """
    place = BUILT_IN.get(name)
    if place is not None:
        module, _, attribute = place.partition(":")
        engine: Engine = getattr(importlib.import_module(module), attribute)()
        return engine
    points = {point.name: point for point in importlib.metadata.entry_points(group=_GROUP)}
    if name in points and not built_in_alone:
        try:
            engine = points[name].load()()
        except Exception as error:  # somebody's package: anything
            raise UsageError(
                f"--engine {name}: {points[name].value} cannot be imported: {error}",
                hint="importing it by itself shows why",
            ) from error
        return engine
    known = [*BUILT_IN, *points]
    raise UsageError(
        f"--engine {name}: there is no such engine"
        + (" that comes with divergence" if name in points else ""),
        hint=f"name it yourself: --engine {name}" if name in points
        else did_you_mean(name, known, count=1) or f"one of {', '.join(known)}",
    )  # fmt: skip


def recorded_options(note: EngineNote, given: Collection[str]) -> dict[str, EngineValue]:
    """Options that a run names, but for those ``given`` here. Raises RunFormatError."""
    kept = {key: value for key, value in note.options.items() if key not in given}
    if note.name in BUILT_IN and not engine_named(note.name).Options.opens_files:
        return kept
    return recorded_engine_options(kept)


def given_options(given: Sequence[str] | Mapping[str, EngineValue]) -> dict[str, EngineValue]:
    """``KEY=VALUE`` texts, or values by key, by key. Raises UsageError."""
    return dict(given) if isinstance(given, Mapping) else dict(map(_parted, given))


def options_for(engine: Engine, values: Mapping[str, EngineValue]) -> EngineOptions:
    """Values, or their texts, as the engine's own type.

    Raises UsageError for an unknown key (with near ones), and for a value of another type.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(engine.Options)}
    for key in values:
        if key not in types:
            raise UsageError(
                f"--engine-option {key}: the engine {engine.name} has no such option",
                hint=did_you_mean(key, types, count=1)
                or f"it has {', '.join(sorted(types)) or 'none'}",
            )
    try:
        return msgspec.convert(dict(values), engine.Options, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"--engine-option of the engine {engine.name}: {error}",
            hint="for example KEY=true or KEY=4",
        ) from error


_ASKED: dict[Feature, str] = {
    "operators": "operators (ops@, --substitute)",
    "plants": "--plant",
    "batch": "a batch of prompts",
    "pads_right": "pads behind a prompt (--pad-right)",
    "prepare": "prepare",
}


def refuse_lacking(session: Session, **asked: bool) -> None:
    """Raise UsageError for what is asked for, by feature, and the engine cannot do. (A pass that it
    cannot make is left out with a note.)"""
    for feature, words in _ASKED.items():
        reason = session.lacks.get(feature)
        if asked.get(feature) and reason is not None:
            raise UsageError(
                f"{words}: the engine {session.note().name} has none of it, {reason}",
                hint="--no-batch" if feature == "batch"
                else f"leave it out, or use --engine {DEFAULT}",
            )  # fmt: skip


def _parted(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(
            f"--engine-option {text!r} is not KEY=VALUE", hint="for example mode=max-autotune"
        )
    return key.replace("-", "_"), value
