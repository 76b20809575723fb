"""The numbers of llama.cpp's KL divergence, as it prints them and as compare does.

    python benchmarks/llama_kld.py --llama-perplexity BIN --base F32.gguf --other BF16.gguf

Both models' base files of a text of this project are written by llama-perplexity, imported and
compared; beside that stands what ``llama-perplexity --kl-divergence`` prints of the same models.
An imported base file holds the 64 likeliest ids of each token, so KL is a lower bound.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from divergence import compare, import_dump

CONTEXT, CHUNKS = 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama-perplexity", required=True, metavar="BIN")
    parser.add_argument("--base", required=True, help="the model that is taken as right (GGUF)")
    parser.add_argument("--other", required=True, help="the model that is measured (GGUF)")
    given = parser.parse_args()
    text = Path(__file__).parents[1] / "docs" / "verdicts.md"

    def run(model: str, *more: str) -> str:
        command = [
            given.llama_perplexity,
            "-m",
            model,
            "-c",
            str(CONTEXT),
            "--chunks",
            str(CHUNKS),
            *more,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    with tempfile.TemporaryDirectory(prefix="divergence-kld-") as folder:
        runs = []
        for name, model in (("base", given.base), ("other", given.other)):
            run(model, "-f", str(text), "--kl-divergence-base", f"{folder}/{name}")
            runs.append(import_dump(f"{folder}/{name}", out=f"{folder}/{name}-run"))
        theirs = run(given.other, "--kl-divergence", "--kl-divergence-base", f"{folder}/base")
        found = compare(*runs).logprobs
    assert found is not None and found.perplexity is not None and found.divergence is not None
    ours, kl = found.perplexity, found.divergence
    rows = (
        ("Mean PPL(base)", ours.reference, 1.0),
        ("Mean PPL(Q)", ours.candidate, 1.0),
        ("Mean ln(PPL(Q)/PPL(base))", ours.ln_ratio, 1.0),
        ("Mean    Δp", ours.delta_p_mean, 100.0),
        ("RMS Δp", ours.delta_p_rms, 100.0),
        (" 1.0%   Δp", ours.delta_p_p1, 100.0),
        ("99.0%   Δp", ours.delta_p_p99, 100.0),
        ("Same top p", kl.same_top, 100.0),
        ("Mean    KLD", kl.kl_lower, 1.0),
        ("99.0%   KLD", kl.kl_p99, 1.0),
    )
    print("| | llama.cpp | compare |\n|---|---|---|")
    for name, value, unit in rows:
        match = re.search(rf"^ *{re.escape(name.strip())} *: *(-?[\d.]+)", theirs, re.MULTILINE)
        sign = " %" if unit != 1.0 else ""
        told = "-" if match is None else f"{match[1]}{sign}"
        print(f"| {re.sub(' +', ' ', name.strip())} | {told} | {value * unit:.6g}{sign} |")


if __name__ == "__main__":
    main()
