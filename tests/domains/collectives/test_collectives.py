"""Collectives on gloo ranks of this machine: right ones are called right, and each planted fault is
found with the collective and the rank that has it."""

import functools
import json
import shutil
import subprocess
import sys

import pytest
import torch

from divergence import CaseOptions, Run, capture, compare, truth
from divergence.domains.collectives.orders import chain_of, decode
from divergence.errors import PlantError, RunFormatError, UsageError
from divergence.layout import Line
from divergence.numerics.formats import format_named
from divergence.report.summary import report_lines
from tests.digests import without_digests

SUMS = ["all_reduce.float32.odd.*", "all_reduce.*.odd.random", "order.all_reduce.*.odd"]
SCATTER = ["reduce_scatter.float32.even.*", "order.reduce_scatter.float32.even"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(ranks, *plants, sites=...)``: the run of so many ranks, each made once."""

    @functools.cache
    def make(ranks: int, *plants: str, sites=tuple(SUMS), **options) -> Run:
        return capture(
            "suite:collectives",
            out=tmp_path_factory.mktemp("collectives") / "run",
            cases=CaseOptions(ranks=ranks),
            sites=list(sites),
            plants=plants,
            probe=False,
            **options,
        )

    return make


def gloo_chunks(elements: int, itemsize: int, num_ranks: int) -> int:
    """Elements of a chunk of gloo's ring (gloo/allreduce.cc: two segments at least for each rank,
    each at most 1 MiB)."""
    most = 2**20
    total = elements * itemsize
    segments = max(-(-total // most), 2 * num_ranks)
    segments = -(-segments // num_ranks) * num_ranks
    segment = -(-total // segments)
    each = -(-segment // itemsize)
    return segments // num_ranks * each


SLOW = [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, 5, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, *SLOW])
def test_gloo_adds_in_the_order_of_its_source(made, ranks):
    """Chunk k starts at rank k - 1 and goes down; its edges are where the source puts them."""
    run = made(ranks)
    report = compare(run)
    assert report.verdict.kind == "within_floor", report.verdict.summary
    (side,) = report.collectives.sides
    assert {row.order for row in side.orders} == {"one addition" if ranks == 2 else "ring"}
    for row in side.orders:
        assert row.accumulates == row.dtype
        assert 0.8 < row.measured / row.expected < 1.3
    masked = {one.site: one.call.arguments for one in run.records if one.site.startswith("order.")}
    assert len(masked) == 4
    for site, facts in masked.items() if ranks > 2 else ():
        size = gloo_chunks(facts["elements"], format_named(facts["dtype"]).itemsize, ranks)
        sizes = torch.cat([run.read(part) for part in run.at_site(site)], dim=1)
        found = decode(sizes.to(torch.int64).numpy(), ranks)
        assert [part.start for part in found] == [k * size for k in range(ranks)]
        for k, part in enumerate(found):
            order = [(k - 1 - step) % ranks for step in range(ranks)]
            assert chain_of(part.tree) == [*sorted(order[:2]), *order[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_holds_on_gloo(tmp_path, ranks):
    """The whole suite, with a link's rate beside the measured one."""
    run = capture(
        "suite:collectives", out=tmp_path / "r", cases=CaseOptions(ranks=ranks, link_rate="10Gb/s")
    )
    report = compare(run)
    assert (report.verdict.kind, report.verdict.confidence) == ("within_floor", "high")
    (side,) = report.collectives.sides
    assert not side.faults
    assert all(row.num_right == row.num_cases == row.num_repeated for row in side.rows)
    assert all(row.promised and not row.num_different for row in side.identities)
    assert {one.collective for one in side.bandwidth} == {row.collective for row in side.rows} - {
        "rs_ag"
    }
    assert all(one.link_rate == 1.25e9 for one in side.bandwidth)
    assert any("float8_e4m3fn" in reason for reason in side.unsupported)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "sites", "check", "said"),
    [
        ("all_reduce=bfloat16@1", SUMS, "sum", "adds in bfloat16"),
        ("all_reduce=unordered@2", SUMS, "repeatable", "in another order each time"),
        ("all_reduce=swap@1", SUMS, "sum", "chunk 0 holds what belongs in chunk 1"),
        ("all_reduce=tail:17@2", SUMS, "sum", "the last 17 of 1,037 elements are 0"),
        ("reduce_scatter=bfloat16@0", SCATTER, "sum", "adds in bfloat16"),
        ("reduce_scatter=unordered@1", SCATTER, "repeatable", "in another order each time"),
        ("all_gather=swap@2", ["all_gather.*.odd.random"], "definition", "chunk 1 holds what"),
        ("broadcast=tail:17@1", ["broadcast.*.odd.random"], "definition", "the last 17 of 1,037"),
        ("send_recv=tail:17@0", ["send_recv.*.odd.random"], "definition", "the last 17 of 129"),
        (
            "all_reduce=bit@2",
            [*SUMS[2:], "all_reduce.float32.*.cancelling"],
            "same_bits",
            "holds other bits than ranks 0, 1",
        ),
        ("all_gather=bit@0", ["all_gather.*.odd.random"], "definition", "1 of 387 elements"),
        ("all_to_all=swap@1", ["all_to_all.*.odd.random"], "definition", "chunk 0 holds what"),
    ],
)
def test_planted_faults_are_found_with_their_rank(made, plant, sites, check, said):
    """On three ranks; the first line has the rank, the collective, the size and the dtype."""
    report = compare(made(3, plant, sites=tuple(sites)))
    name, rank = plant.partition("=")[0], int(plant[-1])
    assert report.verdict.kind == "localized"
    assert report.verdict.side == "reference"
    assert report.verdict.onset.site.startswith(f"{name}.float32.")
    assert report.verdict.summary.startswith(f"rank {rank}: {name} of float32, ")
    first = report.collectives.sides[0].faults[0]
    assert (first.check, first.ranks) == (check, (rank,))
    assert said in first.text
    named = {fault.ranks for fault in report.collectives.sides[0].faults if fault.ranks}
    assert named == {(rank,)}
    assert report.reference.plants == [plant]


