"""Every line of preflight: what is known of both sides before a number is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from divergence.comparison.align.pairs import NameMap
from divergence.comparison.preflight.code import code_line
from divergence.comparison.preflight.models import (
    attention_of,
    block_lines,
    config_line,
    first_difference,
    quantization_line,
    shape_of,
    template_cause,
    tokenizer_cause,
    weights_line,
)
from divergence.comparison.results import PreflightLine, PreflightStatus
from divergence.facts import Fact, apart, fact, sentence
from divergence.run.contents import labels_text
from divergence.run.manifest import NO_LABEL, Manifest, SampleTokens
from divergence.run.reader import Run
from divergence.run.site import starred
from divergence.words import list_names

# The prompts' tokens, and the labels of a training step: the same on both sides, and where not,
# from where on and why.

_SHOWN = 6
_LONGEST = 24


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
    """From which token on the first prompt differs; None where all are equal. ``unseen``: a side
    does not tell the tokens of all prompts; those are left out."""
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
        "preflight.prompt_differs", sample=parting.sample, token=parting.token,
        reference=parting.ids[0], candidate=parting.ids[1], text=cause, edit=parting.edit,
    )  # fmt: skip


def prompt_headline(a: Manifest, b: Manifest) -> Fact:
    """``the chat templates differ; prompt 0 parts at token 7: ' AI assistant' / ' assistant'``."""
    samples = a.tokens.samples, b.tokens.samples
    if len(samples[0]) != len(samples[1]):
        reference, candidate = map(len, samples)
        return fact("preflight.prompts_of_numbers", reference=reference, candidate=candidate)
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
        text_a, text_b = parting.texts
        pairs = enumerate(zip(text_a, text_b, strict=False))
        place = next((n for n, (x, y) in pairs if x != y), min(len(text_a), len(text_b)))
        spaces = text_a.rfind(" ", 0, place), text_a.rfind("\n", 0, place)
        start = max(*spaces, place - _LONGEST, 0)
        ends = [text[start : start + _LONGEST] for text in parting.texts]
        shown = [
            repr(end + "…" * (len(text) > start + _LONGEST))
            for end, text in zip(ends, parting.texts, strict=True)
        ]
    return fact(
        "preflight.parting", what=what, sample=parting.sample, token=parting.token,
        reference=shown[0], candidate=shown[1],
    )  # fmt: skip


def _find_parting(
    a: Sequence[SampleTokens], b: Sequence[SampleTokens], *, unseen: bool = False
) -> _Parting | None:
    for number, (mine, other) in enumerate(zip(a, b, strict=True)):
        ids_a, ids_b = mine.prompt_ids, other.prompt_ids
        if ids_a == ids_b or (unseen and not (ids_a and ids_b)):
            continue
        place = next(
            (n for n, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y),
            min(len(ids_a), len(ids_b)),
        )
        texts = None if mine.text is None or other.text is None else (mine.text, other.text)
        ids = ids_a[place : place + _SHOWN], ids_b[place : place + _SHOWN]
        return _Parting(
            sample=number, token=place, ids=ids, texts=texts, edit=_edit(ids_a, ids_b, place)
        )
    return None


def _edit(a: Sequence[int], b: Sequence[int], place: int) -> Fact | None:
    """What one side has besides all tokens of the other, from ``place`` on, where they part: a
    template and a tokenizer that both write the first token, or a template that lost its end."""
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
        "preflight.has_more", side=longer, other=shorter, place=where,
        tokens=fact("preflight.tokens", num=num, ids=extra[:_SHOWN]),
    )  # fmt: skip


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
    for number, (sample_a, sample_b) in enumerate(zip(*samples, strict=True)):
        if sample_a.used_labels != sample_b.used_labels:
            pairs = enumerate(zip(sample_a.used_labels, sample_b.used_labels, strict=False), 1)
            place, both = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
            here, there = (None if label == NO_LABEL else label for label in both)
            detail = fact(
                "preflight.labels", sample=number, token=place, reference=here, candidate=there
            )
            break
    own = sentence(fact("preflight.labels_own"))
    return [
        PreflightLine(
            check="labels", status="same" if detail is None else "blocking",
            reference=labels_text(a.tokens) or own, candidate=labels_text(b.tokens) or own,
            details=[] if detail is None else [detail],
        )
    ]  # fmt: skip


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
        code_line(a, b),
        weights_line(a, b, names),
        *block_lines(a, b, names),
        _same("model class", ref.model_class, cand.model_class),
        config_line(a, b),
        quantization_line(a, b),
        _prompt_ids(a, b),
        *label_lines(a, b),
        _digests("tokenizer", ref.tokenizer_digest, cand.tokenizer_digest, tokenizer_cause(a, b)),
        _digests(
            "chat template", ref.chat_template_digest, cand.chat_template_digest,
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
        *([_named("substituted operators", a.plan.substitutes, b.plan.substitutes)]
          if a.plan.substitutes or b.plan.substitutes else []),
        *_meshes(a, b),
        _complete(a, b),
    ]  # fmt: skip
    return [_unknown(line, a, b) for line in lines]


def _tells(manifest: Manifest, check: str, shown: str) -> bool:
    """Does the run say that of itself? An engine's kernels of attention may be its own, unnamed."""
    if manifest.model.digest or manifest.model.task == "operators":
        named = manifest.engine is None or manifest.engine.name == "transformers"
        return check != "attention" or shown != "none" or named
    if check == "determinism":
        return bool(manifest.settings.switches)
    return check != "weights" and shown.strip() not in _NOTHING


