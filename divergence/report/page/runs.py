"""Settings that differ, both machines, and how much was compared."""

from __future__ import annotations

from collections.abc import Callable

from divergence.comparison.result import Report
from divergence.comparison.results import Background, PreflightLine
from divergence.html.parts import Node, Section, Table, details, el, prose_block, table
from divergence.layout import count, size
from divergence.run.manifest import Environment, Manifest

__all__ = ["coverage_section", "machines_section", "settings_section"]

_MOST_UNMATCHED = 100
_STATUS = {"blocking": "blocks", "differs": "differs", "unknown": "unknown", "same": "same"}


def settings_section(report: Report) -> Section | None:
    """What was checked before any number; what differs comes first and stands open."""
    if not report.preflight:
        return None
    by: dict[str, list[PreflightLine]] = {status: [] for status in _STATUS}
    for line in report.preflight:
        by[line.status].append(line)
    shown = [*by["blocking"], *by["differs"], *by["unknown"]]
    body: list[Node] = []
    if shown:
        body.append(table(_settings("What differs", shown)))
    if by["same"]:
        same = _settings("What is the same", by["same"])
        body.append(details(f"{count(len(by['same']), 'setting')} the same", table(same)))
    told = f"{len(by['differs'])} of {len(report.preflight)} differ"
    told += f"; {len(by['blocking'])} more forbid a comparison" if by["blocking"] else ""
    return Section(id="settings", title="Settings", lead=f"{told}.", body=tuple(body))


def _settings(caption: str, lines: list[PreflightLine]) -> Table:
    with_detail = any(line.detail for line in lines)
    more = ["detail"] if with_detail else []
    return Table(
        caption=caption, num_left=5,
        titles=("setting", "status", "A", "B", *more),
        rows=[
            (line.check, _STATUS[line.status], line.reference, line.candidate,
             *([line.detail or ""] if with_detail else []))
            for line in lines
        ],
        marks=["blocks" if line.status == "blocking" else "" for line in lines],
    )  # fmt: skip


def machines_section(background: Background) -> Section | None:
    """Both machines side by side, what differs marked."""
    sides = background.reference, background.candidate
    if not any(sides):
        return None
    rows: list[tuple[str, ...]] = []
    for title, read in _FACTS:
        reference, candidate = ("not known" if side is None else read(side) for side in sides)
        if reference or candidate:
            rows.append((title, reference or "-", candidate or "-"))
    names = [_versions(side) for side in sides]
    for package in dict.fromkeys([*names[0], *names[1]]):
        rows.append((package, *(known.get(package, "-") for known in names)))
    apart = [row for row in rows if row[1] != row[2]]
    same = [row for row in rows if row[1] == row[2]]
    body: list[Node] = [table(_machines("What differs", apart))] if apart else []
    if same:
        folded = table(_machines("What is the same", same))
        body.append(details(f"{count(len(same), 'line')} the same", folded))
    told = f"{len(apart)} of {len(rows)} lines differ."
    return Section(id="machines", title="Machines", lead=told, body=tuple(body))


def _machines(caption: str, rows: list[tuple[str, ...]]) -> Table:
    titles = ("what", "A", "B")
    return Table(caption=caption, titles=titles, rows=rows, num_left=3)


def _versions(side: Manifest | None) -> dict[str, str]:
    if side is None:
        return {}
    environment = side.environment
    return {**dict(sorted(environment.versions.items())), **environment.torch_build,
            **environment.variables}  # fmt: skip


def _of(read: Callable[[Environment], str | None]) -> Callable[[Manifest], str | None]:
    return lambda manifest: read(manifest.environment)


def _device(environment: Environment) -> str:
    number = f" × {environment.num_devices}" if environment.num_devices > 1 else ""
    return f"{environment.device_type}: {environment.device_name}{number}"


_FACTS: tuple[tuple[str, Callable[[Manifest], str | None]], ...] = (
    ("label", _of(lambda it: it.label)),
    ("device", _of(_device)),
    ("driver", _of(lambda it: it.driver)),
    ("runtime", _of(lambda it: it.runtime)),
    ("CPU", _of(lambda it: it.cpu)),
    ("CPU model", _of(lambda it: it.cpu_model)),
    ("instructions", _of(lambda it: it.cpu_capability)),
    ("threads", _of(lambda it: str(it.num_threads))),
    ("platform", _of(lambda it: it.platform)),
    ("Python", _of(lambda it: it.python)),
    ("processes", lambda it: it.processes),
    ("engine", lambda it: None if it.engine is None else it.engine.name),
    ("attention", lambda it: it.model.attn_implementation),
    ("weights", lambda it: f"{it.model.num_parameters:,} parameters, {it.model.dtype}"),
    ("captured", lambda it: it.created),
    ("recorded", lambda it: f"{it.sizes.num_records:,} records, {size(it.sizes.stored_bytes)}"),
    ("command", lambda it: it.command),
)  # fmt: skip


def coverage_section(report: Report, background: Background) -> Section:
    """How much of what was recorded was compared, and notes."""
    coverage = report.coverage
    lead = (
        f"{coverage.num_compared:,} tensors compared, {coverage.num_skipped:,} skipped, "
        f"{coverage.num_only_reference:,} only in A, {coverage.num_only_candidate:,} only in B."
    )
    body: list[Node] = []
    if coverage.passes:
        body.append(table(Table(
            caption="By pass", num_left=2,
            titles=("pass", "what", "compared", "missing", "skipped", "only in B", "share"),
            rows=[
                (pass_.pass_, pass_.what, f"{pass_.num_compared:,}", f"{pass_.num_missing:,}",
                 f"{pass_.num_skipped:,}", f"{pass_.num_extra:,}", f"{100 * pass_.share:.4g}%")
                for pass_ in coverage.passes
            ],
        )))  # fmt: skip
    if coverage.unmatched:
        shown = coverage.unmatched[:_MOST_UNMATCHED]
        left = len(coverage.unmatched) - len(shown)
        content = Table(
            caption="Not compared", num_left=6,
            titles=("site", "side", "pass", "prompt", "step", "why"),
            rows=[(row.site, row.side, row.pass_, str(row.sample), str(row.step), row.reason)
                  for row in shown],
            note=f"{left:,} more are in the JSON." if left else "",
        )  # fmt: skip
        named = f"{count(len(coverage.unmatched), 'tensor')} not compared"
        body.append(details(named, table(content)))
    notes = [*report.notes, *background.notes]
    if notes:
        body.append(el("ul", *(el("li", prose_block(text)) for text in notes), class_="notes"))
    return Section(id="coverage", title="What was compared", lead=lead, body=tuple(body))
