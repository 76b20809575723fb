"""The commands a report ends with: what gives certainty, or goes one level deeper.

Options that made the candidate what it is (planted faults, another dtype or attention, several
ranks, a label) are repeated, so that a printed command followed literally asks the same thing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from divergence.comparison.measure.truth import Truth, inputs_of
from divergence.domain import own_domains
from divergence.errors import DivergenceError
from divergence.facts import Fact, fact
from divergence.run.command import Command, command
from divergence.run.manifest import ATTENTION, UNKNOWN, Manifest
from divergence.run.reader import Run
from divergence.run.site import module_of
from divergence.run.storage import ARCHIVES
from divergence.words import Side

_MOST_SITES = 6
"""Named in one command."""
_ON_REFERENCE = fact("on_machine", side="reference")
_WITH_MODEL = fact("with_model")
_ON_CANDIDATE = fact("on_machine", side="candidate")


class Advice:
    """Makes commands for one pair of runs."""

    def __init__(self, reference: Run, candidate: Run, truth: Run | None = None) -> None:
        self._a, self._b = str(reference.path), str(candidate.path)
        self._carried = truth is not None and truth.path in (reference.path, candidate.path)
        """Does a run carry the truth? Then no command names it."""
        self._truth = None if truth is None or self._carried else str(truth.path)
        self._reference, self._candidate = reference.manifest, candidate.manifest
        self._runs = reference, candidate
        self._source, self._path = reference.manifest, self._a
        """Whose inputs both sides got: the one of the two that the other repeats, or where both
        repeat a third run that one, if its path is known: it carries the truth."""
        inputs, anchor = inputs_of(reference, candidate), reference.manifest.plan.anchored_to
        if inputs is not None:
            self._source, self._path = inputs.manifest, str(inputs.path)
        elif (
            truth is not None
            and anchor == candidate.manifest.plan.anchored_to is not None
            and truth.manifest.id.startswith(f"{anchor} ")  # its own
        ):
            self._source, self._path = truth.manifest, str(truth.path)
        self.divided = candidate.manifest.mesh is not None  # among several ranks

    @cached_property
    def escalated(self) -> bool:
        """Did the candidate record an escalated pass?"""
        return any(record.pass_ == "escalated" for record in self._runs[1].records)

    @cached_property
    def _inputs(self) -> set[str]:
        """Modules whose input the reference holds, of the first forward."""
        reference = self._runs[0]
        return {
            module_of(record.site)
            for record in reference.records
            if record.pass_ == "free"
            and record.step == 0
            and record.site.endswith(":in")
            and reference.has_bytes(record)
        }

    def certainty(self, flagged: Sequence[str] = ()) -> list[Command]:
        """An anchored pass, where there is none: capture the candidate like the reference, and
        first the reference with all that anchors one. ``flagged``: sites to keep in full, where
        not all were."""
        anchored, again = beside(self._b, "-anchored"), self._anchoring(flagged)
        first = beside(self._a, "-blocks") if again else self._a
        return [
            *again,
            self._candidate_again(like=first, o=anchored),
            command("compare", first, anchored),
        ]

    def in_full(self, flagged: Sequence[str] = ()) -> list[Command]:
        """The side that kept no bytes once more with them: the blocks, and ``flagged`` sites
        beside them. Where it is the reference, both: without its bytes it anchors nothing."""
        if self._reference.plan.store != "full":
            return self.certainty(flagged)
        if self._candidate.plan.store == "full":
            return []
        out = beside(self._b, "-full")
        sites = ["blocks", *flagged[:_MOST_SITES]]
        return [
            self._candidate_again(like=self._a, o=out, store="full", sites=sites),
            command("compare", self._a, out),
        ]

    def _anchoring(self, flagged: Sequence[str]) -> list[Command]:
        """The reference once more, with every block's input; nothing where it has them."""
        plan, settings = self._reference.plan, self._reference.settings
        blocks = _blocks(self._reference)
        covered = blocks or not {"blocks", "modules"}.isdisjoint(plan.sites)
        if plan.positions is None and covered and self._inputs.issuperset(blocks):
            return []
        out = beside(self._a, "-blocks")
        if plan.positions is not None:  # a run cannot be repeated with more tokens than it kept
            return [other_prompts(self._reference, out, fact("all_positions"))]
        sites = plan.sites if plan.store == "full" else flagged[:_MOST_SITES]
        all_steps = f"0-{max(settings.max_new_tokens, 1) - 1}"
        return [
            self._reference_again(
                o=out,
                sites=dict.fromkeys(["blocks", *sites]),
                store=None if plan.store == "full" else "full",
                steps=None if plan.steps is None else all_steps,
            )
        ]

    def into_block(self, block: str, *, hidden: bool = False) -> list[Command]:
        """Everything inside a block, on both machines; ``hidden``: it shows in the escalated
        pass alone, against a truth. Operators are recorded in one process alone, and those of
        other batches are no pairs."""
        ranks = self.divided or self._reference.mesh is not None
        whole = self._reference.plan.store == "full"  # or no run of a descent is anchored to it
        alike = self._reference.tokens.groups == self._candidate.tokens.groups
        down = self._localize(
            truth=self._truth or self.truth_beside, note=_WITH_MODEL, by_hand=True
        )
        deep_a, deep_b = beside(self._a, "-deep"), beside(self._b, "-deep")
        inside = (block + ".*", f"ops@{block}") if alike and not ranks else (block + ".*",)
        carried = "full" if self._carried and not ranks else None
        wanted = (hidden or self._truth) and not carried
        truth = beside(deep_a, "-truth") if wanted else None
        return [
            *([down] if whole and not ranks else []),
            # operators of a pass that is anchored itself would have no partner in the candidate's
            self._reference_again(
                o=deep_a, sites=["blocks", *inside], store=None if whole else "full", truth=carried
            ),
            self._candidate_again(like=deep_a, o=deep_b, escalate=hidden),
            *([command("truth", deep_a, o=truth, note=_ON_REFERENCE)] if truth else []),
            command("compare", deep_a, deep_b, truth=truth),
        ]

    def descent(self, block: str | None = None) -> list[Command]:
        """Return what looks for the operator, inside a block where one is given; nothing where no
        descent is possible."""
        if self.divided or self._reference.mesh is not None or self._reference.plan.store != "full":
            return []
        return [
            self._localize(truth=self._truth or self.truth_beside, block=block, note=_WITH_MODEL)
        ]

    @cached_property
    def truth_beside(self) -> str | None:
        """A truth of this pair that lies where the commands of this tool put it, and was not
        given. It is named, not taken: a comparison rests on what it is given, and the same command
        says the same wherever the runs lie. Its manifest alone is read."""
        a, b = self._runs
        if self._truth is not None or self._carried or "://" in self._a:
            return None
        for place in (beside(self._a, "-truth"), str(Path(self._a).parent / "truth")):
            with contextlib.suppress(DivergenceError, OSError):
                if Path(place).exists() and Truth(Run.open_manifest(place), a, b).anchors:
                    return place
        return None

    def judged(self) -> list[Command]:
        """The comparison with the truth that lies beside."""
        truth = self.truth_beside
        return [] if truth is None else [command("compare", self._a, self._b, truth=truth)]

    def truth(self, *, full: bool = False) -> list[Command]:
        """Say which side is wrong. ``full``: ``in_full`` is followed first, and its pair is held
        against the truth, which judges nothing that is not there in full."""
        a, b = self._a, self._b
        if full and self._reference.plan.store != "full":
            a, b = beside(a, "-blocks"), beside(b, "-anchored")
        elif full:
            b = beside(b, "-full")
        truth = beside(a, "-truth")
        return [
            command("truth", a, o=truth, note=_ON_REFERENCE),
            command("compare", a, b, truth=truth),
        ]

    def escalate(self, unseen: Side | None = None) -> list[Command]:
        """Commands for the same inputs in float32, which show what a 16-bit dtype hides. Nothing
        for two dtypes, whose weights are not the same to float32's last bit, and for a candidate of
        several ranks, which make no such pass. ``unseen``: the side that alone made none."""
        a, b, ranks = self._reference, self._candidate, self._reference.mesh is not None
        if b.model.dtype != a.model.dtype or self.divided or (ranks and unseen == "reference"):
            return []
        made = self._anchoring(()) if a.plan.store != "full" else []
        source, like = (beside(self._a, "-blocks"), a) if made else (self._path, self._source)
        pair = {"candidate": self._b, "reference": source if made else self._a}
        has_truth = (self._truth is not None or self._carried) and not made
        for side, manifest, path, note in (
            ("candidate", b, self._b, _ON_CANDIDATE),
            ("reference", a, self._a, _ON_REFERENCE),
        ):
            if unseen in (None, side) and not (ranks and side == "reference"):
                pair[side] = beside(path, "-escalated")
                again = {"o": pair[side], "escalate": True, **self._special(manifest, like)}
                made.append(_capture(manifest, like=source, **again, note=note))
        truth = self._truth
        if not has_truth:
            truth = beside(source, "-truth")
            made.append(command("truth", source, o=truth, note=_ON_REFERENCE))
        elif self._carried and source not in pair.values():
            truth = source
        return [*made, command("compare", pair["reference"], pair["candidate"], truth=truth)]

    def operator(self, site: str, candidate_site: str, side: str | None) -> list[Command]:
        """The operator by itself, as a script for whoever made it."""
        path, name = (self._a, site) if side == "reference" else (self._b, candidate_site)
        return [
            command(
                "repro",
                path,
                site=name + ":out",
                o=_folder(path, "-repro"),
                note=fact("shown_without_model"),
            )
        ]

    def operator_input(self, site: str, side: str | None) -> list[Command]:
        """Return what one side alone calls, and how."""
        path = self._a if side == "reference" else self._b
        return [command("inspect", path, site=site)]

    def look_at(self, site: str, side: str | None = None) -> list[Command]:
        """The tensor itself, on both sides, the wrong one's first."""
        paths = (self._b, self._a) if side == "candidate" else (self._a, self._b)
        return [command("inspect", path, site=site) for path in paths]

    def made_alike(self, other_model: bool) -> list[Command]:
        """Commands that make a comparable run of one that is not, or measure it all the same."""
        note = fact("measure_all_the_same")
        force = command("compare", self._a, self._b, force=True, note=note)
        again = self.alike(note=fact("with_references_model")) if other_model else self.alike()
        of_a, of_b = ({(item.site, *item.shape) for item in run.records} for run in self._runs)
        return [
            again,
            command("compare", self._a, beside(self._b, "-like")),
            *[force] * bool(of_a & of_b),  # else nothing would be compared
        ]

    def alike(self, *, note: Fact = _ON_CANDIDATE) -> Command:
        """The candidate once more, on the reference's tokens and by its settings: nothing of the
        candidate's own is left but its processes, and where it has the same model."""
        a, b = self._reference.model, self._candidate.model
        same = (a.digest, a.config_digest) == (b.digest, b.config_digest)
        model = b.source if same and a.source != b.source else None
        return _capture(
            self._candidate,
            like=self._a,
            o=beside(self._b, "-like"),
            model=model,
            **_mesh(self._candidate),
            note=note,
        )

    def _localize(self, **options: Any) -> Command:
        """The descent into a block."""
        out = _folder(self._b, "-localized")
        return command("localize", self._a, self._b, o=out, **options)

    def _special(self, manifest: Manifest, like: Manifest) -> dict[str, Any]:
        """Return what makes this side's run special beside the one it repeats, and its device where
        the sides' are not of a kind."""
        if manifest.environment.device_type == UNKNOWN:
            return {}
        kinds = {side.environment.device_type for side in (self._reference, self._candidate)}
        kinds.discard(UNKNOWN)
        device = {"device": manifest.environment.device_type} if len(kinds) > 1 else {}
        return device | _options(manifest, like)

    def _reference_again(self, **options: Any) -> Command:
        """The reference's machine captures it once more."""
        return _capture(
            self._reference,
            like=self._a,
            no_anchor=True,
            **options,
            **self._special(self._reference, self._reference),
            note=_ON_REFERENCE,
        )

    def _candidate_again(self, *, like: str, **options: Any) -> Command:
        """The candidate's machine captures ``like`` as it made the candidate."""
        special = self._special(self._candidate, self._reference)
        return _capture(self._candidate, like=like, **options, **special, note=_ON_CANDIDATE)


