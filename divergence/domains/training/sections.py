"""Sections that show a training plan, from plain data."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from divergence.document import Column, Section, Sentence, Table, each_in, named
from divergence.words import count, size


def sections(plan: dict[str, Any]) -> list[Section]:
    """Show what `capture --dry-run --train` says of a step. ``plan``: a plan as plain data."""
    ranks = " × ".join(f"{name} {length}" for name, length in plan["axes"].items())
    low = "" if plan["autocast"] is None else f", autocast {plan['autocast']}"
    if plan["main_weights"]:
        low += ", float32 main weights"
    batch, tokens = plan["micro_batch"]
    what = f"{count(plan['num_parameters'], 'parameter')}, {plan['weight_dtype']}{low}"
    step = [
        Sentence(_most(plan), "TRAINING STEP:", style="bold", indent=0, hang=2),
        named("model", f"{what}; {plan['optimizer']}"),
        named("ranks", (ranks or "1") + f"; ZeRO {plan['zero']}"),
        named("batch", f"{count(batch, 'sequence')} of {count(tokens, 'token')} on a rank"),
        *(named("note", note) for note in plan["notes"]),
    ]
    rows = [(part["name"], part["formula"], part["bytes"]) for part in plan["kept"]]
    rows.append(("all that stays", "", plan["kept_bytes"]))
    for usage in plan["activations"]:
        way = "with" if usage["checkpointing"] else "without"
        rows.append((f"activations {way} checkpointing", "", usage["saved_bytes"]))
        if usage["gathered_bytes"]:
            rows.append(("  parameters gathered beside them", "", usage["gathered_bytes"]))
        rows.append((f"  peak {way} checkpointing, gradients too", "", usage["peak_bytes"]))
    rows += [
        ("buffer of a capture", "host", plan["capture_bytes"]),
        ("dump of a capture, at most", "disk", plan["dump_bytes"]),
    ]
    memory = Table(columns=("part", "bytes", Column("size", size)), rows=rows, num_left=2)
    traffic = Table(
        num_left=3,
        **each_in(
            plan["traffic"],
            ("collective", itemgetter("operation")),
            ("of", itemgetter("of")),
            (Column("ranks", "{0[0]} {0[1]}".format), itemgetter("axis", "num_ranks")),
            (Column("tensors", size), itemgetter("tensor_bytes")),
            (Column("each rank sends", size), itemgetter("bytes_per_rank")),
            (Column("time", lambda seconds: f"{seconds * 1e3:.3g} ms"), itemgetter("seconds")),
        ),
    )
    rate = "for times: --link-rate 50GB/s"
    if plan["link_rate"] is not None:
        rate = f"at {plan['link_rate'] / 1e9:g} GB/s, nothing overlapping"
    all_sections = [
        Section(body=step),
        Section(
            title="memory on a rank", detail="what stays, then what comes and goes", body=[memory]
        ),
        Section(title="traffic of a step", detail=rate, body=[traffic]),
    ]
    return all_sections if plan["traffic"] else all_sections[:2]


def _most(plan: dict[str, Any]) -> str:
    if plan["peak_bytes"] is None:
        return f"{size(plan['kept_bytes'])} on each rank, and activations that are not known"
    way = "with" if plan["checkpointing"] else "without"
    return f"at most {size(plan['peak_bytes'])} on each rank, {way} gradient checkpointing"
