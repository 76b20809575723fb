"""Which options go with a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from msgspec.structs import replace

from divergence.errors import PromptError, UsageError
from divergence.numerics.formats import format_named
from divergence.options.capture import CaptureOptions
from divergence.options.option import fields_of, given_fields, recorded_in
from divergence.options.train import TrainOptions
from divergence.recording.prompts import Prompt, collect_prompts
from divergence.recording.ranks.processes import Ranks
from divergence.recording.training.labels import LABEL_HINT, read_labels
from divergence.recording.training.zero import stage_of
from divergence.run.reader import Run
from divergence.run.schema.provenance import Training
from divergence.run.schema.site import BACKWARD, LOSS, OPTIMIZER, escape_path
from divergence.training.policies.reading import read_policy

LEARNING_RATE = 1e-3
WEIGHT_DECAY = {"adamw": 0.01, "sgd": 0.0}

__all__ = [
    "owners_of", "places_of", "prompts_of", "training_of", "without_decoding",
]  # fmt: skip


def training_of(options: CaptureOptions, ranks: Ranks | None = None) -> Training:
    """The step as the manifest has it, on ``ranks``."""
    given = recorded_in(options, "training", CaptureOptions)
    if options.train:
        given["zero"] = stage_of(options.zero, ranks)
    if options.optimizer is not None:
        given["learning_rate"] = _or(options.learning_rate, LEARNING_RATE)
        given["weight_decay"] = _or(options.weight_decay, WEIGHT_DECAY.get(options.optimizer, 0.0))
    if options.reduce_dtype is not None:  # with --mesh the library of the ranks chooses
        given["reduce_order"] = None if options.mesh else options.reduce_order or "ring"
    return Training(**{name: value for name, value in given.items() if value is not None})


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def places_of(paths: Iterable[str], training: Training) -> list[str]:
    """Where a fault may be planted: in modules, and in a training step in their backward."""
    ends = ("", BACKWARD, OPTIMIZER) if training.train else ("",)
    return [path + end for end in ends for path in paths]


def owners_of(model: torch.nn.Module, training: Training) -> set[str]:
    """Modules whose parameters have gradients that are recorded, and the loss."""
    if not training.train:
        return set()
    names = (name for name, _ in model.named_parameters())
    return {LOSS, *(escape_path(name.rpartition(".")[0]) for name in names)}


def prompts_of(options: CaptureOptions) -> list[Prompt]:
    """The prompts that were asked for, with their labels. Raises PromptError."""
    train = bool(options.train)
    prompts = collect_prompts(options.prompts, options.prompts_file, train=train)
    if options.labels is None:
        return prompts
    where, lines = read_labels(options.labels)
    if len(lines) != len(prompts):
        raise PromptError(
            f"{where} has labels for {len(lines)} prompts, and there are {len(prompts)}",
            hint=LABEL_HINT,
        )
    for number, prompt in enumerate(prompts):
        if prompt.labelled:
            raise PromptError(f"prompt {number} has labels of its own", hint="leave out --labels")
    return [
        replace(prompt, labels=line.labels, completion_from=line.completion_from)
        for prompt, line in zip(prompts, lines, strict=True)
    ]


def without_decoding(options: CaptureOptions, like: Run | None) -> CaptureOptions:
    """A training step generates nothing. Raises UsageError for an option of the one where the other
    is asked for."""
    train = options.train or (like is not None and like.manifest.training.train)
    if not train:
        training = {field.name for field in fields_of(TrainOptions)}
        for field in given_fields(options):
            if field.name in training:
                raise UsageError(f"{field.option.names[0]} needs --train")
        return options
    refused = {
        "--max-new-tokens": options.max_new_tokens, "--whole": options.whole,
        "--prefill-chunk": options.prefill_chunk, "--repeat": options.repeat > 1,
        "--no-hooks": options.hooks is False, "--steps": options.steps,
    }  # fmt: skip
    if like is not None and options.labels is not None:
        raise UsageError(
            "--like repeats the recorded labels, so --labels cannot be given with it",
            hint="leave out --labels, or capture without --like",
        )
    named = [name for name, given in refused.items() if given]
    if named:
        raise UsageError(
            f"{' and '.join(named)} with --train: a training step is one forward and one backward",
            hint="leave it out, or make two runs",
        )
    return replace(_by_name(_as_policy(options)), max_new_tokens=0)


_DTYPES = ("autocast", "reduce_dtype", "accumulate_dtype", "moments_dtype", "buffer_dtype")


def _by_name(options: CaptureOptions) -> CaptureOptions:
    """``bf16`` is ``bfloat16``, as it is of ``--dtype``. (What is no dtype is refused where it is
    used, by the option's name.)"""
    names: dict[str, str] = {}
    for option in _DTYPES:
        with contextlib.suppress(UsageError):
            names[option] = format_named(getattr(options, option) or "").name
    return replace(options, **names)


def _as_policy(options: CaptureOptions) -> CaptureOptions:
    """With the dtypes of ``--precision-policy``, where the option itself is not given."""
    if options.precision_policy is None:
        return options
    policy = read_policy(options.precision_policy)
    missing = {
        name: value for name, value in policy.options.items() if getattr(options, name) is None
    }
    return replace(options, **missing, precision_policy=str(policy))
