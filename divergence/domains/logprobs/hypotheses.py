"""One setting, or one mistake, makes this of log-probabilities: closed hypotheses, each fitted.

An engine may tell log-probabilities before or behind its sampling settings, and a trainer need not
do as it does. Or the numbers are right and stand at the wrong place. Each hypothesis predicts one
side's numbers from the other's, with one fitted value at most:

- *Temperature*: log p' = log p / T + c, where c is one number for all tokens of a place. Of two
  tokens that both sides list at one place, c falls out: the ratio of their distances is 1 / T.
  Where one side lists what holds nearly all of the probability, c follows from its list. The chosen
  tokens alone bound T and no more (``bounded``): c goes with log p as well.
- *Top-k, top-p, min-p*: behind them the likeliest tokens hold all of the probability, so that each
  is told by -log S nats too high, where S is what they held before. A list tells how many tokens
  were kept at each place; the rule is the one that kept that many at every place.
- *Another logarithm*, of base 10 or 2, or *a factor* that lists tell: log p' = k log p with no
  constant, so that nothing was renormalised; *a mean*, or *a sum*, in place of each token's own.
- *Another place*: other prompts' rows, the row of the token before or behind.
- *Another token*: the likeliest one, the one before or behind, the id beside; or one that is not
  known, where a side's own lists tell its tokens' numbers.

One is named where it leaves at most a hundredth of the squared differences, and no other one does,
or leaves ten times as much. Rounding is none of these: it goes both ways, whatever log p is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from divergence.comparison.judge import limit_of
from divergence.domains.logprobs.pairs import Distribution, PromptPair, values_at
from divergence.facts import Fact, fact
from divergence.words import SIDES

LEAST_TOKENS = 50
_LEAVES, _CLEARLY = 0.01, 0.1
"""Share of the squared differences that a hypothesis may leave; and of what the next one leaves."""
_OTHER = 0.02
"""A ratio nearer to 1 is no other temperature."""
FEW, MOST = 0.05, 0.5
"""Share of all up to which some are few, and the others nearly all; and from which on something is
most of it: no top-p in use, for one, leaves out most of the probability."""
_SCALES = 0.2, 5.0
"""1 / T of temperatures in use."""
_BOUNDED = 4.0
"""Times the median: no renormalised token is farther off, and other weights leave a longer tail."""
_MOST_LISTS, _MOST_PROMPTS, _MOST_PLACES = 256, 1024, 128
"""Lists that are read, evenly over all tokens; prompts and tokens of each that are held against all
others."""
_DIGITS = 1e-9
"""What is left of nothing: numbers of 24 bits, squared."""
_LEAST_HOLDING = 16
"""Tokens that hold what differs, at least: the participation ratio of its squares."""
_LEAST_COMMON = 8
"""Tokens by which two prompts' rows are told apart."""
_BASES = 10, 2
_SAME_FACTOR = 0.005
"""How far off a factor may be, as a share, and still be that of another base."""
_NEAR = 10
"""Times the squares of the numbers themselves, at most, that differences count as."""
_MOST_TOKENS, _ROUNDED = 300_000, 1e-6
"""Of a vocabulary; and what the sum of rounded probabilities may lack of 1."""
_TAIL = 0.02
"""Probability that a list may leave out where all of it is needed."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A closed one, fitted. ``before``: differences of the two sides; ``after``: from what it
    predicts, nan where it predicts nothing. ``numbers``: what it explains, where that may be far
    smaller than the differences."""

    what: Fact
    before: np.ndarray
    after: np.ndarray
    numbers: np.ndarray | None = None

    @property
    def left(self) -> float:
        """The share of squared differences that it leaves; inf where it predicts too few, or few of
        them hold nearly all that differs."""
        finite = np.isfinite(self.after)
        if finite.sum() < max(LEAST_TOKENS, MOST * len(finite)) or not self.before[finite].any():
            return math.inf
        squares = np.square(self.before[finite])
        if squares.sum() ** 2 < _LEAST_HOLDING * np.square(squares).sum():
            return math.inf
        total = float(squares.sum())
        if self.numbers is not None:
            total = min(total, float(np.square(self.numbers[finite]).sum()) * _NEAR)
        return float(np.square(self.after[finite]).sum()) / max(total, _DIGITS) + _DIGITS


