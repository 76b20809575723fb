"""Goldens as archives, for git: one file, without what only the run itself was for."""

from __future__ import annotations

import io

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


def test_a_zip_is_compressed_and_its_size_is_told_before_and_after(runs, tmp_path):
    """What is agreed to is what lies there then."""
    whole = bless(tmp_path / "golden.tar", runs / "full").num_bytes
    golden, asked = tmp_path / "golden.zip", []
    first = bless(golden, runs / "full", agree=asked.append)
    assert asked == [] and first.replaced_bytes is None  # nothing was there to be replaced
    assert first.num_bytes == golden.stat().st_size < 0.8 * whole
    before = golden.read_bytes()
    with pytest.raises(UsageError, match="nothing was replaced"):
        bless(golden, runs / "sketch", agree=lambda told: asked.append(told) or False)
    assert golden.read_bytes() == before and len(list(tmp_path.iterdir())) == 2
    second = bless(golden, runs / "sketch", agree=lambda told: asked.append(told) or True)
    assert asked[0].num_bytes == asked[1].num_bytes == golden.stat().st_size == second.num_bytes
    assert asked[0].replaced_bytes == len(before) and asked[0].verdict == "identical"
    assert check(golden, runs / "full").passed


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 2), ("--yes", 0)])
def test_a_terminal_is_asked_before_a_golden_is_replaced(
    runs, invoke, tmp_path, answer, code, monkeypatch
):
    """It sees what is replaced, by what, and how the two differ; nothing is said to --yes."""
    bless(tmp_path / "golden.zip", runs / "full")
    terminal, shown = io.StringIO(answer), io.StringIO()
    terminal.isatty = shown.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("sys.stderr", shown)
    options = [answer] if answer == "--yes" else []
    ended, *_ = invoke("check", tmp_path / "golden.zip", runs / "sketch", "--bless", *options)
    assert ended == code
    asked = shown.getvalue()
    assert ("REPLACE?" in asked and "of a run captured" in asked) == (not options)
    assert ("nothing was replaced" in asked) == (code == 2)


def test_a_run_that_was_made_like_another_golden_does_not_pass(runs, llama, tmp_path):
    """What it was captured for, its blocks in equal inputs, is not compared then."""
    other = capture(
        llama,
        out=tmp_path / "other",
        prompts=["Snow fell"],
        max_new_tokens=2,
        probe=False,
        attn_implementation="eager",
    )
    result = check(other, runs / "anchored")
    assert [failure.rule for failure in result.failures] == ["anchored"]
    assert f"divergence capture --like {other.path}" in result.failures[0].text
    assert check(runs / "full", runs / "anchored").passed
    assert check(other, runs / "full").passed
