"""Labels of a training step: the token that each position is to predict, from the tokens before it.

As in transformers, labels lie beside a prompt's tokens, label t belonging to token t, and -100 says
that a token has none: the loss leaves it out. The first token's label is never used. Without labels
each token is its own. What users mostly want is to train on the completion of a prompt alone; that
is a number, from which token on: ``completion_from``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from divergence.errors import PromptError
from divergence.outside import MAX_LINE_BYTES, read_bytes
from divergence.run.schema.layout import expanded
from divergence.run.schema.manifest import NO_LABEL, SampleTokens

if TYPE_CHECKING:
    import torch

__all__ = [
    "LABEL_HINT", "MAX_PROMPTS", "Label", "LabelLine", "check_labels", "label_rows", "labels_of",
    "read_labels", "text_lines",
]  # fmt: skip

MAX_PROMPTS = 1_000_000
Label = Annotated[int, msgspec.Meta(ge=NO_LABEL, le=2**63 - 1)]
LABEL_HINT = (
    "a line for each prompt, as JSON: a list with a token id for each of its tokens, "
    f'{NO_LABEL} where there is no label, or {{"completion_from": 7}}'
)


class LabelLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one line of a file says: the labels of one prompt."""

    labels: tuple[Label, ...] | None = None
    completion_from: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if (self.labels is None) == (self.completion_from is None):
            raise ValueError("give either labels or completion_from")


def read_labels(labels: str | Path | Sequence[Any]) -> tuple[str, list[LabelLine]]:
    """What they are to be called, and those of each prompt: of a file, or of a list of what its
    lines hold. Raises PromptError."""
    if isinstance(labels, str | Path):
        lines = text_lines(expanded(labels), LABEL_HINT)
        return str(labels), [_line(line, where) for where, line in lines]
    try:
        plain = [label.tolist() if hasattr(label, "tolist") else label for label in labels]
        written = [msgspec.json.encode(entry) for entry in plain]
    except TypeError as error:  # no list, or what JSON has no word for
        raise PromptError(f"not labels: {error}", where="labels", hint=LABEL_HINT) from error
    return "labels", [_line(line, f"labels[{number}]") for number, line in enumerate(written)]


def text_lines(path: Path, hint: str) -> Iterator[tuple[str, str]]:
    """(where it stands, text without its end) of each line of a file of prompts or labels that is
    not blank. Raises PromptError."""
    data = io.BytesIO(read_bytes(path, most=MAX_LINE_BYTES, error=PromptError, hint=hint))
    num = 0
    # of bytes, since text would also be split at U+2028 and its like, which JSON has in strings
    for number, line in enumerate(data, 1):
        try:
            text = line.decode("utf-8" if number > 1 else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise PromptError(f"{path} is not UTF-8 text: {error.reason}", hint=hint) from error
        if text.strip():
            num += 1
            if num > MAX_PROMPTS:
                raise PromptError(f"the file holds more than {MAX_PROMPTS:,}", where=str(path))
            yield f"{path}, line {number}", text.removesuffix("\n").removesuffix("\r")


def _line(line: str | bytes, where: str) -> LabelLine:
    try:
        decoded = msgspec.json.decode(line, type=tuple[Label, ...] | LabelLine)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not labels: {error}", where=where, hint=LABEL_HINT) from error
    return decoded if isinstance(decoded, LabelLine) else LabelLine(labels=decoded)


def labels_of(
    labels: Sequence[int] | None, completion_from: int | None, ids: Sequence[int], number: int
) -> list[int] | None:
    """The label of each token of a prompt; None where each is its own. Raises PromptError."""
    if completion_from is not None:
        if completion_from >= len(ids):
            raise PromptError(
                f"prompt {number} has {len(ids)} tokens, and its completion is to begin at "
                f"token {completion_from}",
                hint=f"the first is 0, so at most {len(ids) - 1}",
            )
        return [NO_LABEL] * completion_from + list(ids[completion_from:])
    return None if labels is None else list(labels)


def check_labels(samples: Sequence[SampleTokens], vocab: int | None = None) -> None:
    """Raise PromptError for labels that are not as many as tokens, that are no token ids (below
    ``vocab``, where it is known), and for a prompt that has none."""
    for number, sample in enumerate(samples):
        labels, count = sample.labels, len(sample.prompt_ids)
        if labels is None:
            continue
        if len(labels) != count:
            raise PromptError(
                f"prompt {number} has {count} tokens and {len(labels)} labels",
                hint=f"a label for each token, {NO_LABEL} where it has none",
            )
        used = [label for label in labels[1:] if label != NO_LABEL]
        if not used:
            raise PromptError(
                f"prompt {number}: no token has a label (the first token's is never used)",
                hint="leave the prompt out",
            )
        bad = [label for label in used if label < 0 or (vocab is not None and label >= vocab)]
        if bad:
            of = "" if vocab is None else f" of the model's vocabulary of {vocab}"
            raise PromptError(
                f"prompt {number}: label {bad[0]} is no token id{of}",
                hint=f"{NO_LABEL} says that a token has no label",
            )


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
