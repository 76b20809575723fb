"""quantize(): what a scheme costs a model, matrix by matrix, and what to keep out of it.

The quantised model is simulated on the recorded model, in this process: what its next-token
distributions lose over the run's own tokens (``Cost``), what each matrix costs alone, and the set
of matrices that must stay in floating point for a target, found by running it. What is written is
a run like any other, made by the engine ``quantize``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from divergence._version import __version__
from divergence.domains.quantization.coding import Quantizer, codes_of, scales_of, values_of
from divergence.domains.quantization.engine import (
    QuantizeEngine,
    QuantizeOptions,
    QuantizeSession,
    keep_of,
    quantised_cache,
)
from divergence.domains.quantization.model import CalibrationWatch as Watch
from divergence.domains.quantization.model import (
    QuantizationTarget,
    QuantizedWeight,
    calibration_of,
    install,
    targets_of,
    uninstall,
    watching,
)
from divergence.domains.quantization.result import (
    Cost,
    MatrixCost,
    Outliers,
    Quantization,
    QuantizationPolicy,
)
from divergence.domains.quantization.scheme import Scheme, scheme_named
from divergence.errors import RunWriteError, UsageError
from divergence.facts import Fact, fact, sentence, worded
from divergence.numerics.logits import RowCosts, row_costs
from divergence.numerics.sums import following_of, quantile, standard_error
from divergence.options.commands import CaptureOptions
from divergence.output import write_output
from divergence.recording.api import make_run
from divergence.recording.engines.engine import failures
from divergence.recording.engines.sessions import blocks_of
from divergence.recording.machine import deterministic_settings, resolve_device
from divergence.recording.new_run import check_output, unlike
from divergence.recording.request import resolve_request
from divergence.recording.structure import describe_modules
from divergence.recording.widening import Widening
from divergence.run.command import command_line
from divergence.run.manifest import SampleTokens
from divergence.run.ranks import unsharded
from divergence.run.reader import Run
from divergence.run.record import expanded
from divergence.words import Progress, silent

# A model in memory, run with any of its matrices quantised.
#
# Everything is held against the model's own floating-point forward over the same tokens (a prompt
# and what followed it), made here first. What it gave at every block is kept: a trial with one
# matrix quantised skips the blocks before that matrix (they give what they gave) and runs those
# from there on, so its block has the recorded input. A trial of each matrix costs about half a
# forward.


class _Seen:
    """Says what one prompt's forward gave."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        """Arguments of every block."""
        self.outputs: list[Any] = []
        self.logits = torch.empty(0)


