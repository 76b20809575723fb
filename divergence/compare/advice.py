"""The commands a report ends with: what gives certainty, or goes one level deeper.

Options that made the candidate what it is (planted faults, another dtype or attention, several
ranks, a label) are repeated, so that a printed command followed literally asks the same thing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from divergence.run.location import ARCHIVES
from divergence.run.manifest import Manifest
from divergence.run.mesh import num_ranks
from divergence.run.reader import Run
from divergence.run.site import module_of
from divergence.run.trust import ATTENTION

__all__ = ["Advice", "WithinAdvice", "beside"]

_MOST_SITES = 6
"""Named in one command."""


class Advice:
    """Prints commands for one pair of runs."""

    def __init__(self, reference: Run, candidate: Run, truth: Run | None = None) -> None:
        self._a, self._b = shlex.quote(str(reference.path)), shlex.quote(str(candidate.path))
        self._truth = None if truth is None else shlex.quote(str(truth.path))
        self._reference, self._candidate = reference.manifest, candidate.manifest
        self.divided = candidate.manifest.mesh is not None  # among several ranks
        self._inputs = {
            module_of(record.site)
            for record in reference.records
            if record.pass_ == "free"
            and record.step == 0
            and record.site.endswith(":in")
            and reference.has_bytes(record)
        }

    def certainty(self, flagged: Sequence[str] = ()) -> list[str]:
        """An anchored pass, where there is none: capture the candidate like the reference, and
        first the reference with all that anchors one. ``flagged``: sites to keep in full, where
        not all were."""
        anchored, again = beside(self._b, "-anchored"), self._anchoring(flagged)
        first = beside(self._a, "-blocks") if again else self._a
        return [
            *again,
            f"{_capture(self._candidate)} --like {first} -o {anchored}"
            f"{_options(self._candidate, self._reference)}   # on the candidate's machine",
            f"divergence compare {first} {anchored}",
        ]

    def in_full(self, flagged: Sequence[str] = ()) -> list[str]:
        """The side that kept no bytes once more with them: the blocks, and ``flagged`` sites
        beside them. Where it is the reference, both: without its bytes it anchors nothing."""
        if self._reference.plan.store != "full":
            return self.certainty(flagged)
        if self._candidate.plan.store == "full":
            return []
        out = beside(self._b, "-full")
        words = [f"--sites {shlex.quote(site)}" for site in ["blocks", *flagged[:_MOST_SITES]]]
        return [
            f"{_capture(self._candidate)} --like {self._a} -o {out} --store full {' '.join(words)}"
            f"{_options(self._candidate, self._reference)}   # on the candidate's machine",
            f"divergence compare {self._a} {out}",
        ]

    def _anchoring(self, flagged: Sequence[str]) -> list[str]:
        """The reference once more, with every block's input; nothing where it has them."""
        plan, settings = self._reference.plan, self._reference.settings
        blocks = _blocks(self._reference)
        known = blocks or not {"blocks", "modules"}.isdisjoint(plan.sites)
        if plan.positions is None and known and self._inputs.issuperset(blocks):
            return []
        out = beside(self._a, "-blocks")
        where = "   # on the reference's machine"
        if plan.positions is not None:  # a run cannot be repeated with more tokens than it kept
            source = shlex.quote(self._reference.model.source)
            return [
                f"{_capture(self._reference)} {source} -o {out} --prompts FILE"
                f"{' --batch' if settings.batch else ''}{_mesh(self._reference)}{where}: "
                "its prompts, all token positions"
            ]
        sites = plan.sites if plan.store == "full" else flagged[:_MOST_SITES]
        words = [f"--sites {shlex.quote(site)}" for site in dict.fromkeys(["blocks", *sites])]
        if plan.store != "full":
            words.append("--store full")
        if plan.steps is not None:
            words.append(f"--steps 0-{max(settings.max_new_tokens, 1) - 1}")
        return [
            f"{_capture(self._reference)} --like {self._a} -o {out} {' '.join(words)} --no-anchor"
            f"{_options(self._reference, self._reference)}{where}"
        ]

    def into_block(self, block: str, *, hidden: bool = False) -> list[str]:
        """Everything inside a block, on both machines; ``hidden``: it shows in the escalated
        pass alone, against a truth. Operators are recorded in one process alone, and those of
        other batches are no pairs."""
        ranks = self.divided or self._reference.mesh is not None
        whole = self._reference.plan.store == "full"  # or no run of a descent is anchored to it
        alike = self._reference.tokens.groups == self._candidate.tokens.groups
        down = f"divergence localize {self._a} {self._b} -o {_folder(self._b, '-localized')}"
        down += f" --reference {self._truth}" if self._truth else ""
        down += "   # on a machine with the model; or by hand:"
        one, two = beside(self._a, "-deep"), beside(self._b, "-deep")
        inside = (block + ".*", f"ops@{block}") if alike and not ranks else (block + ".*",)
        sites = " ".join(["--sites blocks", *(f"--sites {shlex.quote(one)}" for one in inside)])
        sites += "" if whole else " --store full"
        escalate = " --escalate" if hidden else ""
        right = beside(one, "-truth") if hidden or self._truth else None
        return [
            *([down] if whole and not ranks else []),
            # operators of a pass that is anchored itself would have no partner in the candidate's
            f"{_capture(self._reference)} --like {self._a} -o {one} --no-anchor {sites}"
            f"{_options(self._reference, self._reference)}   # on the reference's machine",
            f"{_capture(self._candidate)} --like {one} -o {two}{escalate}"
            f"{_options(self._candidate, self._reference)}   # on the candidate's machine",
            *([f"divergence reference {one} -o {right}   # on the reference's machine"]
              if right else []),
            f"divergence compare {one} {two}" + (f" --reference {right}" if right else ""),
        ]  # fmt: skip

    def inside(self, block: str) -> list[str]:
        """What looks inside a block that stands out; nothing where no descent is possible."""
        if self.divided or self._reference.mesh is not None or self._reference.plan.store != "full":
            return []
        out = _folder(self._b, "-localized")
        return [
            f"divergence localize {self._a} {self._b} -o {out} --block {shlex.quote(block)}"
            "   # on a machine with the model"
        ]

    def truth(self, *, full: bool = False) -> list[str]:
        """Which side is wrong. ``full``: ``in_full`` is followed first, and its pair is held
        against the truth, which judges nothing that is not there in full."""
        a, b = self._a, self._b
        if full and self._reference.plan.store != "full":
            a, b = beside(a, "-blocks"), beside(b, "-anchored")
        elif full:
            b = beside(b, "-full")
        truth = beside(a, "-truth")
        return [
            f"divergence reference {a} -o {truth}   # on the reference's machine",
            f"divergence compare {a} {b} --reference {truth}",
        ]

    def escalate(self) -> list[str]:
        """The same inputs in float32: what a 16-bit dtype hides. Nothing for two dtypes, whose
        weights are not the same to float32's last bit, and for a candidate of several ranks, which
        make no such pass."""
        if self._candidate.model.dtype != self._reference.model.dtype or self.divided:
            return []
        again = self._anchoring(()) if self._reference.plan.store != "full" else []
        first = beside(self._a, "-blocks") if again else self._a
        deep = beside(self._b, "-escalated")
        known = self._truth is not None and not again
        truth = self._truth if known else beside(first, "-truth")
        commands = [
            *again,
            f"divergence capture --like {first} -o {deep} --escalate"
            f"{_options(self._candidate, self._reference)}   # on the candidate's machine",
        ]
        if not known:
            commands.append(
                f"divergence reference {first} -o {truth}   # on the reference's machine"
            )
        return [*commands, f"divergence compare {first} {deep} --reference {truth}"]

    def operator(self, site: str, candidate_site: str, side: str | None) -> list[str]:
        """The operator by itself, as a script for whoever made it."""
        path, name = (self._a, site) if side == "reference" else (self._b, candidate_site)
        return [
            f"divergence repro {path} --site {shlex.quote(name + ':out')} "
            f"-o {_folder(path, '-repro')}   # a script that shows it without the model"
        ]

    def operator_input(self, site: str, side: str | None) -> list[str]:
        """What one side alone calls, and how."""
        path = self._a if side == "reference" else self._b
        return [f"divergence inspect {path} --site {shlex.quote(site)}"]

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

    def whole(self) -> list[str]:
        """The run with the pass that its decode steps are held against."""
        other = beside(self._a, "-whole")
        command = f"{_capture(self._reference)} --like {self._a} -o {other} --whole"
        return [command + _mesh(self._reference), f"divergence compare {other}"]

    def certainty(self, flagged: Sequence[str] = ()) -> list[str]:
        """Nothing: every pair is anchored."""
        return []

    def inside(self, block: str) -> list[str]:
        """Nothing: a descent takes two runs."""
        return []

    def truth(self, *, full: bool = False) -> list[str]:
        """Nothing: a truth repeats one of two runs."""
        return []

    def escalate(self) -> list[str]:
        """The same tokens in float32: what a 16-bit dtype hides."""
        wide = beside(self._a, "-float32")
        return [
            f"{_capture(self._reference)} --like {self._a} -o {wide} --no-anchor --whole "
            "--dtype float32"
            f"{_options(self._reference, self._reference)}",
            f"divergence compare {wide}",
        ]

    def into_block(self, block: str, *, hidden: bool = False) -> list[str]:
        """Everything inside a block, of the same run."""
        deep = beside(self._a, "-deep")
        return [
            f"{_capture(self._reference)} --like {self._a} -o {deep} --no-anchor --whole "
            f"--sites blocks --sites {shlex.quote(block + '.*')}"
            f"{_options(self._reference, self._reference)}",
            f"divergence compare {deep}",
        ]

    def look_at(self, site: str) -> list[str]:
        """The tensors themselves: both passes are in the one run."""
        return super().look_at(site)[:1]


