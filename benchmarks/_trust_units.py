"""Cases of benchmarks/trust.py about places and evidence: one prompt, step, head or expert of many,
faults that settings hide, floors, batches, what stands out, and how confidence moves."""

from __future__ import annotations

import functools
import shlex
import shutil
from dataclasses import replace
from typing import Any

import torch

import divergence
from benchmarks import _faults
from benchmarks._trust import (
    PROMPTS,
    QUIET,
    Bench,
    Case,
    Told,
    abstained,
    finds,
    many_prompts,
    refuses,
    right,
    said,
    stays_quiet,
    words_of,
    wrong,
)  # fmt: skip
from divergence import compare

__all__ = ["CASES"]

BLOCK = "model.layers.1"
MLP = f"{BLOCK}.mlp:out"


OTHER = {"attn_implementation": "sdpa"}
"""The candidate's kernels are others: between equal bits any size is seen."""
GROWTH = 1.2
"""Sizes of faults grow by this until one is found."""


def smallest_alone(bench: Bench, site: str, *, prompt: str, tokens: int, step: int = 0) -> float:
    """The smallest s for which ``site=scale:1+s`` is found where there is no other prompt or step
    to hide among: one prompt, and faults from ``step`` on recorded alone."""
    key = f"alone {site} {prompt} {tokens} {step}"
    if key not in bench.sizes:
        a = bench.reference(prompts=(prompt,), tokens=tokens, steps=str(step) if step else None)
        size = 0.004
        while size < 1:
            b = bench.capture(like=a, plants=[f"{site}=scale:{1 + size}@step={step}"],
                              **OTHER)  # fmt: skip
            if finds(compare(a, b), block=BLOCK).outcome == "right":
                break
            size *= GROWTH
        bench.sizes[key] = size
    return bench.sizes[key]


def _one_of_many(bench: Bench, count: int, which: int, times: float) -> Told:
    """A fault ``times`` as large as the smallest that is found alone, in one prompt of many."""
    a = bench.reference(prompts=count, tokens=2)
    site = f"{BLOCK}:out"
    alone = smallest_alone(bench, site, prompt=many_prompts(count)[which], tokens=2)
    fault = f"{site}=scale:{1 + times * alone}@sample={which}"
    b = bench.capture(like=a, plants=[fault], **OTHER)
    told = finds(compare(a, b), block=BLOCK, sample=which)
    return replace(
        told, said=f"alone {100 * alone:.1f}%, here {times * 100 * alone:.1f}%: {told.said}"
    )


def one_prompt_of_eight(bench: Bench) -> Told:
    """1.5 × the size that is found alone is found in one prompt of eight, and the prompt named."""
    return _one_of_many(bench, 8, 5, 1.5)


def one_prompt_of_64(bench: Bench) -> Told:
    """1.5 × the size that is found alone is found in one prompt of 64, and the prompt named."""
    return _one_of_many(bench, 64, 40, 1.5)


def gross_in_one_prompt_of_64(bench: Bench) -> Told:
    """10 × the size that is found alone is found in one prompt of 64."""
    return _one_of_many(bench, 64, 17, 10.0)


def _one_step(bench: Bench, count: int, which: int, times: float) -> Told:
    a = bench.reference(prompts=1, tokens=count)
    site = f"{BLOCK}:out"
    alone = smallest_alone(bench, site, prompt=PROMPTS[0], tokens=which + 1, step=which)
    b = bench.capture(like=a, plants=[f"{site}=scale:{1 + times * alone}@step={which}"],
                      **OTHER)  # fmt: skip
    told = finds(compare(a, b), block=BLOCK, step=which)
    return replace(
        told, said=f"alone {100 * alone:.1f}%, here {times * 100 * alone:.1f}%: {told.said}"
    )


def one_step_of_24(bench: Bench) -> Told:
    """1.5 × the size that is found where one step is recorded is found in one step of 24."""
    return _one_step(bench, 24, 17, 1.5)


def one_step_of_64(bench: Bench) -> Told:
    """1.5 × the size that is found where one step is recorded is found in one step of 64."""
    return _one_step(bench, 64, 40, 1.5)


def one_prompt_with_truth(bench: Bench) -> Told:
    """With a truth a small fault in one prompt is found too, and the side is right."""
    a = bench.reference(prompts=8)
    b = bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.03@sample=2"])
    return finds(compare(a, b, truth=bench.truth(a)), block=BLOCK, sample=2, sides=("candidate",))