class QuantizationTrials:
    """The model of a session, its tokens, and its floating-point forward."""

    def __init__(self, session: QuantizeSession, samples: Sequence[SampleTokens]) -> None:
        """Raises UsageError for a model without next-token distributions."""
        self.session = session
        self.model: Any = session.loaded.module
        if session.loaded.task != "causal-lm":
            raise UsageError(
                f"the model is no causal language model but {session.loaded.task}",
                hint="divergence quantize RUN --scheme ... -o Q, then divergence compare RUN Q",
            )
        self.blocks = blocks_of(self.model)
        self.numbers = {
            id(module): number
            for number, block in enumerate(self.blocks)
            for module in block.modules()
        }
        """By module, the number of the block that it is in."""
        self._weights: dict[str, list[QuantizedWeight]] = {}
        uninstall(self.model)
        self.seen = [self._base(sample) for sample in samples]

    def without_migration(self, targets: Iterable[QuantizationTarget]) -> Cost:
        """The cost of these quantised with α taken away."""
        session = self.session
        kept = session.scheme, session.calibration, self._weights
        session.scheme = msgspec.structs.replace(session.scheme, smooth=None)
        session.calibration = calibration_of(session.watches, session.targets, session.scheme)
        self._weights = {}
        try:
            return self.cost(targets)
        finally:
            session.scheme, session.calibration, self._weights = kept

    def weight(self, target: QuantizationTarget) -> list[QuantizedWeight]:
        """The target's matrices under the scheme, made once."""
        if target.name not in self._weights:
            self._weights[target.name] = self.session.weight(target)
        return self._weights[target.name]

    def cost(self, targets: Iterable[QuantizationTarget]) -> Cost:
        """Measure the cost of the model with these quantised."""
        cached = self.session.scheme.kv is not None
        with (
            self.installed(targets),
            quantised_cache(self.session.scheme.kv, self.model) as filled,
        ):
            for number, seen in enumerate(self.seen):  # after the weights, whose error names them
                if bool(seen.logits.isnan().any()):
                    raise UsageError(
                        f"the floating-point model gives logits that are nan (prompt {number})",
                        hint="divergence capture and inspect show where they begin",
                    )
            rows = [self._row_costs(o, self.logits(o, cached=cached)) for o in self.seen]
        if cached and not filled:
            raise UsageError(
                f"{self.session.scheme.name}: this model keeps no keys and values",
                hint="leave out kv8",
            )
        return cost_of(rows)

    def from_block(self, number: int | None) -> tuple[Cost, float | None]:
        """(cost, relative L2 error at the output of block ``number``) of the model as it is now,
        run from that block on; None: from its beginning."""
        rows, outs = [], []
        for seen in self.seen:
            outputs: list[Any] = []
            with contextlib.ExitStack() as stack:
                # the blocks before it give what they gave
                skipped = self.blocks[: number or 0]
                for block, output in zip(skipped, seen.outputs, strict=False):
                    block.__dict__["forward"] = lambda *_, output=output, **__: output
                    stack.callback(block.__dict__.pop, "forward")
                if number is not None:
                    hook = self.blocks[number].register_forward_hook(
                        lambda _, __, out, outputs=outputs: outputs.append(out)
                    )
                    stack.callback(hook.remove)
                logits = self.logits(seen)
            rows.append(self._row_costs(seen, logits))
            outs += [] if number is None else [(outputs[0], seen.outputs[number])]
        return cost_of(rows), None if number is None else _apart(outs)

    def floor(self, number: int) -> float:
        """Relative L2 error of a block in the model's own dtype against float64, on its recorded
        input."""
        outs = []
        for seen in self.seen:
            args, kwargs = seen.calls[number]
            with torch.no_grad(), Widening(torch.float64):
                outs.append((seen.outputs[number], self.blocks[number](*args, **kwargs)))
        return _apart(outs)

    def _base(self, sample: SampleTokens) -> _Seen:
        seen = _Seen([*sample.prompt_ids, *sample.generated_ids[:-1]])

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.calls.append((args, kwargs))

        def after(_: nn.Module, __: Any, out: Any) -> None:
            seen.outputs.append(out)

        handles: list[Any] = []
        for block in self.blocks:
            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(block.register_forward_hook(after))
        try:
            seen.logits = self.logits(seen)
        finally:
            for handle in handles:
                handle.remove()
        if len(seen.calls) != len(self.blocks):
            raise UsageError("a forward of this model does not pass each block once")
        return seen

    def logits(self, seen: _Seen, *, cached: bool = False) -> torch.Tensor:
        """(T, V)."""
        device = self.session.loaded.device
        ids = torch.tensor([seen.ids], device=device)
        with failures(self.session.loaded, [SampleTokens(prompt_ids=seen.ids)], 0), torch.no_grad():
            out = self.model(input_ids=ids, use_cache=cached)
        logits: torch.Tensor = out.logits[0].detach().cpu()
        return logits

    def _row_costs(self, seen: _Seen, logits: torch.Tensor) -> Any:
        return row_costs(seen.logits, logits, [*seen.ids[1:], -1])

    @contextlib.contextmanager
    def installed(self, targets: Iterable[QuantizationTarget]) -> Iterator[None]:
        weights = {
            t.name: (t, self.weight(t)) for t in targets if self.session.scheme.weights is not None
        }
        install(weights)
        try:
            yield
        finally:
            uninstall(self.model)


def _apart(outputs: Sequence[tuple[Any, Any]]) -> float:
    """Relative L2 error of what a block gave, over all prompts: (now, wanted)."""
    errors = norms = 0.0
    for pair in outputs:
        # the residual stream among what a block gives
        now, wanted = (out[0] if isinstance(out, tuple | list) else out for out in pair)
        errors += float((now.double() - wanted.double()).square().sum())
        norms += float(wanted.double().square().sum())
    return (errors / norms) ** 0.5 if norms else 0.0


