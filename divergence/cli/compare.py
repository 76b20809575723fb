"""`divergence compare`: where two runs part, and why."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from divergence.cli.answers import (
    exit_with,
    progress_bars,
    show,
    show_document,
    show_json,
    write_text,
)
from divergence.cli.signature import Added, settings
from divergence.domain import Files, additions, placed
from divergence.errors import UsageError
from divergence.options.commands import LIMITS, OUTPUT, CompareOptions, Output
from divergence.options.option import but, fields_of, option
from divergence.output import check_output
from divergence.run.command import command_line
from divergence.run.storage import ARCHIVES
from divergence.words import printable

if TYPE_CHECKING:
    from divergence.comparison.result import Report
    from divergence.fleet.result import Matrix

HTML = option(
    "--html FILE", "Also write the answer as a page for a browser: one file, to be sent.", OUTPUT
)

EXIT_CODES = {
    "identical": 0,
    "within_floor": 0,
    "systematic": 1,
    "localized": 1,
    "drift": 1,
    "nonfinite": 1,
    "incomparable": 2,
    # an abstention: neither a pass nor a divergence, so a script must not take it for either
    "undetermined": 2,
}


def compare(
    *,
    reference: str = option("A", "Run A.", default=...),
    candidates: list[str] | None = option(
        "B",
        "Run B, or several, each compared with A. Left out: A's decode steps "
        "against its whole pass.",
    ),
    options: Annotated[dict[str, Any], CompareOptions],
    policy: str | None = but(LIMITS, after="floor"),
    explain_token: bool = option(
        "--explain-token",
        "Run the model here: how far the flagged block's error alone moves the token.",
        "Explain",
        default=False,
    ),
    model: str | None = option(
        "--model PATH", "Where this machine has the model, for --explain-token.", "Explain"
    ),
    exit_code: bool = option(
        "--exit-code", "Exit 1 if the runs diverge, 2 without a verdict.", default=False
    ),
    every: bool = option("--all", "Every site, nothing left out.", OUTPUT, default=False),
    csv: Path | None = option(
        "--csv FILE",
        "Also write one line per compared site; - is stdout, in place of the report.",
        OUTPUT,
    ),
    html: Path | None = HTML,
    svg: Path | None = option(
        "--svg FILE", "Also write the error of each block as a picture.", OUTPUT
    ),
    png: Path | None = option("--png FILE", "The same picture as PNG (extra plot).", OUTPUT),
    reports: Path | None = option(
        "--reports DIR", "Of many runs: write each pair's report there as JSON.", OUTPUT
    ),
    added: Added,
    output: Output,
) -> None:
    """A is what the others are held against, as in diff old new. Neither the model nor an
    accelerator is needed, except for --explain-token. With one run, its decode steps are
    compared with one forward over the whole sequence, which capture --whole has made; a run of a
    suite that needs no second is held to the definitions.
    With more than two, each is compared with the first: one row a run, and which one is odd.

    Examples:
    divergence compare a b
    divergence compare a                # captured with --whole: is it the cache?
    divergence compare a b --all | less
    divergence compare a b --truth truth            # divergence truth a -o truth
    divergence compare a b --explain-token          # the model runs here: why a token flipped
    divergence compare a b --json > report.json
    divergence compare a b --html report.html       # a page to send: one file, works offline
    divergence compare a b --svg error.svg --png error.png    # its main curve, to put anywhere
    divergence compare a b --quiet --exit-code || echo "not the same"
    divergence compare a b c d                      # a fleet: one row a machine, who is odd
    divergence compare a b c d --reports pairs      # with the report of each pair in a file
    torchrun --nproc-per-node 8 -m divergence compare a b    # the work shared by 8 processes

    With --exit-code: 0 for IDENTICAL and OK (in the JSON: identical, within_floor); 1 for
    DIVERGED (localized, systematic), DRIFTED (drift) and NAN OR INF (nonfinite); 2 for STOPPED
    (incomparable) and NO ANSWER (undetermined), which say neither. Of many runs: 1 if any
    diverges, else 2 if any could not be told. Without it: 2 if one could not be compared.
    """
    domain, files = _files([reference, *(candidates or ())])
    if files is not None:
        given = [
            field.option.names[0]
            for field in fields_of(CompareOptions)
            if field.is_given(options.get(field.name))
        ]
        others = {
            "--policy": policy,
            "--explain-token": explain_token,
            "--model": model,
            "--all": every,
            "--csv": csv,
            "--html": html,
            "--svg": svg,
            "--png": png,
            "--reports": reports,
        }
        given += [name for name, value in others.items() if value]
        named = f"{' and '.join(given)}: of runs, and here {files.noun} are compared"
        _refuse(given, named, hint="leave it out")
        _refuse(
            len(candidates or ()) > 1,
            f"of files of {files.noun} two are compared at a time",
            hint=command_line("compare", reference, (candidates or [""])[0]),
        )
        placed(files.command)(
            reference,
            candidates[0] if candidates else None,
            exit_code=exit_code,
            output=output,
            **added.get(domain, {}),
        )
        return
    for other, more in additions("compare").items():
        if more.files is not None:
            for name in added.get(other, ()):
                flag, noun = f"--{name.replace('_', '-')}", more.files.noun
                raise UsageError(f"{flag} is for two files of {noun}, and these are runs")
    candidate = candidates[0] if candidates else None
    many = len(candidates or ()) > 1
    _refuse(
        many and explain_token,
        "--explain-token looks at two runs",
        hint="divergence compare A B --explain-token",
    )
    _refuse(
        many and csv is not None,
        "--csv is the table of two runs, and there are more",
        hint="--reports DIR writes each pair's whole report, --json prints all of them",
    )
    _refuse(
        many and (svg is not None or png is not None),
        "--svg and --png are the picture of two runs, and there are more",
        hint="divergence compare A B --svg error.svg",
    )
    _refuse(
        reports is not None and not many,
        "--reports is for more than two runs",
        hint="divergence compare A B --json > report.json",
    )
    _refuse(
        output.json and csv is not None and str(csv) == "-",
        "--json and --csv - both want stdout",
        hint="give --csv a file",
    )
    _refuse(
        explain_token and candidate is None,
        "--explain-token needs two runs, one of them captured like the other",
        hint="divergence compare A B --explain-token",
    )
    _refuse(
        model is not None and not explain_token,
        "--model means nothing to a comparison, which runs no model",
        hint="add --explain-token, or leave out --model",
    )
    check_output(html, what="page")
    check_output(svg, what="picture")
    check_output(png, what="picture")
    check_output(None if str(csv) == "-" else csv, what="CSV")
    if png is not None:
        from divergence.html.picture import png_library

        png_library()  # before the work, not behind it
    if candidate is not None:
        options = {**settings("compare"), **options}

    from divergence.comparison.measure.processes import shared_with_ranks
    from divergence.gate.policy import load_policy

    options["thresholds"] = load_policy(policy).thresholds
    device = options.pop("device", "cpu")
    if many:
        from divergence.fleet.many import compare_many

        with shared_with_ranks(device) as measuring, progress_bars(quiet=output.silent) as progress:
            if measuring is None:  # a rank of torchrun that only helps: the first one reports
                return
            matrix = compare_many(
                reference,
                candidates or (),
                reports=reports,
                device=measuring,
                progress=progress,
                keep_reports=output.json or output.verbose,
                **options,
            )
        if html is not None:
            matrix.to_html(html)
        _show_matrix(matrix, output, every=every)
        # 1 needs a divergence and the option; 2 a run that could not be compared, or with the
        # option one that could not be judged. A divergence stands whatever else failed
        codes = {EXIT_CODES[row.verdict] if row.verdict else 2 for row in matrix.rows}
        if not exit_code:
            codes = {2 if row.problem is not None else 0 for row in matrix.rows}
        exit_with(1 if 1 in codes else max(codes, default=0))

    from divergence.comparison.api import compare as compare_runs

    with shared_with_ranks(device) as measuring, progress_bars(quiet=output.silent) as progress:
        if measuring is None:  # as above
            return
        report = compare_runs(reference, candidate, device=measuring, progress=progress, **options)
        if explain_token and candidate is not None:
            from divergence.experiments.explain import explain_token as explain

            report = explain(
                report,
                reference,
                candidate,
                name_map=options.get("name_map"),
                model=model,
                progress=progress,
            )
    if csv is not None:
        from divergence.report.environment import report_csv

        write_text(report_csv(report), csv, what="CSV")
    if html is not None:
        report.to_html(html)
    if csv is None or str(csv) != "-":
        show_report(report, output, every=every)
        if html is not None and not output.silent:
            show(f"the page to send: {printable(str(html))}")
    for kind, file in (("svg", svg), ("png", png)):  # last: there may be no curve to draw
        if file is not None:
            report.plot().write(file, kind)
    exit_as(report.verdict.kind, asked=exit_code)


def _refuse(wrong: object, message: str, *, hint: str) -> None:
    if wrong:
        raise UsageError(message, hint=hint)


def _files(paths: list[str]) -> tuple[str, Files | None]:
    """The domain that compares these, where one of them is no run. A run's name loads none."""
    others = [
        path
        for path in paths
        if "://" not in path
        and not path.endswith(ARCHIVES)
        and not (Path(path).expanduser() / "manifest.json").exists()
    ]
    for name, more in additions("compare").items() if others else ():
        if more.files is not None and any(map(placed(more.files.recognise), others)):
            return name, more.files
    return "", None


