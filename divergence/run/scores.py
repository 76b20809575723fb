"""A run of log-probabilities alone: of tokens that a server, a rollout or a trainer scored.

One record of each of two sites for every prompt, at step 0 of the free pass, whatever number of
tokens was scored in however many forwards: a rollout holds thousands.

    logprobs:out      float32 (1, T, K)   log p, natural logarithm
    logprobs:out.ids  int32   (1, T, K)   token ids

The records' ``positions`` are the indices of the T scored tokens in the sequence, prompt and answer
(``prompt_ids + generated_ids``). Column 0 is the token that stands there; the others are the most
likely ones, in falling order, as far as they were told. An entry that was not told has the id -1
and nan; a nan beside an id is what the source itself said.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from divergence._version import __version__
from divergence.errors import DumpError
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import (
    UNKNOWN,
    EngineNote,
    Environment,
    Manifest,
    ModelIdentity,
    Plan,
    SampleTokens,
    Settings,
    Task,
    Tokens,
)
from divergence.run.site import LOGPROB_IDS_SITE, LOGPROBS, LOGPROBS_SITE
from divergence.run.writer import RunWriter, new_run_id

if TYPE_CHECKING:
    import torch

MAX_TOKEN = 2**31 - 1
_FREE_CELLS, _MAX_SPARSITY = 1 << 22, 64
"""All rows are as wide as the widest, so few long ones among many would take their product."""
DRAWN = "drawn"
"""``engine.facts["tokens"]`` of answers that were asked for several times, at temperature 1."""
BY_TEXT = "numbered by text"
"""``engine.facts["token ids"]`` where the source tells tokens by text alone: ids are then numbers
of texts (``tokens.texts``), of this run alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Holds what is known of one prompt. ``positions``, ``logprobs`` and ``top`` have one entry a
    scored token; an entry of ``top`` is (id, log p), the likeliest first."""

    prompt_ids: Sequence[int]
    generated_ids: Sequence[int]
    positions: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]] = ()
    text: str | None = None

    @property
    def tokens(self) -> SampleTokens:
        return SampleTokens(
            text=self.text, prompt_ids=list(self.prompt_ids), generated_ids=list(self.generated_ids)
        )

    def tensors(self, where: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors. Raises DumpError where a value is no log-probability or no token id."""
        import torch

        ids = [*self.prompt_ids, *self.generated_ids]
        num, top = len(self.positions), self.top or [()] * len(self.positions)
        width = 1 + max(map(len, top), default=0)
        if num * width > max(_FREE_CELLS, _MAX_SPARSITY * (num + sum(map(len, top)))):
            raise DumpError(
                f"a token has {width - 1:,} likeliest ones beside it, and most of {num:,} have few",
                where=where,
            )
        values = torch.full((1, num, width), math.nan)
        tokens = torch.full((1, num, width), -1, dtype=torch.int32)
        for row, (position, value) in enumerate(zip(self.positions, self.logprobs, strict=True)):
            entries = [(ids[position], value), *top[row]]
            for token, logprob in entries:
                if not 0 <= token <= MAX_TOKEN:
                    raise DumpError(f"{token} is no token id", where=where)
                if logprob > 1e-3:
                    raise DumpError(
                        f"{logprob:.6g} is no log-probability, which is never above 0",
                        where=where,
                        hint="natural logarithms are expected, not probabilities or logits",
                    )
            values[0, row, : len(entries)] = torch.tensor([logprob for _, logprob in entries])
            tokens[0, row, : len(entries)] = torch.tensor([token for token, _ in entries])
        return values, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSource:
    """Holds what is known of whatever scored the tokens; all else is unknown."""

    engine: str
    version: str = UNKNOWN
    model: str = UNKNOWN
    dtype: str | None = None
    """What the model computed in; None where nobody said it."""
    facts: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    max_new_tokens: int = 0


