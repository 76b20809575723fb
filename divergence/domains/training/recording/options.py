"""The options of ``capture --train``: its labels, its stage of ZeRO, and what goes with it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from divergence.domains.training.options import TrainOptions
from divergence.domains.training.policies import read_policy
from divergence.errors import PromptError, UsageError
from divergence.numerics.formats import format_named
from divergence.options.commands import CaptureOptions
from divergence.options.option import given_fields, group_of, recorded_in
from divergence.recording.processes import Ranks
from divergence.recording.prompts import Label, Prompt, collect_prompts, decoded, text_lines
from divergence.run.manifest import NO_LABEL, SampleTokens, Training
from divergence.run.reader import Run
from divergence.run.record import expanded

# Labels: the token that each position is to predict, from the tokens before it.
#
# As in transformers, labels lie beside a prompt's tokens, label t belonging to token t, and -100
# says that a token has none: the loss leaves it out. The first token's label is never used.
# Without labels each token is its own. What users mostly want is to train on the completion of a
# prompt alone; that is a number, from which token on: ``completion_from``.

LABEL_HINT = (
    "a line for each prompt, as JSON: a list with a token id for each of its tokens, "
    f'{NO_LABEL} where there is no label, or {{"completion_from": 7}}'
)


class LabelLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what one line of a file says: the labels of one prompt."""

    labels: tuple[Label, ...] | None = None
    completion_from: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if (self.labels is None) == (self.completion_from is None):
            raise ValueError("give either labels or completion_from")


def read_labels(labels: str | Path | Sequence[Any]) -> tuple[str, list[LabelLine]]:
    """Return what they are to be called, and those of each prompt: of a file, or of a list of what
    its lines hold. Raises PromptError."""
    if isinstance(labels, str | Path):
        lines = text_lines(expanded(labels), LABEL_HINT)
        return str(labels), [_line(line, where) for where, line in lines]
    try:
        plain = [label.tolist() if hasattr(label, "tolist") else label for label in labels]
        written = [msgspec.json.encode(entry) for entry in plain]
    except TypeError as error:  # no list, or what JSON has no word for
        raise PromptError(f"not labels: {error}", where="labels", hint=LABEL_HINT) from error
    return "labels", [_line(line, f"labels[{number}]") for number, line in enumerate(written)]


def _line(line: str | bytes, where: str) -> LabelLine:
    labels = decoded(line, tuple[Label, ...] | LabelLine, "labels", where, LABEL_HINT)
    return labels if isinstance(labels, LabelLine) else LabelLine(labels=labels)


