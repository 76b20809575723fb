"""A local task of lm-evaluation-harness: 794 questions about 286 facts, each choice one token.

Sums in words, what comes after and before in a known order, and opposites, each asked in two or
three ways: the ways of asking one fact are a cluster. ``write_task`` writes the documents and the
task's YAML into a folder; the same words give the same files everywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["TASK", "documents", "write_task"]

TASK = "facts"
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen"
).split()
_ORDERS = {
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "month": (
        "January February March April May June July August September October November December"
    ).split(),
    "letter": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "number": _NUMBERS,
}
_OPPOSITES = (
    "hot cold, big small, fast slow, high low, open closed, old new, light dark, left right, "
    "up down, good bad, rich poor, strong weak, happy sad, early late, full empty, hard soft, "
    "near far, thick thin, true false, wet dry, young old, above below, before after, day night, "
    "east west, first last, front back, give take, inside outside, long short, loud quiet, "
    "love hate, more less, north south, on off, over under, push pull, question answer, "
    "start finish, top bottom, war peace, win lose, wide narrow, yes no, buy sell, clean dirty, "
    "deep shallow, easy difficult, enemy friend, female male, heaven hell, laugh cry, "
    "many few, positive negative, private public, rough smooth, safe dangerous, sweet bitter"
)
_SUMS = (
    "{a} plus {b} equals",
    "The sum of {a} and {b} is",
    "Question: what is {a} plus {b}?\nAnswer:",
)
_NEXT = ("The {kind} after {one} is", "{one} comes before the {kind}", "Next {kind} after {one}:")
_LAST = (
    "The {kind} before {one} is",
    "Previous {kind}, before {one}:",
)
_OTHER = ("The opposite of {one} is", "Not {one}, but", "Antonym of {one}:")


def documents() -> Iterator[dict[str, Any]]:
    """Each with its question, choices, the right one's number, and the fact that it asks."""
    draw = random.Random(0)
    for a, first in enumerate(_NUMBERS[:10]):
        for b, second in enumerate(_NUMBERS[:10]):
            wrong = [_NUMBERS[(a + b + off) % 19] for off in (1, 2, 17)]
            for words in _SUMS:
                text = words.format(a=first, b=second)
                yield _document(draw, text, _NUMBERS[a + b], wrong, f"sum {a} {b}")
    for kind, order in _ORDERS.items():
        for ways, step in ((_NEXT, 1), (_LAST, -1)):
            for number, one in enumerate(order):
                right = order[(number + step) % len(order)]
                wrong = [order[(number + off) % len(order)] for off in (-step, 2 * step, 3 * step)]
                for words in ways:
                    text = words.format(kind=kind, one=one)
                    yield _document(draw, text, right, wrong, f"{kind} {step} {one}")
    pairs = [pair.split() for pair in _OPPOSITES.split(", ")]
    for number, (one, other) in enumerate(pairs):
        wrong = [pairs[(number + off) % len(pairs)][1] for off in (5, 11, 17)]
        for words in _OTHER:
            yield _document(draw, words.format(one=one), other, wrong, f"opposite {one}")


def _document(
    draw: random.Random, text: str, right: str, wrong: list[str], fact: str
) -> dict[str, Any]:
    choices = [right, *(one for one in dict.fromkeys(wrong) if one != right)]
    draw.shuffle(choices)
    return {"query": text, "choices": choices, "gold": choices.index(right), "fact": fact}


def write_task(folder: Path, *, limit: int | None = None) -> None:
    """``facts.jsonl`` and ``facts.yaml``; the YAML names the documents as they are found from the
    folder, in which lm-eval must be started. ``limit``: every so many, so that it stays small."""
    folder.mkdir(parents=True, exist_ok=True)
    found = list(documents())
    if limit is not None:
        found = found[:: len(found) // limit][:limit]
    lines = (json.dumps(one) + "\n" for one in found)
    (folder / "facts.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "facts.yaml").write_text(
        f"task: {TASK}\n"
        "dataset_path: json\n"
        "dataset_kwargs: {data_files: {test: facts.jsonl}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        'doc_to_text: "{{query}}"\n'
        "doc_to_target: gold\n"
        'doc_to_choice: "{{choices}}"\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
        "metadata: {version: 1.0}\n",
        encoding="utf-8",
    )
