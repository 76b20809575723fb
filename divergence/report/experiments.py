"""Shows the answers of selfcheck and sensitivity."""

from __future__ import annotations

from functools import partial
from pathlib import PurePath

from divergence.document import (
    Block,
    Column,
    Document,
    Figures,
    Fold,
    Headline,
    Plot,
    PlotLine,
    Section,
    Sentence,
    Table,
    each_in,
    named,
)
from divergence.experiments.result import (
    FaultSize,
    SelfcheckLine,
    SelfcheckResult,
    Sensitivity,
)
from divergence.words import HEADLINES, count, limit_share, share

# What `divergence selfcheck` says: one sentence, one line a variation, what looks closer.

_WORDS = {
    "identical": "good",
    "within_floor": "good",
    "suspected": "flagged",
    "diverged": "wrong",
    "undetermined": "below",
    "not_run": "below",
}


def agreement(result: SelfcheckResult) -> tuple[str, str]:
    """The sentence, and its style."""
    untold = result.with_status("undetermined", "not_run")
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
    counts = ((same, "bit-identical"), (close, "to rounding"))
    text = " and ".join(f"{number} {how}" for number, how in counts if number)
    style = "bold yellow" if untold else "bold green"
    of = count(same + close, "way")
    return f"This machine agrees with itself in {of} of running: {text}{rest}.", style


def selfcheck_document(result: SelfcheckResult) -> Document:
    """Does this machine agree with itself? What ran, the table, and the commands that look
    closer."""
    prompts = count(result.num_prompts, "prompt")
    ran = (
        f"{PurePath(result.model).name}, {result.dtype}, {result.device} "
        f"({count(result.num_threads, 'thread')}), "
        f"{result.attention or 'no'} attention; {prompts} of {result.num_prompt_tokens} tokens in "
        f"all, {count(result.max_new_tokens, 'new token')} each"
    )
    summaries = [(way.name, way.summary) for way in result.lines if way.summary]
    ways = Section(
        id="ways",
        heading="Ways of running",
        body=[_ways(result)],
        detail="each is a run like the base run with one thing changed",
    )
    verdicts = Section(
        id="verdicts",
        title="what compare says of each",
        verbose=True,
        body=[named(*item, indent=2) for item in summaries],
    )
    doubtful = result.diverged + result.with_status("suspected", "undetermined")
    unlike = [*doubtful, *result.not_repeated, *result.with_status("within_floor")]
    text, style = agreement(result)
    return Document(
        headline=Headline("", text, style),
        known=[named("base run", ran)],
        sections=[ways, verdicts],
        next=list(dict.fromkeys(command for way in unlike for command in way.next)),
    )


def _ways(result: SelfcheckResult) -> Table:
    return Table(
        num_left=3,
        indent=0,
        whole=True,
        columns=("line", Column("what is changed", _changed), Column("result", _result)),
        rows=[(way.name, way, way) for way in result.lines],
        marks=[_WORDS.get(way.status, "") for way in result.lines],
    )


def _changed(way: SelfcheckLine) -> str:
    return way.changed + (f" (against {way.against})" if way.against != "base" else "")


def _place(way: SelfcheckLine) -> str:
    return "in no one block" if way.block is None else f"from {way.block} on"


def _result(way: SelfcheckLine) -> str:
    if way.status == "identical":
        more = way.num_missing if way.name != "hooks" else 0
        return f"bit-identical, {more:,} tensors not compared" if more else "bit-identical"
    if way.status == "not_applicable":
        return f"not applicable: {way.reason}"
    if way.status == "not_run":
        return f"not run: {way.reason}"
    if way.status == "undetermined":
        return f"not told: {way.summary}"
    used = "" if way.limit_usage is None else f"{limit_share(way.limit_usage)} of its limit"
    if way.status in ("diverged", "suspected"):
        side = {"reference": way.against, "candidate": way.name}.get(way.side or "", "")
        wrong = f"{side} is wrong" if side else ""
        sure = way.status == "diverged"
        surely = "DIVERGED" if sure else f"suspected ({way.confidence} confidence)"
        parts = [f"{surely} {_place(way)}", used, wrong, _tokens(way)]
    else:
        floor = "NOT bit-identical, only rounding" if way.same_bits else "only rounding"
        parts = [floor, _bits(way), used, _tokens(way)]
    return ", ".join(filter(None, parts))


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


