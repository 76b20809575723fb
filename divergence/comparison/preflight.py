"""Preflight: what is known of both sides before a number is looked at, a line for each thing."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from divergence.comparison.align import NameMap, find_prefix
from divergence.comparison.constants import (
    EQUAL_SUMS_DISTANCE,
    MOVED_SUMS_DISTANCE,
    NEAR_TABLES_DISTANCE,
    NEAR_WEIGHTS_DISTANCE,
)
from divergence.comparison.result import PreflightLine, PreflightStatus
from divergence.facts import Fact, fact, in_one, sentence
from divergence.numerics.formats import format_named
from divergence.run.contents import labels_text
from divergence.run.manifest import (
    NO_LABEL,
    NUM_SUMS,
    UNKNOWN,
    CodeNote,
    ConfigValue,
    DerivedNote,
    EngineNote,
    Manifest,
    ModelIdentity,
    ModuleNumbers,
    ParameterNote,
    SampleTokens,
    digest_many,
)
from divergence.run.reader import Run
from divergence.run.record import INPUTS, Record
from divergence.run.site import ROOT, natural_key, starred, unescape_path
from divergence.words import SIDES, Side, first_apart, grouped, list_names

# Preflight: were the two runs the same experiment at all?
#
# A difference that explains everything is reported before any number. Other weights and other
# prompt tokens are blocking: what follows would compare two different computations. Everything else
# that differs is shown, because it may be the cause. What a run without a model's digest (an
# imported dump) leaves empty is neither equal nor different: it is unknown.

CPU_OPERATORS = "operators on the CPU"
"""The check that names operators which the device does not have."""
_LIBRARIES = ("torch", "transformers")
_UNKNOWN = "unknown"
_NOTHING = ("", "-", "0", "none", "not recorded", "unknown: unknown")
"""How lines show what a manifest leaves empty."""


def preflight(
    reference: Run, candidate: Run, *, names: NameMap | None = None
) -> list[PreflightLine]:
    """One line a check, in order of how much it explains. ``names``: the name map that the
    comparison uses."""
    a, b = reference.manifest, candidate.manifest
    ref, cand = a.model, b.model
    here, there = a.environment, b.environment
    dtypes = fact("preflight.wider_dtype") if ref.dtype != cand.dtype else None
    lines = [
        *media_lines(reference, candidate),
        *input_lines(reference, candidate),
        code_line(a, b),
        weights_line(a, b, names),
        *block_lines(a, b, names),
        _same("model class", ref.model_class, cand.model_class),
        config_line(a, b),
        *_changed_weights(a, b),
        *derived_lines(a, b),
        *layout_lines(a, b),
        quantization_line(a, b),
        _prompt_ids(a, b),
        *label_lines(a, b),
        _digests("tokenizer", ref.tokenizer_digest, cand.tokenizer_digest, tokenizer_cause(a, b)),
        _digests(
            "chat template",
            ref.chat_template_digest,
            cand.chat_template_digest,
            template_cause(a, b),
        ),
        _generated_ids(a, b),
        _same("dtype", _dtype(a, b), _dtype(b, a), dtypes),
        _same("attention", attention_of(a), attention_of(b)),
        _same("batch shape", shape_of(a), shape_of(b)),
        _engines(a, b),
        *(_same(*line) for line in a.training.beside(b.training)),
        _switches(a, b),
        _repeatable(a, b),
        _same("device", _device(a), _device(b)),
        *_fallbacks(a, b),
        _same("driver", here.driver or "-", there.driver or "-"),
        _same("runtime", here.runtime or "-", there.runtime or "-"),
        _same("cpu", f"{here.cpu} {here.cpu_capability}", f"{there.cpu} {there.cpu_capability}"),
        *_recorded("cpu model", here.cpu_model, there.cpu_model),
        *_recorded("architecture", here.architecture, there.architecture),
        *_build(a, b),
        _same("threads", str(here.num_threads), str(there.num_threads)),
        *_libraries(a, b),
        _variables(a, b),
        _named("planted faults", a.plan.plants, b.plan.plants),
        # results of another run in the place of a run's own
        *(
            [_named("substituted operators", a.plan.substitutes, b.plan.substitutes)]
            if a.plan.substitutes or b.plan.substitutes
            else []
        ),
        *_meshes(a, b),
        _complete(a, b),
    ]
    return [_unknown(line, a, b) for line in lines]


def _unknown(line: PreflightLine, a: Manifest, b: Manifest) -> PreflightLine:
    """The line, or that it is unknown where a side does not say it."""
    shown = []
    for manifest, value in ((a, line.reference), (b, line.candidate)):
        if manifest.model.digest or manifest.model.task == "operators":
            # an engine's kernels of attention may be its own, unnamed
            named = manifest.engine is None or manifest.engine.name == "transformers"
            tells = line.check != "attention" or value != "none" or named
        elif line.check == "determinism":
            tells = bool(manifest.settings.switches)
        else:
            tells = line.check != "weights" and value.strip() not in _NOTHING
        shown.append(value if tells else _UNKNOWN)
    return _same(line.check, shown[0], shown[1], status="unknown") if _UNKNOWN in shown else line


def _engines(a: Manifest, b: Manifest) -> PreflightLine:
    """Say what ran the model: engine, version, and which of its options and switches differ."""
    if a.engine is None or b.engine is None:
        shown = [
            side.engine.name
            if side.engine is not None
            else _UNKNOWN
            if side.environment.device_type == UNKNOWN  # somebody else's dump
            else "transformers"  # before version 6 that alone
            for side in (a, b)
        ]
        status: PreflightStatus | None = "unknown" if _UNKNOWN in shown else None
        return _same("engine", shown[0], shown[1], status=status)
    names = [
        "transformers" if note.name == "transformers" else f"{note.name} ({note.version})"
        for note in (a.engine, b.engine)
    ]
    detail = None
    if a.engine.name == b.engine.name:
        facts_a, facts_b = ({**note.options, **note.facts} for note in (a.engine, b.engine))
        keys = [key for key in {**facts_a, **facts_b} if facts_a.get(key) != facts_b.get(key)]
        for number, facts in enumerate((facts_a, facts_b)):
            names[number] += "".join(f", {key} {facts.get(key, '-')}" for key in keys[:4])
    else:
        detail = fact("preflight.framework_differs")
    return _same("engine", names[0], names[1], detail)


def _fallbacks(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Operators that a side's device does not have; nothing where there are none."""
    lacking = a.settings.cpu_fallbacks, b.settings.cpu_fallbacks
    shown = [list_names(names) or "none" for names in lacking]
    line = _same(CPU_OPERATORS, shown[0], shown[1], fact("preflight.no_kernel"))
    return [line] if any(lacking) else []


