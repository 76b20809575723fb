"""localize(): from the block to the operator, making only the runs that are missing.

Block: the two runs are compared as they are. Module and operator: the block's operators are
captured on both sides, anchored to the same run (so from equal inputs), and in float64. Cause: the
healthy side's result replaces the blamed operator's, and what follows must be fine then. Alone:
each side's operator against float64 on its own inputs. Last, the operator as a reproducer. Of a
training step the operators are those of the block's forward and of its backward.

A side's runs are made on its machine: this one, if it has the recorded device and versions and
gives the recorded bits again. The truth is made on the reference's machine. What another machine
has to make is printed as a command; all runs lie in one directory, and the same command there goes
on where this one stopped. A run that does not repeat the one it stands for proves nothing, and a
truth that is not the reference's is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from divergence.analyses.code.find import BY_CONFIGURATION, doubt_of_code, not_told
from divergence.analyses.operators.find import finding_of, onset_result
from divergence.analyses.operators.operands import given_inputs, operands_text
from divergence.comparison.align import opened, opened_truth
from divergence.comparison.api import compare
from divergence.comparison.calls import CallNode, forwards_of
from divergence.comparison.constants import FEW_ROWS
from divergence.comparison.decide import CONFIDENCE_ORDER, check, confidence_of, decide
from divergence.comparison.judge import farthest
from divergence.comparison.measure.truth import inputs_of, truths_apart, without_pads
from divergence.comparison.preflight import numbers_in_doubt, other_code
from divergence.comparison.result import (
    CausalCheck,
    Onset,
    OperatorResult,
    OtherInput,
    Report,
    Verdict,
)
from divergence.errors import DivergenceError, UsageError
from divergence.experiments.localization.machine import Goal, Maker
from divergence.experiments.result import NEAR, Level, Localization, OwnError, is_right_alone
from divergence.facts import Fact, fact, in_one, sentence, worded
from divergence.numerics.arrays import wide
from divergence.numerics.floor import THRESHOLDS
from divergence.ops.replay import replay
from divergence.ops.reproducer import repro
from divergence.recording.plant import Substitute
from divergence.run.command import command, command_line
from divergence.run.contents import why_no_bytes
from divergence.run.reader import Run, own_truth
from divergence.run.record import Operand
from divergence.run.site import BACKWARD, ROOT, is_of_parameter, is_operator_site, module_of
from divergence.run.storage import folder_of
from divergence.words import SIDES, Progress, Side, SideBothOrNeither, other_side, silent

if TYPE_CHECKING:
    import torch

    Prepare = Callable[[torch.nn.Module], torch.nn.Module | None]


_NOTHING_TO_JUDGE = ("identical", "incomparable")


def localize(
    reference: str | Path | Run,
    candidate: str | Path | Run,
    *,
    out: str | Path,
    truth: str | Path | Run | None = None,
    block: str | None = None,
    model: str | Path | None = None,
    device: str = "auto",
    here: str = "auto",
    force: bool = False,
    trust_remote_code: bool = False,
    operators: Sequence[str] = (),
    prepare_reference: Prepare | None = None,
    prepare_candidate: Prepare | None = None,
    progress: Progress | None = None,
) -> Localization:
    """Descend from the block where ``reference`` and ``candidate`` part to the operator.

    ``truth``: the float64 run of ``divergence.truth``; made in ``out`` where there is none.
    ``block``: go into this one, whatever the comparison says. ``here``: which side's machine this
    is (``reference``, ``candidate``, ``both``, ``none``); ``auto`` asks the recorded environments.
    ``operators``: as in ``replay``. ``prepare_*``: what ``capture`` was given to make that side's
    run, called here too. ``out`` holds the runs that are made, and is gone on with where it holds
    some of this pair; those of another pair are refused, or removed with ``force``.

    Raises UsageError for runs that cannot be gone into and for a block that does not exist, and
    what ``capture``, ``truth`` and ``compare`` raise.
    """
    # the two runs, if they can be gone into
    a, b = (opened(run) for run in (reference, candidate))
    folder = folder_of(out)
    for run in (a, b):
        if run.manifest.scores_alone:
            raise UsageError(
                f"localize goes into a model, and {run.path} holds log-probabilities alone",
                hint=command_line("compare", a.path, b.path),
            )
    if a.manifest.plan.store != "full":
        raise UsageError(
            f"{a.path} cannot be gone into: every run of the descent is anchored to its inputs, "
            f"and it keeps no bytes ({why_no_bytes(a.manifest)})",
            hint="capture both in full, the blocks are enough: "
            f"{command_line('capture', like=a.path, o='A', store='full', sites='blocks')}; "
            "divergence capture --like A -o B; divergence localize A B",
        )
    # who makes the runs that are missing, here or by a command for another machine
    again = command(
        "localize",
        a.path,
        b.path,
        o=folder,
        truth=truth.path if isinstance(truth, Run) else truth,
        block=block,
        model=model,
        device=None if device == "auto" else device,
        trust_remote_code=trust_remote_code,
        operators=operators,
    )
    maker = Maker(
        a,
        b,
        folder,
        model=None if model is None else str(model),
        device=device,
        here=here,
        force=force,
        trust_remote_code=trust_remote_code,
        operators=operators,
        again=again,
        prepare={"reference": prepare_reference, "candidate": prepare_candidate},
        progress=progress or silent,
    )
    # the descent; what it has to leave to somebody else; and how each run was repeated
    done = Localization(
        reference=str(a.path), candidate=str(b.path), out=str(folder), continuation=again
    )
    done = _descend(done, maker, a, b, truth=truth, block=block)
    if maker.refusals and done.operator is None:
        done = replace(done, refused=True, obstacles=in_one(list(dict.fromkeys(maker.refusals))))
    elsewhere = [
        item for number, item in enumerate(maker.commands) if item not in maker.commands[:number]
    ]
    done = worded(replace(done, elsewhere=elsewhere, repetitions=list(maker.repetitions.values())))
    maker.folder.keep(done.to_json(indent=1))
    return done


def _descend(
    done: Localization,
    maker: Maker,
    a: Run,
    b: Run,
    *,
    truth: str | Path | Run | None,
    block: str | None,
) -> Localization:
    """``done`` with what is found, as far down as the runs at hand reach."""
    # 1. the block: the two runs as they are, against a truth, which is made where there is anything
    # to judge by it
    maker.tell("localize", 0, 4, "blocks")
    true_run: Run | None = None
    report: Report | None = None
    carried = own_truth(a) if truth is None and inputs_of(a, b) is a else None
    if carried is not None:
        true_run, report = carried, compare(a, b, progress=maker.tell)
    elif truth is None and block is None:  # a truth is dear: not where there is nothing to judge
        report = compare(a, b, progress=maker.tell)
    if carried is None and (report is None or _is_to_judge(report)):
        true_run = maker.truth("truth", Goal()) if truth is None else opened_truth(truth)
        true_run = None if true_run is None else opened(true_run)
        report = compare(a, b, truth=true_run, progress=maker.tell)
    assert report is not None
    done = replace(
        done,
        levels=[Level.of("block", report.verdict)],
        truth=None if true_run is None else str(true_run.path),
    )
    chosen, why = _choose(report, block)
    if _is_to_judge(report) and true_run is None:
        return replace(done, obstacles=[fact("experiments.truth_is_to_be_made")])
    if chosen is None:
        return replace(done, obstacles=[] if why is None else [why])
    # 2. its operators, captured on each side from equal inputs, and in float64
    onset = report.verdict.onset
    alike, train = a.manifest.tokens.groups == b.manifest.tokens.groups, a.manifest.training.train
    parts = [name.partition(f"{chosen}.") for name in a.manifest.model.digests]
    has_modules = any(not before and "." in rest for before, _, rest in parts)
    inner = [f"{chosen}.*"] if has_modules else []
    goal = Goal(
        block=chosen,
        sites=["blocks", *inner, *([f"ops@{chosen}"] if alike else [])],
        step=onset.step if onset is not None and onset.block == chosen and not train else None,
        escalate=onset is not None and onset.pass_ == "escalated",
    )
    made: dict[str, Run] = {}
    for number, side in enumerate(SIDES):
        maker.tell("localize", 1 + number, 4, f"operators of {chosen}, {side}")
        run = maker.operators(side, goal, truth=true_run)
        if run is not None:
            made[side] = run
    ops_truth = None
    if "reference" in made:  # also where the other side is still to come
        ops_truth = maker.truth("truth-operators", goal)
    # are the two truths one? And is anything left for another machine to make?
    assert true_run is not None
    first_apart = None if ops_truth is None else truths_apart(true_run, ops_truth)[1]
    if ops_truth is not None and first_apart is not None:
        refusal = fact(
            "experiments.two_truths",
            made=str(ops_truth.path),
            truth=str(true_run.path),
            apart=first_apart,
            verified=maker.folder.is_verified(ops_truth),
        )
        maker.refusals.insert(0, refusal)
        maker.ask("reference", fact("experiments.makes_truths_again"))
        return done
    missing = [side for side in SIDES if side not in made]
    if missing:
        return replace(done, obstacles=[fact("experiments.cannot_be_captured", sides=missing)])
    if ops_truth is None:
        obstacle = fact("experiments.truth_of_block_is_to_be_made", module=chosen)
        return replace(done, obstacles=[obstacle])
    # 3. the operator: the first that is off while nothing that feeds it is
    maker.tell("localize", 3, 4, "operators")
    deep = compare(made["reference"], made["candidate"], truth=ops_truth, progress=maker.tell)
    operators = deep.operators
    levels = [*done.levels, Level.of_modules(deep, chosen)]
    levels += [] if operators is None else [Level.of("operator", finding_of(operators))]
    blamed = deep.verdict.side
    done = replace(
        done,
        report=deep,
        levels=[level for level in levels if level is not None],
        side=blamed if blamed == "reference" or blamed == "candidate" else None,
    )
    first = None if operators is None else onset_result(operators)
    if first is not None:
        return _at_operator(done, maker, goal, made, ops_truth, deep, first, verdict=report.verdict)
    # none is: why that may be
    if not alike:
        return replace(done, obstacles=[fact("experiments.other_batches")])
    obstacles = [fact("experiments.none_beyond", module=chosen)]
    obstacles += [] if operators is None else operators.remarks
    if onset is not None and onset.phase == "backward" and is_of_parameter(onset.site):
        obstacles.append(fact("experiments.behind_operators"))
    calls = []  # of one side alone: where none that both call is wrong, they are what is left
    for side in SIDES:
        unmatched = [] if operators is None else operators.unmatched
        sites = list(dict.fromkeys(call.site for call in unmatched if call.side == side))
        if sites:
            calls.append(fact("experiments.side_calls", side=side, sites=sites))
    if calls:
        obstacles.append(fact("experiments.only_one_side_calls", calls=calls))
        lone = next((call for call in calls if call["side"] == done.side), calls[-1])
        done = replace(done, repro=reproduce(maker, made[lone["side"]], lone["sites"][0]))
    return replace(done, obstacles=in_one(obstacles))


def _choose(report: Report, block: str | None) -> tuple[str | None, Fact | None]:
    """(the block to go into, why there is none)."""
    blocks = {site.block for site in report.sites if site.block}
    if block is not None:
        if block not in blocks:
            raise UsageError(
                f"there is no block {block!r} in these runs",
                hint=f"blocks are named like {min(blocks)}" if blocks else "their runs hold none",
            )
        return block, None
    verdict = report.verdict
    if verdict.onset is not None and verdict.onset.phase == "optimizer":
        return None, fact("experiments.made_by_optimizer", site=verdict.onset.site)
    if _is_one_run(report):
        return None, fact("experiments.nothing_to_find", what=verdict.headline)
    if verdict.kind in ("localized", "systematic", "nonfinite") and verdict.onset is not None:
        if _is_outside(verdict.onset):
            return None, fact("experiments.outside_modules", site=verdict.onset.site)
        if verdict.onset.block is not None:
            return verdict.onset.block, None
        return module_of(verdict.onset.site), None
    standouts = [item.block for item in verdict.evidence if item.block is not None]
    if verdict.kind in ("within_floor", "drift") and standouts:  # below every limit, but seen
        return standouts[0], None
    first = verdict.evidence[:1] or verdict.headline
    return None, fact("experiments.nothing_to_go_into", kind=verdict.kind, first=first)


def _is_outside(onset: Onset) -> bool:
    """Between modules, or behind the last of them (ends.find)?"""
    path, _, port = onset.site.partition(":")
    at_the_edge = port.startswith("in") and onset.block in (None, path)
    return onset.pass_ == "free" and (at_the_edge or path == ROOT)


def _is_to_judge(report: Report) -> bool:
    return not (report.verdict.kind in _NOTHING_TO_JUDGE or _is_one_run(report))


def _is_one_run(report: Report) -> bool:
    """Was a run compared with itself, and its ranks, if there are several, agree?"""
    return report.reference.id == report.candidate.id and report.verdict.kind == "undetermined"


def _at_operator(
    done: Localization,
    maker: Maker,
    goal: Goal,
    made: dict[str, Run],
    truth: Run,
    deep: Report,
    first: OperatorResult,
    *,
    verdict: Verdict,
) -> Localization:
    """``done`` with all that is said of the operator ``first``: whose it is, by what proof.
    ``verdict``: the one that named the block."""
    # 4. whose it is: by the levels above, by each side's operator alone, by both sides' code
    maker.tell("localize", 4, 4, first.site)
    assert deep.operators is not None
    blamed, onset = deep.operators.side or verdict.side, verdict.onset
    same_block = onset is not None and onset.block in (None, goal.block)
    above = verdict.side if same_block else None
    alone = errors_alone(maker, made, first)
    named = blame(maker, goal, made, truth, first.site, alone, blamed=blamed, above=above)
    # 5. the cause: the healthy side's result in its place
    repeated = all(maker.repetitions[f"{side}-operators"].met for side in SIDES)
    whole = first.region is None or first.region.argument is None
    causal = None
    if named.side is not None and repeated and whole:
        causal = prove(maker, goal, made, truth, deep, first, named.side)
    # 6. what it is given: the tensor operands that differ, the largest difference first
    given: list[OtherInput] = []
    if first.region is None:  # whose last operators take other arguments by right
        nodes = [
            _node(made[side], path, first, deep.operators.pass_)
            for side, path in zip(SIDES, (first.site, first.candidate_site), strict=True)
        ]
        if nodes[0] is not None and nodes[1] is not None:
            given = given_inputs(nodes[0], nodes[1], made["reference"], made["candidate"])
    # 7. a folder for a vendor
    guilty, other = SIDES if (named.side or blamed) == "reference" else SIDES[::-1]
    wrong = any(own.times > NEAR for own in alone) or not alone
    repro = repro_other = None
    paths = dict(zip(SIDES, (first.site, first.candidate_site), strict=True))
    show = functools.partial(reproduce, maker, step=first.step, sample=first.sample)
    if stands_alone(first, guilty) and (wrong or first.other_operands):
        given_to = operands_text(first.other_operands, guilty)
        repro = show(made[guilty], paths[guilty], called=given_to)
    elif first.fed_by and first.fed_by_side == guilty:  # what that side alone calls
        repro = show(made[guilty], first.fed_by[-1])
    if first.other_operands and first.region is None:  # the other side's call, with its scalars
        given_to = operands_text(first.other_operands, other)
        repro_other = show(made[other], paths[other], name=f"repro-{other}", called=given_to)
    levels = done.levels
    if named.doubt is not None:  # what A's code tells of B proves nothing at any level
        levels = [replace(level, side=None) for level in levels]
    return replace(
        done,
        levels=levels,
        operator=first,
        side=named.side,
        levels_apart=named.contradiction,
        side_doubt=named.doubt,
        code=named.code,
        report=replace(deep, verdict=decided(deep, first, named, alone=alone, given=given)),
        alone=alone,
        causal=causal,
        given=given,
        repro=repro,
        repro_other=repro_other,
    )


# The proof of a localization: cause, operator alone, reproducer.
#
# *Cause*: the healthy side's result is put in the place of the operator that is blamed, on its
# machine, and what follows must be fine then. *Alone*: each side's operator in float64 on its own
# recorded inputs, by the operator's definition: no truth of the model and no code of it is needed
# for that, so a side that is off by itself is off whoever made the truth. *Reproducer*: the same as
# a folder for a vendor.
#
# An operator that is right by itself on both sides gives other results for one reason alone: it was
# given something else. *Given* names it: a scalar, a constant, an operand with its difference, or
# where it comes from. Nothing is said of what was not recorded.


def errors_alone(maker: Maker, made: dict[str, Run], first: OperatorResult) -> list[OwnError]:
    """Each side's operator on its own recorded inputs, against float64."""
    errors: list[OwnError] = []
    for side, path in zip(SIDES, (first.site, first.candidate_site), strict=True):
        if not stands_alone(first, side):
            continue
        try:
            truth = replay(
                made[side],
                out=maker.folder / f"{side}-float64",
                sites=[f"{path}:*"],
                truth=True,
                force=True,
                operators=maker.namespaces,
            )
        except DivergenceError as error:
            reason = fact("experiments.not_in_float64", site=path, why=error.message)
            maker.tell("note", 0, None, sentence(reason))
            return []
        report = compare(truth, made[side])
        results = [] if report.operators is None else report.operators.results
        own_errors = [
            OwnError(side=side, error=r.candidate_error, ideal=r.floor, times=r.w)
            for r in results
            if r.site == path
            and r.w is not None
            and r.candidate_error is not None
            and r.floor is not None
        ]
        if own_errors:
            errors.append(max(own_errors, key=lambda own: own.times))
    return errors


