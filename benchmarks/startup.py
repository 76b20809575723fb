"""How long a user waits before anything happens: --help, inspect, compare on a small run.

    python benchmarks/startup.py [--rounds 7]

Each command is a fresh process, beside `python -c pass` and `python -c "import torch"` in
the same rounds; medians. CPU: seconds of all threads, which say more where others use the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.time_to_verdict import Cost, medians, run  # noqa: E402


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
        costs: dict[str, list[Cost]] = {name: [] for name in commands}
        for number in range(args.rounds + 1):
            for name, command in commands.items():
                cost = run(command)
                if number:  # the first round reads all files
                    costs[name].append(cost)
    torch = medians(costs["python -c 'import torch'"])
    print(f"{args.rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| command | s | CPU s | CPU, × import torch |\n|---|---|---|---|")
    for name, each in costs.items():
        cost = medians(each)
        print(f"| {name} | {cost.wall_s:.2f} | {cost.cpu_s:.2f} | {cost.cpu_s / torch.cpu_s:.2f} |")


if __name__ == "__main__":
    main()
