"""A machine: what it is, what probes and `selftest` found of it, and its determinism switches.

Without ``verbose`` what nearly every machine does is counted and not listed: exact inputs, nearest
rounding, functions within one ulp.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Sequence
from functools import partial

import msgspec

from divergence.comparison.result import (
    LogitsDiff,
    NonfiniteCount,
    Report,
    SiteResult,
    TruthDiff,
)
from divergence.document import Block, Column, Document, Headline, Section, Sentence, Table, named
from divergence.experiments.result import Selftest, StepStatus
from divergence.facts import fact, sentence
from divergence.numerics.sums import Estimate
from divergence.run.manifest import (
    ArithmeticFact,
    Environment,
    Repeatability,
    Settings,
    Switch,
)
from divergence.words import count, grouped, list_names, printable, shortened

# Reports for programs: CSV with full precision.


def csv_columns() -> list[str]:
    """The columns of the CSV, whatever a report holds."""
    names: list[str] = []
    for name in SiteResult.__struct_encode_fields__:
        if name == "prompts":
            continue  # a list of its own
        nested = _NESTED.get(name)
        keys = [] if nested is None else nested.__struct_encode_fields__
        names += [f"{name}_{key}" for key in keys] or [name]
    return names


_NESTED: dict[str, type[msgspec.Struct]] = {
    "logits": LogitsDiff,
    "nonfinite": NonfiniteCount,
    "truth": TruthDiff,
    "estimated": Estimate,
}


def report_csv(report: Report) -> str:
    """One line per compared site; an absent number is an empty cell.

    Shapes are written ``1x12x64`` and indices ``0 3 17``.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, csv_columns(), restval="", lineterminator="\n")
    writer.writeheader()
    for row in report.to_records():
        for key, value in row.items():
            if isinstance(value, list | tuple):
                row[key] = ("x" if key == "shape" else " ").join(str(size) for size in value)
            elif isinstance(value, str):
                row[key] = printable(value)
        writer.writerow(row)
    return file.getvalue()


_NAMED = 8  # operators in a line


_LINES = (
    ("device", "driver", "runtime"),
    ("CPU", "instructions", "threads"),
    ("CPU model",),
    ("platform", "Python"),
)


def machine_facts(environment: Environment) -> list[tuple[str, str]]:
    """What is known of a machine, on a few lines."""
    machine = environment.facts
    facts = []
    for first, *names in _LINES:
        rest = (f", {name} {machine[name]}" for name in names if name in machine)
        facts += [(first, machine[first] + "".join(rest))] if first in machine else []
    for name, group, sign in (
        ("versions", dict(sorted(environment.versions.items())), " "),
        ("torch build", environment.torch_build, " "),
        ("variables", environment.variables, "="),
    ):
        text = ", ".join(f"{key}{sign}{value}" for key, value in group.items())
        facts += [(name, text)] * bool(group)
    return facts


def machine_section(environment: Environment) -> Section:
    facts = [named(*item, indent=2, width=14) for item in machine_facts(environment)]
    return Section(title="machine", detail=environment.label, body=facts)


def machine_document(environment: Environment, *, brief: bool = False) -> Document:
    """Return what `divergence env` shows. ``brief``: the device alone."""
    facts = machine_facts(environment)[: 1 if brief else None]
    top = Headline("machine", environment.label, "bold", [named(*fact) for fact in facts])
    return Document(headline=top)


def switch_sentences(
    switches: Sequence[Switch], *, verbose: bool = False, more: str = "-v"
) -> list[Sentence]:
    """Determinism switches: those that the machine did not take, all of them with ``verbose``.
    ``more``: what lists them."""
    if not switches:
        return []
    asked = [item for item in switches if item.asked != "-"]
    tally = Counter(item.status for item in asked)
    text = ", ".join(
        f"{tally[name]} {name}"
        for name in ("accepted", "set", "refused", "absent")
        if name != "set" or tally[name]
    )
    if not asked:
        text = f"{len(switches)} left as found"
    hint = "" if verbose else f" ({more} lists them)"
    note = {item.name: f"; {item.note}" if item.note else "" for item in switches}
    return [
        Sentence(text + hint, "switches", indent=2, hang=14),
        *(
            Sentence(
                f"{item.name}: asked {item.asked}, found {item.found}{note[item.name]}",
                item.status,
                hang=14,
            )
            for item in switches
            if verbose or item.status == "refused"
        ),
    ]


def fallbacks(settings: Settings) -> list[Sentence]:
    """Operators that the CPU ran in the device's place."""
    if not settings.cpu_fallbacks:
        return []
    operators = list_names(settings.cpu_fallbacks, _NAMED)
    text = f"{operators} ran on the CPU: the device has none"
    return [Sentence(text, "fell back", style="yellow", indent=2, hang=14)]


_OF_ID = 8


def changes(plants: Sequence[str], substitutes: Sequence[str]) -> list[Sentence]:
    """Return what was done to a run on purpose."""
    # ``SITE from ID``; the first letters of an id are enough to find the run by
    by_run = grouped((text.rpartition(" from ") for text in substitutes), lambda parts: parts[2])
    done = {"PLANTED FAULT": list(plants)} if plants else {}
    for run, parts in by_run.items():
        done[f"SUBSTITUTED from run {run[:_OF_ID]}"] = [site for site, *_ in parts]
    return [named("", f"{what}: {', '.join(at)}", "yellow") for what, at in done.items()]