def stands_alone(first: OperatorResult, side: str) -> bool:
    """Is what that side computes there one operator? A region of several is none."""
    if first.region is None:
        return True
    members = first.region.reference if side == "reference" else first.region.candidate
    return len(members) == 1


# Which side of a localized operator is wrong, if that can be told.
#
# The truth is the reference's own code in float64. It tells kernels apart from what the code asks
# for, but not whose *code* is right. So a side is named only on evidence that does not rest on
# that:
#
# - *alone*: one side's operator is off by itself, on its own recorded inputs, by the operator's
#   definition. That holds whoever made the truth.
# - *the reference* is blamed by a truth that was made on a machine which repeats the reference: its
#   own code in float64 says otherwise than its kernels, and the candidate agrees with it.
# - *the candidate* is blamed by a truth with which the candidate's own code agrees in float64 (a
#   second float64 run, made on the candidate's machine), or both sides were repeated on one
#   machine.
#
# Where float64 tells the two sides' code apart, it names neither: by each side's code the other is
# wrong. What the runs recorded of their code then decides as it does for ``compare``
# (``doubt_of_code``). Levels that blame different sides contradict each other: no side.

_MUCH = 10.0  # times what the two codes differ by: then a tenth of the error at most is the code's


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedSide:
    """The side that is wrong, or why none is named; fields as in ``Localization``."""

    side: Side | None = None
    contradiction: Fact | None = None
    doubt: Fact | None = None
    code: str | None = None


