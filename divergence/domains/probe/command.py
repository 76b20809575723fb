"""`divergence probe`: what this machine's arithmetic does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from divergence.cli.answers import progress_bars, show_made
from divergence.document import Document, Headline, named
from divergence.errors import UsageError
from divergence.options.commands import DEVICE, FORCE, LABEL, OUT, OUTPUT, Output
from divergence.options.option import Options, option
from divergence.report.environment import arithmetic_sections
from divergence.run.command import command_line
from divergence.run.manifest import Manifest
from divergence.words import count


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Options):
    device: str = DEVICE
    quick: bool = option("--quick", "The short form, as every capture makes it.", default=False)
    terms: Sequence[int] = option(
        "--terms N",
        "Length of the sums whose order is looked for, a power of two up to 4096; "
        "repeatable. Default: 64, 1024 and 4096; with --quick 512.",
        default=(),
    )
    deterministic: bool = option(
        "--no-deterministic",
        "Probe the machine as it stands; else under the switches that a capture sets.",
        default=True,
    )
    svg: Path | None = option("--svg DIR", "Draw each tree there.", OUTPUT)
    label: str | None = LABEL


def probe(
    *,
    out: str | None = OUT,
    options: Annotated[dict[str, Any], ProbeOptions],
    force: bool = FORCE,
    output: Output,
    command: str | None,
) -> None:
    """Makes a run of facts with the inputs and outputs that they rest on: order of additions, width
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

    from divergence.domains.probe.api import probe as call

    with progress_bars(quiet=output.silent) as progress:
        run = call(out=out, force=force, command=command, progress=progress, **options)
    show_made(run, output, probed_document(str(run.path), run.manifest, verbose=output.verbose))


def probed_document(path: str, manifest: Manifest, *, verbose: bool) -> Document:
    """Return what `divergence probe` says when it is done."""
    trees = [fact for fact in manifest.arithmetic if fact.probe == "order"]
    proven = sum(fact.verified for fact in trees)
    text = (
        f"probed {path}: {count(len(manifest.arithmetic), 'fact')}; {proven} of "
        f"{count(len(trees), 'order')} of additions replayed bit by bit"
    )
    machine = named("machine", f"{manifest.environment.label}, on {manifest.settings.device}")
    again = command_line("probe", o="OTHER", note="on the other machine")
    return Document(
        headline=Headline("", text, "green", [machine]),
        sections=arithmetic_sections(manifest.arithmetic, verbose=verbose),
        next=[again, command_line("compare", path, "OTHER")],
    )
