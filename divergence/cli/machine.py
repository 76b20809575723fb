"""`divergence env` and `probe`: this machine, and what its arithmetic does."""

from __future__ import annotations

from typing import Annotated, Any

from divergence.cli.answers import progress_bars, show, show_briefly
from divergence.errors import UsageError
from divergence.options.commands import DEVICE, FORCE, OUT, Output, ProbeOptions


def probe(
    *,
    out: str | None = OUT,
    options: Annotated[dict[str, Any], ProbeOptions],
    force: bool = FORCE,
    output: Output,
    command: str | None,
) -> None:
    """Find out from outside what this machine's arithmetic does.

    Makes a run of facts with the inputs and outputs that they rest on: order of additions, width
    of sums, rounding, subnormals, elementary functions, rows alone and in batches.

    Examples:
    divergence probe -o here
    divergence probe -o here --quick                    # seconds: what each capture notes
    divergence probe -o here --terms 1024 --svg trees   # the trees as drawings
    divergence compare here there                       # facts that differ, then outputs

    Each order of additions is proven by replaying it bit by bit, or marked unverified.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o RUN")

    from divergence.arithmetic.api import probe as call
    from divergence.layout import print_lines
    from divergence.report.environment import probed_lines

    with progress_bars(quiet=output.silent) as progress:
        run = call(out=out, force=force, command=command, progress=progress, **options)
    if output.silent:
        show_briefly(run, json=output.json)
    else:
        print_lines(probed_lines(str(run.path), run.manifest, verbose=output.verbose))


def env(*, device: str = DEVICE, output: Output) -> None:
    """Show this machine as a run records it: device, CPU, versions and variables.

    No host name, no user and no file path; variables by an allow-list.

    Examples:
    divergence env
    divergence env --json > machine.json
    """
    import msgspec

    from divergence.comparison.result import strict_json
    from divergence.layout import print_lines
    from divergence.recording.machine import collect_environment
    from divergence.report.environment import environment_lines

    environment = collect_environment(device)
    if output.json:
        show(strict_json({"schema_version": 1, "environment": msgspec.to_builtins(environment)}))
    else:
        lines = environment_lines(environment)
        print_lines(lines[:2] if output.quiet else lines, whole=output.quiet)
