"""`divergence demo`: the whole job on one machine, offline, in a minute.

Three captures of one model: on this CPU's own kernels, on genuinely other kernels of the same CPU
(a second process under other instruction sets), and there again with a planted fault. The first
carries its own truth, in float64. The first pair must not alarm, the second must name the planted
block and the guilty side, and the descent from there the operator that the fault comes in at.

The model is a small random one, or with --model the user's own. Then the place of the fault is
looked up in its structure. A projection that adds little to the residual stream may hide a tenth
of itself below the dtype's rounding: a larger fault is planted where a smaller one is not seen.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from divergence.errors import FaultError, ModelError, check_process
from divergence.options.commands import QUIET, TRUST, VERBOSE, Output
from divergence.options.option import option
from divergence.output import output_folder, write_output
from divergence.run.command import command_line, quoted_words
from divergence.run.site import escape_path, module_of

OTHER_KERNELS = {
    # torch's own kernels without vector instructions, oneDNN and MKL on their oldest paths:
    # other orders of addition, other polynomials, no fused multiply-add.
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
}
PROMPT = "The quick brown fox jumps over the lazy dog. Rounding error is the difference between"
QUESTION = "Why is the sky blue?"
"""For a model that has learned to speak."""
REPORT = "please report this with the output of `divergence env`"
FACTORS = (1.1, 1.5, 3.0)
"""What the projection is multiplied by, until it is seen; the first is seen in most models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """``block`` and ``module``: where the fault goes. ``prompt``: options of capture.
    ``own``: the model is the user's, not the one that is built here."""

    model: str
    block: str
    module: str
    prompt: tuple[str, ...]
    own: bool = False
    code: tuple[str, ...] = ()


def demo(
    model: str | None = option(
        "--model MODEL",
        "A model of your own: hub id or local directory. Default: a small random one.",
    ),
    dtype: str | None = option(
        "--dtype DTYPE", "With --model: load it in this dtype, as in capture."
    ),
    trust_remote_code: bool = TRUST,
    workdir: Path | None = option(
        "--workdir DIR", "Where model and runs go. Default: the user's cache."
    ),
    quiet: bool = QUIET,
    verbose: bool = VERBOSE,
) -> None:
    """Examples:
    divergence demo
    divergence demo --workdir /tmp/demo   # keeps the model and the runs there
    divergence demo --model ./my-model    # the same steps on a model of your own
    """
    if model is None:
        root = _folder(workdir)
        plan = _built(root / "model")
    else:
        plan = _own(model, dtype=dtype, trust_remote_code=trust_remote_code)
        name = re.sub(r"[^\w.-]+", "-", Path(model).name) or "model"
        root = _folder(workdir, f"demo-{name}")
        if not plan.prompt:  # no tokenizer: token ids
            prompts = root / "prompts.jsonl"
            line = json.dumps({"input_ids": list(range(1, 17))})
            write_output(line + "\n", prompts, what="prompts")
            plan = replace(plan, prompt=("--prompts", str(prompts)))
    if dtype is not None:
        plan = replace(plan, prompt=(*plan.prompt, "--dtype", dtype))
    a, b, c = (root / name for name in ("here", "other-kernels", "fault"))
    first = ["capture", plan.model, "-o", str(a), *plan.prompt, "--device", "cpu", *plan.code]
    _run(
        plan,
        [*first, "--label", "this CPU", "--force"],
        {},
        "1. capture on this CPU's own kernels, and its truth in float64",
    )
    replay = ["capture", "--like", str(a), "--device", "cpu", *plan.code, "--force"]
    _run(
        plan,
        [*replay, "-o", str(b), "--label", "other kernels"],
        OTHER_KERNELS,
        "2. the same on other kernels, standing in for another machine",
    )
    _plant(plan, replay, c, FACTORS[0], f"3. there again, with a fault planted in {plan.block}")
    healthy = _compare(a, b, "4. two healthy machines: this must not alarm", quiet=quiet)
    for larger in (*FACTORS[1:], None):
        faulty = _compare(
            a, c, f"5. a faulty one: this must name {plan.block} and the side", quiet=quiet
        )
        if faulty.verdict.kind not in ("identical", "within_floor") or larger is None:
            break
        _say("\nThat fault is smaller than what this dtype rounds away, so nothing may be named.\n")
        _plant(plan, replay, c, larger, "   a larger one")
    _check(plan, healthy, faulty)
    localization = _localize(
        plan,
        a,
        c,
        root / "localized",
        "6. from the block to the operator, and the proof",
        quiet=quiet,
    )
    _check_operator(plan, localization)
    first_command = command_line("capture", plan.model if plan.own else "MODEL", o="a")
    _say(
        "\nNow on two machines:\n  " + first_command + "\n"
        "  divergence capture --like a -o b\n"
        "  divergence compare a b"
    )


