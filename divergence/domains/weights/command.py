"""`divergence weights`: two checkpoints, parameter by parameter."""

from __future__ import annotations

from functools import partial

from divergence.cli.answers import exit_with, progress_bars, show_document
from divergence.document import Column, Document, Headline, Section, Sentence, Table, named
from divergence.domains.weights.result import WeightsRelation, WeightsReport, WeightsSide
from divergence.options.commands import Output
from divergence.options.option import option
from divergence.words import count, list_names


def weights(
    *,
    reference: str = option("A", "A checkpoint: a directory, a file, or a run.", default=...),
    candidate: str = option("B", "Another one.", default=...),
    exit_code: bool = option("--exit-code", "Exit 1 if the weights are other ones.", default=False),
    output: Output,
) -> None:
    """No model is loaded and no code is run. Each parameter that is not equal is put down to what
    relates the two: another dtype, a rounding, rows in another order, a transpose, parts that one
    side fuses, a factor, a low rank, a grid; or nothing.

    Examples:
    divergence weights ./hf-model ./converted
    divergence weights ./hf-model model.gguf               # names of GGUF are read as the model's
    divergence weights ./adapter ./merged                  # a LoRA adapter: is it merged there?
    divergence weights ./base ./merged --exit-code || echo "other weights"

    Exit codes: 0 done, whatever was found; 1 with --exit-code where the weights are other ones;
    2 a checkpoint cannot be read.
    """
    from divergence.domains.weights.compare import compare_weights

    with progress_bars(quiet=output.silent) as progress:
        report = compare_weights(reference, candidate, progress=progress)
    show_document(weights_document(report), output, json=partial(report.to_json, indent=2))
    if exit_code and not report.same:
        exit_with(1)


def weights_document(report: WeightsReport) -> Document:
    """Return what is shown of it."""
    total = count(report.num_compared, "parameter")
    others = report.others
    differing = sum(relation.num_parameters for relation in others if relation.name != "alone")
    if report.equal:
        word, style, text = "IDENTICAL", "bold green", f"equal bit for bit in {total}"
    elif report.same:
        word, style = "SAME WEIGHTS", "bold green"
        text = _several(report.relations, f"{total}, stored otherwise: ")
    elif all(relation.name == "ungrouped" for relation in others):
        word, style = "NO ANSWER", "bold yellow"
        text = _several(others, f"{differing} of {total}: ")
    elif differing:
        word, style = "OTHER WEIGHTS", "bold red"
        text = _several(others, f"{differing} of {total}: ")
    else:
        word, style = "PARTS MISSING", "bold red"
        text = _several(others, f"the {total} of both hold the same weights; ")
    adapters = [
        named(letter, _side(side))
        for letter, side in (("A", report.reference), ("B", report.candidate))
    ]
    adapters += [
        named("adapter" if what.code == "weights.adapter" else "names", text)
        for what, text in zip(report.facts, report.matching, strict=True)
    ]
    words = {"ungrouped": "unknown"}
    rows = [
        (words.get(each.name, "same" if each.same else "other"), each.num_parameters, each.names)
        for each in report.relations
    ]
    table = Table(
        columns=(
            "weights",
            Column("parameters", "{:,}".format),
            Column("which", partial(list_names, most=3), left=True),
        ),
        rows=[*rows, *([("same", report.num_equal, ["the others"])] if report.num_equal else [])],
        below={
            number: [Sentence(each.text + _spread(each.percent))]
            for number, each in enumerate(report.relations)
        }
        | ({len(rows): [Sentence("equal bit for bit")]} if report.num_equal else {}),
    )
    return Document(
        headline=Headline(word, text, style),
        known=adapters,
        sections=[] if report.equal else [Section(title="parameters", body=[table])],
    )


def _several(relations: list[WeightsRelation], before: str) -> str:
    """The first of them, and how many parameters are of other kinds."""
    first, *more = relations
    rest = sum(relation.num_parameters for relation in more)
    which = f"{first.num_parameters} " if more else ""
    name = first.first if first.num_parameters == 1 else ", ".join(first.names[:2])
    text = f"{before}{which}{first.text} ({name}{', …' * (len(first.names) > 2)})"
    return text + (f"; {rest} otherwise, see below" if more else "")


def _side(side: WeightsSide) -> str:
    dtypes = ", ".join(
        dtype if len(side.dtypes) == 1 else f"{dtype} ({num})" for dtype, num in side.dtypes.items()
    )
    return (
        f"{side.source}: {side.form}, {count(side.num_parameters, 'parameter')}, "
        f"{side.num_elements / 1e6:,.1f} M numbers, {dtypes}"
    )


def _spread(percent: list[float] | None) -> str:
    """Show the spread of several that are not equally far apart."""
    if percent is None or f"{percent[0]:.2g}" == f"{percent[1]:.2g}":
        return ""
    return f" (from {percent[0]:.2g} to {percent[1]:.2g}%)"
