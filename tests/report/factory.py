"""Hand-made reports: plain numbers, nothing measured."""

import random

import msgspec

from divergence import Report
from divergence.comparison.result import (
    Coverage,
    Explanation,
    LogitsDiff,
    NonfiniteCount,
    Onset,
    PreflightLine,
    RunSummary,
    SiteResult,
    Skipped,
    TokenChoice,
    TokenDifference,
    TokensResult,
    Verdict,
)
from divergence.facts import Fact
from divergence.run.command import command

NAN = float("nan")
INF = float("inf")


def make_site(site: str, **changes) -> SiteResult:
    """A compared pair with small, healthy numbers."""
    values = {
        "pass_": "free",
        "sample": 0,
        "step": 0,
        "site": site,
        "order": 0,
        "shape": (1, 6, 16),
        "reference_dtype": "bfloat16",
        "candidate_dtype": "bfloat16",
        "identical": False,
        "numel": 96,
        "rel_l2": 3e-3,
        "cosine": 1 - 4.5e-6,
        "one_minus_cosine": 4.5e-6,
        "sqnr_db": 50.5,
        "max_abs": 0.02,
        "max_abs_index": (0, 3, 7),
        "reference_norm": 10.0,
        "candidate_norm": 10.0,
        "gain": 0.0,
        "gain_se": 1e-4,
        "token_rel_l2_median": 2e-3,
        "token_rel_l2_p99": 4e-3,
        "token_rel_l2_max": 5e-3,
        "worst_position": 3,
        "channel_rel_l2_max": 9e-3,
        "floor": 2.5e-3,
        "ratio": 1.2,
    }
    return SiteResult(**{**values, **changes})


def make_run(path: str, **changes) -> RunSummary:
    values = {
        "path": path,
        "id": f"id-{path}",
        "label": f"host-{path}",
        "model": "tiny/llama",
        "dtype": "bfloat16",
        "device": "cpu",
        "complete": True,
        "num_records": 12,
    }
    return RunSummary(**{**values, **changes})


def make_verdict(kind: str = "within_floor", **changes) -> Verdict:
    values = {"kind": kind, "summary": "rounding explains every difference", "confidence": "high"}
    return Verdict(**{**values, **changes})


def make_report(**changes) -> Report:
    """Two healthy free runs of a two-block model."""
    sites = [
        make_site("model.embed_tokens:out", order=0, identical=True, rel_l2=0.0, ratio=0.0),
        make_site("model.layers.0:out", order=1, block="model.layers.0", role="block"),
        make_site("model.layers.1:out", order=2, block="model.layers.1", role="block"),
        make_site("lm_head:out", order=3),
    ]
    values = {
        "tool_version": "0.0.0",
        "reference": make_run("a"),
        "candidate": make_run("b"),
        "verdict": make_verdict(),
        "preflight": [
            PreflightLine(check="weights", status="same", reference="x", candidate="x"),
            PreflightLine(check="machine", status="differs", reference="one", candidate="two"),
        ],
        "tokens": TokensResult(num_tokens=4, num_equal=4, forced=False),
        "coverage": Coverage(
            num_compared=len(sites), num_only_reference=0, num_only_candidate=0, num_skipped=0
        ),
        "sites": sites,
    }
    return Report(**{**values, **changes})