def _blocks(manifest: Manifest) -> set[str]:
    """The blocks that were recorded, and by the names of the parameters those beside them."""
    found = {path for path, note in manifest.plan.modules.items() if note.role == "block"}
    for stack in {path.rpartition(".")[0] for path in found}:
        for name in manifest.model.digests:
            number = name.removeprefix(f"{stack}.").partition(".")[0]
            if name.startswith(f"{stack}.") and number.isdecimal():
                found.add(f"{stack}.{number}")
    return found


def beside(quoted: str, ending: str) -> str:
    """``a`` → ``a-deep``, ``a.zip`` → ``a-deep.zip``; also where the path is quoted."""
    stem, kind = _stem(quoted)
    return shlex.quote(stem + ending + kind)


def _folder(quoted: str, ending: str) -> str:
    """The same for what is always a directory of this machine."""
    stem, _ = _stem(quoted)
    return shlex.quote((stem.rpartition("/")[2] if "://" in stem else stem) + ending)


def _stem(quoted: str) -> tuple[str, str]:
    """A path without its quotes, and what it ends in if it is an archive's."""
    (path,) = shlex.split(quoted)
    kind = next((path[-len(one) :] for one in ARCHIVES if path.lower().endswith(one)), "")
    return path.removesuffix(kind), kind