@dataclass(frozen=True, slots=True)
class _Tokens:
    """All tokens with a finite number on both sides, in order: (N,) of each."""

    pairs: Sequence[PromptPair]
    prompt: np.ndarray
    """Index into ``pairs``."""
    place: np.ndarray
    rows: np.ndarray
    """(2, N)"""
    values: np.ndarray
    """(2, N)"""
    lists: dict[int, tuple[Distribution, Distribution]] = field(default_factory=dict)
    """Both sides' of some tokens."""

    def at(self, some: np.ndarray) -> _Tokens:
        """Those of a mask (N,), without lists."""
        columns = self.rows[:, some], self.values[:, some]
        return _Tokens(self.pairs, self.prompt[some], self.place[some], *columns)

    def token(self, n: int, step: int = 0) -> int:
        """The id that stands there, or ``step`` places behind; -1 where none does."""
        ids, place = self.pairs[self.prompt[n]].reference.ids, int(self.place[n]) + step
        return ids[place] if 0 <= place < len(ids) else -1


def explained(pairs: Sequence[PromptPair]) -> Hypothesis | None:
    """The hypothesis that explains the differences of the two sides, where exactly one does: of all
    tokens, else of the answers alone, since an engine scores prompts in another way."""
    rows = [(number, *row) for number, pair in enumerate(pairs) for row in pair.rows]
    prompt, place, *both = np.array(rows, np.int64).reshape(-1, 4).T
    logs = [
        (pairs[n].reference.logprobs[row_a], pairs[n].candidate.logprobs[other])
        for n, _, row_a, other in rows
    ]
    values = np.array(logs).reshape(-1, 2).T
    finite = np.isfinite(values[0]) & np.isfinite(values[1])
    if finite.sum() < LEAST_TOKENS or (values[0] == values[1])[finite].all():
        return None
    tokens = _Tokens(pairs, prompt, place, np.stack(both), values).at(finite)
    if (fitted := _fitted(tokens)) is not None:
        return fitted
    own = tokens.place >= np.array([pair.answer_begins for pair in pairs])[tokens.prompt]
    if own.all() or own.sum() < LEAST_TOKENS:
        return None
    if (fitted := _fitted(tokens.at(own))) is None:
        return None
    rest = np.diff(tokens.values[:, ~own], axis=0)[0]
    before, after = (np.append(part, rest) for part in (fitted.before, fitted.after))
    whole = replace(fitted, before=before, after=after, numbers=None)
    return whole if whole.left <= _LEAVES else None


def _fitted(tokens: _Tokens) -> Hypothesis | None:
    """The one that leaves least of these tokens' differences, and clearly less than others."""
    num = len(tokens.prompt)
    for n in sorted({int(n) for n in np.linspace(0, num - 1, min(num, _MOST_LISTS))}):
        pair = tokens.pairs[tokens.prompt[n]]
        p, q = (
            side.distribution(int(tokens.rows[number, n]))
            for number, side in enumerate((pair.reference, pair.candidate))
        )
        if max(len(p.ids), len(q.ids)) > 1:  # else of the chosen token alone
            tokens.lists[n] = p, q
    fitted = [
        item for item in itertools.chain(*(fit(tokens) for fit in _FITS)) if item.left <= _LEAVES
    ]
    fitted = fitted or [item for item in _by_own_lists(tokens) if item.left <= _LEAVES]
    if not fitted:
        return None
    best = fitted[0]
    for item in fitted[1:]:
        best = item if item.left < _CLEARLY * best.left else best
    others = [item.left for item in fitted if item.what.code != best.what.code]
    return best if best.left <= _CLEARLY * min(others, default=math.inf) else None


