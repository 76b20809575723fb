"""The commands a report ends with: what gives certainty, or goes one level deeper.

Options that made the candidate what it is (planted faults, another dtype or attention,
a label) are repeated, so that a printed command followed literally asks the same thing.
"""

from __future__ import annotations

import shlex

from divergence.run.manifest import Manifest
from divergence.run.reader import Run

__all__ = ["Advice", "WithinAdvice", "beside"]


class Advice:
    """Prints commands for one pair of runs."""

    def __init__(self, reference: Run, candidate: Run, truth: Run | None = None) -> None:
        self._a, self._b = shlex.quote(str(reference.path)), shlex.quote(str(candidate.path))
        self._truth = None if truth is None else shlex.quote(str(truth.path))
        self._reference, self._candidate = reference.manifest, candidate.manifest

    def certainty(self) -> list[str]:
        """An anchored pass, where there is none: capture the candidate like the reference."""
        anchored = beside(self._b, "-anchored")
        return [
            f"divergence capture --like {self._a} -o {anchored}"
            f"{_options(self._candidate, self._reference)}   # on the candidate's machine",
            f"divergence compare {self._a} {anchored}",
        ]

    def into_block(self, block: str) -> list[str]:
        """Everything inside a block, on both machines."""
        one, two = beside(self._a, "-deep"), beside(self._b, "-deep")
        sites = f"--sites blocks --sites {shlex.quote(block + '.*')}"
        return [
            f"divergence capture --like {self._a} -o {one} {sites}"
            f"{_options(self._reference, self._reference)}   # on the reference's machine",
            f"divergence capture --like {one} -o {two}"
            f"{_options(self._candidate, self._reference)}   # on the candidate's machine",
            f"divergence compare {one} {two}",
        ]

    def truth(self) -> list[str]:
        """Which side is wrong."""
        truth = beside(self._a, "-truth")
        return [
            f"divergence reference {self._a} -o {truth}   # on any machine with the model",
            f"divergence compare {self._a} {self._b} --reference {truth}",
        ]

    def escalate(self) -> list[str]:
        """The same inputs in float32: what a 16-bit dtype hides."""
        deep = beside(self._b, "-escalated")
        truth = self._truth or beside(self._a, "-truth")
        commands = [
            f"divergence capture --like {self._a} -o {deep} --escalate"
            f"{_options(self._candidate, self._reference)}   # on the candidate's machine"
        ]
        if self._truth is None:
            commands.append(
                f"divergence reference {self._a} -o {truth}   # on any machine with the model"
            )
        return [*commands, f"divergence compare {self._a} {deep} --reference {truth}"]

    def look_at(self, site: str) -> list[str]:
        """The tensor itself, on both sides."""
        return [
            f"divergence inspect {path} --site {shlex.quote(site)}" for path in (self._a, self._b)
        ]

    def force(self) -> list[str]:
        """Measure in spite of a blocking difference."""
        return [f"divergence compare {self._a} {self._b} --force   # measure all the same"]


class WithinAdvice(Advice):
    """Commands for one run that was compared with itself."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, run)

    def certainty(self) -> list[str]:
        """Nothing: every pair is anchored."""
        return []

    def truth(self) -> list[str]:
        """Nothing: a truth repeats one of two runs."""
        return []

    def escalate(self) -> list[str]:
        """The same tokens in float32: what a 16-bit dtype hides."""
        wide = beside(self._a, "-float32")
        return [
            f"divergence capture --like {self._a} -o {wide} --no-anchor --whole --dtype float32"
            f"{_options(self._reference, self._reference)}",
            f"divergence compare {wide}",
        ]

    def into_block(self, block: str) -> list[str]:
        """Everything inside a block, of the same run."""
        deep = beside(self._a, "-deep")
        return [
            f"divergence capture --like {self._a} -o {deep} --no-anchor --whole "
            f"--sites blocks --sites {shlex.quote(block + '.*')}"
            f"{_options(self._reference, self._reference)}",
            f"divergence compare {deep}",
        ]

    def look_at(self, site: str) -> list[str]:
        """The tensors themselves: both passes are in the one run."""
        return super().look_at(site)[:1]


def beside(quoted: str, ending: str) -> str:
    """``a`` → ``a-deep``, also where the path is quoted."""
    return f"{quoted[:-1]}{ending}'" if quoted.endswith("'") else quoted + ending


def _options(manifest: Manifest, like: Manifest) -> str:
    """What makes a run special beside the one it repeats, as options; begins with a space if
    there is any."""
    words: list[str] = []
    mine, theirs = manifest.model, like.model
    if mine.source != theirs.source:
        words += ["--model", mine.source]
    if mine.dtype != theirs.dtype and not mine.dtype.startswith("float8"):
        words += ["--dtype", mine.dtype]
    if mine.attn_implementation and mine.attn_implementation != theirs.attn_implementation:
        words += ["--attn-implementation", mine.attn_implementation]
    if not manifest.settings.deterministic and like.settings.deterministic:
        words += ["--no-deterministic"]
    for plant in manifest.plan.plants:
        words += ["--plant", plant]
    environment = manifest.environment
    if not environment.label.startswith(environment.device_name):  # one of the user's own
        words += ["--label", environment.label]
    return " " + shlex.join(words) if words else ""
