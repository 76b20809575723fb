"""transformers as an engine; and the session of any engine whose modules can be hooked here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
import transformers

from divergence.recording.engines.engine import (
    EngineOptions,
    Feature,
    GroupResult,
    check_ids,
    run_group,
)
from divergence.recording.engines.identity import identify
from divergence.recording.engines.load import LoadedModel, Loading, load_model
from divergence.recording.execution import about_bytes
from divergence.recording.modules import Recorder
from divergence.recording.structure import describe_modules
from divergence.run.manifest import (
    EngineNote,
    EngineValue,
    Manifest,
    ModelIdentity,
    ModuleNote,
    SampleTokens,
)
from divergence.run.site import escape_path

__all__ = ["TorchSession", "TransformersEngine", "blocks_of", "loaded_by_transformers"]

loaded_by_transformers = load_model
"""Under the name that engines of other packages import (docs/extending.md)."""


class TorchSession:
    """A ``torch.nn.Module`` of transformers' kind in this process."""

    lacks: ClassVar[Mapping[Feature, str]] = {}
    name: ClassVar[str] = "transformers"
    makes_forwards: ClassVar[bool] = True
    """It can be told to go without a cache, and to feed a prompt in chunks."""
    has_cache: ClassVar[bool] = True
    """A decode step reads keys and values that the steps before it left."""

    def __init__(
        self, loaded: LoadedModel, options: Mapping[str, EngineValue] | None = None
    ) -> None:
        self.loaded = loaded
        self.options = dict(options or {})

    def settle(
        self, samples: Sequence[SampleTokens], forced: list[list[int]] | None, like: Manifest | None
    ) -> None:
        return None

    def notes(self) -> dict[str, ModuleNote]:
        return describe_modules(self.loaded.structure)

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        return identify(self.loaded, on_parameter=on_parameter)

    def check_ids(self, samples: Sequence[SampleTokens], max_new_tokens: int) -> None:
        check_ids(self.loaded, samples)

    def num_bytes(
        self, hooked: Collection[str], samples: Sequence[SampleTokens], max_new_tokens: int
    ) -> int:
        return about_bytes(self.loaded.structure, hooked, samples, max_new_tokens)

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        return Recorder(self.loaded.module, notes, **how)

    def run_group(
        self, recorder: Recorder, samples: list[SampleTokens], *, max_new_tokens: int,
        forced: list[list[int]] | None = None, num_logits: int | None = None,
    ) -> GroupResult:  # fmt: skip
        return run_group(
            self.loaded, samples, max_new_tokens=max_new_tokens, forced=forced,
            num_logits=num_logits,
        )  # fmt: skip

    def note(self) -> EngineNote:
        return EngineNote(name=self.name, version=self.version(), options=self.options)

    def version(self) -> str:
        return transformers.__version__

    def close(self) -> None:
        return None


class TransformersEngine:
    """Models as transformers runs them."""

    name: ClassVar[str] = "transformers"
    Options: ClassVar[type[EngineOptions]] = EngineOptions

    def load(self, loading: Loading, options: EngineOptions) -> TorchSession:
        return TorchSession(load_model(loading))


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks, in order."""
    notes = describe_modules(model)
    modules = {escape_path(path): module for path, module in model.named_modules()}
    return [modules[path] for path, note in notes.items() if note.role == "block"]
