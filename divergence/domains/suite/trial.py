"""The step of `selftest`: every operator on the device, against the CPU's and the definitions."""

from __future__ import annotations

from divergence.comparison.api import compare
from divergence.experiments.selftest import Bench, healthy
from divergence.facts import Fact
from divergence.recording.api import make_run, truth


def tried(bench: Bench) -> Fact:
    """Wrong operators of the device are news of it, and no failure of the tool."""
    run = make_run("suite:llm", out=bench.path("suite-cpu"), device="cpu", force=True, probe=False)
    truth(run, out=bench.path("suite-truth"), force=True)
    bench.capture("suite", run)
    report = compare(run, bench.path("suite"), truth=bench.path("suite-truth"))
    return healthy(report, also=("systematic",))
