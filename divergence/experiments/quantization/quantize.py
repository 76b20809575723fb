"""quantize(): what a scheme costs a model, matrix by matrix, and what to keep out of it.

The quantised model is simulated on the recorded model, in this process: what its next-token
distributions lose over the run's own tokens (``Cost``), what each matrix costs alone, and the set
of matrices that must stay in floating point for a target, found by running it. What is written is
a run like any other, made by the engine ``quantize``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from divergence._version import __version__
from divergence.errors import UsageError
from divergence.experiments.quantization.result import MatrixCost, Quantization
from divergence.experiments.quantization.trials import (
    MEASURES,
    QuantizationTrials,
    check_reachable,
    each_alone,
    find_policy,
)
from divergence.facts import Fact, fact, sentence, worded
from divergence.options.commands import CaptureOptions
from divergence.quantization.scheme import Scheme, scheme_named
from divergence.recording.api import capture
from divergence.recording.engines.quantize import (
    QuantizeEngine,
    QuantizeOptions,
    QuantizeSession,
    keep_of,
    scheme_of,
)
from divergence.recording.machine import deterministic_settings, resolve_device
from divergence.recording.new_run import check_output, unlike
from divergence.recording.request import resolve_request
from divergence.recording.structure import describe_modules
from divergence.run.command import command_line
from divergence.run.ranks import unsharded
from divergence.run.reader import Run
from divergence.run.record import expanded
from divergence.words import Progress, silent

_FEW_TOKENS = 512


def quantize(
    run: str | Path | Run,
    *,
    scheme: str = "w8a8",
    smooth: float | None = None,
    asymmetric: str = "",
    weights_per: str = "",
    activations_per: str = "",
    keep: Sequence[str] = (),
    out: str | Path | None = None,
    each: bool = False,
    target: float | None = None,
    measure: str = "kl",
    prompts: Sequence[str] = (),
    prompts_file: str | Path | None = None,
    model: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    force: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Quantization:
    """What the model of ``run`` costs under ``scheme``, over the run's tokens.

    ``run``: a floating-point run; or a model, which is captured first (beside ``out``) on
    ``prompts``. ``scheme`` and what follows it: see ``divergence.quantization.scheme``. ``keep``:
    matrices that stay in floating point, by name, ``re:`` expression or class.

    ``each``: every matrix alone. ``target``: find what must stay in floating point so that the
    mean KL (``measure`` "kl") or mean |Δ log p| ("logprob"), in nats, is at most this. ``out``:
    write the quantised run there, with what the policy keeps.

    Raises UsageError for schemes, names and targets that cannot be, and for weights that are not
    finite; ModelError for a model that cannot run; and what ``capture`` raises.
    """
    tell = progress or silent
    options = QuantizeOptions(
        scheme=scheme, smooth=smooth, asymmetric=asymmetric, weights_per=weights_per,
        activations_per=activations_per,
        keep=_joined([pattern for entry in keep for pattern in keep_of(entry)]),
    )  # fmt: skip
    chosen = scheme_of(options)
    if measure not in MEASURES:
        raise UsageError(f"--measure {measure!r}", hint=f"one of {', '.join(MEASURES)}")
    if target is not None and not target > 0:
        raise UsageError(f"--target {target:g}: a cost in nats is above 0", hint="--target 0.01")
    if chosen.weights is None and (each or target is not None):
        what = "--each" if target is None else "--target"
        raise UsageError(f"{what}: {chosen.name} quantises no matrix", hint="w8a8, w4a16, fp8, ...")
    _check_out(out, None, force=force)
    with _base(run, out, prompts, prompts_file, device, trust_remote_code, force, tell) as base:
        _check_out(out, base, force=force)
        if chosen.kv is not None and not base.manifest.settings.use_cache:
            raise UsageError(
                f"{base.path} was made without a cache, which {chosen.name} would quantise",
                hint="a run made without --no-cache",
            )
        with session_of(
            base, options, model=model, device=device, trust_remote_code=trust_remote_code,
            tell=tell,
        ) as session:  # fmt: skip
            targets = list(session.targets.values())
            if chosen.weights is not None and not targets:
                raise UsageError(
                    "every matrix is kept: nothing is left to quantise",
                    hint="fewer --keep; --keep '!NAME' quantises one that is kept otherwise",
                )
            cost = unsmoothed = predicted = policy = None
            matrices: list[MatrixCost] = []
            notes = [*_notes(session, chosen), *(_unlike(session, base) if model else ())]
            if session.loaded.task == "causal-lm":
                tell("float", 0, None, sentence(fact("experiments.as_it_is")))
                trials = QuantizationTrials(session, base.manifest.tokens.samples)
                tell("quantized", 0, None, chosen.name)
                cost = trials.cost(targets)
                if smooth is not None:
                    unsmoothed = trials.without_migration(targets)
                if target is not None:
                    check_reachable(trials, target, measure)
                if each or target is not None:
                    matrices = each_alone(trials, tell)
                    unseen = [o.name for o in matrices if o.by_default and o.outliers is None]
                    if unseen:
                        first = unseen[0]
                        notes.append(fact("experiments.unreached", num=len(unseen), first=first))
                    predicted = sum(o.cost.kl_mean for o in matrices if o.by_default)
                if target is not None:
                    policy = find_policy(
                        trials, matrices, target=target, measure=measure, whole=cost, progress=tell
                    )
            elif each or target is not None or out is None:
                QuantizationTrials(session, base.manifest.tokens.samples)  # which says why not
            kept = [*session.kept, *([] if policy is None else policy.keep)]
        names = [*keep_of(options.keep), *([] if policy is None else policy.keep)]
        chosen_options: dict[str, Any] = {
            name: value
            for name in ("scheme", "smooth", "asymmetric", "weights_per", "activations_per")
            if (value := getattr(options, name)) not in (None, "")
        }
        if out is not None:
            given = {**chosen_options, "keep": _joined(names)}
            capture(
                model, like=base, engine="quantize", engine_options=given, device=device, out=out,
                trust_remote_code=trust_remote_code, force=force, command=command, progress=tell,
            )  # fmt: skip
        made = not isinstance(run, Run) and out is None and _is_model(run)
        named = str(run) if made else str(base.path)  # what is made here for the while is gone
        again = {**chosen_options, "keep": keep_of(options.keep)}  # as options of a command
        if smooth is not None:
            again["smooth"] = f"{smooth:g}"
        if made:
            again |= {"prompt": list(prompts), "prompts": prompts_file}
        result = Quantization(
            tool_version=__version__, run=named, model=session.loaded.source,
            dtype=base.manifest.model.dtype, scheme=chosen.name, says=str(chosen),
            scheme_as_run=chosen,
            num_prompts=len(base.manifest.tokens.samples),
            num_quantized=len(targets) - (0 if policy is None else len(policy.keep)), kept=kept,
            out=None if out is None else str(out), cost=cost, unsmoothed=unsmoothed,
            matrices=matrices, predicted=predicted, policy=policy, facts=notes,
            next=_next(named, out, again, each=each, target=target),
        )  # fmt: skip
        return worded(result)


def _check_out(out: str | Path | None, base: Run | None, *, force: bool) -> None:
    """Before the work, not behind it."""
    if out is not None:
        check_output(expanded(str(out)), force=force, like=base)


@contextlib.contextmanager
def _base(
    run: str | Path | Run, out: str | Path | None, prompts: Sequence[str],
    prompts_file: str | Path | None, device: str, trust_remote_code: bool, force: bool,
    tell: Progress,
) -> Iterator[Run]:  # fmt: skip
    """The floating-point run; made here where a model was given."""
    if not isinstance(run, Run) and _is_model(run):
        with contextlib.ExitStack() as stack:
            folder = f"{out}-base" if out is not None else str(Path(stack.enter_context(
                tempfile.TemporaryDirectory(prefix="divergence-quantize-"))) / "base")  # fmt: skip
            yield capture(
                run, out=folder, prompts=list(prompts), prompts_file=prompts_file, device=device,
                sites=("blocks",), truth="no", trust_remote_code=trust_remote_code, force=force,
                progress=tell,
            )  # fmt: skip
        return
    base = unsharded(Run.open(run))
    if prompts or prompts_file is not None:
        raise UsageError(
            f"{base.path} is a run and has its own prompts", hint="leave out --prompt and --prompts"
        )
    engine = base.manifest.engine
    if base.manifest.model.quantization is not None or (engine and engine.name == "quantize"):
        raise UsageError(f"{base.path} is a quantised run itself", hint="give the float run")
    yield base


def _is_model(path: str | Path) -> bool:
    """A folder with a model in it, or the name of one on the hub."""
    text, place = str(path), expanded(str(path))
    try:
        if (place / "config.json").exists():
            return True
        named = text.count("/") == 1 and text[0] not in "./~"
        return named and not (place.exists() or place.parent.exists())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def session_of(
    base: Run, options: QuantizeOptions, *, model: str | None = None, device: str = "auto",
    trust_remote_code: bool = False, tell: Progress = silent,
) -> Iterator[QuantizeSession]:  # fmt: skip
    """The model of the run, loaded and calibrated; nothing is installed."""
    request = resolve_request(
        model, like=base,
        options=CaptureOptions(device=device, trust_remote_code=trust_remote_code),
    )  # fmt: skip
    place = resolve_device(device)
    with deterministic_settings(place.partition(":")[0], seed=request.seed):
        tell("load", 0, None, request.model)
        session = QuantizeEngine().load(dataclasses.replace(request.loading, device=place), options)
        with contextlib.closing(session):
            session.check_ids(base.manifest.tokens.samples, 0)
            session.calibrate(base.manifest.tokens.samples)
            yield session


def _notes(session: QuantizeSession, scheme: Scheme) -> Iterator[Fact]:
    known = session.calibration
    if known is None:
        return
    tokens = known.recorded.num_tokens
    if scheme.static:
        yield fact(
            "experiments.static_scales", num_tokens=tokens, num_later=tokens + 1,
            usual=_FEW_TOKENS if tokens < _FEW_TOKENS else None,
        )  # fmt: skip
    if scheme.smooth is not None:
        yield fact(
            "experiments.migrated_in", num=len(known.recorded.fed_by), total=len(session.targets),
            num_norms=len(known.recorded.scales),
        )  # fmt: skip


def _unlike(session: QuantizeSession, base: Run) -> Iterator[Fact]:
    """What shows that ``model`` is not the recorded one."""
    module = session.loaded.module
    identity = session.identity(lambda *_: None)
    for difference in unlike(base.manifest, identity, session.note(), describe_modules(module)):
        model = session.loaded.source
        yield fact("experiments.numbers_of", model=model, difference=difference)


def _joined(patterns: Sequence[str]) -> str:
    """As ``keep_of`` reads them: expressions last."""
    return ",".join(sorted(patterns, key=lambda pattern: pattern.startswith(("re:", "!re:"))))


def _next(
    base: str, out: str | Path | None, again: dict[str, Any], *, each: bool, target: float | None
) -> list[str]:
    commands = []
    if out is not None:
        commands += [
            command_line("compare", base, out, note=fact("experiments.by_block")),
            command_line("capture", like=out, o=f"{out}-there", note=fact("experiments.elsewhere")),
        ]
    if scheme_named(again["scheme"]).weights is None:
        return commands
    if not (each or target):
        note = fact("experiments.which_matrices")
        commands.append(command_line("quantize", base, **again, each=True, note=note))
    if target is None:
        note = fact("experiments.what_to_keep")
        commands.append(command_line("quantize", base, **again, target="0.01", o="Q", note=note))
    return commands
