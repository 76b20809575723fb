"""The commands diff, localize, sensitivity, selfcheck and selftest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from divergence.cli.answers import exit_with, progress_bars, show, show_document
from divergence.cli.compare import HTML, exit_as, show_report
from divergence.errors import RunExistsError, UsageError
from divergence.options.commands import (
    FORCE,
    LIMITS,
    TRUST,
    LocalizeOptions,
    Output,
    SelfcheckOptions,
    SelftestOptions,
    SensitivityOptions,
)
from divergence.options.option import Options, but, option
from divergence.output import check_output, write_output
from divergence.words import printable

if TYPE_CHECKING:
    from divergence.document import Document

# `divergence diff`: two settings of one machine, from the captures to the verdict.

_BOTH = "Two sides"
_RUN = "Both sides alike"


@dataclass(frozen=True, kw_only=True)
class DiffOptions(Options):
    """Says which setting differs between the sides, and what both have alike."""

    device: Sequence[str] = option(
        "--device LIST", "cuda,cpu or npu,cpu: two of them.", _BOTH, default=()
    )
    dtype: Sequence[str] = option(
        "--dtype LIST", "bfloat16,float32; one value holds for both.", _BOTH, default=()
    )
    attn_implementation: Sequence[str] = option(
        "--attn-implementation LIST", "eager,sdpa.", _BOTH, default=()
    )
    engine: Sequence[str] = option("--engine LIST", "transformers,compile.", _BOTH, default=())
    threads: Sequence[str] = option("--threads LIST", "1,8: of a CPU.", _BOTH, default=())
    batch: Sequence[str] = option(
        "--batch LIST", "1,8: prompts that run together.", _BOTH, default=()
    )
    env: Sequence[str] = option(
        "--env NAME=VALUE",
        "An environment variable that differs: of B, or given twice of A and of B.",
        _BOTH,
        default=(),
    )
    env_a: Sequence[str] = option(
        "--env-a NAME=VALUE", "One of A's variables; repeatable.", _BOTH, default=()
    )
    env_b: Sequence[str] = option(
        "--env-b NAME=VALUE",
        "One of B's variables; repeatable. What both have holds for both; what one lacks is as in "
        "this shell.",
        _BOTH,
        default=(),
    )
    python: Sequence[str] = option(
        "--python LIST",
        "Two virtual environments with divergence: other versions of torch, transformers.",
        _BOTH,
        default=(),
    )
    prompts: Sequence[str] = option("--prompt TEXT", "A prompt; repeatable.", _RUN, default=())
    prompts_file: Path | None = option(
        "--prompts FILE", "A file of prompts: .txt (one a line), .jsonl or .json.", _RUN
    )
    chat: bool = option("--chat", "Put prompts through the chat template.", _RUN, default=False)
    max_new_tokens: int | None = option(
        "--max-new-tokens N", "Tokens to generate for each prompt.", _RUN, minimum=1
    )
    trust_remote_code: bool = TRUST


def diff(
    *,
    model: str = option("MODEL", "Model: a directory, or a name on the hub.", default=...),
    out: Path | None = option(
        "-o --out DIR", "For the runs, report.json and report.html. Default: diff-MODEL-SETTING."
    ),
    options: Annotated[dict[str, Any], DiffOptions],
    exit_code: bool = option(
        "--exit-code", "Exit 1 if the sides diverge, 2 without a verdict.", default=False
    ),
    fresh: bool = option(
        "--fresh", "Capture all anew, also what an earlier diff has made.", default=False
    ),
    force: bool = FORCE,
    output: Output,
) -> None:
    """Captures both sides, the first with its truth, checks what a 16-bit dtype hides, compares,
    and goes on to the operator where a block is named. Each step is printed as the command that it
    is. Run again, it goes on where it stopped; a diff into a folder beside it takes the first side,
    with its truth, from it where nothing that this was made of has changed.

    Examples:
    divergence diff Qwen/Qwen3-0.6B --device cuda,cpu
    divergence diff MODEL --attn-implementation eager,sdpa
    divergence diff MODEL --engine transformers,compile --prompts prompts.txt
    divergence diff MODEL --batch 1,8 --prompts prompts.txt
    divergence diff MODEL --env ATEN_CPU_CAPABILITY=default      # other kernels of this CPU
    divergence diff MODEL --env-b OMP_NUM_THREADS=1 --env-b ATEN_CPU_CAPABILITY=avx2
    divergence diff MODEL --python ~/torch-2.9,~/torch-2.13      # two virtual environments

    Two machines: divergence capture MODEL -o a, there divergence capture --like a -o b, then
    divergence compare a b.
    """
    from divergence.experiments.diff import diff as call
    from divergence.layout import BLANK, line, print_lines

    listed: dict[str, list[Any]] = {
        name: _parts(options.get(name, ()))
        for name in ("device", "dtype", "engine", "attn_implementation", "python")
    }
    listed |= {name: _numbers(f"--{name}", options.get(name, ())) for name in ("threads", "batch")}
    variables = [pair for name in ("env", "env_a", "env_b") for pair in options.get(name, ())]
    varied = next((values for values in listed.values() if len(values) > 1), variables)
    folder = out or Path("diff-" + "-".join([Path(model).name, *map(_plain, varied)]))

    def on_step(number: int, command: str, done: bool) -> None:
        if not output.quiet:
            typer.echo(f"[{number}] {command}{'   # there already' if done else ''}", err=True)

    with progress_bars(quiet=output.silent) as progress:
        result = call(
            model,
            out=folder,
            force=force,
            fresh=fresh,
            quiet=output.quiet,
            on_step=on_step,
            progress=progress,
            **options | listed,
        )
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
    try:
        return [int(part) for part in _parts(values)]
    except ValueError:
        raise UsageError(f"{','.join(values)!r} is no list of numbers", where=flag) from None


def _plain(value: object) -> str:
    text = "".join(c if c.isalnum() or c in "._=" else "-" for c in str(value)).strip("-")
    return text.rpartition("-")[2] or "x"


# Commands that make runs and compare them: `localize`, `sensitivity`, `quantize`, ...


def _show(
    answer: Any, document: Callable[..., Document], output: Output, html: Path | None = None
) -> None:
    """``html``: where the answer is written as a page, too."""
    if html is not None:
        answer.to_html(html)
    show_document(document(answer), output, json=partial(answer.to_json, indent=2))


def localize(
    *,
    reference: str = option("A", "Run A.", default=...),
    candidate: str = option("B", "Run B.", default=...),
    out: str | None = option("--out -o DIR", "Directory for the runs that are made; needed."),
    options: Annotated[dict[str, Any], LocalizeOptions],
    html: Path | None = HTML,
    output: Output,
) -> None:
    """Compares the runs, captures the block's operators on both sides from equal inputs and in
    float64, names the first operator that is to blame, puts the healthy side's result in its
    place to see that the rest is fine then, and writes a reproducer if it is wrong by itself. Of
    training steps (capture --train) it goes into the backward too.

    Examples:
    divergence localize a b --truth truth -o a-b        # on a machine that has the model
    divergence localize a b -o a-b --model /data/llama  # makes the truth too
    divergence localize a b -o a-b --block model.layers.17

    What another machine must make is printed as a command: run it there with DIR copied, or run the
    same localize there. It goes on where the other one stopped. The truth is made on A's machine alone.
    Exit code 2 if what was captured again does not have the bits of the run it repeats.
    """  # noqa: E501 - printed as it stands
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o DIR")
    check_output(html, what="page")
    from divergence.experiments.localization.localize import localize
    from divergence.report.localization import localization_document

    with progress_bars(quiet=output.silent) as progress:
        result = localize(reference, candidate, out=out, progress=progress, **options)
    _show(result, partial(localization_document, every=output.verbose), output, html)
    # as compare ends; and what does not belong to these runs was not compared
    if result.refused or result.levels[0].verdict == "incomparable":
        exit_with(2)


def sensitivity(
    *,
    run: str = option("RUN", "The run to plant in.", default=...),
    options: Annotated[dict[str, Any], SensitivityOptions],
    policy: str | None = but(LIMITS, after="faults"),
    html: Path | None = HTML,
    output: Output,
) -> None:
    """Plants faults of growing size in what the candidate recorded and asks the judge of
    compare each time. The model does not run for it.

    Examples:
    divergence sensitivity a --candidate b          # needs no model
    divergence sensitivity a                        # makes the candidate here, for the while
    divergence sensitivity a --candidate b --truth truth --blocks all
    divergence sensitivity a --faults scale,noise --blocks 0,5,11 --json > sensitivity.json
    divergence sensitivity a --faults scale --confirm   # plants the found sizes for real, too

    Faults: scale, update-scale, noise, bias, channel, zero. Not for a pair that is judged faulty
    before anything is planted: exit code 2.
    """
    check_output(html, what="page")
    from divergence.experiments.sensitivity import sensitivity
    from divergence.gate.policy import load_policy
    from divergence.report.experiments import sensitivity_document

    with progress_bars(quiet=output.silent) as progress:
        thresholds = load_policy(policy).thresholds
        result = sensitivity(run, thresholds=thresholds, progress=progress, **options)
    _show(result, sensitivity_document, output, html)


def selfcheck(
    *,
    model: str = option("MODEL", "Name on the hub, or a folder.", default=...),
    options: Annotated[dict[str, Any], SelfcheckOptions],
    exit_code: bool = option(
        "--exit-code", "Exit with 1 where a line diverged.", after="keep", default=False
    ),
    html: Path | None = HTML,
    output: Output,
) -> None:
    """Again, in a batch, padded, without a cache, in chunks, by other attention kernels: each is a
    run like one base run, with one thing changed, and compare says what differs and in which block.

    Examples:
    divergence selfcheck Qwen/Qwen3-0.6B
    divergence selfcheck MODEL --device cuda --prompts prompts.txt --keep runs
    divergence selfcheck MODEL --only cache,whole,chunks --truth    # is it the cache?
    divergence selfcheck MODEL --quiet --exit-code || echo "not the same"

    With --exit-code: 1 where a line diverged, 2 where one could not be told; else 0.
    """
    check_output(html, what="page")
    from divergence.experiments.selfcheck import selfcheck
    from divergence.report.experiments import selfcheck_document

    with progress_bars(quiet=output.silent) as progress:
        result = selfcheck(model, progress=progress, **options)
    _show(result, selfcheck_document, output, html)
    if exit_code and result.diverged:
        exit_with(1)
    if exit_code and (
        result.with_status("suspected", "undetermined", "not_run") or not result.compared
    ):
        exit_with(2)


def selftest(
    *,
    out: Path | None = option(
        "-o --out FILE", "The answer as JSON. Default: selftest-DEVICE.json."
    ),
    options: Annotated[dict[str, Any], SelftestOptions],
    force: bool = option("--force", "Replace FILE where it exists.", default=False),
    exit_code: bool = option("--exit-code", "Exit with 1 where a step failed.", default=False),
    output: Output,
) -> None:
    """Needs no model and no network. The file holds what `divergence env` shows, the switches, and
    what each step saw: no host name, no user, no path.

    Examples:
    divergence selftest --device npu                  # some ten minutes; writes selftest-npu.json
    divergence selftest --device cuda:1 --quick -o mine.json --keep runs

    Exit code 0 once all steps were tried, whatever they found; with --exit-code 1 where one failed.
    """
    from divergence.experiments.selftest import selftest
    from divergence.recording.machine import resolve_device
    from divergence.report.environment import selftest_document

    name = resolve_device(options.pop("device", "auto"))
    file = out or Path(f"selftest-{name.replace(':', '-')}.json")
    check_output(file, what="answer")
    if file.is_file() and not force:
        raise RunExistsError(f"{file} exists", hint="choose another -o, or --force")
    try:
        with progress_bars(quiet=output.silent) as progress:
            result = selftest(name, progress=progress, **options)
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            write_output(interrupt.args[0].to_json(indent=2) + "\n", file, what="answer")
        raise
    write_output(result.to_json(indent=2) + "\n", file, what="answer")
    _show(result, partial(selftest_document, verbose=output.verbose), output)
    if not output.silent:
        show(f"written to {file}")
    if exit_code and result.failed:
        exit_with(1)