def blame(
    maker: Maker,
    goal: Goal,
    made: dict[str, Run],
    truth: Run,
    site: str,
    alone: list[OwnError],
    *,
    blamed: SideBothOrNeither | None,
    above: str | None,
) -> BlamedSide:
    """Say whose operator is wrong. ``blamed``: the side that the operators blame, against
    ``truth``; ``above``: the one that the comparison blames which named the block; ``site``: the
    operator, ``alone``: each side's by itself."""
    off = None  # whose operator is off by itself, while the other's is not, or far less
    if len(alone) == 2:
        less, more = sorted(alone, key=lambda own: own.times)
        off = more.side if more.times > NEAR * max(1.0, less.times) else None
    levels = [
        fact("experiments.block_by", module=goal.block, side=above),
        fact("experiments.operator_by", site=site, side=blamed),
        fact("experiments.alone_by", site=site, side=off),
    ]
    levels = [level for level in levels if level["side"] in SIDES]
    if len({level["side"] for level in levels}) == 2:
        return BlamedSide(contradiction=fact("experiments.levels_apart", levels=levels))
    if blamed != "reference" and blamed != "candidate":
        return BlamedSide()
    manifest_a, manifest_b = made["reference"].manifest, made["candidate"].manifest
    apart = other_code(manifest_a, manifest_b, goal.block)
    doubted = numbers_in_doubt(manifest_a, manifest_b, goal.block)
    if off == blamed or (maker.one_machine and not (apart or doubted)):
        return BlamedSide(side=blamed)
    if blamed == "candidate" and maker.is_prepared(blamed):  # no truth is made of what it changes
        doubt = doubt_of_code(manifest_a, manifest_b, goal.block)
        return BlamedSide(doubt=doubt) if doubt else BlamedSide(side=blamed)
    if blamed == "candidate":
        output = f"{goal.block}{BACKWARD if BACKWARD in site else ''}:out"
        return _by_both_codes(maker, goal, made, truth, output)
    if maker.folder.is_verified(truth):
        return BlamedSide(side="reference")
    maker.ask("reference", fact("experiments.makes_truth_by_code"))
    return BlamedSide(doubt=fact("experiments.truth_not_verified", truth=str(truth.path)))


