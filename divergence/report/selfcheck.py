"""What `divergence selfcheck` prints: one sentence, one line a variation, what looks closer."""

from __future__ import annotations

from pathlib import PurePath

from divergence.experiments.result import SelfcheckLine, SelfcheckResult
from divergence.layout import BLANK, Line, count, cut, heading, line, prose, times

__all__ = ["how_changed", "result_text", "selfcheck_answer", "selfcheck_lines"]

_STYLES = {
    "identical": "green", "within_floor": "green", "suspected": "yellow", "diverged": "bold red",
    "undetermined": "yellow", "not_applicable": "dim", "not_run": "yellow",
}  # fmt: skip
_WIDEST = 50


def selfcheck_answer(result: SelfcheckResult) -> list[Line]:
    """One sentence: does this machine agree with itself?"""
    text, style = _answer(result)
    return [prose("", text, style=style, width=0)]


def _answer(result: SelfcheckResult) -> tuple[str, str]:
    untold = [*result.with_status("undetermined"), *result.with_status("not_run")]
    rest = f"; {', '.join(way.name for way in untold)} could not be told" if untold else ""
    if result.diverged:
        names = ", ".join(f"{way.name} ({_place(way)})" for way in result.diverged)
        return f"This machine does not agree with itself: {names} diverged{rest}.", "bold red"
    doubts = result.with_status("suspected")
    if doubts:
        names = " and ".join(f"{doubt.name} ({_place(doubt)})" for doubt in doubts)
        return (
            f"This machine may not agree with itself: {names} is beyond a limit, but not surely; "
            f"more prompts tell{rest}.",
            "bold yellow",
        )
    if result.not_repeated:
        names = " and ".join(way.name for way in result.not_repeated)
        return (
            f"This machine agrees with itself to rounding, but not in its bits: {names} must give "
            f"equal bits and does not{rest}.",
            "bold yellow",
        )
    if not result.compared:
        return f"Nothing was compared{rest}.", "bold yellow"
    same, close = (len(result.with_status(name)) for name in ("identical", "within_floor"))
    told = " and ".join(
        [f"{same} bit-identical"] * bool(same) + [f"{close} within the floor"] * bool(close)
    )
    style = "bold yellow" if untold else "bold green"
    of = count(same + close, "way")
    return f"This machine agrees with itself in {of} of running: {told}{rest}.", style


def selfcheck_lines(result: SelfcheckResult, *, verbose: bool = False) -> list[Line]:
    """The answer, what ran, the table, and the commands."""
    prompts = count(result.num_prompts, "prompt")
    ran = (
        f"{PurePath(result.model).name}, {result.dtype}, {result.device} "
        f"({count(result.num_threads, 'thread')}), "
        f"{result.attention or 'no'} attention; {prompts} of {result.num_prompt_tokens} tokens in "
        f"all, {count(result.max_new_tokens, 'new token')} each"
    )
    lines = [*selfcheck_answer(result), BLANK, prose("base run", ran, width=10), BLANK]
    rows = [
        (way.name, how_changed(way), result_text(way), _STYLES[way.status]) for way in result.lines
    ]
    first, second = (
        max([len(head), *(min(len(row[n]), _WIDEST) for row in rows)])
        for n, head in enumerate(("line", "what is changed"))
    )
    lines.append(heading(f"{'line'.ljust(first + 2)}{'what is changed'.ljust(second + 2)}result"))
    for name, changed, told, style in rows:
        shown = f"{name.ljust(first + 2)}{cut(changed, _WIDEST).ljust(second + 2)}"
        lines.append(line(shown, (told, style)))
    lines += _closer(result)
    if verbose:
        lines += [BLANK, heading("verdicts")]
        lines += [prose(f"  {way.name}", way.summary, width=12) for way in result.lines]
    return lines


def how_changed(way: SelfcheckLine) -> str:
    return way.changed if way.against == "base" else f"{way.changed} (against {way.against})"


def _place(way: SelfcheckLine) -> str:
    return "in no one block" if way.block is None else f"from {way.block} on"


def result_text(way: SelfcheckLine) -> str:
    if way.status == "identical":
        more = way.num_missing if way.name != "hooks" else 0
        return f"bit-identical, {more:,} tensors not compared" if more else "bit-identical"
    if way.status == "not_applicable":
        return f"not applicable: {way.reason}"
    if way.status == "not_run":
        return f"not run: {way.reason}"
    if way.status == "undetermined":
        return f"not told: {way.summary}"
    used = "" if way.limit_usage is None else f"{way.limit_usage:.2g} of its limit"
    if way.limit_usage is not None and way.limit_usage > 1:
        used = f"{times(way.limit_usage)} its limit"
    if way.status in ("diverged", "suspected"):
        side = {"reference": way.against, "candidate": way.name}.get(way.side or "", "")
        wrong = f"{side} is wrong" if side else ""
        sure = way.status == "diverged"
        surely = "DIVERGED" if sure else f"suspected ({way.confidence} confidence)"
        parts = [f"{surely} {_place(way)}", used, wrong, _tokens(way)]
    else:
        parts = [_floor(way), _bits(way), used, _tokens(way)]
    return ", ".join(filter(None, parts))


def _floor(way: SelfcheckLine) -> str:
    return "NOT bit-identical, within floor" if way.same_bits else "within floor"


def _bits(way: SelfcheckLine) -> str:
    if not way.num_blocks:
        return f"{way.num_different:,} of {way.num_compared:,} tensors differ"
    if not way.num_blocks_different:
        return "every block bit-identical on equal inputs"
    text = f"{way.num_blocks_different} of {way.num_blocks} blocks differ in bits"
    return text + (f": {way.first_different}" if way.num_blocks_different == 1 else "")


def _tokens(way: SelfcheckLine) -> str:
    if not way.num_tokens_different:
        return ""
    return f"{way.num_tokens_different} of {count(way.num_tokens, 'token')} chosen otherwise"


def _closer(result: SelfcheckResult) -> list[Line]:
    shown = result.diverged + result.with_status("suspected", "undetermined")
    shown += [way for way in result.not_repeated if way not in shown]
    shown += [way for way in result.with_status("within_floor") if way not in shown]
    if not shown:
        return []
    lines = [
        BLANK,
        heading("look closer", "" if result.kept else "with --keep RUNS, which keeps the runs"),
    ]
    return lines + [line(f"  {command}") for way in shown for command in way.next]