def _capture(manifest: Manifest) -> str:
    """The command that captures with as many processes as made the run."""
    start = f"torchrun --nproc-per-node {num_ranks(manifest.mesh)} -m " if manifest.mesh else ""
    return f"{start}divergence capture"


def _mesh(manifest: Manifest) -> str:
    """How those divide the work, as an option; begins with a space if there is one."""
    if manifest.mesh is None:
        return ""
    return " --mesh " + ",".join(f"{axis.name}={axis.size}" for axis in manifest.mesh.axes)


def _options(manifest: Manifest, like: Manifest) -> str:
    """What makes a run special beside the one it repeats, as options; begins with a space if
    there is any."""
    words: list[str] = []
    mine, theirs = manifest.model, like.model
    if mine.source != theirs.source:
        words += ["--model", mine.source]
    if mine.dtype != theirs.dtype and not mine.dtype.startswith("float8"):
        words += ["--dtype", mine.dtype]
    if (
        mine.attn_implementation in ATTENTION  # no command names what may be code of a run's own
        and mine.attn_implementation != theirs.attn_implementation
    ):
        words += ["--attn-implementation", mine.attn_implementation]
    if not manifest.settings.deterministic and like.settings.deterministic:
        words += ["--no-deterministic"]
    words += _batch(manifest, like)
    for plant in manifest.plan.plants:
        words += ["--plant", plant]
    environment = manifest.environment
    if not environment.label.startswith(environment.device_name):  # one of the user's own
        words += ["--label", environment.label]
    return _mesh(manifest) + (" " + shlex.join(words) if words else "")


def _batch(manifest: Manifest, like: Manifest) -> list[str]:
    """The option that puts the other run's prompts together as in this one."""
    groups = manifest.tokens.groups
    if groups == like.tokens.groups:
        return []
    if len(groups) == 1:
        return ["--batch"]
    return ["--no-batch"] if all(len(group) == 1 for group in groups) else []
