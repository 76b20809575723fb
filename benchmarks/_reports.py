"""A public report, rebuilt: what is planted, what is right to say, and how an answer is graded.

A case captures a healthy side A and a side B with the fault, on a tiny random model. The tool is
asked three times: with both runs alone, with a truth, and by ``localize``. Each answer is graded
against what the case holds as data:

- **right**: the kind, the place and the side are those of the cause, and the words that tell the
  cause from a like one are said somewhere;
- **abstains**: no place and no side, or a side that is left open, with the reason;
- **vague**: nothing that is said is wrong, but the place or the cause is not told;
- **wrong**: another place, another side, an alarm where nothing is wrong, none where something is.

A case is wrong where any of its answers is. Else it has the best grade of its last two answers.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from benchmarks._machines import planting
from benchmarks._reports_models import PAIRED_VOCABULARY, make
from divergence import capture, compare, localize, truth
from divergence.comparison.result import Report
from divergence.errors import DivergenceError
from divergence.experiments.result import Localization
from divergence.report.localization import localization_document
from divergence.report.text import document_lines

__all__ = [
    "CLASSES",
    "GRADES",
    "Answer",
    "Case",
    "Grade",
    "Runs",
    "grades_of",
    "overall",
    "play",
    "prompts_of",
]

Grade = Literal["right", "abstains", "vague", "wrong"]
GRADES: tuple[Grade, ...] = ("right", "abstains", "vague", "wrong")
CLASSES = {
    "K": "a wrong kernel",
    "C": "wrong code",
    "W": "wrong weights or buffers",
    "S": "wrong settings",
    "T": "other tokens or another template",
    "M": "the measuring program is wrong",
    "R": "rounding only",
}
QUIET = ("identical", "within_floor")
_ALARMS = ("localized", "systematic", "nonfinite", "drift")
_NEAR = 3.0
"""Up to so many times an ideal operator's error an operator is correct."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One report on one model. Regular expressions are searched for, whatever the case."""

    name: str
    report: str
    """``owner/repo#number``, several with commas."""
    letter: str
    """One of CLASSES."""
    cause: str
    """What was wrong, for people."""
    model: str = "llama"
    """One of _reports_models.MODELS."""
    dtype: str = "float32"
    lengths: tuple[int, ...] = (24,)
    """Tokens of each prompt."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """In place of random ones."""
    new_tokens: int = 3
    plant: Callable[[nn.Module], object] | None = None
    """Makes B's loaded model faulty."""
    is_code: bool = False
    """The fault is in code that a run records: no truth can tell whose code is meant."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of A's capture."""
    other: Mapping[str, Any] = field(default_factory=dict)
    """Of B's."""
    runs: Callable[[Case, Path], Runs] | None = None
    """Makes the runs where they are no captures of one model."""
    kinds: tuple[str, ...] = ("localized", "systematic")
    """Verdicts that are right."""
    place: str = ""
    """Of the onset's site, or of the operator that localize names."""
    unit: str = ""
    """Of the onset's prompt, step and token: ``prompt 1, step 0, token 9``."""
    alone: tuple[str, ...] = ()
    """Verdicts that are right too of two runs alone, of what is as small as rounding."""
    side: str | None = "candidate"
    words: tuple[str | tuple[str, str], ...] = ()
    """Each is in what is said, anywhere: a pattern, or what it stands for and the pattern."""

    @property
    def is_quiet(self) -> bool:
        """Nothing is wrong on either side."""
        return set(self.kinds) <= {*QUIET}


