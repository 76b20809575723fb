"""import_dump(): what another tool dumped → a run."""

from __future__ import annotations

from pathlib import Path

from divergence.comparison.measure.runs import opened
from divergence.errors import DumpError, UsageError
from divergence.importing.building import manifest_of, write
from divergence.importing.dump import Layout, Notes
from divergence.importing.folder import Folder
from divergence.importing.layouts import LAYOUTS
from divergence.importing.reading import survey
from divergence.importing.rules import load_rules
from divergence.recording.new_run import check_output
from divergence.run.reader import Run
from divergence.run.schema.site import near_names
from divergence.run.storage.location import Url, location_of
from divergence.run.writing.writer import RunWriter
from divergence.words import Progress

__all__ = ["import_dump"]


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
    transformers' debugger, or a folder of files by a map.

    ``layout``: ``auto``, or a name of LAYOUTS. ``map``: a TOML file, see importing.rules. ``like``:
    the run whose model and prompts the dump is of; names, shapes and prompts are held against it.
    ``progress`` is told what was left out (event ``note``).

    Nothing is written before the whole dump was opened. Raises DumpError for a dump that cannot be
    read or is not whole, ConfigError for the map, UsageError where nothing matches.
    """
    rules = None if map is None else load_rules(map)
    folder = Folder(path)
    reader = _layout(layout, folder)
    if rules is not None and not reader.TAKES_MAP:
        raise UsageError(
            f"a dump of {reader.NAME} has names of modules and takes no map",
            where=rules.path, hint="leave --map out, or --format files",
        )  # fmt: skip
    run = None if like is None else opened(like)
    place = location_of(out)
    if not isinstance(place, Url) and folder.path.resolve() in (
        place.resolve(), *place.resolve().parents
    ):  # fmt: skip
        raise UsageError(f"{out} lies in the dump itself", hint="choose another place with -o")
    check_output(place, force=force, like=run)
    notes = Notes()
    found = survey(reader.read(folder, rules, notes), run, notes)
    manifest = manifest_of(found, name=reader.NAME, like=run, label=label, command=command)
    with RunWriter(place, manifest, force=force) as writer:
        write(writer, reader.read(folder, rules, Notes()), found, run, notes)
    made = Run.open(place)
    if progress is not None:
        for sentence in notes.sentences():
            progress("note", 0, None, sentence)
    return made


def _layout(name: str, folder: Folder) -> Layout:
    if name == "auto":
        for layout in LAYOUTS.values():
            if layout.recognise(folder):
                return layout
        raise DumpError(
            "the folder is no dump that is known", where=str(folder.path),
            hint=f"--format {', '.join(LAYOUTS)}, or files of .npy, .pt or .safetensors with --map",
        )  # fmt: skip
    if name not in LAYOUTS:
        near = near_names(name, LAYOUTS) or list(LAYOUTS)
        raise UsageError(f"there is no layout {name!r}", hint=f"one of {', '.join(near)}")
    if not LAYOUTS[name].recognise(folder):
        raise DumpError(f"the folder is no dump of {LAYOUTS[name].NAME}", where=str(folder.path),
                        hint="--format auto looks what it is")  # fmt: skip
    return LAYOUTS[name]
