"""import_dump(): what another tool dumped → a run."""

from __future__ import annotations

from pathlib import Path

from divergence.comparison.align import opened
from divergence.domains.importing.building import manifest_of, write
from divergence.domains.importing.dumped import Notes
from divergence.domains.importing.formats import FORMATS, layout_of
from divergence.domains.importing.rules import load_rules
from divergence.domains.importing.scores import import_scores, load_fields
from divergence.domains.importing.survey import survey
from divergence.errors import DumpError, UsageError
from divergence.outside import read_as
from divergence.recording.new_run import check_output
from divergence.run.foreign import DumpFolder
from divergence.run.reader import Run
from divergence.run.site import near_names
from divergence.run.storage import Url, location_of
from divergence.run.writer import RunWriter
from divergence.words import Progress


def import_dump(
    path: str | Path,
    *,
    out: str | Path | Url,
    layout: str = "auto",
    map: str | Path | None = None,
    like: str | Path | Run | None = None,
    label: str | None = None,
    force: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Make a run of what another tool dumped: SGLang's forward hooks or dumper, msprobe,
    transformers' debugger, or a folder of files by a map; or of log-probabilities: rollouts, and
    what a trainer said of them.

    ``layout``: ``auto``, or a name of FORMATS. ``map``: a TOML file, which docs/importing.md and,
    of log-probabilities, docs/rl.md show. ``like``: the run whose model and prompts the dump is of;
    names, shapes and prompts are held against it. ``progress`` is told what was left out (event
    ``note``).

    Nothing is written before the whole dump was opened. Raises DumpError for a dump that cannot be
    read or is not whole, ConfigError for the map, UsageError where nothing matches.
    """
    folder = DumpFolder(path)
    if layout not in ("auto", *FORMATS):
        near = near_names(layout, FORMATS) or list(FORMATS)
        raise UsageError(f"there is no layout {layout!r}", hint=f"one of {', '.join(near)}")
    tried = [layout_of(name) for name in (FORMATS if layout == "auto" else [layout])]
    with read_as("a dump's writer", where=folder.place):
        form = next((form for form in tried if form.recognise(folder)), None)
    if form is None and layout == "auto":
        if len(folder.names) == 1 and folder.names[0].endswith(".json"):
            folder.json(folder.names[0])  # or says where it is damaged
        raise DumpError(
            "this is no dump that is known",
            where=str(folder.path),
            hint=f"--format {', '.join(FORMATS)}, or files of .npy, .pt or .safetensors with --map",
        )
    if form is None:
        raise DumpError(
            f"this is no dump of {tried[0].words}",
            where=str(folder.path),
            hint="--format auto looks what it is",
        )
    if map is not None and not form.takes_map:
        raise UsageError(
            f"a dump of {form.words} has names of its own and takes no map",
            where=str(map),
            hint="leave --map out, or --format files",
        )
    run = None if like is None else opened(like)
    place = location_of(out)
    if not isinstance(place, Url) and folder.path.resolve() in (
        place.resolve(),
        *place.resolve().parents,
    ):
        raise UsageError(f"{out} lies in the dump itself", hint="choose another place with -o")
    check_output(place, force=force, like=run)
    notes = Notes()
    with read_as(form.words, where=folder.place):
        if form.scores is not None:
            fields = None if map is None else load_fields(map)
            made = import_scores(
                form.words,
                form.scores(folder, fields, notes),
                place,
                like=run,
                label=label,
                force=force,
                command=command,
            )
        else:
            assert form.read is not None
            rules = None if map is None else load_rules(map)
            surveyed = survey(form.read(folder, rules, notes), run, notes)
            manifest = manifest_of(
                surveyed, name=form.words, dtype=form.dtype, like=run, label=label, command=command
            )
            if form.dtype is not None:
                notes.say(f"what the model computed in is not told: {form.dtype} is taken")
            with RunWriter(place, manifest, force=force) as writer:
                write(writer, form.read(folder, rules, Notes()), surveyed, run, notes)
            made = Run.open(place)
    if progress is not None:
        for sentence in notes.sentences():
            progress("note", 0, None, sentence)
    return made
