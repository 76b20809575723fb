"""The capture benchmark drives the recorder by hand: it still does."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "capture_overhead.py"


@pytest.mark.slow
def test_every_way_that_needs_no_other_package_is_measured():
    """A table with a row a way, none of them failed."""
    options = "--hidden 64 --blocks 2 --vocab 100 --prompt 4 --new 2 --rounds 1 --threads 1".split()
    ways = ["blocks", "modules:stats", "hooks modules"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options, "--ways", *ways],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows] == ways
    assert "not run" not in done.stdout
