"""`divergence scores`: results of evaluations, paired document by document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from divergence.cli.answers import exit_with, progress_bars, show, write_text
from divergence.cli.compare import HTML
from divergence.errors import UsageError
from divergence.options.commands import OUTPUT, Device, Option, Output, TrustRemoteCode
from divergence.output import check_output

_READ, _CAPTURE = "What is read", "The flipped prompts as a run"
FORMATS = ("auto", "lm-eval", "evalscope", "opencompass", "inspect", "plain")


def scores(
    *,
    reference: Annotated[str, Option("A", "The reference's results: a folder or a file.")],
    candidates: Annotated[
        list[str], Option("B", "The candidate's. With several, each is held against A.")
    ],
    band: Annotated[
        str | None,
        Option(
            "--band BAND",
            "Fail unless equal: 3% of A's score, 1.5pp, or 0.015. Told without failing: 3% and 5%.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        Option(
            "--policy FILE",
            "Fail by the table scores of a policy file, or of one by name. With --band: ci.",
        ),
    ] = None,
    format: Annotated[
        str, Option("--format NAME", "What wrote it; auto looks.", _READ, choices=FORMATS)
    ] = "auto",
    tasks: Annotated[
        Sequence[str], Option("--task NAME", "Tasks to compare, or globs; repeatable.", _READ)
    ] = (),
    metrics: Annotated[
        Sequence[str], Option("--metric NAME", "Metrics to compare, or globs; repeatable.", _READ)
    ] = (),
    filters: Annotated[
        Sequence[str], Option("--filter NAME", "Filters of lm-eval, or globs; repeatable.", _READ)
    ] = (),
    cluster: Annotated[
        str | None,
        Option("--cluster FIELD", "Documents that share this field depend on each other.", _READ),
    ] = None,
    force: Annotated[
        bool,
        Option("--force", "Pair although prompts or settings differ; replace an existing run."),
    ] = False,
    runs: Annotated[
        tuple[str, str] | None,
        Option(
            "--runs RUN_A RUN_B",
            "Runs of flipped prompts, as by --capture and then --like: why these flipped.",
        ),
    ] = None,
    capture: Annotated[
        str | None,
        Option("--capture MODEL", "Record the flipped prompts here, with this model.", _CAPTURE),
    ] = None,
    out: Annotated[str | None, Option("--out -o RUN", "The run to write.", _CAPTURE)] = None,
    num_prompts: Annotated[
        int, Option("--num-prompts N", "At most so many prompts.", _CAPTURE, minimum=1)
    ] = 8,
    max_new_tokens: Annotated[
        int | None,
        Option(
            "--max-new-tokens N",
            "Tokens to generate. Default: 1 of multiple choice, else as capture does.", _CAPTURE,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        Option("--dtype DTYPE", "As in capture. Default: that of the checkpoint.", _CAPTURE),
    ] = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    html: Annotated[Path | None, HTML] = None,
    csv: Annotated[
        Path | None, Option("--csv FILE", "Also write one row a score; - is stdout.", OUTPUT)
    ] = None,
    markdown: Annotated[
        bool, Option("--markdown", "Print tables to paste into an issue.", OUTPUT)
    ] = False,
    output: Output,
) -> None:  # fmt: skip
    """Compare benchmark scores document by document: is 41.4 against 39.9 a difference?

    Reads results of lm-evaluation-harness (--log_samples), evalscope, opencompass and inspect,
    and tables of id and score. Says equal within a band only where two one-sided tests show it,
    worse or better only beyond chance, and else how many documents would be needed.
    Needs the extra scores.

    Examples:
    divergence scores gpu npu                         # result folders of one tool
    divergence scores gpu npu --band 3%               # a gate: exit 1 if worse or undecided
    divergence scores gpu npu1 npu2 --task gsm8k --filter strict-match
    divergence scores gpu npu --cluster passage_id    # questions about one text depend on it
    divergence scores a.csv b.csv --json > scores.json
    divergence scores gpu npu --capture ./model -o flips  # then --like flips on the other machine
    divergence scores gpu npu --runs flips flips-b    # why these flipped, and compare for the layer

    Exit codes: 0 done; with --band or --policy 0 only if it is met, else 1; 2 nothing could be
    compared.
    """
    if sum((output.json, markdown, str(csv) == "-")) > 1:
        raise UsageError("--json, --markdown and --csv - all want stdout", hint="give one of them")
    check_output(html, what="page")
    check_output(None if str(csv) == "-" else csv, what="CSV")
    from divergence.evaluations.api import scores
    from divergence.evaluations.show import scores_csv, scores_lines, scores_markdown
    from divergence.layout import print_lines

    first, *others = candidates
    with progress_bars(quiet=output.silent or markdown) as progress:
        report = scores(
            reference, first, *others, format=format, band=band, policy=policy, tasks=tasks,
            metrics=metrics, filters=filters, cluster=cluster, force=force, runs=runs or (),
            capture=capture, out=out, num_prompts=num_prompts, max_new_tokens=max_new_tokens,
            dtype=dtype, device=device, trust_remote_code=trust_remote_code, progress=progress,
        )  # fmt: skip
    if html is not None:
        report.to_html(html)
    if csv is not None:
        write_text(scores_csv(report), csv, what="CSV")
    if output.json:
        show(report.to_json(indent=2))
    elif markdown:
        show(scores_markdown(report))
    elif str(csv) != "-":
        print_lines(scores_lines(report, brief=output.quiet, verbose=output.verbose))
    if any(candidate.verdict == "incomparable" for candidate in report.candidates):
        exit_with(2)
    if report.passed is False:
        exit_with(1)
