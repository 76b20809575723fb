"""How long a user waits before anything happens: --help, inspect, compare on a small run.

    python benchmarks/startup.py [--rounds 7]

Each command is a fresh process, beside `python -c pass` and `python -c "import torch"` in
the same rounds; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    from divergence.recording.api import capture
    from tests.models.tiny import build

    with tempfile.TemporaryDirectory() as folder:
        model = build("llama", Path(folder) / "model")
        a, b = Path(folder) / "a", Path(folder) / "b"
        capture(str(model), out=a, max_new_tokens=4, device="cpu")
        capture(like=a, out=b, attn_implementation="sdpa", device="cpu")
        python, tool = [sys.executable], [sys.executable, "-m", "divergence"]
        commands = {
            "python -c pass": [*python, "-c", "pass"],
            "python -c 'import torch'": [*python, "-c", "import torch"],
            "divergence --help": [*tool, "--help"],
            "divergence compare --help": [*tool, "compare", "--help"],
            "divergence inspect RUN": [*tool, "inspect", str(a)],
            "divergence compare A B (small)": [*tool, "compare", str(a), str(b)],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for number in range(args.rounds + 1):
            for name, command in commands.items():
                start = time.perf_counter()
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                if number:
                    times[name].append(time.perf_counter() - start)
    bare = statistics.median(times["python -c pass"])
    print("| command | median s | min | max | × bare python |\n|---|---|---|---|---|")
    for name, found in times.items():
        median = statistics.median(found)
        print(
            f"| {name} | {median:.2f} | {min(found):.2f} | {max(found):.2f} | {median / bare:.0f} |"
        )


if __name__ == "__main__":
    main()
