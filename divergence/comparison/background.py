"""Opens a report's runs once more, for what its page shows and the report does not hold."""

from __future__ import annotations

import numpy as np

from divergence.comparison.align import Piece, Pieces, compared_passes, pieces_in, why_no_pair
from divergence.comparison.result import Background, Positions, Report, RunSummary
from divergence.errors import RunError, first_line
from divergence.facts import Fact, fact, sentence
from divergence.numerics.arrays import wide
from divergence.run.reader import Run

_MOST_ELEMENTS = 64_000_000
"""Of both sides' block outputs in one prefill: more are not read for a picture."""


def background_of(report: Report) -> Background:
    """Runs that have gone, or have been replaced by others since, are left out, with a note."""
    notes: list[Fact] = []
    a, b = (_opened(summary, notes) for summary in (report.reference, report.candidate))
    positions = None
    if a is not None and b is not None:
        a.set_fallback(b)
        b.set_fallback(a)
        positions = _positions(report, a, b)
    background = Background(
        reference=None if a is None else a.manifest,
        candidate=None if b is None else b.manifest,
        positions=positions,
        notes=tuple(map(sentence, notes)),
    )
    for run in (a, b):
        if run is not None:
            run.close()
    return background


def _opened(summary: RunSummary, notes: list[Fact]) -> Run | None:
    try:
        run = Run.open(summary.path)
    except RunError as error:
        message = first_line(error)
        notes.append(fact("measure.could_not_be_opened", run=summary.path, message=message))
        return None
    if run.manifest.id != summary.id:
        run.close()
        notes.append(fact("measure.holds_another", run=summary.path))
        return None
    return run


def _positions(report: Report, a: Run, b: Run) -> Positions | None:
    """The error at each token of one prompt's prefill: the onset's, or that of the worst site."""
    passes = {label: (in_a, in_b) for label, in_a, in_b in compared_passes(a.manifest, b.manifest)}
    label = "anchored" if "anchored" in passes else "free"
    sites = [  # blocks' outputs in the first forward, with rows that are tokens
        site
        for site in report.sites
        if site.pass_ == label
        and site.role == "block"
        and site.site == f"{site.block}:out"
        and (site.floor or site.identical)
        and site.step == 0
        and len(site.shape) == 3
    ]
    divided = a.manifest.mesh is not None or b.manifest.mesh is not None
    size = 2 * sum(site.numel for site in sites)
    if not sites or divided or label not in passes or size > _MOST_ELEMENTS:
        return None
    worst = max(sites, key=lambda site: site.usage or site.ratio or 0.0)
    sample = worst.sample if worst.worst_sample is None else worst.worst_sample
    if report.verdict.onset is not None:
        sample = report.verdict.onset.sample
    sites.sort(key=lambda site: (site.sample != sample, site.order))
    floors: dict[str, float] = {}
    for site in sites:
        if site.block is not None and site.floor:
            floors.setdefault(site.block, site.floor)
    in_a, in_b = passes[label]
    wanted = {site.site for site in sites}, {site.candidate_site or site.site for site in sites}
    pieces = pieces_in(a, in_a, split=True, sites=wanted[0])
    other = pieces_in(b, in_b, split=True, sites=wanted[1])
    rows: dict[str, list[float | None]] = {}
    names: list[str] = []
    for site in sites:
        piece_a = pieces.get((sample, 0, site.site))
        piece_b = other.get((sample, 0, site.candidate_site or site.site))
        if site.block is None or piece_a is None or piece_b is None or site.block in rows:
            continue
        errors = _errors(Pieces(a, b), piece_a, piece_b)
        if errors is not None and (not names or len(errors) == len(names)):
            names = names or [str(n) for n in piece_a.record.positions or range(len(errors))]
            scale = floors.get(site.block, 1.0)  # without a floor all bits are equal
            rows[site.block] = [None if np.isnan(x) else float(x) / scale for x in errors]
    if not rows or len(names) < 2:
        return None
    return Positions(sample=sample, tokens=names, blocks=list(rows), floors=list(rows.values()))


def _errors(pieces: Pieces, piece_a: Piece, piece_b: Piece) -> np.ndarray | None:
    """‖a_t - b_t‖ / ‖a_t‖ of each token; 0 for 0/0."""
    a, b = pieces.reference, pieces.candidate
    readable = a.has_bytes(piece_a.record) and b.has_bytes(piece_b.record)
    if not readable or why_no_pair(piece_a, piece_b, exactly=True) is not None:
        return None
    x, y = (wide(pieces.array(run, piece)) for run, piece in ((a, piece_a), (b, piece_b)))
    if x.ndim != 3 or x.shape != y.shape or x.shape[0] != 1:
        return None
    with np.errstate(all="ignore"):
        apart, size = (np.linalg.norm(part[0], axis=-1) for part in (x - y, x))
        errors: np.ndarray = np.where(apart == 0, 0.0, apart / size)
    return errors
