"""How large a golden is that lies in git: a sketch of one prompt, blessed to an archive.

    python benchmarks/golden_size.py                    # the demo's model
    python benchmarks/golden_size.py --model PATH       # and another one

Prints a line for each model and number of generated tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from divergence.gate.golden import bless
from divergence.recording.api import capture
from divergence.recording.engines.tiny import build

PROMPT = "Why is the sky blue?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model of this machine")
    chosen = parser.parse_args().model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"the demo's model": build(folder / "tiny")}
        if chosen is not None:
            models[chosen.name] = chosen
        for number, (title, model) in enumerate(models.items()):
            for tokens in (4, 16):
                out = folder / f"{number}-{tokens}"
                capture(
                    model, out=out, prompts=[PROMPT], max_new_tokens=tokens, store="sketch",
                    probe=False,
                )  # fmt: skip
                made = bless(folder / f"{number}-{tokens}.zip", out)
                print(f"{title}, {tokens} tokens: {(made.num_bytes or 0) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