def cost_of(parts: Sequence[RowCosts]) -> Cost:
    """Over all rows of all prompts. Rows that are not finite on one side make the mean infinite."""
    kl = np.concatenate([part.kl for part in parts])
    kl = np.where(np.isnan(kl), math.inf, kl)
    same = np.concatenate([part.same_top for part in parts])
    logprobs_a = np.concatenate([part.logprob_a for part in parts])
    other = np.concatenate([part.logprob_b for part in parts])
    following = following_of(logprobs_a, other)
    num_following, figures = 0, dict[str, float | None]()
    if following is not None:
        figures = msgspec.structs.asdict(following)
        num_following = following.num_tokens
        del figures["num_tokens"]
        figures |= {"perplexity_base": figures.pop("base"), "perplexity": figures.pop("other")}
    return Cost(
        num_tokens=len(kl),
        num_following=num_following,
        kl_mean=float(kl.mean()),
        kl_error=standard_error(kl),
        kl_median=quantile(kl, 0.5),
        kl_p90=quantile(kl, 0.9),
        kl_p99=quantile(kl, 0.99),
        kl_max=float(kl.max()),
        same_top=float(same.mean()),
        same_top_error=standard_error(same.astype(float)),
        **figures,
    )


# Each matrix of a model quantised alone: those of the scheme, and those that it keeps, so that one
# sees why; and outliers of what enters each. Embeddings and norms, which no scheme quantises, go
# through codes as weights alone.


def each_alone(trials: QuantizationTrials, progress: Progress | None = None) -> list[MatrixCost]:
    """Measure, in order of execution, what each costs alone. Cost: half a forward for each."""
    tell = progress or silent
    targets = targets_of(trials.model)
    with watching(trials.model, targets, kind=_Numbers) as watches:
        for seen in trials.seen:
            trials.logits(seen)
    outliers = {}  # by target; of those that anything entered
    for name, watch in watches.items():
        assert isinstance(watch, _Numbers)
        if watch.least is not None and watch.most is not None:
            outliers[name] = _statistics(watch, torch.maximum(-watch.least, watch.most))
    floors: dict[int | None, float | None] = {None: None}
    costs: list[MatrixCost] = []
    every = [*targets.values(), *_tables(trials)]
    for target in every:
        tell("each", len(costs), len(every), target.name)
        number = trials.numbers.get(id(target.module))
        is_table = target.part in ("embedding", "norm")
        changed = _through_codes(trials, target) if is_table else trials.installed([target])
        with changed:
            cost, error = trials.from_block(number)
        if number is not None and number not in floors:
            floors[number] = trials.floor(number)
        costs.append(
            MatrixCost(
                name=target.name,
                part=target.part,
                block=target.block,
                by_default=target.name in trials.session.targets,
                num_weights=sum(matrix.numel() for matrix in target.matrices),
                block_error=error,
                floor=floors[number],
                cost=cost,
                outliers=outliers.get(target.name),
            )
        )
    return costs


def _tables(trials: QuantizationTrials) -> list[QuantizationTarget]:
    """Weights that no inputs are multiplied with."""
    tables = []
    for path, module in trials.model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if isinstance(module, nn.Embedding):
            tables.append(QuantizationTarget(path, module, "weight", "embedding", None))
        elif weight.ndim == 1 and "norm" in type(module).__name__.lower():
            tables.append(QuantizationTarget(path, module, "weight", "norm", None))
    return tables


@contextlib.contextmanager
def _through_codes(trials: QuantizationTrials, table: QuantizationTarget) -> Iterator[None]:
    """An embedding's rows with a scale each, a norm's weight with one; a matrix that shares its
    memory with it stays as it is."""
    weight = table.module._parameters["weight"]
    quantizer = trials.session.scheme.weights
    assert weight is not None and quantizer is not None
    per = Quantizer(
        format=quantizer.format,
        per="channel" if weight.ndim == 2 else "tensor",
        symmetric=quantizer.symmetric,
    )
    wide = weight.detach().float()
    scale, zero = scales_of(wide, per)
    values = values_of(codes_of(wide, per, scale, zero), per, scale, zero).to(weight.dtype)
    table.module._parameters["weight"] = nn.Parameter(values, requires_grad=False)
    try:
        with torch.no_grad():
            yield
    finally:
        table.module._parameters["weight"] = weight