@dataclass(frozen=True)
class Runs:
    """``truth``: None where none can be made. ``prepare``: what made B's model faulty."""

    a: Path
    b: Path | None
    truth: Path | None = None
    prepare: Callable[[Any], Any] | None = None
    is_localized: bool = True


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the tool says in one of three ways: ``alone``, ``truth`` or ``localize``."""

    way: str
    kind: str
    verdict: str = ""
    """Of localize: the kind of the verdict that it went on from."""
    place: str = ""
    unit: str = ""
    side: str | None = None
    confidence: str = ""
    headline: str = ""
    text: str = ""
    is_correct_operator: bool = False
    """The operator that is named computes correctly on both sides, from other operands."""


def prompts_of(case: Case) -> list[list[int]]:
    """The case's own prompts, or random ones."""
    if case.prompts:
        return [list(prompt) for prompt in case.prompts]
    draw = random.Random(0)
    return [[draw.randrange(3, PAIRED_VOCABULARY) for _ in range(n)] for n in case.lengths]


def play(case: Case, folder: Path) -> list[Answer]:
    """What the tool says of the runs, which are made in ``folder``."""
    try:
        runs = (case.runs or _captured)(case, folder)
    except DivergenceError as error:
        return [_failed("alone", "refused", error)]
    except Exception as error:
        return [_failed("alone", "crashed", error)]
    return list(_asked(runs, folder))


def _failed(way: str, kind: str, error: Exception) -> Answer:
    text = str(error) if kind == "refused" else f"{type(error).__name__}: {error}"
    if kind == "crashed":
        traceback.print_exception(error)
    return Answer(way=way, kind=kind, headline=text, text=text)


def _captured(case: Case, folder: Path) -> Runs:
    model = make(case.model, folder / "model")
    a, b, right = folder / "a", folder / "b", folder / "truth"
    capture(
        model,
        out=a,
        prompts=prompts_of(case),
        max_new_tokens=case.new_tokens,
        dtype=case.dtype,
        **{"probe": False, "threads": 1, **case.options},
    )
    truth(a, out=right)
    prepare = None
    if case.plant is not None:
        plant = case.plant
        prepare = planting(
            lambda module, *_, strength: plant(module), "", None, 1.0, is_code=case.is_code
        )
    deep = {} if case.dtype == "float32" else {"escalate": True}
    capture(
        like=a,
        out=b,
        prepare=prepare,
        **{"probe": False, "threads": 1, **deep, **case.other},
    )
    return Runs(a, b, right, prepare)


def _asked(runs: Runs, folder: Path) -> Iterator[Answer]:
    def descent() -> Answer:
        done = localize(
            runs.a,
            runs.b,
            truth=runs.truth,
            out=folder / "localized",
            here="both",
            prepare_candidate=runs.prepare,
        )
        return _of_localization(done)

    ways = {"alone": lambda: of_report("alone", compare(runs.a, runs.b))}
    if runs.truth is not None:
        ways["truth"] = lambda: of_report("truth", compare(runs.a, runs.b, truth=runs.truth))
    if runs.is_localized:
        ways["localize"] = descent
    for way, ask in ways.items():
        try:
            yield ask()
        except DivergenceError as error:
            yield _failed(way, "refused", error)
        except Exception as error:
            yield _failed(way, "crashed", error)


def of_report(way: str, report: Report) -> Answer:
    """The verdict, and all that stands around it."""
    verdict, onset = report.verdict, report.verdict.onset
    lines = [verdict.summary, *(fact.text for fact in verdict.evidence)]
    lines += [f"{check.name} {check.state} {check.detail}" for check in verdict.checks]
    lines += [
        f"{line.check} {line.reference} / {line.candidate} {line.detail or ''}"
        for line in report.preflight
        if line.status != "same"
    ]
    lines += [f"not exercised: {part.text}" for part in report.not_exercised]
    lines += report.notes
    place = unit = ""
    if onset is not None:
        token = "" if onset.position is None else f", token {onset.position}"
        place = onset.site
        unit = f"prompt {onset.sample}, step {onset.step}{token}"
    return Answer(
        way=way,
        kind=verdict.kind,
        place=place,
        unit=unit,
        side=verdict.side,
        confidence=verdict.confidence,
        headline=verdict.summary,
        text="\n".join([*lines, place, unit]),
    )


