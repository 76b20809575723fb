"""`divergence scores`: results of evaluations, paired document by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from divergence.cli.answers import exit_with, progress_bars, show, show_document, write_text
from divergence.cli.compare import HTML
from divergence.errors import UsageError
from divergence.options.commands import DEVICE, OUTPUT, TRUST, Output
from divergence.options.option import Options, option
from divergence.output import check_output

_READ, _CAPTURE = "What is read", "The flipped prompts as a run"
FORMATS = (
    "auto lm-eval evalscope opencompass inspect every-eval-ever lm-eval-results evalscope-report "
    "opencompass-summary plain"
).split()


@dataclass(frozen=True, kw_only=True)
class ScoresOptions(Options):
    band: str | None = option(
        "--band BAND",
        "Fail unless equal: 3% of A's score, 1.5pp, or 0.015. Told without failing: 3% and 5%.",
    )
    policy: str | None = option(
        "--policy FILE",
        "Fail by the table scores of a policy file, or of one by name. With --band: ci.",
    )
    format: str = option(
        "--format NAME", "What wrote it; auto looks.", _READ, choices=FORMATS, default="auto"
    )
    tasks: Sequence[str] = option(
        "--task NAME", "Tasks to compare, or globs; repeatable.", _READ, default=()
    )
    metrics: Sequence[str] = option(
        "--metric NAME", "Metrics to compare, or globs; repeatable.", _READ, default=()
    )
    filters: Sequence[str] = option(
        "--filter NAME", "Filters of lm-eval, or globs; repeatable.", _READ, default=()
    )
    cluster: str | None = option(
        "--cluster FIELD", "Documents that share this field depend on each other.", _READ
    )
    force: bool = option(
        "--force",
        "Pair although prompts or settings differ; replace an existing run.",
        default=False,
    )
    runs: tuple[str, str] | None = option(
        "--runs RUN_A RUN_B",
        "Runs of flipped prompts, as by --capture and then --like: why these flipped.",
    )
    capture: str | None = option(
        "--capture MODEL", "Record the flipped prompts here, with this model.", _CAPTURE
    )
    out: str | None = option("--out -o RUN", "The run to write.", _CAPTURE)
    num_prompts: int = option(
        "--num-prompts N", "At most so many prompts. Default: 8.", _CAPTURE, minimum=1, default=8
    )
    max_new_tokens: int | None = option(
        "--max-new-tokens N",
        "Tokens to generate. Default: 1 of multiple choice, else as capture does.",
        _CAPTURE,
    )
    dtype: str | None = option(
        "--dtype DTYPE", "As in capture. Default: that of the checkpoint.", _CAPTURE
    )
    device: str = DEVICE
    trust_remote_code: bool = TRUST


def scores(
    *,
    reference: str = option("A", "The reference's results: a folder or a file.", default=...),
    candidates: list[str] = option(
        "B", "The candidate's. With several, each is held against A.", default=...
    ),
    options: Annotated[dict[str, Any], ScoresOptions],
    html: Path | None = HTML,
    csv: Path | None = option("--csv FILE", "Also write one row a score; - is stdout.", OUTPUT),
    markdown: bool = option(
        "--markdown", "Print tables to paste into an issue.", OUTPUT, default=False
    ),
    output: Output,
) -> None:
    """Reads results of lm-evaluation-harness (--log_samples), evalscope, opencompass and inspect,
    and tables of id and score. Says equal within a band only where two one-sided tests show it,
    worse or better only beyond chance, and else how many documents would be needed. Of scores
    without documents (lm-eval without samples, evalscope's reports, opencompass's summary, whose
    models are named FILE#MODEL) the interval is that of separate samples.
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
    from divergence.domains.scores.scores import scores
    from divergence.domains.scores.show import scores_csv, scores_documents
    from divergence.layout import BLANK, print_lines

    with progress_bars(quiet=output.silent or markdown) as progress:
        report = scores(reference, *candidates, progress=progress, **options)
    if html is not None:
        report.to_html(html)
    if csv is not None:
        write_text(scores_csv(report), csv, what="CSV")
    if output.json:
        show(report.to_json(indent=2))
    elif markdown:
        show(report.to_markdown())
    elif str(csv) != "-":
        for number, document in enumerate(scores_documents(report, verbose=output.verbose)):
            print_lines([BLANK] if number and not output.quiet else [])
            show_document(document, output, json=report.to_json)
    if any(candidate.verdict == "incomparable" for candidate in report.candidates):
        exit_with(2)
    if report.passed is False:
        exit_with(1)
