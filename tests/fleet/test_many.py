"""compare_many(): each run with the first, who is odd, and what one bad run costs."""

import errno
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

import divergence
from divergence import MachineOptions, RecordOptions, Run, capture, compare, compare_many
from divergence import truth as make_truth
from divergence.errors import RunFormatError, UsageError
from divergence.fleet import many
from divergence.options.commands import CompareOptions
from divergence.options.option import fields_of

PLANT = ["model.layers.1.mlp.down_proj:out=scale:1.5"]


OTHER_KERNELS = {"attn_implementation": "sdpa"}
"""Other bits than eager attention's on every machine."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, tiny_model):
    """Runs by name, all on a's tokens: b and c repeat a, d is faulty, e has other kernels. p, q
    and r are healthy repeats of d, r with other kernels and only the bytes that changed."""
    folder = tmp_path_factory.mktemp("fleet")
    model = str(tiny_model("llama", num_blocks=4))
    capture(model, out=folder / "a", max_new_tokens=3, machine=MachineOptions(label="alpha"))
    for name, options in {"b": {}, "c": {}, "d": {"plants": PLANT}, "e": OTHER_KERNELS}.items():
        capture(
            like=folder / "a", out=folder / name, machine=MachineOptions(label=name * 3), **options
        )
    for name in "pq":
        capture(like=folder / "d", out=folder / name)
    capture(
        like=folder / "d",
        out=folder / "r",
        recording=RecordOptions(only_changed=True),
        **OTHER_KERNELS,
    )
    for name, of in (("truth", "a"), ("truth-d", "d")):
        make_truth(folder / of, out=folder / name)
    capture(str(tiny_model("llama", seed=1)), out=folder / "weights", max_new_tokens=3)
    return folder


def names(paths):
    return [path.rpartition("/")[2] for path in paths]


@pytest.mark.slow
def test_each_row_is_the_comparison_with_the_first(fleet):
    """The same report as compare gives of the two, and figures that are taken from it."""
    matrix = compare_many(fleet / "a", [fleet / "b", fleet / "d"], truth=fleet / "truth")
    assert names(row.path for row in matrix.rows) == ["b", "d"]
    for row, name in zip(matrix.rows, "bd", strict=True):
        alone = compare(fleet / "a", fleet / name, truth=fleet / "truth")
        assert row.report.to_json() == alone.to_json()
        assert (row.verdict, row.onset, row.side) == (
            alone.verdict.kind,
            alone.verdict.onset,
            alone.verdict.side,
        )
    same, faulty = matrix.rows
    assert (same.verdict, same.logits_rel_l2, same.top1_agreement) == ("identical", 0.0, 1.0)
    assert (same.num_equal, same.num_tokens) == (3, 3)
    assert (faulty.verdict, faulty.onset.block) == ("localized", "model.layers.1")
    assert faulty.limit_usage > 1 > same.limit_usage
    assert faulty.limit_usage == max(site.usage or 0.0 for site in faulty.report.sites)
    assert 0 < faulty.logits_rel_l2 < 1


def test_a_matrix_and_its_reports_print_as_one_line(fleet):
    """In a notebook all fields would be megabytes."""
    matrix = compare_many(fleet / "a", [fleet / "b", fleet / "d"])
    assert repr(matrix).endswith(f"{fleet / 'd'}: {matrix.agreement}>")
    assert repr(matrix.rows[1].report) == f"<Report {fleet / 'a'} {fleet / 'd'}: localized>"


def test_the_odd_machine_stands_out(fleet):
    """Four agree, one does not; what is only its own is said; equal bits are shown as such."""
    matrix = compare_many(fleet / "a", [fleet / name for name in "bcde"])
    assert names(matrix.odd) == ["d"]
    assert names(matrix.identical[0])[:3] == ["a", "b", "c"]
    assert "4 of 5 runs agree as far as rounding goes" in matrix.agreement
    assert [text.partition(":")[0] for text in matrix.only_odd] == ["planted faults"]
    assert matrix.cross_checks == []
    assert matrix.next == [f"divergence compare {fleet / 'a'} {fleet / 'd'}"]


def test_the_first_run_may_be_the_odd_one(fleet):
    """All others differ from it and not from one another: it is the first that is odd, and where
    those are equal bit for bit nothing more need be compared to say so."""
    matrix = compare_many(fleet / "d", [fleet / "p", fleet / "q"], truth=fleet / "truth-d")
    assert names(matrix.odd) == ["d"]
    assert {row.verdict for row in matrix.rows} == {"localized"}
    assert {row.side for row in matrix.rows} == {"reference"}
    assert "2 of 3 runs agree bit for bit" in matrix.agreement
    assert matrix.cross_checks == []
    assert matrix.next[0].endswith(f"--truth {fleet / 'truth-d'}")


def test_candidates_are_compared_with_one_another_only_where_it_matters(fleet):
    """a and e differ within rounding: seen from the faulty d, one comparison shows that they agree;
    b is bit for bit a and costs none."""
    matrix = compare_many(fleet / "d", [fleet / "a", fleet / "b", fleet / "e"])
    assert names(matrix.odd) == ["d"]
    checks = [
        (*names([check.reference, check.candidate]), check.verdict) for check in matrix.cross_checks
    ]
    assert checks == [("a", "e", "within_floor")]


def test_candidates_may_lack_what_the_first_run_holds(fleet):
    """Two repeats of one run that stored only what changed are compared by its bytes."""
    matrix = compare_many(fleet / "d", [fleet / "p", fleet / "r"])
    assert [check.verdict for check in matrix.cross_checks] == ["within_floor"]
    assert names(matrix.odd) == ["d"]


def test_one_bad_run_costs_its_own_row(fleet, tmp_path):
    """Absent, damaged, of other weights: each row says why, the others are as without them."""
    damaged = shutil.copytree(fleet / "b", tmp_path / "damaged")
    shard = next((damaged / "tensors").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    broken = shutil.copytree(fleet / "b", tmp_path / "broken")
    (broken / "manifest.json").write_text("{}")
    bad = [tmp_path / "none", damaged, broken, fleet / "weights"]
    matrix = compare_many(fleet / "a", [*bad, fleet / "d", fleet / "b"])
    said = [row.problem for row in matrix.rows]
    assert "does not exist" in said[0]
    assert "wrong checksum" in said[1]
    assert "manifest.json" in said[2]
    assert "other weights" in said[3]
    assert said[4:] == [None, None]
    assert [row.verdict for row in matrix.rows] == [
        None,
        None,
        None,
        "incomparable",
        "localized",
        "identical",
    ]
    assert names(matrix.odd) == ["d"]
    assert matrix.agreement.endswith("(4 could not tell)")


def test_what_is_wrong_with_the_first_run_is_an_error(fleet, tmp_path):
    """Without it, with an unreadable truth or floor, or with nobody to compare, nothing is done."""
    both = [fleet / "b", fleet / "c"]
    with pytest.raises(RunFormatError, match="does not exist"):
        compare_many(tmp_path / "none", both)
    with pytest.raises(RunFormatError, match="does not exist"):
        compare_many(fleet / "a", both, truth=tmp_path / "none")
    with pytest.raises(RunFormatError, match="does not exist"):
        compare_many(fleet / "a", both, floor=[tmp_path / "none"])
    with pytest.raises(UsageError, match="is no truth: it was computed in") as caught:
        compare_many(fleet / "a", both, truth=fleet / "d")
    assert caught.value.hint.startswith("divergence truth ")
    with pytest.raises(UsageError, match="is the truth of none of these runs"):
        compare_many(fleet / "a", both, truth=fleet / "truth-d")
    with pytest.raises(UsageError, match="no run to compare"):
        compare_many(fleet / "a", [])


def test_the_json_is_versioned_and_whole(fleet):
    """Each pair's report is in its row."""
    matrix = compare_many(fleet / "a", [fleet / "b", fleet / "d"])
    answer = json.loads(matrix.to_json(indent=2), parse_constant=pytest.fail)
    assert answer["schema_version"] == 1
    report = json.loads(compare(fleet / "a", fleet / "d").to_json())
    assert answer["rows"][1]["report"] == report


