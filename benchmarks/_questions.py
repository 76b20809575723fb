"""The table of benchmarks/same_answers.py: inputs and how they are made, questions and their faces.

A question is a command line, or a call of the API, and the faces that are asked of it; its name is
itself. It runs in the folder of the inputs; what it writes goes to OUT. An input is named by its
file or folder there, and whatever names it needs it. A recipe is a command line of machine ``a`` or
``c`` (-o and the name are put behind it), or Python (``make``) with the functions of this file,
which runs in the old version's process.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

FACES = {
    "text": "",
    "json": "--json",
    "page": "--html OUT/page.html",
    "verbose": "-v",
    "markdown": "--markdown",
    "quiet": "-q",
    "ci": "--junit OUT/junit.xml --codequality OUT/quality.json --github",
    "csv": "--csv OUT/table.csv",
    "svg": "--svg OUT/plot.svg",
    "view": "",
    "api": "",
}
"""Options that ask for a face; all but JSON print the text too. ``view``: the browser's screens;
``api``: a call."""

STUBS: dict[str, dict[str, Any]] = {
    "PLAIN": {},
    "NOISY": {"noise": 0.02},
    "OTHER": {"weights": 1},
    "TEMPLATE": {"template": 2},
    "SAMPLING": {"samples": True},
    "TEXTUAL": {"lacks": {"ids", "logprobs", "prompt_logprobs"}},
    "KEYED": {"key": "sk-secret"},
    "SHORTER": {"shorter": 2},
    "CHATTY": {"speaks": "sglang"},
}
"""Servers by the name that stands for their address, and how they behave: see
tests/domains/logprobs/endpoints."""

_PROMPTS = (
    '--prompt "A bridge is built twice:" --prompt "Once on paper, where every beam is exact."'
)
_NEW = f"{_PROMPTS} --max-new-tokens 4 --no-probe"
_AGAIN = "--no-probe"
_BLOCKS = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "qwen3-moe": "model.layers.1"}
_ASK = '--model tiny --prompt "one two three" --prompt "four five" --max-new-tokens 6'

INPUTS: dict[str, tuple[str, str]] = {
    "fixtures": ("make", "fixtures()"),
    "files": ("make", "files()"),
    "ops-a": ("a", f"capture model-llama-float32 {_NEW} --sites ops@model.layers.1 --weights"),
    "ops-t": ("a", "truth ops-a"),
    "ops-b": ("c", f"capture --like ops-a {_AGAIN}"),
    "ops-planted": (
        "c",
        f"capture --like ops-a {_AGAIN} --plant model.layers.1.mlp.act_fn:out=scale:1.1",
    ),
    "ops-replayed": ("c", "replay ops-a"),
    "batch-a": ("a", f"capture model-llama-bfloat16 {_NEW} --batch --whole"),
    "batch-b": ("c", f"capture --like batch-a {_AGAIN}"),
    "nan-b": (
        "c",
        f"capture --like a-llama-bfloat16 {_AGAIN} --plant model.layers.1.mlp:out=nan:3",
    ),
    "one-prompt": (
        "c",
        f"capture --like a-llama-bfloat16 {_AGAIN} "
        "--plant model.layers.1.mlp:out=scale:1.3@sample=1",
    ),
    "every-block": (
        "c",
        f"capture --like a-llama-bfloat16 {_AGAIN} "
        + " ".join(f"--plant model.layers.{n}.mlp:out=scale:1.5" for n in range(3)),
    ),
    "wrong-reference": (
        "c",
        f"capture --like a-llama-float32 {_AGAIN} --plant model.layers.1.mlp:out=scale:1.2",
    ),
    "a-again": ("a", f"capture --like a-llama-float32 {_AGAIN}"),
    "short-b": ("c", f"capture --like a-llama-float32 {_AGAIN} --steps prefill"),
    "compiled": (
        "a",
        f"capture --like a-llama-float32 {_AGAIN} --engine compile --engine-option backend=eager",
    ),
    "suite-a": ("a", "capture suite:quick"),
    "suite-t": ("a", "truth suite-a"),
    "suite-b": ("c", "capture --like suite-a"),
    "probe-a": ("a", "probe --quick"),
    "probe-c": ("c", "probe --quick"),
    "ranks": ("make", "ranks('a-llama-float32', 'ranks')"),
    "train-a": (
        "a",
        f"capture model-llama-float32 {_PROMPTS} {_AGAIN} --train --optimizer-step adamw",
    ),
    "train-t": ("a", "truth train-a"),
    "train-b": ("c", f"capture --like train-a {_AGAIN}"),
    "train-planted": (
        "c",
        f"capture --like train-a {_AGAIN} --plant model.layers.1.mlp:out=scale:1.2",
    ),
    "collectives-a": ("a", "capture suite:collectives --ranks 2"),
    "collectives-planted": (
        "a",
        "capture suite:collectives --ranks 2 --plant all_reduce=bfloat16@1",
    ),
    "served-a": ("a", f"capture --endpoint PLAIN {_ASK}"),
    "served-noisy": ("a", "capture --endpoint NOISY --like served-a --model tiny"),
    "served-other": ("a", "capture --endpoint OTHER --like served-a --model tiny"),
    "served-template": ("a", f"capture --endpoint TEMPLATE {_ASK}"),
    "served-textual": ("a", f"capture --endpoint TEXTUAL {_ASK}"),
    "served-drawn": ("a", f"capture --endpoint PLAIN {_ASK} --answers 8"),
    "served-drawn-other": (
        "a",
        "capture --endpoint OTHER --like served-drawn --model tiny",
    ),
    "scored": ("a", f"capture --like served-a --model model-llama-float32 {_AGAIN}"),
    "model-onnx": ("make", "graph('model-onnx')"),
    "onnx-a": ("a", f"capture model-onnx/model.onnx --engine onnx {_NEW}"),
    "onnx-like": (
        "a",
        f"capture --like a-llama-float32 --model model-onnx/model.onnx --engine onnx {_AGAIN}",
    ),
    "quantized": ("a", "quantize a-llama-float32 --scheme w8a8"),
    "modules-a": ("make", "modules('model-llama-float32', 'modules-a')"),
    "dump-npy": ("make", "dump('npy', 'modules-a', 'dump-npy')"),
    "dump-sglang": ("make", "dump('sglang', 'modules-a', 'dump-sglang')"),
    "dump-msprobe": ("make", "dump('msprobe', 'modules-a', 'dump-msprobe')"),
    "imported": ("a", "import dump-sglang --like modules-a"),
    "rollout": ("a", "import files/rollouts.jsonl"),
    "trainer": ("a", "import files/rollouts.jsonl --format trainer"),
    "rollout-shifted": ("a", "import files/shifted.jsonl"),
    "trainer-shifted": ("a", "import files/shifted.jsonl --format trainer"),
    "packed.tar": ("a", "pack a-llama-float32 -o packed.tar"),
    "packed.zip": ("a", "pack planted-llama-float32 -o packed.zip"),
    "damaged": ("make", "damaged('a-llama-float32', 'damaged')"),
    "cut-short": ("make", "cut_short('a-llama-float32', 'cut-short')"),
    "goldens": (
        "make",
        "copies({'a-llama-float32': 'goldens/one', 'a-llama-bfloat16': 'goldens/two'})",
    ),
    "pair": ("make", "pair('a-llama-float32', 'planted-llama-float32', 'pair')"),
    "tokenizers": ("make", "tokenizers('model-llama-float32', 'tokenizers')"),
    "report.json": ("make", "report('a-llama-float32', 'planted-llama-float32', 'report.json')"),
}
"""Input → (machine, recipe)."""

for _architecture, _block in _BLOCKS.items():
    _site = f"{_block}.mlp.c_proj:out" if _architecture == "gpt2" else f"{_block}.mlp:out"
    for _dtype in ("float32", "bfloat16"):
        _name = f"{_architecture}-{_dtype}"
        INPUTS |= {
            f"model-{_name}": ("make", f"build('{_architecture}', 'model-{_name}', '{_dtype}')"),
            f"a-{_name}": ("a", f"capture model-{_name} {_NEW}"),
            f"t-{_name}": ("a", f"truth a-{_name}"),
            f"healthy-{_name}": (
                "c",
                f"capture --like a-{_name} {_AGAIN} --attn-implementation sdpa --escalate",
            ),
            f"free-{_name}": ("c", f"capture model-{_name} {_NEW}"),
            f"planted-{_name}": (
                "c",
                f"capture --like a-{_name} {_AGAIN} --plant {_site}=scale:1.2",
            ),
            f"noise-{_name}": (
                "c",
                f"capture --like a-{_name} {_AGAIN} --plant {_site}=noise:0.3@sample=1",
            ),
        }
for _mode in ("sketch", "stats", "hash"):
    INPUTS |= {
        f"{_mode}-a": ("a", f"capture model-llama-bfloat16 {_NEW} --store {_mode}"),
        f"{_mode}-b": ("c", f"capture --like {_mode}-a {_AGAIN}"),
        f"{_mode}-c": (
            "c",
            f"capture --like {_mode}-a {_AGAIN} --plant model.layers.1:out=scale:1.3",
        ),
    }
_TRUSTED = {
    "_trust_units": (
        "one_step_of_one_prompt",
        "one_token_of_one_prompt",
        "one_expert_of_many",
        "every_block_in_one_step",
        "padding_not_masked",
    ),
}
for _module, _cases in _TRUSTED.items():
    for _case in _cases:
        INPUTS[f"trust-{_case}"] = ("make", f"trust('{_module}', '{_case}')")

_A, _B, _T = "a-llama-float32", "planted-llama-float32", "t-llama-float32"

QUESTIONS: list[tuple[str, str]] = [
    # compare: three architectures in two dtypes, healthy and planted, with a truth and without
    *(
        question
        for name in (f"{one}-{dtype}" for one in _BLOCKS for dtype in ("float32", "bfloat16"))
        for question in (
            (f"compare a-{name} healthy-{name}", "text json"),
            (f"compare a-{name} free-{name}", "json"),
            (f"compare a-{name} planted-{name} --truth t-{name}", "json page"),
            (f"compare a-{name} noise-{name}", "json text"),
        )
    ),
    (f"compare {_A} {_B}", "json verbose page csv svg quiet"),
    (f"compare {_A} {_B} --all", "text csv"),
    (f"compare {_A} {_B} --exit-code", "quiet"),
    (f"compare {_A} healthy-llama-float32 --exit-code", "text"),
    (f"compare {_A} {_B} --policy files/loose.toml", "json text"),
    (f"compare {_A} {_B} --floor healthy-llama-float32", "json text"),
    (f"compare {_A} {_B} --explain-token", "json text"),
    (f"compare {_A} {_A}", "text"),
    (f"compare {_A} a-again", "json page"),
    ("compare a-llama-bfloat16 one-prompt", "json page"),
    ("compare a-llama-bfloat16 every-block", "json page"),
    ("compare a-llama-bfloat16 every-block --truth t-llama-bfloat16", "json"),
    ("compare a-llama-bfloat16 nan-b", "json page"),
    (f"compare wrong-reference healthy-llama-float32 --truth {_T}", "text json"),
    ("compare a-llama-float32 short-b", "text json"),
    ("compare a-llama-float32 compiled", "text json"),
    ("compare a-llama-float32 free-llama-bfloat16", "text json"),
    ("compare packed.tar packed.zip", "text json"),
    # many runs
    (f"compare {_A} healthy-llama-float32 {_B} free-llama-float32", "json page csv"),
    (f"compare {_A} healthy-llama-float32 {_B} --reports OUT/pairs --exit-code", "text"),
    # operators, stores, batches, whole passes, suites, the probe, ranks
    ("compare ops-a ops-b --truth ops-t", "json text"),
    ("compare ops-a ops-planted --truth ops-t", "json page"),
    ("compare ops-a ops-planted", "json"),
    ("compare ops-a ops-replayed", "json text"),
    *(
        (f"compare {mode}-a {mode}-{side}", "json text")
        for mode in ("sketch", "stats", "hash")
        for side in "bc"
    ),
    ("compare batch-a batch-b", "json text"),
    ("compare batch-a", "json page"),
    ("compare suite-a suite-b --truth suite-t", "json page"),
    ("compare probe-a probe-c", "json text"),
    (f"compare {_A} ranks", "json text"),
    ("compare collectives-a", "json text"),
    ("compare collectives-a collectives-planted", "json text"),
    ("compare collectives-planted", "json text"),
    # training
    ("compare train-a train-b", "json text"),
    ("compare train-a train-planted --truth train-t", "json page"),
    ("compare files/losses-a.jsonl files/losses-b.jsonl", "json text csv"),
    ("compare files/losses-a.jsonl files/losses-drifting.csv --exit-code", "json text"),
    ("compare files/losses-a.jsonl files/losses-b.jsonl --warmup-steps 200", "json"),
    ("compare files/losses-a.jsonl files/losses-jumping.csv", "json text"),
    # log-probabilities
    ("compare served-a served-noisy", "json page"),
    ("compare served-a served-other", "json page"),
    ("compare served-a served-template", "json text"),
    ("compare served-textual served-a", "json text"),
    ("compare served-drawn served-drawn-other", "json page"),
    ("compare served-a scored", "json text"),
    ("compare served-a served-other --layers scored", "json text"),
    ("compare rollout trainer", "json page"),
    ("compare rollout-shifted trainer-shifted", "json text"),
    # what was imported, quantised, run by another engine
    ("compare modules-a imported", "json text"),
    ("compare a-llama-float32 quantized", "json page"),
    ("compare a-llama-float32 onnx-like", "json text"),
    # fixtures: other machines, every version of the format
    ("compare fixtures/cpu-gpu/a-bfloat16 fixtures/cpu-gpu/gpu-bfloat16", "json text"),
    ("compare fixtures/cpu-gpu/a-bfloat16 fixtures/cpu-gpu/gpu-bfloat16-fault", "json page"),
    ("compare fixtures/cpu-gpu/a-float32 fixtures/cpu-gpu/gpu-float32-tf32", "json text"),
    ("compare fixtures/cpu-gpu/a-float32 fixtures/cpu-gpu/gpu-float32-first", "json text"),
    (
        "compare fixtures/cross-isa/x86-bfloat16 fixtures/cross-isa/arm64-bfloat16-fault "
        "--truth fixtures/cross-isa/truth-bfloat16",
        "json page",
    ),
    ("compare fixtures/cross-isa/x86-float32 fixtures/cross-isa/arm64-float32", "json text"),
    *((f"compare fixtures/run-v{n} fixtures/run-v{n}", "json") for n in range(1, 9)),
    *((f"inspect fixtures/run-v{n}", "text json") for n in range(1, 9)),
    # trust cases: the second run is at fault
    *(
        (f"compare trust-{case}/a trust-{case}/b", "json text")
        for cases in _TRUSTED.values()
        for case in cases
    ),
    # what cannot be compared, and what is refused
    ("compare a-llama-float32 a-gpt2-float32", "json page"),
    ("compare a-llama-float32 a-gpt2-float32 --force", "text json"),
    ("compare a-llama-float32 suite-a", "text json"),
    ("compare a-llama-float32 served-a", "text json"),
    ("compare a-llama-float32 damaged", "text json"),
    ("compare a-llama-float32 cut-short", "text json"),
    ("compare a-llama-float32 absent", "text json"),
    ("compare a-llama-float32", "text"),
    ("compare a-llama-float32 planted-llama-float32 --truth t-gpt2-float32", "text"),
    ("compare a-llama-float32 planted-llama-float32 --policy files/wrong.toml", "text"),
    ("compare a-llama-float32 planted-llama-float32 --map files/wrong.toml", "text"),
    ("compare a-llama-float32 planted-llama-float32 --csv absent/x.csv", "text"),
    ("compare --no-such-option", "text"),
    ("compare files/losses-a.jsonl a-llama-float32", "text"),
    ("compaer a b", "text"),
    ("--help", "text"),
    ("compare --help", "text"),
    # check
    (f"check {_A} healthy-llama-float32", "json page ci"),
    (f"check {_A} {_B}", "json page ci verbose quiet"),
    (f"check {_A} {_B} --truth {_T}", "json ci"),
    (f"check {_A} healthy-llama-float32 --policy strict", "text json ci"),
    (f"check {_A} healthy-llama-float32 --policy files/loose.toml", "text json"),
    (f"check {_A} {_A}", "text"),
    (f"check {_A} a-again --policy strict", "text json"),
    ("check a-llama-bfloat16 nan-b", "text json ci"),
    ("check a-llama-bfloat16 free-llama-bfloat16", "text json"),
    (f"check {_A} short-b", "text json"),
    ("check modules-a imported", "text json"),
    ("check goldens healthy-llama-float32", "text json"),
    (f"check OUT/new-golden.tar {_A} --bless", "text"),
    ("check OUT/new-golden nan-b --bless", "text"),
    (f"check {_A} a-gpt2-float32", "text json ci"),
    ("check healthy-llama-float32 damaged", "text ci"),
    (f"check {_A} {_B} --policy nosuch", "text"),
    # doctor
    *(
        (f"doctor {a} {b}", "text json markdown")
        for a, b in (
            (_A, "healthy-llama-float32"),
            (_A, _B),
            ("a-llama-bfloat16", "nan-b"),
            (_A, "a-gpt2-float32"),
            ("fixtures/cpu-gpu/a-float32", "fixtures/cpu-gpu/gpu-float32-tf32"),
        )
    ),
    (f"doctor {_A} {_B} --truth {_T} --exit-code", "text json"),
    (f"doctor {_A} short-b", "text"),
    ("doctor served-a served-noisy", "text"),
    ("doctor train-a train-planted", "text json"),
    # scores
    *(
        (f"scores fixtures/scores/{tool}/a{end} fixtures/scores/{tool}/b{end}", "json page")
        for tool, end in (("evalscope", ""), ("opencompass", ""), ("inspect", ".eval"))
    ),
    (
        "scores fixtures/scores/lm_eval/a fixtures/scores/lm_eval/b",
        "json page csv markdown verbose",
    ),
    ("scores fixtures/scores/lm_eval/a fixtures/scores/lm_eval/b --band 3%", "text json"),
    ("scores fixtures/scores/lm_eval/a fixtures/scores/lm_eval/a --band 3%", "text"),
    ("scores fixtures/scores/lm_eval/a fixtures/scores/lm_eval/b --policy ci", "json"),
    ("scores fixtures/scores/lm_eval/a fixtures/scores/opencompass/b", "text"),
    ("scores fixtures/scores/lm_eval/a absent", "text"),
    (
        "scores fixtures/scores/lm_eval/a fixtures/scores/lm_eval/b fixtures/scores/lm_eval/b",
        "text json",
    ),
    # tokens
    ("tokens model-llama-float32 tokenizers/lower --texts tokenizers/texts.txt", "text json"),
    ("tokens model-llama-float32 tokenizers/same --texts tokenizers/texts.txt", "text json"),
    (
        "tokens tokenizers/same tokenizers/lower --texts tokenizers/chats.jsonl --chat --exit-code",
        "text json",
    ),
    ("tokens model-llama-float32 absent --texts tokenizers/texts.txt", "text"),
    # weights
    ("weights model-llama-float32 model-llama-bfloat16", "text json"),
    ("weights model-llama-float32 model-llama-float32 --exit-code", "text json"),
    ("weights model-llama-float32 absent", "text"),
    # localize, replay, repro, bundle, truth
    (f"localize {_A} {_B} --here both -o OUT/places", "json page"),
    (f"localize {_A} {_B} --here reference -o OUT/places", "text"),
    (f"localize {_A} healthy-llama-float32 --here both -o OUT/places", "text"),
    ("localize train-a train-planted --here both -o OUT/places --truth train-t", "json"),
    ("localize served-a served-noisy -o OUT/places", "text"),
    ("replay ops-a -o OUT/again", "text json"),
    ("replay ops-a -o OUT/again --truth --site model.layers.1.mlp/*", "text"),
    (f"replay {_A} -o OUT/again", "text"),
    (
        "repro ops-a --site model.layers.1.mlp.down_proj/aten.mm:out --against ops-replayed "
        "-o OUT/bug",
        "text json",
    ),
    ("repro ops-a --site model.layers.1.self_attn/aten._softmax:out -o OUT/bug", "text"),
    ("repro ops-a --site model.layers.1.mlp.down_proj/aten.nothing:out -o OUT/bug", "text"),
    (f"bundle {_A} {_B} -o OUT/bug.zip", "text json"),
    (f"bundle {_A} {_B} --truth {_T} -o OUT/bug.zip", "text"),
    ("bundle pair/a pair/b -o OUT/bug.zip", "text"),
    (f"truth {_A} -o OUT/truth", "text json"),
    ("truth train-a -o OUT/truth --max-new-tokens 1", "text"),
    ("truth served-a -o OUT/truth", "text"),
    # experiments
    (
        "diff model-llama-float32 --attn-implementation eager,sdpa --max-new-tokens 2 -o OUT/diff",
        "text",
    ),
    (
        "diff model-llama-float32 --dtype bfloat16,float32 --max-new-tokens 2 -o OUT/diff "
        "--exit-code",
        "json",
    ),
    ("diff model-llama-float32 -o OUT/diff", "text"),
    (
        "selfcheck model-llama-float32 --max-new-tokens 2 --only again,batch,whole,attention",
        "json page",
    ),
    ("selfcheck model-llama-bfloat16 --max-new-tokens 2 --only cache,chunks --truth", "json"),
    ("selfcheck model-llama-float32 --only nosuch", "text"),
    (f"sensitivity {_A} --candidate healthy-llama-float32 --blocks middle", "json page"),
    (
        f"sensitivity {_A} --candidate healthy-llama-float32 --truth {_T} --faults scale,noise",
        "json",
    ),
    (f"sensitivity {_A} --candidate {_B}", "text"),
    (f"quantize {_A} --scheme w8a8", "text json"),
    (f"quantize {_A} --scheme w4a16-g32 --each -o OUT/quantized", "text json"),
    (
        f"quantize {_A} --scheme w4a16-g32 --target 0.001 -o OUT/quantized --policy OUT/lists",
        "text",
    ),
    (f"quantize {_A} --scheme w8a8-static --smooth 0.5", "json"),
    (f"quantize {_A} --scheme w3", "text"),
    ("selftest --device cpu --quick -o OUT/selftest.json", "text"),
    ("demo --workdir OUT/demo", "text"),
    # capture and the machine
    (f"capture model-llama-float32 {_NEW} -o OUT/run", "text json"),
    (f"capture model-llama-float32 {_NEW} --dry-run", "text json"),
    (
        f"capture model-llama-float32 --train --dry-run --mesh fsdp=4,tp=2 --link-rate 50GB/s "
        f"{_PROMPTS}",
        "text json",
    ),
    (f"capture --like {_A} {_AGAIN} -o OUT/run", "text json"),
    (f"capture --like {_A} {_AGAIN} --repeat 2 -o OUT/run", "text"),
    (f"capture --like {_A} --plant model.layers.9.mlp:out=scale:2 -o OUT/run", "text"),
    (f"capture model-llama-float32 {_NEW} --sites nosuch -o OUT/run", "text"),
    (f"capture model-llama-float32 {_NEW}", "text"),
    ("capture absent -o OUT/run", "text"),
    (f"capture --endpoint PLAIN {_ASK} --concurrency 1 -o OUT/run", "text json"),
    (f"capture --endpoint SHORTER {_ASK} --concurrency 1 -o OUT/run", "text"),
    (f"capture --endpoint SAMPLING {_ASK} --concurrency 1 -o OUT/run", "text"),
    (f"capture --endpoint CHATTY {_ASK} --concurrency 1 -o OUT/run", "text"),
    (f"capture --endpoint KEYED {_ASK} --concurrency 1 -o OUT/run", "text"),
    (f"capture --endpoint http://127.0.0.1:9 {_ASK} --concurrency 1 -o OUT/run", "text"),
    (f"capture model-onnx/model.onnx --engine onnx {_NEW} -o OUT/run", "text"),
    ("capture suite:nosuch -o OUT/run", "text"),
    ("probe --quick -o OUT/probe --svg OUT/trees", "text json"),
    ("env --device cpu", "text json"),
    # runs as files
    *(
        (f"inspect {name}", "text json")
        for name in (
            _A,
            "t-llama-float32",
            "ops-a",
            "sketch-a",
            "suite-a",
            "probe-a",
            "ranks",
            "train-a",
            "collectives-a",
            "served-a",
            "served-drawn",
            "imported",
            "quantized",
            "onnx-a",
            "batch-a",
            "packed.tar",
        )
    ),
    (f"inspect {_A} --site model.layers.1.mlp:out", "text json"),
    (f"inspect {_A} --verify", "text json"),
    ("inspect damaged --verify", "text json"),
    ("inspect cut-short", "text"),
    (f"pack {_A} -o OUT/run.zip", "text json"),
    (f"pack {_A} -o OUT/run.rar", "text"),
    (f"pack {_A} -o OUT/run", "text"),
    ("unpack packed.tar -o OUT/run", "text json"),
    ("unpack absent.tar", "text"),
    ("import dump-npy -o OUT/run --map dump-npy.toml", "text json"),
    ("import dump-sglang -o OUT/run --like modules-a", "text json"),
    ("import dump-msprobe -o OUT/run --like modules-a", "text json"),
    ("import files/rollouts.jsonl -o OUT/run", "text json"),
    ("import dump-npy -o OUT/run", "text"),
    ("import dump-npy -o dump-npy/run --map dump-npy.toml", "text"),
    ("import files/wrong.toml -o OUT/run", "text"),
    # the browser
    ("view report.json", "view"),
    (f"view {_A} {_B} --truth {_T}", "view"),
    ("view a-llama-bfloat16 healthy-llama-bfloat16", "view"),
    ("view files/wrong.toml", "text"),
    # the API
    *(
        (call, "api")
        for call in (
            f"compare('{_A}', '{_B}', truth='{_T}')",
            f"compare('{_A}', 'healthy-llama-float32')",
            "compare('served-a', 'served-other')",
            "compare('ops-a', 'ops-planted')",
            f"compare('{_A}', 'absent')",
            f"compare_many('{_A}', ['healthy-llama-float32', '{_B}'])",
            "compare_losses('files/losses-a.jsonl', 'files/losses-drifting.csv')",
            f"check('{_A}', '{_B}')",
            f"check('{_A}', 'healthy-llama-float32', policy='strict')",
            f"doctor('{_A}', '{_B}', truth='{_T}')",
            "scores('fixtures/scores/lm_eval/a', 'fixtures/scores/lm_eval/b')",
            "compare_tokens('model-llama-float32', 'tokenizers/lower', texts=['One', 'two'])",
            f"sensitivity('{_A}', candidate='healthy-llama-float32', faults=['scale'])",
            f"quantize('{_A}', scheme='w8a8')",
            "selfcheck('model-llama-float32', only=['again', 'batch'], max_new_tokens=2)",
            "diff('model-llama-float32', attn_implementation=('eager', 'sdpa'), max_new_tokens=2, "
            "out='OUT/diff')",
            "repro('ops-a', site='model.layers.1.mlp.down_proj/aten.mm:out', out='OUT/bug')",
            f"bundle('{_A}', '{_B}', out='OUT/bug.zip')",
            "import_dump('files/rollouts.jsonl', out='OUT/run')",
            "replay('ops-a', out='OUT/run')",
            "probe(out='OUT/run', quick=True)",
        )
    ),
]
"""(question, faces)."""


# ── what makes inputs ───────────────────────────────────────────────────────────────────────────


def _tree() -> Path:
    """The tree of the version that runs."""
    import divergence

    return Path(divergence.__file__).parents[1]


def build(architecture: str, folder: str, dtype: str) -> None:
    """A tiny model."""
    from tests.models import tiny

    tiny.build(architecture, Path(folder), dtype=dtype)


def fixtures() -> None:
    """The runs and scores of tests/fixtures, unpacked."""
    source, folder = _tree() / "tests/fixtures", Path("fixtures")
    folder.mkdir()
    for path in source.iterdir():
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif path.name.endswith(".tar.xz"):
            with tarfile.open(path) as archive:
                archive.extractall(folder / path.name.removesuffix(".tar.xz"), filter="data")


def files() -> None:
    """Policies, curves of losses, rollouts."""
    folder = Path("files")
    folder.mkdir()
    (folder / "loose.toml").write_text(
        'verdicts = ["identical", "within_floor", "localized"]\nmin_coverage = 0.5\n'
    )
    (folder / "wrong.toml").write_text('verdicts = ["fine"]\nno_such_key = 1\n')
    draw = random.Random(7)
    losses = [2 + 3 * math.exp(-n / 80) + 0.1 * draw.gauss(0, 1) for n in range(400)]
    noisy = [loss * (1 + 0.003 * draw.gauss(0, 1)) for loss in losses]
    jumping = [loss + 0.1 * (n >= 250) for n, loss in enumerate(noisy)]
    drifting = [loss * (1 + 2e-4 * max(0, n - 200)) for n, loss in enumerate(noisy)]
    for name, curve in {"losses-a": losses, "losses-b": noisy}.items():
        lines = [json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(curve)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    for name, curve in {"losses-drifting": drifting, "losses-jumping": jumping}.items():
        rows = [f"{n},{loss}" for n, loss in enumerate(curve)]
        (folder / f"{name}.csv").write_text("\n".join(["step,loss", *rows]) + "\n")
    for name, way in (("rollouts", 0.0), ("shifted", -0.03)):  # all one way, within a limit
        answers = []
        for number in range(6):
            said = [-abs(draw.gauss(0, 1)) - 0.01 for _ in range(12)]
            trained = [
                min(-1e-4, value + (way * (1 + draw.random()) if way else 0.02 * draw.gauss(0, 1)))
                for value in said
            ]
            answers.append(
                {
                    "prompt_ids": [3, 5, 7 + number],
                    "response_ids": [draw.randrange(40) for _ in said],
                    "rollout_log_probs": said,
                    "old_log_probs": trained,
                    "response_mask": [1] * len(said),
                }
            )
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, answers)) + "\n")


def ranks(like: str, folder: str) -> None:
    """A run of two processes, by tensor parallelism."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "divergence",
            "capture",
            "--like",
            like,
            "-o",
            folder,
            "--mesh",
            "tp",
            "--no-probe",
            "-q",
        ],
        check=True,
    )