def _nothing(advice: Advice, *_: Any, **__: Any) -> list[Command]:
    """No command helps."""
    return []


class WithinAdvice(Advice):
    """Commands for one run that was compared with itself: every pair is anchored, and a truth and a
    descent take two runs."""

    truth_beside = None
    certainty = descent = truth = _nothing

    def __init__(self, run: Run) -> None:
        super().__init__(run, run)

    def whole(self) -> list[Command]:
        """The run with the pass that its decode steps are held against."""
        other = beside(self._a, "-whole")
        return [
            _capture(self._reference, like=self._a, o=other, whole=True, **_mesh(self._reference)),
            command("compare", other),
        ]

    def escalate(self, unseen: Side | None = None) -> list[Command]:
        """Commands for the same tokens in float32, which show what a 16-bit dtype hides."""
        return self._whole_again(beside(self._a, "-float32"), dtype="float32")

    def into_block(self, block: str, *, hidden: bool = False) -> list[Command]:
        """Everything inside a block, of the same run."""
        return self._whole_again(beside(self._a, "-deep"), sites=["blocks", block + ".*"])

    def _whole_again(self, out: str, **options: Any) -> list[Command]:
        """Commands for the run with other sites or in another dtype, and to compare its steps."""
        special = self._special(self._reference, self._reference)
        return [
            _capture(
                self._reference,
                like=self._a,
                o=out,
                no_anchor=True,
                whole=True,
                **options,
                **special,
            ),
            command("compare", out),
        ]

    def look_at(self, site: str, side: str | None = None) -> list[Command]:
        """The tensors themselves: both passes are in the one run."""
        return super().look_at(site)[:1]


