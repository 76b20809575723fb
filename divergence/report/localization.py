"""Shows what localize prints, the operator first, then its proof; and what repro prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from msgspec.structs import replace

from divergence.analyses.operators.sections import sections as operator_sections
from divergence.document import Document, Headline, Section, Sentence, named
from divergence.experiments.result import Level, Localization
from divergence.facts import sentence, sentence_behind
from divergence.layout import Line
from divergence.report.text import document_lines
from divergence.run.command import quoted_words
from divergence.words import HEADLINES, letter, limit_share, list_names, times


def localization_document(result: Localization, *, every: bool = False) -> Document:
    """The operator, or why there is none, the descent, its proof, and what to run next. ``every``:
    with what was found on each level."""
    truth = "A's own" if result.truth == result.reference else result.truth
    runs = [
        ("A", result.reference),
        ("B", result.candidate),
        ("truth", truth),
        ("runs in", result.out if result.repro is None else None),  # it lies there, too
    ]
    sided = result.side is not None
    rows = [(level.level, _level(level, named=sided, brief=not every)) for level in result.levels]
    descent = Section(
        id="descent",
        title="descent",
        detail="from the block to the operator, and its proof",
        body=[named(*row, indent=2, width=14) for row in (*rows, *_proof(result, brief=not every))],
    )
    sections = [descent]
    if result.report is not None:
        reasons = [item for level in result.levels for item in level.because]
        shown = [item for item in result.report.verdict.evidence if item not in reasons]
        why = Section(title="why", body=[Sentence(item.text, "-", indent=2) for item in shown])
        inner = [why, *operator_sections(result.report, every=every)]
        sections += [dataclasses.replace(section, verbose=True) for section in inner]
    there = any(replace(item, note=None) == result.continuation for item in result.elsewhere)
    again = [] if there or not result.commands else [f"{result.again}   # goes on from there"]
    return Document(
        headline=headline_of(result),
        known=[named(name, run) for name, run in runs if run],
        sections=sections,
        next=[*result.commands, *again],
    )


def localization_lines(result: Localization) -> list[Line]:
    """The document for a terminal: programs that use the library print it."""
    return document_lines(localization_document(result))


def page_document(result: Localization) -> Document:
    """The whole answer, where the last comparison's report stands below it or is left out."""
    whole = localization_document(result, every=True)
    return dataclasses.replace(whole, sections=whole.sections[:1])


def headline_of(result: Localization) -> Headline:
    """The operator, or why there is none."""
    operator = result.operator
    if operator is None:
        deepest = next((v for v in reversed(result.levels) if v.site is not None), None)
        stopped = deepest is None or result.commands or result.refused
        word = "STOPPED" if stopped else "LOCALIZED"
        by = f", by {letter(result.side)}" if result.side else ""
        where = "" if deepest is None else f"at {deepest.level} {deepest.site}{by}: "
        where = "" if result.refused else where
        style = "bold yellow" if word == "STOPPED" else "bold red"
        there = []
        if result.refused and result.commands:
            command = Sentence(result.commands[0], indent=0, hang=2, whole=True)
            there = [named("", "run there:"), command]
        return Headline(word, f"{where}{result.stopped}", style, there)
    assert result.report is not None
    verdict = result.report.verdict
    word, text, style = "LOCALIZED", verdict.summary, "bold red"
    facts = []
    if result.contradiction:
        text = f"the levels blame different sides: {result.contradiction}; no side is named"
        word, style = "CONTRADICTION", "bold yellow"
        facts.append(named("confidence", verdict.confidence))
    if result.doubt:
        facts.append(named("side", f"not named: {result.doubt}"))
    elif result.code:
        apart = f"the sides differ from {result.code} on, in float64 as well"
        facts.append(named("side", f"{letter(result.side)}, by A's code; {apart}"))
    if operator.called_at:
        facts.append(named("called at", operator.called_at))
    shape = "x".join(map(str, operator.shape)) or "scalar"
    dtypes = dict.fromkeys((operator.reference_dtype, operator.candidate_dtype))
    names = dict.fromkeys((operator.operator, operator.candidate_operator))
    facts.append(named("operator", f"{' / '.join(names)} -> {shape} {' / '.join(dtypes)}"))
    behind = [
        item["what"] for item in verdict.evidence if item.code == "operators.arithmetic_behind"
    ]
    facts += [
        named("because", sentence(item["what"])) for item in behind if item["probe"] == "input bits"
    ]
    check = result.causal
    if check is not None:
        rest = "everything after it is" if check.num_after else "the block's output is"
        answer = f"yes: with the other side's result in its place, {rest} fine"
        if not check.holds:
            verb = "is" if len(check.still) == 1 else "are"
            off = f"{list_names(check.still, 1)} {verb} still off: another fault, or this one again"
            answer = f"no: with the other side's result there, {off}"
        facts.append(named("proven", answer))
    elif result.side is not None:
        unmet = (str(repetition) for repetition in result.repetitions if not repetition.met)
        untried = next(unmet, f"that takes {letter(result.side)}'s machine")
        facts.append(named("proven", f"not tried: {untried}"))
    return Headline(word, text, style, facts)


