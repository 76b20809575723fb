"""explain_token(): how far the flagged block's error alone moves the logits that decide a token.

The healthy side's run is repeated on this machine twice, its tokens forced: as it is (baseline),
and with the guilty side's error of the block added to that block's output in every forward up to
the flip (``Injection``). With m = logit of the reference's token minus that of the
candidate's, at the flip,

    share = (m(injected) - m(baseline)) / (m(guilty) - m(healthy))

is how much of what moved m between the two runs this block's error explains: 1 for a single
fault, near 0 for a block that has nothing to do with it. It may exceed 1 where other errors
push back, and says little where the two runs' m are as near as rounding.

The error is that of the anchored pass, made from recorded inputs; in the free run the block's
inputs have errors of their own, and what the block makes of those is not added.
The healthy side is the one that the verdict does not blame; the reference where it blames none.
The baseline must repeat it: bit for bit, or at least to a tenth of what is to be explained (which
is noted). Otherwise another machine's model is looked at, and nothing is said.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from divergence.analyses.tokens.find import comparable_places
from divergence.comparison.align import PromptStep, align, load_name_map, logits_row, opened
from divergence.comparison.result import Explanation, Report, TokenChoice
from divergence.errors import IncomparableError, PlantError, UsageError
from divergence.facts import Fact, fact, worded
from divergence.numerics.arrays import wide
from divergence.numerics.logits import log_softmax, top_choices
from divergence.recording.api import make_run
from divergence.recording.passes import why_no_anchor
from divergence.recording.plant import FORWARDS, Plant, parse_plant
from divergence.run.command import command_line
from divergence.run.manifest import Tokens
from divergence.run.reader import Run
from divergence.run.site import module_of, split_site
from divergence.words import Progress, Side, other_side


@dataclass(slots=True)
class Injection:
    """The error of the guilty side at ``site`` (as the healthy run names it), by step."""

    site: str
    errors: dict[int, tuple[torch.Tensor, tuple[int, ...] | None]] = field(default_factory=dict)

    def plant(self) -> Plant:
        """Adds the error where there is one, in float64, rounded once to the model's dtype."""
        path, port = split_site(self.site)
        return Plant(self.site, path, port, "another run's error", self._add)

    def _add(self, tensor: torch.Tensor, forward: int) -> torch.Tensor:
        entry = self.errors.get(forward % FORWARDS)
        if entry is None:
            return tensor
        error, positions = entry
        wide = tensor.detach().to("cpu").to(torch.float64, copy=True)  # not every device has it
        if wide.shape == error.shape:
            wide += error
        elif positions is not None and wide.ndim > 1 and max(positions) < wide.shape[1]:
            wide[:, list(positions)] += error  # only these tokens were recorded
        else:
            raise PlantError(
                f"the error recorded at {self.site} has the shape {tuple(error.shape)}, the tensor "
                f"here {tuple(tensor.shape)}",
                hint="--model PATH must name the model that the runs were made of",
            )
        return wide.to(tensor.dtype).to(tensor.device)


_SAME = 0.1  # of what is explained: the share is told to a tenth