def _sampling(tokens: _Tokens) -> Iterator[Hypothesis]:
    """A temperature, and what a rule keeps at that temperature: the list of the side that is before
    both tells what the other one says, where it holds nearly all. Else two lists tell the first."""
    ratio, x, y = _ratio_of_lists(tokens)
    a, b = tokens.values
    factor = ratio or 1.0
    what = fact("logprobs.factor", factor=factor, side="candidate")
    scaled = Hypothesis(what, b - a, b - factor * a, b)
    fits = abs(factor - 1) < _OTHER or scaled.left <= _LEAVES  # nothing was normalised anew
    is_told = False  # by whole lists, what a temperature makes of the tokens themselves
    bases = [abs(math.log(math.log(base))) for base in _BASES]
    if all(abs(abs(math.log(factor)) - size) >= _SAME_FACTOR for size in bases):
        yield scaled
    for wide, side in enumerate(SIDES[::-1]):
        listed = {n: lists[wide].log for n, lists in sorted(tokens.lists.items())}
        listed = {n: log[np.isfinite(log)] for n, log in listed.items()}
        raised = tokens.values[wide] - tokens.values[1 - wide]
        sums = {n: float(np.exp(log).sum()) for n, log in listed.items() if len(log) > 1}
        # at equal temperature the list is to hold what was kept, which is all that the other side
        # lists; at another one nearly all
        kept_ids = {
            n: pair[1 - wide].ids[np.isfinite(pair[1 - wide].log)]
            for n, pair in tokens.lists.items()
        }
        holding = [
            n
            for n, total in sums.items()
            if raised[n] < math.log(total) + _TAIL
            and np.isin(kept_ids[n], tokens.lists[n][wide].ids).all()
        ]
        whole = [n for n, total in sums.items() if abs(total - 1) < _TAIL]
        for some in (holding, whole):
            if len(some) < max(LEAST_TOKENS, MOST * len(tokens.lists)):
                continue
            at, logs = np.array(some), [listed[n] for n in some]
            source, target = tokens.values[wide, at], tokens.values[1 - wide, at]
            exponent = 1.0
            if some is whole:
                exponent = ratio or _scale_of(logs, source, target)
                exponent = 1 / ratio if ratio is not None and wide else exponent
                if abs(exponent - 1) < _OTHER:
                    continue
            norms = np.array([_normaliser(log, exponent) for log in logs])
            before = exponent * source - norms
            values: dict[str, Any] = {"num_tokens": len(at), "side": side}
            values["temperature"] = 1 / exponent
            # a temperature alone is told of B, whichever side's lists tell it
            inverse = exponent if wide else 1 / exponent
            of_b = values | {"side": "candidate", "temperature": inverse}
            what = fact("logprobs.temperature", rule=None, value=None, **of_b)
            alone = Hypothesis(what, target - source, target - before)
            if exponent != 1:
                fits, is_told = fits or alone.left <= _LEAVES, True
                yield alone
            code = "logprobs.kept" if exponent == 1 else "logprobs.temperature"
            # flattened, what rounding leaves of a tail is no small part of all
            tails = [_ROUNDED * np.exp((exponent - 1) * log.min()) for log in logs]
            if exponent < 1 and np.median(tails) > _TAIL:
                continue
            likely = [np.exp(exponent * log - norm) for log, norm in zip(logs, norms, strict=True)]
            for rule, value, kept in _rules(likely, before - target):
                what = fact(code, rule=rule, value=value, **values)
                both = Hypothesis(what, target - source, target - before + np.log(kept))
                if both.left < _CLEARLY * alone.left:
                    fits |= both.left <= _LEAVES
                    yield both
    if ratio is not None and not fits and not is_told:
        fit: dict[str, Any] = {
            "temperature": 1 / ratio,
            "num_tokens": len(x),
            "rule": None,
            "value": None,
        }
        what = fact("logprobs.temperature", **fit, side="candidate")
        yield Hypothesis(what, y - x, y - ratio * x)


