"""`divergence quantize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from divergence.cli.answers import progress_bars, show, show_document
from divergence.errors import UsageError
from divergence.options.commands import COPY, DEVICE, FORCE, TRUST, Output
from divergence.options.option import Options, option
from divergence.output import check_output

_SCHEME = "The scheme"


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(Options):
    each: bool = option(
        "--each", "Also quantise every matrix alone: half a forward for each.", default=False
    )
    target: float | None = option(
        "--target NATS", "Find what must stay in floating point to cost at most this."
    )
    measure: str = option(
        "--measure NAME",
        "Held against the target: mean KL, or mean |Δ log p|.",
        choices=("kl", "logprob"),
        default="kl",
    )
    scheme: str = option(
        "--scheme NAME",
        "w8a8, w8a8-static, w8a16, w4a16, w4a16-g32, w4a8, fp8, fp8-static, kv8; w8a8+kv8.",
        _SCHEME,
        default="w8a8",
    )
    smooth: float | None = option(
        "--smooth ALPHA", "Migrate outliers into the weights, as SmoothQuant: 0.5.", _SCHEME
    )
    asymmetric: str = option(
        "--asymmetric WHAT", "A zero point for weights, activations, both.", _SCHEME, default=""
    )
    weights_per: str = option(
        "--weights-per WHAT", "A scale for each tensor, channel, group:128.", _SCHEME, default=""
    )
    activations_per: str = option(
        "--activations-per WHAT", "A scale for each tensor, token, group:128.", _SCHEME, default=""
    )
    keep: Sequence[str] = option(
        "--keep NAME",
        "Leave in floating point: a matrix, re:EXPRESSION, or a class; repeatable. !NAME "
        "quantises what is kept otherwise (head, routers).",
        _SCHEME,
        default=(),
    )
    prompts: Sequence[str] = option(
        "--prompt TEXT", "Of a model: a prompt; repeatable.", default=()
    )
    prompts_file: Path | None = option(
        "--prompts FILE", "Of a model: .txt (one a line), .jsonl or .json."
    )
    model: str | None = COPY
    device: str = DEVICE
    trust_remote_code: bool = TRUST


def quantize(
    *,
    run: str = option("RUN", "A floating-point run; or a model, captured first.", default=...),
    out: str | None = option("--out -o RUN", "Write the quantised run there."),
    options: Annotated[dict[str, Any], QuantizationOptions],
    policy: Path | None = option(
        "--policy DIR",
        "With --target: write what is kept, as compressed-tensors, ModelOpt and msmodelslim "
        "read it.",
        after="measure",
    ),
    force: bool = FORCE,
    output: Output,
) -> None:
    """Simulates the scheme on the recorded model: codes are exact, as is what is summed of them.
    The cost is told as llama.cpp tells it: KL, same top token, Δp, perplexity. -o writes the
    quantised run, which another machine repeats (capture --like) and compare compares.

    Examples:
    divergence quantize a --scheme w8a8 -o q          # what it costs; then compare a q
    divergence quantize a --scheme w4a16 --each       # matrix by matrix, with outliers
    divergence quantize a --scheme w8a8-static --smooth 0.5
    divergence quantize a --scheme w4a16 --target 0.05 -o q --policy lists
    divergence quantize ./model --prompts calibration.txt --scheme fp8
    """
    if policy is not None and options.get("target") is None:
        raise UsageError("--policy writes what --target finds", hint="--target 0.01")
    check_output(policy and policy / "list", what="policy", make_folder=True)
    from divergence.domains.quantization.quantize import quantize, write_forms
    from divergence.domains.quantization.show import quantization_document

    with progress_bars(quiet=output.silent) as progress:
        result = quantize(run, out=out, force=force, progress=progress, **options)
    document = quantization_document(result)
    show_document(document, output, json=partial(result.to_json, indent=2))
    if policy is not None:  # last: what was found is not lost where it cannot be written
        names = write_forms(result, policy)
        if not (output.json or output.quiet):
            show(f"wrote       {policy}: {', '.join(names)}")