def _meshes(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Return how many processes made each run; nothing where one made both."""
    meshes = [m.mesh for m in (a, b) if m.mesh is not None]
    details = []
    for mesh in [mesh for mesh in meshes if mesh.environments][:1]:
        labels = list(dict.fromkeys(environment.label for environment in mesh.environments))
        details.append(fact("preflight.unlike_ranks", machines=labels[:5]))
    return [_same("ranks", a.processes, b.processes, *details)] if meshes else []


def _same(
    check: str,
    a: str,
    b: str,
    *details: Fact | None,
    same: bool | None = None,
    status: PreflightStatus | None = None,
) -> PreflightLine:
    """A line of two texts. ``same``: are they, where the texts do not tell? ``status``: where there
    is more to it."""
    same = a == b if same is None else same
    return PreflightLine(
        check=check,
        status=status or ("same" if same else "differs"),
        reference=a,
        candidate=b,
        details=in_one([item for item in details if item is not None]),
    )


def _named(check: str, a: Sequence[str], b: Sequence[str]) -> PreflightLine:
    return _same(check, ", ".join(a) or "none", ", ".join(b) or "none")


def _digests(check: str, a: str | None, b: str | None, cause: Fact | None) -> PreflightLine:
    digest_a, digest_b = ("none" if digest is None else digest[:12] for digest in (a, b))
    return _same(check, digest_a, digest_b, cause if None not in (a, b) and a != b else None)


def _recorded(check: str, a: str | None, b: str | None) -> list[PreflightLine]:
    """A line where both runs say it."""
    return [] if a is None or b is None else [_same(check, a, b)]


def _build(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Return what torch was built with: what differs, else its compiler and BLAS."""
    ref, cand = a.environment.torch_build, b.environment.torch_build
    if not ref or not cand:
        return []
    keys = [key for key in {**ref, **cand} if ref.get(key) != cand.get(key)] or ["compiler", "BLAS"]
    shown = [", ".join(f"{k} {side[k]}" for k in keys if k in side) for side in (ref, cand)]
    return [_same("torch build", shown[0] or "-", shown[1] or "-")]


def _prompt_ids(a: Manifest, b: Manifest) -> PreflightLine:
    """Other tokens are another experiment."""
    ids = [[sample.prompt_ids for sample in manifest.tokens.samples] for manifest in (a, b)]
    shown = [
        sentence(fact("preflight.prompts", num=len(side), num_tokens=sum(map(len, side))))
        for side in ids
    ]
    unseen = "operators" not in (a.model.task, b.model.task) and not all(map(all, ids))
    detail = None
    if ids[0] != ids[1]:
        detail = prompt_difference(a, b, unseen=unseen)
    status: PreflightStatus = "blocking"
    # a step without tokens that is anchored was given the other's inputs (recording.any_module)
    anchors = [manifest.plan.anchored_to for manifest in (a, b)]
    given = a.id in anchors or b.id in anchors or anchors[0] == anchors[1] is not None
    inputs = all(sample.inputs for manifest in (a, b) for sample in manifest.tokens.samples)
    if detail is None and unseen and not (given and inputs):
        status, detail = "unknown", fact("preflight.tokens_untold")
    elif detail is None:
        status = "same"
    return _same("prompt ids", shown[0], shown[1], detail, status=status)


def _generated_ids(a: Manifest, b: Manifest) -> PreflightLine:
    ids_a = [sample.generated_ids for sample in a.tokens.samples]
    ids_b = [sample.generated_ids for sample in b.tokens.samples]
    forced = b.tokens.forced_by or a.tokens.forced_by
    same = ids_a == ids_b
    detail = fact("preflight.forced") if forced and same else None
    pairs = zip(ids_a, ids_b, strict=False)
    goes_on = len(ids_a) == len(ids_b) and all(x[: len(y)] == y[: len(x)] for x, y in pairs)
    if not same and goes_on and not (a.model.digest and b.model.digest):
        same, detail = True, fact("preflight.fed_as_told")
    elif not same and goes_on and forced and a.tokens.groups != b.tokens.groups:
        same, detail = True, fact("preflight.forced_padding")
    shown = [
        sentence(fact("preflight.num_tokens", num=sum(map(len, ids)))) for ids in (ids_a, ids_b)
    ]
    if not same and shown[0] == shown[1]:
        detail = fact("preflight.other_tokens")
    return _same("generated ids", shown[0], shown[1], detail, same=same)


def _dtype(manifest: Manifest, other: Manifest) -> str:
    """A truth has the weights of one dtype and computes in another. Parameters that have another
    than the ``other`` run's, where most have the same, are named."""
    computed = manifest.settings.compute_dtype
    dtype = manifest.model.dtype
    if manifest.training.autocast is not None:
        autocast = manifest.training.autocast
        dtype = sentence(fact("preflight.autocast", dtype=dtype, autocast=autocast))
    if computed is not None:
        computed = computed.removeprefix("torch.")
        return sentence(fact("preflight.computed", dtype=dtype, computed=computed))
    parameters = other.model.parameters if other.model.dtype == manifest.model.dtype else {}
    odd = {
        f"{starred(name)} {note.dtype}": None
        for name, note in manifest.model.parameters.items()
        if note.dtype != dtype and name in parameters and parameters[name].dtype != note.dtype
    }
    return ", ".join([dtype, *list(odd)[:3]])


def _switches(a: Manifest, b: Manifest) -> PreflightLine:
    """Switches that one side has and the other refused, or set otherwise."""
    # by name (what it was set to, or found at where it was left alone; "refused" or not)
    found_a, found_b = (
        {
            switch.name: (
                switch.found if switch.asked == "-" else switch.asked,
                "set" if switch.status == "accepted" else switch.status,
            )
            for switch in side.settings.switches
        }
        for side in (a, b)
    )
    different = [name for name in found_a if name in found_b and found_a[name] != found_b[name]]
    stand = [*found_a.items(), *found_b.items()]
    refused = {name for name, (_, status) in stand if status == "refused"}
    noisy = {*a.settings.nondeterministic_warnings, *b.settings.nondeterministic_warnings}
    details = []
    if different:
        details.append(fact("preflight.switches_otherwise", names=different))
    elif refused:
        details.append(fact("preflight.switches_refused", names=sorted(refused)))
    if noisy:
        details.append(fact("preflight.nondeterministic", names=sorted(noisy)))
    shown = [
        sentence(fact("preflight.determinism", deterministic=side.settings.deterministic))
        for side in (a, b)
    ]
    same = shown[0] == shown[1] and not different
    return _same("determinism", shown[0], shown[1], *details, same=same)


def _repeatable(a: Manifest, b: Manifest) -> PreflightLine:
    def say(manifest: Manifest) -> str:
        repeated = manifest.repeatability
        return sentence(
            fact(
                "preflight.repeats",
                runs=repeated.num_runs if repeated.num_runs > 1 else None,
                num=repeated.num_different,
                total=repeated.num_compared,
            )
        )

    noisy = [m.repeatability for m in (a, b) if m.repeatability.num_different]
    detail = None
    if noisy:
        seen = noisy[0]
        num, total = sum(seen.begins.values()), seen.num_forwards
        begins = fact("preflight.begins", num=num, total=total, places=seen.places)
        detail = fact(
            "preflight.repeats_not", site=seen.first_difference, begins=begins if num else None
        )
    return _same("repeatability", say(a), say(b), detail, same=not noisy)


def _device(manifest: Manifest) -> str:
    environment = manifest.environment
    return f"{environment.device_type}: {environment.device_name}"


def _libraries(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """A line for torch and for transformers, and for each library whose versions differ."""
    ref, cand = a.environment.versions, b.environment.versions
    names = [
        name for name in sorted({*ref, *cand} - {*_LIBRARIES}) if ref.get(name) != cand.get(name)
    ]
    return [_same(name, ref.get(name, "-"), cand.get(name, "-")) for name in (*_LIBRARIES, *names)]


def _variables(a: Manifest, b: Manifest) -> PreflightLine:
    env_a, env_b = a.environment.variables, b.environment.variables
    different = sorted(k for k in {*env_a, *env_b} if env_a.get(k) != env_b.get(k))
    shown = [", ".join(f"{k}={env[k]}" for k in different if k in env) for env in (env_a, env_b)]
    return _same("environment variables", shown[0] or "-", shown[1] or "-", same=not different)


def _complete(a: Manifest, b: Manifest) -> PreflightLine:
    def say(manifest: Manifest) -> str:
        why = manifest.stopped_by or None
        return sentence(fact("preflight.completeness", complete=manifest.complete, why=why))

    whole = a.complete and b.complete
    detail = None if whole else fact("preflight.only_what_both_hold")
    return _same("completeness", say(a), say(b), detail, same=whole)


# What the models' processors made of pictures and sound: the same on both sides, and where not,
# whether the files, the processor's settings or its arithmetic are to blame.

MEDIA = "media inputs"


def media_lines(a: Run, b: Run) -> list[PreflightLine]:
    """A line where a run has pictures or sound. Other tensors are another experiment."""
    tensors: list[dict[tuple[int, str], Record]] = [
        {(item.sample, item.site): item for item in run.records if item.pass_ == INPUTS}
        for run in (a, b)
    ]
    if not any(tensors):
        return []
    shown = [
        _inputs_text("media", sum(len(sample.media) for sample in run.manifest.tokens.samples), own)
        for run, own in zip((a, b), tensors, strict=True)
    ]
    tensors_a, tensors_b = tensors
    differing: dict[int, list[str]] = {}
    for sample, site in {**tensors_a, **tensors_b}:
        if not _is_equal((tensors_a.get((sample, site)), tensors_b.get((sample, site)))):
            differing.setdefault(sample, []).append(site.partition(":in.")[2])
    if not differing:
        return [_same(MEDIA, shown[0], shown[1])]
    sample, names = next(iter(differing.items()))
    detail = fact(
        "preflight.media_differ",
        sample=sample,
        names=names,
        num_more=len(differing) - 1,
        cause=_media_cause(a, b, sample),
    )
    return [_same(MEDIA, shown[0], shown[1], detail, status="blocking")]


def _inputs_text(code: str, num: int, tensors: Mapping[tuple[int, str], Record]) -> str:
    """Say how many inputs a side has, and by which digest they are told from others."""
    digest = digest_many((f"{n} {name}", str(r.xxh3)) for (n, name), r in tensors.items())
    return sentence(fact(f"preflight.{code}", num=num, digest=digest[:12]))


def _media_cause(a: Run, b: Run, number: int) -> Fact:
    """Say why what a processor made of a prompt's files differs."""
    tokens = a.manifest.tokens, b.manifest.tokens
    files = [part.samples[number : number + 1] for part in tokens]
    media = [[(note.kind, note.digest) for note in side[0].media] if side else [] for side in files]
    if media[0] != media[1]:
        paths = [[note.path for note in side[0].media] if side else [] for side in files]
        return fact("preflight.media_files", reference=paths[0], candidate=paths[1])
    differences, _ = config_differences(tokens[0].processor, tokens[1].processor)
    if differences:
        return fact("preflight.media_settings", differences=differences)
    return fact("preflight.media_arithmetic")


GIVEN = "inputs"
_COARSEST = 2.0**-8
"""Rounding of bfloat16: what is nearer may be one number, rounded on its way here."""


def input_lines(a: Run, b: Run) -> list[PreflightLine]:
    """A line where both are steps of somebody's own loop (`record`). Other inputs are another
    experiment; floats that only rounding parts, as those of a tower that another model feeds, are
    not."""
    runs = a, b
    samples = [run.manifest.tokens.samples for run in runs]
    if len(samples[0]) != len(samples[1]) or any(s.prompt_ids for side in samples for s in side):
        return []
    tensors = [
        {
            (item.sample, item.site.partition(":")[2]): item
            for item in run.records
            if item.pass_ == "free" and item.site.startswith(f"{ROOT}:in")
        }
        for run in runs
    ]
    if not all(tensors) or "operators" in (a.manifest.model.task, b.manifest.model.task):
        return []
    constants = [
        {
            (number, name): repr(value)
            for number, s in enumerate(side)
            for name, value in s.constants.items()
        }
        for side in samples
    ]
    other: dict[int, list[str]] = {}
    near: dict[int, list[str]] = {}
    for key in {**tensors[0], **tensors[1]}:
        pair = tensors[0].get(key), tensors[1].get(key)
        if not _is_equal(pair):
            (near if _is_rounded(runs, pair) else other).setdefault(key[0], []).append(key[1])
    for key in {**constants[0], **constants[1]}:
        values = [side.get(key, "None") for side in constants]
        if values[0] != values[1] and all(side[key[0]].inputs for side in samples):
            other.setdefault(key[0], []).append(f"{key[1]} {values[0]} / {values[1]}")
    differing = other or near
    number, names = next(iter(differing.items()), (0, []))
    detail = fact(
        "preflight.inputs_differ",
        sample=number,
        names=names,
        num_more=len(differing) - 1,
        rounded=not other,
    )
    shown = [_inputs_text("inputs", len(side), side) for side in tensors]
    status: PreflightStatus = "blocking" if other else "differs" if near else "same"
    return [_same(GIVEN, shown[0], shown[1], detail if differing else None, status=status)]


_Pair = tuple[Record | None, Record | None]


def _is_equal(pair: _Pair) -> bool:
    a, b = pair
    return a is not None and b is not None and (a.xxh3, a.shape) == (b.xxh3, b.shape)


def _is_rounded(runs: tuple[Run, Run], pair: _Pair) -> bool:
    """Are these floats one tensor but for rounding? What no run holds in full may be."""
    a, b = pair
    if a is None or b is None or a.shape != b.shape or not a.dtype.startswith(("float", "bfloat")):
        return False
    if not (runs[0].has_bytes(a) and runs[1].has_bytes(b)):
        return True
    first, second = (run.read(item).double() for run, item in zip(runs, (a, b), strict=True))
    return bool((first - second).norm() <= _COARSEST * first.norm())


# Did both runs run the same code? Class by class of module, from what their manifests say.
#
# Only the code that was recorded is compared: where a run says nothing, nothing is claimed. Which
# attention or which kernel was asked for is a setting, not code, and stands in lines of its own.
# Other versions of a library differ in text almost everywhere: then the classes are counted and the
# versions named, and what was put in place of a class' own code comes first.

_MOST = 3
_PLACEMENT = ("accelerate: AlignDevicesHook", "FSDP", "DDP", "DataParallel", "tensor parallel")
"""Wrappers that say where weights lie: lines of their own tell that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDifference:
    """One class of module that runs other code."""

    name: str
    text: Fact
    """What differs."""
    deliberate: bool
    """Did somebody put other code there, so that it is no matter of versions?"""
    places: Sequence[str] = ()
    """Modules of the class, with ``*`` for numbers."""
    paths: Sequence[str] = ()
    """The modules alone that differ, where not all of the class do."""

    def concerns(self, block: str) -> bool:
        """Does a module of this class lie in ``block``, or is it that?"""
        if self.paths:
            return any(_lies_in(path, block) for path in self.paths)
        # without places, torch's own functions: wherever they are called
        return not self.places or any(_lies_in(place, starred(block)) for place in self.places)


def code_line(a: Manifest, b: Manifest) -> PreflightLine:
    """The line of preflight: what differs most tellingly first."""
    code_a, code_b = a.model.code, b.model.code
    shown = [
        fact("preflight.num_classes", num=len(code))
        if code_a and code_b
        else fact("preflight.recorded", recorded=bool(code))
        for code in (code_a, code_b)
    ]
    texts = difference_texts(code_differences(a, b), a, b)
    details = [fact("preflight.code_differences", differences=texts)] if texts else []
    reference, candidate = map(sentence, shown)
    return _same("code", reference, candidate, *details, same=not details)


def difference_texts(differences: Sequence[CodeDifference], a: Manifest, b: Manifest) -> list[Fact]:
    """Return what was replaced, one by one, then the differences of code together."""
    texts = [difference.text for difference in differences if difference.deliberate]
    plain = [difference for difference in differences if not difference.deliberate]
    return [*texts, _counted(plain, a, b)] if plain else texts


def code_differences(a: Manifest, b: Manifest) -> list[CodeDifference]:
    """Every class of module that does not run the same code in both runs, what was replaced first;
    empty where a run does not say."""
    code_a, code_b = a.model.code, b.model.code
    if not code_a or not code_b:
        return []
    differences: list[CodeDifference] = []
    for name in code_a:
        if name in code_b:
            differences += _class_differences(name, code_a[name], code_b[name])
    for side, digests, others in (("reference", code_a, code_b), ("candidate", code_b, code_a)):
        for name, note in digests.items():
            if name not in others:
                differences.append(_alone(name, note, side, others))
    return sorted(differences, key=lambda difference: not difference.deliberate)


def _class_differences(name: str, a: CodeNote, b: CodeNote) -> list[CodeDifference]:
    places = sorted({*a.places, *b.places})
    differences: list[CodeDifference] = []

    def add(
        code: str, *, deliberate: bool = True, paths: Sequence[str] = (), **values: Any
    ) -> None:
        text = fact(f"preflight.{code}", **values)
        differences.append(
            CodeDifference(name=name, text=text, deliberate=deliberate, places=places, paths=paths)
        )

    odd = _differing(a, b)
    only_odd = sorted(odd) if a.digest == b.digest else []
    for side, own, other in (("reference", a, b), ("candidate", b, a)):
        for text in own.replaced:
            if text not in other.replaced:
                add("replaced", paths=only_odd, what=text, side=side)
        there = _wrappers(other)
        for text in _wrappers(own):
            if text not in there:
                add("wrapped", name=name, what=text, side=side)
    for key, number in a.attributes.items():
        for (reference, candidate), paths in _other_numbers(number, b.attributes.get(key)).items():
            add(
                "attribute",
                name=name,
                key=key,
                reference=reference,
                candidate=candidate,
                paths=paths,
                where=paths[0] if len(paths) == 1 else None,
                num=len(paths) if len(paths) > 1 else None,
            )
    set_a, set_b = a.changed_after, b.changed_after
    if set_a is not None and set_b is not None:  # what changes on both sides counts something
        for key in sorted(
            (set_a.keys() ^ set_b.keys()) & a.attributes.keys() & b.attributes.keys()
        ):
            sample = set_a.get(key, set_b.get(key))
            add("attribute_changed", name=name, key=key, side=SIDES[key in set_b], sample=sample)
    if a.compiled != b.compiled:
        add("compiled", name=name, reference=a.compiled or None, candidate=b.compiled or None)
    if differences:
        return differences
    # functions whose code differs; those that one side alone has count where they are no choice
    # among implementations
    names = [
        function
        for function in {**a.functions, **b.functions}
        if a.functions.get(function) != b.functions.get(function)
        and not (
            function.endswith("]") and (function not in a.functions or function not in b.functions)
        )
    ]
    if a.digest != b.digest or odd or names:
        replaced = a.replaced[0] if a.replaced and b.replaced else None
        add(
            "other_code",
            deliberate=replaced is not None,
            paths=only_odd,
            name=name,
            functions=names[:_MOST] or None,
            where=only_odd[:_MOST],
            replaced=replaced,
        )
    return differences


def _other_numbers(
    a: str | ModuleNumbers, b: str | ModuleNumbers | None
) -> dict[tuple[str, str], list[str]]:
    """Each pair of values that A's and B's modules hold, where they differ → the modules where they
    do; none named where most or all do."""
    if b is None or a == b:
        return {}
    if isinstance(a, str) and isinstance(b, str):
        return {(a, b): []}
    if any(isinstance(number, str) and "; " in number for number in (a, b)):
        return {}  # of an earlier version: which modules it means stands in a text
    size = next(number.num_modules for number in (a, b) if isinstance(number, ModuleNumbers))
    first, second = (
        ModuleNumbers(value=number, num_modules=size, others={})
        if isinstance(number, str)
        else number
        for number in (a, b)
    )
    named = {path for side in (first, second) for paths in side.others.values() for path in paths}
    differing: dict[tuple[str, str], list[str]] = {}
    if len(named) < size:
        differing[first.value, second.value] = []
    for path in sorted(named, key=natural_key):
        paths = differing.setdefault((first.at(path), second.at(path)), [])
        if len(paths) or (first.value, second.value) != (first.at(path), second.at(path)):
            paths.append(path)
    return {values: paths for values, paths in differing.items() if values[0] != values[1]}


def _wrappers(note: CodeNote) -> list[str]:
    return [text for text in note.wrapped if not text.startswith(_PLACEMENT)]


def _alone(name: str, note: CodeNote, side: str, others: dict[str, CodeNote]) -> CodeDifference:
    """A class that one side alone has; what stands at its places on the other side is named."""
    if note.replaced and not note.places:  # of torch: its functions and kernels
        return CodeDifference(
            name=name,
            deliberate=True,
            text=fact("preflight.replaced_of_torch", what=note.replaced[:_MOST], side=side),
        )
    there = [other for other, code in others.items() if set(code.places) & set(note.places)]
    return CodeDifference(
        name=name,
        text=fact(
            "preflight.class_alone",
            name=name,
            origin=note.origin,
            side=side,
            instead=there[:_MOST],
            how=[*note.replaced, *_wrappers(note)] if note.replaced else [],
        ),
        deliberate=bool(there and side == "candidate") or bool(note.replaced),
        places=note.places,
    )


def _counted(differences: Sequence[CodeDifference], a: Manifest, b: Manifest) -> Fact:
    """Differences of text: the first few, or how many where versions explain them."""
    versions = [
        fact(
            "preflight.version",
            name=name,
            reference=a.environment.versions.get(name, "-"),
            candidate=b.environment.versions.get(name, "-"),
        )
        for name in ("transformers", "torch")
        if a.environment.versions.get(name) != b.environment.versions.get(name)
    ]
    if len(differences) <= _MOST:
        texts = [difference.text for difference in differences]
        return fact("preflight.few_codes", differences=texts, versions=versions)
    names = [difference.name for difference in differences]
    return fact("preflight.many_codes", num=len(names), versions=versions, names=names)


def other_code(a: Manifest, b: Manifest, block: str | None = None) -> list[str]:
    """Classes of modules whose code differs between two runs, of ``block`` where one is given.

    Empty where a run does not say. A class that one run alone has counts where something was
    replaced in it.
    """
    own, other = a.model.code, b.model.code
    if not own or not other:
        return []
    texts: list[str] = []
    for name in sorted({*own, *other}):
        notes = [(code[name], m) for code, m in ((own, a), (other, b)) if name in code]
        here = any(_concerns(note, name, manifest, block) for note, manifest in notes)
        if len(notes) == 1:
            differs = bool(notes[0][0].replaced) and here
        elif own[name].digest != other[name].digest:
            differs = here
        else:
            odd = _differing(own[name], other[name])
            differs = any(_lies_in(path, block) for path in odd)
        if differs:
            texts.append(name)
    return texts


def replaced_in(manifest: Manifest, block: str | None) -> list[str]:
    """Code put in the place of a class' own: of the modules inside ``block``, or of all."""
    texts: list[str] = []
    for name, note in manifest.model.code.items():
        odd = [path for path in note.odd if _lies_in(path, block)]
        if odd or (not note.odd and _concerns(note, name, manifest, block)):
            texts += note.replaced or [f"{name} in {path}" for path in odd]
    return texts


def truth_tells(a: Manifest, b: Manifest, block: str | None) -> bool:
    """May a truth, which has A's code, tell the side? Not where the code differs, unless some was
    replaced on B alone; nor where modules hold other numbers, unless B's other modules hold A's, or
    both configurations do."""
    on_a, on_b = set(replaced_in(a, block)), set(replaced_in(b, block))
    return on_a < on_b or not (other_code(a, b, block) or numbers_in_doubt(a, b, block))


def other_numbers(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """The numbers that modules of ``block`` hold otherwise in the two runs."""
    return [
        difference.text
        for difference in code_differences(a, b)
        if difference.text.code == "preflight.attribute"
        and (block is None or difference.concerns(block))
    ]


def numbers_in_doubt(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """Lists the numbers of which it is not known whose are meant: odd on neither side and told by
    no configuration, or derived from two that differ, as rotary frequencies are."""
    stated = numbers_stated(a, b, block)
    numbers = [item for item in _even_numbers(a, b, block) if item not in stated]
    if a.model.config_digest != b.model.config_digest:
        details = [detail for line in derived_lines(a, b) for detail in line.details]
        for item in (item for detail in details for item in detail["facts"] or [detail]):
            inside = any(_lies_in(name, block) for name in item["names"])
            if inside and item["how"].code != "preflight.derived_dtypes":
                numbers.append(item)
    return numbers


def numbers_stated(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """Lists the numbers whose value is in the configuration, which both share, on A and not on B.

    A's value is in it under its own key; as any float but 0 and ±1, which stand there for much
    else; or as 1/√n of an integer n there (the scale of attention). B's is in it in the same ways,
    and as 1/√ of a quotient of two integers."""
    numbers = _even_numbers(a, b, block)
    if not numbers or a.model.config_digest != b.model.config_digest:
        return []
    config = a.model.config
    sizes = [value for value in config.values() if type(value) is int and value > 1]
    stated = {str(v) for v in config.values() if type(v) is float and abs(v) not in (0.0, 1.0)}
    stated |= {str(value**-0.5) for value in sizes}
    derived = {str(value) for value in config.values()} | stated
    derived |= {str((size / part) ** -0.5) for size in sizes for part in sizes}

    def is_stated(item: Fact) -> bool:
        named = {str(v) for key, v in config.items() if key.rpartition(".")[2] == item["key"]}
        return item["reference"] in stated | named and item["candidate"] not in derived

    return [item for item in numbers if is_stated(item)]


def _even_numbers(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """Lists the numbers that differ, without those where only some of B's modules differ and all of
    A's are alike: these are odd on B."""

    def is_odd_on_b(item: Fact) -> bool:
        own = a.model.code[item["name"]].attributes[item["key"]]
        return bool(item["where"] or item["num"]) and (isinstance(own, str) or not own.others)

    one_config = a.model.config_digest == b.model.config_digest
    return [item for item in other_numbers(a, b, block) if not (one_config and is_odd_on_b(item))]


def _differing(a: CodeNote, b: CodeNote) -> list[str]:
    """Modules that do not run the same code, of two notes on one class."""
    paths = dict.fromkeys((*a.odd, *b.odd))
    return [path for path in paths if a.odd.get(path, a.digest) != b.odd.get(path, b.digest)]


def _lies_in(path: str, block: str | None) -> bool:
    return block is None or path == block or path.startswith(f"{block}.")


def _concerns(note: CodeNote, name: str, manifest: Manifest, block: str | None) -> bool:
    """May a module of this class run in ``block``? Where its places are not recorded, by the
    classes of the recorded modules; functions of torch run everywhere."""
    if block is None or note.origin == "torch":
        return True
    if note.places:
        return any(_lies_in(place, starred(block)) for place in note.places)
    kinds = {
        module.kind.partition("/")[0]
        for path, module in manifest.plan.modules.items()
        if path.startswith(f"{block}.")
    }
    return not kinds or name in kinds or name.rpartition(".")[2] in kinds


# Do both sides compute with the same weights? By digests of their parameters.


def weights_line(a: Manifest, b: Manifest, names: NameMap | None) -> PreflightLine:
    """The line of the weights. ``names``: the name map that the comparison uses."""
    model_a, model_b = a.model, b.model
    shown = [f"{model.digest[:12]} ({model.dtype})" for model in (model_a, model_b)]
    alike = model_a.digest == model_b.digest and model_a.dequantized == model_b.dequantized
    if alike and not (model_a.missing or model_b.missing):
        return _same("weights", shown[0], shown[1], same=True)
    matching = match_parameters(model_a.digests, model_b.digests, names)
    relations = related(model_a, model_b, matching.pairs)
    status, details = _weights_differ(model_a, model_b, matching, relations)
    if status == "blocking" and any(map(tells_in_part, (a, b))):
        status, details = as_far_as_told(model_a, model_b, matching)
    if status == "blocking" or (status == "differs" and model_a.dtype != model_b.dtype):
        # what sums know, and is not near, no training made
        details = [*details, *weight_causes(model_a, model_b, guess=relations is None)]
    return _same("weights", shown[0], shown[1], *details, status=status)


def _weights_differ(
    a: ModelIdentity, b: ModelIdentity, matching: Matching, relations: Relations | None
) -> tuple[PreflightStatus, list[Fact]]:
    """Compares weights: (status, details). ``matching``: their parameters by name;
    ``relations``: of those that differ, where it is known."""

    def say(
        status: PreflightStatus, code: str, **values: Any
    ) -> tuple[PreflightStatus, list[Fact]]:
        return status, [fact(f"preflight.{code}", **values)]

    same: tuple[PreflightStatus, list[Fact]] = "same", []
    if missing := a.missing or b.missing:
        same = say("same", "missing", num=len(missing), names=missing)
    if a.digest == b.digest and a.dequantized == b.dequantized:
        return same
    if a.digest == b.digest:  # equal codes, which may have become other weights: no kernel ran yet
        shared = [path for path in a.dequantized if path in b.dequantized and a.dtype == b.dtype]
        names = [path for path in shared if a.dequantized[path] != b.dequantized[path]]
        if not names:
            return same
        return say("blocking", "dequantized", num=len(names), total=len(shared), names=names)
    digested = bool(a.digests and b.digests)
    if a.quantization != b.quantization:
        return say("differs", "codes_against", reference=_codes(a), candidate=_codes(b))
    if a.dtype != b.dtype:
        rounded = a.rounded_digests.get(b.dtype), b.rounded_digests.get(a.dtype)
        if b.digest == rounded[0]:
            return say("same", "rounded", wide=a.dtype, narrow=b.dtype)
        if a.digest == rounded[1]:
            return say("same", "rounded", wide=b.dtype, narrow=a.dtype)
        if digested and not matching.is_one_to_one:
            return say("blocking", "other_parameters", matching=matching.describe())
        if relations is not None and digested:
            return relations.status, relations.details or [fact("preflight.other_weights")]
        if set(a.digests) != set(b.digests):
            return say("differs", "digests_of_other_names")
        if any(rounded):
            return say("blocking", "other_after_rounding")
        return say("differs", "digests_of_dtypes")
    unknown = {name for name in a.digests if "offloaded" in (a.digests[name], b.digests.get(name))}
    digested_names = a.digests.keys() - unknown
    agree = all(a.digests[name] == b.digests.get(name) for name in digested_names)
    if unknown and agree and a.digests.keys() == b.digests.keys():
        return say("differs", "offloaded", num=len(unknown))
    if not digested:
        return say("blocking", "no_digests")
    different = [
        name for name, other in matching.pairs.items() if a.digests[name] != b.digests[other]
    ]
    if different:
        details = [] if relations is None else relations.details
        if relations and details and relations.status == "differs" and matching.is_one_to_one:
            return "differs", details
        differ = fact(
            "preflight.parameters_differ",
            num=len(different),
            total=len(matching.pairs),
            names=different,
        )
        return "blocking", [*details, differ, *matching.describe()]
    if not matching.is_one_to_one:
        return say("blocking", "other_parameters", matching=matching.describe())
    if matching.prefixes or matching.mapped:
        return say("differs", "other_names", matching=matching.describe())
    return "differs", matching.describe()


def _changed_weights(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """A line where a side's parameters changed between the steps that it recorded."""
    steps = [
        (x.weights, y.weights) for x, y in zip(a.tokens.samples, b.tokens.samples, strict=False)
    ]
    changed = [any(step[side] for step in steps) for side in (0, 1)]
    if not any(changed):
        return []
    first = next((number for number, (x, y) in enumerate(steps) if x != y), None)
    side = None if all(changed) else SIDES[changed[1]]
    detail = None if first is None else fact("preflight.weights_changed", side=side, sample=first)
    shown = [sentence(fact("preflight.weights_stayed", changed=each)) for each in changed]
    return [_same("later weights", shown[0], shown[1], detail, same=first is None)]


def _codes(model: ModelIdentity) -> str:
    return model.dtype if model.quantization is None else model.quantization.name


def other_weights(a: Manifest, b: Manifest) -> bool:
    """Have the two, in one dtype, weights that are not equal, as far as both tell?"""
    ref, cand = a.model, b.model
    if ref.dtype != cand.dtype or ref.digest == cand.digest:
        return False
    if not (tells_in_part(a) or tells_in_part(b)):
        relations = related(ref, cand, match_parameters(ref.digests, cand.digests).pairs)
        return (
            relations is None or not relations.only_dtypes or len(ref.digests) != len(cand.digests)
        )
    return as_far_as_told(ref, cand, match_parameters(ref.digests, cand.digests))[0] == "blocking"


# How parameters that are not equal belong together: what two manifests tell of each pair.
#
# Equal values in another dtype, and values rounded to a narrower one that is the parameter's own
# dtype, are the same weights: what differs is the dtype. All else is another experiment, whose
# cause is named as far as digests and twelve sums with signs tell it: of D = B - A each sum has the
# size of D's norm, unless D's rows, or its columns, were only put in another order.

SHORT_FORMATS = {name: format_named(name).unit_roundoff for name in ("bfloat16", "float16")}
"""Of the norm: rounding to it takes numbers no farther apart."""


@dataclass(frozen=True, slots=True)
class Relations:
    """Says what relates all parameters that differ: are they the same values but for their dtypes,
    and what relates them, by class of parameter, where anything does?"""

    only_dtypes: bool
    facts: list[Fact]

    @property
    def status(self) -> PreflightStatus:
        """Do they stop a comparison?"""
        return "differs" if self.only_dtypes else "blocking"

    @property
    def details(self) -> list[Fact]:
        """The first few, as one fact; none where nothing is known."""
        return [fact("preflight.relations", relations=self.facts)] if self.facts else []


def related(a: ModelIdentity, b: ModelIdentity, pairs: Mapping[str, str]) -> Relations | None:
    """Return what is known of each pair that differs; None where a manifest does not tell.
    ``pairs``: names that belong together, A's to B's."""
    kinds: dict[Fact | None, tuple[list[str], list[float]]] = {}
    only_dtypes, holders = True, (holders_of(a), holders_of(b))
    for name, other in pairs.items():
        if a.digests[name] == b.digests[other]:
            continue
        how, same, near = _initialised(name, other, a, b), False, None
        how = how or moved(name, other, holders[0], b, pairs)
        if how is None:
            own, there = notes = a.parameters.get(name), b.parameters.get(other)
            if own is not None and there is not None:
                how, same, near = _relation(own, there, has_codes=a.quantization is not None)
            if how is None or near is not None:  # no relation that is exact
                tied = tied_alone(name, other, a, b, holders)
                how, near = (how, near) if tied is None else (tied, None)
            if how is None and near is None and None in notes:
                return None
        only_dtypes = only_dtypes and same
        names, apart = kinds.setdefault(how, ([], []))
        names.append(name)
        apart += [] if near is None else [near]
    relations = []
    for how, (names, apart) in kinds.items():
        ends = [f"{float(f'{100 * n:.2g}'):g}%" for n in (min(apart), max(apart))] if apart else []
        kind, shown = list(dict.fromkeys(map(starred, names))), list(dict.fromkeys(ends)) or None
        if how or apart:
            relations.append(fact("preflight.relation", names=kind, how=how, apart=shown))
    return Relations(only_dtypes, relations)


def _initialised(name: str, other: str, a: ModelIdentity, b: ModelIdentity) -> Fact | None:
    for side, model, path in (("reference", a, name), ("candidate", b, other)):
        if path in model.missing:
            return fact("preflight.initialised", side=side)
    return None


Holders = Mapping[str, Sequence[str]]
"""Names of a model's parameters by digest: models of experts have tens of thousands."""


def holders_of(model: ModelIdentity) -> Holders:
    """Bring the names of a model's equal parameters together."""
    return grouped(model.digests, model.digests.__getitem__)


def moved(
    name: str, other: str, holders: Holders, b: ModelIdentity, pairs: Mapping[str, str]
) -> Fact | None:
    """Say which other parameter of A stands there on B, where it is no longer in its own place.
    ``holders``: A's."""
    note = b.parameters.get(other)
    if note is None or len(note.shape) < 2 or note.norm == 0:
        return None  # vectors as norms begin with are equal by themselves
    for key in holders.get(b.digests[other], ()):
        stays = key in pairs and b.digests[pairs[key]] == b.digests[other]
        if key != name and not stays:
            return fact("preflight.moved", key=key)
    return None


def tied_alone(
    name: str, other: str, a: ModelIdentity, b: ModelIdentity, holders: tuple[Holders, Holders]
) -> Fact | None:
    """Say which other parameter it is as well, on one side alone."""
    sides = (("reference", a, name, b), ("candidate", b, other, a))
    for (side, model, path, opposite), own in zip(sides, holders, strict=True):
        note = model.parameters.get(path)
        if note is None or len(note.shape) < 2 or note.norm == 0:
            continue  # vectors of zeros or ones, as norms begin with, are equal by themselves
        for key in own[model.digests[path]]:
            beside = opposite.digests.get(key)
            if key != path and beside not in (None, opposite.digests.get(path)):
                return fact("preflight.tied_alone", key=key, side=side)
    return None


def _relation(
    a: ParameterNote, b: ParameterNote, *, has_codes: bool
) -> tuple[Fact | None, bool, float | None]:
    """Relates two parameters: (what relates them, or nothing that is known; is it the dtype alone?;
    how far apart, where that is to be said). ``has_codes``: of a quantised model, where training is
    no cause."""
    if a.shape != b.shape:
        return fact("preflight.shapes", reference=a.shape, candidate=b.shape), False, None
    dtypes = {"reference": a.dtype, "candidate": b.dtype}
    if a.values == b.values and a.dtype != b.dtype:
        return fact("preflight.values_in_dtypes", **dtypes), True, None
    for side, other, manifest, other_manifest in (
        ("candidate", "reference", b, a),
        ("reference", "candidate", a, b),
    ):
        for form, digest in other_manifest.rounded.items():
            if digest == manifest.values or digest == manifest.rounded.get(form) == manifest.values:
                narrower = manifest.dtype == form != other_manifest.dtype
                how = fact("preflight.rounded_to", side=side, other=other, form=form)
                return how, narrower, None
    for side, note in (("reference", a), ("candidate", b)):
        if note.nonfinite and a.nonfinite != b.nonfinite:
            return fact("preflight.nonfinite", side=side, num=note.nonfinite), False, None
        if not 0 < note.norm < math.inf:
            return fact("preflight.all_zeros", side=side) if note.norm == 0 else None, False, None
    x, y = np.array(a.sums), np.array(b.sums)
    near = _size(y - x) / a.norm
    if {a.dtype, b.dtype} == {"bfloat16", "float16"} and near < SHORT_FORMATS["bfloat16"]:
        return fact("preflight.dtypes_apart", **dtypes), True, None
    by_column, by_row, _ = (_size(part) / a.norm for part in (y - x).reshape(3, NUM_SUMS))
    alike = abs(b.norm / a.norm - 1) < EQUAL_SUMS_DISTANCE
    turned = _size(y.reshape(3, NUM_SUMS) - x.reshape(3, NUM_SUMS)[[1, 0, 2]]) / a.norm
    for code, equal, moved in (
        ("rows_moved", by_column, by_row),
        ("columns_moved", by_row, by_column),
        ("turned", turned, near * (len(a.shape) == 2)),
    ):
        if alike and equal < EQUAL_SUMS_DISTANCE and moved > MOVED_SUMS_DISTANCE:
            return fact(f"preflight.{code}"), False, None
    factor = math.copysign(b.norm / a.norm, x @ y)
    ones = _sums_of_ones(a.shape)
    constant = float((y - x) @ ones / (ones @ ones or 1.0))
    rounding = max(EQUAL_SUMS_DISTANCE, SHORT_FORMATS.get(b.dtype, 0))
    for how, fitted, most in (
        (fact("preflight.scaled", factor=factor), factor * x, EQUAL_SUMS_DISTANCE),
        (fact("preflight.shifted", constant=constant), x + constant * ones, rounding),
    ):
        if _size(y - fitted) / b.norm < min(most, near / 10):
            return how, False, None
    steps = [
        fact("preflight.one_step", side=side)
        for side, note in (("reference", a), ("candidate", b))
        if note.levels
    ]
    if near < NEAR_WEIGHTS_DISTANCE:
        cause = fact("preflight.as_quantised", steps=steps) if steps else None
        if not (steps or has_codes):
            cause = fact("preflight.as_trained")
            if a.dtype == b.dtype and near < SHORT_FORMATS.get(a.dtype, EQUAL_SUMS_DISTANCE):
                dtype = a.dtype if a.dtype in SHORT_FORMATS else None
                cause = fact("preflight.as_merged", dtype=dtype)
        return cause, False, near
    return None, False, None


def _size(sums: np.ndarray) -> float:
    return float(np.sqrt(np.square(sums).mean()))


def _sums_of_ones(shape: Sequence[int]) -> np.ndarray:
    """What a parameter of ones has as its sums."""
    from divergence.numerics.drawn import signs  # a plain comparison does without it

    num_columns = shape[-1] if len(shape) > 1 else 1
    num_rows = math.prod(shape) // max(1, num_columns)
    columns, rows = (signs(n, 2 * NUM_SUMS).sum(0, dtype=float) for n in (num_columns, num_rows))
    own, both = slice(NUM_SUMS), slice(NUM_SUMS, None)
    parts = num_rows * columns[own], num_columns * rows[own], rows[both] * columns[both]
    return np.concatenate(parts)


# Two models, from what their manifests say: parameters by name, blocks by place, configurations.
#
# A digest says whether two tensors are equal; which belong together, names tell. Two checkpoints of
# one model may differ in a prefix (a base model and its causal LM: ``layers.0`` and
# ``model.layers.0``), and one may have a head besides. So names are matched one to one: by a name
# map, then as they stand or by prefixes, as many as it takes (a model of several towers). A set of
# equal values is no match: with a duplicated layer every value of one side is on the other too.
#
# What is left over on one side is another architecture, unless it is no part of what runs between
# the embedding and the head: outside all numbered modules (``.3.``), and either outside the prefix
# that matched (a head on a base model) or a copy of a matched tensor (tied weights written out).
#
# A configuration's key that moved (``rope_theta`` into ``rope_parameters``, as from one version of
# transformers to another) is found by its last name.
#
# The causes are guesses with the facts that they rest on, said beside the difference itself and
# never in its place: a LoRA that is not merged, weights that are tied on one side, a padded
# vocabulary, one layer that was trained further, another chat template or tokenizer.

_MAX_PREFIXES = 6  # pairs of prefixes that are tried, one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Parameters by name. ``pairs``: reference's name → candidate's; ``prefixes`` that it took, in
    the order found; ``mapped``: some were matched by a name map; ``alone``: what is left on each
    side, of which ``beside`` is no part of the body: it may be there or not."""

    pairs: dict[str, str]
    prefixes: list[tuple[str, str]]
    mapped: bool
    alone: tuple[list[str], list[str]]
    beside: tuple[list[str], list[str]]

    @property
    def is_one_to_one(self) -> bool:
        """Does every parameter of both sides have its one partner, heads and ties aside?"""
        return bool(self.pairs) and all(
            set(alone) <= set(beside) for alone, beside in zip(self.alone, self.beside, strict=True)
        )

    def describe(self) -> list[Fact]:
        """Return how names were read, and what is left on which side."""
        parts = [
            fact("preflight.prefix_read", reference=a or None, candidate=b or None)
            for a, b in self.prefixes
        ]
        parts += [fact("preflight.by_map")] if self.mapped else []
        return [*parts, *self.left_over()]

    def left_over(self) -> list[Fact]:
        """Return what is left on which side."""
        return [
            fact("preflight.left_over", num=len(names), side=side, names=names)
            for side, names in zip(("reference", "candidate"), self.alone, strict=True)
            if names
        ]


def match_parameters(
    a: Mapping[str, str], b: Mapping[str, str], names: NameMap | None = None
) -> Matching:
    """Match the parameters of two models (name → digest) by their names alone."""
    pairs: dict[str, str] = {}
    prefixes: list[tuple[str, str]] = []
    taken: set[str] = set()
    if names is not None:
        for name in a:
            other = names(f"{name}:out").rpartition(":")[0]  # a map names modules
            if other != name and other in b and other not in taken:
                pairs[name] = other
                taken.add(other)
    mapped = bool(pairs)
    for _ in range(_MAX_PREFIXES):
        taken = set(pairs.values())
        names_a = [name for name in a if name not in pairs]
        names_b = {name for name in b if name not in taken}
        if not names_a or not names_b:
            break
        prefix_a, prefix_b = "", ""
        if not (names_b.issuperset(names_a) or names_b.issubset(names_a)):
            # as sites, whose prefixes end before the module: all modules have a weight
            sites_a, sites_b = (
                [":".join(name.rpartition(".")[::2]) for name in some]
                for some in (names_a, names_b)
            )
            prefix_a, prefix_b = find_prefix(sites_a, sites_b) or ("", "")
        matched = {
            name: prefix_b + name[len(prefix_a) :]
            for name in names_a
            if name.startswith(prefix_a) and prefix_b + name[len(prefix_a) :] in names_b
        }
        if not matched:
            break
        pairs |= matched
        if (prefix_a, prefix_b) != ("", ""):
            prefixes.append((prefix_a, prefix_b))
    taken = set(pairs.values())
    alone = [name for name in a if name not in pairs], [name for name in b if name not in taken]
    return Matching(
        pairs=pairs,
        prefixes=prefixes,
        mapped=mapped,
        alone=alone,
        beside=(
            _beside(alone[0], a, {a[name] for name in pairs}, [prefix for prefix, _ in prefixes]),
            _beside(alone[1], b, {b[name] for name in taken}, [prefix for _, prefix in prefixes]),
        ),
    )


def _beside(
    names: list[str], digests: Mapping[str, str], matched: Collection[str], prefixes: list[str]
) -> list[str]:
    """Lists parameters that may be there or not: heads, and copies of what is matched."""
    return [
        name
        for name in names
        if not any(part.isdecimal() for part in name.split("."))
        and (
            digests[name] in matched
            or any(prefix and not name.startswith(prefix) for prefix in prefixes)
        )
    ]


def tells_in_part(manifest: Manifest) -> bool:
    """Does its engine tell some of the weights, or none?"""
    facts = {} if manifest.engine is None else manifest.engine.facts
    return "weights" in facts or UNKNOWN in manifest.model.digests.values()


def as_far_as_told(
    a: ModelIdentity, b: ModelIdentity, matching: Matching
) -> tuple[PreflightStatus, list[Fact]]:
    """Compares weights of which an engine tells some, or none: (status, details)."""
    pairs = [
        (name, digest_a, digest_b)
        for name, other in (matching.pairs if a.dtype == b.dtype else {}).items()
        if UNKNOWN not in (digest_a := a.digests[name], digest_b := b.digests[other])
    ]
    different = [name for name, digest_a, digest_b in pairs if digest_a != digest_b]
    if different:
        return "blocking", [
            fact("preflight.told_differ", num=len(different), total=len(pairs), names=different)
        ]
    return "unknown", [fact("preflight.told_equal", num=len(pairs))]


def shape_of(manifest: Manifest) -> str:
    """Say how tokens were fed: ``8 × batch 1``, ``1 × batch 8, in chunks of 16``, ``no cache``."""
    groups, settings = manifest.tokens.groups, manifest.settings
    return sentence(
        fact(
            "preflight.batches",
            num=len(groups),
            sizes=sorted(set(map(len, groups))) or [0],
            chunk=settings.prefill_chunk or None,
            cache=settings.use_cache,
        )
    )


def attention_of(manifest: Manifest) -> str:
    """transformers' name of it, or what an engine says of its own kernels."""
    facts = {} if manifest.engine is None else manifest.engine.facts
    return manifest.model.attn_implementation or facts.get("attention backend") or "none"


def block_lines(a: Manifest, b: Manifest, names: NameMap | None) -> list[PreflightLine]:
    """A line where the two have other blocks; none where they have not, or where the runs' sites
    do not tell. By the modules that were hooked, so also where digests cannot be compared."""
    blocks = []
    for side in (a, b):
        sites = side.plan.sites
        own = side.engine is not None and "blocks" in side.engine.facts  # what ran tells them not
        if own or side.mesh is not None or not ("blocks" in sites or "modules" in sites):
            return []
        notes = side.plan.modules.items()
        blocks.append([unescape_path(path) for path, note in notes if note.role == "block"])
    block_a, block_b = blocks
    matching = match_parameters(dict.fromkeys(block_a, ""), dict.fromkeys(block_b, ""), names)
    parts = matching.left_over()
    # all under other names: no architecture's difference, and nothing to compare them by
    of_one = matching.pairs or len(block_a) != len(block_b)
    status: PreflightStatus = "blocking" if of_one else "differs"
    numbers = str(len(block_a)), str(len(block_b))
    return [_same("blocks", *numbers, *parts, status=status)] if parts else []


_ANYWHERE = ("factor", "type", "name", "value", "rope_type")
"""Last names that stand under many keys: no sign of one that moved."""


def config_line(a: Manifest, b: Manifest) -> PreflightLine:
    """The line of preflight: keys whose values differ, reference first."""
    digests = [manifest.model.config_digest[:12] for manifest in (a, b)]
    same = digests[0] == digests[1]
    detail: Fact | None = None
    status: PreflightStatus = "same" if same else "differs"
    config_a, config_b = a.model.config, b.model.config
    if same:  # beside equal digests stand settings, of which an engine may not tell one
        config_a = {key: value for key, value in config_a.items() if key in config_b}
        config_b = {key: value for key, value in config_b.items() if key in config_a}
    if config_a and config_b:
        differences, moved = config_differences(config_a, config_b)
        if differences:
            status = "differs"
            detail = fact("preflight.config_differences", differences=differences)
        elif moved and not same:
            status, detail = "same", fact("preflight.moved_keys", num=moved)
        elif not same:
            detail = fact("preflight.config_not_recorded")
    return _same("config", digests[0], digests[1], detail, status=status)


def config_differences(
    a: dict[str, ConfigValue], b: dict[str, ConfigValue]
) -> tuple[list[Fact], int]:
    """Compares configurations: (facts, how many keys only moved). Values that differ come before
    keys that one side alone has; of those, what is null says nothing."""

    def differ(key: str, reference: ConfigValue, candidate: ConfigValue, **places: str) -> Fact:
        values = {"reference": _text(reference), "candidate": _text(candidate)}
        return fact("preflight.config_value", key=key, **values, **places)

    differences = [differ(key, a[key], b[key]) for key in a if key in b and a[key] != b[key]]
    only_a = {key: value for key, value in a.items() if key not in b and value is not None}
    only_b = {key: value for key, value in b.items() if key not in a and value is not None}
    moved = 0
    for key in list(only_a):
        leaf = key.rpartition(".")[2]
        there = [other for other in only_b if other.rpartition(".")[2] == leaf]
        if len(there) != 1 or (leaf in _ANYWHERE and only_a[key] != only_b[there[0]]):
            continue
        ref, cand = only_a.pop(key), only_b.pop(there[0])
        if ref == cand:
            moved += 1
        else:
            differences.append(differ(leaf, ref, cand, place=key, other_place=there[0]))
    for keys, other, flipped in ((only_b, a, False), (only_a, b, True)):
        for key in list(keys):
            leaf = key.rpartition(".")[2]
            there = [k for k in other if k.rpartition(".")[2] == leaf and other[k] != keys[key]]
            if leaf not in _ANYWHERE and len(there) == 1:
                pair = [(other[there[0]], there[0]), (keys.pop(key), key)]
                (value, place), (other_value, other_place) = pair[::-1] if flipped else pair
                places = {"reference_place": place, "candidate_place": other_place}
                differences.append(differ(leaf, value, other_value, **places))
    for side, only in (("reference", only_a), ("candidate", only_b)):
        if only:
            shown = [f"{key}={_text(value)}" for key, value in only.items()]
            differences.append(fact("preflight.config_only", side=side, shown=shown))
    return differences, moved


def _text(value: ConfigValue) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:.10g}"
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def derived_lines(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Tensors that modules made and no checkpoint stores, by name; nothing where a run tells none.
    What changed while a side ran is told even where it began alike."""
    notes_a, notes_b = a.model.derived, b.model.derived
    common = [name for name in notes_a if name in notes_b]
    if not common:
        return []
    by_text: dict[Fact, list[str]] = {}
    for name in common:
        if (text := _derived_difference(notes_a[name], notes_b[name])) is not None:
            by_text.setdefault(text, []).append(name)
    details = [fact("preflight.derived", names=names, how=text) for text, names in by_text.items()]
    shown = [
        digest_many((name, notes[name].digest) for name in common)[:12]
        for notes in (notes_a, notes_b)
    ]
    return [_same("derived tensors", shown[0], shown[1], *details, same=not details)]


def layout_lines(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Equal parameters that lie otherwise in memory, by which kernels are chosen, or that are one
    with another on one side alone; nothing where there are none, another engine keeps them in its
    own way, or a run is too old to tell."""
    engines = [None if run.engine is None else run.engine.name for run in (a, b)]
    if min(a.schema_version, b.schema_version) < _TELLS_LAYOUT or engines[0] != engines[1]:
        return []
    by_strides: dict[Fact, list[str]] = {}
    for name, own in a.model.parameters.items():
        there = b.model.parameters.get(name)
        if there is not None and own.shape == there.shape and own.strides != there.strides:
            how = fact("preflight.strides", reference=own.strides, candidate=there.strides)
            by_strides.setdefault(how, []).append(starred(name))
    details = [
        fact("preflight.derived", names=list(dict.fromkeys(names)), how=how)
        for how, names in by_strides.items()
    ]
    for side, model, other in ((SIDES[0], a.model, b.model), (SIDES[1], b.model, a.model)):
        for names in model.tied:
            digests = {other.digests.get(name) for name in names}
            if names not in other.tied and len(digests) == 1 and None not in digests:
                details.append(fact("preflight.tied_equal", names=names, side=side))
    return [_same("memory layout", "-", "-", *details, status="differs")] if details else []


_TELLS_LAYOUT = 8


def _derived_difference(a: DerivedNote, b: DerivedNote) -> Fact | None:
    if a.changed_after != b.changed_after:
        alone = a.changed_after is None or b.changed_after is None
        side: Side = "reference" if b.changed_after is None else "candidate"
        sample = a.changed_after if side == "reference" else b.changed_after
        return fact("preflight.derived_changed", side=side if alone else None, sample=sample)
    if a.digest == b.digest and a.dtype == b.dtype:
        return None
    if a.shape != b.shape:
        return fact("preflight.shapes", reference=a.shape, candidate=b.shape)
    x, y = (np.array([float(value) for value in note.values]) for note in (a, b))
    rounding = NEAR_TABLES_DISTANCE
    if a.dtype != b.dtype:
        rounding = max(2 * format_named(note.dtype).unit_roundoff for note in (a, b))
    same = np.isclose(x, y, rtol=rounding, atol=0, equal_nan=True)
    if a.dtype != b.dtype and same.all():
        return fact("preflight.derived_dtypes", reference=a.dtype, candidate=b.dtype)
    if same.all():  # rounding, or behind what is kept of them
        whole = math.prod(a.shape) <= len(x)
        return None if whole else fact("preflight.derived_behind", num=len(x))
    first = int(np.argmin(same))
    for name, values in (("candidate", y), ("reference", x)):
        if len(values) > first + 1 and (values[first:] == values[first]).all():
            return fact(
                "preflight.derived_constant", side=name, value=float(values[first]), first=first
            )
    with np.errstate(all="ignore"):
        factors = y / x
    if first == 0 and np.ptp(factors) <= rounding * abs(factors[0]):
        return fact("preflight.scaled", factor=float(factors[0]))
    return fact(
        "preflight.derived_values",
        first=first,
        reference=float(x[first]),
        candidate=float(y[first]),
    )


_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_CONTEXT = 24


_GUESSES = ("preflight.relations", "preflight.one_layer", "preflight.one_kind")


def without_guesses(line: PreflightLine, relations: list[Fact]) -> PreflightLine:
    """The line of the weights with what their values tell, in the place of what sums do."""
    facts = [part for item in line.details for part in item["facts"] or [item]]
    kept = [part for part in facts if part.code not in _GUESSES]
    return msgspec.structs.replace(line, details=in_one([*relations, *kept]))


def weight_causes(a: ModelIdentity, b: ModelIdentity, *, guess: bool = True) -> list[Fact]:
    """Return what the names and digests of two models' weights look like. ``guess``: what changed
    the values is not known otherwise."""
    causes: list[Fact] = []
    sides = (("reference", "candidate", a, b), ("candidate", "reference", b, a))
    for side, _, model, other_model in sides:
        names = [name for name in model.digests if ".lora_" in name]
        if names and not any(".lora_" in name for name in other_model.digests):
            notes = [
                text for note in model.code.values() for text in note.wrapped if "LoRA" in text
            ]
            method = notes[0].partition(" (")[0] if notes else "LoRA"
            causes.append(
                fact(
                    "preflight.adapters",
                    side=side,
                    num=len(names),
                    adapter=method,
                    merged="merged" in method,
                )
            )
    rows = (("embedding", a.embedding_rows, b.embedding_rows), ("head", a.head_rows, b.head_rows))
    for what, ours, others in rows:
        if ours is not None and others is not None and ours != others:
            sizes = {a.tokenizer_size, b.tokenizer_size} - {None}
            size = sizes.pop() if len(sizes) == 1 else None
            padded = size is not None and min(ours, others) >= size
            causes.append(
                fact(
                    "preflight.vocabulary",
                    size=size if padded else None,
                    what=what,
                    reference=ours,
                    candidate=others,
                )
            )
            break
    # weights that are one tensor on one side, and two different ones on the other
    tied = (
        fact("preflight.tied", names=shared_names, side=side, other=other)
        for side, other, model, other_model in sides
        for names in model.tied
        if (shared_names := [name for name in names if name in other_model.digests])
        and len({other_model.digests[name] for name in shared_names}) > 1
    )
    causes += [cause for cause in (next(tied, None),) if cause is not None]
    common = [name for name in a.digests if name in b.digests]
    different = [name for name in common if a.digests[name] != b.digests[name]]
    if guess and 0 < len(different) < len(common) and a.quantization is None:
        # all of one block, or of few kinds in every block
        blocks = {match[1] if (match := _BLOCK.match(name)) else "" for name in different}
        kinds = sorted({starred(name) for name in different})
        everywhere = sum(starred(name) in kinds for name in common) == len(different)
        if len(blocks) == 1 and "" not in blocks:
            causes.append(fact("preflight.one_layer", module=blocks.pop()))
        elif "" not in blocks and everywhere and len(kinds) <= 4:
            names = [kind.rpartition("*.")[2] for kind in kinds]
            causes.append(fact("preflight.one_kind", names=names))
    return causes


def template_cause(a: Manifest, b: Manifest) -> Fact | None:
    """Finds where two chat templates begin to differ, on a fixed conversation."""
    example_a, example_b = a.model.chat_example, b.model.chat_example
    if example_a is None or example_b is None:
        return None
    if example_a == example_b:
        return fact("preflight.same_example")
    return fact("preflight.rendered", place=first_difference(example_a, example_b))


def tokenizer_cause(a: Manifest, b: Manifest) -> Fact | None:
    """Return what is known of two tokenizers that differ."""
    size_a, size_b = a.model.tokenizer_size, b.model.tokenizer_size
    if size_a is None or size_b is None:
        return None
    if size_a != size_b:
        return fact("preflight.tokenizer_sizes", reference=size_a, candidate=size_b)
    return fact("preflight.tokenizer_rules", size=size_a)


def first_difference(a: str, b: str) -> Fact:
    """Says where texts part: ``from character 12 on: '…user' against '…[INST]'``."""
    place = first_apart(a, b)
    start = max(place - _CONTEXT // 3, 0)
    parts = []
    for text in (a, b):
        part = text[start : place + _CONTEXT]
        dots = "…" if start else ""
        parts.append(repr(dots + part + ("…" if place + _CONTEXT < len(text) else "")))
    return fact("preflight.texts_from", character=place, reference=parts[0], candidate=parts[1])


# How each side is quantised, scales included: those that a simulated scheme took from calibration
# or migrated stand in no note of the model, and other ones are another quantised model.


def quantization_line(a: Manifest, b: Manifest) -> PreflightLine:
    """Schemes; of simulated ones the migration, the matrices kept, and the first calibrated scales
    that are not the other side's."""
    shown = []
    for manifest in (a, b):
        note = manifest.engine
        alpha = note.options.get("smooth") if note is not None and note.simulates else None
        more = "" if alpha is None else sentence(fact("preflight.scales_migrated", alpha=alpha))
        shown.append(_with(str(manifest.model.quantization or "none"), more))
    if shown[0] == shown[1]:
        apart = _simulated_apart(a.engine, b.engine)
        shown = [_with(text, own) for text, own in zip(shown, apart, strict=True)]
    return _same("quantization", shown[0], shown[1])


def _with(text: str, more: str) -> str:
    """Adds a part to ``W8A8: ... (simulated)``, before who made the codes."""
    sentence_part, by, name = text.rpartition(" (")
    return f"{sentence_part}; {more}{by}{name}" if more and sentence_part else text


def _simulated_apart(a: EngineNote | None, b: EngineNote | None) -> Sequence[str]:
    """Say what each side's simulation has alone, of two that follow one scheme."""
    if a is None or b is None or not (a.simulates and b.simulates):
        return "", ""
    kept = [note.facts.get("kept", "") for note in (a, b)]
    cut = any(" more" in names for names in kept) and a.options.get("keep") != b.options.get("keep")
    if kept[0] != kept[1] or cut:
        patterns = [str(note.options.get("keep")) for note in (a, b)] if cut else kept
        return [f"kept: {names.replace('; ', ' ')}" for names in patterns]
    if a.calibration is None or b.calibration is None:
        return "", ""
    for code, here, there in (
        ("static_range", a.calibration.limits, b.calibration.limits),
        ("migrated_scales", a.calibration.scales, b.calibration.scales),
    ):
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        texts = []
        for kept_here, kept_there in ((here, there), (there, here)) if names else ():
            own, other, what = kept_here.get(names[0]), kept_there.get(names[0]), "none"
            if own is not None and len(own) == 2:  # a range as it is
                what = f"{own[0]:g} to {own[1]:g}"
            elif own is not None:  # of more numbers the first that differs
                pairs = enumerate(zip(own, other or [], strict=False))
                channel = next((k for k, (x, y) in pairs if x != y), 0)
                what = f"{own[channel]:g} at channel {channel}"
            more = len(names) - 1
            first = fact(f"preflight.{code}", name=names[0], num_more=more, what=what)
            texts.append(sentence(first))
        if texts:
            return texts
    return "", ""


# The prompts' tokens, and the labels of a training step: the same on both sides, and where not,
# from where on and why.

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class _Parting:
    """The first prompt that differs, and its first token that does."""

    sample: int
    token: int
    ids: tuple[list[int], list[int]]
    """The tokens from there on."""
    texts: tuple[str, str] | None
    """The prompts as text, where both tell it."""
    edit: Fact | None
    """Where one side has all the other's tokens and more: which."""


def prompt_difference(a: Manifest, b: Manifest, *, unseen: bool) -> Fact | None:
    """Tells from which token on the first prompt differs; None where all are equal. ``unseen``: a
    side does not tell the tokens of all prompts; those are left out."""
    samples = a.tokens.samples, b.tokens.samples
    if len(samples[0]) != len(samples[1]):
        reference, candidate = map(len, samples)
        return fact("preflight.number_of_prompts", reference=reference, candidate=candidate)
    parting = _find_parting(*samples, unseen=unseen)
    if parting is None:
        return None
    cause = None  # why the ids differ, as far as the texts tell
    if parting.texts is not None and parting.texts[0] == parting.texts[1]:
        cause = fact("preflight.text_cause", edit=parting.edit is not None)
    elif parting.texts is not None:
        cause = fact("preflight.texts_differ", place=first_difference(*parting.texts))
    return fact(
        "preflight.prompt_differs",
        sample=parting.sample,
        token=parting.token,
        reference=parting.ids[0],
        candidate=parting.ids[1],
        text=cause,
        edit=parting.edit,
    )


def prompt_headline(a: Manifest, b: Manifest) -> Fact:
    """The headline, as ``the chat templates differ; prompt 0 parts at token 7: ' AI' / ' as'``."""
    samples = a.tokens.samples, b.tokens.samples
    if len(samples[0]) != len(samples[1]):
        reference, candidate = map(len, samples)
        what = "prompts" if any(s.prompt_ids for side in samples for s in side) else "steps"
        return fact(
            "preflight.prompts_of_numbers", what=what, reference=reference, candidate=candidate
        )
    causes = (
        ("tokenizers", a.model.tokenizer_digest, b.model.tokenizer_digest),
        ("chat templates", a.model.chat_template_digest, b.model.chat_template_digest),
    )
    parting = _find_parting(*samples)
    if parting is None:
        return fact("preflight.prompts_differ")
    same_text = parting.texts is not None and parting.texts[0] == parting.texts[1]
    named = [name for name, ref, cand in causes if None not in (ref, cand) and ref != cand]
    if parting.edit and (same_text or parting.texts is None or parting.token < 2):
        what = named[-1] if named else "prompts"  # a tokenizer may add tokens to one text, or not
        return fact("preflight.edited", what=what, sample=parting.sample, edit=parting.edit)
    what = "tokenizers" if same_text else named[-1] if named else "prompts"
    shown: Sequence[object] = [ids[:3] for ids in parting.ids]
    if parting.texts is not None and not same_text:
        # from the word on in which they begin to differ
        text, place = parting.texts[0], first_apart(*parting.texts)
        spaces = text.rfind(" ", 0, place), text.rfind("\n", 0, place)
        start = max(*spaces, place - _CONTEXT, 0)
        ends = [text[start : start + _CONTEXT] for text in parting.texts]
        shown = [
            repr(end + "…" * (len(text) > start + _CONTEXT))
            for end, text in zip(ends, parting.texts, strict=True)
        ]
    return fact(
        "preflight.parting",
        what=what,
        sample=parting.sample,
        token=parting.token,
        reference=shown[0],
        candidate=shown[1],
    )


def _find_parting(
    a: Sequence[SampleTokens], b: Sequence[SampleTokens], *, unseen: bool = False
) -> _Parting | None:
    for number, (token, other) in enumerate(zip(a, b, strict=True)):
        ids_a, ids_b = token.prompt_ids, other.prompt_ids
        if ids_a == ids_b or (unseen and not (ids_a and ids_b)):
            continue
        place = first_apart(ids_a, ids_b)
        texts = None if token.text is None or other.text is None else (token.text, other.text)
        ids = ids_a[place : place + _SHOWN], ids_b[place : place + _SHOWN]
        return _Parting(
            sample=number, token=place, ids=ids, texts=texts, edit=_edit(ids_a, ids_b, place)
        )
    return None


def _edit(a: Sequence[int], b: Sequence[int], place: int) -> Fact | None:
    """Return what one side has besides all tokens of the other, from ``place`` on, where they part:
    a template and a tokenizer that both write the first token, or a template that lost its end."""
    pair = (("reference", a), ("candidate", b))
    (longer, more), (shorter, fewer) = sorted(pair, key=lambda side: -len(side[1]))
    num = len(more) - len(fewer)
    if not fewer or not num or list(more[place + num :]) != list(fewer[place:]):
        return None
    if num == place == 1 and more[0] == more[1]:
        return fact("preflight.begins_twice", side=longer, other=shorter, token=more[0])
    extra = list(more[place : place + num])
    where = "begin" if place == 0 else "end" if place == len(fewer) else place
    return fact(
        "preflight.has_more",
        side=longer,
        other=shorter,
        place=where,
        tokens=fact("preflight.tokens", num=num, ids=extra[:_SHOWN]),
    )


def label_lines(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Other labels are another loss, so another experiment. Empty where each token is its own label
    on both sides, where the prompts themselves differ, and where one of them trains nothing."""
    if not (a.training.train and b.training.train):
        return []
    samples = a.tokens.samples, b.tokens.samples
    given = any(sample.labels is not None for side in samples for sample in side)
    ids = [[sample.prompt_ids for sample in side] for side in samples]
    if not given or ids[0] != ids[1]:
        return []
    detail = None
    for number, both in enumerate(zip(*samples, strict=True)):
        labels = both[0].used_labels, both[1].used_labels
        if labels[0] != labels[1]:
            place = first_apart(*labels)
            here, there = (None if side[place] == NO_LABEL else side[place] for side in labels)
            detail = fact(
                "preflight.labels", sample=number, token=place + 1, reference=here, candidate=there
            )
            break
    own = sentence(fact("preflight.labels_own"))
    shown = [labels_text(side.tokens) or own for side in (a, b)]
    status: PreflightStatus = "same" if detail is None else "blocking"
    return [_same("labels", shown[0], shown[1], detail, status=status)]
