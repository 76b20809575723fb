"""Goldens: the run that CI compares with, what may be one, and how another takes its place.

A golden is a directory or an archive of this machine. Storing is a copy beside the place and
renames, so that whatever stops it, the old golden or the new one is whole. What only the run itself
was for is left out: its anchored pass, which got the inputs of another run. Of its truth the floor
stays, which names the side that a check finds wrong. The old golden is kept
where that is asked for; else it is in the history of what holds goldens.

Of several goldens in one folder, by device and dtype, the one that fits a run best is taken. One of
another device or dtype is compared as well, since some golden is better than none; it is said, and
preflight and the policy have their say.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from divergence.comparison.result import Report
from divergence.errors import (
    IncomparableError,
    RunExistsError,
    RunFormatError,
    RunWriteError,
    UsageError,
)
from divergence.facts import Fact, fact, plain, sentence
from divergence.gate.result import Blessing
from divergence.run.command import command_line
from divergence.run.record import OWN_TRUTH
from divergence.run.site import natural_key
from divergence.run.storage import ARCHIVES, Location, Url, archive_kind, folder_of, location_of
from divergence.run.target import store_run
from divergence.words import Progress

if TYPE_CHECKING:
    from divergence.run.reader import Run


def bless(
    golden: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    name_map: str | Path | None = None,
    allow_nonfinite: bool = False,
    keep_previous: bool = False,
    agree: Callable[[Blessing], bool] | None = None,
    progress: Progress | None = None,
) -> Blessing:
    """Store ``new`` as the golden and say what that changes.

    The run, without its anchored pass and its truth's tensors, is copied beside its place and
    renamed into it: a directory, or one file where the name ends in .tar or .zip. With
    ``keep_previous`` the old golden stays as GOLDEN.previous (golden.previous.zip of an archive),
    replacing an earlier one. A .zip is compressed. ``agree``: asked before a golden is replaced,
    with what would be told of it; where it says no, nothing is replaced: UsageError.

    Refuses an incomplete or damaged run, one with planted faults, one with results of another run,
    and, unless ``allow_nonfinite``, one in which a block or the model hands on nan or inf.
    """
    from divergence.run.contents import first_nonfinite, nonfinite_text
    from divergence.run.reader import Run, without_passes

    _refuse_far(golden, new)
    source, target = location_of(new), Path(os.path.abspath(folder_of(golden)))
    suffix = "" if archive_kind(target) is None else target.suffix
    previous = target.with_name(target.name.removesuffix(suffix) + ".previous" + suffix)
    run = Run.open(source)
    _refuse_damaged(run, source)
    bad = None if allow_nonfinite else first_nonfinite(run.manifest, run.records)
    if bad is not None:
        raise UsageError(
            f"{source} cannot become a golden: {nonfinite_text(bad)}",
            hint="find out why, or --bless --allow-nonfinite if this model is meant to do so",
        )
    real = None if isinstance(source, Url) else source.resolve()
    if real is not None and (
        target.resolve() in (real, *real.parents) or real in target.resolve().parents
    ):
        raise UsageError(f"{new} is the golden, or lies in it", hint="bless a run from elsewhere")
    inside = next((path for path in target.parents if (path / "manifest.json").is_file()), None)
    if inside is not None:
        raise UsageError(f"{inside} is a run, and no folder of goldens", hint="another place")
    for place in (target, previous) if keep_previous else (target,):
        _refuse_other(place)
    changes = _changes(target, run, str(source), name_map, progress) if target.exists() else {}
    kept = without_passes(run, ("anchored", *OWN_TRUTH))
    if not kept.records:
        raise UsageError(
            f"{run.path} cannot become a golden: it holds an anchored pass alone",
            hint=command_line("capture", like=run.path, o="NEW"),
        )
    samples, made = run.manifest.tokens.samples, dict[str, Any]()
    if any(sample.chosen_ids not in ([], sample.generated_ids) for sample in samples):
        made["forced_by"] = run.manifest.tokens.forced_by

    def ask(num_bytes: int) -> None:
        made["num_bytes"] = num_bytes
        would = Blessing(golden=str(golden), **made, **changes)
        if target.exists() and agree is not None and not agree(would):
            raise UsageError(f"{golden} is the golden as before: nothing was replaced")

    try:
        if target.exists():
            files = target.rglob("*") if target.is_dir() else [target]
            changes["replaced_bytes"] = sum(f.stat().st_size for f in files if f.is_file())
        if store_run(
            kept,
            target,
            previous=previous if keep_previous else None,
            deflate=True,
            agree=ask,
            progress=progress,
        ):
            changes["previous"] = str(Path(golden).parent / previous.name)
    except (OSError, shutil.Error) as error:
        raise RunWriteError(
            f"the golden could not be stored: {error}", where=str(target)
        ) from error
    return Blessing(golden=str(golden), **made, **changes)


def _refuse_other(place: Path) -> None:
    from divergence.run.target import check_archive

    is_run = (place / "manifest.json").is_file()
    if archive_kind(place) is not None and place.is_file():
        with contextlib.suppress(RunExistsError):
            check_archive(place, force=True)
            is_run = True
    if place.exists() and not is_run:
        raise UsageError(
            f"{place} exists and is no run, so it is not replaced", hint="move it away"
        )


def _changes(
    target: Path, run: Run, source: str, name_map: str | Path | None, progress: Progress | None
) -> dict[str, Any]:
    from divergence.comparison.api import compare
    from divergence.run.contents import site_names
    from divergence.run.reader import Run

    changes: dict[str, Any] = {}
    old_sites: set[str] = set()
    try:
        old = Run.open(target)
        changes["replaced_created"] = old.manifest.created
        old_sites = site_names(old.records)
        if old.manifest.id == run.manifest.id:
            changes["reason"] = sentence(fact("gate.same_run", id=old.manifest.id))
        else:
            report = compare(target, source, name_map=name_map, progress=progress)
            changes |= {
                "verdict": report.verdict.kind,
                "summary": report.verdict.summary,
                "report": report,
            }
    # a golden that cannot be compared any more is what blessing is for
    except (IncomparableError, RunFormatError, UsageError) as error:
        changes["reason"] = error.message
    new_sites = site_names(run.records)
    changes["added_sites"] = sorted(new_sites - old_sites, key=natural_key)
    changes["removed_sites"] = sorted(old_sites - new_sites, key=natural_key)
    return changes


def _refuse_far(golden: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    place = location_of(golden)
    if not isinstance(place, Url) and (
        place.is_dir() or archive_kind(place) is not None or not place.is_file()
    ):
        return
    name = str(place)
    archive = name if name.lower().endswith(ARCHIVES) else f"{name.rstrip('/')}.tar"
    raise UsageError(
        f"{place} is no directory or archive of this machine, and only such is replaced here",
        hint=command_line("pack", new, o=archive, force=archive == name)
        + ", and check against that",
    )


def _refuse_damaged(run: Run, source: Location) -> None:
    manifest = run.manifest
    only_changed = manifest.plan.only_changed
    problems: list[Fact] = []
    if not manifest.complete:
        problems.append(fact("gate.stopped", by=manifest.stopped_by))
    unfit = _why_no_golden(
        manifest.settings.compute_dtype, manifest.plan.plants, manifest.plan.substitutes
    )
    problems += [] if unfit is None else [unfit]
    if not run.records:
        problems.append(fact("gate.no_record"))
    problems += map(plain, run.verify()[:3])
    changed_alone = only_changed is not None and not problems
    if changed_alone:
        problems.append(fact("gate.only_changed", run=only_changed))
    if problems:
        raise UsageError(
            f"{source} cannot become a golden: {'; '.join(map(sentence, problems))}",
            hint="capture it in full, without --only-changed"
            if changed_alone
            else "capture it again, complete and without --plant",
        )


def refuse_unfit(report: Report) -> None:
    """Raise UsageError where both runs are one, and where the golden is none."""
    golden, new = report.reference, report.candidate
    if golden.id == new.id:
        raise UsageError(
            f"{new.path} is the golden itself, or a copy of it (run {golden.id}): a run "
            "compared with itself proves nothing",
            hint=command_line("capture", like=golden.path, o="NEW"),
        )
    problem = _why_no_golden(golden.compute_dtype, golden.plants, golden.substitutes)
    if problem is not None:
        raise UsageError(
            f"{golden.path} is no golden: {sentence(problem)}",
            hint="capture one without, and store it: divergence check GOLDEN RUN --bless",
        )
    if new.compute_dtype is not None:
        raise UsageError(
            f"{new.path} is a truth, computed in {new.compute_dtype}, and not a run to check",
            hint=command_line("check", "GOLDEN", "RUN", truth=new.path),
        )


def _why_no_golden(
    compute_dtype: str | None, plants: list[str], substitutes: list[str]
) -> Fact | None:
    """Say why the results of such a run must not be asked of another, or None."""
    if compute_dtype is not None:
        return fact("gate.is_truth", dtype=compute_dtype)
    if plants:
        return fact("gate.planted", plants=plants)
    if substitutes:
        return fact("gate.substituted", runs=substitutes)
    return None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The golden that a run is held against."""

    path: Path
    text: str
    """Which one, of how many, and how well it fits."""


