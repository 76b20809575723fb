"""Preflight: were the two runs the same experiment at all?

A difference that explains everything is reported before any number. Blocking are
other weights and other prompt tokens: what follows would compare two different
computations. Everything else that differs is shown, because it may be the cause.
"""

from __future__ import annotations

from divergence.comparison.align.names import NameMap
from divergence.comparison.preflight.code import code_line
from divergence.comparison.preflight.models import (
    block_lines,
    config_line,
    match_parameters,
    template_cause,
    text_cause,
    tokenizer_cause,
    weight_causes,
)
from divergence.comparison.results.findings import PreflightLine, PreflightStatus, list_names
from divergence.run.ranks.mesh import describe_mesh
from divergence.run.reader import Run
from divergence.run.schema.manifest import Manifest, Switch

__all__ = ["preflight"]

_NAMED = 5  # machines named in a line
_LIBRARIES = ("torch", "transformers")


def preflight(
    reference: Run, candidate: Run, *, names: NameMap | None = None
) -> list[PreflightLine]:
    """One line a check, in order of how much it explains. ``names``: the name map that the
    comparison uses."""
    a, b = reference.manifest, candidate.manifest
    lines = [
        code_line(a, b),
        _weights(a, b, names),
        *block_lines(a, b, names),
        _same("model class", a.model.model_class, b.model.model_class),
        config_line(a, b),
        _same("quantization", a.model.quantization or "none", b.model.quantization or "none"),
        _prompt_ids(a, b),
        _digests(
            "tokenizer", a.model.tokenizer_digest, b.model.tokenizer_digest, tokenizer_cause(a, b)
        ),
        _digests(
            "chat template",
            a.model.chat_template_digest,
            b.model.chat_template_digest,
            template_cause(a, b),
        ),
        _generated_ids(a, b),
        _same(
            "dtype",
            a.model.dtype,
            b.model.dtype,
            "compared in the wider of the two" if a.model.dtype != b.model.dtype else None,
        ),
        _same(
            "attention",
            a.model.attn_implementation or "none",
            b.model.attn_implementation or "none",
        ),
        _same("batch shape", _batches(a), _batches(b)),
        _switches(a, b),
        _repeatable(a, b),
        _same("device", _device(a), _device(b)),
        *_fallbacks(a, b),
        _same("driver", a.environment.driver or "-", b.environment.driver or "-"),
        _same("runtime", a.environment.runtime or "-", b.environment.runtime or "-"),
        _same(
            "cpu",
            f"{a.environment.cpu} {a.environment.cpu_capability}",
            f"{b.environment.cpu} {b.environment.cpu_capability}",
        ),
        *_recorded("cpu model", a.environment.cpu_model, b.environment.cpu_model),
        *_recorded("architecture", a.environment.architecture, b.environment.architecture),
        *_build(a, b),
        _same("threads", str(a.environment.num_threads), str(b.environment.num_threads)),
        *(_library(name, a, b) for name in _libraries(a, b)),
        _variables(a, b),
        _same(
            "planted faults", ", ".join(a.plan.plants) or "none", ", ".join(b.plan.plants) or "none"
        ),
        *_substituted(a, b),
        *_meshes(a, b),
        _complete(a, b),
    ]
    return lines


