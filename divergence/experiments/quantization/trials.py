"""A model in memory, run with any of its matrices quantised.

Everything is held against the model's own floating-point forward over the same tokens (a prompt and
what followed it), made here first. What it gave at every block is kept: a trial with one matrix
quantised skips the blocks before that matrix (they give what they gave) and runs those from there
on, so its block has the recorded input. A trial of each matrix costs about half a forward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from divergence.errors import UsageError
from divergence.experiments.quantization.result import Cost
from divergence.numerics.logits import RowCosts, row_costs
from divergence.numerics.sums import Following, following_of, quantile, standard_error
from divergence.quantization.model import (
    QuantizationTarget,
    QuantizedWeight,
    calibration_of,
    install,
    quantized_weight,
    uninstall,
)
from divergence.recording.engines.engine import failures
from divergence.recording.engines.quantize import QuantizeSession, quantised_cache
from divergence.recording.engines.sessions import blocks_of
from divergence.recording.widening import Widening
from divergence.run.manifest import SampleTokens

__all__ = ["QuantizationTrials", "cost_of"]


class _Seen:
    """What one prompt's forward gave."""

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
        self.session, self.scheme = session, session.scheme
        self.model: Any = session.loaded.module
        if session.loaded.task != "causal-lm":
            raise UsageError(
                f"the model is no causal language model but {session.loaded.task}",
                hint="divergence quantize RUN --scheme ... -o Q, then divergence compare RUN Q",
            )
        self.samples = samples
        self.blocks = blocks_of(self.model)
        self._weights: dict[str, list[QuantizedWeight]] = {}
        uninstall(self.model)
        self.seen = [self._base(sample) for sample in samples]

    @property
    def num_tokens(self) -> int:
        return sum(len(seen.ids) for seen in self.seen)

    def without_migration(self, targets: Iterable[QuantizationTarget]) -> Cost:
        """The cost of these quantised with α taken away."""
        session, kept = self.session, (self.scheme, self.session.calibration, self._weights)
        self.scheme = msgspec.structs.replace(self.scheme, smooth=None)
        session.calibration = calibration_of(session.watches, session.targets, self.scheme)
        self._weights = {}
        try:
            return self.cost(targets)
        finally:
            self.scheme, session.calibration, self._weights = kept

    def run_plain(self) -> None:
        """The forwards as the model is now; what they give is dropped."""
        for seen in self.seen:
            self._logits(seen)

    def number_of(self, target: QuantizationTarget) -> int | None:
        """Which block a target is in."""
        if target.block is None:
            return None
        modules = dict(self.model.named_modules())
        block = modules[target.block]
        return next(n for n, other in enumerate(self.blocks) if other is block)

    def weight(self, target: QuantizationTarget) -> list[QuantizedWeight]:
        """The target's matrices under the scheme, made once."""
        if target.name not in self._weights:
            known = self.session.calibration
            if known is not None and target.name not in self.session.targets:
                alone = msgspec.structs.replace(self.scheme, smooth=None)
                known = calibration_of(self.session.watches, {target.name: target}, alone)
            self._weights[target.name] = quantized_weight(
                target, self.scheme,
                smooth=None if known is None else known.divisors(target.name),
                limits=None if known is None else known.limits.get(target.name),
            )  # fmt: skip
        return self._weights[target.name]

    def cost(self, targets: Iterable[QuantizationTarget]) -> Cost:
        """Of the model with these quantised."""
        cached = self.scheme.kv is not None
        with self._installed(targets), quantised_cache(self.scheme.kv, self.model) as filled:
            self._check_numbers()  # after the weights, whose error names the matrix
            rows = [self._row_costs(o, self._logits(o, cached=cached)) for o in self.seen]
        if cached and not filled:
            raise UsageError(
                f"{self.scheme.name}: this model keeps no keys and values", hint="leave out kv8"
            )
        return cost_of(rows)

    def _check_numbers(self) -> None:
        for number, seen in enumerate(self.seen):
            if bool(seen.logits.isnan().any()):
                raise UsageError(
                    f"the floating-point model gives logits that are nan (prompt {number})",
                    hint="divergence capture and inspect show where they begin",
                )

    def alone(self, target: QuantizationTarget) -> tuple[Cost, float | None]:
        """(cost, relative L2 error at the output of its block) with this one quantised."""
        with self._installed([target]):
            return self.from_block(self.number_of(target))

    def from_block(self, number: int | None) -> tuple[Cost, float | None]:
        """The model as it is now, from block ``number`` on; None: from its beginning."""
        rows, errors, norms = [], 0.0, 0.0
        for seen in self.seen:
            with self._skipping(seen, number), _output_of(self.blocks, number) as outputs:
                logits = self._logits(seen)
            rows.append(self._row_costs(seen, logits))
            if number is not None:
                was = _hidden(seen.outputs[number]).double()
                errors += float((_hidden(outputs[0]).double() - was).square().sum())
                norms += float(was.square().sum())
        error = None if number is None else (errors / norms) ** 0.5 if norms else 0.0
        return cost_of(rows), error

    def floor(self, number: int) -> float:
        """Relative L2 error of a block in the model's own dtype against float64, on its recorded
        input."""
        errors = norms = 0.0
        block = self.blocks[number]
        for seen in self.seen:
            args, kwargs = seen.calls[number]
            with torch.no_grad(), Widening(torch.float64):
                wide = _hidden(block(*args, **kwargs)).double()
            errors += float((_hidden(seen.outputs[number]).double() - wide).square().sum())
            norms += float(wide.square().sum())
        return (errors / norms) ** 0.5 if norms else 0.0

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
            seen.logits = self._logits(seen)
        finally:
            for handle in handles:
                handle.remove()
        if len(seen.calls) != len(self.blocks):
            raise UsageError("a forward of this model does not pass each block once")
        return seen

    def _logits(self, seen: _Seen, *, cached: bool = False) -> torch.Tensor:
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
    def _installed(self, targets: Iterable[QuantizationTarget]) -> Iterator[None]:
        held = {t.name: (t, self.weight(t)) for t in targets if self.scheme.weights is not None}
        install(held)
        try:
            yield
        finally:
            uninstall(self.model)

    @contextlib.contextmanager
    def _skipping(self, seen: _Seen, number: int | None) -> Iterator[None]:
        """The blocks before ``number`` give what they gave."""
        skipped = self.blocks[: number or 0]
        for block, output in zip(skipped, seen.outputs, strict=False):
            block.__dict__["forward"] = _giving(output)
        try:
            yield
        finally:
            for block in skipped:
                del block.__dict__["forward"]


