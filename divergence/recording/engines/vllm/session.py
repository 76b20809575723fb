"""A model that vLLM runs in this process, seen as transformers' model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from divergence.errors import ModelError, UsageError
from divergence.recording.engines.engine import Feature
from divergence.recording.engines.generate import (
    GroupResult,
    check_ids,
    control,
    ends_of,
    failures,
    pad_id,
)
from divergence.recording.engines.load import LoadedModel
from divergence.recording.engines.sessions import TorchSession
from divergence.recording.engines.vllm.names import ModulePlace
from divergence.recording.engines.vllm.recorder import VllmRecorder
from divergence.recording.hooks.modules import Recorder
from divergence.recording.model.structure import describe_modules, output_paths, routing_modules
from divergence.run.schema.manifest import (
    EngineNote,
    EngineValue,
    ModelIdentity,
    ModuleNote,
    SampleTokens,
)
from divergence.run.schema.site import ROOT

__all__ = ["PromptTokens", "VllmSession"]


class VllmSession(TorchSession):
    """``loaded.module`` is vLLM's model, ``loaded.structure`` transformers' of the same
    checkpoint, without weights."""

    name: ClassVar[str] = "vllm"
    makes_forwards: ClassVar[bool] = False
    lacks: ClassVar[Mapping[Feature, str]] = {
        "operators": "its kernels are its own",
        "escalate": "its kernels are made for the model's own dtype",
        "pads_right": "its prompts are not padded",
        "whole": "it takes no prompt without making its cache",
    }

    def __init__(
        self,
        loaded: LoadedModel,
        options: Mapping[str, EngineValue],
        *,
        llm: Any,
        runner: Any,
        places: Mapping[str, ModulePlace],
        identity: ModelIdentity,
        facts: Mapping[str, str],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(loaded, options)
        self._llm, self._runner, self._module = llm, runner, loaded.module
        self._places, self._identity, self._facts = places, identity, dict(facts)
        self._on_close = on_close
        self._num_mixed = 0

    def notes(self) -> dict[str, ModuleNote]:
        notes = describe_modules(self.loaded.structure)
        # experts are seen nowhere, and tell which module is their router
        known = self._places.keys() | routing_modules(notes).keys()
        return {path: note for path, note in notes.items() if path in known}

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        return self._identity

    def check_ids(self, samples: Sequence[SampleTokens], max_new_tokens: int) -> None:
        check_ids(self.loaded, samples)
        limit = self._llm.llm_engine.vllm_config.model_config.max_model_len
        for number, sample in enumerate(samples):
            count = min(len(sample.generated_ids) or max_new_tokens, max_new_tokens)
            length = len(sample.prompt_ids) + max(count, 1)
            if length > limit:
                raise UsageError(
                    f"prompt {number} has {len(sample.prompt_ids)} tokens, {count} are to follow, "
                    f"and vLLM was made for {limit}",
                    hint=f"--engine-option max_model_len={length}, as far as the model has "
                    "positions; or --max-new-tokens",
                )

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        if self.loaded.module is not self._module:
            raise UsageError(
                "--engine vllm runs the model that it made: prepare may change its modules, and "
                "cannot return another",
            )
        heads = output_paths(self.loaded.structure) - {ROOT}
        return VllmRecorder(
            self._module, notes, runner=self._runner, places=self._places, heads=heads, **how
        )

    def run_group(
        self, recorder: Recorder, samples: list[SampleTokens], *, max_new_tokens: int,
        forced: list[list[int]] | None = None, **_: Any,
    ) -> GroupResult:  # fmt: skip
        from vllm import SamplingParams

        assert isinstance(recorder, VllmRecorder)  # made above
        count = max_new_tokens if forced is None else len(forced[0])
        pad, ranks = pad_id(self.loaded), self.loaded.ranks
        tokens = PromptTokens(
            forced if count else None, num=len(samples), count=count, pad=pad,
            ends=ends_of(self.loaded, forced),
            agree=None if ranks is None else ranks.agree,
        )  # fmt: skip
        recorder.expect(samples, tokens.choose, pad=pad)
        params = SamplingParams(
            temperature=0.0, max_tokens=max(count, 1), ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        with failures(self.loaded, samples, count), torch.no_grad():
            for place, sample in enumerate(samples):
                engine.add_request(str(place), {"prompt_token_ids": sample.prompt_ids}, params)
            while engine.has_unfinished_requests() and not tokens.done:
                engine.step()
            if engine.has_unfinished_requests():
                engine.abort_request([str(place) for place in range(len(samples))])
        self._num_mixed += recorder.num_mixed
        return tokens.result()

    def note(self) -> EngineNote:
        return EngineNote(
            name=self.name, version=self.version(), options=self.options,
            facts=self._facts | {"forwards of several steps": str(self._num_mixed)},
        )  # fmt: skip

    def version(self) -> str:
        import vllm

        return str(vllm.__version__)

    def close(self) -> None:
        self._on_close()


class PromptTokens:
    """Of ``num`` prompts, ``count`` each. ``forced``: what to feed; ``ends``: after which a prompt
    has ended; ``agree``: makes several ranks feed the same."""

    def __init__(
        self,
        forced: list[list[int]] | None,
        *,
        num: int,
        count: int,
        pad: int,
        ends: set[int],
        agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        rows = [None] * num if forced is None else [[row] for row in forced]
        self._controls = [control(row, count, ends, None) for row in rows]
        self._fed: list[list[int]] = [[] for _ in rows]
        self._count, self._pad, self._ends, self._agree = count, pad, ends, agree

    def choose(self, places: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits (n, V) of the prompts at ``places`` → what lets vLLM's sampler no other choice."""
        return torch.cat([
            self._only(place, row)
            for place, row in zip(places, logits.float().split(1), strict=True)
        ])  # fmt: skip

    def _only(self, place: int, scores: torch.Tensor) -> torch.Tensor:
        token = self._pad
        if self._num_steps(place) is None:
            token = int(self._controls[place](None, scores).argmax())
        if self._agree is not None:
            token = self._agree([token])[0]
        self._fed[place].append(token)
        only = torch.full_like(scores, float("-inf"))
        only[0, token] = 0.0
        return only

    def _num_steps(self, place: int) -> int | None:
        """Up to the prompt's end; None where it has not ended."""
        fed = self._fed[place]
        return next((step + 1 for step, token in enumerate(fed) if token in self._ends), None)

    @property
    def done(self) -> bool:
        """Has each prompt ended, and made the steps of those that ended last?"""
        counts = [self._num_steps(place) for place in range(len(self._fed))]
        known = [num for num in counts if num is not None]
        return len(known) == len(counts) and min(map(len, self._fed)) >= max(known)

    def result(self) -> GroupResult:
        """Raises ModelError where vLLM made fewer forwards than were asked for."""
        ended = [self._num_steps(place) or self._count for place in range(len(self._fed))]
        count = max(ended) if self.done else self._count
        made = min(map(len, self._fed))
        if made < count:
            raise ModelError(
                f"vLLM made {made} forwards where {count} tokens were to be fed",
                hint="VLLM_LOGGING_LEVEL=INFO shows what it does",
            )
        return GroupResult(
            [fed[:count] for fed in self._fed],
            [[choice[0] for choice in control.chosen[:count]] for control in self._controls],
            [[] for _ in self._fed],
            {token for control in self._controls for token in control.seen},
        )
