"""Cases of benchmarks/trust.py about what ran: code, config, compiled modules, templates."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import divergence
from benchmarks._trust import (
    BLOCK,
    Bench,
    Case,
    Machine,
    Told,
    abstained,
    finds,
    right,
    said,
    words_of,
    wrong,
)
from divergence import compare
from divergence.errors import DivergenceError

__all__ = ["CASES"]


def _names(report: Any, *words: str) -> Told:
    """right: some line of the report has one of these words."""
    lines = words_of(report).splitlines()
    hits = [line for line in lines if any(word in line for word in words)]
    return right(hits[0][:120]) if hits else wrong(f"{said(report)}: nothing of {words[0]}")


@contextlib.contextmanager
def _plugin() -> Iterator[None]:
    """A vendor's plugin that replaces a forward by one of the same values."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    healthy = LlamaMLP.forward

    def vendor_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return healthy(self, x)

    with mock.patch.object(LlamaMLP, "forward", vendor_forward):
        yield


def class_forward_replaced(bench: Bench) -> Told:
    """A forward replaced on the class is named, whatever its values."""
    a = bench.reference()
    b = bench.capture(like=a, machine=Machine("plugin", _plugin))
    return _names(compare(a, b), "LlamaMLP")


def instance_forward_replaced(bench: Bench) -> Told:
    """A forward replaced on one instance is named."""

    def replaced(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        healthy = mlp.forward
        mlp.forward = lambda x: healthy(x) * 1.3

    a = bench.reference()
    return _names(compare(a, bench.capture(like=a, prepare=replaced)), "LlamaMLP", "replaced")


def attention_function_replaced(bench: Bench) -> Told:
    """A function of the modeling file that is replaced (rotary) is named."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        from transformers.models.llama import modeling_llama

        healthy = modeling_llama.apply_rotary_pos_emb

        def vendor_rotary(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **values: Any) -> Any:
            return healthy(q, k, cos, sin, *args, **values)

        with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", vendor_rotary):
            yield

    a = bench.reference()
    b = bench.capture(like=a, machine=Machine("rotary", patched))
    return _names(compare(a, b), "rotary_pos_emb", "LlamaAttention", "vendor_rotary")


def hook_of_another_library(bench: Bench) -> Told:
    """A forward hook that changes a module's output is named."""

    def hooked(model: Any) -> None:
        model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out * 1.3)

    a = bench.reference()
    return _names(compare(a, bench.capture(like=a, prepare=hooked)), "hook")


def healthy_code_is_quiet(bench: Bench) -> Told:
    """The same code on both sides makes no line about code."""
    a = bench.reference()
    report = compare(a, bench.capture(like=a))
    lines = [line for line in report.preflight if line.status != "same" and "code" in line.check]
    return wrong(lines[0].check) if lines else right("no line about code")


def _config(bench: Bench, source: Path, **changes: Any) -> Path:
    folder = bench.folder("model")
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def rope_theta(bench: Bench) -> Told:
    """Another rope_theta is named as such."""
    a = bench.reference()
    other = _config(bench, bench.model(), rope_theta=500000.0)
    return _names(compare(a, bench.capture(str(other), like=a)), "rope_theta", "rope_parameters")


def norm_epsilon(bench: Bench) -> Told:
    """Another rms_norm_eps is named as such, though no number may show it."""
    a = bench.reference()
    other = _config(bench, bench.model(), rms_norm_eps=1e-5)
    return _names(compare(a, bench.capture(str(other), like=a)), "rms_norm_eps")


def activation_of_config(bench: Bench) -> Told:
    """Another hidden_act is named as such."""
    a = bench.reference()
    other = _config(bench, bench.model(), hidden_act="gelu")
    return _names(compare(a, bench.capture(str(other), like=a)), "hidden_act")


def other_template(bench: Bench) -> Told:
    """Another chat template is named, not only other tokens."""
    model = bench.model()
    other = bench.folder("model")
    shutil.copytree(model, other)
    path = other / "tokenizer_config.json"
    texts = json.loads(path.read_text())
    for where in (path, other / "chat_template.jinja"):
        if where.name == "chat_template.jinja" and where.exists():
            where.write_text("You are kind. " + where.read_text())
    if "chat_template" in texts:
        texts["chat_template"] = "You are kind. " + texts["chat_template"]
        path.write_text(json.dumps(texts))
    values = {"prompts": ("Hello there",), "chat": True, "max_new_tokens": 2}
    report = compare(bench.capture(str(model), **values), bench.capture(str(other), **values))
    if report.verdict.kind != "incomparable":
        return wrong(said(report))
    return _names(report, "You are kind")


def other_tokenizer(bench: Bench) -> Told:
    """Another way to tokenize is named beside the tokens."""
    model = bench.model()
    other = bench.folder("model")
    shutil.copytree(model, other)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = None
    path.write_text(json.dumps(tokenizer))
    values = {"prompts": ("Hello there",), "max_new_tokens": 2}
    report = compare(bench.capture(str(model), **values), bench.capture(str(other), **values))
    if report.verdict.kind != "incomparable":
        return wrong(said(report))
    return _names(report, "tokenizer")


def dropout_left_on(bench: Bench) -> Told:
    """A model in training mode is named, or the run is refused."""

    def training(model: Any) -> None:
        model.train()
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(
                lambda _, __, out: torch.nn.functional.dropout(out, 0.1, training=True)
            )

    a = bench.reference()
    return _names(
        compare(a, bench.capture(like=a, prepare=training)), "train", "dropout", "repeat", "hook"
    )


# ── compiled ────────────────────────────────────────────────────────────────────────────────────


