"""`divergence import`."""

from __future__ import annotations

from pathlib import Path

from divergence.cli.answers import progress_bars, show_copy
from divergence.domains.importing.formats import FORMATS
from divergence.errors import UsageError
from divergence.options.commands import FORCE, OUT, OUTPUT, Output
from divergence.options.option import option


def import_(
    *,
    path: str = option("PATH", "The folder that was dumped, or one file.", default=...),
    out: str | None = OUT,
    layout: str = option(
        "--format NAME", "What wrote it; auto looks.", choices=("auto", *FORMATS), default="auto"
    ),
    map: Path | None = option("--map FILE", "A TOML file: which file, name or field is what."),
    like: str | None = option(
        "--like RUN", "The run it is to be held against: names, shapes, prompts."
    ),
    label: str | None = option("--label TEXT", "What to call its machine.", OUTPUT),
    force: bool = FORCE,
    output: Output,
    command: str | None,
) -> None:
    """Makes runs of statistics and checksums too, where a tool kept no tensors (msprobe's default
    task, ATB, torchtitan, Transformer Engine): they can show a fault, and never health. Of
    log-probabilities: saved answers of OpenAI's, vLLM's and llama.cpp's servers; rollouts of verl,
    slime, TRL and NeMo-RL, and what the trainer said of the same tokens; llama.cpp's base file of
    KL; samples of lm-eval. What a dump does not tell (weights, settings, machine) stays unknown in
    the run, and compare says so. Pickles are read as plain tensors alone; a dump that is half
    written, or lacks ranks or steps, is refused.

    Examples:
    divergence import dump -o b --like a             # then: divergence compare a b
    divergence import dump/step0 -o b --map names.toml
    divergence import gpu/dump -o gpu                # statistics: and npu/dump, then compare
    divergence import answers.jsonl -o served        # of a server, saved
    divergence import rollouts.jsonl -o rollout
    divergence import rollouts.jsonl -o trainer --format trainer  # then: compare rollout trainer
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o RUN")

    from divergence.domains.importing.importing import import_dump

    with progress_bars(quiet=output.silent) as progress:
        made = import_dump(
            path,
            out=out,
            layout=layout,
            map=map,
            like=like,
            label=label,
            force=force,
            command=command,
            progress=progress,
        )
    show_copy("imported", made, output)
