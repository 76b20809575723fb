"""transformers as an engine, eager or with compiled blocks; and the session of any engine whose
modules can be hooked here."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import torch
import transformers

from divergence.errors import ModelError, UsageError, first_line
from divergence.recording.engines.engine import (
    EngineOptions,
    GroupResult,
    Session,
    check_ids,
    run_group,
)
from divergence.recording.engines.identity import derived_state, identify, without_home
from divergence.recording.engines.load import LoadedModel, Loading, load_model
from divergence.recording.recorder import Recorder
from divergence.recording.structure import describe_modules
from divergence.run.manifest import (
    EngineNote,
    EngineValue,
    ModelIdentity,
    ModuleNote,
    SampleTokens,
)
from divergence.run.site import did_you_mean, escape_path

__all__ = ["TorchSession", "TransformersEngine", "blocks_of", "loaded_by_transformers"]

loaded_by_transformers = load_model
"""Under the name that engines of other packages import (docs/extending.md)."""


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


class TorchSession(Session):
    """A ``torch.nn.Module`` of transformers' kind in this process."""

    name: ClassVar[str] = "transformers"
    makes_forwards: ClassVar[bool] = True

    def __init__(
        self, loaded: LoadedModel, options: Mapping[str, EngineValue] | None = None
    ) -> None:
        self.loaded = loaded
        self.options = dict(options or {})

    def notes(self) -> dict[str, ModuleNote]:
        return describe_modules(self.loaded.structure)

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        identity = identify(self.loaded, on_parameter=on_parameter)
        return msgspec.structs.replace(identity, derived=derived_state(self.loaded.module))

    def check_ids(self, samples: Sequence[SampleTokens], max_new_tokens: int) -> None:
        check_ids(self.loaded, samples)

    def num_bytes(
        self, hooked: Collection[str], samples: Sequence[SampleTokens], max_new_tokens: int
    ) -> int:
        return about_bytes(self.loaded.structure, hooked, samples, max_new_tokens)

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        return Recorder(self.loaded.module, notes, **how)

    def run_group(
        self,
        recorder: Recorder,
        samples: list[SampleTokens],
        *,
        max_new_tokens: int,
        forced: list[list[int]] | None = None,
        **more: Any,
    ) -> GroupResult:
        loaded, count = self.loaded, max_new_tokens
        return run_group(loaded, samples, max_new_tokens=count, forced=forced, **more)

    def note(self) -> EngineNote:
        adapter = self.loaded.adapter
        facts = {} if adapter is None else {"adapter": without_home(adapter)}
        return EngineNote(name=self.name, version=self.version(), options=self.options, facts=facts)

    def version(self) -> str:
        return transformers.__version__


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


# torch.compile as an engine: the model of transformers, its blocks compiled one by one.
#
# So every block's inputs and outputs are seen from outside its compiled code, and an anchored pass
# can put recorded inputs in place, while everything in a block may be fused as in production. What
# lies between the blocks runs eager. All blocks of a kind share their code, and torch counts
# compilations by code: its limit is raised to what the blocks may need.

_EACH = 8
"""Compilations that a block may need: prefill and decode, static and dynamic shapes, masks."""


class CompileOptions(EngineOptions, frozen=True, kw_only=True):
    """Holds the arguments of ``torch.compile``."""

    backend: str = "inductor"
    mode: str | None = None
    """``default``, ``reduce-overhead``, ``max-autotune``; of inductor."""
    dynamic: bool | None = True
    """True: one compilation for prompts of any length and one for decode steps. ``null`` is torch's
    own default, static shapes first and dynamic ones when a shape changes: twice the compilations
    of every block. False: one for each length of the cache."""
    fullgraph: bool = False
    """Fail where a block's code is left to Python in between."""


class CompileEngine:
    """Models of transformers with compiled blocks."""

    name: ClassVar[str] = "compile"
    Options: ClassVar[type[EngineOptions]] = CompileOptions

    def load(self, loading: Loading, options: CompileOptions) -> CompileSession:
        _check(options, loading)
        # of speed alone, and again for every block
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
        loaded = load_model(loading)
        blocks = blocks_of(loaded.module)
        if not blocks:
            raise UsageError(
                f"--engine compile: {loading.source} has no repeated blocks to compile",
                hint="capture(prepare=torch.compile) compiles any module",
            )
        for block in blocks:
            block.compile(
                backend=options.backend,
                mode=options.mode,
                dynamic=options.dynamic,
                fullgraph=options.fullgraph,
            )
        return CompileSession(loaded, msgspec.structs.asdict(options), num_blocks=len(blocks))


class CompileSession(TorchSession):
    """A model whose blocks are compiled. Where operators are recorded, and in the escalated pass,
    torch runs them eager: a fault that is gone there is the compiler's."""

    name: ClassVar[str] = "compile"

    def __init__(
        self, loaded: LoadedModel, options: Mapping[str, EngineValue], *, num_blocks: int
    ) -> None:
        super().__init__(loaded, options)
        self._num_blocks = num_blocks

    def run_group(self, recorder: Recorder, samples: list[SampleTokens], **how: Any) -> GroupResult:
        lengths = 0 if self.options["dynamic"] is not False else how["max_new_tokens"]
        with _limits((_EACH + lengths) * self._num_blocks):
            return super().run_group(recorder, samples, **how)

    def version(self) -> str:
        return f"torch {torch.__version__}"


@contextlib.contextmanager
def _limits(most: int) -> Iterator[None]:
    """Raises torch's limits of compilations by code; what they were before is set again."""
    config: Any = torch._dynamo.config
    names = [name for name in ("recompile_limit", "cache_size_limit") if hasattr(config, name)][:1]
    names += [name for name in ("accumulated_recompile_limit",) if hasattr(config, name)]
    with config.patch({name: max(most, getattr(config, name)) for name in names}):
        yield


def _check(options: CompileOptions, loading: Loading) -> None:
    """Raise UsageError for what torch does not know, ModelError for a compiler that is missing."""
    import torch._dynamo
    import torch._inductor

    backends = torch._dynamo.list_backends(exclude_tags=())
    if options.backend not in backends:
        raise UsageError(
            f"--engine-option backend={options.backend}: torch has no such backend",
            hint=did_you_mean(options.backend, backends, count=1)
            or f"one of {', '.join(backends)}",
        )
    modes = torch._inductor.list_mode_options()
    if options.mode is not None and options.mode not in modes:
        raise UsageError(
            f"--engine-option mode={options.mode}: torch has no such mode",
            hint=did_you_mean(options.mode, modes, count=1) or f"one of {', '.join(modes)}",
        )
    if options.backend == "inductor" and loading.device.startswith("cpu"):
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # torch's own kinds differ by version
            raise ModelError(
                f"--engine compile needs a C++ compiler on a CPU: {first_line(error)}",
                hint="install g++ (apt install g++), name one by the variable CXX, or "
                "--engine-option backend=aot_eager",
            ) from error