def _substituted(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Results of another run in the place of a run's own; nothing where there are none."""
    mine, theirs = (", ".join(one.plan.substitutes) or "none" for one in (a, b))
    return [_same("substituted operators", mine, theirs)] if (mine, theirs) != ("none",) * 2 else []


def _fallbacks(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Operators that a side's device does not have; nothing where there are none."""
    one, two = a.settings.cpu_fallbacks, b.settings.cpu_fallbacks
    if not one and not two:
        return []
    return [_same("operators on the CPU", list_names(one) or "none", list_names(two) or "none",
                  "there the device has no kernel")]  # fmt: skip


def _meshes(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """How many processes made each run; nothing where one made both."""
    if a.mesh is None and b.mesh is None:
        return []
    odd = [m.mesh for m in (a, b) if m.mesh is not None and m.mesh.environments]
    detail = None
    if odd:
        labels = list(dict.fromkeys(one.label for one in odd[0].environments))
        detail = "its ranks ran on unlike machines: " + ", ".join(labels[:_NAMED])
    return [_same("ranks", a.processes, b.processes, detail)]


def _same(check: str, a: str, b: str, detail: str | None = None) -> PreflightLine:
    return PreflightLine(
        check=check, status="same" if a == b else "differs", reference=a, candidate=b,
        detail=detail,
    )  # fmt: skip


def _digests(check: str, a: str | None, b: str | None, cause: str | None) -> PreflightLine:
    return _same(check, _short(a), _short(b), cause if None not in (a, b) and a != b else None)


def _recorded(check: str, a: str | None, b: str | None) -> list[PreflightLine]:
    """A line where both runs say it."""
    return [] if a is None or b is None else [_same(check, a, b)]


def _build(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """What torch was built with: what differs, else its compiler and BLAS."""
    one, two = a.environment.torch_build, b.environment.torch_build
    if not one or not two:
        return []
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key)] or ["compiler", "BLAS"]
    shown = [", ".join(f"{k} {found[k]}" for k in keys if k in found) for found in (one, two)]
    return [_same("torch build", shown[0] or "-", shown[1] or "-")]


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def _weights(a: Manifest, b: Manifest, names: NameMap | None) -> PreflightLine:
    one, two = a.model, b.model
    detail = None
    status: PreflightStatus = "same"
    shown = f"{one.digest[:12]} ({one.dtype})", f"{two.digest[:12]} ({two.dtype})"
    if one.missing or two.missing:
        missing = one.missing or two.missing
        detail = (
            f"{len(missing)} parameters were missing from the checkpoint and are random: "
            + list_names(missing)
        )
    unknown = _offloaded(one.digests, two.digests)
    found = match_parameters(one.digests, two.digests, names)
    digested = bool(one.digests and two.digests)
    if one.digest != two.digest and unknown and one.dtype == two.dtype:
        status, detail = "differs", f"{len(unknown)} offloaded parameters were not digested"
    elif one.digest != two.digest:
        if one.dtype != two.dtype:
            rounded = (one.rounded_digests.get(two.dtype), two.rounded_digests.get(one.dtype))
            if one.digest == rounded[1] or two.digest == rounded[0]:
                detail = (
                    f"the same weights, rounded from {one.dtype} to {two.dtype}"
                    if (rounded[0] == two.digest)
                    else f"the same weights, rounded from {two.dtype} to {one.dtype}"
                )
            elif digested and not found.is_one_to_one:
                status, detail = "blocking", f"other parameters: {found.describe()}"
            elif set(one.digests) != set(two.digests):
                status, detail = "differs", "digests of other names and dtypes cannot be compared"
            elif any(rounded):
                status, detail = "blocking", "other weights, also after rounding to one dtype"
            else:
                status = "differs"
                detail = "digests of different dtypes cannot be compared"
        elif one.quantization != two.quantization:
            status, detail = "differs", "one side is quantised"
        elif not digested:
            status, detail = "blocking", "the parameters' digests are not recorded"
        elif different := _differing(one.digests, two.digests, found.pairs):
            status, detail = "blocking", "; ".join(filter(None, (different, found.describe())))
        elif not found.is_one_to_one:
            status, detail = "blocking", f"other parameters: {found.describe()}"
        else:
            detail = found.describe()
            status = "differs"
            if found.prefixes or found.mapped:
                detail = f"the same values under other names: {detail}"
    if status != "same":
        detail = "; ".join([*filter(None, [detail]), *weight_causes(one, two)])
    return PreflightLine(
        check="weights", status=status, reference=shown[0], candidate=shown[1], detail=detail
    )


def _offloaded(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """Parameters that one side could not digest, if all the others agree."""
    unknown = [name for name in a if "offloaded" in (a[name], b.get(name))]
    rest = [name for name in a if name not in unknown]
    agree = a.keys() == b.keys() and all(a[name] == b[name] for name in rest)
    return unknown if agree else []


def _differing(a: dict[str, str], b: dict[str, str], pairs: dict[str, str]) -> str | None:
    """Parameters whose values differ; None where there is none."""
    different = [name for name, other in pairs.items() if a[name] != b[other]]
    if not different:
        return None
    return f"{len(different)} of {len(pairs)} parameters differ: {list_names(different)}"


def _prompt_ids(a: Manifest, b: Manifest) -> PreflightLine:
    ids_a = [sample.prompt_ids for sample in a.tokens.samples]
    ids_b = [sample.prompt_ids for sample in b.tokens.samples]
    shown = tuple(
        f"{len(ids)} prompt{'s' if len(ids) != 1 else ''}, {sum(map(len, ids))} tokens"
        for ids in (ids_a, ids_b)
    )
    detail = None
    status: PreflightStatus = "same"
    if ids_a != ids_b:
        status = "blocking"
        if len(ids_a) != len(ids_b):
            detail = f"{len(ids_a)} prompts against {len(ids_b)}"
        else:
            number = next(
                n for n, pair in enumerate(zip(ids_a, ids_b, strict=True)) if pair[0] != pair[1]
            )
            one, two = ids_a[number], ids_b[number]
            place = next(
                (n for n, (x, y) in enumerate(zip(one, two, strict=False)) if x != y),
                min(len(one), len(two)),
            )
            detail = (
                f"prompt {number} differs from token {place} on: "
                f"{one[place : place + 6]} against {two[place : place + 6]}"
            )
            why = text_cause(a.tokens.samples, b.tokens.samples, number)
            detail += f" ({why})" if why is not None else ""
    return PreflightLine(
        check="prompt ids", status=status, reference=shown[0], candidate=shown[1], detail=detail
    )


def _generated_ids(a: Manifest, b: Manifest) -> PreflightLine:
    ids_a = [sample.generated_ids for sample in a.tokens.samples]
    ids_b = [sample.generated_ids for sample in b.tokens.samples]
    forced = b.tokens.forced_by or a.tokens.forced_by
    same = ids_a == ids_b
    detail = "forced to the recorded tokens" if forced and same else None
    if forced and not same and a.tokens.groups != b.tokens.groups and len(ids_a) == len(ids_b):
        lengths = [min(map(len, pair)) for pair in zip(ids_a, ids_b, strict=True)]
        cut = [[one[:n] for one, n in zip(ids, lengths, strict=True)] for ids in (ids_a, ids_b)]
        if cut[0] == cut[1]:
            same, detail = True, "forced; padding follows where a prompt ended before its batch"
    return PreflightLine(
        check="generated ids",
        status="same" if same else "differs",
        reference=f"{sum(map(len, ids_a))} tokens",
        candidate=f"{sum(map(len, ids_b))} tokens",
        detail=detail,
    )


def _batches(manifest: Manifest) -> str:
    sizes = sorted({len(group) for group in manifest.tokens.groups})
    return f"{len(manifest.tokens.groups)} × batch {'/'.join(map(str, sizes)) or '0'}"


def _stands(switch: Switch) -> tuple[str, str]:
    """(what it was set to, or found at where it was left alone; "refused" or not)."""
    value = switch.found if switch.asked == "-" else switch.asked
    return value, "set" if switch.status == "accepted" else switch.status


def _switches(a: Manifest, b: Manifest) -> PreflightLine:
    """Switches that one side has and the other refused, or set otherwise."""
    found_a, found_b = (
        {switch.name: _stands(switch) for switch in one.settings.switches} for one in (a, b)
    )
    different = [name for name in found_a if name in found_b and found_a[name] != found_b[name]]
    refused = [
        name
        for side in (found_a, found_b)
        for name, (_, status) in side.items()
        if status == "refused"
    ]
    shown = tuple(
        "deterministic" if manifest.settings.deterministic else "not deterministic"
        for manifest in (a, b)
    )
    detail = None
    if different:
        detail = "set otherwise: " + list_names(different)
    elif refused:
        detail = "refused: " + list_names(sorted(set(refused)))
    noisy = sorted({*a.settings.nondeterministic_warnings, *b.settings.nondeterministic_warnings})
    if noisy:
        detail = (
            (detail + "; " if detail else "") + "nondeterministic operators: " + list_names(noisy)
        )
    same = shown[0] == shown[1] and not different
    return PreflightLine(
        check="determinism", status="same" if same else "differs",
        reference=shown[0], candidate=shown[1], detail=detail,
    )  # fmt: skip


def _repeatable(a: Manifest, b: Manifest) -> PreflightLine:
    def say(manifest: Manifest) -> str:
        found = manifest.repeatability
        if found.num_runs < 2:
            return "not measured"
        if found.num_different == 0:
            return f"{found.num_runs} runs, all bits equal"
        return (
            f"{found.num_runs} runs, {found.num_different} of {found.num_compared} tensors differ"
        )

    noisy = [m.repeatability for m in (a, b) if m.repeatability.num_different]
    detail = None
    if noisy:
        detail = f"a machine does not repeat itself, first at {noisy[0].first_difference}"
    return PreflightLine(
        check="repeatability", status="differs" if noisy else "same",
        reference=say(a), candidate=say(b), detail=detail,
    )  # fmt: skip


def _device(manifest: Manifest) -> str:
    environment = manifest.environment
    return f"{environment.device_type}: {environment.device_name}"


def _libraries(a: Manifest, b: Manifest) -> list[str]:
    names = set(a.environment.versions) | set(b.environment.versions)
    differing = sorted(
        name
        for name in names
        if a.environment.versions.get(name) != b.environment.versions.get(name)
    )
    return [*_LIBRARIES, *(name for name in differing if name not in _LIBRARIES)]


def _library(name: str, a: Manifest, b: Manifest) -> PreflightLine:
    return _same(name, a.environment.versions.get(name, "-"), b.environment.versions.get(name, "-"))


def _variables(a: Manifest, b: Manifest) -> PreflightLine:
    one, two = a.environment.variables, b.environment.variables
    different = sorted(k for k in {*one, *two} if one.get(k) != two.get(k))

    def say(values: dict[str, str]) -> str:
        return ", ".join(f"{k}={values[k]}" for k in different if k in values) or "-"

    return PreflightLine(
        check="environment variables", status="differs" if different else "same",
        reference=say(one), candidate=say(two), detail=None,
    )  # fmt: skip


def _complete(a: Manifest, b: Manifest) -> PreflightLine:
    def say(manifest: Manifest) -> str:
        if manifest.complete:
            return "complete"
        return f"incomplete ({manifest.stopped_by or 'killed'})"

    incomplete = not (a.complete and b.complete)
    return PreflightLine(
        check="completeness", status="differs" if incomplete else "same",
        reference=say(a), candidate=say(b),
        detail="only what both hold is compared" if incomplete else None,
    )  # fmt: skip
