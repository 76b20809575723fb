"""What `sensitivity` says: how small a fault of each kind would be seen, then block by block."""

from __future__ import annotations

from divergence.experiments.result import FaultSize, Sensitivity
from divergence.layout import BLANK, Line, columns, count, heading, line, prose, share
from divergence.words import HEADLINES

__all__ = ["answer_lines", "cell", "sensitivity_lines", "setup_lines"]


def answer_lines(result: Sensitivity) -> list[Line]:
    """One sentence a fault."""
    return [_answer(result, fault) for fault in result.phrases]


def sensitivity_lines(result: Sensitivity, *, verbose: bool = False) -> list[Line]:
    """The sentences, what they rest on, the tables, and what would see smaller faults."""
    lines = [*answer_lines(result), BLANK, *setup_lines(result), BLANK]
    lines += _table(result, escalated=False)
    if result.escalated:
        lines += _table(result, escalated=True)
    lines += [heading("a size is a share of")]
    lines += columns([(fault, unit) for fault, unit in result.units.items()])
    lines.append(BLANK)
    if verbose:
        lines += _reason_lines(result)
    lines += _confirmation_lines(result)
    lines += [prose("note", note, width=6) for note in result.notes]
    lines += [BLANK] * bool(result.notes)
    if result.next:
        lines += [heading("to see smaller faults"), *(line(f"  {item}") for item in result.next)]
    return lines


def _answer(result: Sensitivity, fault: str) -> Line:
    sizes = [size for size in result.of(fault) if size.reason is None]
    told = result.phrases[fault]
    where = f"in {result.dtype} "
    if not sizes:
        return prose("", f"{where}{fault}: {result.of(fault)[0].reason}", width=0)
    unseen = [size for size in sizes if size.size is None]
    if unseen:
        most = told.format(size=f"up to {share(unseen[0].tried)}")
        text = f"{where}you would not see {most} in {unseen[0].block}"
        text += f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        text += f" (of that size it is {unseen[0].by})"
    else:
        seen = [(size.size, size.block) for size in sizes if size.size is not None]
        low, best = min(seen, key=lambda pair: pair[0])
        high, worst = max(seen, key=lambda pair: pair[0])
        text = f"{where}you would see {told.format(size=share(high))} in {_blocks(result)}"
        if low < high:
            text += f" (worst: {worst}; best {share(low)} at {best})"
    if result.escalated:
        deep = [size.escalated_size for size in sizes if size.escalated_size is not None]
        text += "; with the escalated pass "
        text += "not in all of them" if len(deep) < len(sizes) else share(max(deep))
    return Line(prose("", text, width=0).spans[1:], hang=2)


def _blocks(result: Sensitivity) -> str:
    if len(result.blocks) == result.num_blocks:
        return "any block" if result.num_blocks > 1 else f"{result.blocks[0]}"
    if len(result.blocks) == 1:
        return result.blocks[0]
    return f"any of the {len(result.blocks)} blocks tried"


def setup_lines(result: Sensitivity) -> list[Line]:
    a, b = result.reference, result.candidate
    tokens, blocks = count(result.num_prompt_tokens, "prompt token"), result.num_blocks
    lines = [
        prose("reference", f"{a.path} ({a.label}): {a.model}, {a.dtype} on {a.device}"),
        prose(
            "candidate",
            f"{'made here' if result.made_here else b.path} ({b.label}): {b.dtype} on {b.device}",
        ),
        prose("truth", result.truth or "none: the two sides are held against a rounding model"),
        prose("unplanted", f"{HEADLINES[result.verdict.kind]}: {result.verdict.summary}"),
        prose(
            "trials",
            f"{result.num_trials:,} on recorded tensors of {tokens}, "
            f"in {len(result.blocks)} of {count(blocks, 'block')}",
        ),
    ]
    if result.num_floor_runs:
        runs = count(result.num_floor_runs, "trusted run")
        lines.insert(3, prose("floor", f"widened by {runs}"))
    return lines


def _table(result: Sensitivity, *, escalated: bool) -> list[Line]:
    detail = f"anchored pass, {result.dtype}"
    if escalated:
        detail = "with the escalated pass, float32: faults of formula or data"
    rows = [("block", *result.phrases)]
    for block in result.blocks:
        sizes = {size.fault: size for size in result.sizes if size.block == block}
        rows.append((block, *(cell(sizes[fault], escalated) for fault in result.phrases)))
    return [heading("smallest size seen", detail), *columns(rows, widest=44), BLANK]


def cell(fault_size: FaultSize, escalated: bool) -> str:
    if fault_size.reason is not None:
        return "-"
    size = fault_size.escalated_size if escalated else fault_size.size
    return f"not to {share(fault_size.tried)}" if size is None else share(size)


def _reason_lines(result: Sensitivity) -> list[Line]:
    lines = [heading("seen by")]
    for entry in result.sizes:
        for size, why in ((entry.size, entry.by), (entry.escalated_size, entry.escalated_by)):
            if why is not None:
                told = share(entry.tried if size is None else size)
                lines.append(prose(f"  {entry.fault} {told}: ", why, width=4))
        if entry.reason is not None:
            lines.append(prose(f"  {entry.fault} at {entry.block}: ", entry.reason, width=4))
    return [*lines, BLANK]


def _confirmation_lines(result: Sensitivity) -> list[Line]:
    if not result.confirmations:
        return []
    wrong = sum(confirmation.seen != confirmation.expected for confirmation in result.confirmations)
    what = "as expected" if not wrong else f"{wrong} NOT as expected"
    lines = [heading("planted for real", f"{count(len(result.confirmations), 'capture')}, {what}")]
    rows = [("fault", "plant", "expected", "found")]
    words = {True: "seen", False: "not seen"}
    rows += [
        (f"{confirmation.fault} {share(confirmation.size)}", confirmation.plant,
         words[confirmation.expected], f"{words[confirmation.seen]} ({confirmation.verdict})")
        for confirmation in result.confirmations
    ]  # fmt: skip
    return [*lines, *columns(rows), BLANK]
