"""sensitivity(): how small a fault this set-up would see, measured by planting some.

The set-up is a run, a healthy candidate like it, and what else compare is given: a truth,
trusted runs, thresholds. At chosen blocks faults of several kinds are planted in what the
candidate recorded (sensitivity.trials), smaller and smaller (sensitivity.sizes), and each
time the judge of compare is asked. So the answer is about the whole way from numbers to
verdict, the limits included, and not about a formula for them.

What it does not say: how large a real fault is at a block's output (a wrong constant in one
attention head may be small there), or what a fault outside the blocks would look like.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from divergence._version import __version__
from divergence.comparison.advice import Advice, beside
from divergence.comparison.analysis import Measured
from divergence.comparison.api import compare, measure_runs
from divergence.comparison.preflight.lines import preflight
from divergence.comparison.result import summary_of
from divergence.comparison.results import Verdict
from divergence.errors import IncomparableError, UsageError
from divergence.experiments.result import Sensitivity
from divergence.experiments.sensitivity.trials import (
    DEFAULT_FAULTS,
    SensitivityTrials,
    confirm_sizes,
    faults_named,
    search_sizes,
)
from divergence.facts import Fact, fact, sentence, template_of, worded
from divergence.numerics.floor import THRESHOLDS, Thresholds, spread
from divergence.numerics.formats import format_named
from divergence.recording.api import capture
from divergence.recording.passes import can_anchor
from divergence.run.command import Command, command, command_line
from divergence.run.ranks import unsharded
from divergence.run.reader import Run, own_truth
from divergence.run.site import did_you_mean
from divergence.words import Progress

DEFAULT_BLOCKS = ("first", "middle", "last")
_HEALTHY = ("identical", "within_floor")


def sensitivity(
    run: str | Path | Run,
    *,
    candidate: str | Path | Run | None = None,
    truth: str | Path | Run | None = None,
    floor: Sequence[str | Path | Run] = (),
    blocks: Sequence[str] = DEFAULT_BLOCKS,
    faults: Sequence[str] = DEFAULT_FAULTS,
    thresholds: Thresholds = THRESHOLDS,
    confirm: bool = False,
    model: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Sensitivity:
    """The smallest fault of each kind that compare would localize, block by block.

    ``candidate``: a healthy run captured like ``run``; no model is needed then. Without one it
    is captured here for the while, by other attention kernels where the model has some.
    ``truth``, ``floor``, ``thresholds``: as in ``compare``. ``blocks``: first, middle, last, all,
    numbers from 0 in execution order, or module paths. ``faults``: see sensitivity.faults.
    ``confirm``: plant the found sizes for real as well, in one block: two captures a fault.

    Raises UsageError for a pair that cannot be planted in (no block outputs, no anchored pass)
    or is not healthy before anything is planted, IncomparableError for other weights or
    tokens, and what ``capture`` and ``compare`` raise.
    """
    a = unsharded(Run.open(run))
    chosen = faults_named(faults)
    _chosen_blocks(_blocks_with_outputs(a), blocks)  # before anything is captured
    with contextlib.ExitStack() as stack:
        folder = Path()
        if candidate is None or confirm:
            temporary = tempfile.TemporaryDirectory(prefix="divergence-sensitivity-")
            folder = Path(stack.enter_context(temporary))
        notes: list[Fact] = []
        capturing = partial(
            capture, model, like=a, device=device, trust_remote_code=trust_remote_code, force=True,
            progress=progress,
        )  # fmt: skip
        given: dict[str, Any] = {
            "truth": truth, "floor": floor, "thresholds": thresholds, "progress": progress,
        }  # fmt: skip
        if candidate is None:
            known = truth is not None or own_truth(a) is not None
            b, kernels = _made_here(a, capturing, folder / "candidate", escalate=known)
            stack.callback(b.close)
            notes.append(kernels)
        else:
            b = unsharded(Run.open(candidate))
        trials, verdict = _healthy(a, b, given)
        measured = trials.measured
        where = _chosen_blocks(trials.blocks, blocks)
        sizes = search_sizes(trials, where, chosen, progress)
        confirmations = []
        if confirm:
            confirmations = confirm_sizes(
                a, b, trials, sizes, block=where[len(where) // 2],
                capturing=partial(capturing, out=folder / "planted"),
                comparing=partial(compare, **given),
            )  # fmt: skip
            left = {fault.name for fault in chosen} - {
                confirmation.fault for confirmation in confirmations
            }
            if left:
                notes.append(fact("experiments.not_planted", faults=sorted(left)))
        if verdict.kind == "identical":
            notes.append(fact("experiments.sides_equal"))
        carried = sentence(fact("experiments.own_truth"))
        result = Sensitivity(
            tool_version=__version__,
            reference=summary_of(a),
            candidate=summary_of(b),
            made_here=candidate is None,
            truth=None if measured.truth is None else str(measured.truth.path or carried),
            num_floor_runs=len(floor),
            dtype=a.manifest.model.dtype,
            escalated=trials.escalated,
            verdict=verdict,
            num_blocks=len(trials.blocks),
            num_prompt_tokens=sum(len(s.prompt_ids) for s in a.manifest.tokens.samples),
            num_trials=trials.num_trials,
            blocks=where,
            units={fault.name: sentence(fault.unit) for fault in chosen},
            phrases={fault.name: template_of(fault.phrase) for fault in chosen},
            sizes=sizes,
            confirmations=confirmations,
            remarks=[*notes, *measured.notes],
            commands=deeper(measured, made_here=candidate is None, escalated=trials.escalated),
        )
        return worded(result)


def _blocks_with_outputs(run: Run) -> list[str]:
    """The blocks whose output the run holds. Raises UsageError where no trial could be made."""
    plan = run.manifest.plan
    outputs = {record.site for record in run.records if record.pass_ == "free"}
    blocks = [path for path, note in plan.modules.items() if note.role == "block"]
    blocks = [path for path in blocks if f"{path}:out" in outputs]
    if not blocks:
        raise UsageError(
            f"{run.path} holds no block outputs, so no fault can be planted in them",
            where=f"its sites: {', '.join(plan.sites)}",
            hint=command_line("capture", like=run.path, o=f"{run.path}-blocks", sites="blocks"),
        )
    if plan.plants:
        raise UsageError(
            f"{run.path} carries planted faults itself ({', '.join(plan.plants)})",
            hint="give a healthy run",
        )
    return blocks


def _made_here(
    a: Run, capturing: Callable[..., Run], out: Path, *, escalate: bool
) -> tuple[Run, Fact]:
    """A candidate for the while, and what it is."""
    reason = can_anchor(a, a.manifest.plan.modules)
    if reason is not None:
        raise UsageError(f"{a.path} cannot anchor a candidate: {reason}")
    recorded = a.manifest.model.attn_implementation or "eager"
    other = "sdpa" if recorded == "eager" else "eager"
    narrow = format_named(a.manifest.model.dtype).itemsize <= 2
    label = sentence(fact("experiments.label_of_candidate"))
    made = partial(capturing, out=out, escalate=escalate and narrow, label=label)
    try:
        run = made(attn_implementation=other)
    except UsageError:  # the model has no such kernels; anything else is met again below
        run = made()
        return run, fact("experiments.same_kernels")
    return run, fact("experiments.other_kernels", attention=other)


def _healthy(a: Run, b: Run, given: dict[str, Any]) -> tuple[SensitivityTrials, Verdict]:
    """The pair measured and judged as it is. ``given``: what ``compare`` is given beside the runs.
    Raises UsageError where it is no pair to plant in."""
    lines = preflight(a, b)
    blocking = [line.check for line in lines if line.status == "blocking"]
    if blocking:
        raise IncomparableError(
            f"not the same experiment: other {' and '.join(blocking)}",
            where=f"{a.path} and {b.path}",
            hint=command_line("capture", like=a.path, o="CANDIDATE"),
        )
    measured = measure_runs(a, b, lines, **given)
    trials = SensitivityTrials(measured, thresholds=given["thresholds"])
    if not trials.blocks:
        reason = can_anchor(a, a.manifest.plan.modules)
        if reason is not None:
            raise UsageError(f"{a.path} cannot anchor a candidate: {reason}")
        raise UsageError(
            f"{b.path} has no anchored pass to {a.path}: a fault in one block would show in all "
            "that follow it",
            hint=command_line("capture", like=a.path, o="CANDIDATE"),
        )
    verdict = trials.verdict_of(measured)
    if verdict.kind not in _HEALTHY:
        truth = None if measured.truth is None else measured.truth.path
        again = command_line(
            "compare", a.path, b.path, truth=truth,
            floor=[run.path if isinstance(run, Run) else run for run in given["floor"]],
        )  # fmt: skip
        raise UsageError(
            "the pair is not healthy before anything is planted: "
            f"{verdict.kind}: {verdict.summary}",
            where=f"{a.path} and {b.path}",
            hint=f"{again} says more; then give a healthy --candidate",
        )
    return trials, verdict


def _chosen_blocks(known: list[str], wanted: Sequence[str]) -> list[str]:
    """Blocks by word, number or module path, in execution order. Raises UsageError."""
    places: set[int] = set()
    words = {"first": 0, "middle": len(known) // 2, "last": len(known) - 1}
    for word in wanted:
        if word == "all":
            places |= set(range(len(known)))
        elif word in words:
            places.add(words[word])
        elif word in known:
            places.add(known.index(word))
        elif word.isdecimal() and int(word) < len(known):
            places.add(int(word))
        else:
            raise UsageError(
                f"no block {word!r} among the {len(known)} of the run",
                where="--blocks",
                hint=did_you_mean(
                    word,
                    [*words, "all", *known],
                    count=1,
                    then=f"first, middle, last, all, numbers from 0 to {len(known) - 1}, or a "
                    f"module path such as {known[0]}",
                ),
            )
    if not places:
        raise UsageError("no block to plant in", where="--blocks", hint="first, middle, last, all")
    return [known[place] for place in sorted(places)]


def deeper(measured: Measured, *, made_here: bool, escalated: bool) -> list[Command]:
    """Commands, the one that gains most first: an escalated pass for a 16-bit dtype, a truth,
    and more tokens where so few are judged that chance widens the limits."""
    a, b = measured.reference, measured.candidate
    advice = Advice(a, b)
    commands: list[Command] = []
    known, narrow = measured.truth, measured.narrow
    here, there = str(a.path), str(b.path)
    truth = beside(here, "-truth") if known is None else known.path
    candidate = None if made_here else there
    if narrow and not escalated and not made_here:
        candidate = beside(there, "-escalated")
        commands.append(advice.escalate("candidate")[0])
    if known is None:
        commands.append(advice.truth()[0])
    if commands:
        also = fact("experiments.and_escalated") if narrow and made_here else ""
        commands.append(command("sensitivity", here, candidate=candidate, truth=truth, note=also))
    num_tokens = sum(len(sample.prompt_ids) for sample in a.manifest.tokens.samples)
    if spread(num_tokens) > 1:
        commands.append(
            command(
                "capture", a.manifest.model.source, o=beside(here, "-more"), prompts="FILE",
                note=fact("experiments.more_prompts", num_tokens=num_tokens),
            )
        )  # fmt: skip
    return commands
