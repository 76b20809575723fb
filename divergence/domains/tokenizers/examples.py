"""Two files of examples, as two programs tokenised them: their ids, and which tokens have labels.

Examples are held side by side in the order of the files. Where ids differ only at one end, that end
is told; labels are held against one another where ids are the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from divergence._version import __version__
from divergence.domains.tokenizers.result import TokenizerSide, TokensCause, TokensReport
from divergence.errors import PromptError, UsageError
from divergence.facts import Fact, fact
from divergence.run.foreign import DumpFolder
from divergence.words import SIDES, Progress, Side, first_apart

_NO_LABEL = -100
_NAMED, _LEAST_COMMON = 8, 4
_MASKS = ("completion_mask", "assistant_masks", "loss_mask", "response_mask")


@dataclass(frozen=True, slots=True)
class _Example:
    """``ids``: without pads; ``pads``: how many stand (left, right) of them. ``labels``: of ids,
    None where the file holds none. ``num_of_pads``: labels that stand on pads."""

    ids: list[int]
    pads: list[int]
    labels: list[int | None] | None
    num_of_pads: int


@dataclass(frozen=True, slots=True)
class Row:
    """A text, as both sides have it. ``causes``: (name, what it is, from where it shows)."""

    ids: Sequence[list[int]]
    causes: list[tuple[str, Fact, str]]
    equal: bool
    text: str = ""


_KINDS = {
    "Chinese, Japanese or Korean": r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]",
    "pictographs": r"[\u2190-\u2bff\U0001f000-\U0001faff]",
    "letters beyond ASCII": r"(?![a-zA-Z])[^\W\d_]",
    "apostrophes in words": r"\w['\u2019]\w",
    "capitals within words": r"[a-z][A-Z]",
    "digits": r"\d",
    "several blanks in a row": r"[^\S\n]{2}|\t",
    "blanks at an end": r"\A\s|\s\Z",
    "line breaks": r"\n",
    "punctuation": r"[^\w\s]",
    "capitals": r"[A-Z]",
}
"""Classes of texts, by what is in them: the narrower ones first."""


def report_on(
    sides: Sequence[TokenizerSide],
    rows: Iterable[Row],
    *,
    chat: bool = False,
    facts: Sequence[Fact] = (),
) -> TokensReport:
    """The report on texts; the most frequent cause first, pads last, with the smallest class that
    holds all of its own, where at least half of that class, and two texts, are its own."""
    by_name: dict[str, tuple[list[int], Counter[str], Fact, str]] = {}
    num_texts, num_equal, num_tokens = 0, 0, [0, 0]
    kinds: Counter[str] = Counter()
    for number, row in enumerate(rows):
        own = [kind for kind, pattern in _KINDS.items() if re.search(pattern, row.text)]
        kinds.update(own)
        num_texts, num_equal = num_texts + 1, num_equal + row.equal
        num_tokens = [num + len(ids) for num, ids in zip(num_tokens, row.ids, strict=True)]
        for name, what, shown in row.causes:
            numbers, of_cause, *_ = by_name.setdefault(name, ([], Counter(), what, shown))
            numbers.append(number)
            of_cause.update(own)
    causes = []
    for name, (numbers, of_cause, what, shown) in by_name.items():
        num = len(numbers)
        reasons = [what]
        holding = [kind for kind in _KINDS if of_cause[kind] == num > 1]
        least = min((kinds[kind] for kind in holding), default=num_texts)
        if least <= min(2 * num, num_texts - 1) and name != "truncation":
            kind = " or ".join(kind for kind in holding if kinds[kind] == least)
            reasons.append(fact("tokenizers.kind", kind=kind, num=num, of=least))
        causes.append(
            TokensCause(name=name, num_texts=num, first=numbers[0], shown=shown, facts=reasons)
        )
    return TokensReport(
        tool_version=__version__,
        reference=sides[0],
        candidate=sides[1],
        chat=chat,
        num_texts=num_texts,
        num_equal=num_equal,
        num_tokens=num_tokens,
        facts=[*facts],
        causes=sorted(causes, key=lambda cause: (cause.name == "padding", -cause.num_texts)),
    )


def compare_examples(reference: Path, candidate: Path, progress: Progress) -> TokensReport:
    """The report on two files. Raises UsageError where they hold other numbers of examples,
    DumpError and PromptError for lines that are none."""
    files = (reference, candidate)
    sides = [_examples(path) for path in files]
    if len(sides[0]) != len(sides[1]):
        raise UsageError(
            f"{reference} holds {len(sides[0]):,} examples, {candidate} {len(sides[1]):,}",
            hint="the same examples in the same order: leave out on both sides what one leaves out",
        )
    longest = [max((len(example.ids) for example in side), default=0) for side in sides]

    def rows() -> Iterator[Row]:
        for number, (a, b) in enumerate(zip(*sides, strict=True)):
            progress("examples", number, len(sides[0]), "")
            causes = _ids(a, b, longest) if a.ids != b.ids else _labels(a, b)
            shown = [
                (name, what, f"… {' '.join(map(str, a.ids[max(0, place - 2) : place + 6]))} …")
                for name, what, place in causes
            ]
            yield Row([a.ids, b.ids], shown, equal=not causes)

    return report_on(
        [
            TokenizerSide(
                source=str(path),
                kind="examples",
                num_tokens=len({token for example in side for token in example.ids}),
            )
            for path, side in zip(files, sides, strict=True)
        ],
        rows(),
    )


def compare_masks(
    ids: list[int], a: list[int] | None, b: list[int] | None, named: Callable[[int], str]
) -> list[tuple[str, Fact, int]]:
    """How two masks of labels of the same tokens differ: (name, what it is, from which token on).
    ``named``: what to call a token."""
    x, y = (
        _Example(ids, [0, 0], None if mask is None else _masked(ids, mask), 0) for mask in (a, b)
    )
    return _labels(x, y, named)


def _masked(ids: list[int], mask: list[int]) -> list[int | None]:
    return [token if on else None for token, on in zip(ids, mask, strict=True)]


def _examples(path: Path) -> list[_Example]:
    folder = DumpFolder(path)
    examples = []
    for item, where in folder.objects(".jsonl", ".json"):
        ids = _whole(item, "input_ids", where)
        if ids is None:
            raise PromptError(
                "the line has no input_ids",
                where=where,
                hint="JSON lines as datasets' to_json writes them: input_ids, labels",
            )
        num = len(ids)
        mask = _whole(item, "attention_mask", where, num) or [1] * num
        begin = next((n for n, on in enumerate(mask) if on), num)
        end = num - next((n for n, on in enumerate(reversed(mask)) if on), num - begin)
        labels: list[int | None] | None = None
        if (values := _whole(item, "labels", where, num)) is not None:
            labels = [None if value == _NO_LABEL else value for value in values]
        else:
            name = next((name for name in _MASKS if name in item), None)
            chosen = None if name is None else _whole(item, name, where, num)
            if chosen is not None:
                labels = _masked(ids, chosen)
        outside = [] if labels is None else [*labels[:begin], *labels[end:]]
        examples.append(
            _Example(
                ids=ids[begin:end],
                pads=[begin, num - end],
                labels=None if labels is None else labels[begin:end],
                num_of_pads=sum(label is not None for label in outside),
            )
        )
    if not examples:
        raise PromptError(
            "it holds no example",
            where=str(path),
            hint="JSON lines in a file that ends in .jsonl or .json, and is not compressed",
        )
    return examples


def _whole(item: Any, name: str, where: str, num: int | None = None) -> list[int] | None:
    value = item.get(name) if isinstance(item, dict) else None
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        raise PromptError(f"{name} is no list of whole numbers", where=where)
    if num is not None and len(value) != num:
        raise PromptError(f"{name} has {len(value)} numbers for {num} tokens", where=where)
    return [int(each) for each in value]


def _ids(a: _Example, b: _Example, longest: list[int]) -> list[tuple[str, Fact, int]]:
    """Why ids differ: (name, what it is, from which token on)."""
    for side, short, long, most in (
        (SIDES[1], a.ids, b.ids, longest[0]),
        (SIDES[0], b.ids, a.ids, longest[1]),
    ):
        num, other = len(long) - len(short), SIDES[side == SIDES[0]]
        for end, cut in (("start", long[num:]), ("end", long[: len(short)])):
            if num <= 0 or cut != short:
                continue
            if len(short) == most and num > 1:  # as long as the longest of its file
                what = fact("tokenizers.cut", side=other, length=most, end=end)
                return [("cut", what, 0 if end == "start" else len(short))]
            more = long[:num] if end == "start" else long[len(short) :]
            ends = long[:2] if end == "start" else long[-2:]
            twice = num == 1 and ends == [more[0]] * 2
            ids = [str(token) for token in more[:_NAMED]]
            what = fact("tokenizers.more", side=side, end=end, num=num, ids=ids, twice=twice)
            return [(end, what, 0 if end == "start" else len(short))]
    if len(a.ids) == len(b.ids) == min(longest):
        for num in range(1, len(a.ids) - _LEAST_COMMON):
            for end, x, y in (("start", a.ids, b.ids), ("end", b.ids, a.ids)):
                if x[: len(x) - num] == y[num:]:
                    return [("cut", fact("tokenizers.moved", num=num, end=end), 0)]
    place = first_apart(a.ids, b.ids)
    values = [str(ids[place]) if place < len(ids) else "-" for ids in (a.ids, b.ids)]
    what = fact("tokenizers.other_token", place=place, reference=values[0], candidate=values[1])
    return [("tokens", what, place)]


def _labels(
    a: _Example, b: _Example, named: Callable[[int], str] = str
) -> list[tuple[str, Fact, int]]:
    """How labels of the same ids differ, and pads around them."""
    causes: list[tuple[str, Fact, int]] = []
    sides: tuple[tuple[Side, _Example, _Example], ...] = ((SIDES[0], a, b), (SIDES[1], b, a))
    if a.pads != b.pads:
        what = fact("tokenizers.padded", reference=a.pads, candidate=b.pads)
        causes.append(("padding", what, 0))
    for side, own, other in sides:
        if own.num_of_pads and own.num_of_pads != other.num_of_pads:
            what = fact("tokenizers.labels_of_pads", side=side, num=own.num_of_pads)
            causes.append(("labels", what, len(own.ids)))
    for side, own, other in sides:
        if own.labels is None and other.labels is not None:
            return [*causes, ("labels", fact("tokenizers.labels_lacking", side=side), 0)]
    if a.labels is None or b.labels is None or a.labels == b.labels:
        return causes
    places = [
        {n for n, label in enumerate(labels) if label is not None}
        for labels in (a.labels, b.labels)
    ]
    for number, (side, own, other) in enumerate(sides):
        assert own.labels is not None
        assert other.labels is not None
        if not places[number]:
            what = fact("tokenizers.no_labels", side=side, num=len(places[1 - number]))
            return [*causes, ("labels", what, 0)]
        if len(own.labels) > 1 and own.labels[:-1] == other.labels[1:]:
            return [*causes, ("labels", fact("tokenizers.labels_moved", side=side), 0)]
    for number, (side, own, _) in enumerate(sides):
        only, there = sorted(places[number] - places[1 - number]), places[1 - number]
        groups = {
            "before": [n for n in only if n < min(there)],
            "within": [n for n in only if min(there) < n < max(there)],
            "behind": [n for n in only if n > max(there)],
        }
        for where, at in groups.items():
            if at:
                ids = [named(own.ids[n]) for n in at[:_NAMED]]
                what = fact(f"tokenizers.labels_{where}", side=side, num=len(at), ids=ids)
                causes.append((f"labels {where}", what, at[0]))
    if places[0] == places[1]:
        pairs = zip(a.labels, b.labels, strict=True)
        place = next(n for n, (x, y) in enumerate(pairs) if x != y)
        x, y = a.labels[place], b.labels[place]
        what = fact("tokenizers.labels_values", place=place, reference=x, candidate=y)
        causes.append(("labels", what, place))
    return causes