def _of_localization(done: Localization) -> Answer:
    text = [line.text for line in document_lines(localization_document(done))]
    kind = text[0].partition(":")[0].strip().lower()
    deepest = next((level for level in reversed(done.levels) if level.site is not None), None)
    side, place = done.side, "" if deepest is None else deepest.site or ""
    if done.operator is not None:
        place = done.operator.site
    elif deepest is not None:
        side = deepest.side
    alone = done.alone
    return Answer(
        way="localize",
        kind=kind,
        side=side,
        verdict=done.levels[0].verdict if done.levels else "",
        headline=text[0].partition(":")[2].strip(),
        place=place,
        text="\n".join(text),
        is_correct_operator=len(alone) == 2 and all(own.times < _NEAR for own in alone),
    )


# ── grades ──────────────────────────────────────────────────────────────────────────────────────


def grades_of(case: Case, answers: Sequence[Answer]) -> dict[str, tuple[Grade, str]]:
    """Of each way: the grade, and why it is no better."""
    text = "\n".join(answer.text for answer in answers)
    return {answer.way: _graded(case, answer, text) for answer in answers}


def overall(grades: Mapping[str, tuple[Grade, str]]) -> Grade:
    """A case's grade."""
    ranked = [grade for grade, _ in grades.values()]
    return "wrong" if "wrong" in ranked else min(ranked[-2:], key=GRADES.index)


def _graded(case: Case, answer: Answer, everything: str) -> tuple[Grade, str]:
    if answer.kind in ("refused", "crashed"):
        return ("abstains" if answer.kind == "refused" else "wrong"), answer.headline
    grade, why = (_of_localize if answer.way == "localize" else _of_compare)(case, answer)
    if grade == "right":
        words = [(word, word) if isinstance(word, str) else word for word in case.words]
        lacking = [what for what, w in words if not re.search(w, everything, re.IGNORECASE)]
        if lacking:
            return "vague", f"does not say {', '.join(lacking)}"
    return grade, why


def _of_compare(case: Case, answer: Answer) -> tuple[Grade, str]:
    kinds = (*case.kinds, *(case.alone if answer.way == "alone" else ()))
    expected = " or ".join(kinds)
    if answer.kind not in kinds:
        if answer.kind in ("undetermined", "incomparable"):
            return "abstains", answer.headline
        if case.is_quiet or answer.kind in QUIET or kinds == ("incomparable",):
            return "wrong", f"{answer.kind} where {expected} is right"
        if answer.kind == "drift":
            return "vague", "drift names no place"
    if answer.kind in _ALARMS and (case.place or case.unit):
        if not answer.place:
            return "vague", "names no place"
        for pattern, place in ((case.place, answer.place), (case.unit, answer.unit)):
            if not re.search(pattern, place, re.IGNORECASE):
                return "wrong", f"names {place}"
    if answer.kind not in kinds:
        return "vague", f"{answer.kind} where {expected} is right"
    if answer.way == "truth" and answer.kind in _ALARMS and answer.kind != "drift":
        return _of_side(case, answer)
    return "right", ""


def _of_localize(case: Case, answer: Answer) -> tuple[Grade, str]:
    if answer.kind == "contradiction":
        return "abstains", answer.headline
    if answer.kind == "stopped":
        if answer.verdict in case.kinds:
            return "right", ""
        return ("wrong" if answer.verdict in QUIET else "abstains"), answer.headline
    if case.is_quiet:
        return "wrong", f"names {answer.place}"
    if case.place and not re.search(case.place, answer.place, re.IGNORECASE):
        return "wrong", f"names {answer.place}"
    if answer.is_correct_operator and "is made at" in answer.headline:
        return "wrong", f"blames {answer.place}, which is correct on both sides"
    return _of_side(case, answer)


def _of_side(case: Case, answer: Answer) -> tuple[Grade, str]:
    if answer.side == case.side or case.side is None:
        return "right", ""
    if answer.side is None:
        return ("right", "") if case.is_code else ("abstains", "the side is not named")
    return "wrong", f"the {answer.side} is said to be wrong"
