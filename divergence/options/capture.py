"""The options of ``capture``: what runs, on what, and what of it is recorded.

In the order of ``divergence capture --help``. None means "as recorded" with ``--like``, and the
default without. Where the run is written, and what is run or repeated, are not options but
parameters of ``capture`` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from divergence.options.commands import (
    DEVICE,
    MODEL,
    OUTPUT,
    PROMPTS,
    RECORDED,
    REPEATING,
    SERVER,
    TRUST,
    Label,
    LinkRate,
    Ranks,
)
from divergence.options.option import Option
from divergence.options.train import TrainOptions

__all__ = ["CaptureOptions"]


class CaptureOptions(TrainOptions, frozen=True, kw_only=True):
    task: Annotated[
        str,
        Option(
            "--task TASK",
            "auto, causal-lm, encoder or encoder-decoder.",
            MODEL,
            choices=("auto", "causal-lm", "encoder", "encoder-decoder"),
            setting=True,
            recorded="model.task",
        ),
    ] = "auto"
    revision: Annotated[
        str | None,
        Option(
            "--revision REV", "Branch, tag or commit on the hub.", MODEL, recorded="model.revision"
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            "--dtype DTYPE",
            "float32, bfloat16, float16. Default: auto, as the checkpoint says.",
            MODEL,
            setting=True,
            recorded="settings.dtype",
        ),
    ] = None
    device: Annotated[str, DEVICE.but(panel=MODEL, setting=True, machine=True, suite=True)] = "auto"
    device_map: Annotated[
        str | Mapping[str, str | int] | None,
        Option(
            "--device-map MAP",
            "Spread the model over devices and disk: auto, balanced, or a JSON file of module to "
            "device (0, cpu, disk).",
            MODEL,
            setting=True,
            machine=True,
        ),
    ] = None
    engine: Annotated[
        str | None,
        Option(
            "--engine NAME",
            "What runs the model: transformers, compile (torch.compile, block by block), onnx "
            "(ONNX Runtime), or an installed one. Default: transformers, or the recorded one.",
            MODEL,
            setting=True,
            recorded="engine.name",
        ),
    ] = None
    engine_options: Annotated[
        Sequence[str] | Mapping[str, Any],
        Option(
            "--engine-option KEY=VALUE",
            "An option of the engine, such as mode=max-autotune; repeatable.",
            MODEL,
            recorded="engine.options",
        ),
    ] = ()
    attn_implementation: Annotated[
        str | None,
        Option(
            "--attn-implementation NAME",
            "eager, sdpa, flash_attention_2. Default: eager, or the recorded one.",
            MODEL,
            setting=True,
            recorded="settings.attn_implementation",
        ),
    ] = None
    threads: Annotated[
        int | None,
        Option(
            "--threads N",
            "Threads of torch on the CPU. Default: as many as the process has.",
            MODEL,
            minimum=1,
            setting=True,
            machine=True,
        ),
    ] = None
    trust_remote_code: Annotated[bool, TRUST.but(panel=MODEL)] = False
    endpoint: Annotated[
        str | None,
        Option(
            "--endpoint URL",
            "A server to ask in place of running a model: the log-probabilities of its answers. "
            "A key is read from OPENAI_API_KEY.",
            SERVER,
        ),
    ] = None
    top_logprobs: Annotated[
        int, Option("--top-logprobs N", "Likeliest tokens a server is asked for at each.", SERVER)
    ] = 20
    answers: Annotated[
        int,
        Option("--answers N", "Draw N answers to each prompt; 0: the greedy one alone.", SERVER),
    ] = 0
    concurrency: Annotated[
        int,
        Option("--concurrency N", "Prompts that a server is asked at a time.", SERVER, minimum=1),
    ] = 4
    resume: Annotated[
        bool,
        Option(
            "--resume", "Go on with an interrupted capture of a server: ask what it lacks.", SERVER
        ),
    ] = False
    prompts: Annotated[
        Sequence[Any], Option("--prompt TEXT", "A prompt; repeatable.", PROMPTS)
    ] = ()
    prompts_file: Annotated[
        Path | str | None,
        Option("--prompts FILE", "A file of prompts: .txt (one a line), .jsonl or .json.", PROMPTS),
    ] = None
    chat: Annotated[bool, Option("--chat", "Put prompts through the chat template.", PROMPTS)] = (
        False
    )
    batch: Annotated[
        bool | None,
        Option(
            "--batch",
            "Run all prompts in one padded batch; with --like also those that ran singly.",
            PROMPTS,
            recorded="settings.batch",
        ),
        Option(
            "--no-batch",
            "With --like: run each prompt by itself, whatever batch it ran in.",
            REPEATING,
            needs_like=True,
        ),
    ] = None
    batches: Annotated[
        str | None,
        Option(
            "--batches LIST",
            "Which prompts run together, and in which places: '0,1 2,3' or '1,0 3,2'.",
            PROMPTS,
        ),
    ] = None
    pad_left: Annotated[
        int,
        Option(
            "--pad-left N",
            "N pads more before each prompt than its batch needs.",
            PROMPTS,
            minimum=0,
        ),
    ] = 0
    pad_right: Annotated[
        int,
        Option(
            "--pad-right N",
            "With --like: N pads behind each prompt, and those that its batch needs; of a causal "
            "language model the prefill alone.",
            REPEATING,
            minimum=0,
        ),
    ] = 0
    use_cache: Annotated[
        bool | None,
        Option(
            "--no-cache",
            "Decode without a cache: each step is a forward over the whole sequence, of which its "
            "own token is recorded.",
            PROMPTS,
            recorded="settings.use_cache",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        Option(
            "--prefill-chunk N",
            "Feed the prompt in chunks of N tokens, recorded as one prefill.",
            PROMPTS,
            minimum=1,
            recorded="settings.prefill_chunk",
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        Option(
            "--max-new-tokens N",
            "Tokens to generate: prefill and N - 1 decode steps. Default: 16, or as recorded.",
            PROMPTS,
            minimum=0,
            setting=True,
            recorded="settings.max_new_tokens",
        ),
    ] = None
    sites: Annotated[
        Sequence[str],
        Option(
            "--sites SITES",
            "blocks, modules, a preset (attention, mlp, norms), a glob, re:REGEX, or ops@MODULE "
            "for every operator inside it (with --train of its backward too); repeatable.",
            RECORDED,
            setting=True,
            recorded="plan.sites",
            suite=True,
        ),
    ] = ()
    steps: Annotated[
        str | None,
        Option(
            "--steps STEPS",
            "Forwards to record: 0,4-8 or prefill or decode; 0 is the prefill. Default: all.",
            RECORDED,
            recorded="plan.steps",
        ),
    ] = None
    positions: Annotated[
        str | None,
        Option(
            "--positions TOKENS",
            "Token positions to record: 0,4-8 or -1 or last:16. Default: all.",
            RECORDED,
            recorded="plan.positions",
        ),
    ] = None
    weights: Annotated[
        bool,
        Option(
            "--weights",
            "Store the weights that recorded operators use, so that replay needs no model.",
            RECORDED,
        ),
    ] = False
    store: Annotated[
        str | None,
        Option(
            "--store MODE",
            "full: every byte; sketch: 1-2% of them, differences are estimated; stats: statistics; "
            "hash: digests. Default: full, or as recorded.",
            RECORDED,
            choices=("full", "sketch", "stats", "hash"),
            recorded="plan.store",
        ),
    ] = None
    only_changed: Annotated[
        bool,
        Option(
            "--only-changed",
            "With --like: store no bytes of tensors that RUN holds bit for bit.",
            REPEATING,
            needs_like=True,
        ),
    ] = False
    substitutes: Annotated[
        Sequence[str] | Mapping[str, Any] | None,
        Option(
            "--substitute SITE=RUN",
            "Put RUN's recorded result in the place of this operator's; repeatable.",
            REPEATING,
        ),
    ] = None
    whole: Annotated[
        bool,
        Option(
            "--whole",
            "One more pass: prompt and generated tokens in one forward, to hold the decode steps "
            "against (divergence compare RUN).",
            RECORDED,
        ),
    ] = False
    truth: Annotated[
        str | None,
        Option(
            "--truth MODE",
            "The run's own anchored pass in float64, which tells the side that is wrong: auto, as "
            "many forwards as fit half of the capture's time, prefills first; full, all, and the "
            "free run; floor, as auto, the sums of A's own error alone (what auto and full keep "
            "with another --store than full); no. Default: auto, with --like no.",
            RECORDED,
            choices=("auto", "full", "floor", "no"),
            setting=True,
        ),
    ] = None
    hooks: Annotated[
        bool | None,
        Option(
            "--no-hooks",
            "Record what the model returns alone, with no hook in it: to see that hooks change no "
            "bit.",
            RECORDED,
            recorded="settings.hooks",
        ),
    ] = None
    deterministic: Annotated[
        bool | None,
        Option(
            "--no-deterministic",
            "Leave the determinism switches alone.",
            REPEATING,
            setting=True,
            recorded="settings.deterministic",
            suite=True,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            "--seed N",
            "Seed of every generator. Default: 0.",
            REPEATING,
            setting=True,
            recorded="settings.seed",
            suite=True,
        ),
    ] = None
    repeat: Annotated[
        int,
        Option(
            "--repeat K",
            "Run K times and say whether this machine repeats itself. Default: 1.",
            REPEATING,
            minimum=1,
            suite=True,
        ),
    ] = 1
    anchor: Annotated[
        bool,
        Option(
            "--no-anchor", "With --like: leave out the anchored pass.", REPEATING, needs_like=True
        ),
    ] = True
    escalate: Annotated[
        bool,
        Option(
            "--escalate",
            "With --like: a third pass, anchored and in float32, that sees faults of formula and "
            "data below a 16-bit floor.",
            REPEATING,
            needs_like=True,
        ),
    ] = False
    impl: Annotated[
        Sequence[str] | Mapping[str, Any],
        Option(
            "--impl [OP=]NAME",
            "Of a suite: which implementation runs, flash_attn or rms_norm=MODULE:FUNCTION; "
            "repeatable.",
            MODEL,
            suite=True,
        ),
    ] = ()
    plants: Annotated[
        Sequence[Any],
        Option(
            "--plant SITE=FAULT",
            "Plant a fault, to see that it is found; repeatable. @sample=2,step=5 behind it: in "
            "that prompt's step alone. Of suite:collectives: COLLECTIVE=FAULT@RANK.",
            REPEATING,
            suite=True,
        ),
    ] = ()
    label: Label = None
    mesh: Annotated[
        str | None,
        Option(
            "--mesh AXES",
            "Under torchrun, how its processes divide the work: tp, fsdp, dp, pp, or several with "
            "their sizes: dp=2,tp=4.",
            MODEL,
        ),
    ] = None
    ranks: Ranks = None
    link_rate: LinkRate = None
    buffer: Annotated[
        str | int,
        Option(
            "--buffer SIZE",
            "Host memory that the capture may take beside the model: 64MiB, 2GiB. Default: 512MiB.",
            OUTPUT,
        ),
    ] = "512MiB"
    probe: Annotated[
        bool,
        Option("--no-probe", "Leave out the probe of this machine's arithmetic.", suite=True),
    ] = True