class LookingAdvice(Advice):
    """Commands for a pair that no command can capture again: its inputs are no prompts, or one side
    alone is quantised by a scheme, which no capture ``like`` the other makes again."""

    truth_beside = None
    certainty = in_full = descent = truth = escalate = _nothing

    def into_block(self, block: str, *, hidden: bool = False) -> list[Command]:
        """Return what the block hands on."""
        return self.look_at(f"{block}:out")

    def made_alike(self, other_model: bool) -> list[Command]:
        """Measuring them all the same."""
        return [item for item in super().made_alike(other_model) if "force" in item.options]


def advise(reference: Run, candidate: Run, truth: Run | None = None) -> Advice:
    """Commands for two runs, such as can work with them."""
    samples = reference.manifest.tokens.samples
    can_repeat = bool(samples) and all(sample.prompt_ids for sample in samples)
    notes = (run.manifest.engine for run in (reference, candidate))
    can_repeat &= len({note is not None and note.simulates for note in notes}) == 1
    return (Advice if can_repeat else LookingAdvice)(reference, candidate, truth)


def _blocks(manifest: Manifest) -> set[str]:
    """The blocks that were recorded, and by the names of the parameters those beside them."""
    blocks = {path for path, note in manifest.plan.modules.items() if note.role == "block"}
    for stack in {path.rpartition(".")[0] for path in blocks}:
        for name in manifest.model.digests:
            number = name.removeprefix(f"{stack}.").partition(".")[0]
            if name.startswith(f"{stack}.") and number.isdecimal():
                blocks.add(f"{stack}.{number}")
    return blocks


