"""`divergence inspect`: what a run holds."""

from __future__ import annotations

from typing import Annotated

from divergence.cli.shell.options import show
from divergence.cli.shell.progress import progress_bars
from divergence.errors import RunFormatError
from divergence.options.option import Option
from divergence.options.shared import Json, Quiet, Verbose

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence inspect a

  divergence inspect a --site model.layers.3.mlp:out

  divergence inspect a --verify
"""


def command(
    run: Annotated[str, Option("RUN", "The run to look at.")],
    site: Annotated[
        str | None, Option("--site SITE", "The tensors of one site, or of a pattern.")
    ] = None,
    verify: Annotated[
        bool, Option("--verify", "Read every byte and check it; exit 2 if one is wrong.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what a run holds: what ran, where, whether it finished, and which sites.

    Needs neither the model nor an accelerator; without --verify it reads no tensor. Where
    operators were recorded, it says in which dtype each part of the model ran.
    """
    import msgspec

    from divergence.analyses.precision.audit import audit_runs
    from divergence.layout.terminal import print_lines
    from divergence.report.inspection import run_lines, select_records, site_lines, verified_text
    from divergence.report.machine import strict_json
    from divergence.run.reader import Run
    from divergence.run.schema.contents import parts_of, why_no_bytes

    opened = Run.open(run)
    records = opened.records if site is None else select_records(opened.records, site)
    audit = None if site is not None else audit_runs(opened)
    problems: list[str] | None = None
    kept = sum(bool(parts_of(record)) for record in opened.records) if verify else 0
    if verify:
        with progress_bars(quiet=quiet or json) as progress:
            problems = opened.verify(progress=progress)
    if json:
        answer = {
            "schema_version": 1,
            "path": str(opened.path),
            "manifest": msgspec.to_builtins(opened.manifest),
            "records": msgspec.to_builtins(records),
        }
        if audit is not None:
            answer["audit"] = msgspec.to_builtins(audit)
        if problems is not None:
            answer["problems"] = problems
            answer["num_stored"] = kept
        show(strict_json(answer))
    else:
        if site is not None:
            print_lines(site_lines(records))
        elif not quiet:
            print_lines(
                run_lines(str(opened.path), opened.manifest, records, audit=audit, verbose=verbose)
            )
        else:
            print_lines(run_lines(str(opened.path), opened.manifest, records)[:1])
        if problems is not None:
            # after the answer, since it is what --verify was asked for
            show(
                "\n".join(["verified: DAMAGED", *(f"  {text}" for text in problems)])
                if problems
                else verified_text(kept, len(opened.records), why_no_bytes(opened.manifest))
            )
    if problems:
        raise RunFormatError(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the run",
            where=str(opened.path),
            hint="copy it again, or capture again",
        )
