"""Two curves of one metric, measured, and the verdict on the loss.

The bands are a rule of thumb of the field, not statistics: a mean relative error of the loss above
1 to 2% is called misaligned. What is known beside it, whether the difference is noise about 0, is
said with it: a trend that leaves the noise and ends above the first band is no pass, however small
the mean still is, nor is a step at which logs that agreed go apart; a trend that ends below the
band is a place to look; and a mean error that is the noise of single steps is no failure.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from divergence.domains.training.reading import Curves, is_losses, read_losses
from divergence.domains.training.result import CurveDiff, Kind, LossReport, LossVerdict, Trend
from divergence.errors import UsageError
from divergence.facts import Fact, fact, with_sentences
from divergence.numerics.sums import ratio
from divergence.words import SIDES

# Does the difference of two curves leave its own noise, and from which step on?
#
# d_t is the relative difference of step t. Under the null hypothesis it has mean 0, whatever its
# size: two runs that round differently go apart like this. The n steps are put into K blocks, m_k
# being the mean of d over a block, and the noise of a block mean is taken from successive blocks,
#
#     s² = Σ (m_k - m_(k-1))² / (2 (K-1))        (von Neumann et al., "The mean square successive
#                                                 difference", Ann. Math. Statist. 12, 1941)
#
# which a slow change of the mean hardly enters. The running sum from zero, max_j |Σ_(k<=j) m_k| /
# (s sqrt K), is then compared with its limit. For noise that is independent from block to block the
# sum is a random walk, so P(max > x) <= 4 P(T > x) (reflection), T being Student's t with about
# 2 (K-1) / 3 degrees of freedom, those of s. The sum must exceed its limit with K = 16 and with K =
# 32: noise that is alike for some steps then looks like noise in at least one of them. So that a
# late drift is seen beside its own noise, the last half, quarter and eighth of the steps are looked
# at too; the limit is that of 0.1% for all four looks together (Bonferroni).
#
# From which step on: the k for which "zero before k, a straight line from k on" has the smallest
# squared error. It is an estimate, and early steps of a slow drift are within the noise.
#
# It refuses to tell with fewer than 64 steps, and looks at no part of fewer than 256. Differences
# that stay alike for longer than a block (a thirty-second of the steps) are no noise to it.
#
# A jump needs no noise to stand out of: where two logs agree to 1e-7 for 150 steps and to 1e-3 from
# then on, no rounding did that. Rounding errors grow, and from one step to the next not tenfold.

MIN_STEPS = 64
MIN_PART = 256
"""Steps of a half, quarter or eighth that is looked at for itself: eight and more in a block."""
LIMITS = {16: 6.042, 32: 4.707}
"""Number of blocks → x with 4 P(T > x) = 0.001 / 4, for Student's t with 10 and 20.7 degrees of
freedom (scipy.stats.t.ppf)."""

MIN_BEFORE = 16
"""Steps whose agreement is taken for that of the logs, whatever it is. Of fewer, an agreement to
the last digit is."""
_JUMP, _STAYS, _MIN_AFTER = 10.0, 3.0, 8
_RESOLUTION = 4 * 2.0**-23
"""Relative: a loss is computed in float32, where healthy kernels were seen 3e-7 apart."""


def block_means(values: np.ndarray, num_blocks: int) -> np.ndarray:
    """(n,) → (num_blocks,): means over stretches of nearly equal length."""
    return np.array([part.mean() for part in np.array_split(values, num_blocks)])


def successive_noise(values: np.ndarray) -> float:
    """The standard deviation, from differences of successive values alone."""
    if len(values) < 2:
        return math.nan
    return float(np.sqrt(np.mean(np.diff(values) ** 2) / 2))


def jump_of(a: np.ndarray, b: np.ndarray) -> tuple[int, float] | None:
    """(index, relative agreement before it) of the first step that is ten times farther off than
    any before it, and the logs' last digit, where the median of it and the 15 behind it stays three
    times so. ``a``, ``b`` (n,): finite, ``a`` not 0."""
    n = len(a)
    if n < 2 + _MIN_AFTER:
        return None
    error = np.abs(b - a) / np.abs(a)
    before = np.concatenate([[0.0], np.maximum.accumulate(error)[:-1]])
    digit = np.maximum(_RESOLUTION, max(_last_digit(a), _last_digit(b)) / np.abs(a))
    allowed = np.maximum(before, digit)
    agrees = (np.arange(n) >= MIN_BEFORE) | ((np.arange(n) >= 2) & (before <= digit))
    for index in np.flatnonzero(agrees & (error > _JUMP * allowed))[: n - _MIN_AFTER]:
        after = error[index : index + 16]
        if len(after) >= _MIN_AFTER and np.median(after) > _STAYS * allowed[index]:
            return int(index), float(before[index])
    return None


def _last_digit(values: np.ndarray) -> float:
    """Return the unit of the last digit that logs write; 0 where they have all digits."""
    for digits in range(7):
        if np.allclose(np.round(values, digits), values, rtol=1e-10, atol=0):
            return float(10.0**-digits)
    return 0.0


def trend_of(steps: np.ndarray, diffs: np.ndarray) -> Trend:
    """``steps`` (n,), ``diffs`` (n,): finite relative differences in order of steps."""
    if len(diffs) < MIN_STEPS:
        few = fact("training.few_steps", num_steps=len(diffs), least=MIN_STEPS)
        return Trend(state="not_told", statistic=None, limit=None, parts_at=None, lacking=few)
    parts = [diffs] + [
        diffs[-(len(diffs) // share) :] for share in (2, 4, 8) if len(diffs) // share >= MIN_PART
    ]
    looks = []  # (statistic, limit) for the number of blocks with which the sum goes less far
    for part in parts:
        sums = []
        for num_blocks, limit in LIMITS.items():
            means = block_means(part, num_blocks)
            noise = successive_noise(means) * math.sqrt(num_blocks)
            sums.append((ratio(float(np.max(np.abs(np.cumsum(means)))), noise), limit))
        looks.append(min(sums, key=lambda pair: pair[0] / pair[1]))
    statistic, limit = max(looks, key=lambda pair: pair[0] / pair[1])
    leaves = statistic > limit
    return Trend(
        state="parts" if leaves else "within_noise",
        statistic=statistic if math.isfinite(statistic) else None,
        limit=limit,
        parts_at=int(steps[_onset(diffs)]) if leaves else None,
    )


def _onset(diffs: np.ndarray) -> int:
    """The index k that makes Σ_(t<k) d² + min over a, b of Σ_(t>=k) (d - a - b (t-k))² smallest."""
    n = len(diffs)
    reversed_ = diffs[::-1].astype(np.float64)
    count = np.arange(1, n + 1, dtype=np.float64)  # length of the tail
    index = np.arange(n, dtype=np.float64)
    sum_d = np.cumsum(reversed_)
    sum_id = np.cumsum(reversed_ * index)
    mean_i = (count - 1) / 2
    var_i = count * (count**2 - 1) / 12
    cov = sum_id - mean_i * sum_d
    explained = sum_d**2 / count
    explained[1:] += cov[1:] ** 2 / var_i[1:]
    shortest = max(2, n // 32)  # a line through a few steps explains noise
    best = int(np.argmax(explained[shortest - 1 :])) + shortest
    return n - best


# compare_losses(): two files of losses.


@with_sentences
def compare_losses(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str] | None,
    *,
    warmup_steps: int | None = None,
) -> LossReport:
    """``reference`` and ``candidate``: JSON lines, CSV, a ``trainer_state.json``, or TensorBoard's
    event files. ``warmup_steps``: leave out steps below this one. Default: the first tenth of the
    steps that both have, at most 100.

    Raises UsageError for a path that is none of these, and DumpError for a damaged file.
    """
    if candidate is None:
        raise UsageError(
            "one file of losses is given, and a comparison needs two",
            where=os.fspath(reference),
            hint="divergence compare A.jsonl B.jsonl",
        )
    paths = [os.fspath(reference), os.fspath(candidate)]
    wrong = [path for path in paths if not is_losses(path)]
    if wrong:
        raise UsageError(
            "losses are compared with losses, runs with runs: one of these is a file of losses, or "
            "no run at all",
            where=" and ".join(paths),
            hint=(
                "two runs, each the directory or archive that `divergence capture` wrote",
                "two of JSON lines, CSV, trainer_state.json, TensorBoard's event files",
            ),
        )
    if os.path.realpath(paths[0]) == os.path.realpath(paths[1]):
        raise UsageError(
            "a file of losses compared with itself proves nothing",
            where=paths[0],
            hint="name the other training's file",
        )
    a, b = (read_losses(path) for path in paths)
    return compare_curves(a, b, warmup_steps=warmup_steps)


BANDS = (0.01, 0.02)
WARMUP_SHARE, MOST_WARMUP = 0.1, 100
_BLOCKS = 16


def compare_curves(a: Curves, b: Curves, *, warmup_steps: int | None = None) -> LossReport:
    """``warmup_steps``: leave out steps below this one; None: the first tenth of the common ones,
    at most 100."""
    common = sorted(a.metrics["loss"].keys() & b.metrics["loss"].keys())
    remarks = [
        fact("training.of_side", side=side, what=item)
        for side, curves in (("reference", a), ("candidate", b))
        for item in curves.remarks
    ]
    first = warmup_steps
    if first is None:
        num = min(int(len(common) * WARMUP_SHARE), MOST_WARMUP)
        first = common[num] if common else 0
    names = sorted(a.metrics.keys() & b.metrics.keys(), key=lambda name: (name != "loss", name))
    metrics = [_measure(name, a.metrics[name], b.metrics[name], first) for name in names]
    for name in sorted(a.metrics.keys() ^ b.metrics.keys()):
        side = "reference" if name in a.metrics else "candidate"
        remarks.append(fact("training.alone", metric=name, side=side))
    losses = a.metrics["loss"], b.metrics["loss"]
    if not len(losses[0]) == len(losses[1]) == len(common):
        nums: dict[str, Any] = {"num_reference": len(losses[0]), "num_candidate": len(losses[1])}
        remarks.append(fact("training.other_steps", **nums, num_common=len(common)))
        ends = [max(curve) for curve in losses]
        if common and ends[0] != ends[1]:
            side = SIDES[ends[1] > ends[0]]
            remarks.append(fact("training.goes_on", side=side, step=max(ends), end=min(ends)))
    loss = metrics[0]
    verdict = _with_jump(_verdict(loss, a.metrics["loss"], b.metrics["loss"], common), loss)
    return LossReport(
        reference=a.path,
        candidate=b.path,
        verdict=verdict,
        metrics=metrics,
        warmup_steps=sum(step < first for step in common),
        bands=BANDS,
        remarks=remarks,
    )


def _measure(name: str, a: dict[int, float], b: dict[int, float], first: int) -> CurveDiff:
    bad_a = next((step for step, value in a.items() if not math.isfinite(value)), None)
    bad_b = next((step for step, value in b.items() if not math.isfinite(value)), None)
    ends = [step for step in (bad_a, bad_b) if step is not None]
    last = min(ends, default=None)  # what follows a nan is no curve
    every = [
        step
        for step in sorted(a.keys() & b.keys())
        if (last is None or step < last) and a[step] != 0
    ]
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


def _interval(curve: dict[int, float]) -> float:
    """Steps from one logged value to the next, as most are."""
    return float(np.median(np.diff(np.array(list(curve))))) if len(curve) > 1 else 0.0


def _verdict(
    loss: CurveDiff, a: dict[int, float], b: dict[int, float], common: list[int]
) -> LossVerdict:
    """Decide by the first of these that holds."""
    bad_a, bad_b = loss.nonfinite_a, loss.nonfinite_b
    if bad_a != bad_b:
        first = bad_b is None or (bad_a is not None and bad_a < bad_b)
        side, step = ("reference", bad_a) if first else ("candidate", bad_b)
        return _is("nonfinite", fact("training.nonfinite", side=side, step=step))
    if not common:
        return _is("undetermined", fact("training.no_common_step"))
    every = _interval(a), _interval(b)
    if min(every) and max(every) / min(every) >= 2:
        other = fact("training.other_intervals", reference=every[0], candidate=every[1])
        return _is("undetermined", other)
    mean, trend = loss.mean_error, loss.trend
    if loss.num_steps == 0 or mean is None:
        return _is("undetermined", fact("training.no_finite_step"))
    if a == b and bad_a is not None:
        return _is("nonfinite", fact("training.equal_nonfinite", step=bad_a))
    if a == b:
        return _is("identical", fact("training.equal", num_steps=len(a)))
    if bad_a is not None:
        return _is("nonfinite", fact("training.both_nonfinite", step=bad_a, mean=mean))
    low, high = BANDS
    error = fact("training.mean_error", mean=mean, num_steps=loss.num_steps)
    bias, se = loss.mean_diff or 0.0, loss.mean_diff_se or 0.0
    if trend.state == "not_told":
        if mean > high and loss.noise is not None and abs(bias) > high:
            return _is("misaligned", error, fact("training.bias", bias=bias))
        return _is("undetermined", error, fact("training.trend_not_known", why=trend.lacking))
    if trend.state == "parts":
        # the step from which on the difference leaves its noise; None where that is the start
        begin, start = trend.parts_at, loss.first_step
        if begin is not None and start is not None:
            length = (loss.last_step or 0) - start
            begin = None if begin - start <= length / _BLOCKS else begin
        if mean > high:
            leaves = fact("training.leaves_noise", look=False, step=begin)
            return _is("misaligned", error, leaves)
        if abs(loss.end_diff or 0) > low:
            drifts = fact("training.drifts", step=begin, end=loss.end_diff)
            return _is("drift", error, drifts)
        look = mean <= low
        leaves = fact("training.leaves_noise", look=look, step=begin, end=loss.end_diff)
        return _is("aligned" if look else "undetermined", error, leaves)
    if mean <= low:
        headline = [error, fact("training.no_trend")]
        if (loss.max_error or 0) > high:  # a spike, or a run that leaves at the very end
            spike = fact("training.step_off", step=loss.max_step, error=loss.max_error)
            headline.append(fact("training.beside", look=True, what=spike))
        return _is("aligned", *headline)
    signed: dict[str, Any] = {"bias": bias, "error": se}
    if abs(bias) + 3 * se <= low:
        return _is("undetermined", error, fact("training.noise_of_steps", **signed))
    if mean > high and abs(bias) - 3 * se > high:
        return _is("misaligned", error, fact("training.bias", **signed))
    return _is("undetermined", error, fact("training.between_bands", **signed))


def _with_jump(verdict: LossVerdict, loss: CurveDiff) -> LossVerdict:
    """A first step that is named. However small it is, it is no pass where the logs agreed before;
    of few steps before it, it is a place to look."""
    if loss.jump_at is None or verdict.kind == "nonfinite":
        return verdict
    jump = fact(
        "training.jump",
        step=loss.jump_at,
        error=loss.jump_to or 0,
        num_before=loss.jump_before,
        before=loss.jump_from or None,
    )
    fails = verdict.kind in ("misaligned", "drift")
    if fails or loss.jump_before < MIN_BEFORE:
        beside = fact("training.beside", look=not fails, what=jump)
        return _is(verdict.kind, *verdict.headline, beside)
    no_rounding = fact("training.no_rounding", mean=loss.mean_error, num_steps=loss.num_steps)
    return _is("drift", jump, no_rounding)


def _is(kind: Kind, *headline: Fact) -> LossVerdict:
    return LossVerdict(kind=kind, headline=list(headline))
