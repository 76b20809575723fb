"""localize(): from the block to the operator, making only the runs that are missing.

Block: the two runs are compared as they are. Module and operator: the block's operators are
captured on both sides, anchored to the same run (so from equal inputs), and in float64. Cause: the
healthy side's result is put in the place of the operator that is blamed, on the side that is
blamed, and what follows must be fine then. Alone: each side's operator against float64 on its own
inputs. Last, the operator as a reproducer.

A side's runs are made where its machine is: on this one, if it has the recorded device and
versions (the recorded environment variables are set in a process of its own). What another
machine has to make is printed as a command, and the runs lie in one directory: the same command
there goes on where this one stopped.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from divergence.compare.api import compare
from divergence.compare.operator_verdict import onset_result
from divergence.compare.operators_result import CausalCheck
from divergence.compare.result import Onset, Report
from divergence.errors import DivergenceError, UsageError
from divergence.experiments.localization import Level, Localization, OwnError
from divergence.experiments.machine import Maker
from divergence.experiments.replaced import replaced_sites
from divergence.ops.replay import replay
from divergence.ops.repro import repro
from divergence.run.contents import why_no_bytes
from divergence.run.location import folder_of
from divergence.run.reader import Run
from divergence.run.site import ROOT, module_of
from divergence.run.unshard import unsharded

__all__ = ["localize"]

Progress = Callable[..., None]
Prepare = Callable[[Any], None]

_SIDES = ("reference", "candidate")
_NOTHING_TO_JUDGE = ("identical", "incomparable")
_NEAR = 3.0  # times an ideal operator's error: nearer than that there is nothing to show a vendor


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
    prepare_reference: Prepare | None = None,
    prepare_candidate: Prepare | None = None,
    progress: Progress | None = None,
) -> Localization:
    """Descend from the block where ``reference`` and ``candidate`` part to the operator.

    ``truth``: the float64 run of ``reference``; made in ``out`` where there is none. ``block``: go
    into this one, whatever the comparison says. ``here``: which side's machine this is
    (``reference``, ``candidate``, ``both``, ``none``); ``auto`` asks the recorded environments.
    ``prepare_*``: what ``capture`` was given to make that side's run, called here too. ``out``
    holds the runs that are made, and is gone on with where it holds some of this pair; those of
    another pair are refused, or removed with ``force``.

    Raises UsageError for runs that cannot be gone into and for a block that does not exist, and
    what capture, reference and compare raise.
    """
    a, b = (
        unsharded(run if isinstance(run, Run) else Run.open(run)) for run in (reference, candidate)
    )
    tell: Progress = progress or (lambda event, done, total, detail: None)
    folder = folder_of(out)
    if a.manifest.plan.store != "full":
        raise UsageError(
            f"{a.path} cannot be gone into: every run of the descent is anchored to its inputs, "
            f"and it keeps no bytes ({why_no_bytes(a.manifest)})",
            hint="capture both in full, the blocks are enough: divergence capture --like "
            f"{shlex.quote(str(a.path))} -o A --store full --sites blocks; "
            "divergence capture --like A -o B; divergence localize A B",
        )
    maker = Maker(
        a, b, folder, model=None if model is None else str(model), device=device, here=here,
        force=force, trust_remote_code=trust_remote_code,
        prepare={"reference": prepare_reference, "candidate": prepare_candidate}, progress=tell,
    )  # fmt: skip
    tell("localize", 0, 4, "blocks")
    right, report = truth, None
    if right is None and block is None:  # a truth is dear: not where there is nothing to judge
        report = compare(a, b, progress=tell)
    if report is None or report.verdict.kind not in _NOTHING_TO_JUDGE:
        right = truth if truth is not None else maker.truth("truth")
        report = compare(a, b, truth=right, progress=tell)
    levels = [Level.of_report("block", report)]
    chosen, why = _choose(report, block)
    done = Localization(
        reference=str(a.path), candidate=str(b.path), out=str(folder), levels=levels,
        truth=None if right is None else _path(right),
        again=_again(a, b, right, folder, block=block, model=model, device=device,
                     trust_remote_code=trust_remote_code),
    )  # fmt: skip
    if chosen is None:
        done.stopped = why
        return done
    onset = report.verdict.onset
    step = onset.step if onset is not None and onset.block == chosen else None
    escalate = onset is not None and onset.pass_ == "escalated"
    sites = ["blocks", *_inner_modules(a, chosen), f"ops@{chosen}"]
    made = {}
    for number, side in enumerate(_SIDES):
        tell("localize", 1 + number, 4, f"operators of {chosen}, {side}")
        made[side] = maker.operators(side, sites=sites, escalate=escalate, step=step)
    done.commands = maker.commands
    if None in made.values():
        missing = [side for side in _SIDES if made[side] is None]
        done.stopped = f"the {' and the '.join(missing)} cannot be captured on this machine"
        return done
    ops_truth = maker.truth("truth-operators", sites=sites, step=step)
    tell("localize", 3, 4, "operators")
    deep = compare(made["reference"], made["candidate"], truth=ops_truth, progress=tell)
    levels += [Level.of_modules(deep, chosen), Level.of_operators(deep)]
    done.report = deep
    done.levels = [level for level in levels if level is not None]
    first = None if deep.operators is None else onset_result(deep.operators)
    if first is None:
        done.stopped = f"no operator of {chosen} is beyond its limit" + _alone_there(deep)
        return done
    side = deep.operators.side or report.verdict.side
    tell("localize", 4, 4, first.site)
    done.operator = first
    done.side = side if side in _SIDES else None
    if side in _SIDES:
        done.causal = _causal(maker, made, ops_truth, deep, side, sites, step, escalate, tell)
    done.alone = _alone(made, first, folder, tell)
    if any(own.times > _NEAR for own in done.alone) or not done.alone:
        done.repro = _reproduce(made, first, side, folder, tell)
    return done


def _choose(report: Report, block: str | None) -> tuple[str | None, str | None]:
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
    if verdict.kind in ("localized", "systematic", "nonfinite") and verdict.onset is not None:
        if _is_outside(verdict.onset):
            return None, (
                f"what is wrong at {verdict.onset.site} is made outside the blocks and modules: "
                "there is none to go into (--block PATH goes into one all the same)"
            )
        if verdict.onset.block is not None:
            return verdict.onset.block, None
        return module_of(verdict.onset.site), None
    return None, {
        "identical": "the runs are equal bit for bit: there is nothing to find",
        "within_floor": "no block makes an error beyond rounding: there is nothing to go into "
        "(--block PATH goes into one all the same)",
        "incomparable": "the runs are not the same experiment",
    }.get(verdict.kind, "no block could be named (--block PATH goes into one all the same)")


def _is_outside(onset: Onset) -> bool:
    """Between modules, or behind the last of them (compare.ends)?"""
    path, _, port = onset.site.partition(":")
    at_the_edge = port.startswith("in") and onset.block in (None, path)
    return onset.pass_ == "free" and (at_the_edge or path == ROOT)


def _alone_there(report: Report) -> str:
    """Operators that one side alone calls: where no operator that both call is wrong, they are
    what is left."""
    parts = []
    for side in _SIDES:
        unmatched = [] if report.operators is None else report.operators.unmatched
        names = list(dict.fromkeys(one.site for one in unmatched if one.side == side))
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            parts.append(f"only the {side} calls {shown}")
    return f"; {', '.join(parts)}" if parts else ""


def _again(
    a: Run, b: Run, truth: str | Path | Run | None, folder: Path, *, block: str | None,
    model: str | Path | None, device: str, trust_remote_code: bool,
) -> str:  # fmt: skip
    """The command that goes on from here."""
    words = ["divergence", "localize", str(a.path), str(b.path)]
    words += ["--reference", _path(truth)] if truth is not None else []
    words += ["-o", str(folder)]
    words += ["--block", block] if block is not None else []
    words += ["--model", str(model)] if model is not None else []
    words += ["--device", device] if device != "auto" else []
    words += ["--trust-remote-code"] if trust_remote_code else []
    return shlex.join(words)


def _inner_modules(run: Run, block: str) -> list[str]:
    """The pattern of the modules inside ``block``, if its parameters tell of any."""
    names = [n.removeprefix(block + ".") for n in run.manifest.model.digests
             if n.startswith(block + ".")]  # fmt: skip
    return [f"{block}.*"] if any("." in name for name in names) else []


def _causal(
    maker: Maker,
    made: dict[str, Run],
    truth: Run,
    deep: Report,
    side: str,
    sites: list[str],
    step: int | None,
    escalate: bool,
    tell: Progress,
) -> CausalCheck | None:
    """The healthy side's result in the guilty one's place: what is then still wrong?"""
    assert deep.operators is not None
    first = onset_result(deep.operators)
    assert first is not None
    other = "candidate" if side == "reference" else "reference"
    guilty, healthy = replaced_sites(made, first, side)
    run = maker.operators(
        side, sites=sites, escalate=escalate, step=step, name=f"{side}-substituted",
        substitute=(guilty, made[other], healthy),
    )  # fmt: skip
    if run is None:
        return None
    pair = (made["reference"], run) if side == "candidate" else (run, made["candidate"])
    again = compare(*pair, truth=truth, progress=tell)
    if again.operators is None:
        return None
    place = (first.phase == "decode", first.order)
    itself = guilty.rpartition(":")[0] not in (first.site, first.candidate_site)
    before, after = (
        [r for r in o.results if ((r.phase == "decode", r.order) > place and r.site != first.site)
         or (itself and r.site == first.site)]
        for o in (deep.operators, again.operators)
    )  # fmt: skip
    still = [r.site for r in after if r.share > 1]
    still += [s.site for s in again.sites if s.flagged and s.site == f"{s.block}:out"
              and s.pass_ != "free" and s.block == first.block]  # fmt: skip
    return CausalCheck(
        site=first.site,
        holds=not still,
        num_after=len(after),
        before=max((r.share for r in before), default=0.0),
        largest_share=max((r.share for r in after), default=0.0),
        still=list(dict.fromkeys(still)),
    )


def _alone(made: dict[str, Run], first: Any, folder: Path, tell: Progress) -> list[OwnError]:
    """Each side's operator on its own recorded inputs, against float64."""
    found: list[OwnError] = []
    for side, path in (("reference", first.site), ("candidate", first.candidate_site)):
        out = folder / f"{side}-float64"
        try:
            right = replay(
                made[side], out=out, sites=[f"{path}:*"], reference=True, force=True, progress=None
            )
        except DivergenceError as error:
            tell("note", 0, None, f"{path} could not be computed in float64: {error.message}")
            return []
        report = compare(right, made[side])
        results = [] if report.operators is None else report.operators.results
        mine = [r for r in results if r.site == path and r.w is not None]
        if mine:
            worst = max(mine, key=lambda r: r.w)
            found.append(
                OwnError(side=side, error=worst.candidate_error, ideal=worst.floor, times=worst.w)
            )
    return found


def _reproduce(
    made: dict[str, Run], first: Any, side: str | None, folder: Path, tell: Progress
) -> str | None:
    """The guilty side's operator as a folder; None where it cannot stand alone."""
    guilty = "reference" if side == "reference" else "candidate"
    path = first.site if guilty == "reference" else first.candidate_site
    out = folder / "repro"
    try:
        repro(
            made[guilty], site=f"{path}:out", out=out, step=first.step, sample=first.sample,
            force=True,
        )  # fmt: skip
    except DivergenceError as error:
        tell("note", 0, None, f"no reproducer of {path}: {error.message}")
        return None
    return str(out)


def _path(run: str | Path | Run) -> str:
    return str(run.path if isinstance(run, Run) else run)