# What `sensitivity` says: how small a fault of each kind would be seen, then block by block.


def sensitivity_document(result: Sensitivity) -> Document:
    """One sentence a fault, what they rest on, the tables, and what would see smaller faults."""
    first, *others = (_seen(result, fault) for fault in result.phrases)
    sizes = Section(
        id="sizes",
        heading="The smallest fault that is seen",
        detail="faults of growing size were planted in what B recorded, until compare saw them",
        body=[Figures(_size_plots(result)) if len(result.blocks) > 3 else None, *_sizes(result)],
    )
    units = Table(
        title="a size is a share of",
        columns=("fault", "unit"),
        rows=list(result.units.items()),
        num_left=2,
        bare=True,
    )
    basis = Section(
        id="basis", heading="What it rests on", body=[*_setup(result), units], verbose=True
    )
    notes = [named("note", note) for note in result.notes]
    other = "a run made here" if result.made_here else result.candidate.path
    tokens = count(result.num_prompt_tokens, "prompt token")
    seen = f"{tokens}, {len(result.blocks)} of {count(result.num_blocks, 'block')}"
    return Document(
        headline=Headline(
            "", first, "green", [Sentence(text, indent=0, hang=2) for text in others]
        ),
        known=[named("pair", f"{result.reference.path} / {other}, {seen}")],
        sections=[
            sizes,
            basis,
            _reasons(result),
            *_confirmations(result),
            Section(id="notes", heading="Notes", body=notes),
        ],
        next=result.next,
    )


def _seen(result: Sensitivity, fault: str) -> str:
    sizes = [size for size in result.of(fault) if size.reason is None]
    phrase = result.phrases[fault]
    where = f"in {result.dtype} "
    if not sizes:
        return f"{where}{fault}: {result.of(fault)[0].reason}"
    unseen = [size for size in sizes if size.size is None]
    if unseen:
        most = phrase.format(size=f"up to {share(unseen[0].tried)}")
        text = f"{where}you would not see {most} in {unseen[0].block}"
        text += f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        text += f" (of that size it is {unseen[0].by})"
    else:
        seen = [(size.size, size.block) for size in sizes if size.size is not None]
        low, best = min(seen, key=lambda pair: pair[0])
        high, worst = max(seen, key=lambda pair: pair[0])
        text = f"{where}you would see {phrase.format(size=share(high))} in {_blocks(result)}"
        if low < high:
            text += f" (worst: {worst}; best {share(low)} at {best})"
    if result.escalated:
        deep = [size.escalated_size for size in sizes if size.escalated_size is not None]
        text += "; with the escalated pass "
        text += "not in all of them" if len(deep) < len(sizes) else share(max(deep))
    return text


def _blocks(result: Sensitivity) -> str:
    if len(result.blocks) == result.num_blocks:
        return "any block" if result.num_blocks > 1 else f"{result.blocks[0]}"
    if len(result.blocks) == 1:
        return result.blocks[0]
    return f"any of the {len(result.blocks)} blocks tried"


def _setup(result: Sensitivity) -> list[Sentence]:
    a, b = result.reference, result.candidate
    made = "made here" if result.made_here else b.path
    runs = count(result.num_floor_runs, "trusted run")
    rows = [
        ("reference", f"{a.path} ({a.label}): {a.model}, {a.dtype} on {a.device}"),
        ("candidate", f"{made} ({b.label}): {b.dtype} on {b.device}"),
        ("truth", result.truth or "none: the two sides are held against a rounding model"),
        *([("floor", f"widened by {runs}")] if result.num_floor_runs else []),
        ("unplanted", f"{HEADLINES[result.verdict.kind]}: {result.verdict.summary}"),
        ("trials", f"{result.num_trials:,} on recorded tensors"),
    ]
    return [named(*row) for row in rows]


