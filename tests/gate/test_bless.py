"""Goldens as archives, for git: one file, without what only the run itself was for."""

from __future__ import annotations

import pytest

from divergence import Run, capture, check
from divergence.errors import UsageError
from divergence.gate.golden import bless


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """A run of one prompt in sketches, and one that repeats a full one, so that it is anchored."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"prompts": ["Snow fell"], "max_new_tokens": 2, "probe": False}
    full = capture(llama, out=folder / "full", **options)
    capture(llama, out=folder / "sketch", store="sketch", **options)
    capture(like=full, out=folder / "anchored", probe=False)
    return folder


@pytest.mark.parametrize("name", ["golden.zip", "golden.tar", "golden"])
def test_a_golden_has_no_anchored_pass(runs, tmp_path, name):
    """It is read and checked like any run, and no file stays beside it."""
    blessing = bless(tmp_path / name, runs / "anchored")
    kept = Run.open(tmp_path / name)
    assert kept.manifest.plan.passes == ["free"]
    assert {record.pass_ for record in kept.records} == {"free"}
    assert kept.verify() == []
    assert kept.manifest.sizes.num_records == len(kept.records)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert blessing.previous is None and blessing.num_bytes > 0
    assert check(kept, runs / "full").passed


def test_a_sketch_of_one_prompt_is_small(runs, tmp_path):
    """Small enough for git, and a run is checked against it."""
    blessing = bless(tmp_path / "golden.zip", runs / "sketch")
    assert blessing.num_bytes == (tmp_path / "golden.zip").stat().st_size < 100_000
    assert check(tmp_path / "golden.zip", runs / "full").passed


def test_an_archive_is_replaced_and_kept_where_asked(runs, tmp_path):
    """The name of what is kept can be read as an archive, too."""
    golden = tmp_path / "golden.zip"
    bless(golden, runs / "sketch")
    before = golden.read_bytes()
    blessing = bless(golden, runs / "full", keep_previous=True)
    assert (tmp_path / "golden.previous.zip").read_bytes() == before
    assert blessing.verdict == "identical" and blessing.report.verdict.kind == "identical"
    assert blessing.previous == str(tmp_path / "golden.previous.zip")
    assert bless(golden, runs / "sketch").previous is None
    assert golden.read_bytes() == before


def test_a_file_that_is_no_run_is_not_replaced(runs, tmp_path):
    """Whatever it is called."""
    for name in ("golden.zip", "golden"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(UsageError):
            bless(tmp_path / name, runs / "sketch")
        assert (tmp_path / name).read_text() == "mine"