def _ratio_of_lists(tokens: _Tokens) -> tuple[float | None, np.ndarray, np.ndarray]:
    """1 / T by the tokens that both sides list at one place, each less their mean there; and both
    sides' of these."""
    parts = []
    for p, q in tokens.lists.values():
        _, first, second = np.intersect1d(p.ids, q.ids, return_indices=True)
        values = np.stack([p.log[first], q.log[second]])
        values = values[:, np.isfinite(values).all(0)]
        if values.shape[1] > 1:
            parts.append(values - values.mean(1, keepdims=True))
    x, y = np.concatenate([np.empty((2, 0)), *parts], axis=1)
    if len(x) < LEAST_TOKENS or not x.any():
        return None, x, y
    ratio = float((x * y).sum() / (x * x).sum())
    return (ratio if ratio > 0 else None), x, y


def _normaliser(log: np.ndarray, exponent: float) -> float:
    """log Σ p^exponent. What the list leaves out is taken to be as likely as its last."""
    out, last = max(0.0, 1.0 - float(np.exp(log).sum())), float(log.min())
    num = min(out * math.exp(-last), _MOST_TOKENS) if out > _ROUNDED else 0.0
    rest = num * math.exp(exponent * last)
    return math.log(float(np.exp(exponent * log).sum()) + rest)


def _scale_of(logs: Sequence[np.ndarray], source: np.ndarray, target: np.ndarray) -> float:
    """The 1 / T at which the source is nearest to the target: a coarse look, then a fine one."""
    some = np.unique(np.linspace(0, len(logs) - 1, 64).astype(int))

    def distance(scale: float) -> float:
        norms = [_normaliser(logs[n], scale) for n in some]
        return float(np.abs(target[some] - scale * source[some] + norms).mean())

    scales = np.geomspace(*_SCALES, 17)
    while scales[-1] / scales[0] > 1 + 1e-6:
        nearest = min(max(int(np.argmin([*map(distance, scales)])), 1), len(scales) - 2)
        scales = np.geomspace(scales[nearest - 1], scales[nearest + 1], 6)
    return float(scales.mean())


def _rules(
    likely: Sequence[np.ndarray], raised: np.ndarray
) -> Iterator[tuple[str, float, np.ndarray]]:
    """Each rule with the value that keeps as many tokens as the rise of the chosen one's log p
    tells, and what these hold at each place. ``likely``: probabilities, the largest first."""
    if np.median(raised) > 0 or not (raised < 0).any():
        return
    totals = [np.cumsum(p) for p in likely]
    last = [
        int(np.abs(np.log(total) - own).argmin()) for total, own in zip(totals, raised, strict=True)
    ]
    # of each place what the value lies between: the last one kept is within, the next one is not
    inside, outside = np.empty((2, 2, len(last)))
    for n, (p, total, end) in enumerate(zip(likely, totals, last, strict=True)):
        inside[:, n] = total[end], p[end] / p[0]
        outside[:, n] = total[end - 1] if end else 0, p[end + 1] / p[0] if end + 1 < len(p) else 0
    limits = []
    for within, beyond in zip(inside, outside, strict=True):
        low, high = beyond.max(), within.min()
        if low >= high:  # rounding moved some
            low, high = np.quantile(beyond, 0.95), np.quantile(within, 0.05)
        limits.append(float(low + high) / 2)
    values = {"top-p": limits[0], "min-p": limits[1], "top-k": float(np.median(last)) + 1}
    for rule, value in values.items():
        kept = np.full(len(last), math.nan)
        for n, (p, total) in enumerate(zip(likely, totals, strict=True)):
            if rule == "top-k":
                num = int(value)
            elif rule == "top-p":
                num = int(np.searchsorted(total, value)) + 1
            else:
                num = int((p >= value * p[0]).sum())
            kept[n] = total[num - 1] if num <= len(total) else math.nan
        yield rule, value, kept


