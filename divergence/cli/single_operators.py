"""`divergence replay` and `repro`: the recorded operators of a run, each alone."""

from __future__ import annotations

from typing import Annotated, Any

from divergence.cli.answers import progress_bars, show, show_run
from divergence.errors import UsageError
from divergence.options.commands import Force, Option, Output, ReplayOptions, ReproOptions
from divergence.run.command import command_line

__all__ = ["replay", "repro"]


def replay(
    *,
    run: Annotated[str, Option("RUN", "A run that holds operators.")],
    out: Annotated[
        str | None, Option("--out -o RUN2", "Directory, archive or URL; needed.")
    ] = None,
    options: Annotated[dict[str, Any], ReplayOptions],
    force: Force = False,
    output: Output,
    command: str | None,
) -> None:
    """Run each recorded operator again, alone, on its recorded inputs.

    Makes a run that compare reads like any other. No error is inherited from one operator to the
    next, and no model is needed where the weights were stored.

    Examples:
    divergence replay a -o a2                       # on the other machine; the model is not needed
    divergence replay a -o truth --truth            # each operator in float64: what is right
    divergence compare a a2 --truth truth           # which operator is wrong here
    divergence replay a -o a3 --site 'model.layers.3.mlp/*' --device cuda

    The run holds operators where it was captured with --sites ops@MODULE, and their weights with
    --weights. What cannot be run alone is left out, counted and said.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o RUN2")

    from divergence.ops.replay import replay as call

    with progress_bars(quiet=output.silent) as progress:
        result = call(run, out=out, force=force, command=command, progress=progress, **options)
    show_run(result, output, like=run)


def repro(
    *,
    run: Annotated[str, Option("RUN", "A run that holds operators.")],
    out: Annotated[str | None, Option("--out -o DIR", "Directory to write; needed.")] = None,
    site: Annotated[str | None, Option("--site SITE", "The operator's site; needed.")] = None,
    options: Annotated[dict[str, Any], ReproOptions],
    output: Output,
) -> None:
    """Write one operator as a script that runs anywhere, with its data and a bug report.

    The script needs torch and safetensors alone, neither the model nor this tool.

    Examples:
    divergence repro a --site model.layers.3.mlp.down_proj/aten.mm:out -o bug
    divergence repro a --site model.layers.3.mlp.down_proj/aten.mm:out --against a2 -o bug

    Then, anywhere with torch and safetensors: python bug/repro.py

    The folder holds repro.py, the inputs, the recorded output and the float64 truth as
    safetensors, and report.md: a bug report that is ready to be sent.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o DIR")
    if site is None:
        raise UsageError(
            "no operator is named",
            hint=f"--site SITE; `{command_line('inspect', run, v=True)}` lists the sites",
        )

    import msgspec

    from divergence.layout import print_lines
    from divergence.ops.reproducer import repro as call
    from divergence.report.localization import reproducer_lines
    from divergence.report.machine import strict_json

    with progress_bars(quiet=output.silent) as progress:
        made = call(run, site=site, out=out, progress=progress, **options)
        for note in made.notes:
            progress("note", 0, None, note)
    if output.json:
        built = msgspec.to_builtins(made, enc_hook=str)  # paths as text
        show(strict_json({"schema_version": 1, **built}))
    elif output.quiet:
        show(str(made.path))
    else:
        print_lines(reproducer_lines(str(made.path), made.title, made.files))