_MOST = 1 << 16
"""Numbers of a prompt that quartiles are taken from, evenly spaced."""


class _Numbers(Watch):
    def __init__(self) -> None:
        super().__init__()
        self.power_sums = torch.zeros(4, dtype=torch.float64)
        self.count = 0
        self.some: list[torch.Tensor] = []

    def see(self, x: torch.Tensor, norm: str | None) -> None:
        super().see(x, norm)
        flat = x.detach().reshape(-1).cpu().double()
        if not len(flat):
            return
        self.count += len(flat)
        self.power_sums += torch.stack([(flat**n).sum() for n in (1, 2, 3, 4)])
        self.some.append(flat[:: max(1, len(flat) // _MOST)])


def _statistics(watch: _Numbers, by_channel: torch.Tensor) -> Outliers:
    mean, mean_square, three, four = (watch.power_sums / watch.count).tolist()
    variance = mean_square - mean * mean
    fourth = four - 4 * mean * three + 6 * mean * mean * mean_square - 3 * mean**4
    # not torch.quantile, which takes no more than 2^24 numbers
    first, third = np.quantile(torch.cat(watch.some).numpy(), [0.25, 0.75]).tolist()
    most, median = float(by_channel.max()), float(by_channel.median())
    return Outliers(
        max=most,
        kurtosis=fourth / variance**2 if variance > 0 else math.nan,
        quantile_score=2 * most / 254 / (third - first) if third > first else math.inf,
        range_ratio=most / median if median > 0 else math.inf,
    )


# Which matrices to keep in floating point so that a target holds: found by running the model.
#
# Matrices are taken in order of what each costs alone. What they cost together is not the sum, so
# the number that must stay is searched by running the model with the first k kept; then each of
# those is tried without, cheapest first, again and again until none can go. Matrices that engines
# fuse into one product (query, key and value; gate and up) stay or go together: a scheme of half a
# product cannot be loaded.
#
# None of the set's members can be left out alone. That no other set is smaller is not shown.

MEASURES = ("kl", "logprob")
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
)
_MOST_TRIES = 300
"""Models that are run with one member fewer."""


def value_of(cost: Cost, measure: str) -> float:
    """Return what is held against the target."""
    if measure == "kl":
        return cost.kl_mean
    return float("inf") if cost.delta_logprob_mean is None else cost.delta_logprob_mean


def find_policy(
    trials: QuantizationTrials,
    matrices: Sequence[MatrixCost],
    *,
    target: float,
    measure: str,
    whole: Cost,
    progress: Progress | None = None,
) -> QuantizationPolicy:
    """``matrices``: each alone. ``whole``: the cost with nothing kept."""
    tell = progress or silent
    units = _units([matrix for matrix in matrices if matrix.by_default], measure)
    costs: dict[frozenset[str], Cost] = {frozenset(): whole}
    order = [tuple(matrix.name for matrix in unit) for unit in units]

    def cost_without(kept: Sequence[tuple[str, ...]]) -> Cost:
        names = frozenset(name for unit in kept for name in unit)
        if names not in costs:
            tell("policy", len(costs), None, f"{len(names)} kept")
            costs[names] = trials.cost(
                [t for name, t in trials.session.targets.items() if name not in names]
            )
        return costs[names]

    def holds(kept: Sequence[tuple[str, ...]]) -> bool:
        return value_of(cost_without(kept), measure) <= target

    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if holds(order[:middle]):
            high = middle
        else:
            low = middle + 1
    kept, fewer = _irreducible(order[:low], lambda k: value_of(cost_without(k), measure), target)
    names = [name for unit in kept for name in unit]
    cost = cost_without(kept)
    by_name = {matrix.name: matrix for matrix in matrices}
    rest = [matrix for matrix in matrices if matrix.by_default and matrix.name not in names]
    return QuantizationPolicy(
        measure=measure,
        target=target,
        keep=names,
        num_groups=len(kept),
        num_kept_weights=sum(by_name[name].num_weights for name in names),
        predicted=sum(value_of(matrix.cost, measure) for matrix in rest),
        measured=value_of(cost, measure),
        one_fewer=fewer,
        num_runs=len(costs),
        cost=cost,
    )


def _irreducible(
    kept: list[tuple[str, ...]], value: Callable[[list[tuple[str, ...]]], float], target: float
) -> tuple[list[tuple[str, ...]], float | None]:
    """``kept`` without what can go, and the least value with one fewer; None where it was not tried
    for each."""
    tries = 0
    while True:
        before, least = list(kept), float("inf")
        for unit in reversed(before):
            if tries == _MOST_TRIES:
                return kept, None
            tries += 1
            fewer = [other for other in kept if other != unit]
            cost = value(fewer)
            if cost <= target:
                kept = fewer
            else:
                least = min(least, cost)
        if kept == before:
            return kept, least if kept else None


def _units(matrices: Sequence[MatrixCost], measure: str) -> list[list[MatrixCost]]:
    """Matrices that stay or go together, costliest first."""
    units: dict[tuple[str, str], list[MatrixCost]] = {}
    for matrix in matrices:
        parent, _, leaf = matrix.name.rpartition(".")
        family = next((str(n) for n, names in enumerate(_FUSED) if leaf in names), leaf)
        units.setdefault((parent, family), []).append(matrix)
    return sorted(units.values(), key=lambda unit: -sum(value_of(o.cost, measure) for o in unit))


def forms(names: Sequence[str], scheme: Scheme) -> dict[str, str]:
    """Return what is kept in the forms that quantisers read: file name → text.

    ``compressed-tensors.json``: ``ignore`` of ``quantization_config``; ``modelopt.yaml``: entries
    of ``quant_cfg`` that switch quantisers off; ``msmodelslim.yaml``: ``exclude`` of
    ``linear_quant``.
    """
    ignore = json.dumps({"ignore": list(names)}, indent=2) + "\n"
    off = "".join(f"  - quantizer_name: '*{name}.*'\n    enable: false\n" for name in names)
    slim = (
        'apiversion: modelslim_v1\nspec:\n  process:\n    - type: "linear_quant"\n      qconfig:\n'
    )
    for what, quantizer in (("act", scheme.activations), ("weight", scheme.weights)):
        if quantizer is not None:
            slim += f"""        {what}:
          scope: "per_{quantizer.per}"
          dtype: "{"fp8_e4m3" if quantizer.is_float else quantizer.format}"
          symmetric: {quantizer.symmetric}
          method: "minmax"
"""
            if quantizer.per == "group":
                slim += f"          ext:\n            group_size: {quantizer.group}\n"
    slim += '      include: ["*"]\n      exclude:\n'
    slim += "".join(f'        - "{name}"\n' for name in names)
    return {
        "compressed-tensors.json": ignore,
        "modelopt.yaml": f"quant_cfg:\n{off}",
        "msmodelslim.yaml": slim,
    }


def write_forms(result: Quantization, folder: Path) -> list[str]:
    """Write ``forms`` of what is kept; returns their names. Raises RunWriteError."""
    written = forms(result.kept, result.scheme_as_run)
    for name, text in written.items():
        write_output(text, folder / name, what="policy", error=RunWriteError, make_folder=True)
    return list(written)


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
    """Return what the model of ``run`` costs under ``scheme``, over the run's tokens.

    ``run``: a floating-point run; or a model, which is captured first (beside ``out``) on
    ``prompts``. ``scheme`` and what follows it: see domains.quantization.scheme. ``keep``:
    matrices that stay in floating point, by name, ``re:`` expression or class.

    ``each``: every matrix alone. ``target``: find what must stay in floating point so that the
    mean KL (``measure`` "kl") or mean |Δ log p| ("logprob"), in nats, is at most this. ``out``:
    write the quantised run there, with what the policy keeps.

    Raises UsageError for schemes, names and targets that cannot be, and for weights that are not
    finite; ModelError for a model that cannot run; and what ``capture`` raises.
    """
    tell = progress or silent
    asked: dict[str, Any] = {
        "smooth": smooth,
        "asymmetric": asymmetric,
        "weights_per": weights_per,
        "activations_per": activations_per,
    }
    chosen = scheme_named(scheme, **asked)
    patterns = [pattern for entry in keep for pattern in keep_of(entry)]
    options = QuantizeOptions(scheme=scheme, **asked, keep=_joined(patterns))
    given = {name: value for name, value in asked.items() if value not in (None, "")}
    given = {"scheme": scheme} | given
    if measure not in MEASURES:
        raise UsageError(f"--measure {measure!r}", hint=f"one of {', '.join(MEASURES)}")
    if target is not None and not target > 0:
        raise UsageError(f"--target {target:g}: a cost in nats is above 0", hint="--target 0.01")
    if chosen.weights is None and (each or target is not None):
        what = "--each" if target is None else "--target"
        raise UsageError(f"{what}: {chosen.name} quantises no matrix", hint="w8a8, w4a16, fp8, ...")
    _check_out(out, None, force=force)
    made = not isinstance(run, Run) and _is_model(run)
    shared: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
    with contextlib.ExitStack() as stack:
        if made:
            scratch = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="divergence-quantize-")
            )
            base = make_run(
                str(run),
                out=f"{scratch}/base" if out is None else f"{out}-base",
                prompts=list(prompts),
                prompts_file=prompts_file,
                sites=("blocks",),
                truth="no",
                force=force,
                progress=tell,
                **shared,
            )
        else:
            base = _float_run(run, has_prompts=bool(prompts) or prompts_file is not None)
        _check_out(out, base, force=force)
        if chosen.kv is not None and not base.manifest.settings.use_cache:
            raise UsageError(
                f"{base.path} was made without a cache, which {chosen.name} would quantise",
                hint="a run made without --no-cache",
            )
        with session_of(base, options, model=model, tell=tell, **shared) as session:
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
                tell("float", 0, None, sentence(fact("quantization.as_it_is")))
                trials = QuantizationTrials(session, base.manifest.tokens.samples)
                tell("quantized", 0, None, chosen.name)
                cost = trials.cost(targets)
                if smooth is not None:
                    unsmoothed = trials.without_migration(targets)
                if target is not None:  # it must hold with every matrix kept
                    kept_cost = trials.cost([])
                    if measure == "logprob" and kept_cost.delta_logprob_mean is None:
                        raise UsageError(
                            "--measure logprob: no token has a known next one",
                            hint="--measure kl, or longer prompts",
                        )
                    least = value_of(kept_cost, measure)
                    if least > target:
                        raise UsageError(
                            f"--target {target:g} cannot be held: with every matrix in floating "
                            f"point, the keys and values of {chosen.name} still cost {least:.3g}",
                            hint=f"a target above {least:.3g}, or a scheme without kv8",
                        )
                if each or target is not None:
                    matrices = each_alone(trials, tell)
                    unseen = [o.name for o in matrices if o.by_default and o.outliers is None]
                    if unseen:
                        first = unseen[0]
                        notes.append(fact("quantization.unreached", num=len(unseen), first=first))
                    predicted = sum(o.cost.kl_mean for o in matrices if o.by_default)
                if target is not None:
                    policy = find_policy(
                        trials, matrices, target=target, measure=measure, whole=cost, progress=tell
                    )
            elif each or target is not None or out is None:
                QuantizationTrials(session, base.manifest.tokens.samples)  # which says why not
            kept = [*session.kept, *([] if policy is None else policy.keep)]
        if out is not None:
            names = [*patterns, *([] if policy is None else policy.keep)]
            make_run(
                model,
                like=base,
                engine="quantize",
                engine_options={**given, "keep": _joined(names)},
                out=out,
                force=force,
                command=command,
                progress=tell,
                **shared,
            )
        made = made and out is None
        named = str(run) if made else str(base.path)  # what is made here for the while is gone
        again = {**given, "keep": keep_of(options.keep)}  # as options of a command
        if smooth is not None:
            again["smooth"] = f"{smooth:g}"
        if made:
            again |= {"prompt": list(prompts), "prompts": prompts_file}
        result = Quantization(
            tool_version=__version__,
            run=named,
            model=session.loaded.source,
            dtype=base.manifest.model.dtype,
            scheme=chosen.name,
            says=str(chosen),
            scheme_as_run=chosen,
            num_prompts=len(base.manifest.tokens.samples),
            num_quantized=len(targets) - (0 if policy is None else len(policy.keep)),
            kept=kept,
            out=None if out is None else str(out),
            cost=cost,
            unsmoothed=unsmoothed,
            matrices=matrices,
            predicted=predicted,
            policy=policy,
            facts=notes,
            next=_next(named, out, again, cost, each=each, target=target),
        )
        return worded(result)