def _by_both_codes(
    maker: Maker, goal: Goal, made: dict[str, Run], truth: Run, output: str
) -> BlamedSide:
    """The candidate is blamed: does its own code say so too?"""
    assert goal.block is not None
    other = maker.truth("truth-by-candidate", goal, side="candidate")
    if other is None:
        return BlamedSide(doubt=fact("experiments.only_by_reference_code"))
    num_compared, first = truths_apart(truth, other, inside=goal.block)
    if num_compared == 0:
        return BlamedSide(doubt=fact("experiments.no_common_site"))
    if first is None or _code_differs_little(truth, other, made["candidate"], output):
        return BlamedSide(side="candidate")
    manifests = made["reference"].manifest, made["candidate"].manifest
    doubt = doubt_of_code(*manifests, goal.block)
    if doubt is None and all(manifest.model.code for manifest in manifests):
        return BlamedSide(side="candidate", code=first["site"])
    return BlamedSide(
        doubt=fact("experiments.codes_apart", apart=first, doubt=doubt), code=first["site"]
    )


def _code_differs_little(truth: Run, other: Run, run: Run, output: str) -> bool:
    """Do the two sides' codes differ at the block's ``output`` by at most a tenth of the
    candidate's error?"""
    errors, differ = 0.0, 0.0
    for record in truth.records:
        if record.pass_ != "anchored" or record.site != output:
            continue
        partner, own = other.find(record.coordinates), run.find(record.coordinates)
        if partner is None or own is None or {partner.shape, own.shape} != {record.shape}:
            return False
        true, made, its = (
            without_pads(run.manifest, record, wide(source.array(entry)))
            for source, entry in ((truth, record), (run, own), (other, partner))
        )
        if true is None or made is None or its is None:
            return False
        errors = max(errors, float(np.linalg.norm(made - true) / np.linalg.norm(true)))
        differ = max(differ, float(np.linalg.norm(its - true) / np.linalg.norm(true)))
    return 0 < differ * _MUCH <= errors