def test_of_two_ranks_the_one_that_cannot_be_replayed_is_wrong(made):
    """Both are within rounding, and neither is most."""
    sites = ("all_reduce.float32.odd.cancelling", "order.all_reduce.float32.odd")
    report = compare(made(2, "all_reduce=bit@1", sites=sites))
    (fault,) = report.collectives.sides[0].faults
    assert (fault.check, fault.ranks, fault.num_wrong) == ("same_bits", (1,), 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 5, 8])
@pytest.mark.parametrize("fault", ["bfloat16", "swap", "tail:17", "unordered"])
def test_planted_faults_are_found_on_any_number_of_ranks(made, ranks, fault):
    """Two terms have one order, so that nothing is unordered on two ranks."""
    rank = ranks - 1
    report = compare(made(ranks, f"all_reduce={fault}@{rank}"))
    if (ranks, fault) == (2, "unordered"):
        assert report.verdict.kind == "within_floor"
        return
    assert report.verdict.summary.startswith(f"rank {rank}: all_reduce of float32, odd")


def test_a_rank_told_by_its_part_alone_is_less_certain(made):
    """That each rank reduces its own part of the buffer is how most libraries do it, not all."""
    report = compare(made(3, "all_reduce=unordered@2"))
    assert report.verdict.confidence == "medium"
    assert "assumed" in next(c.detail for c in report.verdict.checks if c.state != "met")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"), [("flat", "flat"), ("tree", "tree"), ("halving", "recursive halving")]
)
def test_other_algorithms_are_named_and_differ_within_rounding(made, name, order):
    """Four ranks: other bits than gloo's ring, both right."""
    sites = ("all_reduce.float32.odd.random", "order.all_reduce.float32.odd")
    ring, other = made(4, sites=sites), made(4, sites=sites, impl=(name,), label=name)
    report = compare(ring, other)
    assert report.verdict.kind == "within_floor", report.verdict.summary
    assert [row.order for row in report.collectives.sides[1].orders] == [order]
    assert report.collectives.sides[1].rows[0].implementation == name
    (differing,) = report.collectives.differing
    assert 0 < differing.rel_l2 < 1e-6
    assert f"all_reduce adds by {order}" in report.verdict.summary


@pytest.mark.slow
def test_a_repeat_has_the_same_bits(made, answer):
    """--like takes the cases; the two runs are identical."""
    run = made(3)
    report = answer(run, cases=CaseOptions(ranks=3))
    assert report.verdict.kind == "identical"
    assert report.collectives.num_same == report.collectives.num_common > 0


def test_the_faulty_side_of_two_is_named(made):
    """Without trusting the other."""
    report = compare(made(3), made(3, "all_reduce=swap@1"))
    assert report.verdict.side == "candidate"
    assert report.verdict.summary.startswith("rank 1 of B: all_reduce")
    turned = compare(made(3, "all_reduce=swap@1"), made(3))
    assert turned.verdict.side == "reference"


def test_other_numbers_of_ranks_are_not_compared(made):
    """They add other terms; each is judged by itself."""
    report = compare(made(2), made(3))
    assert report.verdict.kind == "undetermined"
    assert "2 ranks and 3" in report.verdict.summary


