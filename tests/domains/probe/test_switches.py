"""One CPU as several machines: orders that differ are told apart, equal ones are equal."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.probe import agreement, run_machine

FEW = ("native", "old")
ALL = (
    "native",
    "aten-default",
    "aten-avx2",
    "onednn-sse41",
    "onednn-avx2",
    "onednn-avx512",
    "mkl-compatible",
    "mkl-avx2",
    "threads-2",
    "old",
)


UNPROVEN = ("sdpa", "linear M=1 ")
"""Weights of attention need not be exactly 1; the products of one row are added up in no order that
rounding alone shows, by MKL on some CPUs (Sapphire Rapids): the probe says so there."""


def check(machines: tuple[str, ...], terms: list[int], folder: Path, form: str) -> dict:
    runs = {name: folder / name for name in machines}
    for name, out in runs.items():
        run_machine(name, out, terms, form=form)
    table = agreement(runs)
    for subject, row in table.items():
        assert row["machines"] == len(machines), subject
        # equal trees and equal arithmetic of a node: equal outputs; else other outputs
        assert row["wrong"] == 0, (subject, row)
        if not subject.startswith(UNPROVEN):
            assert row["verified"] == len(machines), (subject, row)
    return table


@pytest.mark.slow
def test_two_machines_are_told_apart(tmp_path):
    """The newest kernels of this CPU against the oldest, as far as it has both."""
    check(FEW, [128], tmp_path, "quick")


@pytest.mark.slow
def test_every_switch(tmp_path):
    """Ten settings, three lengths, six operators, three dtypes."""
    table = check(ALL, [64, 512, 1024], tmp_path, "full")
    assert max(row["trees"] for row in table.values()) > 1