def graph(folder: str) -> None:
    """The tiny Llama as ONNX."""
    from tests.models import onnx_graphs, tiny

    checkpoint = tiny.build("llama", Path(f".{folder}-checkpoint"), dtype="float32")
    onnx_graphs.build("llama", checkpoint, Path(folder))


def modules(model: str, folder: str) -> None:
    """A run of every module, as the dumps of tests/domains/importing are written from."""
    from divergence import capture
    from tests.domains.importing.writers import PROMPT_IDS

    capture(
        model,
        out=folder,
        prompts=[PROMPT_IDS],
        sites="modules",
        max_new_tokens=3,
        device="cpu",
        attn_implementation="eager",
        anchor=False,  # by the name that older revisions know, too
        probe=False,
    )


def dump(kind: str, run: str, folder: str) -> None:
    """What another tool would have dumped of a run's forwards."""
    from divergence import Run
    from tests.domains.importing import writers

    getattr(writers, f"write_{kind}")(Run.open(run), Path(folder))


def damaged(run: str, folder: str) -> None:
    """A run with one byte of a tensor changed."""
    shutil.copytree(run, folder)
    path = max(Path(folder, "tensors").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)


def cut_short(run: str, folder: str) -> None:
    """A run whose last records were never written."""
    shutil.copytree(run, folder)
    path = Path(folder, "records.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]) + lines[-1][:30])


def copies(names: dict[str, str]) -> None:
    """Runs in other places."""
    for name, place in names.items():
        shutil.copytree(name, place)


def pair(a: str, b: str, folder: str) -> None:
    """Two runs, and what `localize` left of them beside."""
    copies({a: f"{folder}/a", b: f"{folder}/b"})
    words = f"localize {folder}/a {folder}/b -o {folder}/ab --here both"
    subprocess.run([sys.executable, "-m", "divergence", *words.split()], check=True)


def tokenizers(model: str, folder: str) -> None:
    """The tokenizer of a model as it is and one that lowers letters first; texts and chats."""
    root = Path(folder)
    for name in ("same", "lower"):
        (root / name).mkdir(parents=True)
        for path in Path(model).iterdir():
            if "token" in path.name or "chat" in path.name:
                shutil.copy(path, root / name)
    path = root / "lower" / "tokenizer.json"
    content = json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}}
    path.write_text(json.dumps(content))
    texts = ["A bridge is built twice:", "once on paper", "and once in STEEL."]
    (root / "texts.txt").write_text("\n".join(texts) + "\n")
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    (root / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n")


def report(a: str, b: str, path: str) -> None:
    """What compare --json prints."""
    with open(path, "wb") as file:
        subprocess.run(
            [sys.executable, "-m", "divergence", "compare", a, b, "--json"], stdout=file, check=True
        )


def trust(module: str, case: str) -> None:
    """The two runs that a case of benchmarks/trust.py compares, as a and b."""
    import importlib

    cases = importlib.import_module(f"benchmarks.{module}")
    shown: list[Path] = []

    def keep(a: Path, b: Path, **_: Any) -> Any:
        shown[:] = a, b
        raise SystemExit

    cases.compare = keep
    root = Path(f".trust-{case}")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    bench = importlib.import_module("benchmarks._trust").Bench(root)
    with contextlib.suppress(SystemExit):
        getattr(cases, case)(bench)
    for name, run in zip("ab", shown, strict=True):
        shutil.copytree(run, Path(f"trust-{case}", name))