def label_rows(
    samples: Sequence[SampleTokens], ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """(B, T) of a batch: -100 for pads, for first tokens and for tokens without a label. ``ids``
    (B, T) and ``mask`` (B, T), 0 for pads: as the model gets them."""
    labels = ids.masked_fill(mask.cumsum(-1) * mask < 2, NO_LABEL)
    for row, sample in zip(labels, samples, strict=True):
        if sample.labels is not None:
            first = sample.num_left_pad + 1
            row[first : first + len(sample.used_labels)] = row.new_tensor(sample.used_labels)
    return labels


# Which options go with a training step.

LEARNING_RATE = 1e-3
WEIGHT_DECAY = {"adamw": 0.01, "sgd": 0.0}


def training_of(options: CaptureOptions, ranks: Ranks | None = None) -> Training:
    """The step as the manifest has it, on ``ranks``."""
    asked = group_of(TrainOptions, options)
    given = recorded_in(asked, "training", TrainOptions)
    if asked.train:
        # the stage; None where each process keeps all
        axes = set() if ranks is None else {"dp", "fsdp"} & ranks.sizes.keys()
        usual = 3 if "fsdp" in axes else 0
        zero = usual if asked.zero is None else asked.zero
        given["zero"] = (zero or None) if axes else None
    if asked.optimizer is not None:
        decay = WEIGHT_DECAY.get(asked.optimizer, 0.0)
        rates = {"learning_rate": LEARNING_RATE, "weight_decay": decay}
        given |= {name: rate for name, rate in rates.items() if getattr(asked, name) is None}
    if asked.reduce_dtype is not None:  # with --mesh the library of the ranks chooses
        given["reduce_order"] = None if options.mesh else asked.reduce_order or "ring"
    return Training(**{name: value for name, value in given.items() if value is not None})


def prompts_of(options: CaptureOptions, labels: str | Path | Sequence[Any]) -> list[Prompt]:
    """The prompts that were asked for, with their labels. Raises PromptError."""
    prompts = collect_prompts(options.prompts, options.prompts_file, labelled=True)
    where, lines = read_labels(labels)
    if len(lines) != len(prompts):
        raise PromptError(
            f"{where} has labels for {len(lines)} prompts, and there are {len(prompts)}",
            hint=LABEL_HINT,
        )
    for number, prompt in enumerate(prompts):
        if prompt.labelled:
            raise PromptError(f"prompt {number} has labels of its own", hint="leave out --labels")
    return [
        msgspec.structs.replace(prompt, labels=line.labels, completion_from=line.completion_from)
        for prompt, line in zip(prompts, lines, strict=True)
    ]


def settled(options: CaptureOptions, like: Run | None) -> CaptureOptions | None:
    """The options of a capture that makes a training step: nothing is generated, dtypes come from a
    policy, prompts have their labels; None of one that makes none. Raises UsageError for what
    belongs to decoding, and for options of a step where none is made."""
    asked = group_of(TrainOptions, options)
    if not asked.train and (like is None or not like.manifest.training.train):
        for field in given_fields(asked):
            raise UsageError(f"{field.option.names[0]} needs --train")
        return None
    refused = {
        "--max-new-tokens": options.max_new_tokens,
        "--whole": options.whole,
        "--prefill-chunk": options.prefill_chunk,
        "--repeat": options.repeat > 1,
        "--no-hooks": options.hooks is False,
        "--steps": options.steps,
    }
    if like is not None and asked.labels is not None:
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
    if asked.precision_policy is not None:  # its dtypes, where the option itself is not given
        policy = read_policy(asked.precision_policy)
        missing = {
            name: value for name, value in policy.options.items() if getattr(options, name) is None
        }
        missing["precision_policy"] = str(policy)
        options = dataclasses.replace(options, **missing)
    # ``bf16`` is ``bfloat16``, as it is of ``--dtype``. (What is no dtype is refused where it is
    # used, by the option's name.)
    names: dict[str, Any] = {}
    for option in _DTYPES:
        with contextlib.suppress(UsageError):
            names[option] = format_named(getattr(options, option) or "").name
    if asked.labels is not None:
        names |= {
            "prompts": tuple(prompts_of(options, asked.labels)),
            "prompts_file": None,
            "labels": None,
        }
    return dataclasses.replace(options, **names, max_new_tokens=0)


_DTYPES = ("autocast", "reduce_dtype", "accumulate_dtype", "moments_dtype", "buffer_dtype")

_AXES = {0: "dp", 1: "dp", 2: "fsdp", 3: "fsdp"}
"""The axis of the mesh that keeps so much."""


def check_stage(options: CaptureOptions, axes: Collection[str]) -> None:
    """Raise UsageError for a stage that these axes of ``--mesh`` do not make. ``axes`` is empty
    in one process."""
    asked = group_of(TrainOptions, options)
    if not {"dp", "fsdp"} >= set(axes):
        raise UsageError(
            f"--train with --mesh {','.join(axes)}: a step is recorded among dp or fsdp ranks",
            hint="--mesh dp, or --mesh fsdp",
        )
    if len(axes) > 1:
        raise UsageError("--train with --mesh of two axes", hint="--mesh dp, or --mesh fsdp")
    zero = asked.zero
    if zero is None:
        return
    if zero not in _AXES:
        raise UsageError(f"--zero {zero} is no stage of ZeRO", hint="0, 1, 2 or 3")
    axis = _AXES[zero]
    if zero and not axes:
        hint = f"under torchrun, with --mesh {axis}"
        raise UsageError(f"--zero {zero} has no ranks to divide over", hint=hint)
    if axes and axis not in axes:
        why = "dp: each rank of dp keeps all parameters and gradients"
        if axis == "dp":
            why = "fsdp: ranks of fsdp keep a part of all three"
        raise UsageError(f"--zero {zero} with --mesh {why}", hint=f"--mesh {axis}")
    if zero == 1 and asked.optimizer is None:
        raise UsageError(
            "--zero 1 divides the optimizer's state, and no step is made",
            hint="--optimizer-step adamw",
        )