def _giving(output: Any) -> Any:
    def forward(*_: Any, **__: Any) -> Any:
        return output

    return forward


def _hidden(output: Any) -> torch.Tensor:
    """The residual stream among what a block gives."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


@contextlib.contextmanager
def _output_of(blocks: Sequence[nn.Module], number: int | None) -> Iterator[list[Any]]:
    outputs: list[Any] = []
    if number is None:
        yield outputs
        return
    handle = blocks[number].register_forward_hook(lambda _, __, out: outputs.append(out))
    try:
        yield outputs
    finally:
        handle.remove()


def cost_of(parts: Sequence[RowCosts]) -> Cost:
    """Over all rows of all prompts. Rows that are not finite on one side make the mean infinite."""
    kl = np.concatenate([part.kl for part in parts])
    kl = np.where(np.isnan(kl), math.inf, kl)
    same = np.concatenate([part.same_top for part in parts])
    mine = np.concatenate([part.logprob_a for part in parts])
    other = np.concatenate([part.logprob_b for part in parts])
    following = following_of(mine, other)
    return Cost(
        num_tokens=len(kl), num_following=0 if following is None else following.num_tokens,
        kl_mean=float(kl.mean()), kl_error=standard_error(kl),
        kl_median=quantile(kl, 0.5), kl_p90=quantile(kl, 0.9), kl_p99=quantile(kl, 0.99),
        kl_max=float(kl.max()),
        same_top=float(same.mean()), same_top_error=standard_error(same.astype(float)),
        **_of_following(following),
    )  # fmt: skip


def _of_following(following: Following | None) -> dict[str, float | None]:
    if following is None:
        return {}
    figures: dict[str, float | None] = msgspec.structs.asdict(following)
    del figures["num_tokens"]
    return figures | {"perplexity_base": figures.pop("base"), "perplexity": figures.pop("other")}
