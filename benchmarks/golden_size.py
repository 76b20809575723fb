"""How large a golden is, and the smallest fault that a check against it sees.

    python benchmarks/golden_size.py                    # the demo's model
    python benchmarks/golden_size.py --model PATH       # and another one

Goldens of one prompt and 4 new tokens: in full, with new runs that are anchored to it or not,
and as a sketch. New runs have another attention implementation, so another rounding; the attention
of the middle block is scaled by a factor on top. Prints, for each, the size of the blessed archive
and the smallest factor of FACTORS from which on the check fails.
"""

from __future__ import annotations

import argparse
import bisect
import tempfile
from pathlib import Path
from typing import Any

from divergence import MachineOptions
from divergence.experiments.tiny import build
from divergence.gate.check import check
from divergence.gate.golden import bless
from divergence.recording.api import capture
from divergence.run.reader import Run

PROMPT = "Why is the sky blue?"
FACTORS = (1.00001, 1.0001, 1.001, 1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in full, new runs --like it": ({}, {"like": True}),
    "in full, new runs by themselves": ({}, {}),
    "--store sketch": ({"store": "sketch"}, {"store": "sketch"}),
}


def smallest(golden: Path, model: Path, how: dict[str, Any], options: dict[str, Any]) -> str:
    """The smallest factor that fails, by halving: larger ones are taken to fail too."""
    modules = Run.open(golden).manifest.plan.modules
    blocks = [path for path, note in modules.items() if note.role == "block"]
    site = f"{blocks[len(blocks) // 2]}.self_attn:out"

    def fails(factor: float) -> bool:
        given = {**how, "plants": [f"{site}=scale:{factor}"], "attn_implementation": "eager"}
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "run"
            if given.pop("like", False):
                run = capture(like=golden, out=out, machine=MachineOptions(probe=False), **given)
            else:
                run = capture(
                    model,
                    out=out,
                    machine=MachineOptions(probe=False),
                    truth="no",
                    **options,
                    **given,
                )
            return not check(golden, run).passed

    if fails(1.0):
        return "fails without one"
    number = bisect.bisect_left(FACTORS, True, key=fails)
    return f"x {FACTORS[number]}" if number < len(FACTORS) else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model of this machine")
    chosen = parser.parse_args().model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"the demo's model": build(folder / "tiny")}
        if chosen is not None:
            models[chosen.name] = chosen
        print("| model | dtype | golden | size | smallest fault seen |")
        print("|---|---|---|---|---|")
        for title, model in models.items():
            for dtype in ("float32", "bfloat16"):
                for kind, (store, how) in KINDS.items():
                    options = {"prompts": [PROMPT], "max_new_tokens": 4, "dtype": dtype}
                    capture(
                        model,
                        out=folder / "run",
                        force=True,
                        machine=MachineOptions(probe=False),
                        attn_implementation="sdpa",
                        **options,
                        **store,
                    )
                    golden = folder / "golden.zip"
                    golden.unlink(missing_ok=True)
                    made = bless(golden, folder / "run")
                    seen = smallest(golden, model, how, options)
                    size = f"{(made.num_bytes or 0) / 1000:.0f} kB"
                    print(f"| {title} | {dtype} | {kind} | {size} | {seen} |", flush=True)


if __name__ == "__main__":
    main()
