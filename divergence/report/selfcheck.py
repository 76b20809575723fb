"""What `divergence selfcheck` prints: one sentence, one line a variation, what looks closer."""

from __future__ import annotations

from pathlib import PurePath

from divergence.experiments.selfcheck.result import SelfcheckLine, SelfcheckResult
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
    rest = f"; {', '.join(one.name for one in untold)} could not be told" if untold else ""
    if result.diverged:
        names = ", ".join(f"{one.name} ({_place(one)})" for one in result.diverged)
        return f"This machine does not agree with itself: {names} diverged{rest}.", "bold red"
    doubts = result.with_status("suspected")
    if doubts:
        names = " and ".join(f"{one.name} ({_place(one)})" for one in doubts)
        return (
            f"This machine may not agree with itself: {names} is beyond a limit, but not surely; "
            f"more prompts tell{rest}.",
            "bold yellow",
        )
    if result.not_repeated:
        names = " and ".join(one.name for one in result.not_repeated)
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
        (one.name, how_changed(one), result_text(one), _STYLES[one.status]) for one in result.lines
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
        lines += [prose(f"  {one.name}", one.summary, width=12) for one in result.lines]
    return lines


def how_changed(one: SelfcheckLine) -> str:
    return one.changed if one.against == "base" else f"{one.changed} (against {one.against})"


def _place(one: SelfcheckLine) -> str:
    return "in no one block" if one.block is None else f"from {one.block} on"


def result_text(one: SelfcheckLine) -> str:
    if one.status == "identical":
        more = one.num_missing if one.name != "hooks" else 0
        return f"bit-identical, {more:,} tensors not compared" if more else "bit-identical"
    if one.status == "not_applicable":
        return f"not applicable: {one.reason}"
    if one.status == "not_run":
        return f"not run: {one.reason}"
    if one.status == "undetermined":
        return f"not told: {one.summary}"
    used = "" if one.limit_usage is None else f"{one.limit_usage:.2g} of its limit"
    if one.limit_usage is not None and one.limit_usage > 1:
        used = f"{times(one.limit_usage)} its limit"
    if one.status in ("diverged", "suspected"):
        side = {"reference": one.against, "candidate": one.name}.get(one.side or "", "")
        wrong = f"{side} is wrong" if side else ""
        sure = one.status == "diverged"
        surely = "DIVERGED" if sure else f"suspected ({one.confidence} confidence)"
        parts = [f"{surely} {_place(one)}", used, wrong, _tokens(one)]
    else:
        parts = [_floor(one), _bits(one), used, _tokens(one)]
    return ", ".join(filter(None, parts))


def _floor(one: SelfcheckLine) -> str:
    return "NOT bit-identical, within floor" if one.same_bits else "within floor"


def _bits(one: SelfcheckLine) -> str:
    if not one.num_blocks:
        return f"{one.num_different:,} of {one.num_compared:,} tensors differ"
    if not one.num_blocks_different:
        return "every block bit-identical on equal inputs"
    text = f"{one.num_blocks_different} of {one.num_blocks} blocks differ in bits"
    return text + (f": {one.first_different}" if one.num_blocks_different == 1 else "")


def _tokens(one: SelfcheckLine) -> str:
    if not one.num_tokens_different:
        return ""
    return f"{one.num_tokens_different} of {count(one.num_tokens, 'token')} chosen otherwise"


def _closer(result: SelfcheckResult) -> list[Line]:
    shown = result.diverged + result.with_status("suspected", "undetermined")
    shown += [one for one in result.not_repeated if one not in shown]
    shown += [one for one in result.with_status("within_floor") if one not in shown]
    if not shown:
        return []
    lines = [
        BLANK,
        heading("look closer", "" if result.kept else "with --keep RUNS, which keeps the runs"),
    ]
    return lines + [line(f"  {command}") for one in shown for command in one.next]