def _level(level: Level, *, named: bool, brief: bool) -> str:
    if level.site is None:
        return f"nothing stands out ({HEADLINES.get(level.verdict, level.verdict)})"
    by = ""
    if level.side in ("reference", "candidate"):
        by = f", {'by' if named else 'off against the truth:'} {letter(level.side)}"
    if brief:
        return f"{level.site}{by}"
    # the site stands before it already
    module = level.site.partition(":")[0]
    why = "".join(sentence_behind(item, module) for item in level.because) or level.why
    return f"{level.site}{by}" + (f": {why}" if why else "")


def _proof(result: Localization, *, brief: bool) -> list[tuple[str, str]]:
    """Show what was captured again, each side's operator, the reproducer."""
    # which runs that were captured again have the bits of the run they stand for
    equal = [repetition.run for repetition in result.repetitions if repetition.how == "bits"]
    rows = [("repeated", f"bit for bit: {', '.join(equal)}")] if equal and not brief else []
    rows += [
        ("repeated", str(repetition) + (f" ({repetition.reason})" if repetition.reason else ""))
        for repetition in result.repetitions
        if repetition.how != "bits"
    ]
    causal = result.causal
    if causal is not None and causal.num_after and not brief:
        after, before = map(limit_share, (causal.largest_limit_usage, causal.before))
        text = f"{after} of a limit after it with the other side's result, {before} without"
        rows.append(("cause", text))
    if result.alone:
        parts = [f"{letter(own.side)} has {times(own.times)}" for own in result.alone]
        text = f"on its own inputs {' and '.join(parts)} the error of an ideal one, against float64"
        if result.is_right_alone and not brief:
            name = result.operator.operator if result.operator is not None else "the operator"
            text += f"; {name} is correct on both sides: look at what feeds it"
        rows.append(("alone", text))
    if result.repro is not None:
        rows.append(("reproducer", f"{result.repro} (report.md is a bug report)"))
    if result.repro_other is not None:
        rows.append(("and", f"{result.repro_other} (the other side's call)"))
    return rows


_TOLD = {
    "repro.py": "runs it: torch and safetensors alone",
    "inputs.safetensors": "its inputs, bit by bit",
    "expected.safetensors": "what the run recorded",
    "truth.safetensors": "the same in float64",
    "report.md": "the text of a bug report",
}


def reproducer_document(path: str, title: str, files: Sequence[str]) -> Document:
    """The finding, the folder's files, and the command that runs it."""
    script = f"{path}/repro.py" if not path.startswith("-") else f"./{path}/repro.py"
    rows = [Sentence(_TOLD[name], name, indent=2, hang=24) for name in files]
    return Document(
        headline=Headline("", f"written {path}", "green", [named("finding", title), *rows]),
        next=[quoted_words(["python", script])],
    )
