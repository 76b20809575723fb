"""The smallest fault that a set-up sees, per dtype: without a truth, with one, and escalated.

    python benchmarks/sensitivity.py [--architecture llama] [--blocks 6]

A small random model, eager attention on one side and sdpa on the other; the worst of the
first, middle and last block. Sizes are what `divergence sensitivity` prints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from pathlib import Path

from divergence.options.commands import RecordOptions

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from divergence.experiments.sensitivity import sensitivity
from divergence.recording.api import capture
from divergence.recording.api import truth as make_truth
from tests.models.tiny import build

FAULTS = ("scale", "update-scale", "noise", "bias", "channel")
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and the numbers should stay the same on all "
    "machines, whatever the order of the additions may be.",
)


def worst(found, fault: str, *, escalated: bool = False) -> str:
    sizes = [
        size.escalated_size if escalated else size.size
        for size in found.sizes
        if size.fault == fault
    ]
    return "not seen" if None in sizes else f"{max(sizes):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", default="llama")
    parser.add_argument("--blocks", type=int, default=6)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| | " + " | ".join(FAULTS) + " |\n|---|" + "---|" * len(FAULTS))
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("bfloat16", "float16", "float32"):
            root = Path(folder) / dtype
            model = build(
                options.architecture, root / "model", dtype=dtype, num_blocks=options.blocks
            )
            a = capture(model, out=root / "a", prompts=PROMPTS, max_new_tokens=4, device="cpu")
            b = capture(
                like=a,
                out=root / "b",
                attn_implementation="sdpa",
                device="cpu",
                recording=RecordOptions(escalate=dtype != "float32"),
            )
            truth = make_truth(a, out=root / "truth")
            alone = sensitivity(a, candidate=b, faults=FAULTS)
            known = sensitivity(a, candidate=b, truth=truth, faults=FAULTS)
            rows = {"no truth": (alone, False), "truth": (known, False)}
            if dtype != "float32":
                rows["truth and escalated"] = (known, True)
            for name, (found, deep) in rows.items():
                cells = (worst(found, fault, escalated=deep) for fault in FAULTS)
                print(f"| {dtype}, {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
