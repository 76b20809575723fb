"""`divergence diff`: two settings of one machine, from the captures to the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from divergence.cli.answers import progress_bars
from divergence.cli.compare import exit_as, show_report
from divergence.options.commands import Force, Option, Output, TrustRemoteCode
from divergence.words import printable

__all__ = ["diff"]

_BOTH = "Two sides"
_RUN = "Both sides alike"


def diff(
    *,
    model: Annotated[str, Option("MODEL", "Model: a directory, or a name on the hub.")],
    out: Annotated[
        Path | None,
        Option(
            "-o --out DIR",
            "For the runs, report.json and report.html. Default: diff-MODEL-SETTING.",
        ),
    ] = None,
    device: Annotated[
        Sequence[str], Option("--device LIST", "cuda,cpu or npu,cpu: two of them.", _BOTH)
    ] = (),
    dtype: Annotated[
        Sequence[str], Option("--dtype LIST", "bfloat16,float32; one value holds for both.", _BOTH)
    ] = (),
    attn_implementation: Annotated[
        Sequence[str], Option("--attn-implementation LIST", "eager,sdpa.", _BOTH)
    ] = (),
    engine: Annotated[Sequence[str], Option("--engine LIST", "transformers,compile.", _BOTH)] = (),
    threads: Annotated[Sequence[str], Option("--threads LIST", "1,8: of a CPU.", _BOTH)] = (),
    batch: Annotated[
        Sequence[str], Option("--batch LIST", "1,8: prompts that run together.", _BOTH)
    ] = (),
    env: Annotated[
        Sequence[str],
        Option(
            "--env NAME=VALUE",
            "An environment variable; given once, A runs without it. Repeatable.",
            _BOTH,
        ),
    ] = (),
    python: Annotated[
        Sequence[str],
        Option(
            "--python LIST",
            "Two virtual environments with divergence: other versions of torch, transformers.",
            _BOTH,
        ),
    ] = (),
    prompts: Annotated[Sequence[str], Option("--prompt TEXT", "A prompt; repeatable.", _RUN)] = (),
    prompts_file: Annotated[
        Path | None,
        Option("--prompts FILE", "A file of prompts: .txt (one a line), .jsonl or .json.", _RUN),
    ] = None,
    chat: Annotated[bool, Option("--chat", "Put prompts through the chat template.", _RUN)] = False,
    max_new_tokens: Annotated[
        int | None,
        Option("--max-new-tokens N", "Tokens to generate for each prompt.", _RUN, minimum=1),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    exit_code: Annotated[
        bool, Option("--exit-code", "Exit 1 if the sides diverge, 2 if none can tell.")
    ] = False,
    force: Force = False,
    output: Output,
) -> None:
    """Compare a model under two settings of this machine, in one command.

    Captures both sides, the first with its truth, checks what a 16-bit dtype hides, compares, and
    goes on to the operator where a block is named. Each step is printed as the command that it is.
    Run again, it goes on where it stopped.

    Examples:
    divergence diff Qwen/Qwen3-0.6B --device cuda,cpu
    divergence diff MODEL --attn-implementation eager,sdpa
    divergence diff MODEL --engine transformers,compile --prompts prompts.txt
    divergence diff MODEL --batch 1,8 --prompts prompts.txt
    divergence diff MODEL --env ATEN_CPU_CAPABILITY=default      # other kernels of this CPU
    divergence diff MODEL --python ~/torch-2.9,~/torch-2.13      # two virtual environments

    Two machines: divergence capture MODEL -o a, there divergence capture --like a -o b, then
    divergence compare a b.
    """
    from divergence.experiments.diff import diff as call
    from divergence.layout import BLANK, line, print_lines

    listed: dict[str, Any] = {
        "device": _parts(device), "dtype": _parts(dtype), "engine": _parts(engine),
        "attn_implementation": _parts(attn_implementation), "python": _parts(python),
        "threads": _numbers("--threads", threads), "batch": _numbers("--batch", batch),
    }  # fmt: skip
    varied = next((values for values in listed.values() if len(values) > 1), [*env])
    folder = out or Path("diff-" + "-".join([Path(model).name, *map(_plain, varied)]))

    def on_step(number: int, command: str, done: bool) -> None:
        if not output.quiet:
            typer.echo(f"[{number}] {command}{'   # there already' if done else ''}", err=True)

    with progress_bars(quiet=output.silent) as progress:
        result = call(
            model, out=folder, env=env, prompts=prompts, prompts_file=prompts_file, chat=chat,
            max_new_tokens=max_new_tokens, trust_remote_code=trust_remote_code, force=force,
            quiet=output.quiet, on_step=on_step, progress=progress, **listed,
        )  # fmt: skip
    report = result.report
    show_report(report, output, more=result.whole)
    if not (output.silent or output.verbose):
        print_lines([line(f"the page to send: {printable(str(result.page))}")])
    if result.localize is not None and not output.silent:
        print_lines([BLANK])
        on_step(4, result.localize, False)
        result.go_on()
    exit_as(report.verdict.kind, asked=exit_code)


def _parts(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in value.split(",") if part]


def _numbers(flag: str, values: Sequence[str]) -> list[int]:
    from divergence.errors import UsageError

    try:
        return [int(part) for part in _parts(values)]
    except ValueError:
        raise UsageError(f"{','.join(values)!r} is no list of numbers", where=flag) from None


def _plain(value: object) -> str:
    """A part of a directory's name."""
    text = "".join(c if c.isalnum() or c in "._=" else "-" for c in str(value)).strip("-")
    return text.rpartition("-")[2] or "x"