def repeats(repeat: Repeatability) -> list[Sentence]:
    """Say whether a run that was made several times gave the same bits."""
    if repeat.num_runs <= 1:
        return []
    first = f", first at {repeat.first_difference}" if repeat.first_difference else ""
    differ = f"{repeat.num_different:,} of {repeat.num_compared:,} repeated tensors differ"
    text = f"{repeat.num_runs} runs: " + (differ if repeat.num_different else "all bits equal")
    if repeat.begins:
        num, total = sum(repeat.begins.values()), repeat.num_forwards
        begins = fact("preflight.begins", num=num, total=total, places=repeat.places)
        first += f"; {sentence(begins)}"
    return [Sentence(text + first, "repeated", indent=2, hang=14)]


TITLES = {
    "order": "order of additions",
    "accumulator": "partial sums",
    "input bits": "bits kept of float32 inputs",
    "fma": "multiply-adds",
    "rows": "one row against sixteen",
    "batch": "row 0 in batches of 1 to 17",
    "subnormals": "subnormal numbers",
    "rounding": "rounding",
    "ulp": "elementary functions, worst error",
    "lanes": "vector code against scalar code",
    "probe": "not probed",
}
"""Probe → heading, in the order shown."""

_USUAL = (
    "to nearest, ties to even",
    "kept in, kept out",
    "23 bits (float32)",
    "invariant",
    "24 bits (float32), rounded to nearest",
    "the same bits at M=1 and M=16",
    "same bits alone and in a vector",
)
_USUAL_ULP = 1.0


def arithmetic_sections(facts: Sequence[ArithmeticFact], *, verbose: bool = False) -> list[Section]:
    """Show what a machine's arithmetic answered, a line a probe with the first answer that is
    unusual; ``verbose``: all of them. Nothing where nothing was probed."""
    if not facts:
        return []
    unverified = sum(not fact.verified for fact in facts)
    counted = count(len(facts), "fact") + (f", {unverified} unverified" if unverified else "")
    body: list[Block] = []
    groups = grouped(facts, lambda fact: fact.probe)
    for probe in [name for name in dict.fromkeys([*TITLES, *groups]) if name in groups]:
        group = groups[probe]
        rows = [(fact.subject, fact) for fact in group if verbose or not _usual(fact)]
        parts = [f"{len(group) - len(rows)} as usual"] * (len(rows) < len(group))
        if rows and not verbose:
            parts += [
                f"{rows[0][0]}: {_answer(rows[0][1])}",
                *[f"{len(rows) - 1} more"] * (len(rows) > 1),
            ]
        text = shortened("; ".join(parts), 60)
        body.append(Sentence(text, f"{TITLES.get(probe, probe)}:", indent=2, hang=38))
        if rows and verbose:
            columns = ("", Column("", partial(_answer, verbose=True)))
            body.append(Table(columns=columns, rows=rows, indent=4, num_left=2))
    detail = counted + ("" if verbose else "; all of them: inspect -v")
    return [Section(title="arithmetic", detail=detail, body=body)]


def _usual(fact: ArithmeticFact) -> bool:
    if fact.probe == "ulp" and fact.verified:
        return fact.numbers.get("worst", 2.0) <= _USUAL_ULP
    return fact.verified and fact.value in _USUAL


def _answer(fact: ArithmeticFact, *, verbose: bool = False) -> str:
    text = fact.value
    if not fact.verified:
        text += f" [unverified: {fact.evidence}]" if fact.evidence else " [unverified]"
    return f"{text} [{fact.evidence}]" if verbose and fact.verified and fact.evidence else text


_STYLES: dict[StepStatus, str] = {"ok": "green", "failed": "red", "skipped": "yellow"}


def selftest_document(result: Selftest, *, verbose: bool = False) -> Document:
    """Show how many steps did what; the steps, the machine and its switches."""
    tally = Counter(step.status for step in result.steps)
    outcome = ", ".join(f"{tally[name]} {name}" for name in _STYLES if tally[name])
    outcome = outcome or "nothing was run"
    text = f"{outcome}{'' if result.complete else '; interrupted'}"
    steps: list[Block] = []
    done: list[Block] = []
    for step in result.steps:
        name = f"{step.name}  ({step.seconds:.1f} s)"
        lines = done if step.status == "ok" else steps
        lines.append(Sentence(name, step.status, style=_STYLES[step.status], indent=2, hang=11))
        lines.append(Sentence(step.detail, indent=0, hang=11))
    if result.fallbacks:
        steps.append(Sentence(", ".join(result.fallbacks), "on the CPU", style="yellow", indent=2))
    machine = machine_section(result.environment)
    switches = switch_sentences(result.switches, verbose=verbose)
    return Document(
        headline=Headline(result.device, text, "red" if result.failed else "green"),
        known=[named("machine", machine.detail)],
        sections=[
            Section(title="steps", body=steps),
            Section(title="steps that are ok", body=done, verbose=True),
            dataclasses.replace(machine, body=[*machine.body, *switches], verbose=True),
        ],
    )