def _check_out(out: str | Path | None, base: Run | None, *, force: bool) -> None:
    """Check the output before the work, not behind it."""
    if out is not None:
        check_output(expanded(str(out)), force=force, like=base)


def _float_run(run: str | Path | Run, *, has_prompts: bool) -> Run:
    """Open the run, and see that it can be quantised."""
    base = unsharded(Run.open(run))
    if has_prompts:
        raise UsageError(
            f"{base.path} is a run and has its own prompts", hint="leave out --prompt and --prompts"
        )
    engine = base.manifest.engine
    if base.manifest.model.quantization is not None or (engine and engine.name == "quantize"):
        raise UsageError(f"{base.path} is a quantised run itself", hint="give the float run")
    return base


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
    base: Run,
    options: QuantizeOptions,
    *,
    model: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    tell: Progress = silent,
) -> Iterator[QuantizeSession]:
    """The model of the run, loaded and calibrated; nothing is installed."""
    request = resolve_request(
        model,
        like=base,
        options=CaptureOptions(device=device, trust_remote_code=trust_remote_code),
    )
    place = resolve_device(device)
    with deterministic_settings(place.partition(":")[0], seed=request.seed):
        tell("load", 0, None, request.model)
        session = QuantizeEngine().load(dataclasses.replace(request.loading, device=place), options)
        with contextlib.closing(session):
            session.check_ids(base.manifest.tokens.samples, 0)
            session.calibrate(base.manifest.tokens.samples)
            yield session


