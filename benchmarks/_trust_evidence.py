"""Cases of benchmarks/trust.py about evidence: floors, confidence, batches, what stands out within
rounding, and settings that change what is computed."""

from __future__ import annotations

import shlex
import shutil
from typing import Any

import divergence
from benchmarks import _faults
from benchmarks._trust import (
    BLOCK,
    PROMPTS,
    QUIET,
    Bench,
    Case,
    Told,
    abstained,
    finds,
    refuses,
    right,
    said,
    stays_quiet,
    words_of,
    wrong,
)
from divergence import compare

__all__ = ["CASES"]

MLP = f"{BLOCK}.mlp:out"


def candidate_as_floor(bench: Bench) -> Told:
    """A candidate is no floor for itself."""
    a = bench.reference()
    c = bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.05"])
    return refuses(lambda: compare(a, c, floor=[c]), lambda r: finds(r, block=BLOCK))


def candidates_copy_as_floor(bench: Bench) -> Told:
    """Nor is a copy of its folder, or a second capture with its bits."""
    a = bench.reference()
    c = bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.05"])
    again = bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.05"])
    copy = bench.folder("copy")
    shutil.copytree(c, copy)
    told = [
        refuses(lambda f=floor: compare(a, c, floor=[f]), lambda r: finds(r, block=BLOCK))
        for floor in (copy, again)
    ]
    return max(told, key=lambda one: ("right", "abstained", "wrong").index(one.outcome))


def faulty_floor(bench: Bench) -> Told:
    """A floor with a fault of its own: by what a limit was widened is said, or it is found."""
    a = bench.reference()
    c = bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.05"])
    f = bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.06"])

    def judge(report: Any) -> Told:
        told, words = finds(report, block=BLOCK), words_of(report)
        low = report.verdict.confidence != "high"
        if told.outcome == "wrong" and low and BLOCK in words and "widen" in words:
            return abstained(told.said + ", says where a limit was widened")
        return told

    return refuses(lambda: compare(a, c, floor=[f]), judge)


def truth_lowers_confidence(bench: Bench) -> Told:
    """Adding a truth, or an escalated pass, that agrees never lowers confidence."""
    ranks = ("low", "medium", "high")
    a = bench.reference()
    truth, told = bench.truth(a), []
    for fault in (
        f"{BLOCK}:out=scale:1.03",
        f"{MLP}=scale:1.05",
        f"{MLP}=noise:0.05",
        f"{BLOCK}:out=channel:5:1.5",
    ):
        few = compare(a, bench.capture(like=a, plants=[fault]))
        deep = bench.capture(like=a, plants=[fault], escalate=True)
        more = compare(a, deep, truth=truth)
        if few.verdict.kind in QUIET:
            continue
        before, after = few.verdict.confidence, more.verdict.confidence
        bad = ranks.index(after) < ranks.index(before) or more.verdict.kind in QUIET
        told.append((bad, f"{fault}: {before} without, {more.verdict.kind} {after} with"))
    bad = [text for is_bad, text in told if is_bad]
    return wrong(bad[0]) if bad else right(f"{len(told)} faults, none lower")


def batch_of_eight(bench: Bench) -> Told:
    """One by one against a batch of eight with a fault: the advice leads to the fault."""
    a, fault = bench.reference(prompts=8), f"{BLOCK}:out=scale:1.1"
    b = bench.capture(
        str(bench.model()), prompts=PROMPTS, max_new_tokens=3, batch=True, plants=[fault]
    )
    report = compare(a, b)
    advice = [line for line in report.verdict.next if "capture --like" in line]
    if not advice:
        return abstained(f"{said(report)}, advises no capture")
    out = bench.folder()
    words = shlex.split(advice[0], comments=True)[1:]
    words[words.index("-o") + 1] = str(out)
    ran = bench.cli(*words, "--plant", fault)
    if ran.code:
        return abstained(f"{advice[0]} is refused: {ran.err[:80]}")
    number = divergence.Run.open(out).manifest.settings.batch
    if not number:
        return wrong(f"advises {' '.join(words[:4])} …: the batch of one again")
    return finds(compare(a, out), block=BLOCK)


def batch_of_eight_healthy(bench: Bench) -> Told:
    """Rows of a healthy batch, anchored row by row, raise no alarm."""
    a = bench.reference(prompts=8)
    out = bench.folder()
    ran = bench.cli("capture", "--like", a, "--batch", "-o", out)
    if ran.code:
        return abstained(f"exit {ran.code}: {ran.err[:100]}")
    return stays_quiet(compare(a, out))


def partial_sums_in_bf16(bench: Bench) -> Told:
    """Partial sums kept in bf16 in one block of twelve are mentioned, and not dismissed."""
    a = bench.reference(bench.model(num_blocks=12, hidden=128), prompts=3)
    b = bench.capture(like=a, prepare=lambda m: _faults.plant(m, "partial-sums", 6, strength=2.0))
    report = compare(a, b, truth=bench.truth(a))
    block, verdict = "model.layers.6", report.verdict
    if verdict.kind in FOUND_OR_MENTIONED:
        return finds(report, block=block, sides=("candidate", None))
    if block in words_of(report) and verdict.confidence != "high":
        return right(said(report) + ", mentions the block")
    return wrong(said(report)) if verdict.confidence == "high" else abstained(said(report))


FOUND_OR_MENTIONED = ("localized", "systematic", "nonfinite", "drift")


def float16_against_bfloat16(bench: Bench) -> Told:
    """Another precision is said first, before any rounding."""
    a = bench.reference()
    report = compare(a, bench.capture(like=a, dtype="float16"))
    summary = report.verdict.summary
    named = ("float16" in summary and "bfloat16" in summary) or "dtype" in summary
    if named or "precision" in summary:
        return right(f"{said(report)}: {summary[:70]}")
    return wrong(f"{said(report)}: {summary[:70]}")


def fault_under_other_precision(bench: Bench) -> Told:
    """A fault beside another precision is still found, or the verdict abstains."""
    a = bench.reference()
    b = bench.capture(like=a, dtype="float16", plants=[f"{MLP}=scale:1.2"])
    return finds(compare(a, b), block=BLOCK)


def healthy_16_bits_in_float32(bench: Bench) -> Told:
    """The same model in float32 is no faulty machine."""
    a = bench.reference()
    report = compare(a, bench.capture(like=a, dtype="float32"), truth=bench.truth(a))
    if report.verdict.side in ("candidate", "both"):
        return wrong(said(report))
    return right(said(report)) if report.verdict.kind != "drift" else abstained(said(report))


CASES: tuple[Case, ...] = (
    Case("6", "block × 1.05, --floor the candidate", candidate_as_floor),
    Case("6", "the same, --floor its copy or its bits", candidates_copy_as_floor),
    Case("6", "the same, --floor a faulty run", faulty_floor),
    Case("7", "four faults, with and without a truth", truth_lowers_confidence),
    Case("8", "block × 1.1 in a batch of 8", batch_of_eight),
    Case("8", "nothing: batch of 8", batch_of_eight_healthy),
    Case("9", "partial sums in bf16 in block 6 of 12", partial_sums_in_bf16),
    Case("10", "bfloat16 against float16", float16_against_bfloat16),
    Case("10", "the same with MLP × 1.2", fault_under_other_precision),
    Case("10", "bfloat16 against float32, truth", healthy_16_bits_in_float32),
)