def make_long_report(num_blocks: int = 60, onset: int = 30) -> Report:
    """A fault in one block of a long model, with an anchored pass, decode steps and a flip."""
    sites = []
    for step in (0, 1, 2):
        for number in range(num_blocks):
            block = f"model.layers.{number}"
            hit = number == onset
            for pass_ in ("free", "anchored"):
                sites.append(
                    make_site(
                        f"{block}:out",
                        pass_=pass_,
                        step=step,
                        order=3 * number + 2,
                        block=block,
                        role="block",
                        worst_position=None if step else 5,
                        rel_l2=2e-3 * (1 + number / 10) if pass_ == "free" else 3e-3 + hit * 0.3,
                        ratio=150.0 if hit and pass_ == "anchored" else 1.2,
                        ratio_max=310.0 if hit and pass_ == "anchored" else 2.5,
                        flagged=hit and pass_ == "anchored",
                    )
                )
            if hit:
                for part, order in (("self_attn", 0), ("mlp.down_proj", 1)):
                    sites.append(
                        make_site(
                            f"{block}.{part}:out",
                            pass_="anchored",
                            step=step,
                            order=3 * number + order,
                            block=block,
                            role="inner",
                            ratio=200.0 if order else 1.1,
                            flagged=bool(order),
                        )
                    )
    logits = LogitsDiff(
        kl_mean=1e-3,
        kl_p99=2e-3,
        kl_max=3e-3,
        top1_agreement=0.9,
        top5_overlap=0.98,
        margin_min=0.04,
        chosen_logprob_diff_max=0.02,
    )
    sites.append(make_site("lm_head:out", order=3 * num_blocks, logits=logits))
    block = f"model.layers.{onset}"
    choices = [TokenChoice(id=i, text=f" t[{i}]\n", logprob=-0.5 - i) for i in range(5)]
    flip = TokenDifference(
        sample=0,
        step=2,
        reference=choices[0],
        candidate=choices[1],
        margin=0.0625,
        candidate_margin=0.03,
        truth_choice=choices[0],
        truth_margin=0.05,
        z=8.25,
        z_of="floor",
        judgement="fault",
        reference_top=choices,
        candidate_top=[choices[1], choices[0], *choices[2:]],
        order_to_onset="after",
    )
    return make_report(
        verdict=make_verdict(
            "localized",
            summary=f"the error is made in {block}.mlp.down_proj",
            onset=Onset(
                site=f"{block}.mlp.down_proj:out", block=block, sample=0, step=0, position=5
            ),
            side="candidate",
            evidence=[
                Fact(text="one site is beyond its floor", values={"ratio": 200.0, "limit": 3.0})
            ],
            commands=[
                command("capture", like="a", o="c", sites="modules"),
                command("compare", "a", "c"),
            ],
            next=["divergence capture --like a -o c --sites modules", "divergence compare a c"],
        ),
        preflight=[
            PreflightLine(
                check="weights",
                status="blocking",
                reference="1111",
                candidate="2222",
                detail="first: model.layers.30.mlp.down_proj.weight",
            ),
            PreflightLine(check="tokens", status="same", reference="x", candidate="x"),
            PreflightLine(check="machine", status="differs", reference="one", candidate="[two]"),
        ],
        tokens=TokensResult(
            num_tokens=3,
            num_equal=2,
            forced=True,
            first_difference=flip,
            differences=[flip],
            kl_mean=2.5e-3,
            kl_p99=4e-3,
            floor_side="reference",
            floor_kl_mean=3.1e-4,
            floor_kl_p99=5e-4,
            kl_ratio=8.06,
            kl_limit=6.0,
            explanation=make_explanation(flip, block),
        ),
        coverage=Coverage(
            num_compared=len(sites),
            num_only_reference=1,
            num_only_candidate=0,
            num_skipped=1,
            unmatched=[
                Skipped(
                    pass_="free",
                    sample=0,
                    step=0,
                    site="model.rotary[0]:out",
                    reason="no such site in B",
                    side="reference",
                ),
                Skipped(
                    pass_="free",
                    sample=0,
                    step=1,
                    site="model.norm:out",
                    reason="shapes differ",
                    side="both",
                ),
            ],
        ),
        sites=sites,
        candidate=make_run("b", plants=["model.layers.30.mlp.down_proj:out=scale:1.3"]),
        notes=["B was captured with [brackets] in a path"],
    )


def make_large_report(num_blocks: int, num_steps: int, num_prompts: int) -> Report:
    """Blocks × steps × prompts, free and anchored, with a fault in one block of one prompt."""
    dice = random.Random(1)
    sites = []
    for sample in range(num_prompts):
        for step in range(num_steps):
            for number in range(num_blocks):
                block = f"model.layers.{number}"
                hit = number == num_blocks // 2 and sample == 1
                for pass_ in ("free", "anchored"):
                    size = dice.lognormvariate(0, 0.4) * (30 if hit and pass_ == "anchored" else 1)
                    values = {name: dice.random() for name in _FILLED}
                    sites.append(
                        make_site(
                            f"{block}:out",
                            pass_=pass_,
                            sample=sample,
                            step=step,
                            order=number,
                            block=block,
                            role="block",
                            kind="LlamaDecoderLayer",
                            rel_l2=2e-3 * size,
                            ratio=size,
                            usage=size / 6,
                            limit_usage=size / 6,
                            limit=6.0,
                            flagged=hit and size > 6,
                            **values,
                        )
                    )
    return make_report(sites=sites, verdict=make_verdict("localized", summary="it is block 50"))


_FILLED = (
    "cosine",
    "one_minus_cosine",
    "max_abs",
    "max_abs_reference",
    "max_abs_candidate",
    "gain",
    "gain_se",
    "ulp_p99",
    "ulp_max",
    "token_rel_l2_median",
    "token_rel_l2_p99",
    "token_rel_l2_max",
    "channel_rel_l2_max",
    "update_rel_l2",
)
"""Figures that fill a result as a real one is filled: digits do not compress."""


def make_explanation(flip: TokenDifference, block: str) -> Explanation:
    """The error of one block explains nearly all of a flip."""
    return Explanation(
        sample=flip.sample,
        step=flip.step,
        differs=True,
        sites=[f"{block}:out"],
        flagged=True,
        disturbed="reference",
        reference=flip.reference,
        candidate=flip.candidate,
        reference_margin=0.0625,
        candidate_margin=-0.03,
        baseline_margin=0.0625,
        injected_margin=-0.0275,
        share=0.97,
        baseline_choice=flip.reference,
        injected_choice=flip.candidate,
        flips=True,
        num_forwards=3,
        dtype="bfloat16",
        device="cpu: host-c",
    )


def make_nonfinite_report() -> Report:
    """NaN in the candidate from block 1 on."""
    bad = NonfiniteCount(candidate_nan=3, candidate_inf=1)
    report = make_report(
        verdict=make_verdict(
            "nonfinite",
            summary="B has nan from model.layers.1 on",
            onset=Onset(
                site="model.layers.1:out", block="model.layers.1", sample=0, step=0, position=2
            ),
        )
    )
    report.sites[2:] = [
        msgspec.structs.replace(
            site,
            nonfinite=bad,
            rel_l2=NAN,
            one_minus_cosine=NAN,
            cosine=NAN,
            max_abs=INF,
            sqnr_db=-INF,
            ratio=INF,
            flagged=True,
        )
        for site in report.sites[2:]
    ]
    return report