def foreign_manifest(
    tokens: Tokens,
    plan: Plan,
    *,
    tool: str,
    label: str,
    command: str | None,
    dtype: str,
    source: str = UNKNOWN,
    task: Task = "causal-lm",
    engine: EngineNote | None = None,
    settings_dtype: str | None = None,
    **settings: Any,
) -> Manifest:
    """The manifest of a run that this tool did not execute: what nobody told of it is unknown.
    ``tool``: what of this tool made it."""
    unknown: dict[str, Any] = {"deterministic": False, "seed": 0, "device": UNKNOWN, "batch": False}
    return Manifest(
        id=new_run_id(),
        tool_version=f"{__version__}{tool}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        model=ModelIdentity(
            source=source,
            model_class="",
            task=task,
            config_digest="",
            dtype=dtype,
            num_parameters=0,
            digest="",
        ),
        engine=engine,
        tokens=tokens,
        settings=Settings(**unknown | {"dtype": settings_dtype} | settings),
        environment=Environment(
            label=label,
            platform="",
            python="",
            device_type=UNKNOWN,
            device_name=UNKNOWN,
            cpu="",
            cpu_capability="",
            num_threads=0,
            versions={},
        ),
        plan=plan,
    )


def scores_manifest(
    source: ScoreSource,
    samples: Sequence[SampleTokens],
    *,
    label: str,
    command: str | None,
    texts: Mapping[str, str] | None = None,
    forced_by: str | None = None,
    tool: str = "",
) -> Manifest:
    """The manifest of such a run. ``tool``: what of this tool made it."""
    tokens = Tokens(
        samples=list(samples),
        groups=[[number] for number in range(len(samples))],
        forced_by=forced_by,
        texts=dict(texts or {}),
    )
    return foreign_manifest(
        tokens,
        Plan(passes=["free"], sites=[LOGPROBS]),
        tool=tool,
        label=label,
        command=command,
        source=source.model,
        engine=EngineNote(name=source.engine, version=source.version, facts=dict(source.facts)),
        seed=source.seed,
        max_new_tokens=source.max_new_tokens,
        dtype="float32",
        settings_dtype=source.dtype,  # that of the numbers, and of the model
    )


def put_scores(writer: RunWriter, sample: int, scores: Scores, *, where: str) -> None:
    """Records one prompt's scores, if it has any. Raises DumpError."""
    if not scores.positions:
        return
    positions = tuple(scores.positions)
    pair = zip((LOGPROBS_SITE, LOGPROB_IDS_SITE), scores.tensors(where), strict=True)
    for order, (site, tensor) in enumerate(pair):
        writer.put(
            CapturedTensor(tensor),
            pass_="free",
            sample=sample,
            step=0,
            site=site,
            order=order,
            positions=positions,
        )


def lm_eval_requests(item: Any, where: str) -> Iterator[tuple[str, str, float | None]]:
    """(context, continuation, log-likelihood) of each choice of a document, a line that
    lm-evaluation-harness writes with ``--log_samples``. Raises DumpError."""
    if not isinstance(item, dict):
        raise DumpError("the line is no object", where=where)
    given = item.get("arguments")
    given = list(given.values()) if isinstance(given, dict) else given
    answers = item.get("resps")
    if not isinstance(given, list) or not isinstance(answers, list) or len(given) != len(answers):
        raise DumpError("arguments and resps are not of one length", where=where)
    for request, answer in zip(given, answers, strict=True):
        words = list(request.values()) if isinstance(request, dict) else request
        if not isinstance(words, list) or len(words) < 2:
            raise DumpError("a request is context and continuation", where=where)
        while isinstance(answer, list) and answer and isinstance(answer[0], list):
            answer = answer[0]
        value = math.nan
        if isinstance(answer, list) and len(answer) == 2:  # [log-likelihood, is greedy], as text
            with contextlib.suppress(TypeError, ValueError):
                value = float(answer[0])
        yield str(words[0]), str(words[1]), None if math.isnan(value) else value
