"""The options of what makes runs in order to compare them, and of `repro`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from divergence.options.commands import (
    Device,
    FloorRuns,
    Model,
    ModelOfWeights,
    Operators,
    TrustRemoteCode,
    Truth,
)
from divergence.options.option import Option, Options

__all__ = [
    "LocalizeOptions", "QuantizationOptions", "ReproOptions", "SelfcheckOptions",
    "SelftestOptions", "SensitivityOptions",
]  # fmt: skip

Keep = Annotated[
    str | Path | None, Option("--keep DIR", "Keep the runs there; else they are removed.")
]


class LocalizeOptions(Options, frozen=True, kw_only=True):
    truth: Annotated[
        str | None,
        Option(
            "--truth TRUTH",
            "The float64 run of `divergence truth`, made on A's machine. Default: what A carries, "
            "or made in DIR, there.",
        ),
    ] = None
    block: Annotated[
        str | None, Option("--block PATH", "Go into this block, whatever the comparison says.")
    ] = None
    model: Model = None
    device: Device = "auto"
    here: Annotated[
        str,
        Option(
            "--here SIDE",
            "Whose machine this is: reference (A), candidate (B), both, none; auto asks "
            "the runs. What is made must have that run's bits.",
            choices=("auto", "reference", "candidate", "both", "none"),
        ),
    ] = "auto"
    force: Annotated[bool, Option("--force", "Replace what DIR holds of another pair of runs.")] = (
        False
    )
    trust_remote_code: TrustRemoteCode = False
    operators: Operators = ()


class SensitivityOptions(Options, frozen=True, kw_only=True):
    candidate: Annotated[
        str | None,
        Option(
            "--candidate B",
            "A healthy run captured like RUN. Default: made here, of other kernels.",
        ),
    ] = None
    truth: Truth = None
    floor: FloorRuns = ()
    blocks: Annotated[
        Sequence[str],
        Option(
            "--blocks LIST", "first, middle, last, all, numbers from 0 or module paths; by commas.",
            commas=True,
        ),
    ] = ("first", "middle", "last")  # fmt: skip
    faults: Annotated[
        Sequence[str],
        Option(
            "--faults LIST", "scale, update-scale, noise, bias, channel, zero; by commas.",
            commas=True,
        ),
    ] = ("scale", "update-scale", "noise", "bias", "channel")  # fmt: skip
    confirm: Annotated[
        bool,
        Option(
            "--confirm",
            "Also plant the found sizes in the running model, in one block; needs the model.",
        ),
    ] = False
    model: Model = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False


_SCHEME = "The scheme"


class QuantizationOptions(Options, frozen=True, kw_only=True):
    each: Annotated[
        bool, Option("--each", "Also quantise every matrix alone: half a forward for each.")
    ] = False
    target: Annotated[
        float | None,
        Option("--target NATS", "Find what must stay in floating point to cost at most this."),
    ] = None
    measure: Annotated[
        str,
        Option(
            "--measure NAME", "Held against the target: mean KL, or mean |Δ log p|.",
            choices=("kl", "logprob"),
        ),
    ] = "kl"  # fmt: skip
    scheme: Annotated[
        str,
        Option(
            "--scheme NAME",
            "w8a8, w8a8-static, w8a16, w4a16, w4a16-g32, w4a8, fp8, fp8-static, kv8; w8a8+kv8.",
            _SCHEME,
        ),
    ] = "w8a8"
    smooth: Annotated[
        float | None,
        Option(
            "--smooth ALPHA", "Migrate outliers into the weights, as SmoothQuant: 0.5.", _SCHEME
        ),
    ] = None
    asymmetric: Annotated[
        str, Option("--asymmetric WHAT", "A zero point for weights, activations, both.", _SCHEME)
    ] = ""
    weights_per: Annotated[
        str, Option("--weights-per WHAT", "A scale for each tensor, channel, group:128.", _SCHEME)
    ] = ""
    activations_per: Annotated[
        str, Option("--activations-per WHAT", "A scale for each tensor, token, group:128.", _SCHEME)
    ] = ""
    keep: Annotated[
        Sequence[str],
        Option(
            "--keep NAME",
            "Leave in floating point: a matrix, re:EXPRESSION, or a class; repeatable. !NAME "
            "quantises what is kept otherwise (head, routers).",
            _SCHEME,
        ),
    ] = ()
    prompts: Annotated[
        Sequence[str], Option("--prompt TEXT", "Of a model: a prompt; repeatable.")
    ] = ()
    prompts_file: Annotated[
        Path | None, Option("--prompts FILE", "Of a model: .txt (one a line), .jsonl or .json.")
    ] = None
    model: Model = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False


class SelfcheckOptions(Options, frozen=True, kw_only=True):
    prompts: Annotated[
        Sequence[str],
        Option("--prompt TEXT", "A prompt; repeatable. Default: four of 16 tokens at most."),
    ] = ()
    prompts_file: Annotated[
        Path | None,
        Option("--prompts FILE", "A file of prompts: .txt (one a line), .jsonl or .json."),
    ] = None
    chat: Annotated[bool, Option("--chat", "Put prompts through the chat template.")] = False
    max_new_tokens: Annotated[
        int,
        Option(
            "--max-new-tokens N", "Tokens to generate for each prompt. Default: 3.", minimum=1
        ),
    ] = 3  # fmt: skip
    dtype: Annotated[
        str | None, Option("--dtype DTYPE", "float32, bfloat16, float16. Default: auto.")
    ] = None
    device: Device = "auto"
    attn_implementation: Annotated[
        str | None,
        Option("--attn-implementation NAME", "Of the base run: eager (default), sdpa."),
    ] = None
    only: Annotated[
        Sequence[str],
        Option(
            "--only LIST",
            "again, hooks, threads, batch, place, mates, pads, whole, cache, chunks, attention, "
            "compile; by commas. Default: all but compile, which takes minutes.",
            commas=True,
        ),
    ] = ()
    truth: Annotated[
        bool,
        Option("--truth", "Make the float64 truth too: tells which side of a line is wrong."),
    ] = False
    keep: Keep = None
    trust_remote_code: TrustRemoteCode = False


class SelftestOptions(Options, frozen=True, kw_only=True):
    device: Device = "auto"
    quick: Annotated[bool, Option("--quick", "Leave out the suite of operators.")] = False
    keep: Keep = None


class ReproOptions(Options, frozen=True, kw_only=True):
    against: Annotated[
        str | None,
        Option(
            "--against RUN2",
            "The other machine's run, best a replay of RUN: its figures stand beside.",
        ),
    ] = None
    truth: Annotated[
        str | None, Option("--truth TRUTH", "A float64 replay of RUN. Default: computed here.")
    ] = None
    sample: Annotated[int | None, Option("--sample N", "Which prompt's call.", minimum=0)] = None
    step: Annotated[
        int | None,
        Option(
            "--step N",
            "Which forward's call. Default: where RUN2 differs most, else the first.",
            minimum=0,
        ),
    ] = None
    model: ModelOfWeights = None
    trust_remote_code: TrustRemoteCode = False
    operators: Operators = ()
    force: Annotated[bool, Option("--force", "Replace an existing reproducer.")] = False
