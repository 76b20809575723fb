"""Every new run needs these, whatever makes it: a free place, and where it comes from."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from divergence._version import __version__
from divergence.domain import hook_places, placed
from divergence.errors import RunExistsError, RunWriteError
from divergence.recording.engines.identity import without_home
from divergence.recording.machine import collect_environment
from divergence.run.manifest import (
    UNKNOWN,
    ArithmeticFact,
    EngineNote,
    Manifest,
    ModelIdentity,
    ModuleNote,
)
from divergence.run.reader import Run
from divergence.run.storage import Location, archive_kind, same_location
from divergence.run.target import check_target, partial_of
from divergence.run.writer import new_run_id
from divergence.words import Progress


def provenance(
    device: str, *, label: str | None, command: str | None, like: Manifest | None = None
) -> dict[str, Any]:
    """``id``, ``tool_version``, ``created``, ``command``, ``like`` and ``environment`` of a new
    run on ``device``. The command names no home directory. ``like``: the run it repeats."""
    return {
        "id": new_run_id(),
        "tool_version": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": None if command is None else without_home(command),
        "like": None if like is None else like.id,
        "environment": collect_environment(device, label=label),
    }


class PlannedSite(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a capture would write for one site. Bytes are 0 where the tensor is stored at
    another site."""

    site: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    bytes_prefill: int
    """Over all prompts."""
    bytes_per_step: int
    """Of one decode step of one group."""
    num_steps: int
    bytes: int
    """Over the whole capture."""

    @classmethod
    def of_case(
        cls, path: str, operator: str, shape: tuple[int, ...], dtype: str, num_bytes: int
    ) -> PlannedSite:
        """A case of a suite, by its first tensor; the bytes are those of all its inputs."""
        return cls(
            site=path,
            role=operator,
            shape=shape,
            dtype=dtype,
            bytes_prefill=num_bytes,
            bytes_per_step=0,
            num_steps=1,
            bytes=num_bytes,
        )


def unlike(
    like: Manifest, model: ModelIdentity, engine: EngineNote, modules: Mapping[str, ModuleNote]
) -> Iterator[str]:
    """Say, before anything runs, what shows that this is not the model of the run that is
    repeated."""
    recorded = like.model
    blocks = [
        sum(note.role == "block" for note in notes.values())
        for notes in (modules, like.plan.modules)
    ]
    if all(blocks) and blocks[0] != blocks[1]:
        yield f"this model has {blocks[0]} blocks, and that of the recorded run {blocks[1]}"
    if recorded.dtype != model.dtype or recorded.digest == model.digest:
        return
    engines = [engine_note for engine_note in (engine, like.engine) if engine_note is not None]
    in_part = any("weights" in engine_note.facts for engine_note in engines) or any(
        UNKNOWN in identity.digests.values() for identity in (model, recorded)
    )
    new, old = model.digests, recorded.digests
    both = [name for name in old if UNKNOWN not in (old[name], new.get(name, UNKNOWN))]
    other = [name for name in both if new[name] != old[name]]
    say = "compare will say which differ"
    if not in_part:
        there = f"({model.digest[:12]}, there {recorded.digest[:12]})"
        yield f"these are not the weights of the recorded run {there}: {say}"
    elif other:
        share = f"{len(other)} of the {len(both)} weights that both tell ({other[0]}, ...)"
        yield f"{share} are not those of the recorded run: {say}"
    elif not both:
        yield "no weight is told by a name of the recorded run: it may be another model"


def probed(device: str, on_progress: Progress) -> list[ArithmeticFact]:
    """Ask quick probes about the device's arithmetic."""
    on_progress("probe", 0, None, "")
    return [item for place in hook_places("arithmetic").values() for item in placed(place)(device)]


def check_output(
    out: Location, *, force: bool, like: Run | None, substitutes: Iterable[Run] = ()
) -> None:
    """Refuse before hours of work what the writer would refuse after them, and to replace a run
    that the capture reads: ``like``, and those whose results are put in place of operators'."""
    gathered = out if archive_kind(out) is None else partial_of(out)
    read = [(like, "the run to be repeated")] if like is not None else []
    read += [(run, "the run that --substitute reads") for run in substitutes]
    for run, what in read:
        if same_location(out, run.path) or same_location(gathered, run.path):
            raise RunExistsError(f"{out} is {what}", hint="choose another -o")
    try:
        check_target(out, force=force)
    except OSError as error:
        raise RunWriteError(f"{out} cannot be used: {error.strerror}") from error
