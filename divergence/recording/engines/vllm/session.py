"""A model that vLLM runs in this process, one prompt at a time, seen as transformers' model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from divergence.errors import ModelError, UsageError
from divergence.recording.engines.engine import Feature
from divergence.recording.engines.generate import GroupResult, control, failures
from divergence.recording.engines.load import LoadedModel
from divergence.recording.engines.sessions import TorchSession
from divergence.recording.engines.vllm.names import Place
from divergence.recording.engines.vllm.views import head_hooked, tokens, viewed
from divergence.recording.hooks.modules import Recorder
from divergence.recording.model.structure import describe_modules, output_paths
from divergence.run.schema.manifest import EngineNote, EngineValue
from divergence.run.schema.site import ROOT

if TYPE_CHECKING:
    from divergence.run.schema.manifest import ModelIdentity, ModuleNote, SampleTokens

__all__ = ["VllmRecorder", "VllmSession"]

_ONE_BY_ONE = "it runs one prompt at a time"


class VllmSession(TorchSession):
    """``loaded.module`` is vLLM's model, ``loaded.structure`` transformers' of the same
    checkpoint, without weights."""

    name: ClassVar[str] = "vllm"
    makes_forwards: ClassVar[bool] = False
    lacks: ClassVar[Mapping[Feature, str]] = {
        "operators": "its kernels are its own",
        "escalate": "its kernels are made for the model's own dtype",
        "whole": "it takes no prompt without making its cache",
        "batch": _ONE_BY_ONE,
    }

    def __init__(
        self,
        loaded: LoadedModel,
        options: Mapping[str, EngineValue],
        *,
        llm: Any,
        places: Mapping[str, Place],
        identity: ModelIdentity,
        facts: Mapping[str, str],
        ends: set[int],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(loaded, options)
        self._llm, self._module, self._ends = llm, loaded.module, ends
        self._places, self._identity, self._facts = places, identity, dict(facts)
        self._on_close = on_close

    def notes(self) -> dict[str, ModuleNote]:
        notes = describe_modules(self.loaded.structure)
        return {path: note for path, note in notes.items() if path in self._places}

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        return self._identity

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        if self.loaded.module is not self._module:
            raise UsageError(
                "--engine vllm runs the model that it made: prepare may change its modules, and "
                "cannot return another",
            )
        heads = output_paths(self.loaded.structure) - {ROOT}
        return VllmRecorder(self._module, notes, places=self._places, heads=heads, **how)

    def run_group(
        self,
        recorder: Recorder,
        samples: list[SampleTokens],
        *,
        max_new_tokens: int,
        forced: list[list[int]] | None = None,
        num_logits: int | None = None,
    ) -> GroupResult:
        from vllm import SamplingParams

        assert isinstance(recorder, VllmRecorder)  # made above
        count = max_new_tokens if forced is None else len(forced[0])
        ends = self._ends if forced is None else set[int]()
        params = SamplingParams(
            temperature=0.0, max_tokens=max(count, 1), ignore_eos=True, detokenize=False,
            stop_token_ids=sorted(ends),
        )  # fmt: skip
        made = control(forced if count else None, count, ends, None)
        prompt = {"prompt_token_ids": samples[0].prompt_ids}
        recorder.choose = lambda logits: made(None, logits.float())
        with failures(self.loaded, samples, count), torch.no_grad():
            self._llm.generate([prompt], params, use_tqdm=False)
        chosen = [row[0] for row in made.chosen[:count]]
        generated = chosen if forced is None else forced[0]
        if len(chosen) != len(generated):
            raise ModelError(
                f"vLLM made {len(chosen)} forwards where {len(generated)} tokens were to be fed"
            )
        return GroupResult([list(generated)], [chosen], [[]], made.seen)

    def note(self) -> EngineNote:
        return EngineNote(
            name=self.name, version=self.version(), options=self.options, facts=self._facts
        )

    def version(self) -> str:
        import vllm

        return str(vllm.__version__)

    def close(self) -> None:
        self._on_close()


class VllmRecorder(Recorder):
    """Hooks on vLLM's modules, as transformers' of the same places."""

    def __init__(
        self,
        model: torch.nn.Module,
        notes: Mapping[str, ModuleNote],
        *,
        places: Mapping[str, Place],
        heads: set[str],
        **how: Any,
    ) -> None:
        super().__init__(model, notes, **how)
        self._places, self._heads = places, heads
        self.choose: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits

    def _mounted(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        for path, place in self._places.items():
            if path == ROOT or path in self._heads or path not in self._hooked:
                continue
            module = self._model.get_submodule(place.theirs)
            yield viewed(
                module, self._pre_hook(path, ()), self._post_hook(path),
                is_block=self._notes[path].role == "block", rows=place.rows,
            )  # fmt: skip
        yield self._root_hooked()

    @contextlib.contextmanager
    def _root_hooked(self) -> Iterator[None]:
        """The forward begins at the root and ends with the logits."""
        before = self._pre_hook(ROOT, ())

        def first(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            expected = 1 if self._step else self._num_tokens
            if len(ids) != expected:
                raise ModelError(
                    f"vLLM runs {len(ids)} tokens in forward {self._step}, where {expected} were "
                    "expected: its scheduler has divided the prompt, or added padding",
                    hint="a larger --engine-option max_model_len",
                )
            before(module, (tokens(ids),), {})

        head = next((path for path in self._heads & self._hooked if path in self._places), None)
        pair = None if head is None else (self._pre_hook(head, ()), self._post_hook(head))
        handle = self._model.register_forward_pre_hook(first, with_kwargs=True)
        try:
            with head_hooked(
                self._model, head=pair, after_root=self._post_hook(ROOT),
                choose=lambda logits: self.choose(logits),
            ):  # fmt: skip
                yield
        finally:
            handle.remove()
