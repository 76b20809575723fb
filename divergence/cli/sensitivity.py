"""`divergence sensitivity`: how small a fault a set-up would see."""

from __future__ import annotations

from typing import Annotated

from divergence.cli.shell.options import show
from divergence.cli.shell.progress import progress_bars
from divergence.options.option import Option
from divergence.options.shared import (
    LIMITS,
    Device,
    FloorRuns,
    Json,
    Model,
    Quiet,
    TrustRemoteCode,
    Truth,
    Verbose,
)

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence sensitivity a --candidate b          # needs no model

  divergence sensitivity a                        # makes the candidate here, for the while

  divergence sensitivity a --candidate b --truth truth --blocks all

  divergence sensitivity a --faults scale,noise --blocks 0,5,11 --json > sensitivity.json

  divergence sensitivity a --faults scale --confirm   # plants the found sizes for real, too

Faults: scale, update-scale, noise, bias, channel, zero. Not for a pair that is judged faulty
before anything is planted: exit code 2.
"""


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def command(
    run: Annotated[str, Option("RUN", "The reference run.")],
    candidate: Annotated[
        str | None,
        Option(
            "--candidate B",
            "A healthy run captured like RUN. Default: made here, of other kernels.",
        ),
    ] = None,
    truth: Truth = None,
    floor: FloorRuns = (),
    blocks: Annotated[
        str,
        Option(
            "--blocks LIST", "first, middle, last, all, numbers from 0 or module paths; by commas."
        ),
    ] = "first,middle,last",
    faults: Annotated[
        str, Option("--faults LIST", "scale, update-scale, noise, bias, channel, zero; by commas.")
    ] = "scale,update-scale,noise,bias,channel",
    policy: Annotated[str | None, LIMITS] = None,
    confirm: Annotated[
        bool,
        Option(
            "--confirm",
            "Also plant the found sizes in the running model, in one block; needs the model.",
        ),
    ] = False,
    model: Model = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """How small a fault would be seen: by dtype, prompts, passes and limits as they are.

    Plants faults of growing size in what the candidate recorded and asks the judge of
    compare each time. The model does not run for it.
    """
    from divergence.experiments.sensitivity.search import sensitivity
    from divergence.gate.policy import load_policy
    from divergence.layout.terminal import print_lines
    from divergence.report.sensitivity import answer_lines, sensitivity_lines

    with progress_bars(quiet=quiet or json) as progress:
        result = sensitivity(
            run,
            candidate=candidate,
            truth=truth,
            floor=floor,
            blocks=_words(blocks),
            faults=_words(faults),
            thresholds=load_policy(policy).thresholds,
            confirm=confirm,
            model=model,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if json:
        show(result.to_json(indent=2))
    else:
        print_lines(answer_lines(result) if quiet else sensitivity_lines(result, verbose=verbose))