def prove(
    maker: Maker,
    goal: Goal,
    made: dict[str, Run],
    truth: Run,
    deep: Report,
    first: OperatorResult,
    side: str,
) -> CausalCheck | None:
    """The healthy side's result in the guilty one's place: what is then still wrong? None where
    that side's machine is not this one, or the run does not repeat what comes before."""
    assert deep.operators is not None
    other = other_side(side)
    guilty, healthy = replaced_sites(made, first, side)
    run = maker.substituted(
        side,
        goal,
        made[side],
        site=guilty,
        healthy=Substitute(made[other], healthy),
        block=first.block or "",
    )
    if run is None:
        return None
    pair = (made["reference"], run) if side == "candidate" else (run, made["candidate"])
    again = compare(*pair, truth=truth, progress=maker.tell)
    if again.operators is None:
        return None
    place = (first.phase == "decode", first.order)
    itself = guilty.rpartition(":")[0] not in (first.site, first.candidate_site)
    before, after = (
        [
            r
            for r in o.results
            if ((r.phase == "decode", r.order) > place and r.site != first.site)
            or (itself and r.site == first.site)
        ]
        for o in (deep.operators, again.operators)
    )
    still = [r.site for r in after if r.limit_usage > 1]
    for site in again.sites:
        # what the operator's block gives: its output, of its backward the gradients
        handed_on = site.site == f"{site.block}:out"
        if first.phase == "backward":
            handed_on = site.phase == "backward" and ":out" in site.site
        flagged = site.flagged and site.pass_ != "free" and site.block == first.block
        # where every block of a kind has the fault, the one that is free of it now stands out among
        # its siblings, and is flagged for being right
        is_off = True
        if site.truth is not None:
            limits = THRESHOLDS  # a caller's are for the comparison, not for its proof
            questions = [(site.truth.w_median, limits.operator)]
            num_rows, width = math.prod(site.shape[:-1]), site.shape[-1] if site.shape else 1
            far = functools.partial(farthest, num_rows + width)
            questions.append((site.truth.w_max, float(far(width, limits.lone_spread))))
            if num_rows >= FEW_ROWS:
                questions.append((site.truth.w_channel, float(far(num_rows, limits.row_spread))))
            is_off = any(
                (w if side == "candidate" else 1 / max(w, 1e-300)) > limit for w, limit in questions
            )
        if flagged and handed_on and is_off:
            still.append(site.site)
    return CausalCheck(
        site=first.site,
        holds=not still,
        num_after=len(after),
        before=max((r.limit_usage for r in before), default=0.0),
        largest_limit_usage=max((r.limit_usage for r in after), default=0.0),
        still=list(dict.fromkeys(still)),
    )