def _notes(session: QuantizeSession, scheme: Scheme) -> Iterator[Fact]:
    calibration = session.calibration
    if calibration is None:
        return
    tokens = calibration.num_tokens
    if scheme.static:
        yield fact(
            "quantization.static_scales",
            num_tokens=tokens,
            num_later=tokens + 1,
            usual=_FEW_TOKENS if tokens < _FEW_TOKENS else None,
        )
    if scheme.smooth is not None:
        yield fact(
            "quantization.migrated_in",
            num=len(calibration.fed_by),
            total=len(session.targets),
            num_norms=len(calibration.scales),
        )


def _unlike(session: QuantizeSession, base: Run) -> Iterator[Fact]:
    """Yield what shows that ``model`` is not the recorded one."""
    module = session.loaded.module
    identity = session.identity(lambda *_: None)
    for difference in unlike(base.manifest, identity, session.note(), describe_modules(module)):
        model = session.loaded.source
        yield fact("quantization.numbers_of", model=model, difference=difference)


def _joined(patterns: Sequence[str]) -> str:
    """Join them as ``keep_of`` reads them: expressions last."""
    return ",".join(sorted(patterns, key=lambda pattern: pattern.startswith(("re:", "!re:"))))


_TARGET = 0.01
"""Nats of KL a token that are offered as what quantisation may cost."""


def _next(
    base: str,
    out: str | Path | None,
    again: dict[str, Any],
    cost: Cost | None,
    *,
    each: bool,
    target: float | None,
) -> list[str]:
    commands = []
    if out is not None:
        commands += [
            command_line("compare", base, out, note=fact("quantization.by_block")),
            command_line(
                "capture", like=out, o=f"{out}-there", note=fact("quantization.elsewhere")
            ),
        ]
    if scheme_named(again["scheme"]).weights is None:
        return commands
    if not (each or target):
        note = fact("quantization.which_matrices")
        commands.append(command_line("quantize", base, **again, each=True, note=note))
    if target is None and (cost is None or cost.kl_mean > _TARGET):  # else all may be quantised
        note = fact("quantization.what_to_keep")
        commands.append(
            command_line("quantize", base, **again, target=f"{_TARGET:g}", o="Q", note=note)
        )
    return commands