def one_prompt_of_reference(bench: Bench) -> Told:
    """The same fault on the reference's side is blamed on the reference."""
    healthy = bench.reference(prompts=8)
    truth = bench.truth(healthy)
    a = bench.capture(like=healthy, plants=[f"{BLOCK}:out=scale:1.03@sample=2"])
    b = bench.capture(like=healthy, attn_implementation="sdpa")
    return refuses(
        lambda: compare(a, b, truth=truth),
        lambda report: finds(report, block=BLOCK, sample=2, sides=("reference",)),
    )


def one_token_of_one_prompt(bench: Bench) -> Told:
    """One wrong token row in one of eight prompts is named with its prompt."""
    a = bench.reference(prompts=8)
    b = bench.capture(like=a, prepare=functools.partial(_wrong_row, block=1, width=13))
    return finds(compare(a, b), block=BLOCK)


def _wrong_row(model: Any, *, block: int, width: int) -> None:
    """Row 4 of every prefill of ``width`` tokens is 1.3 × too large at the block's MLP."""

    def hook(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        if out.shape[1] >= width:
            out[:, 4] *= 1.3
        return out

    model.model.layers[block].mlp.register_forward_hook(hook)


def one_step_of_one_prompt(bench: Bench) -> Told:
    """One step of one prompt: the smallest unit of all is named."""
    a = bench.reference(prompts=4, tokens=12)
    b = bench.capture(like=a, plants=[f"{MLP}=scale:1.2@sample=3,step=9"])
    return finds(compare(a, b), block=BLOCK, sample=3, step=9)


def one_head_of_one_prompt(bench: Bench) -> Told:
    """A head zeroed in one prompt of eight is named."""
    a = bench.reference(prompts=8)
    b = bench.capture(like=a, plants=[f"{BLOCK}.self_attn.o_proj:in=zero:0-15@sample=6"])
    return finds(compare(a, b), block=BLOCK, sample=6)


def one_expert_of_many(bench: Bench) -> Told:
    """A fault in one expert shows in few tokens, and is named at its block."""
    a = bench.reference(bench.model("qwen3-moe"), prompts=4)
    b = bench.capture(like=a, prepare=_wrong_expert)
    return finds(compare(a, b), block=BLOCK)


def _wrong_expert(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    healthy = experts.forward

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return healthy(hidden, index, torch.where(index == 3, weights * 1.5, weights))

    experts.forward = forward


def healthy_64_prompts(bench: Bench) -> Told:
    """64 looks at two healthy kernels raise no alarm."""
    a = bench.reference(prompts=64, tokens=1)
    return stays_quiet(compare(a, bench.capture(like=a, attn_implementation="sdpa")))


def healthy_24_steps(bench: Bench) -> Told:
    """24 steps of two healthy kernels raise no alarm."""
    a = bench.reference(prompts=1, tokens=24)
    return stays_quiet(compare(a, bench.capture(like=a, attn_implementation="sdpa")))


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
    told = [refuses(lambda f=floor: compare(a, c, floor=[f]), lambda r: finds(r, block=BLOCK))
            for floor in (copy, again)]  # fmt: skip
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
    for fault in (f"{BLOCK}:out=scale:1.03", f"{MLP}=scale:1.05", f"{MLP}=noise:0.05",
                  f"{BLOCK}:out=channel:5:1.5"):  # fmt: skip
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
    b = bench.capture(str(bench.model()), prompts=PROMPTS, max_new_tokens=3, batch=True,
                      plants=[fault])  # fmt: skip
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
    Case("1", "block × (1 + 1.5 s) in prompt 5 of 8", one_prompt_of_eight),
    Case("1", "block × (1 + 1.5 s) in prompt 40 of 64", one_prompt_of_64),
    Case("1", "block × (1 + 10 s) in prompt 17 of 64", gross_in_one_prompt_of_64),
    Case("1", "block × (1 + 1.5 s) in step 17 of 24", one_step_of_24),
    Case("1", "block × (1 + 1.5 s) in step 40 of 64", one_step_of_64),
    Case("1", "block × 1.03 in prompt 2 of 8, truth", one_prompt_with_truth),
    Case("1", "the same, by the reference", one_prompt_of_reference),
    Case("1", "one token row × 1.3 in long prompts", one_token_of_one_prompt),
    Case("1", "MLP × 1.2 in prompt 3, step 9", one_step_of_one_prompt),
    Case("1", "head zeroed in prompt 6 of 8", one_head_of_one_prompt),
    Case("1", "expert 3 × 1.5", one_expert_of_many),
    Case("1", "nothing: sdpa, 64 prompts", healthy_64_prompts),
    Case("1", "nothing: sdpa, 24 steps", healthy_24_steps),
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