def beside(path: str, ending: str) -> str:
    """Names a run beside another: ``a`` → ``a-deep``, ``a.zip`` → ``a-deep.zip``."""
    stem, kind = _stem(path)
    return stem + ending + kind


def _folder(path: str, ending: str) -> str:
    """Names a directory of this machine beside a run."""
    stem, _ = _stem(path)
    return (stem.rpartition("/")[2] if "://" in stem else stem) + ending


def _stem(path: str) -> tuple[str, str]:
    """A path, and what it ends in if it is an archive's."""
    kind = next((path[-len(suffix) :] for suffix in ARCHIVES if path.lower().endswith(suffix)), "")
    return path.removesuffix(kind), kind


def _capture(manifest: Manifest, *operands: str, **options: Any) -> Command:
    """The command that captures with as many processes as made the run."""
    ranks = manifest.mesh.num_ranks if manifest.mesh else None
    return command("capture", *operands, ranks=ranks, **options)


def other_prompts(manifest: Manifest, out: str, note: Fact) -> Command:
    """The model of a run by its settings, with the prompts of a file."""
    settings, model = manifest.settings, manifest.model
    attention = settings.attn_implementation
    return _capture(
        manifest,
        model.source,
        o=out,
        prompts="FILE",
        revision=model.revision,
        dtype=settings.dtype,
        attn_implementation=attention if attention in ATTENTION else None,
        max_new_tokens=settings.max_new_tokens or None,
        batch=settings.batch,
        **_mesh(manifest),
        note=note,
    )


