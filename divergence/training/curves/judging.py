"""Two curves of one metric, measured, and the verdict on the loss.

The bands are a rule of thumb of the field, not statistics: a mean relative error of the loss above
1 to 2% is called misaligned. What is known beside it, whether the difference is noise about 0, is
said with it: a trend that leaves the noise and ends above the first band is no pass, however small
the mean still is, nor is a step at which logs that agreed go apart; a trend that ends below the
band is a place to look; and a mean error that is the noise of single steps is no failure.
"""

from __future__ import annotations

import math

import numpy as np

from divergence.layout import count
from divergence.training.curves.reading import Curves
from divergence.training.curves.result import CurveDiff, LossReport, LossVerdict, Trend
from divergence.training.curves.trend import (
    MIN_BEFORE,
    MIN_STEPS,
    block_means,
    jump_of,
    successive_noise,
    trend_of,
)

__all__ = ["BANDS", "judge"]

BANDS = (0.01, 0.02)
WARMUP_SHARE, MOST_WARMUP = 0.1, 100
_BLOCKS = 16


def judge(a: Curves, b: Curves, *, warmup_steps: int | None = None) -> LossReport:
    """``warmup_steps``: leave out steps below this one; None: the first tenth of the common ones,
    at most 100."""
    common = sorted(a.metrics["loss"].keys() & b.metrics["loss"].keys())
    notes = [f"A: {note}" for note in a.notes] + [f"B: {note}" for note in b.notes]
    if warmup_steps is None:
        num = min(int(len(common) * WARMUP_SHARE), MOST_WARMUP)
        first = common[num] if common else 0
    else:
        first = warmup_steps
    metrics = [
        _measure(name, a.metrics[name], b.metrics[name], first)
        for name in a.metrics
        if name in b.metrics
    ]
    metrics.sort(key=lambda curve: (curve.metric != "loss", curve.metric))
    for name in sorted(a.metrics.keys() ^ b.metrics.keys()):
        notes.append(f"{name} is in {'A' if name in a.metrics else 'B'} alone")
    notes += _coverage(a.metrics["loss"], b.metrics["loss"], common)
    loss = metrics[0]
    verdict = _with_jump(_verdict(loss, a.metrics["loss"], b.metrics["loss"], common), loss)
    return LossReport(
        reference=a.path,
        candidate=b.path,
        verdict=verdict,
        metrics=metrics,
        warmup_steps=sum(step < first for step in common),
        bands=BANDS,
        notes=notes,
    )


def _measure(name: str, a: dict[int, float], b: dict[int, float], first: int) -> CurveDiff:
    bad_a = next((step for step, value in a.items() if not math.isfinite(value)), None)
    bad_b = next((step for step, value in b.items() if not math.isfinite(value)), None)
    ends = [step for step in (bad_a, bad_b) if step is not None]
    last = min(ends, default=None)  # what follows a nan is no curve
    every = [
        step for step in sorted(a.keys() & b.keys())
        if (last is None or step < last) and a[step] != 0
    ]  # fmt: skip
    jump = jump_of(np.array([a[step] for step in every]), np.array([b[step] for step in every]))
    jump_at = None if jump is None else every[jump[0]]
    steps = [step for step in every if step >= first]
    left = np.array([a[step] for step in steps])
    right = np.array([b[step] for step in steps])
    with np.errstate(over="ignore"):
        diffs = (right - left) / np.abs(left)
    finite = np.isfinite(diffs)
    numbers, diffs = np.array(steps, dtype=np.int64)[finite], diffs[finite]
    n = len(diffs)
    error = np.abs(diffs)
    blocks = block_means(diffs, _BLOCKS) if n >= MIN_STEPS else None
    worst = int(np.argmax(error)) if n else None
    return CurveDiff(
        metric=name,
        num_steps=n,
        first_step=int(numbers[0]) if n else None,
        last_step=int(numbers[-1]) if n else None,
        num_equal=int(np.sum(diffs == 0)),
        mean_error=float(error.mean()) if n else None,
        mean_diff=float(diffs.mean()) if n else None,
        mean_diff_se=None if blocks is None else float(blocks.std(ddof=1) / math.sqrt(_BLOCKS)),
        end_diff=None if blocks is None else float(blocks[-1]),
        max_error=None if worst is None else float(error[worst]),
        max_step=None if worst is None else int(numbers[worst]),
        noise=successive_noise(diffs) if n > 1 else None,
        nonfinite_a=bad_a,
        nonfinite_b=bad_b,
        trend=trend_of(numbers, diffs),
        jump_at=jump_at,
        jump_from=None if jump is None else jump[1],
        jump_to=None if jump_at is None else abs(b[jump_at] / a[jump_at] - 1),
        jump_before=0 if jump is None else jump[0],
    )


def _coverage(a: dict[int, float], b: dict[int, float], common: list[int]) -> list[str]:
    if len(a) == len(b) == len(common):
        return []
    lines = [f"A has {len(a):,} steps, B {len(b):,}, of which {len(common):,} are in both"]
    if common and max(a) != max(b):
        longer, more, end = ("A", max(a), max(b)) if max(a) > max(b) else ("B", max(b), max(a))
        lines.append(f"{longer} goes on to step {more}, behind the other's last, {end}")
    return lines


def _interval(curve: dict[int, float]) -> float:
    """Steps from one logged value to the next, as most are."""
    return float(np.median(np.diff(np.array(list(curve))))) if len(curve) > 1 else 0.0