def _compiled(bench: Bench, prepare: Any, **values: Any) -> Told:
    a = bench.reference(bench.model(num_blocks=2), prompts=1, tokens=2)
    try:
        b = bench.capture(like=a, prepare=prepare, **values)
    except DivergenceError as error:
        return abstained(f"refused: {error.message[:100]}")
    finally:
        torch.compiler.reset()
    text = json.dumps(json.loads((b / "manifest.json").read_text()))
    named = "compile" in text
    report = compare(a, b)
    return (right if named else wrong)(
        f"{said(report)}; compiled is {'' if named else 'not '}recorded"
    )


def compiled_model(bench: Bench) -> Told:
    """A compiled model is captured and recorded as such, or refused with the reason."""
    return _compiled(bench, lambda model: model.compile(backend="eager"))


def compiled_block(bench: Bench) -> Told:
    """A compiled block is recorded as such."""
    return _compiled(bench, lambda model: model.model.layers[1].compile(backend="eager"))


def compiled_beyond_limit(bench: Bench) -> Told:
    """A module that ran eagerly beyond the limit of recompilations is named."""

    def prepare(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.compile(backend="eager", dynamic=False)

    a = bench.reference(prompts=8, tokens=3)
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)  # it is dynamo's own warning that tells
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        try:
            b = bench.capture(like=a, prepare=prepare)
        except DivergenceError as error:
            return abstained(f"refused: {error.message[:100]}")
        finally:
            logging.disable(disabled)
            torch.compiler.reset()
    text = json.dumps(json.loads((b / "manifest.json").read_text()))
    hit = "recompil" in text or "ran eager" in text or ("limit" in text and "compile" in text)
    return right("recorded") if hit else wrong("nothing says that it ran eagerly")


# ── the machine ─────────────────────────────────────────────────────────────────────────────────


def precision_variable(bench: Bench) -> Told:
    """A variable that changes precision is recorded and named by preflight."""
    a = bench.reference()
    machine = Machine("variable", variables={"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"})
    out = bench.folder()
    ran = bench.cli("capture", "--like", a, "-o", out, "--no-probe", machine=machine)
    if ran.code:
        return abstained(ran.err[:100])
    return _names(compare(a, out), "FPMATH")


def same_facts_each_time(bench: Bench) -> Told:
    """The quick probe tries the same facts on a busy machine as on an idle one."""
    names, busy = [], []
    for number in range(2):
        if number:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
        try:
            run = bench.capture(
                str(bench.model()), prompts=("Facts.",), max_new_tokens=1, probe=True
            )
        finally:
            for process in busy:
                process.kill()
                process.wait()
        facts = json.loads((run / "manifest.json").read_text()).get("arithmetic", [])
        names.append(sorted(fact["name"] for fact in facts))
    text = f"{len(names[0])} facts idle, {len(names[1])} busy"
    return right(text) if names[0] == names[1] else wrong(text)


def untied_head(bench: Bench) -> Told:
    """A head that is tied on one side and another matrix on the other is named."""
    a = bench.reference(bench.model("qwen3"))
    other = bench.model("qwen3", tied=False)
    try:
        b = bench.capture(str(other), like=a)
    except DivergenceError as error:
        return abstained(f"refused: {error.message[:100]}")
    report = compare(a, b)
    if report.verdict.kind != "incomparable":
        return wrong(said(report))
    return _names(report, "lm_head", "tied")


def other_layer_weights(bench: Bench) -> Told:
    """One fine-tuned layer is named."""
    from safetensors.torch import load_file, save_file

    a, other = bench.reference(), bench.folder("model")
    shutil.copytree(bench.model(), other)
    weights = load_file(other / "model.safetensors")
    weights[f"{BLOCK}.mlp.down_proj.weight"] *= 1.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    report = compare(a, bench.capture(str(other), like=a))
    if report.verdict.kind != "incomparable":
        return finds(report, block=BLOCK)
    return _names(report, f"{BLOCK}.mlp.down_proj")


def run_of_a_plant(bench: Bench) -> Told:
    """A golden that holds a planted fault is named as such."""
    a = bench.capture(
        str(bench.model()),
        prompts=("A plant.",),
        max_new_tokens=2,
        plants=[f"{BLOCK}:out=scale:1.2"],
    )
    report = compare(a, bench.capture(like=a))
    plants = divergence.Run.open(a).manifest.plan.plants
    told = _names(report, "planted faults")
    return told if plants else wrong("the plant is not recorded")


CASES: tuple[Case, ...] = (
    Case("11", "model.compile()", compiled_model),
    Case("11", "one block compiled", compiled_block),
    Case("11", "compiled MLPs, 8 shapes, limit 2", compiled_beyond_limit),
    Case("ran", "LlamaMLP.forward replaced, same values", class_forward_replaced),
    Case("ran", "one instance's forward × 1.3", instance_forward_replaced),
    Case("ran", "apply_rotary_pos_emb replaced", attention_function_replaced),
    Case("ran", "a forward hook × 1.3", hook_of_another_library),
    Case("ran", "nothing: the same code", healthy_code_is_quiet),
    Case("ran", "rope_theta 500000", rope_theta),
    Case("ran", "rms_norm_eps 1e-5", norm_epsilon),
    Case("ran", "hidden_act gelu", activation_of_config),
    Case("ran", "another chat template", other_template),
    Case("ran", "tokenizer without its bos", other_tokenizer),
    Case("ran", "dropout left on", dropout_left_on),
    Case("ran", "ONEDNN_DEFAULT_FPMATH_MODE=BF16", precision_variable),
    Case("ran", "the quick probe, twice", same_facts_each_time),
    Case("ran", "head untied", untied_head),
    Case("ran", "one layer fine-tuned", other_layer_weights),
    Case("ran", "reference with a plant", run_of_a_plant),
)
