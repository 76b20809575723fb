"""May A of an earlier diff stand for A of this one?

It may where the same command would run the same: the same words, the same files of the model, of
the prompts and of the settings, the same code and libraries, environment, processors and kernel.
Files are known again by size, inode and times; a change of a file changes its ctime, which nobody
sets. What cannot be known (a model on a hub that does not answer, a system that does not tell when
it was started) is no match: A is captured anew.

Earlier diffs are looked for beside this one's folder. Their runs are not moved: a link, or a copy
where the file system has no links, is A here.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from divergence.errors import DumpError
from divergence.facts import Fact, fact
from divergence.output import write_output
from divergence.outside import MAX_LINE_BYTES, read_bytes

MADE = "made.json"
_MOST_FOLDERS = 200
_SHELL = """
    _ PWD OLDPWD SHLVL TERM COLORTERM COLUMNS LINES WINDOWID DISPLAY NO_COLOR FORCE_COLOR
    SSH_AUTH_SOCK SSH_CLIENT SSH_CONNECTION SSH_TTY TMUX TMUX_PANE STY HISTFILE PS1
    PYTEST_CURRENT_TEST
""".split()
"""Of the terminal, not of what runs in it."""
Seen = tuple[int, int, int, int] | None
"""Size, inode, mtime and ctime of a file, in ns; None where there is none."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a run was made of. ``code`` is known once it has run."""

    words: list[str]
    python: str
    machine: list[str]
    environment: str
    given: dict[str, Seen]
    """Files of the model, prompts and settings."""
    code: dict[str, Seen]


def made_of(
    words: list[str],
    *,
    python: str,
    variables: Mapping[str, str],
    model: str,
    files: Iterable[Path | str],
) -> Origin | None:
    """Return what the command would be made of now. None where that cannot be known."""
    from divergence.run.manifest import digest_json

    place = model_folder(model)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    if place is None:
        return None
    parts = [place, *place.rglob("*")] if place.is_dir() else [place]
    environment = {
        key: value for key, value in {**os.environ, **variables}.items() if key not in _SHELL
    }
    return Origin(
        words=words,
        python=python,
        machine=[platform.platform(), boot, *map(str, sorted(os.sched_getaffinity(0)))],
        environment=digest_json(environment),
        given=seen([*parts, *files]),
        code={},
    )


def model_folder(model: str) -> Path | None:
    """Find where a model's files lie: of one of the hub, if that still has what is here."""
    from divergence.run.record import expanded

    if expanded(model).exists():
        return expanded(model).resolve()
    with contextlib.suppress(Exception):  # of the network, and of any version of the client
        from huggingface_hub import HfApi, constants, try_to_load_from_cache

        config = try_to_load_from_cache(model, "config.json")
        if isinstance(config, str):
            folder = Path(config).parent
            offline = constants.HF_HUB_OFFLINE
            if offline or HfApi().model_info(model, timeout=5).sha == folder.name:
                return folder
    return None


def seen(paths: Iterable[Path | str]) -> dict[str, Seen]:
    """Each file as it is now."""
    files: dict[str, Seen] = {}
    for path in paths:
        place = os.path.abspath(path)
        try:
            status = os.stat(place)
        except OSError:
            files[place] = None
            continue
        files[place] = status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    return files


def note(made: Origin, code: Iterable[str], folder: Path) -> None:
    """Writes beside a run what it was made of. Nothing where it changed meanwhile."""
    if seen(made.given) == made.given:
        whole = msgspec.structs.replace(made, code=seen(code))
        write_output(msgspec.json.encode(whole).decode(), folder / MADE, what="note")


def read(folder: Path) -> Origin | None:
    """Read what the run in the folder of a diff was made of."""
    try:
        data = read_bytes(folder / MADE, most=MAX_LINE_BYTES, error=DumpError)
        return msgspec.json.decode(data, type=Origin)
    except (DumpError, msgspec.DecodeError):
        return None


def find(made: Origin, folder: Path) -> tuple[Path | None, Fact | None]:
    """(the folder of a diff beside ``folder`` whose A is what this one's would be, what keeps the
    last one of the same command from being that)."""
    notes = [
        path
        for path in folder.resolve().parent.glob(f"*/{MADE}")
        if path.parent != folder.resolve()
    ]
    notes.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    reason = None
    for path in notes[:_MOST_FOLDERS]:
        earlier = read(path.parent)
        if earlier is None or earlier.words != made.words:
            continue
        change = changed(earlier, made)
        if change is None:
            return path.parent, None
        reason = reason or fact("experiments.captured_anew", what=change, earlier=path.parent.name)
    return None, reason


def changed_file(earlier: Origin, now: Origin) -> str | None:
    """The first of the files that it was given which is another one now."""
    paths = [*now.given, *earlier.given]
    differ = [path for path in paths if earlier.given.get(path) != now.given.get(path)]
    return Path(differ[0]).name if differ else None


def changed(earlier: Origin, now: Origin) -> str | None:
    """Return what of it is another one now: a file, or ``code``, ``python``, ..."""
    if (file := changed_file(earlier, now)) is not None:
        return file
    if not earlier.code or seen(earlier.code) != earlier.code:
        return "code"
    others = ("python", "environment", "machine")
    return next((name for name in others if getattr(earlier, name) != getattr(now, name)), None)


def take(earlier: Path, folder: Path, name: str) -> bool:
    """The run of an earlier diff in this one's folder, too. Was that possible?"""
    try:
        shutil.copytree(earlier / name, folder / name, copy_function=_link)
        shutil.copy2(earlier / MADE, folder / MADE)
    except (OSError, shutil.Error):
        shutil.rmtree(folder / name, ignore_errors=True)
        return False
    return True


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