def golden_name(run: Run) -> str:
    """Return what to call a golden among others: ``cpu-bfloat16``."""
    return f"{run.manifest.environment.device_type}-{_dtype(run)}"


def goldens_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The runs in a folder that is none itself; empty for anything else. Hidden ones and what
    ``--keep-previous`` has left are passed over."""
    place = location_of(folder)
    if not isinstance(place, Path) or not place.is_dir() or (place / "manifest.json").exists():
        return []
    paths = [path for path in sorted(place.iterdir()) if not path.name.startswith(".")]
    return [
        path
        for path in paths
        if ".previous" not in (path.suffix, Path(path.stem).suffix)
        and ((path / "manifest.json").is_file() if path.is_dir() else path.suffix in ARCHIVES)
    ]


def choose_golden(
    folder: str | os.PathLike[str], new: str | os.PathLike[str] | Run
) -> Choice | None:
    """The golden in ``folder`` that fits ``new`` best; None where it is no folder of goldens.

    The same dtype counts most, then the same kind of device, then the same device; of equal ones
    the first by name.
    """
    goldens = goldens_in(folder)
    if not goldens:
        return None
    from divergence.run.reader import Run

    run = Run.open(new)
    fits = []
    for path in goldens:
        golden, its = Run.open(path), run.manifest.environment
        expected = golden.manifest.environment
        fit = (
            _dtype(golden) == _dtype(run),
            expected.device_type == its.device_type,
            expected.device_name == its.device_name,
        )
        fits.append((fit, path))
    (dtype, kind, device), path = max(fits, key=lambda item: item[0])
    lacks = [what for what, same in (("dtype", dtype), ("kind", kind)) if not same]
    choice = fact(
        "gate.choice",
        path=str(path),
        num=len(goldens),
        lacks=" ".join(lacks),
        device=device,
        name=golden_name(run),
    )
    return Choice(path=path, text=sentence(choice))


def _dtype(run: Run) -> str:
    return run.manifest.model.dtype.removeprefix("torch.")
