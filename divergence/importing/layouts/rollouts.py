"""Rollouts of reinforcement learning as JSON lines: what the engine that sampled them said of their
tokens, or what the trainer said of the same tokens.

One file often holds both, side by side; each is a run of its own (``--format rollouts`` and
``--format trainer``). The fields by which a framework is known stand in _DIALECTS; docs/rl.md has
them as a table, with what writes such a file. A nan or null is a token that was not scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from divergence.errors import DumpError
from divergence.importing.building import FieldMap, Notes, Scored, scores_of
from divergence.importing.files import DumpFolder
from divergence.outside import json_value
from divergence.run.scores import ScoreSource

_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class _Dialect:
    """``rollout``, ``trainer``: the field of each side, tried in order. ``rest``: of FieldMap."""

    name: str
    known_by: tuple[str, ...]
    rollout: tuple[str, ...]
    trainer: tuple[str, ...]
    rest: dict[str, tuple[str, ...]]


DIALECTS = (
    _Dialect("verl", ("responses",), ("rollout_log_probs",), ("old_log_probs",), {
        "prompt": ("prompts",), "answer": ("responses",), "mask": ("response_mask",),
        "attention": ("attention_mask",),
    }),
    _Dialect("verl", ("response_ids",), ("rollout_log_probs", "response_logprobs"),
             ("old_log_probs",), {
        "prompt": ("prompt_ids",), "answer": ("response_ids",), "mask": ("response_mask",),
    }),
    _Dialect("slime", ("tokens", "response_length"), ("rollout_log_probs",), ("log_probs",), {
        "tokens": ("tokens",), "answer_length": ("response_length",), "mask": ("loss_mask",),
    }),
    _Dialect("TRL", ("completion_ids",), ("sampling_per_token_logps", "logprobs"),
             ("old_per_token_logps",), {
        "prompt": ("prompt_ids",), "answer": ("completion_ids",), "mask": ("completion_mask",),
        "top": ("top_logprobs",),
    }),
    _Dialect("NeMo-RL", ("token_ids",), ("generation_logprobs",), ("prev_logprobs",), {
        "tokens": ("token_ids",), "length": ("input_lengths",),
        "mask": ("token_loss_mask", "token_mask"),
    }),
)  # fmt: skip


class Rollouts:
    """A layout of scores. ``role``: whose log-probabilities are taken."""

    TAKES_MAP = True

    def __init__(self, role: Literal["rollout", "trainer"]) -> None:
        self.role = role
        self.NAME = f"{role}s' log-probabilities" if role == "rollout" else "a trainer's scores"

    def recognise(self, folder: DumpFolder) -> bool:
        return bool(_files(folder))

    def scores(self, folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
        scored: Scored | None = None
        for item, where in objects(folder):
            if fields is None:
                framework, fields = self._known(item, where)
            elif scored is None:
                framework = "unknown"
            if scored is None:
                facts = {"role": self.role, "tokens": "sampled", "field": fields.logprobs}
                scored = Scored(ScoreSource(engine=framework, facts=facts))
            scores = scores_of(item, fields, where)
            scored.scores.append(scores)
            scored.wheres.append(where)
        if scored is None:
            raise DumpError("the file holds no line", where=str(folder.path))
        longest = max(len(score.generated_ids) for score in scored.scores)
        scored.source = ScoreSource(
            engine=scored.source.engine, facts=scored.source.facts, max_new_tokens=longest
        )
        empty = sum(not score.positions for score in scored.scores)
        if empty:
            notes.say(f"{empty} of {len(scored.scores)} lines have no scored token")
        return scored

    def _known(self, item: Any, where: str) -> tuple[str, FieldMap]:
        if not isinstance(item, dict):
            raise DumpError("the line is no object", where=where)
        for dialect in DIALECTS:
            if not all(name in item for name in dialect.known_by):
                continue
            names = dialect.rollout if self.role == "rollout" else dialect.trainer
            logprobs = next((name for name in names if name in item), None)
            if logprobs is None:
                raise DumpError(
                    f"a file of {dialect.name} without {' or '.join(names)}, which the "
                    f"{self.role} would have said", where=where,
                    hint="--map names another field; docs/rl.md tells what makes a framework "
                    "write it",
                )  # fmt: skip
            rest = {
                key: next((name for name in tried if name in item), None)
                for key, tried in dialect.rest.items()
            }
            return dialect.name, FieldMap(logprobs=logprobs, **rest)
        raise DumpError(
            f"no framework's fields are known here: {', '.join(list(item)[:12])}", where=where,
            hint="--map FILE.toml names them; docs/rl.md has one to copy",
        )  # fmt: skip


def _files(folder: DumpFolder) -> list[str]:
    return [name for name in folder.names if name.endswith(_SUFFIXES)]


def objects(folder: DumpFolder) -> Iterator[tuple[Any, str]]:
    """Every line's object, and where it stands."""
    for name in _files(folder):
        for number, item in lines_of(folder, name):
            yield item, f"{folder.where(name)}, line {number}"


def lines_of(folder: DumpFolder, name: str) -> Iterator[tuple[int, Any]]:
    """Each line's number and object, of one file. Raises DumpError."""
    file = folder.where(name)
    for number, line in enumerate(folder.lines(name), 1):
        if not line.strip():
            continue
        yield number, json_value(
            line, where=f"{file}, line {number}",
            hint="write the file again, and let the program end by itself",
        )  # fmt: skip


ROLLOUTS, TRAINER = Rollouts("rollout"), Rollouts("trainer")
