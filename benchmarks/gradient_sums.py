"""What it costs to add up gradients, and to step weights, in 16 bits: of a trained model.

    python benchmarks/gradient_sums.py        # two minutes on two cores

SmolLM2-135M in bfloat16: the gradients of n micro-batches are made once each, and added up as n
ranks would: in bfloat16 or float32, in the order of a ring, of a tree, or one after another as
accumulation does. The same in float64 throughout is the truth. Printed: the relative L2 error of a
parameter's gradient, median and largest of all matrices. Rounding of the forward and backward
themselves is in every row; the last column is what the sum alone adds, for the most micro-batches.

Below: one step of AdamW on the bfloat16 weights themselves, by learning rate: the share of those
with a gradient that did not move.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._trained import checkpoint
from divergence.domains.training.recording.optimizer import reduced

TEXTS = (
    "The first step of any numerical comparison is to agree on what is being compared, and with",
    "In 1687 Newton published the Principia, in which he stated the laws of motion and showed",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n",
    "Rain is expected in the north tomorrow, with strong winds along the coast and snow above",
    "To make bread you need flour, water, salt and yeast. Mix them, let the dough rest for an",
    "She closed the book, looked out of the window at the harbour and wondered how long it had",
    "A prime number is a natural number greater than one that is not a product of two smaller",
    "The committee met on Thursday to discuss the budget, and after two hours it decided to put",
)
COUNTS = (2, 4, 8)
RATES = (1e-3, 1e-4, 1e-5, 1e-6)
WAYS: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    "bfloat16, one after another": lambda parts: in_turn(parts, torch.bfloat16),
    "bfloat16, ring": lambda parts: reduced(parts, dtype=torch.bfloat16, order="ring"),
    "bfloat16, tree": lambda parts: reduced(parts, dtype=torch.bfloat16, order="tree"),
    "float32, one after another": lambda parts: in_turn(parts, torch.float32),
    "float32, ring": lambda parts: reduced(wide(parts), dtype=torch.float32, order="ring"),
    "float32, tree": lambda parts: reduced(wide(parts), dtype=torch.float32, order="tree"),
}


def wide(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.float() for part in parts]


def in_turn(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def gradients(folder: Path, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Of each text, those of all matrices."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    matrices = [(name, one) for name, one in model.named_parameters() if one.ndim > 1]
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        logits = model(input_ids=ids).logits
        wide_logits = logits if dtype == torch.float64 else logits.float()
        torch.nn.functional.cross_entropy(wide_logits[0, :-1], ids[0, 1:]).backward()
        yield {name: one.grad for name, one in matrices if one.grad is not None}
        model.zero_grad(set_to_none=True)


def exact_sums(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """In float64, by the number of micro-batches."""
    sums: dict[int, dict[str, torch.Tensor]] = {}
    total: dict[str, torch.Tensor] = {}
    for number, one in enumerate(gradients(folder, torch.float64), start=1):
        total = {name: gradient + total.get(name, 0.0) for name, gradient in one.items()}
        if number in COUNTS:
            sums[number] = total
    return sums


def main() -> None:
    logging.set_verbosity_error()
    folder = checkpoint("bfloat16")
    truth, parts = exact_sums(folder), list(gradients(folder, torch.bfloat16))
    print(f"| added up in | {' | '.join(f'{n} micro-batches' for n in COUNTS)} | the sum's own |")
    print("|---|" + "---|" * (len(COUNTS) + 1), flush=True)
    for name, add in WAYS.items():
        cells, own = [], [0.0]
        for count in COUNTS:
            errors, own = [], []
            for parameter, exact in truth[count].items():
                given = [one[parameter] for one in parts[:count]]
                total, norm = add(given).double(), exact.norm()
                errors.append(float((total - exact).norm() / norm))
                sums = torch.stack(given).double().sum(0)
                own.append(float((total - sums).norm() / norm))
            cells.append(f"{statistics.median(errors):.2e}, {max(errors):.1e}")
        print(f"| {name} | {' | '.join(cells)} | {statistics.median(own):.1e} |", flush=True)
    print(f"\n| learning rate | {' | '.join(f'{rate:g}' for rate in RATES)} |")
    print("|---|" + "---|" * len(RATES))
    print(f"| did not move | {' | '.join(f'{unmoved(folder, rate):.1%}' for rate in RATES)} |")


def unmoved(folder: Path, rate: float) -> float:
    """The share of weights with a gradient that one step leaves as they are."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    model(input_ids=ids, labels=ids).loss.backward()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0).step()
    stepped = still = 0
    for name, one in model.named_parameters():
        if one.grad is not None:
            moving = one.grad != 0
            stepped += int(moving.sum())
            still += int((moving & (one.detach() == before[name])).sum())
    return still / stepped


if __name__ == "__main__":
    main()