def _engines() -> set[str]:
    """Those that come with divergence."""
    return {"transformers", "compile"}.union(*(domain.engines for domain in own_domains()))


def _mesh(manifest: Manifest) -> dict[str, Any]:
    """Return how those divide the work, as an option."""
    if manifest.mesh is None:
        return {}
    return {"mesh": ",".join(f"{axis.name}={axis.size}" for axis in manifest.mesh.axes)}


def _options(manifest: Manifest, like: Manifest) -> dict[str, Any]:
    """Return what makes a run special beside the one it repeats, as options."""
    options = _mesh(manifest)
    model, other = manifest.model, like.model
    if model.source != other.source:
        options["model"] = model.source
    if model.dtype != other.dtype and not model.dtype.startswith("float8"):
        options["dtype"] = model.dtype
    attention = model.attn_implementation
    # no command names what may be code of a run's own
    if attention in ATTENTION and attention != other.attn_implementation:
        options["attn_implementation"] = attention
    engine, name = manifest.engine, "transformers" if like.engine is None else like.engine.name
    # nor an engine of somebody's package, or what one of ours may open
    if engine is not None and engine.name != name and engine.name in _engines():
        options["engine"] = engine.name
        if engine.name == "compile":
            given = engine.options.items()
            options["engine_option"] = [f"{key}={item}" for key, item in given if item is not None]
    if not manifest.settings.deterministic and like.settings.deterministic:
        options["no_deterministic"] = True
    groups = manifest.tokens.groups
    if groups != like.tokens.groups:  # the option that puts prompts together as in this run
        if all(len(group) == 1 for group in groups):
            options["no_batch"] = True
        elif groups == [sorted(groups[0])]:
            options["batch"] = True
        else:
            options["batches"] = " ".join(",".join(map(str, group)) for group in groups)
    if not manifest.settings.use_cache and like.settings.use_cache:
        options["no_cache"] = True
    if manifest.settings.prefill_chunk != like.settings.prefill_chunk:
        options["prefill_chunk"] = manifest.settings.prefill_chunk
    if training := manifest.training.options_beside(like.training):
        from divergence.options.commands import CaptureOptions
        from divergence.options.option import command_options

        options |= command_options(CaptureOptions, training)
    options["plant"] = manifest.plan.plants
    environment = manifest.environment
    if not environment.label.startswith(environment.device_name):  # one of the user's own
        options["label"] = environment.label
    return options
