"""The plan of a training step against what processes really allocate and send."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.training_memory import KEPT, ROOT, off


@pytest.mark.slow
@pytest.mark.parametrize("row", ["one process, checkpointing", "DDP", "fully_shard"])
def test_the_plan_holds(row):
    """Parameters, gradients and optimizer state within 5%, activations and peak within 15%, bytes
    sent within 1%: one process, or two on gloo."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks/training_memory.py"),
        "--json",
        "--hidden",
        "256",
        "--ranks",
        "1",
        "2",
        "--rows",
        row,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout.splitlines()[-1])
    for part in KEPT:
        assert abs(off(found, part)) < 0.05, part
    for part in ("activations", "peak"):
        assert abs(off(found, part)) < 0.15, part
    assert abs(off(found, "sent")) < 0.01