def _sizes(result: Sensitivity) -> list[Table]:
    """The smallest size of each fault at each block; with the escalated pass once more."""
    sizes = {(size.block, size.fault): size for size in result.sizes}
    deep = "with the escalated pass, float32"
    tables = []
    for escalated in (False, True)[: 1 + result.escalated]:
        what = deep if escalated else f"anchored pass, {result.dtype}"
        size_of = partial(_size, escalated=escalated)
        tables.append(
            Table(
                title="smallest size seen",
                detail=f"{deep}: faults of formula or data" if escalated else what,
                columns=("block", *(Column(fault, size_of) for fault in result.phrases)),
                rows=[
                    (block, *(sizes[block, fault] for fault in result.phrases))
                    for block in result.blocks
                ],
            )
        )
    return tables


def _size(fault_size: FaultSize, *, escalated: bool) -> str:
    if fault_size.reason is not None:
        return "-"
    size = fault_size.escalated_size if escalated else fault_size.size
    return f"not to {share(fault_size.tried)}" if size is None else share(size)


def _size_plots(result: Sensitivity) -> list[Plot]:
    plots = []
    names = [block.rpartition(".")[2] for block in result.blocks]
    for fault in result.phrases:
        sizes = {size.block: size for size in result.of(fault)}
        lines = [PlotLine(kind="anchored", values=[sizes[block].size for block in result.blocks])]
        if result.escalated:
            deep = [sizes[block].escalated_size for block in result.blocks]
            lines.append(PlotLine(kind="free", values=deep))
        seen = [value for value in lines[0].values if value is not None]
        worst = f"up to {share(max(seen))}" if seen else "in no block"
        legend = [("line anchored", f"in {result.dtype}"), ("line free", "escalated, float32")]
        plots.append(
            Plot(
                id=f"size-{fault}",
                title=fault,
                names=names,
                lines=lines,
                described=f"The smallest size that is seen, by block: {worst}.",
                legend=legend[: len(lines)],
            )
        )
    return plots


def _reasons(result: Sensitivity) -> Section:
    body: list[Block] = []
    for entry in result.sizes:
        for size, why in ((entry.size, entry.by), (entry.escalated_size, entry.escalated_by)):
            if why is not None:
                text = share(entry.tried if size is None else size)
                body.append(Sentence(why, f"{entry.fault} {text}:", indent=2, hang=4))
        if entry.reason is not None:
            label = f"{entry.fault} at {entry.block}:"
            body.append(Sentence(entry.reason, label, indent=2, hang=4))
    folded = [Fold(count(len(body), "reason"), body)] if body else []
    return Section(id="reasons", title="seen by", body=folded, verbose=True)


def _confirmations(result: Sensitivity) -> list[Section]:
    """Faults that were planted in a capture; nothing where none was asked for."""
    wrong = sum(confirmation.seen != confirmation.expected for confirmation in result.confirmations)
    what = "as expected" if not wrong else f"{wrong} NOT as expected"
    words = {True: "seen", False: "not seen"}
    table = Table(
        title="planted for real",
        num_left=6,
        **each_in(
            result.confirmations,
            ("fault", "fault"),
            (Column("size", share), "size"),
            ("plant", "plant"),
            (Column("expected", words.__getitem__), "expected"),
            (Column("found", words.__getitem__), "seen"),
            ("verdict", "verdict"),
        ),
    )
    detail = f"{count(len(result.confirmations), 'capture')}, {what}"
    section = Section(id="confirmed", title="planted for real", detail=detail, body=[table])
    return [section] if result.confirmations else []