def _show_matrix(matrix: Matrix, output: Output, *, every: bool) -> None:
    from divergence.layout import BLANK, heading, print_lines
    from divergence.report.matrix import matrix_document
    from divergence.report.summary import report_lines

    document = matrix_document(matrix, all_runs=every)
    show_document(document, output, json=partial(matrix.to_json, indent=2))
    for row in matrix.rows if output.verbose and not output.json else ():
        if row.report is not None:
            print_lines([BLANK, heading(f"== {row.path}"), BLANK])
            print_lines(report_lines(row.report, all_sites=every, verbose=True))


def show_report(
    report: Report, output: Output, *, every: bool = False, more: str = "add -v"
) -> None:
    """The report in the form that was asked for. ``more``: what shows the rest of it."""
    from divergence.layout import print_lines
    from divergence.report.screen import screen_lines
    from divergence.report.summary import report_lines, verdict_lines

    if output.json:
        from divergence.comparison.result import json_parts

        show_json(json_parts(report))
    elif output.quiet:
        print_lines(verdict_lines(report), whole=True)
    elif every or output.verbose:
        print_lines(report_lines(report, all_sites=every, verbose=output.verbose))
    else:
        print_lines(screen_lines(report, more=more))


def exit_as(kind: str, *, asked: bool) -> None:
    """The exit code of a verdict, where it is ``asked`` for; else that of runs that could not be
    compared."""
    if asked:
        exit_with(EXIT_CODES[kind])
    if kind == "incomparable":
        exit_with(2)
