"""The directory of one descent: whose it is, and which runs in it were made on which machine.

``pair.json`` holds the ids of the two runs it belongs to, so that the runs of another pair are
never taken for theirs. ``verified.json`` holds the ids of the float64 runs that were made on a
machine which repeated that side's run: of others it is not known whose code they ran.
``localize.json`` is the answer, for `bundle`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from divergence.errors import DumpError, RunExistsError, RunWriteError
from divergence.output import write_output
from divergence.outside import json_value, read_bytes
from divergence.run.reader import Run
from divergence.run.record import MANIFEST

__all__ = ["WorkFolder"]

_PAIR, _VERIFIED, _ANSWER = "pair.json", "verified.json", "localize.json"
_RUNS = {
    "truth", "truth-operators", "truth-by-candidate", "reference-operators", "candidate-operators",
    "reference-substituted", "candidate-substituted",
}  # fmt: skip
"""Runs that may be brought from another machine."""
_MADE = _RUNS | {
    _PAIR, _VERIFIED, _ANSWER, "reference-float64", "candidate-float64", "reference-again",
    "candidate-again", "repro", "repro-reference", "repro-candidate",
}  # fmt: skip
"""All that a descent leaves in its folder."""


class WorkFolder:
    """Checked to be free, empty, or made for this pair: neither a run itself nor anybody else's
    files. With ``force`` an earlier descent of another pair is removed."""

    def __init__(self, path: Path, runs: dict[str, Run], *, force: bool) -> None:
        self.path = path
        ids = {side: run.manifest.id for side, run in runs.items()}
        self._pair = json.dumps(ids, indent=1) + "\n"
        self._check(force=force)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def claim(self) -> None:
        """Make it this pair's."""
        self._write(_PAIR, self._pair)

    def keep(self, answer: str) -> None:
        """Leave the answer there, where anything was made."""
        if self.path.is_dir():
            self._write(_ANSWER, answer)

    def verify(self, run: Run) -> None:
        """Note that the machine which made ``run`` repeats the run of that side."""
        known = [*self._verified(), run.manifest.id]
        self._write(_VERIFIED, json.dumps(known[-16:], indent=1) + "\n")

    def is_verified(self, run: Run) -> bool:
        """Was it made on a machine that repeats the run of that side?"""
        return run.manifest.id in self._verified()

    def _verified(self) -> list[str]:
        file = self.path / _VERIFIED
        try:
            verified = json_value(read_bytes(file), where=str(file))
        except DumpError:
            return []
        return verified if isinstance(verified, list) else []

    def _write(self, name: str, text: str) -> None:
        write_output(text, self.path / name, what="folder's notes", error=RunWriteError,
                     make_folder=True)  # fmt: skip

    def _check(self, *, force: bool) -> None:
        folder, text = self.path, None
        names: set[str] = set()
        try:
            if folder.exists() and not folder.is_dir():
                raise RunExistsError(
                    f"{folder} exists and is not a directory", hint="choose another -o"
                )
            if folder.exists():
                names = {entry.name for entry in folder.iterdir()}
            if _PAIR in names:
                text = read_bytes(folder / _PAIR, error=RunWriteError).decode()
            if force and names <= _MADE and text != self._pair and not names <= _RUNS:
                shutil.rmtree(folder)
                return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunWriteError(f"{folder} cannot be used: {reason}") from error
        if MANIFEST in names:
            raise RunExistsError(
                f"{folder} is a run itself", hint="choose another directory with -o"
            )
        others = sorted(names - (_RUNS if text is None else _MADE))
        if others and (text is None or (force and text != self._pair)):
            raise RunExistsError(
                f"{folder} holds other files ({others[0]})"
                + (" and nothing of a descent" if text is None else ""),
                hint="choose another directory with -o",
            )
        if text is not None and text != self._pair:
            raise RunExistsError(
                f"{folder} holds what was made for another pair of runs",
                hint="choose another directory with -o, or pass --force to replace it",
            )
