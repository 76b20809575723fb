"""Which matrices to keep in floating point so that a target holds: found by running the model.

Matrices are taken in order of what each costs alone. What they cost together is not the sum, so the
number that must stay is searched by running the model with the first k kept; then each of those is
tried without, cheapest first, again and again until none can go. Matrices that engines fuse into
one product (query, key and value; gate and up) stay or go together: a scheme of half a product
cannot be loaded.

None of the set's members can be left out alone. That no other set is smaller is not shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from divergence.errors import RunWriteError, UsageError
from divergence.experiments.quantization.result import (
    Cost,
    MatrixCost,
    Quantization,
    QuantizationPolicy,
)
from divergence.experiments.quantization.trials import QuantizationTrials
from divergence.numerics.codes import Quantizer
from divergence.output import write_output
from divergence.quantization.scheme import Scheme
from divergence.words import Progress, silent

__all__ = ["MEASURES", "check_reachable", "find_policy", "forms", "value_of", "write_forms"]

MEASURES = ("kl", "logprob")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"),
          ("query", "key", "value"))  # fmt: skip
_MOST_TRIES = 300
"""Models that are run with one member fewer."""


def value_of(cost: Cost, measure: str) -> float:
    """What is held against the target."""
    if measure == "kl":
        return cost.kl_mean
    return float("inf") if cost.delta_logprob_mean is None else cost.delta_logprob_mean


def check_reachable(trials: QuantizationTrials, target: float, measure: str) -> None:
    """Raises UsageError where the target is missed even with every matrix kept."""
    cost = trials.cost([])
    if measure == "logprob" and cost.delta_logprob_mean is None:
        raise UsageError(
            "--measure logprob: no token has a known next one",
            hint="--measure kl, or longer prompts",
        )
    least = value_of(cost, measure)
    if least > target:
        raise UsageError(
            f"--target {target:g} cannot be held: with every matrix in floating point, the keys "
            f"and values of {trials.scheme.name} still cost {least:.3g}",
            hint=f"a target above {least:.3g}, or a scheme without kv8",
        )


def find_policy(
    trials: QuantizationTrials, matrices: Sequence[MatrixCost], *, target: float, measure: str,
    whole: Cost, progress: Progress | None = None,
) -> QuantizationPolicy:  # fmt: skip
    """``matrices``: each alone. ``whole``: the cost with nothing kept."""
    tell = progress or silent
    units = _units([matrix for matrix in matrices if matrix.by_default], measure)
    known: dict[frozenset[str], Cost] = {frozenset(): whole}
    order = [tuple(matrix.name for matrix in unit) for unit in units]

    def cost_without(kept: Sequence[tuple[str, ...]]) -> Cost:
        names = frozenset(name for unit in kept for name in unit)
        if names not in known:
            tell("policy", len(known), None, f"{len(names)} kept")
            known[names] = trials.cost(
                [t for name, t in trials.session.targets.items() if name not in names]
            )
        return known[names]

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
        measure=measure, target=target, keep=names, num_groups=len(kept),
        num_kept_weights=sum(by_name[name].num_weights for name in names),
        predicted=sum(value_of(matrix.cost, measure) for matrix in rest),
        measured=value_of(cost, measure),
        one_fewer=fewer,
        num_runs=len(known), cost=cost,
    )  # fmt: skip


def _irreducible(
    kept: list[tuple[str, ...]],
    value: Callable[[list[tuple[str, ...]]], float],
    target: float,
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
    """What is kept in the forms that quantisers read: file name → text.

    ``compressed-tensors.json``: ``ignore`` of ``quantization_config``; ``modelopt.yaml``: entries
    of ``quant_cfg`` that switch quantisers off; ``msmodelslim.yaml``: ``exclude`` of
    ``linear_quant``.
    """
    ignore = json.dumps({"ignore": list(names)}, indent=2) + "\n"
    off = "".join(f"  - quantizer_name: '*{name}.*'\n    enable: false\n" for name in names)
    slim = _SLIM.format(
        exclude="".join(f'        - "{name}"\n' for name in names),
        act=_act_of(scheme), weight=_weight_of(scheme),
    )  # fmt: skip
    return {"compressed-tensors.json": ignore, "modelopt.yaml": f"quant_cfg:\n{off}",
            "msmodelslim.yaml": slim}  # fmt: skip


_SLIM = """apiversion: modelslim_v1
spec:
  process:
    - type: "linear_quant"
      qconfig:
{act}{weight}      include: ["*"]
      exclude:
{exclude}"""


def _act_of(scheme: Scheme) -> str:
    if scheme.activations is None:
        return ""
    scope = "per_tensor" if scheme.static else f"per_{scheme.activations.per}"
    return _lines("act", scope, scheme.activations)


def _weight_of(scheme: Scheme) -> str:
    return "" if scheme.weights is None else _lines("weight", f"per_{scheme.weights.per}",
                                                    scheme.weights)  # fmt: skip


def write_forms(result: Quantization, folder: Path) -> None:
    """Write ``forms`` of what is kept. Raises RunWriteError."""
    for name, text in forms(result.kept, result.scheme_as_run).items():
        write_output(text, folder / name, what="policy", error=RunWriteError, make_folder=True)


def _lines(what: str, scope: str, quantizer: Quantizer) -> str:
    dtype = "fp8_e4m3" if quantizer.is_float else quantizer.format
    inner = {"scope": f'"{scope}"', "dtype": f'"{dtype}"', "symmetric": quantizer.symmetric,
             "method": '"minmax"'}  # fmt: skip
    lines = [f"          {key}: {value}\n" for key, value in inner.items()]
    if quantizer.per == "group":
        lines.append(f"          ext:\n            group_size: {quantizer.group}\n")
    return f"        {what}:\n{''.join(lines)}"
