"""A policy's rules on runs of log-probabilities alone: their numbers, and their tokens."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from divergence.comparison.results.tokens import LogprobsResult
from divergence.gate.policy import LogprobsPolicy
from divergence.gate.result import Failure
from divergence.run.schema.site import near_names

__all__ = ["equal_tokens", "failures"]


def equal_tokens(result: LogprobsResult) -> tuple[int, int, int]:
    """(equal tokens, ties, all) of the answers, each up to the first difference."""
    return result.num_equal, result.num_ties, result.num_tokens


def failures(result: LogprobsResult, policy: LogprobsPolicy) -> Iterator[Failure]:
    """A number that no comparison has is a failure too: nothing was held against its limit."""
    numbers = _numbers(result)
    for key, limits, sign in (("max", policy.max, 1), ("min", policy.min, -1)):
        for name, limit in limits.items():
            value = numbers.get(name)
            if value is not None and sign * value <= sign * limit:
                continue
            rule, allowed = f"logprobs.{key}.{name}", f"{'<=' if sign > 0 else '>='} {limit:g}"
            if value is None:
                near = near_names(name, sorted(numbers))
                like = f"; did you mean {' or '.join(near)}?" if near else ""
                yield Failure(rule=rule, allowed=allowed, found="unknown",
                              text=f"{name} is not known here{like}")  # fmt: skip
                continue
            yield Failure(rule=rule, allowed=allowed, found=f"{value:.6g}",
                          text=f"{name} is {value:.3g}; the policy wants {allowed}")  # fmt: skip


def _numbers(result: LogprobsResult) -> dict[str, float]:
    """By name: Δ log p, the divergences, and what trainers watch."""
    numbers = dict(result.rollout)
    for part in (result.delta, result.divergence):
        for name, value in msgspec.structs.asdict(part).items() if part is not None else ():
            if isinstance(value, float):
                numbers[name] = value
    return numbers
