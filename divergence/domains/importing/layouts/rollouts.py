"""Rollouts of reinforcement learning as JSON lines or one JSON list, or as ``torch.save`` wrote
them (slime's ``--save-debug-rollout-data`` and ``--save-debug-train-data``; a batch of tensors by
name, as verl's fields), whose pickle is read without running it: what the engine that sampled them
said of their tokens, or what the trainer said of the same tokens.

One file often holds both, side by side; each is a run of its own (``--format rollouts`` and
``--format trainer``). The fields by which a framework is known stand in DIALECTS; docs/rl.md has
them as a table, with what writes such a file. A nan or null is a token that was not scored.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from divergence.domains.importing.dumped import Notes
from divergence.domains.importing.layouts import Layout
from divergence.domains.importing.scores import FieldMap, Scored, scores_of
from divergence.errors import DumpError
from divergence.run.foreign import LINES, DumpFolder
from divergence.run.scores import ScoreSource
from divergence.run.site import near_names


@dataclass(frozen=True, slots=True)
class _Dialect:
    """``known_by``: names of which a line has one; then what FieldMap has, each by the names that
    are tried in order. ``rollout``, ``trainer``: the log-probabilities of each side."""

    name: str
    known_by: tuple[str, ...]
    rollout: tuple[str, ...]
    trainer: tuple[str, ...]
    rest: dict[str, tuple[str, ...]]

    def speaks(self, names: Container[str]) -> bool:
        return any(name in names for name in self.known_by)


DIALECTS = (
    _Dialect(
        "verl",
        ("responses", "response_ids"),
        ("rollout_log_probs", "response_logprobs"),
        ("old_log_probs",),
        {
            "prompt": ("prompt_ids", "prompts"),
            "answer": ("response_ids", "responses"),
            "mask": ("response_mask",),
            "attention": ("attention_mask",),
        },
    ),
    _Dialect(
        "TRL",
        ("completion_ids",),
        ("sampling_per_token_logps", "logprobs"),
        ("old_per_token_logps",),
        {
            "prompt": ("prompt_ids",),
            "answer": ("completion_ids",),
            "mask": ("completion_mask",),
            "top": ("top_logprobs",),
        },
    ),
    _Dialect(
        "NeMo-RL",
        ("token_ids",),
        ("generation_logprobs",),
        ("prev_logprobs",),
        {
            "tokens": ("token_ids",),
            "length": ("input_lengths",),
            "mask": ("token_loss_mask", "token_mask"),
        },
    ),
    _Dialect(
        "slime",
        ("response_length", "response_lengths"),
        ("rollout_log_probs",),
        ("log_probs",),
        {
            "tokens": ("tokens",),
            "answer_length": ("response_length", "response_lengths"),
            "mask": ("loss_mask", "loss_masks"),
        },
    ),
)


def recognise(folder: DumpFolder) -> bool:
    if any(name.endswith(LINES) for name in folder.names) or _is_lists(folder):
        return True
    names = [name for name in folder.names if name.endswith(".pt")]
    return bool(names) and _samples(folder.value(names[0])) is not None


def _is_lists(folder: DumpFolder) -> bool:
    return all(map(folder.is_list, folder.names))


def _samples(value: Any) -> list[Any] | None:
    """The samples of a file of torch.save; None where it holds none."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("samples"), list):
        return list(value["samples"])
    columns = {
        key: column
        for key, column in value.items()
        if isinstance(column, list) or (isinstance(column, torch.Tensor) and column.ndim > 0)
    }
    if not any(dialect.speaks(columns) for dialect in DIALECTS):
        return None
    num = min(map(len, columns.values()))
    return [{key: column[row] for key, column in columns.items()} for row in range(num)]


def _items(folder: DumpFolder) -> Iterator[tuple[Any, str]]:
    yield from folder.objects(*LINES, *[".json"] * _is_lists(folder))
    for name in folder.names:
        if not name.endswith(".pt"):
            continue
        samples = _samples(folder.value(name))
        if samples is None:
            raise DumpError(
                "the file holds no samples",
                where=folder.where(name),
                hint="slime's {rollout_id, samples}, or a dict of a batch's tensors by name",
            )
        for number, sample in enumerate(samples):
            if isinstance(sample, dict):
                sample = {
                    key: item.tolist() if isinstance(item, torch.Tensor) else item
                    for key, item in sample.items()
                }
            yield sample, f"{folder.where(name)}, sample {number}"


def read(folder: DumpFolder, fields: FieldMap | None, notes: Notes, *, role: str) -> Scored:
    """``role``: whose log-probabilities are taken, ``rollout`` or ``trainer``."""
    framework, prompts = "unknown", []
    for item, where in _items(folder):
        if fields is None:
            framework, fields = _fields(item, role, where)
        prompts.append((scores_of(item, fields, where), where))
    if fields is None or not prompts:
        raise DumpError("the file holds no line", where=str(folder.path))
    facts = {"role": role, "tokens": "sampled", "field": fields.logprobs}
    longest = max(len(scores.generated_ids) for scores, _ in prompts)
    if empty := sum(not scores.positions for scores, _ in prompts):
        notes.say(f"{empty} of {len(prompts)} lines have no scored token")
    source = ScoreSource(engine=framework, facts=facts, max_new_tokens=longest)
    return Scored(source, prompts)


def _fields(item: Any, role: str, where: str) -> tuple[str, FieldMap]:
    """The framework that writes such a line, and its fields."""
    if not isinstance(item, dict):
        raise DumpError("the line is no object", where=where)

    def first(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in item), None)

    for dialect in DIALECTS:
        if not dialect.speaks(item):
            continue
        names = dialect.rollout if role == "rollout" else dialect.trainer
        logprobs = first(names)
        if logprobs is None:
            near = [key for name in names for key in near_names(name, [*map(str, item)])]
            spelt = f" (is {near[0]} that?)" if near else ""
            raise DumpError(
                f"a file of {dialect.name} without {' or '.join(names)}, which the {role} would "
                f"have said{spelt}: {', '.join(map(str, list(item)[:12]))}",
                where=where,
                hint="--map names another field; docs/rl.md tells what makes a framework write it",
            )
        rest = {key: first(tried) for key, tried in dialect.rest.items()}
        return dialect.name, FieldMap(logprobs=logprobs, **rest)
    if {"input", "output"} <= item.keys():
        raise DumpError(
            "verl's lines (rollout_data_dir) hold texts, no tokens and no log-probabilities",
            where=where,
            hint="tokenise and score them with the model: jq -c '{text: (.input + .output)}' FILE "
            "> texts.jsonl; divergence capture MODEL --prompts texts.jsonl -o scored",
        )
    raise DumpError(
        f"no framework's fields are known here: {', '.join(list(item)[:12])}",
        where=where,
        hint="--map FILE.toml names them; docs/rl.md has one to copy",
    )


ROLLOUTS = Layout(
    words="rollouts' log-probabilities",
    recognise=recognise,
    takes_map=True,
    scores=partial(read, role="rollout"),
)
TRAINER = Layout(
    words="a trainer's scores",
    recognise=recognise,
    takes_map=True,
    scores=partial(read, role="trainer"),
)