def replaced_sites(made: dict[str, Run], first: OperatorResult, side: str) -> tuple[str, str]:
    """(site on ``side``, site on the other) of the operator ``first`` or of what feeds it."""
    other = other_side(side)
    names = {"reference": first.site, "candidate": first.candidate_site}
    own = f"{names[side]}:out", f"{names[other]}:out"
    if not first.fed_by or first.fed_by_side != side:
        return own
    calls = [
        next(
            (
                record.call
                for record in made[which].records
                if record.call is not None
                and record.site == f"{names[which]}:out"
                and (record.sample, record.step) == (first.sample, first.step)
            ),
            None,
        )
        for which in (side, other)
    ]
    call_a, call_b = calls
    if call_a is None or call_b is None:
        return own
    for guilty, healthy in zip(call_a.operands, call_b.operands, strict=False):
        made_by = _result(guilty)
        if made_by is None or made_by.rpartition(":")[0] != first.fed_by[-1]:
            continue
        given = _result(healthy)
        if given is not None and guilty.via == healthy.via:
            return made_by, given
    return own


def _result(operand: Operand) -> str | None:
    """The operator's result that an operand is, or is a view of."""
    for site in (operand.site, operand.origin):
        if site is not None and is_operator_site(site) and ":out" in site:
            return site
    return None


