"""Commands for runs and what is in them: inspect, bundle, import, pack, unpack, replay, repro; and
for this machine: env."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from divergence.cli.answers import (
    answer_json,
    progress_bars,
    show_captured,
    show_copy,
    show_document,
)
from divergence.cli.signature import settings
from divergence.errors import RunFormatError, UsageError
from divergence.options.commands import (
    DEVICE,
    FORCE,
    EvidenceOptions,
    Output,
    ReplayOptions,
    ReproOptions,
)
from divergence.options.option import option
from divergence.run.command import command_line

# `divergence replay` and `repro`: the recorded operators of a run, each alone.


def replay(
    *,
    run: str = option("RUN", "A run that holds operators.", default=...),
    out: str | None = option("--out -o RUN2", "Directory, archive or URL; needed."),
    options: Annotated[dict[str, Any], ReplayOptions],
    force: bool = FORCE,
    output: Output,
    command: str | None,
) -> None:
    """Makes a run that compare reads like any other. No error is inherited from one operator to the
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
    show_captured(result, output, like=run)


def repro(
    *,
    run: str = option("RUN", "A run that holds operators.", default=...),
    out: str | None = option("--out -o DIR", "Directory to write; needed."),
    site: str | None = option("--site SITE", "The operator's site; needed."),
    options: Annotated[dict[str, Any], ReproOptions],
    output: Output,
) -> None:
    """The script needs torch and safetensors alone, neither the model nor this tool.

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

    from divergence.ops.reproducer import repro as call
    from divergence.report.localization import reproducer_document

    with progress_bars(quiet=output.silent) as progress:
        made = call(run, site=site, out=out, progress=progress, **options)
        for note in made.notes:
            progress("note", 0, None, note)
    show_document(
        reproducer_document(str(made.path), made.title, made.files),
        output,
        json=lambda: answer_json(**dataclasses.asdict(made)),
        quiet=str(made.path),
    )


# `divergence inspect`, `pack`, `unpack`, `bundle`: runs as they are stored and sent.


def inspect(
    *,
    run: str = option("RUN", "The run to look at.", default=...),
    site: str | None = option("--site SITE", "The tensors of one site, or of a pattern."),
    verify: bool = option(
        "--verify", "Read every byte and check it; exit 2 if one is wrong.", default=False
    ),
    output: Output,
) -> None:
    """Needs neither the model nor an accelerator; without --verify it reads no tensor. Where
    operators were recorded, it says in which dtype each part of the model ran.

    Examples:
    divergence inspect a
    divergence inspect a --site model.layers.3.mlp:out
    divergence inspect a --verify
    """
    from divergence.analyses.precision.audit import audit_runs
    from divergence.document import named
    from divergence.report.inspection import (
        run_document,
        select_records,
        site_document,
        verified_text,
    )
    from divergence.run.contents import num_kept, why_no_bytes
    from divergence.run.reader import Run

    with progress_bars(quiet=output.silent):  # ten million records take half a minute
        opened = Run.open(run)
        path, manifest, records = str(opened.path), opened.manifest, opened.records
    audit = problems = None
    if site is None:
        audit = audit_runs(opened)
        document = run_document(path, manifest, records, audit=audit, verbose=output.verbose)
    else:
        records = select_records(records, site)
        document = site_document(path, records)
    parts: dict[str, Any] = {"path": path, "manifest": manifest, "records": list(records)}
    parts |= {} if audit is None else {"audit": audit}
    if verify:
        with progress_bars(quiet=output.silent) as progress:
            problems = opened.verify(progress=progress)
        kept = num_kept(opened.records)
        parts |= {"problems": problems, "num_stored": kept}
        verified = [verified_text(kept, len(opened.records), why_no_bytes(manifest))]
        label = "problem" if problems else "verified"
        facts = [named(label, text) for text in problems or verified]
        top = dataclasses.replace(document.headline, facts=facts)
        document = dataclasses.replace(document, headline=top)
        if problems:  # nothing is to be done with such a run
            top = dataclasses.replace(top, word="DAMAGED", style="bold red")
            document = dataclasses.replace(document, headline=top, next=())
    show_document(document, output, json=lambda: answer_json(**parts))
    if problems:
        raise RunFormatError(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the run",
            where=str(opened.path),
            hint="copy it again, or capture again",
        )


def pack(
    *,
    run: str = option("RUN", "The run to pack: directory, archive or URL.", default=...),
    out: str | None = option(
        "--out -o FILE", "A .tar or .zip to write, here or at a URL. Default: RUN.tar."
    ),
    force: bool = FORCE,
    output: Output,
) -> None:
    """One run always gives the same file, bit for bit. It appears whole or not at all.

    Examples:
    divergence pack a
    divergence pack a -o a.zip
    divergence pack a -o s3://bucket/runs/a.tar
    """
    from divergence.run.target import pack

    with progress_bars(quiet=output.silent) as progress:
        made = pack(run, out=out, force=force, progress=progress)
    show_copy("packed", made, output)


def unpack(
    *,
    run: str = option("RUN", "The run to unpack: archive, URL or directory.", default=...),
    out: str | None = option(
        "--out -o DIR", "Directory to write. Default: RUN without .tar or .zip."
    ),
    force: bool = FORCE,
    output: Output,
) -> None:
    """Needed only to read often what is far away: all commands take archives and URLs as they
    are. The directory appears whole or not at all.

    Examples:
    divergence unpack a.tar
    divergence unpack a.tar -o elsewhere
    divergence unpack s3://bucket/runs/a -o a
    """
    from divergence.run.target import unpack

    with progress_bars(quiet=output.silent) as progress:
        made = unpack(run, out=out, force=force, progress=progress)
    show_copy("unpacked", made, output)


def bundle(
    *,
    reference: str = option("A", "Run A.", default=...),
    candidate: str = option("B", "Run B.", default=...),
    options: Annotated[dict[str, Any], EvidenceOptions],
    out: str | None = option("--out -o FILE", "The .zip to write; needed."),
    force: bool = option("--force", "Replace an existing file.", default=False),
    output: Output,
) -> None:
    """README.md, report.md (the first screen and both machines), report.json, the report as a page,
    its picture, both manifests, and what localize has left of this pair beside the runs: its answer
    and the operator's reproducer. The runs are not in it; paths, keys and the names of this host
    and user are taken out of all text. Whatever the verdict, the exit code is 0.

    Examples:
    divergence bundle a b -o bug.zip
    divergence bundle a b -o bug.zip --truth truth
    """
    from divergence.document import Document, named
    from divergence.report.summary import verdict_headline
    from divergence.sending import bundle
    from divergence.words import size

    if out is None:
        raise UsageError("a bundle is a .zip file", hint="-o bug.zip")
    given = {**settings("compare"), **options}
    with progress_bars(quiet=output.silent) as progress:
        made = bundle(reference, candidate, out=out, force=force, progress=progress, **given)
    top = verdict_headline(made.report)
    files = named("bundled", f"{out}: {', '.join(made.files)}; {size(made.num_bytes)}")
    show_document(
        Document(headline=dataclasses.replace(top, facts=[*top.facts, files])),
        output,
        json=lambda: answer_json(
            path=out,
            files=sorted(made.files),
            num_bytes=made.num_bytes,
            verdict=made.report.verdict,
        ),
        quiet=out,
    )


# `divergence env`: this machine.


def env(*, device: str = DEVICE, output: Output) -> None:
    """No host name, no user and no file path; variables by an allow-list.

    Examples:
    divergence env
    divergence env --json > machine.json
    """
    from divergence.recording.machine import collect_environment
    from divergence.report.environment import machine_document

    with progress_bars(quiet=output.silent):  # a driver may take long to answer
        environment = collect_environment(device)
    document = machine_document(environment, brief=output.quiet)
    show_document(document, output, json=lambda: answer_json(environment=environment))
