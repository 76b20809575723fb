"""A session that makes a training step of each group of prompts in place of decoding."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from divergence.errors import ModelError, UsageError
from divergence.recording.engines.engine import Feature, Session
from divergence.recording.engines.generate import GroupResult, failures, inputs
from divergence.recording.engines.load import LoadedModel
from divergence.recording.hooks.modules import Recorder
from divergence.recording.hooks.patch import swapped
from divergence.recording.training.labels import check_labels, label_rows
from divergence.recording.training.mode import training_mode
from divergence.recording.training.optimizer import Stepping
from divergence.recording.training.recorder import TrainRecorder, parameters_of
from divergence.recording.training.zero import gathered_once
from divergence.run.schema.contents import num_labels
from divergence.run.schema.manifest import (
    NO_LABEL,
    EngineNote,
    Manifest,
    ModelIdentity,
    ModuleNote,
    SampleTokens,
)
from divergence.run.schema.provenance import StepPrecision, Training
from divergence.run.schema.site import LOSS

__all__ = ["NextTokenLoss", "TrainingSession", "leaves"]


class NextTokenLoss(torch.nn.Module):
    """Σ -log p(next token) / ``num_labels``, by prompt: what each adds to the mean over all tokens
    of the step that have a label."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor, num_labels: int) -> torch.Tensor:
        """``logits`` (B, T, V); ``labels`` (B, T), -100 where there is none; (B, 1). Computed in
        float32 or wider, as transformers does."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        next_labels = labels[:, 1:]
        each = cross_entropy(
            logits[:, :-1].flatten(0, 1), next_labels.flatten(), ignore_index=NO_LABEL,
            reduction="none",
        )  # fmt: skip
        return each.view(next_labels.shape).sum(dim=1, keepdim=True) / num_labels


class TrainingSession:
    """``inner``'s model, in training."""

    def __init__(self, inner: Session, training: Training) -> None:
        self._inner, self._training = inner, training
        self.loaded: LoadedModel = inner.loaded
        self.lacks: Mapping[Feature, str] = {
            **inner.lacks, "whole": "a training step decodes nothing",
        }  # fmt: skip
        self._stepping = Stepping(training, inner.loaded.ranks)
        self._loss, self._num_labels = NextTokenLoss(), 0
        self._recorded: TrainRecorder | None = None
        self.losses: list[float] = []
        _refuse(inner, training)
        if training.zero == 2:
            gathered_once(inner.loaded.module)

    def settle(
        self, samples: Sequence[SampleTokens], forced: list[list[int]] | None, like: Manifest | None
    ) -> None:
        self._inner.settle(samples, forced, like)
        check_labels(samples)
        self._num_labels = sum(map(num_labels, samples))
        if self._num_labels < 1:
            raise UsageError(
                "no prompt has a second token, so there is nothing to predict",
                hint="--train needs prompts of two tokens or more",
            )

    def notes(self) -> dict[str, ModuleNote]:
        notes = self._inner.notes()
        if LOSS in notes:
            raise UsageError(f"--train calls its loss {LOSS}, as a module of this model is called")
        return {**notes, LOSS: ModuleNote(kind="NextTokenLoss", role="trunk")}

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        return self._inner.identity(on_parameter)

    def check_ids(self, samples: Sequence[SampleTokens], max_new_tokens: int) -> None:
        self._inner.check_ids(samples, max_new_tokens)
        config: Any = self.loaded.module.config
        check_labels(samples, getattr(config.get_text_config(), "vocab_size", None))

    def num_bytes(
        self, hooked: Collection[str], samples: Sequence[SampleTokens], max_new_tokens: int
    ) -> int:
        """Values and gradients of modules, and the gradients of parameters."""
        weights = sum(p.nbytes for *_, p in parameters_of(self.loaded.structure))
        copies = 1 if self._training.optimizer is None else 5
        hooked = [path for path in hooked if path != LOSS]
        return 2 * self._inner.num_bytes(hooked, samples, 0) + copies * weights

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        recorder = TrainRecorder(
            self.loaded.module, notes, loss=self._loss, stepping=self._stepping, **how
        )
        if how["pass_"] == "free":
            self._recorded = recorder
        return recorder

    @property
    def precision(self) -> StepPrecision | None:
        """Of the free pass, once it is made."""
        return None if self._recorded is None else self._recorded.precision

    def run_group(self, recorder: Recorder, samples: list[SampleTokens], **_: Any) -> GroupResult:
        """Forward and backward of one micro-batch."""
        assert isinstance(recorder, TrainRecorder)
        loaded = self.loaded
        ids, mask = inputs(loaded, samples)
        labels = label_rows(samples, ids, mask)
        model: Any = loaded.module
        ranks, share = loaded.ranks, 1.0
        if ranks is not None:
            ranks.idle = False
            if not ranks.owns(recorder.sample):  # it runs for the others' sake, who wait for it
                share = 0.0
            _add_up(model, dealt=ranks.dealt)
        with failures(loaded, samples, 0), torch.enable_grad(), self._in_training(model):
            with self._autocast(ids.device.type):
                output = model(input_ids=ids, attention_mask=mask, **_beside(model, mask))
                loss = self._loss(output.logits, labels, self._num_labels)
            recorder.backward(loss, share)
        self.losses.append(float(loss.detach().sum()))
        none: list[list[int]] = [[] for _ in samples]
        return GroupResult(none, none, none)

    def _in_training(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Training mode where something of the step needs it."""
        dropout, again = self._training.dropout, self._training.gradient_checkpointing
        return training_mode(model, on=dropout or again, dropout=dropout, checkpointing=again)

    def _autocast(self, device: str) -> contextlib.AbstractContextManager[Any]:
        if self._training.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=getattr(torch, self._training.autocast))

    def note(self) -> EngineNote:
        return self._inner.note()

    def close(self) -> None:
        self._inner.close()


def _beside(model: Any, mask: torch.Tensor) -> dict[str, Any]:
    """What else a forward is given, where the model takes it."""
    known = inspect.signature(model.forward).parameters
    positions = mask.cumsum(-1).sub(1).clamp(min=0)  # pads in front move no token
    values = {"use_cache": False, "position_ids": positions}
    return {name: value for name, value in values.items() if name in known}


def _add_up(model: Any, *, dealt: bool) -> None:
    """FSDP divides gradients by the number of ranks; the loss is a mean over all ranks' tokens
    already, where each has its own prompts."""
    for module in model.modules():
        if dealt and hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            module.set_gradient_divide_factor(1.0)


def _refuse(inner: Session, training: Training) -> None:
    loaded = inner.loaded
    if loaded.task != "causal-lm":
        raise UsageError(f"--train is for causal language models, and this is an {loaded.task}")
    if not getattr(inner, "makes_forwards", False):
        raise UsageError(f"--train: the engine {inner.note().name} makes no backward")
    if training.autocast not in (None, "bfloat16", "float16"):
        raise UsageError(f"--autocast {training.autocast}: bfloat16 or float16")
    fixed = [p for p in loaded.module.parameters() if not p.is_floating_point()]
    if fixed or loaded.codes is not None:
        raise ModelError("--train: a quantised model has codes, which have no gradient",
                         hint="give the checkpoint that it was quantised from")  # fmt: skip


@contextlib.contextmanager
def leaves(model: torch.nn.Module, dtype: torch.dtype | None, training: Training) -> Iterator[None]:
    """The parameters as leaves of ``dtype``: torch gives a gradient its parameter's dtype, so those
    of a wide pass would be rounded. None: as they are, and buffers as ``training`` has them. On
    exit all is as before: an optimizer's step is no part of the next pass."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is not None and isinstance(tensor, torch.nn.Parameter):
            wide = tensor.detach().to(dtype)
            same = tensor.dtype == dtype
            return tensor if same else torch.nn.Parameter(wide, tensor.requires_grad)
        cast = dtype is None and training.buffer_dtype is not None
        if cast and tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            return tensor.to(getattr(torch, str(training.buffer_dtype)))
        return tensor

    held = []
    if training.optimizer is not None:
        held = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        with swapped(model, leaf):
            yield
    finally:
        with torch.no_grad():
            for parameter, value in held:
                parameter.copy_(value)