def explain_token(
    report: Report,
    reference: str | Path | Run,
    candidate: str | Path | Run,
    *,
    name_map: str | Path | None = None,
    model: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Report:
    """The report of ``compare(reference, candidate)`` with ``tokens.explanation``, or with a note
    why there is nothing to explain.

    Explained is the first flip that a truth judged a fault, or else the first flip; where no
    token differs, the closest decision. Two runs of the model are made on ``device``: ``model``
    names a copy where the recorded one is not on this machine.

    Raises UsageError without an anchored pass, ModelError where the model is not here, and
    IncomparableError where it has other weights than the run.
    """
    a, b = (opened(run) for run in (reference, candidate))
    if report.verdict.kind == "incomparable":
        return _noted(report, fact("experiments.other_experiment"))
    if report.tokens is None:
        return _noted(report, fact("experiments.no_token"))
    if report.verdict.kind == "identical" or report.reference.id == report.candidate.id:
        return _noted(report, fact("experiments.equal_runs"))
    faults = (flip for flip in report.tokens.differences if flip.judgement == "fault")
    first = next(faults, report.tokens.first_difference)
    place = _closest(a, b) if first is None else (first.sample, first.step)
    row_a, row_b = (None if place is None else logits_row(run, *place) for run in (a, b))
    if place is None or row_a is None or row_b is None:
        return _noted(report, fact("experiments.no_logits"))
    guilty: Side = "reference" if report.verdict.side == "reference" else "candidate"
    healthy = other_side(guilty)
    own = a if healthy == "reference" else b
    group = next(group for group in own.manifest.tokens.groups if place[0] in group)
    sites, flagged = _sites(report)
    alignment = align(a, b, name_map=None if name_map is None else load_name_map(name_map))
    by_site: dict[str, Injection] = {}  # in the batch that holds the place, up to its step
    for pair in alignment.pairs:
        record, other = pair.reference.record, pair.candidate.record
        if pair.pass_ != "anchored" or record.site not in sites or pair.reference.row is not None:
            continue
        if record.sample != group[0] or record.step > place[1]:
            continue
        at = record if guilty == "candidate" else other
        x, y = a.read(record).double(), b.read(other).double()
        injection = by_site.setdefault(record.site, Injection(at.site))
        injection.errors[record.step] = (y - x if guilty == "candidate" else x - y, at.positions)
    injections = list(by_site.values())
    if not injections:
        reason = why_no_anchor(a, a.manifest.plan.modules)
        raise UsageError(
            "there is no error of a block to add: the runs have no anchored pass in common"
            + (f" that holds {', '.join(sites[:3])}" if sites else ""),
            where=f"{a.path} and {b.path}",
            hint=f"{command_line('capture', like=a.path, o='RUN')}, and compare that with {a.path}"
            if reason is None
            else f"{a.path} cannot anchor one: {reason}",
        )
    if first is None:
        tokens = [token for token, _ in top_choices(row_a, 2)]
    else:
        tokens = [first.reference.id, first.candidate.id]
    site, step = own.manifest.plan.logits_site, place[1]
    assert site is not None
    repeat = partial(
        make_run,
        model,
        like=_alone(own, group),
        max_new_tokens=step + 1,
        sites=[site],
        steps=str(step),
        anchor=False,
        store="full",
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    planted = [parse_plant(text) for text in own.manifest.plan.plants]
    added = [injection.plant() for injection in injections]
    with tempfile.TemporaryDirectory(prefix="divergence-explain-") as folder:
        baseline = repeat(out=Path(folder, "baseline"), plants=planted)
        recorded, local = own.manifest.model, baseline.manifest.model
        if recorded.dtype == local.dtype and recorded.digest != local.digest:
            raise IncomparableError(
                f"the model on this machine has other weights ({local.digest[:12]}) than "
                f"{own.path} ({recorded.digest[:12]})",
                where=local.source,
                hint="--model PATH, with the weights that the runs were made of",
            )
        injected = repeat(out=Path(folder, "injected"), plants=[*planted, *added])
        here = (group.index(place[0]), place[1])
        rows: dict[str, np.ndarray | None] = {
            "reference": row_a,
            "candidate": row_b,
            "baseline": logits_row(baseline, *here),
            "injected": logits_row(injected, *here),
        }
        margins = {name: _margin(row, tokens) for name, row in rows.items()}
        choices = [
            _choice(run.manifest.tokens.samples[here[0]].chosen_ids[here[1]], rows[name], (a, b))
            for name, run in (("baseline", baseline), ("injected", injected))
        ]
        baseline.close()
        injected.close()
    moved = margins[guilty] - margins[healthy]
    note, new, old = None, rows["baseline"], rows[healthy]
    if new is None or old is None or new.shape != old.shape or not np.array_equal(new, old):
        by = margins["baseline"] - margins[healthy]  # the repeated run has not the bits of its own
        path = str(own.path)
        note = fact("experiments.not_repeated", run=path, by=by, moved=moved, side=healthy)
        if abs(by) > _SAME * abs(moved):
            return _noted(report, note)
    explanation = Explanation(
        sample=place[0],
        step=place[1],
        differs=first is not None,
        sites=[injection.site for injection in injections],
        flagged=flagged,
        disturbed=healthy,
        reference=_choice(tokens[0], row_a, (a, b)),
        candidate=_choice(tokens[1], row_b, (a, b)),
        reference_margin=margins["reference"],
        candidate_margin=margins["candidate"],
        baseline_margin=margins["baseline"],
        injected_margin=margins["injected"],
        share=(margins["injected"] - margins["baseline"]) / moved if moved else None,
        baseline_choice=choices[0],
        injected_choice=choices[1],
        flips=choices[0].id != choices[1].id,
        num_forwards=max(len(injection.errors) for injection in injections),
        dtype=baseline.manifest.model.dtype,
        device=f"{baseline.manifest.environment.device_type}: "
        f"{baseline.manifest.environment.device_name}",
    )
    tokens_result = msgspec.structs.replace(report.tokens, explanation=explanation)
    remarks = [*report.remarks, *([] if note is None else [note])]
    return worded(msgspec.structs.replace(report, tokens=tokens_result, remarks=remarks))


def _noted(report: Report, reason: Fact) -> Report:
    unexplained = fact("experiments.unexplained", why=reason)
    return worded(msgspec.structs.replace(report, remarks=[*report.remarks, unexplained]))


def _closest(a: Run, b: Run) -> PromptStep | None:
    """The position of the reference's smallest margin."""
    margins: dict[PromptStep, float] = {}
    for place in comparable_places(a, b):
        row = logits_row(a, *place)
        if row is not None and len(row) > 1 and logits_row(b, *place) is not None:
            second, first = np.partition(wide(row), -2)[-2:]
            margins[place] = float(first - second)
    return min(margins, key=lambda place: margins[place], default=None)


def _sites(report: Report) -> tuple[list[str], bool]:
    """(outputs whose error is added, whether the verdict flagged them). The onset's block, or all
    flagged blocks of a systematic verdict; where nothing is flagged, the block whose error is
    largest beside its floor."""
    verdict, onset = report.verdict, report.verdict.onset
    anchored = [site for site in report.sites if site.pass_ == "anchored"]
    if verdict.kind == "systematic":
        blocks = [site.block for site in report.sites if site.flagged and site.block]
        if blocks:
            return [f"{block}:out" for block in dict.fromkeys(blocks)], True
    if onset is not None:
        return [f"{onset.block or module_of(onset.site)}:out"], True
    blocks_out = [s for s in anchored if s.role == "block" and s.site == f"{s.block}:out"]
    if not blocks_out:
        return [], False
    worst = max(blocks_out, key=lambda site: (site.ratio or 0.0, site.rel_l2 or 0.0))
    return [worst.site], False


def _alone(run: Run, group: list[int]) -> Run:
    """The run as if it held this one batch: what other prompts do is not repeated."""
    tokens = run.manifest.tokens
    manifest = msgspec.structs.replace(
        run.manifest,
        tokens=Tokens(
            samples=[tokens.samples[number] for number in group],
            groups=[list(range(len(group)))],
            texts=tokens.texts,
            forced_by=tokens.forced_by,
        ),
    )
    return Run(run.path, manifest, [])


def _margin(row: np.ndarray | None, tokens: list[int]) -> float:
    """Logit of the first token minus that of the second; nan where there is no such logit."""
    if row is None or max(tokens) >= row.shape[0]:
        return float("nan")
    first, second = wide(row[tokens[:2]])
    return float(first - second)


def _choice(token: int, row: np.ndarray | None, runs: tuple[Run, Run]) -> TokenChoice:
    texts = (run.manifest.tokens.texts.get(str(token)) for run in runs)
    logprob = float("nan")
    if row is not None and token < row.shape[0]:
        logprob = float(log_softmax(row)[token])
    return TokenChoice(
        id=token, text=next((text for text in texts if text is not None), None), logprob=logprob
    )
