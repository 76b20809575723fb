"""What quantisation costs a trained model: by scheme, by matrix, and what to keep.

    python benchmarks/quantization.py             # all tables; twenty minutes on two cores
    python benchmarks/quantization.py --schemes   # the first alone, five minutes
    python benchmarks/quantization.py --matrices  # the others alone, on two pieces
    python benchmarks/quantization.py --model DIR --prompts FILE

The model is SmolLM2-135M-Instruct (see _trained.py) in float32. Its weights come from a file of 4
bits in groups of 32, so what schemes for weights alone cost is less than of the published weights.
The prompts are this project's own documents, cut into pieces of so many characters. Costs are
against the float32 model, over all tokens of the prompts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from divergence import MachineOptions, Run, capture, quantize
from divergence.domains.quantization.engine import QuantizeOptions
from divergence.domains.quantization.quantize import (
    QuantizationTrials,
    each_alone,
    find_policy,
    session_of,
)
from divergence.domains.quantization.result import Cost, MatrixCost

PIECES, CHARACTERS = 6, 360
FEW = 2
"""Pieces on which each matrix is quantised alone."""
SCHEMES: tuple[tuple[str, dict[str, object]], ...] = (
    ("w8a16", {}),
    ("w8a8", {}),
    ("w8a8", {"smooth": 0.5}),
    ("w8a8", {"weights_per": "tensor"}),
    ("w8a8", {"activations_per": "tensor"}),
    ("w8a8-static", {}),
    ("w8a8-static", {"smooth": 0.5}),
    ("w8a8-static", {"smooth": 0.8}),
    ("w8a8-static", {"asymmetric": "activations"}),
    ("fp8", {}),
    ("fp8-static", {}),
    ("w4a16-g64", {}),
    ("w4a16-g64", {"asymmetric": "weights"}),
    ("w4a8-g64", {}),
    ("kv8", {}),
)
POLICIES = (("w8a8", (0.03, 0.02, 0.01)),)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schemes", action="store_true", help="the first table alone")
    parser.add_argument("--matrices", action="store_true", help="the others alone")
    parser.add_argument("--model", help="another checkpoint")
    parser.add_argument("--prompts", type=Path, help="a file, one prompt a line")
    given = parser.parse_args()
    if given.model is None:
        from _trained import checkpoint

        given.model = str(checkpoint())
    prompts = pieces() if given.prompts is None else given.prompts.read_text().splitlines()
    with tempfile.TemporaryDirectory(prefix="divergence-quantization-") as folder:
        run = capture(
            given.model,
            out=f"{folder}/a",
            prompts=prompts,
            max_new_tokens=1,
            sites=["."],
            machine=MachineOptions(probe=False),
            dtype="float32",
        )
        if not given.matrices:
            schemes(run)
        if not given.schemes:
            few = capture(
                given.model,
                out=f"{folder}/few",
                prompts=prompts[:FEW],
                max_new_tokens=1,
                sites=["."],
                machine=MachineOptions(probe=False),
                dtype="float32",
            )
            for scheme, targets in POLICIES:
                matrices(few, scheme, targets)


def pieces() -> list[str]:
    """Prose of this project."""
    root = Path(__file__).parents[1] / "docs"
    text = "\n".join(
        line
        for name in ("verdicts.md", "how-it-works.md", "faq.md")
        if (root / name).exists()
        for line in (root / name).read_text(encoding="utf-8").splitlines()
        if line and line[0].isalpha()
    )
    step = max(CHARACTERS, len(text) // PIECES)
    return [text[n * step :][:CHARACTERS] for n in range(PIECES)]


def schemes(run: Run) -> None:
    print(
        "| scheme | mean KL | 99% | same top | RMS Δp | ln PPL ratio |\n|---|---|---|---|---|---|"
    )
    for name, options in SCHEMES:
        found = quantize(run, scheme=name, **options)  # type: ignore[arg-type]
        more = "".join(f", {key.replace('_', ' ')} {value}" for key, value in options.items())
        print(f"| {name}{more} | {_row(found.cost)} |", flush=True)
    print()


def _row(cost: Cost | None) -> str:
    assert cost is not None and cost.delta_p_rms is not None and cost.ln_ratio is not None
    return (
        f"{cost.kl_mean:.3g} ± {cost.kl_error:.1g} | {cost.kl_p99:.2g} | {cost.same_top:.1%} | "
        f"{cost.delta_p_rms:.2%} | {cost.ln_ratio:+.3g}"
    )


def matrices(run: Run, scheme: str, targets: tuple[float, ...]) -> None:
    """Each alone, and what must be kept for each target."""
    options = QuantizeOptions(scheme=scheme)
    with session_of(run, options) as session:
        trials = QuantizationTrials(session, run.manifest.tokens.samples)
        whole = trials.cost(session.targets.values())
        found = each_alone(trials)
        _print_kinds(scheme, found, whole)
        print("| target: mean KL | kept | weights kept | predicted | measured | with one fewer |")
        print("|---|---|---|---|---|---|")
        for target in targets:
            policy = find_policy(trials, found, target=target, measure="kl", whole=whole)
            fewer = "-" if policy.one_fewer is None else f"{policy.one_fewer:.3g}"
            names = f"{', '.join(policy.keep[:8])}{', ...' if len(policy.keep) > 8 else ''}"
            print(
                f"| {target} | {len(policy.keep)}: {names} | {policy.num_kept_weights / 1e6:.3g} M "
                f"| {policy.predicted:.3g} | {policy.measured:.3g} | {fewer} |",
                flush=True,
            )
    print()


def _print_kinds(scheme: str, found: list[MatrixCost], whole: Cost) -> None:
    print(f"{scheme}, each matrix alone\n")
    print(
        "| kind | matrices | sum of KL | median error at its block, in floors | largest "
        "quantile score | costliest |\n|---|---|---|---|---|---|"
    )
    for kind, group in _kinds(found):
        worst = max(group, key=lambda one: one.cost.kl_mean)
        floors = [one.times_floor for one in group if one.times_floor is not None]
        scores = [one.outliers.quantile_score for one in group if one.outliers is not None]
        print(
            f"| {kind} | {len(group)} | {sum(one.cost.kl_mean for one in group):.3g} | "
            f"{f'{statistics.median(floors):.0f}' if floors else '-'} | "
            f"{f'{max(scores):.2g}' if scores else '-'} | {worst.name}: "
            f"{worst.cost.kl_mean:.3g} |"
        )
    alone = sum(one.cost.kl_mean for one in found if one.by_default)
    print(f"\nsum of the quantised ones {alone:.3g}, together {whole.kl_mean:.3g}\n", flush=True)


def _kinds(found: list[MatrixCost]) -> list[tuple[str, list[MatrixCost]]]:
    kinds: dict[str, list[MatrixCost]] = defaultdict(list)
    for one in found:
        leaf = one.name.rpartition(".")[2]
        kinds[leaf if one.by_default else f"{leaf} (kept: {one.part})"].append(one)
    return sorted(kinds.items(), key=lambda pair: -sum(one.cost.kl_mean for one in pair[1]))


if __name__ == "__main__":
    main()
