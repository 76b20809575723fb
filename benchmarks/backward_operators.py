"""Operators of a backward: healthy pairs, and wrong ones found by localize.

    python benchmarks/backward_operators.py             # both tables; half an hour on two cores
    python benchmarks/backward_operators.py --health    # healthy pairs alone
    python benchmarks/backward_operators.py --faults    # wrong operators alone

Models of random weights of three architectures, three blocks, three prompts of 9 to 31 tokens, in
float32 and bfloat16. Healthy pairs: other CPU kernels in processes of their own (_machines.py),
another attention kernel, checkpointing, threads; the operators of one block, forward and backward,
against float64. Faults: kernels that are wrong in one module below everything that is recorded
(tests/models/wrong_kernels.py), and code of the model's (benchmarks/training.py), on B's side.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from divergence import TrainOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import divergence
from benchmarks._machines import planting
from benchmarks.training import MODEL_FAULTS, PROMPTS, Models, captured_by, machines, tables
from divergence import Run
from divergence.run.site import BACKWARD
from tests.models.wrong_kernels import WrongKernels, wrong_kernels

IDS = PROMPTS[:3]
BLOCKS = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "qwen3-moe": "model.layers.1"}
ATTENTION = {"llama": "self_attn", "gpt2": "attn", "qwen3-moe": "self_attn"}
DOWN = {"llama": "mlp.down_proj", "gpt2": "mlp.c_proj", "qwen3-moe": "self_attn.o_proj"}
NORM = {
    "llama": "post_attention_layernorm",
    "gpt2": "ln_2",
    "qwen3-moe": "post_attention_layernorm",
}
QUERY = {"llama": "self_attn.q_proj", "gpt2": "attn.c_attn", "qwen3-moe": "self_attn.q_proj"}
HEALTHY: dict[str, dict[str, Any]] = {
    "sdpa": {"attn_implementation": "sdpa"},
    "checkpointing": {"gradient_checkpointing": True},
    "two threads": {"threads": 2},
}

# --- healthy pairs ------------------------------------------------------------------------------


def health(models: Models, folder: Path) -> None:
    print(
        "| pair | architecture | dtype | operators of the backward | named there | "
        "largest share of a limit, with a truth | without |"
    )
    print("|---|---|---|---|---|---|---|")
    count, largest = itertools.count(), 0.0
    with machines() as others:
        for (architecture, dtype), model in models.items():
            sites = ["blocks", f"ops@{BLOCKS[architecture]}"]
            a = divergence.capture(
                str(model),
                out=folder / f"h{next(count)}",
                machine=divergence.MachineOptions(probe=False),
                training=TrainOptions(train=True),
                prompts=IDS,
                sites=sites,
            )
            truth = divergence.truth(a, out=folder / f"h{next(count)}")
            for name, options in HEALTHY.items():
                b = divergence.capture(
                    like=a,
                    out=folder / f"h{next(count)}",
                    machine=divergence.MachineOptions(probe=False),
                    **options,
                )
                largest = max(largest, show(name, architecture, dtype, a, b, truth))
            for name, machine in others.items():
                b = captured_by(machine, a, folder / f"h{next(count)}")
                largest = max(largest, show(f"kernels: {name}", architecture, dtype, a, b, truth))
    print(f"\nlargest share of a limit in a backward: {largest:.0%}")


def show(name: str, architecture: str, dtype: str, a: Run, b: Run, truth: Run) -> float:
    shares, named, number = [], "-", 0
    for right in (truth, None):
        found = divergence.compare(a, b, truth=right).operators
        assert found is not None
        backward = [one for one in found.results if one.phase == "backward"]
        number = len(backward)
        shares.append(max(one.limit_usage for one in backward))
        named = found.onset if BACKWARD in (found.onset or "") else named
    cells = (name, architecture, dtype, str(number), named, *(f"{one:.0%}" for one in shares))
    print("|", " | ".join(cells), "|", flush=True)
    return max(shares)


# --- faults -------------------------------------------------------------------------------------


def wanted(architecture: str) -> dict[str, tuple[str, str]]:
    """By fault: the module, and the operator there or what it comes into ("": any)."""
    return {
        "kernel: wrong sign of a term in a softmax's backward": (
            ATTENTION[architecture],
            "aten._softmax_backward_data",
        ),
        "kernel: a weight's gradient summed in bfloat16": (DOWN[architecture], "aten.mm"),
        "attention's scale left out of its backward": (QUERY[architecture], ""),
        "wrong sign of a term in a norm's backward": (NORM[architecture], ""),
        "weight gradient summed in bfloat16": (DOWN[architecture], "aten.mm"),
    }


KERNELS = {"softmax": "kernel: wrong sign", "mm": "kernel: a weight's"}


def faults(models: Models, folder: Path) -> None:
    print("\n| fault | architecture | dtype | named | module | operator | side | proven |")
    print("|---|---|---|---|---|---|---|---|")
    tally = {"module": 0, "operator": 0, "side": 0, "proven": 0, "wrong side": 0}
    total = 0
    with wrong_kernels() as kernels:
        for (architecture, dtype), model in models.items():
            for name, (module, operator) in wanted(architecture).items():
                hidden = "weight" in name and dtype == "bfloat16"
                if hidden or (name.startswith("weight") and architecture == "qwen3-moe"):
                    continue  # that model has no such module
                total += 1
                path = f"{BLOCKS[architecture]}.{module}"
                result = descend(kernels, model, folder / f"f{total}", name, path)
                site = "-" if result.operator is None else result.operator.site
                right = {
                    "module": site.startswith(f"{path}#backward/"),
                    "operator": site.startswith(f"{path}#backward/{operator}"),
                    "side": result.side == "candidate",
                    "proven": result.causal is not None and result.causal.holds,
                    "wrong side": result.side == "reference",
                }
                for key, value in right.items():
                    tally[key] += value
                words = (
                    "yes" if right[key] else "no"
                    for key in ("module", "operator", "side", "proven")
                )
                print("|", " | ".join((name, architecture, dtype, site, *words)), "|", flush=True)
    told = ", ".join(f"{key} {value}" for key, value in tally.items())
    print(f"\nof {total}: {told}")


def descend(
    kernels: WrongKernels, model: Path, folder: Path, name: str, path: str
) -> divergence.Localization:
    kernel = next((key for key, words in KERNELS.items() if name.startswith(words)), None)
    healthy = kernels.into(None)
    prepare: Any = kernels.into(kernel, path)
    if kernel is None:
        plant = MODEL_FAULTS[name][0]

        def put(model: Any, *_: Any, **__: Any) -> None:
            healthy(model)
            plant(model)

        prepare = planting(put, name, None, 1.0)
    a = divergence.capture(
        str(model),
        out=folder / "a",
        machine=divergence.MachineOptions(probe=False),
        training=TrainOptions(train=True),
        prompts=IDS,
        prepare=healthy,
    )
    b = divergence.capture(
        like=a, out=folder / "b", machine=divergence.MachineOptions(probe=False), prepare=prepare
    )
    truth = divergence.truth(a, out=folder / "truth")
    return divergence.localize(
        a, b, truth=truth, out=folder / "work", prepare_reference=healthy, prepare_candidate=prepare
    )


if __name__ == "__main__":
    tables(__doc__, health, faults, num_blocks=3)
