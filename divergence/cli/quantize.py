"""`divergence quantize`: what a scheme costs, and what to keep out of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from divergence.cli.answers import progress_bars, show
from divergence.errors import RunWriteError, UsageError
from divergence.options.commands import (
    Device,
    Force,
    Json,
    Model,
    Quiet,
    TrustRemoteCode,
    Verbose,
)
from divergence.options.option import Option

__all__ = ["quantize"]

_SCHEME = "The scheme"


def quantize(
    *,
    run: Annotated[str, Option("RUN", "A floating-point run; or a model, captured first.")],
    out: Annotated[str | None, Option("--out -o RUN", "Write the quantised run there.")] = None,
    each: Annotated[
        bool, Option("--each", "Also quantise every matrix alone: half a forward for each.")
    ] = False,
    target: Annotated[
        str | None,
        Option("--target NATS", "Find what must stay in floating point to cost at most this."),
    ] = None,
    measure: Annotated[
        str,
        Option("--measure NAME", "Held against the target: mean KL, or mean |Δ log p|.",
               choices=("kl", "logprob")),
    ] = "kl",
    policy: Annotated[
        Path | None,
        Option("--policy DIR", "Write what is kept, as compressed-tensors, ModelOpt and "
               "msmodelslim read it."),
    ] = None,
    scheme: Annotated[
        str,
        Option(
            "--scheme NAME",
            "w8a8 (default), w8a8-static, w8a16, w4a16, w4a16-g32, w4a8, fp8, fp8-static, kv8; "
            "w8a8+kv8.",
            _SCHEME,
        ),
    ] = "w8a8",
    smooth: Annotated[
        str | None,
        Option("--smooth ALPHA", "Migrate outliers into the weights, as SmoothQuant: 0.5.",
               _SCHEME),
    ] = None,
    asymmetric: Annotated[
        str, Option("--asymmetric WHAT", "A zero point for weights, activations, both.", _SCHEME)
    ] = "",
    weights_per: Annotated[
        str, Option("--weights-per WHAT", "A scale for each tensor, channel, group:128.", _SCHEME)
    ] = "",
    activations_per: Annotated[
        str, Option("--activations-per WHAT", "A scale for each tensor, token, group:128.", _SCHEME)
    ] = "",
    keep: Annotated[
        Sequence[str],
        Option("--keep NAME", "Leave in floating point: a matrix, re:EXPRESSION, or a class; "
               "repeatable. !NAME quantises what is kept otherwise (head, routers).", _SCHEME),
    ] = (),
    prompts: Annotated[
        Sequence[str], Option("--prompt TEXT", "Of a model: a prompt; repeatable.")
    ] = (),
    prompts_file: Annotated[
        Path | None, Option("--prompts FILE", "Of a model: .txt (one a line), .jsonl or .json.")
    ] = None,
    model: Model = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:  # fmt: skip
    """What quantisation costs a model, which matrices pay it, and which to keep out of it.

    Simulates the scheme on the recorded model: codes are exact, as is what is summed of them. The
    cost is told as llama.cpp tells it: KL, same top token, Δp, perplexity. -o writes the
    quantised run, which another machine repeats (capture --like) and compare compares.

    Examples:
    divergence quantize a --scheme w8a8 -o q          # what it costs; then compare a q
    divergence quantize a --scheme w4a16 --each       # matrix by matrix, with outliers
    divergence quantize a --scheme w8a8-static --smooth 0.5
    divergence quantize a --scheme w4a16 --target 0.05 -o q --policy lists
    divergence quantize ./model --prompts calibration.txt --scheme fp8
    """
    if policy is not None and target is None:
        raise UsageError("--policy writes what --target finds", hint="--target 0.01")
    from divergence.experiments.quantization.policy import forms
    from divergence.experiments.quantization.quantize import quantize
    from divergence.layout import print_lines
    from divergence.quantization.scheme import scheme_named
    from divergence.report.quantization import answer_line, quantization_lines

    with progress_bars(quiet=quiet or json) as progress:
        result = quantize(
            run, scheme=scheme, smooth=_number("--smooth", smooth), asymmetric=asymmetric,
            weights_per=weights_per, activations_per=activations_per, keep=keep, out=out,
            each=each, target=_number("--target", target), measure=measure, prompts=prompts,
            prompts_file=prompts_file, model=model, device=device,
            trust_remote_code=trust_remote_code, force=force, progress=progress,
        )  # fmt: skip
    if policy is not None:
        told = scheme_named(
            scheme, asymmetric=asymmetric, weights_per=weights_per, activations_per=activations_per
        )
        _write(policy, forms(result.kept, told))
    if json:
        show(result.to_json(indent=2))
    else:
        lines = [answer_line(result)] if quiet else quantization_lines(result, verbose=verbose)
        print_lines(lines, whole=quiet)


def _number(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is no number", hint=f"{option} 0.5") from None


def _write(folder: Path, texts: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunWriteError(
            f"{folder} cannot be written: {error.strerror}", hint="choose another --policy"
        ) from error