def _verdict(
    loss: CurveDiff, a: dict[int, float], b: dict[int, float], common: list[int]
) -> LossVerdict:
    """By the first of these that holds."""
    over = f"over {loss.num_steps:,} steps"
    if loss.nonfinite_a != loss.nonfinite_b:
        side, step = ("A", loss.nonfinite_a) if _first_is_a(loss) else ("B", loss.nonfinite_b)
        return LossVerdict(
            kind="nonfinite",
            summary=f"the loss of {side} is nan or inf at step {step}, where the other's is finite",
        )
    if not common:
        return _open("no step is in both files")
    every = _interval(a), _interval(b)
    if min(every) and max(every) / min(every) >= 2:
        return _open(
            f"A is logged every {every[0]:g} steps and B every {every[1]:g}: a logged loss may be "
            "a mean over its steps, so they are not of the same tokens"
        )
    mean, trend = loss.mean_error, loss.trend
    if loss.num_steps == 0 or mean is None:
        return _open("no step with a finite loss other than 0 is left behind the warm-up")
    if a == b:
        both = "" if loss.nonfinite_a is None else f", nan or inf at step {loss.nonfinite_a}"
        if both:
            return LossVerdict(kind="nonfinite", summary=f"both losses are equal{both}")
        return LossVerdict(
            kind="identical", summary=f"the loss of {count(len(a), 'step')} is equal on both sides"
        )
    if loss.nonfinite_a is not None:
        return LossVerdict(
            kind="nonfinite",
            summary=f"both losses are nan or inf at step {loss.nonfinite_a}; before, the mean "
            f"error is {_size(mean)}",
        )
    low, high = BANDS
    said = f"the mean error of the loss is {_size(mean)} {over}"
    if trend.state == "not_told":
        if mean > high and loss.noise is not None and abs(loss.mean_diff or 0) > high:
            return _misaligned(loss, f"{said}, {_signed(loss.mean_diff)} with its sign")
        return _open(f"{said}, but {trend.reason} to tell a trend from noise")
    se, bias = loss.mean_diff_se or 0.0, loss.mean_diff or 0.0
    if trend.state == "parts":
        at = _where(loss, trend)
        if mean > high:
            return _misaligned(loss, f"{said}; the difference leaves its noise {at}")
        end = f"{_signed(loss.end_diff)} at the end"
        if abs(loss.end_diff or 0) > low:
            return LossVerdict(
                kind="drift",
                summary=f"{said}, but the difference leaves its noise {at} and is {end}",
            )
        if mean <= low:
            return LossVerdict(
                kind="aligned",
                summary=f"{said}; a place to look: the difference leaves its noise {at}, {end}",
            )
        return _open(f"{said}; the difference leaves its noise {at}, {end}")
    if mean <= low:
        summary = f"{said}, and no trend leaves the noise of the steps"
        if (loss.max_error or 0) > high:  # a spike, or a run that leaves at the very end
            summary += (
                f"; a place to look: step {loss.max_step} is off by {_size(loss.max_error or 0)}"
            )
        return LossVerdict(kind="aligned", summary=summary)
    if abs(bias) + 3 * se <= low:
        return _open(
            f"{said}, which is the noise of single steps: with its sign it is {_signed(bias)} ± "
            f"{_size(se)}, and no trend leaves the noise"
        )
    if mean > high and abs(bias) - 3 * se > high:
        return _misaligned(loss, f"{said}, {_signed(bias)} ± {_size(se)} with its sign")
    return _open(
        f"{said}, between the bands or not apart from noise: {_signed(bias)} ± {_size(se)}"
    )


def _with_jump(verdict: LossVerdict, loss: CurveDiff) -> LossVerdict:
    """A first step that is named. However small it is, it is no pass where the logs agreed before;
    of few steps before it, it is a place to look."""
    if loss.jump_at is None or verdict.kind == "nonfinite":
        return verdict
    before = f"the {count(loss.jump_before, 'step')} before it"
    agreed = f"agree to {_size(loss.jump_from)}" if loss.jump_from else "are equal"
    text = f"step {loss.jump_at} is off by {_size(loss.jump_to or 0)}, where {before} {agreed}"
    if verdict.kind in ("misaligned", "drift"):
        return LossVerdict(kind=verdict.kind, summary=f"{verdict.summary}; {text}")
    if loss.jump_before < MIN_BEFORE:
        return LossVerdict(kind=verdict.kind, summary=f"{verdict.summary}; a place to look: {text}")
    mean = "unknown" if loss.mean_error is None else _size(loss.mean_error)
    return LossVerdict(
        kind="drift",
        summary=f"{text}: no rounding goes apart at one step. The mean error is {mean} over "
        f"{count(loss.num_steps, 'step')}",
    )


def _first_is_a(loss: CurveDiff) -> bool:
    a, b = loss.nonfinite_a, loss.nonfinite_b
    return b is None or (a is not None and a < b)


def _where(loss: CurveDiff, trend: Trend) -> str:
    early = trend.parts_at is not None and loss.first_step is not None and (
        trend.parts_at - loss.first_step <= ((loss.last_step or 0) - loss.first_step) / _BLOCKS
    )  # fmt: skip
    return "from the start" if early else f"near step {trend.parts_at}"


def _misaligned(loss: CurveDiff, summary: str) -> LossVerdict:
    return LossVerdict(kind="misaligned", summary=summary)


def _open(summary: str) -> LossVerdict:
    return LossVerdict(kind="undetermined", summary=summary)


def _size(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 1e-4 else f"{value:.2%}"


def _signed(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:+.1e}" if 0 < abs(value) < 1e-4 else f"{value:+.2%}"
