"""import_dump(): what another tool dumped → a run."""

from __future__ import annotations

from pathlib import Path

from divergence.comparison.measure.runs import opened
from divergence.errors import DumpError, UsageError
from divergence.importing.building import (
    DumpLayout,
    Notes,
    ScoreLayout,
    import_scores,
    load_rules,
    manifest_of,
    survey,
    write,
)
from divergence.importing.files import DumpFolder
from divergence.importing.layouts import (
    files,
    llama_kld,
    lm_eval,
    msprobe,
    sglang,
    sglang_dumper,
    transformers,
)
from divergence.importing.layouts.rollouts import ROLLOUTS, TRAINER
from divergence.outside import read_as
from divergence.recording.new_run import check_output
from divergence.run.location import Url, location_of
from divergence.run.reader import Run
from divergence.run.site import near_names
from divergence.run.writer import RunWriter
from divergence.words import Progress

LAYOUTS: dict[str, DumpLayout] = {
    "sglang": sglang,
    "sglang-dumper": sglang_dumper,
    "msprobe": msprobe,
    "transformers": transformers,
    "files": files,
}

SCORES: dict[str, ScoreLayout] = {
    "lm-eval": lm_eval, "rollouts": ROLLOUTS, "trainer": TRAINER, "llama-kld": llama_kld,
}  # fmt: skip
"""Log-probabilities alone; ``auto`` asks them behind LAYOUTS."""
_ALL: dict[str, DumpLayout | ScoreLayout] = {**LAYOUTS, **SCORES}
"""The layouts by the name that ``--format`` gives them; ``auto`` asks them in this order."""


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

    ``layout``: ``auto``, or a name of LAYOUTS or SCORES. ``map``: a TOML file, see importing.rules
    and, of log-probabilities, importing.fields. ``like``:
    the run whose model and prompts the dump is of; names, shapes and prompts are held against it.
    ``progress`` is told what was left out (event ``note``).

    Nothing is written before the whole dump was opened. Raises DumpError for a dump that cannot be
    read or is not whole, ConfigError for the map, UsageError where nothing matches.
    """
    folder = DumpFolder(path)
    with read_as("a dump's writer", where=folder.place):
        name = _layout(layout, folder)
    reader = _ALL[name]
    if map is not None and not reader.TAKES_MAP:
        raise UsageError(
            f"a dump of {reader.NAME} has names of its own and takes no map",
            where=str(map), hint="leave --map out, or --format files",
        )  # fmt: skip
    run = None if like is None else opened(like)
    place = location_of(out)
    if not isinstance(place, Url) and folder.path.resolve() in (
        place.resolve(), *place.resolve().parents
    ):  # fmt: skip
        raise UsageError(f"{out} lies in the dump itself", hint="choose another place with -o")
    check_output(place, force=force, like=run)
    notes = Notes()
    with read_as(reader.NAME, where=folder.place):
        if name in SCORES:
            made = import_scores(
                SCORES[name], folder, place, map=map, like=run, label=label, force=force,
                command=command, notes=notes,
            )  # fmt: skip
        else:
            rules, tensors = None if map is None else load_rules(map), LAYOUTS[name]
            surveyed = survey(tensors.read(folder, rules, notes), run, notes)
            manifest = manifest_of(
                surveyed, name=tensors.NAME, like=run, label=label, command=command
            )
            with RunWriter(place, manifest, force=force) as writer:
                write(writer, tensors.read(folder, rules, Notes()), surveyed, run, notes)
            made = Run.open(place)
    if progress is not None:
        for sentence in notes.sentences():
            progress("note", 0, None, sentence)
    return made


def _layout(name: str, folder: DumpFolder) -> str:
    if name == "auto":
        for layout_name, layout in _ALL.items():
            if layout.recognise(folder):
                return layout_name
        raise DumpError(
            "the folder is no dump that is known", where=str(folder.path),
            hint=f"--format {', '.join(_ALL)}, or files of .npy, .pt or .safetensors with --map",
        )  # fmt: skip
    if name not in _ALL:
        near = near_names(name, _ALL) or list(_ALL)
        raise UsageError(f"there is no layout {name!r}", hint=f"one of {', '.join(near)}")
    if not _ALL[name].recognise(folder):
        raise DumpError(f"the folder is no dump of {_ALL[name].NAME}", where=str(folder.path),
                        hint="--format auto looks what it is")  # fmt: skip
    return name