def _node(run: Run, path: str, first: OperatorResult, pass_: str) -> CallNode | None:
    for name in dict.fromkeys((pass_, "anchored", "free")):
        for node in forwards_of(run, name).get((first.sample, first.step), []):
            if node.path == path:
                return node
    return None


def reproduce(
    maker: Maker, run: Run, path: str, *, name: str = "repro", **options: Any
) -> str | None:
    """One side's operator as a folder; None where it cannot stand alone. ``options``: of ``repro``,
    which call."""
    out = maker.folder / name
    try:
        repro(
            run,
            site=f"{path}:out",
            out=out,
            force=True,
            operators=maker.namespaces,
            **options,
        )
    except DivergenceError as error:
        reason = fact("experiments.no_reproducer", site=path, why=error.message)
        maker.tell("note", 0, None, sentence(reason))
        return None
    return str(out)


def decided(
    deep: Report,
    first: OperatorResult,
    named: BlamedSide,
    *,
    alone: list[OwnError],
    given: list[OtherInput],
) -> Verdict:
    """The verdict of the descent, which all that is printed of it says: the operator ``first`` of
    the last comparison ``deep``, by the side that ``named`` leaves. Of an operator that is right
    ``alone`` what it is ``given`` is the reason, where nothing else is known."""
    operators, above = deep.operators, deep.verdict
    assert operators is not None
    inputs = [item for item in given[:1] if item.difference]
    if is_right_alone(alone) and inputs and not (first.other_inputs or first.region):
        first = replace(first, other_inputs=inputs)
    side = operators.side if operators.side == "both" and named.side is None else named.side
    results = [first if result.site == first.site else result for result in operators.results]
    finding = finding_of(replace(operators, side=side, results=results))
    verdict = decide([finding], deep.preflight).verdict
    checks = verdict.checks
    same_block = above.onset is not None and above.onset.block in (None, first.block)
    surer = CONFIDENCE_ORDER[above.confidence] > CONFIDENCE_ORDER[verdict.confidence]
    if same_block and surer:
        checks = above.checks  # that the block is wrong is as sure as it was
    if named.contradiction is not None:
        checks = [*checks, check("agreement", False, fact("experiments.levels_blame"))]
    elif named.doubt is not None:
        checks = [*checks, not_told(named.doubt)]
    elif any(item.code == "code.numbers_stated" for item in above.evidence):
        checks = [item for item in checks if item.name != BY_CONFIGURATION.name]
        checks.append(BY_CONFIGURATION)
    others = (item for item in above.evidence if item not in finding.evidence)
    evidence = [*finding.evidence, *others]
    return replace(verdict, checks=checks, confidence=confidence_of(checks), evidence=evidence)
