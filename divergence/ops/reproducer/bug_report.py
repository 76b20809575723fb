"""report.md: a bug report that is ready to be sent: what was run, where, and how far it is off.

It is to be pasted into a tracker, and what a run says of itself may come from anyone. So each of
its words stands in a code span, where no markup, link, picture or mention begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from divergence.comparison.arithmetic import is_about
from divergence.ops.reproducer.differences import Difference
from divergence.ops.reproducer.script import operand_names
from divergence.run.schema.manifest import Environment, Manifest
from divergence.run.schema.record import Call
from divergence.run.schema.scalars import scalar_words
from divergence.words import printable

__all__ = ["RunSide", "code_span", "report_text", "title_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSide:
    """One machine's results by port: how far from the truth, and from the first side's."""

    label: str
    manifest: Manifest
    from_truth: Mapping[str, Difference | None]
    from_first: Mapping[str, Difference | None]


Rows = Sequence[tuple[str, Sequence[str | None]]]
_NEAR = 1.5  # of the error of storing the truth once


def title_of(
    call: Call,
    sides: Sequence[RunSide],
    stores: Mapping[str, float | None] | None = None,
    *,
    shown: Callable[[str], str] = str,
    called: str = "",
) -> str:
    """One line: the operator, its dtypes and shapes, and what is said of it. ``stores``: by port,
    the error of storing the truth alone; ``shown``: how words of a run are written; ``called``:
    with which other arguments than on the other side."""
    what = f"{shown(call.operator)} ({shown(_signature(call))})"
    if called:
        return f"{what}: called with {shown(called)}"
    if len(sides) < 2:
        difference = sides[0].from_truth.get("out")
        store = (stores or {}).get("out")
        if difference is not None and store is not None and difference.rel_l2 <= _NEAR * store:
            return f"{what}: result is as near to float64 as its dtype allows"
        return f"{what}: result and float64 truth" + (
            "" if difference is None else f" differ by rel L2 {difference.rel_l2:.3g}"
        )
    first, other = (shown(side.label) for side in sides[:2])
    apart = sides[1].from_first.get("out")
    if apart is None:
        return f"{what}: {other} gives another shape than {first}"
    if apart.num_different == 0:
        return f"{what}: {other} and {first} give the same bits"
    ulp = "" if apart.max_ulp is None else f", {apart.max_ulp:,} ulp"
    return f"{what}: {other} differs from {first} by rel L2 {apart.rel_l2:.3g}{ulp}"


def report_text(
    call: Call,
    sides: Sequence[RunSide],
    stores: Mapping[str, float | None],
    *,
    site: str,
    where: str,
    truth: str | None,
    called: str = "",
) -> str:
    """The report. ``stores``: by port the error of storing the truth alone. ``truth``: what
    computed it, as markdown, or None where there is none. ``called``: as in ``title_of``."""
    title = title_of(call, sides, stores, shown=code_span, called=called)
    lines = [f"# {title}", "", *_summary(sides, truth), ""]
    called = "" if call.source is None else f", called from {code_span(call.source)}"
    lines += [
        "## Operator",
        "",
        f"{code_span(call.operator)}, recorded at {code_span(site)}, {where}{called}.",
        "",
    ]
    lines += ["| input | dtype | shape | strides | address mod 64 |", "|---|---|---|---|---|"]
    for name, operand in zip(operand_names(call), call.operands, strict=True):
        strides = "contiguous" if operand.stride is None else _tuple(operand.stride)
        lines.append(
            f"| {code_span(name)} | {code_span(operand.dtype)} | {_tuple(operand.shape)} | "
            f"{strides} | {operand.misalignment_bytes} |"
        )
    scalars = {n: v for n, v in call.arguments.items() if not _has_tensor(v)}
    if scalars:
        text = ", ".join(
            f"{code_span(name)} = {code_span(scalar_words(value))}"
            for name, value in scalars.items()
        )
        lines += ["", f"Other arguments: {text}."]
    lines += ["", "## Measured", "", *_table(sides, stores)]
    lines += ["", "## Environment", "", *_environments(sides)]
    facts = _facts(call, sides)
    if facts:
        lines += ["", "## Arithmetic of this operation, as probed", "", *facts]
    lines += ["", "## How to run", "", "```", "pip install torch safetensors",
              "python repro.py         # or: python repro.py cuda", "```", ""]  # fmt: skip
    lines.append(
        "`inputs.safetensors` holds the inputs bit by bit, `expected.safetensors` what "
        f"{code_span(sides[0].label)} gave"
        + (", `truth.safetensors` the same operator in float64." if truth is not None else ".")
    )
    return "\n".join(lines) + "\n"


def _summary(sides: Sequence[RunSide], truth: str | None) -> list[str]:
    if truth is None:
        return ["There is no float64 result to hold it against: the operator has none here."]
    lines = []
    for side in sides:
        difference = side.from_truth.get("out")
        if difference is not None:
            lines.append(
                f"{code_span(side.label)} is off from float64 by rel L2 {difference.rel_l2:.3g} "
                f"(max abs {difference.max_abs:.3g}"
                + ("" if difference.max_ulp is None else f", max {difference.max_ulp:,} ulp")
                + ")."
            )
    return [" ".join(lines), "", f"The float64 truth was {truth}."]


def _table(sides: Sequence[RunSide], stores: Mapping[str, float | None]) -> list[str]:
    lines = [
        "| result | side | held against | rel L2 | max abs | max ulp | elements that differ |",
        "|---|---|---|---|---|---|---|",
    ]
    for port in sides[0].from_truth:
        for number, side in enumerate(sides):
            rows = [("float64", side.from_truth.get(port))]
            if number:
                rows.append((code_span(sides[0].label), side.from_first.get(port)))
            for against, difference in rows:
                if difference is not None:
                    ulp = "-" if difference.max_ulp is None else f"{difference.max_ulp:,}"
                    lines.append(
                        f"| {code_span(port)} | {code_span(side.label)} | {against} | "
                        f"{difference.rel_l2:.4g} | {difference.max_abs:.4g} | {ulp} | "
                        f"{difference.num_different:,} of {difference.numel:,} |"
                    )
        if stores.get(port) is not None:
            lines.append(
                f"| {code_span(port)} | float64, rounded once to the result's dtype | float64 | "
                f"{stores[port]:.4g} | | | |"
            )
    return lines


def _side_by_side(corner: str, sides: Sequence[RunSide], rows: Rows) -> list[str]:
    """A table with a column for each side."""
    return [
        f"|{corner}| " + " | ".join(code_span(side.label) for side in sides) + " |",
        "|---|" + "---|" * len(sides),
        *(f"| {name} | " + " | ".join(value or "-" for value in row) + " |" for name, row in rows),
    ]


def _environments(sides: Sequence[RunSide]) -> list[str]:
    envs = [_environment(side.manifest.environment, side.manifest) for side in sides]
    names = dict.fromkeys(name for environment in envs for name in environment)
    return _side_by_side(" ", sides, [(name, [env.get(name) for env in envs]) for name in names])


def _environment(environment: Environment, manifest: Manifest) -> dict[str, str]:
    rows = {
        "device": f"{environment.device_type}: {environment.device_name}",
        "driver": environment.driver or "-",
        "runtime": environment.runtime or "-",
        "CPU": f"{environment.cpu} ({environment.cpu_capability})",
        "threads": str(environment.num_threads),
        "platform": f"{environment.platform}, Python {environment.python}",
        **{name: environment.versions[name] for name in sorted(environment.versions)},
        **{name: environment.variables[name] for name in sorted(environment.variables)},
        "deterministic": "yes" if manifest.settings.deterministic else "no",
    }
    return {code_span(name): code_span(value) for name, value in rows.items()}


def _facts(call: Call, sides: Sequence[RunSide]) -> list[str]:
    """What the probes of each machine proved of this operation in these dtypes; of two machines
    first what differs between them."""
    dtypes = {operand.dtype for operand in call.operands}
    facts: dict[str, list[str | None]] = {}
    for number, side in enumerate(sides):
        for fact in side.manifest.arithmetic:
            if fact.verified and is_about(fact, call.operator, dtypes):
                row = facts.setdefault(code_span(fact.name), [None] * len(sides))
                row[number] = code_span(fact.value)
    if not facts:
        return []
    rows = sorted(facts.items(), key=lambda item: len(set(item[1])) == 1)
    return _side_by_side(" probe ", sides, rows)


def _signature(call: Call) -> str:
    """``bfloat16 14x64, 64x64``."""
    shapes = [
        f"{operand.dtype} {'x'.join(map(str, operand.shape)) or 'scalar'}"
        for operand in call.operands
    ]
    return ", ".join(shapes[:3]) + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")


def _tuple(values: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, values)) + ")"


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, dict) and "tensor" in value


def code_span(text: str) -> str:
    """A run's words in a report: one line that ends no table cell and no span."""
    plain = printable(text).replace("`", " ").replace("|", " ").strip()
    return f"`{plain or '-'}`"
