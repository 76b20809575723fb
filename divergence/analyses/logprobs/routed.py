"""Experts as a cause: do the tokens that differ share an expert?

Where a side, or a run of ``--layers``, recorded which experts its tokens were sent to, each expert
of each block splits the tokens in two: those whose prediction went through it, and the others. The
expert is named whose tokens differ most beyond the others', where chance does not explain it (rank
sum of Wilcoxon, normal approximation, p times the number of experts, at most 1%) and the others
differ by less than a third.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from divergence.analyses.logprobs.pairs import PromptPair
from divergence.comparison.results import LogprobExpert
from divergence.numerics.formats import format_named
from divergence.numerics.statistics import rank_sum
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import module_of

__all__ = ["expert_of", "has_experts"]

_LEVEL, _TIMES, _FEWEST = 0.01, 3.0, 5

_Choices = dict[tuple[int, int], dict[str, frozenset[int]]]
"""(prompt, index of the token in its sequence) → of each block the experts it was sent to."""


def has_experts(runs: Sequence[Run]) -> bool | None:
    """Does the model route tokens to experts? None where no side tells: a server, a rollout."""
    models = [
        run.manifest for run in runs if run.manifest.model.config or run.manifest.plan.modules
    ]
    if not models:
        return None
    return any(
        any(note.routed for note in manifest.plan.modules.values())
        or any(_NUM_EXPERTS.search(key) and value for key, value in manifest.model.config.items())
        for manifest in models
    )


_NUM_EXPERTS = re.compile(r"(^|[._])(num|n)_.*experts$|_num_experts$")
"""As configurations call it: num_experts, num_local_experts, n_routed_experts, moe_num_experts."""


def expert_of(pairs: Sequence[PromptPair], runs: Sequence[Run]) -> LogprobExpert | None:
    """The one whose tokens hold the difference. ``runs``: the first that recorded choices tells."""
    choices = next((told for run in runs if (told := _choices(run))), None)
    if choices is None:
        return None
    held = [
        (choices[key], abs(float(value)), key)
        for pair in pairs
        for place, value in zip(pair.places, pair.delta, strict=True)
        if (key := (pair.sample, int(place) - 1)) in choices
    ]
    size = np.array([value for _, value, _ in held])
    splits = {
        (block, expert): np.array([expert in chosen.get(block, ()) for chosen, *_ in held])
        for block, expert in {(b, e) for chosen, *_ in held for b, of in chosen.items() for e in of}
    }
    scores = [
        (rank_sum(size, there), block, expert, there)
        for (block, expert), there in splits.items()
        if _FEWEST <= int(there.sum()) <= len(size) - _FEWEST
    ]
    if not scores:
        return None
    z, block, expert, there = max(scores, key=lambda score: score[0])
    p_value = min(1.0, len(splits) * (1 - NormalDist().cdf(z)))
    mean, rest = float(size[there].mean()), float(size[~there].mean())
    if p_value > _LEVEL or mean <= _TIMES * rest:
        return None
    worst = held[int(np.where(there, size, -1.0).argmax())][2]
    return LogprobExpert(
        block=block, expert=expert, num_tokens=int(there.sum()), mean_abs=mean, rest_abs=rest,
        p_value=p_value, sample=worst[0], position=worst[1] + 1,
    )  # fmt: skip


def _choices(run: Run) -> _Choices:
    blocks = [path for path, note in run.manifest.plan.modules.items() if note.routed]
    choices: _Choices = {}
    for record in run.records if blocks else ():
        block = _block_of(record, blocks)
        if block is None or not run.has_bytes(record):
            continue
        group = run.manifest.tokens.group_of(record.sample) or [record.sample]
        tensor = run.read(record)
        if tensor.ndim not in (2, 3) or tensor.shape[:-1].numel() % len(group):
            continue
        rows = tensor.reshape(len(group), -1, tensor.shape[-1]).tolist()
        for sample, tokens in zip(group, rows, strict=True):
            for place, experts in _places(run, record, sample, tokens):
                choices.setdefault((sample, place), {})[block] = frozenset(experts)
    return choices


def _block_of(record: Record, blocks: Sequence[str]) -> str | None:
    """The block whose choice the record is."""
    path, _, port = record.site.rpartition(":")
    chosen = record.pass_ == "free" and path.endswith(".experts") and port.startswith("in.")
    if not chosen or format_named(record.dtype).kind == "float":
        return None
    return next((b for b in blocks if module_of(record.site).startswith(b + ".")), None)


def _places(
    run: Run, record: Record, sample: int, tokens: list[list[int]]
) -> list[tuple[int, list[int]]]:
    """Index in the sequence of each token of a forward; padding, on the left, is left out."""
    num_prompt = len(run.manifest.tokens.samples[sample].prompt_ids)
    if record.step:
        return [(num_prompt + record.step - 1, tokens[-1])]
    pads = len(tokens) - num_prompt
    return [(n - pads, token) for n, token in enumerate(tokens) if n >= pads >= 0]