def _unknown(line: PreflightLine, a: Manifest, b: Manifest) -> PreflightLine:
    """The line, or that it is unknown where a side does not say it."""
    shown = [
        value if _tells(manifest, line.check, value) else _UNKNOWN
        for manifest, value in ((a, line.reference), (b, line.candidate))
    ]
    if _UNKNOWN not in shown:
        return line
    return PreflightLine(check=line.check, status="unknown", reference=shown[0], candidate=shown[1])


def _engines(a: Manifest, b: Manifest) -> PreflightLine:
    """What ran the model: engine, version, and those of its options and switches that differ."""
    if a.engine is None or b.engine is None:  # before version 6 transformers alone
        shown = [m.engine.name if m.engine else "transformers" for m in (a, b)]
        return _same("engine", shown[0], shown[1])
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
    fallbacks_a, fallbacks_b = a.settings.cpu_fallbacks, b.settings.cpu_fallbacks
    if not fallbacks_a and not fallbacks_b:
        return []
    shown = list_names(fallbacks_a) or "none", list_names(fallbacks_b) or "none"
    return [_same(CPU_OPERATORS, *shown, fact("preflight.no_kernel"))]


def _meshes(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """How many processes made each run; nothing where one made both."""
    if a.mesh is None and b.mesh is None:
        return []
    odd = [m.mesh for m in (a, b) if m.mesh is not None and m.mesh.environments]
    detail = None
    if odd:
        labels = list(dict.fromkeys(environment.label for environment in odd[0].environments))
        detail = fact("preflight.unlike_ranks", machines=labels[:5])
    return [_same("ranks", a.processes, b.processes, detail)]


def _same(
    check: str, a: str, b: str, *details: Fact | None, same: bool | None = None
) -> PreflightLine:
    """``same``: are they, where the two texts do not tell?"""
    same = a == b if same is None else same
    return PreflightLine(
        check=check, status="same" if same else "differs", reference=a, candidate=b,
        details=apart([item for item in details if item is not None]),
    )  # fmt: skip


def _named(check: str, a: Sequence[str], b: Sequence[str]) -> PreflightLine:
    return _same(check, ", ".join(a) or "none", ", ".join(b) or "none")


def _digests(check: str, a: str | None, b: str | None, cause: Fact | None) -> PreflightLine:
    digest_a, digest_b = ("none" if digest is None else digest[:12] for digest in (a, b))
    return _same(check, digest_a, digest_b, cause if None not in (a, b) and a != b else None)


def _recorded(check: str, a: str | None, b: str | None) -> list[PreflightLine]:
    """A line where both runs say it."""
    return [] if a is None or b is None else [_same(check, a, b)]


def _build(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """What torch was built with: what differs, else its compiler and BLAS."""
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
    if detail is None and unseen:
        status, detail = "unknown", fact("preflight.tokens_untold")
    elif detail is None:
        status = "same"
    return PreflightLine(
        check="prompt ids", status=status, reference=shown[0], candidate=shown[1],
        details=[] if detail is None else [detail],
    )  # fmt: skip


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
    theirs = other.model.parameters if other.model.dtype == manifest.model.dtype else {}
    odd = {
        f"{starred(name)} {note.dtype}": None
        for name, note in manifest.model.parameters.items()
        if note.dtype != dtype and name in theirs and theirs[name].dtype != note.dtype
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
                "preflight.repeats", runs=repeated.num_runs if repeated.num_runs > 1 else None,
                num=repeated.num_different, total=repeated.num_compared,
            )
        )  # fmt: skip

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

    def say(values: dict[str, str]) -> str:
        return ", ".join(f"{k}={values[k]}" for k in different if k in values) or "-"

    return _same("environment variables", say(env_a), say(env_b), same=not different)


def _complete(a: Manifest, b: Manifest) -> PreflightLine:
    def say(manifest: Manifest) -> str:
        why = manifest.stopped_by or None
        return sentence(fact("preflight.completeness", complete=manifest.complete, why=why))

    whole = a.complete and b.complete
    detail = None if whole else fact("preflight.only_what_both_hold")
    return _same("completeness", say(a), say(b), detail, same=whole)