def test_reports_can_go_to_files(fleet, tmp_path):
    """One file a pair, named in its row; the directory must be empty."""
    both = [fleet / "b", fleet / "d"]
    matrix = compare_many(fleet / "a", both, reports=tmp_path / "pairs")
    files = sorted((tmp_path / "pairs").iterdir())
    assert [file.name for file in files] == ["0001-b.json", "0002-d.json"]
    assert [row.report_path for row in matrix.rows] == [str(file) for file in files]
    assert [row.report for row in matrix.rows] == [None, None]
    report = compare(fleet / "a", fleet / "d")
    assert json.loads(files[1].read_text()) == json.loads(report.to_json())
    with pytest.raises(UsageError, match="not empty"):
        compare_many(fleet / "a", both, reports=tmp_path / "pairs")
    rows = compare_many(fleet / "a", both, keep_reports=False).rows
    assert [row.report for row in rows] == [None, None]


def test_half_a_report_is_not_left(fleet, tmp_path, monkeypatch):
    """A full disk: the reports before it stay, the one under way goes."""
    replace = os.replace

    def full(source, target):
        if Path(target).name.startswith("0002"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr("divergence.output.os.replace", full)
    with pytest.raises(UsageError, match="No space left") as caught:
        compare_many(fleet / "a", [fleet / "b", fleet / "d"], reports=tmp_path / "pairs")
    assert caught.value.hint
    assert [file.name for file in (tmp_path / "pairs").iterdir()] == ["0001-b.json"]


def test_runs_may_be_open_already(fleet):
    """Run objects are taken as they are and left open; the public name is the same function."""
    a, d = Run.open(fleet / "a"), Run.open(fleet / "d")
    matrix = divergence.compare_many(a, [d, fleet / "b"])
    assert isinstance(matrix, divergence.Matrix)
    again = compare_many(a, [d, fleet / "b"])
    assert msgspec.to_builtins(matrix) == msgspec.to_builtins(again)


def test_every_option_of_compare_reaches_each_pair(fleet, monkeypatch):
    """One that is taken and not handed on would be ignored without a word."""
    given = []

    def stopped(*runs, **options):
        given.append(set(options))
        raise RunFormatError("stopped here")

    monkeypatch.setattr(many, "compare", stopped)
    compare_many(fleet / "a", [fleet / "b"])
    assert {field.name for field in fields_of(CompareOptions)} <= given[0]