def _numbers(tokens: _Tokens) -> Iterator[Hypothesis]:
    """Each number of one side is the other's times a constant, of another base or a mean; or the
    sum of all up to it."""
    answers = [len(pair.reference.ids) - pair.answer_begins for pair in tokens.pairs]
    length = np.array(answers, np.float64)[tokens.prompt]
    for source, side in enumerate(SIDES[::-1]):
        x, y = tokens.values[source], tokens.values[1 - source]
        for base in _BASES:
            # a temperature may lie near, and is another number
            if abs(float(x @ y) / float(x @ x) * math.log(base) - 1) < _SAME_FACTOR:
                what = fact("logprobs.base", base=base, side=side)
                yield Hypothesis(what, y - x, y - x / math.log(base), y)
        yield Hypothesis(fact("logprobs.per_length", side=side), y - x, y - x / length, y)
        sums = np.empty_like(x)
        for prompt in np.unique(tokens.prompt):  # tokens of a prompt stand in order
            sums[tokens.prompt == prompt] = np.cumsum(x[tokens.prompt == prompt])
        yield Hypothesis(fact("logprobs.summed", side=side), y - x, y - sums, y)


def _places(tokens: _Tokens) -> Iterator[Hypothesis]:
    """The numbers of one side stand at another place: beside their own, or at another prompt's."""
    x, y = tokens.values
    numbers = {
        (int(p), int(at)): n
        for n, (p, at) in enumerate(zip(tokens.prompt, tokens.place, strict=True))
    }

    def moved(prompts: np.ndarray, places: np.ndarray) -> np.ndarray:
        """(N,) A's numbers of other tokens, nan where there is none."""
        others = zip(prompts.tolist(), places.tolist(), strict=True)
        rows = np.array([numbers.get(other, -1) for other in others])
        return np.where(rows >= 0, x[rows], math.nan)

    for step in (-1, 1):
        other = moved(tokens.prompt, tokens.place + step)
        yield Hypothesis(fact("logprobs.beside", step=step), y - x, y - other)
    # (P, L) of each side: from the answers' beginnings
    num = len(tokens.pairs)
    begins = np.array([pair.answer_begins for pair in tokens.pairs])
    at = tokens.place - begins[tokens.prompt]
    few = (at >= 0) & (at < _MOST_PLACES)
    if not 1 < num <= _MOST_PROMPTS or not few.any():
        return
    tables = np.full((2, num, _MOST_PLACES), math.nan)
    tables[:, tokens.prompt[few], at[few]] = tokens.values[:, few]
    order = np.arange(num)
    for row in range(num):
        both = np.isfinite(tables[0] - tables[1, row])
        apart = np.where(both, np.abs(tables[0] - tables[1, row]), 0).sum(1)
        apart = np.where(both.sum(1) >= _LEAST_COMMON, apart / np.maximum(both.sum(1), 1), math.inf)
        if apart.min() < apart[row]:
            order[row] = int(apart.argmin())
    others = np.flatnonzero(order != np.arange(num))
    if len(others):
        rows = order[tokens.prompt]
        other = moved(rows, at + begins[rows])
        first, other_first = others[0], order[others[0]]
        is_order = len(set(order.tolist())) == num
        what = fact(
            "logprobs.permuted" if is_order else "logprobs.repeated",
            num_moved=len(others),
            num_prompts=num,
            sample=tokens.pairs[first].sample,
            other=tokens.pairs[other_first].sample,
        )
        yield Hypothesis(what, y - x, y - other)


