"""Which steps and which token positions are kept: small specs on the command line.

``0,3,8-12`` lists numbers and inclusive ranges, ``-1`` counts from the end,
``last:16`` is the last sixteen; for steps ``prefill`` is 0 and ``decode`` 1 and on.
"""

from __future__ import annotations

import re

from divergence.errors import UsageError

__all__ = ["select_positions", "step_selected"]

_RANGE = re.compile(r"(-?[0-9]{1,18})(?:-([0-9]{1,18}))?")
_LAST = re.compile(r"last:([0-9]{1,18})")


def step_selected(spec: str | None, step: int) -> bool:
    """Is ``step`` (0 = prefill) among the selected ones? None selects all. Raises UsageError."""
    if spec is None:
        return True
    for part in _parts(spec, "--steps"):
        if part == "prefill":
            chosen = step == 0
        elif part == "decode":
            chosen = step >= 1
        else:
            low, high = _bounds(part, "--steps")
            if low < 0:
                raise UsageError(
                    f"--steps {spec}: a step counted from the end is not known beforehand",
                    hint="use numbers from 0, for example 0,4-8, or prefill, decode",
                )
            chosen = low <= step <= high
        if chosen:
            return True
    return False


def select_positions(spec: str | None, count: int) -> tuple[int, ...] | None:
    """Selected token indices among ``count``, ascending; None for all. Raises UsageError."""
    if spec is None:
        return None
    chosen: set[int] = set()
    for part in _parts(spec, "--positions"):
        last = _LAST.fullmatch(part)
        if last:
            if int(last[1]) == 0:
                raise UsageError(f"--positions: {part} is no position", hint="for example last:16")
            chosen.update(range(max(0, count - int(last[1])), count))
            continue
        low, high = _bounds(part, "--positions")
        if low < 0:
            low = high = count + low
        chosen.update(range(max(low, 0), min(high, count - 1) + 1) if low >= 0 else ())
    return tuple(sorted(chosen))


def _parts(spec: str, option: str) -> list[str]:
    parts = [part.strip() for part in spec.split(",")]
    if not all(parts):
        raise UsageError(f"{option} {spec!r} has an empty part", hint="for example 0,4-8")
    return parts


def _bounds(part: str, option: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(
            f"{option}: {part!r} is neither a number nor a range",
            hint="for example 0,4-8, -1 or last:16"
            if option == "--positions"
            else "for example 0,4-8, prefill or decode",
        )
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if high < low or (low < 0 and match[2]):
        raise UsageError(
            f"{option}: the range {part!r} holds nothing",
            hint="a range is FIRST-LAST from 0, for example 4-8",
        )
    return low, high
