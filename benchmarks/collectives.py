"""Collectives on gloo ranks of this machine: orders of addition, planted faults, rates, times.

Orders are held against gloo's source (gloo/allreduce.cc, ring): n chunks, each of the same number
of segments, two at least and none above 1 MiB; chunk k starts at rank k - 1 and goes down to k.

    python benchmarks/collectives.py [orders|errors|faults|whole ...]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from divergence import CaseOptions, MachineOptions, Run, capture, compare
from divergence.domains.collectives.orders import chain_of, decode
from divergence.domains.collectives.recorded import Recorded
from divergence.numerics.formats import format_named
from divergence.numerics.trees import Tree

RANKS = (2, 3, 4, 5, 8)
FAULTS = ("bfloat16", "swap", "tail:17", "unordered")
SEGMENT = 1 << 20
"""Bytes of a segment at most."""


def made(folder: Path, ranks: int, **options: object) -> Run:
    """A run that replaces the last one."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    return capture(
        "suite:collectives",
        out=out,
        cases=CaseOptions(ranks=ranks),
        machine=MachineOptions(probe=False),
        **options,
    )


def chunk_of_gloo(elements: int, itemsize: int, ranks: int) -> int:
    """Elements of a chunk."""
    total = elements * itemsize
    segments = max(-(-total // SEGMENT), 2 * ranks)
    segments = -(-segments // ranks) * ranks
    segment = -(-total // segments)
    return segments // ranks * -(-segment // itemsize)


def as_in_the_source(one, ranks: int) -> str:
    """Do the chunks and their orders equal the source's, as far as they were measured?"""
    found = decode(one.sizes, ranks)
    if ranks == 2:
        return "yes" if len(found) == 1 else "no"
    size = chunk_of_gloo(one.elements, format_named(one.case.dtype).itemsize, ranks)
    num_pairs = ranks * (ranks - 1) // 2
    slack = 0 if one.sizes.shape[0] > 1 else num_pairs
    for part in found:
        k = part.start // size if part.start % size <= size - slack else part.start // size + 1
        order = [(k - 1 - step) % ranks for step in range(ranks)]
        edges = abs(part.start - k * size) <= slack
        if not edges or chain_of(part.tree) != [*sorted(order[:2]), *order[2:]]:
            return "no"
    return "yes" if len(found) == ranks else "no"


def orders(folder: Path) -> None:
    print("\norders of all_reduce by gloo, found from outside")
    print(
        f"{'ranks':>5}  {'dtype':9}{'elements':>10}  {'order':13}{'as source':>10}"
        f"{'sums in':>10}{'replayed':>10}{'expected':>10}{'measured':>10}"
    )
    for ranks in RANKS:
        run = made(folder, ranks, sites=["all_reduce.*.random", "order.all_reduce.*"])
        rows = compare(run).collectives.sides[0].orders
        for one, row in zip(Recorded(run).orders(), rows, strict=True):
            error = [f"{x:.1e}" if x is not None else "-" for x in (row.expected, row.measured)]
            print(
                f"{ranks:5}  {row.dtype:9}{row.elements:10,}  {row.order:13}"
                f"{as_in_the_source(one, ranks):>10}{row.accumulates or '-':>10}"
                f"{row.num_replayed:10,}{error[0]:>10}{error[1]:>10}"
            )


def errors(folder: Path) -> None:
    print("\nrms error of a float32 all_reduce, in units of the terms' rms, by algorithm")
    print(f"{'ranks':>5}  {'by':9}{'order':20}{'expected':>10}{'measured':>10}")
    sites = ["all_reduce.float32.odd.random", "order.all_reduce.float32.odd"]
    for ranks in (4, 8):
        for name in ("gloo", "ring", "flat", "tree", "halving"):
            run = made(folder, ranks, sites=sites, impl=[name])
            (row,) = compare(run).collectives.sides[0].orders
            print(f"{ranks:5}  {name:9}{row.order:20}{row.expected:10.2e}{row.measured:10.2e}")
    print("sum over additions of the terms below, whose root the error grows with")
    for ranks in (8, 64, 512):
        chain = sum(range(2, ranks + 1))
        level, nodes = list(range(ranks)), []
        while len(level) > 1:
            pairs = list(zip(level[::2], level[1::2], strict=True))
            level = [ranks + len(nodes) + k for k in range(len(pairs))]
            nodes += pairs
        tree = Tree.of(ranks, nodes).partials
        print(
            f"{ranks:5}  ring, flat {chain:>8,}   tree, halving {tree:>6,}   "
            f"error {(chain / tree) ** 0.5:.1f} times as large"
        )


def faults(folder: Path) -> None:
    print("\nplanted in all_reduce, at the last rank: is the first line that rank's?")
    print(f"{'ranks':>5}  " + "".join(f"{name:>12}" for name in FAULTS))
    sites = ["all_reduce.*", "order.all_reduce.*.odd"]
    for ranks in RANKS:
        cells = []
        for name in FAULTS:
            rank = ranks - 1
            report = compare(made(folder, ranks, sites=sites, plants=[f"all_reduce={name}@{rank}"]))
            right = report.verdict.summary.startswith(f"rank {rank}: all_reduce of float32")
            only = (ranks, name) == (2, "unordered")  # two terms have one order
            quiet = report.verdict.kind == "within_floor"
            cells.append("named" if right else "one order" if only and quiet else "MISSED")
        print(f"{ranks:5}  " + "".join(f"{cell:>12}" for cell in cells))


def whole(folder: Path) -> None:
    print("\nthe whole suite")
    print(
        f"{'ranks':>5}{'seconds':>9}{'compare':>9}{'MiB':>7}{'cases':>7}{'faults':>8}"
        f"{'AR = RS + AG':>14}{'AR busbw':>12}{'RS':>8}{'AG':>8}{'A2A':>8} GB/s"
    )
    for ranks in RANKS:
        begun = time.perf_counter()
        run = made(folder, ranks)
        captured = time.perf_counter()
        side = compare(run).collectives.sides[0]
        seconds = captured - begun, time.perf_counter() - captured
        cases = sum(row.num_cases for row in side.rows)
        equal = f"{sum(not one.num_different for one in side.identities)}/{len(side.identities)}"
        rate = {one.collective: one.busbw / 1e9 for one in side.bandwidth}  # the largest size
        mib = run.manifest.sizes.stored_bytes / 2**20
        print(
            f"{ranks:5}{seconds[0]:9.1f}{seconds[1]:9.1f}{mib:7.1f}{cases:7}"
            f"{len(side.faults):8}{equal:>14}{rate['all_reduce']:12.2f}"
            f"{rate['reduce_scatter']:8.2f}{rate['all_gather']:8.2f}"
            f"{rate['all_to_all']:8.2f}"
        )


def main() -> None:
    asked = sys.argv[1:] or ["orders", "errors", "faults", "whole"]
    with tempfile.TemporaryDirectory() as name:
        for part in asked:
            {"orders": orders, "errors": errors, "faults": faults, "whole": whole}[part](Path(name))


if __name__ == "__main__":
    main()