def _tokens(tokens: _Tokens) -> Iterator[Hypothesis]:
    """One side's number is that of another token, by the other side's list."""
    at = np.array(sorted(tokens.lists), np.int64)
    for wide, side in enumerate(SIDES[::-1]):
        lists = [tokens.lists[int(n)][wide] for n in at]
        source, target = tokens.values[wide, at], tokens.values[1 - wide, at]
        for which in ("likeliest", "before", "behind", "id above", "id below"):
            other = []
            for n, listed in zip(at, lists, strict=True):
                ids = {
                    "likeliest": listed.ids[0] if len(listed.ids) else -1,
                    "before": tokens.token(n, -1),
                    "behind": tokens.token(n, 1),
                    "id above": tokens.token(n) + 1,
                    "id below": tokens.token(n) - 1,
                }
                value = listed.of(int(ids[which]))
                other.append(math.nan if value is None else value)
            what = fact("logprobs.other_token", which=which, num_tokens=len(at), side=side)
            yield Hypothesis(what, target - source, target - np.array(other))


def _by_own_lists(tokens: _Tokens) -> Iterator[Hypothesis]:
    """One side's number is of a token that nobody can tell: its own list gives its token another
    one, which is the other side's."""
    at = np.array(sorted(tokens.lists), np.int64)
    for own, side in enumerate(SIDES):
        listed = [tokens.lists[int(n)][own].of(tokens.token(int(n))) for n in at]
        values = np.array([math.nan if value is None else value for value in listed])
        source, target = tokens.values[1 - own, at], tokens.values[own, at]
        what = fact("logprobs.not_listed", num_tokens=len(at), side=side)
        yield Hypothesis(what, target - source, values - source)


_FITS: tuple[Callable[[_Tokens], Iterator[Hypothesis]], ...] = (
    _sampling,
    _numbers,
    _places,
    _tokens,
)


def is_one_way(delta: np.ndarray) -> bool:
    """Do nearly all tokens lie on one side? The sign of each is a coin, whatever the precision, and
    so many heads would hardly come."""
    num, fewer = len(delta), min(int((delta > 0).sum()), int((delta < 0).sum()))
    return fewer <= FEW * num and num - 2 * fewer > limit_of(1) * math.sqrt(num)


def bounded(pairs: Sequence[PromptPair]) -> Fact | None:
    """The setting that the chosen tokens alone point at, with what bounds it."""
    filled = [pair for pair in pairs if len(pair.delta)]
    return (_by_size(filled) or _renormalised(filled)) if filled else None


def share_of_size(pairs: Sequence[PromptPair]) -> float:
    """Return the share (R²) of the differences that is a function of log p."""
    filled = [pair for pair in pairs if len(pair.delta)]
    delta = np.concatenate([np.empty(0), *(pair.delta for pair in filled)])
    if len(delta) < LEAST_TOKENS:
        return 0.0
    log_p = np.concatenate([values_at(pair, pair.places)[0] for pair in filled])
    if not (delta.std() > 0 and log_p.std() > 0):
        return 0.0
    return float(np.corrcoef(delta, log_p)[0, 1]) ** 2


def _by_size(filled: Sequence[PromptPair]) -> Fact | None:
    """Fit the differences by the chosen tokens alone."""
    share = share_of_size(filled)
    if share < MOST:
        return None
    x, y = np.concatenate([values_at(pair, pair.places) for pair in filled], axis=1)
    slope = float(np.cov(x, y)[0, 1] / x.var(ddof=1))
    if abs(slope - 1) < _OTHER or not _SCALES[0] <= slope <= _SCALES[1]:
        return None
    bound = "most" if slope > 1 else "least"
    return fact("logprobs.goes_with_size", share=share, temperature=1 / slope, bound=bound)


def _renormalised(filled: Sequence[PromptPair]) -> Fact | None:
    delta = np.concatenate([pair.delta for pair in filled])
    size, mean = np.abs(delta), float(delta.mean())
    against, usual = int((delta * mean < 0).sum()), float(np.median(size))
    if not is_one_way(delta) or against > FEW * len(delta):
        return None
    if float(size.max()) > min(_BOUNDED * usual, -math.log(MOST)):
        return None
    return fact(
        "logprobs.renormalised",
        side=SIDES[mean > 0],
        num_higher=len(delta) - against,
        num_tokens=len(delta),
        nats=usual,
        most=float(size.max()),
        kept=math.exp(-usual),
    )