def _built(folder: Path) -> _Plan:
    if not (folder / "config.json").is_file():
        from divergence.experiments.tiny import build

        build(folder, size="demo")
    _say(f"model: 12 Llama blocks, bfloat16, random weights, in {folder}\n")
    block = "model.layers.6"
    return _Plan(
        model=str(folder),
        block=block,
        module=f"{block}.mlp.down_proj",
        prompt=("--prompt", PROMPT, "--chat"),
    )


def _own(model: str, *, dtype: str | None, trust_remote_code: bool) -> _Plan:
    """Raises ModelError where capture would, before anything is recorded."""
    from divergence.recording.engines.load import load_tokenizer

    block, module = plantable_module(model, dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(model, revision=None, trust_remote_code=trust_remote_code)
    prompt: tuple[str, ...] = () if tokenizer is None else ("--prompt", QUESTION)
    if getattr(tokenizer, "chat_template", None):
        prompt += ("--chat",)
    _say(f"model: {model}; the fault goes to {module}\n")
    return _Plan(
        model=model,
        block=block,
        module=module,
        prompt=prompt,
        own=True,
        code=("--trust-remote-code",) if trust_remote_code else (),
    )


def plantable_module(
    model: str | Path, *, dtype: str | None = None, trust_remote_code: bool = False
) -> tuple[str, str]:
    """Find where a known fault goes in a model that nobody has described: (path of its middle
    block, path of the last module in it with weights whose output is as large as the block's).

    That is the projection back into the residual stream (`mlp.down_proj`, `mlp.c_proj`,
    `mixer.out_proj`, `mlp.experts`, `output.dense`), or the norm behind it, where there is one: a
    norm would take a scale error of what comes before it away again. What makes the block's output
    itself is left out: a fault there has nothing of its block behind it, and no operator to be
    found at. Order and shapes come from the plan of a capture, so from no weights. Where a forward
    cannot be run without values, the order is the one in which the model registers its modules.

    Raises ModelError for a model that cannot be found or loaded, and for one without blocks.
    """
    from divergence.recording.dry_run import plan_capture
    from divergence.recording.engines.load import Loading, empty_model
    from divergence.recording.structure import describe_modules

    module = empty_model(
        Loading(str(model), dtype=dtype, trust_remote_code=trust_remote_code)
    ).module
    notes = describe_modules(module)
    blocks = [path for path, note in notes.items() if note.role == "block"]
    if not blocks:
        raise ModelError(
            "this model has no list of blocks to plant a fault in",
            where=str(model),
            hint="capture it and name a module of your own: --plant 'MODULE:out=scale:1.5'",
        )
    block = blocks[len(blocks) // 2]
    weighted = [
        escape_path(path)
        for path, part in module.named_modules()
        if path
        and any(p.ndim > 0 for p in part.parameters(recurse=False))
        and escape_path(path).startswith(f"{block}.")
    ]
    if not weighted:
        raise ModelError(f"block {block} has no module with weights", where=str(model))
    try:
        plan = plan_capture(
            model,
            sites=["modules"],
            prompts=[list(range(1, 9))],
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            device="cpu",
            max_new_tokens=1,
        )
    except ModelError:
        return block, weighted[-1]
    outputs = [
        row
        for row in plan.rows
        if row.site.startswith((f"{block}:out", f"{block}.")) and row.site.endswith(":out")
    ]
    # ``outputs`` are in the order in which they are made, the block's own last
    result = next((row for row in outputs if row.site == f"{block}:out"), None)
    if result is None:
        return block, weighted[-1]
    inner = [row for row in outputs if row is not result and row.bytes_prefill > 0]
    if result.bytes_prefill == 0:  # it is what the last of them made
        inner = inner[:-1]
    whole = [
        module_of(row.site) for row in inner if math.prod(row.shape) == math.prod(result.shape)
    ]
    writers = [path for path in whole if path in weighted]
    return block, (writers or weighted)[-1]


def _folder(workdir: Path | None, name: str = "demo") -> Path:
    if workdir is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        workdir = Path(cache) / "divergence" / name
    return output_folder(workdir, what="demo")


def _say(text: str) -> None:
    from divergence.layout import write_text

    write_text(text + "\n")


def _plant(plan: _Plan, replay: list[str], out: Path, factor: float, title: str) -> None:
    fault = ["--plant", f"{plan.module}:out=scale:{factor:.2f}"]
    _run(
        plan,
        [*replay, "-o", str(out), "--label", "other kernels, faulty", *fault],
        OTHER_KERNELS,
        title,
    )


def _run(plan: _Plan, arguments: list[str], variables: dict[str, str], title: str) -> None:
    """One `divergence` command in a process of its own, shown as a user would type it."""
    shown = [f"{name}={value}" for name, value in variables.items()]
    _say(f"{title}\n   $ {' '.join([*shown, quoted_words(['divergence', *arguments])])}")
    package = Path(__file__).resolve().parents[2]
    folders = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(folders)}
    sys.stdout.flush()
    done = subprocess.run(
        [sys.executable, "-m", "divergence", *arguments, "--quiet"],
        env=environment,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    check_process(done.returncode, quoted_words(["divergence", *arguments]))
    if done.returncode != 0 and plan.own:  # the command has said why
        raise typer.Exit(done.returncode)
    if done.returncode != 0:
        raise FaultError(
            f"the demo's capture ended with exit code {done.returncode}",
            where=quoted_words(arguments),
        )


def _compare(a: Path, b: Path, title: str, *, quiet: bool) -> Any:
    from divergence.cli.compare import show_report
    from divergence.comparison.api import compare

    words = ["divergence", "compare", str(a), str(b)]
    _say(f"\n{title}\n   $ {quoted_words(words)}\n")
    report = compare(a, b)
    show_report(report, Output(json=False, quiet=quiet, verbose=False))
    return report


def _localize(plan: _Plan, a: Path, b: Path, out: Path, title: str, *, quiet: bool) -> Any:
    from divergence.cli.answers import show_document
    from divergence.experiments.localization.localize import localize
    from divergence.report.localization import localization_document

    words = ["divergence", "localize", str(a), str(b), "-o", str(out), *plan.code, "--force"]
    _say(f"\n{title}\n   $ {quoted_words(words)}\n")
    result = localize(a, b, out=out, device="cpu", force=True, trust_remote_code=bool(plan.code))
    output = Output(json=False, quiet=quiet, verbose=False)
    show_document(localization_document(result), output, json=result.to_json)
    return result


def _check_operator(plan: _Plan, result: Any) -> None:
    """The fault is an operator more than the reference has, behind the planted module. Where a
    model of one's own does not repeat its bits, the proof is left out, and the page says why."""
    fed = [] if result.operator is None else result.operator.fed_by
    proven = plan.own if result.causal is None else result.causal.holds
    if not proven or not any(site.startswith(f"{plan.module}/") for site in fed):
        raise FaultError(
            f"the fault in {plan.module} was followed to "
            f"{result.operator and result.operator.site}, fed by {fed}, proven: {proven}",
            hint=REPORT,
        )


def _check(plan: _Plan, healthy: Any, faulty: Any) -> None:
    if healthy.verdict.kind not in ("identical", "within_floor"):
        raise FaultError(f"the healthy pair was judged {healthy.verdict.kind}", hint=REPORT)
    verdict, onset = faulty.verdict, faulty.verdict.onset
    localized = verdict.kind == "localized" and onset is not None and onset.block == plan.block
    if not localized or verdict.side != "candidate":
        raise FaultError(
            f"the fault in {plan.block} was judged {verdict.kind} at {onset}, side {verdict.side}",
            hint=REPORT,
        )
