"""Log-probabilities on a page: the numbers, what trainers watch, and every prompt."""

from __future__ import annotations

from divergence.analyses.logprobs.show import check_rows, number_rows, sequence_rows
from divergence.comparison.result import Report
from divergence.comparison.results import Background
from divergence.html.parts import Section, Table, details, facts, table
from divergence.layout import count

_MOST = 1000
_MARKS = {"bad": "flagged", "raised": "differs"}


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where models were compared."""
    result = report.logprobs
    if result is None:
        return []
    body = [facts([(name, f"{value} {said}".strip()) for name, value, said in number_rows(result)])]
    checks = check_rows(result)
    if checks:
        body.append(table(Table(
            caption="What trainers watch", titles=checks[0], rows=checks[1:],
            marks=[_MARKS.get(row[-1], "") for row in checks[1:]],
        )))  # fmt: skip
    titles, *rows = sequence_rows(result, _MOST)
    left = len(result.sequences) - len(rows)
    prompts = Table(
        caption="Prompts, the ones that differ most first", titles=titles, rows=rows,
        note=f"{left:,} more are in the JSON." if left else "",
    )  # fmt: skip
    if rows:
        body.append(details(f"All {len(result.sequences):,} prompts", table(prompts)))
    lead = (
        f"{count(result.num_sequences, 'prompt')}; {result.num_equal:,} of {result.num_tokens:,} "
        "tokens of the answers are equal."
    )
    return [Section(id="logprobs", title="Log-probabilities", lead=lead, body=tuple(body))]