def test_what_cannot_be_is_refused(made, tmp_path, monkeypatch):
    """Each with what to do."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="needs two ranks at least") as told:
        capture("suite:collectives", out=tmp_path / "x")
    assert "torchrun --nproc-per-node N -m divergence capture" in str(told.value)
    with pytest.raises(UsageError, match="made by 3 ranks, and there are 2"):
        capture(like=made(3), out=tmp_path / "x", cases=CaseOptions(ranks=2))
    with pytest.raises(UsageError, match="needs no truth"):
        truth(made(3), out=tmp_path / "x")
    with pytest.raises(PlantError, match="unknown fault"):
        capture(
            "suite:collectives",
            out=tmp_path / "x",
            cases=CaseOptions(ranks=2),
            plants=["all_reduce=odd@1"],
        )
    with pytest.raises(UsageError, match="there is no rank 7"):
        capture(
            "suite:collectives",
            out=tmp_path / "x",
            cases=CaseOptions(ranks=2),
            plants=["all_reduce=swap@7"],
        )
    with pytest.raises(UsageError, match="no implementation is called"):
        capture("suite:collectives", out=tmp_path / "x", cases=CaseOptions(ranks=2, impl=["odd"]))
    with pytest.raises(UsageError, match="matches no case"):
        capture(
            "suite:collectives", out=tmp_path / "x", cases=CaseOptions(ranks=2), sites=["nothing"]
        )
    with pytest.raises(UsageError, match="--ranks belongs to suite:collectives"):
        capture("some/model", out=tmp_path / "x", cases=CaseOptions(ranks=2))
    with pytest.raises(UsageError, match="--truth"):
        compare(made(2), made(3), truth=made(2))
    assert not (tmp_path / "x").exists()


def test_the_first_screen_says_what_holds(made, invoke):
    """The first reason, in twelve lines; the table and the orders of addition stand under -v."""
    screen, whole = (
        invoke("compare", made(3).path, *options)[1].splitlines() for options in ([], ["-v"])
    )
    for title in ("confidence  high", "found       sums are at most", "compared    3 ranks, gloo"):
        assert any(text.startswith(title) for text in screen), title
    for title in ("collectives  3 ranks", "order of addition"):
        assert any(text.startswith(title) for text in whole), title
        assert not any(text.startswith(title) for text in screen), title
    assert any(text.endswith("add -v") for text in screen) and len(screen) <= 12


def test_the_report_is_whole_in_every_form(made):
    """JSON, terminal and page."""
    report = compare(made(3, "all_reduce=swap@1"))
    lines = [item.text for item in report_lines(report, all_sites=True) if isinstance(item, Line)]
    assert "order of addition  found from outside, and replayed bit by bit" in lines
    assert any(text.startswith("  1      all_reduce.float32.odd.random") for text in lines)
    stored = json.loads(report.to_json())["collectives"]["sides"][0]
    assert stored["faults"][0]["ranks"] == [1]
    page = report.html()
    assert "Order of addition" in page
    assert "chunk 0 holds what belongs in chunk 1" in page


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path):
    """As on several machines."""
    out = tmp_path / "r"
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "divergence",
        "capture",
        "suite:collectives",
        "-o",
        str(out),
        "--sites",
        "all_reduce.*.odd.random",
        "--no-probe",
    ]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert compare(Run.open(out)).verdict.kind == "within_floor"


def altered(run: Run, out, change) -> Run:
    """A copy whose manifest and lines of records are changed."""
    shutil.copytree(run.path, out)
    without_digests(out)
    manifest = json.loads((out / "manifest.json").read_text())
    lines = {
        file: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(out.glob("records*.jsonl"))
    }
    change(manifest, lines)
    (out / "manifest.json").write_text(json.dumps(manifest))
    for file, records in lines.items():
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Run.open(out)


def test_a_rank_that_is_missing_is_not_called_right(made, tmp_path):
    """What one rank had written is gone: its cases are counted as missing."""

    def lose(manifest, lines):
        manifest["complete"] = False
        lines[max(lines)].clear()

    report = compare(altered(made(3), tmp_path / "r", lose))
    assert report.verdict.confidence != "high"
    assert report.collectives.sides[0].num_missing > 0


@pytest.mark.parametrize("num_ranks", [1, 2**31])
def test_impossible_numbers_of_ranks_are_refused(made, tmp_path, num_ranks):
    """A run from elsewhere may say anything."""

    def change(manifest, lines):
        manifest["mesh"]["axes"][0]["size"] = num_ranks

    with pytest.raises(RunFormatError):
        compare(altered(made(3), tmp_path / "r", change))


def test_facts_of_a_strange_run_are_left_out(made, tmp_path):
    """Orders whose words are no words of this version."""

    def change(manifest, lines):
        for records in lines.values():
            for record in records:
                if record.get("call", {}).get("operator") == "collective.order":
                    record["call"]["arguments"]["dtype"] = ["float32"]

    report = compare(altered(made(3), tmp_path / "r", change))
    assert report.collectives.sides[0].orders == []
