"""Cases of benchmarks/trust.py about places: one prompt, step, row, head or expert of many, and
faults that every block has in one of them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from benchmarks._trust import (
    BLOCK,
    PROMPTS,
    Bench,
    Case,
    Told,
    finds,
    many_prompts,
    refuses,
    right,
    said,
    stays_quiet,
    wrong,
)
from divergence import compare

__all__ = ["CASES"]

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
            b = bench.capture(like=a, plants=[f"{site}=scale:{1 + size}@step={step}"], **OTHER)
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
    b = bench.capture(like=a, plants=[f"{site}=scale:{1 + times * alone}@step={which}"], **OTHER)
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


def _every_block(bench: Bench, fault: str) -> Told:
    """A fault that every block has, in one unit of many: its siblings are no control for it."""
    a = bench.reference(prompts=4, tokens=6)
    plants = [f"model.layers.{n}.mlp:out={fault}" for n in range(3)]
    b = bench.capture(like=a, plants=plants, **OTHER)
    return finds(compare(a, b), kinds=("systematic", "localized"))


def every_block_in_one_step(bench: Bench) -> Told:
    """Every MLP 30% too large in one decode step is no rounding."""
    return _every_block(bench, "scale:1.3@step=3")


def every_block_in_one_prompt(bench: Bench) -> Told:
    """Nor in one prompt of four."""
    return _every_block(bench, "scale:1.3@sample=2")


def padding_not_masked(bench: Bench) -> Told:
    """In a batch whose short row attends to its padding, that row convicts."""
    a = bench.reference(prompts=("a b", PROMPTS[0]), tokens=3, batch=True)
    return finds(compare(a, bench.capture(like=a, prepare=_ignore_padding)))


def _ignore_padding(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = _causal_alone(layer.self_attn.forward)


def two_faults_two_sides(bench: Bench) -> Told:
    """Block 0 of the reference and block 2 of the candidate: no kernel that every block shares."""
    healthy = bench.reference(prompts=2, tokens=4)
    a = bench.capture(like=healthy, plants=["model.layers.0:out=scale:1.2"])
    b = bench.capture(like=healthy, plants=["model.layers.2:out=scale:1.2"])
    report = compare(a, b, truth=bench.truth(healthy))
    if "every" in report.verdict.summary:
        return wrong(f"{said(report)}: {report.verdict.summary[:70]}")
    return finds(report, block="model.layers.0", sides=("both", "reference", None))


def truth_hides_a_finding(bench: Bench) -> Told:
    """What two runs alone localize is not withdrawn where a truth is added (sliding window off)."""

    def unwindowed(model: Any) -> None:
        window = [one for one in model.model.layers if one.self_attn.sliding_window]
        for layer in window:
            layer.self_attn.forward = _causal_alone(layer.self_attn.forward)

    a = bench.reference(bench.model("gemma3"), prompts=2, tokens=12)
    b = bench.capture(like=a, prepare=unwindowed)
    few, more = compare(a, b), compare(a, b, truth=bench.truth(a))
    text = f"{said(few)}; with a truth {said(more)}"
    lost = few.verdict.kind in ("localized", "systematic") and more.verdict.onset is None
    return wrong(text) if lost or more.verdict.side == "reference" else right(text)


def _causal_alone(healthy: Any) -> Any:
    def forward(*args: Any, **values: Any) -> Any:
        mask = values.get("attention_mask")
        if mask is not None:
            num_queries, num_keys = mask.shape[-2:]
            last = torch.arange(num_queries)[:, None] + (num_keys - num_queries)
            seen = torch.arange(num_keys)[None] <= last
            if mask.dtype != torch.bool:
                seen = torch.where(seen, 0.0, torch.finfo(mask.dtype).min).to(mask.dtype)
            values["attention_mask"] = seen[None, None].expand(mask.shape)
        return healthy(*args, **values)

    return forward


def healthy_64_prompts(bench: Bench) -> Told:
    """64 looks at two healthy kernels raise no alarm."""
    a = bench.reference(prompts=64, tokens=1)
    return stays_quiet(compare(a, bench.capture(like=a, attn_implementation="sdpa")))


def healthy_24_steps(bench: Bench) -> Told:
    """24 steps of two healthy kernels raise no alarm."""
    a = bench.reference(prompts=1, tokens=24)
    return stays_quiet(compare(a, bench.capture(like=a, attn_implementation="sdpa")))


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
    Case("1", "every MLP × 1.3 in step 3 of 6", every_block_in_one_step),
    Case("1", "every MLP × 1.3 in prompt 2 of 4", every_block_in_one_prompt),
    Case("1", "padding not masked, a short row in a batch", padding_not_masked),
    Case("1", "block 0 of the reference, 2 of the candidate", two_faults_two_sides),
    Case("1", "nothing: sdpa, 64 prompts", healthy_64_prompts),
    Case("1", "nothing: sdpa, 24 steps", healthy_24_steps),
    Case("7", "sliding window off, with a truth", truth_hides_a_finding),
)
