"""Goldens as archives, for git: one file, without what only the run itself was for."""

import contextlib
import errno
import io
import json
import os
import shutil
import sys

import pytest

from divergence import Run, capture, check, compare, truth
from divergence.errors import IncomparableError
from tests.digests import without_digests


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """A run of one prompt in sketches, and one that repeats a full one, so that it is anchored."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"prompts": ["Snow fell"], "max_new_tokens": 2, "probe": False}
    full = capture(llama, out=folder / "full", **options)
    capture(llama, out=folder / "sketch", store="sketch", **options)
    capture(like=full, out=folder / "anchored", probe=False)
    return folder


@pytest.mark.parametrize("name", ["golden.zip", "golden.tar", "deep/golden"])
def test_a_golden_has_no_anchored_pass(runs, bless, tmp_path, name):
    """It is read and checked like any run, and no file stays beside it."""
    blessing = bless(tmp_path / name, runs / "anchored")
    kept = Run.open(tmp_path / name)
    assert kept.manifest.plan.passes == ["free"]
    assert {record.pass_ for record in kept.records} == {"free"}
    assert kept.verify() == []
    assert kept.manifest.sizes.num_records == len(kept.records)
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]
    assert blessing["previous"] is None and blessing["num_bytes"] > 0
    assert check(kept, runs / "full").passed


def test_tokens_of_another_run_are_said(runs, invoke, tmp_path):
    """A run that was made like another one was fed its tokens, which need not be its own choice."""
    shutil.copytree(runs / "anchored", tmp_path / "run")
    path = without_digests(tmp_path / "run") / "manifest.json"
    manifest = json.loads(path.read_text())
    for number, run in enumerate(("a", "b")):
        manifest["tokens"]["samples"][0]["chosen_ids"][0] += number
        path.write_text(json.dumps(manifest))
        out = " ".join(invoke("check", tmp_path / run, tmp_path / "run", "--bless")[1].split())
        assert ("where this model would choose others" in out) == bool(number)


def test_a_sketch_of_one_prompt_is_small(runs, bless, tmp_path):
    """Small enough for git, and a run is checked against it."""
    blessing = bless(tmp_path / "golden.zip", runs / "sketch")
    assert blessing["num_bytes"] == (tmp_path / "golden.zip").stat().st_size < 100_000
    assert check(tmp_path / "golden.zip", runs / "full").passed


def test_an_archive_is_replaced_and_kept_where_asked(runs, bless, tmp_path):
    """The name of what is kept can be read as an archive, too; unasked nothing is kept."""
    golden = tmp_path / "golden.zip"
    bless(golden, runs / "sketch")
    before = golden.read_bytes()
    blessing = bless(golden, runs / "full", "--keep-previous")
    assert (tmp_path / "golden.previous.zip").read_bytes() == before
    assert blessing["verdict"] == "identical" == blessing["report"]["verdict"]["kind"]
    assert blessing["previous"] == str(tmp_path / "golden.previous.zip")
    assert bless(golden, runs / "sketch")["previous"] is None
    assert golden.read_bytes() == before
    bless(golden, runs / "full", "--keep-previous")
    bless(golden, runs / "sketch", "--keep-previous")  # what was kept gives way
    assert (tmp_path / "golden.previous.zip").read_bytes() != before


def test_bless_tells_what_changes(runs, llama, bless, invoke, tmp_path):
    """What the golden is now, was before, and how they differ; what is next about the old one
    cannot be run any more, so it is no command."""

    def faulty(model):
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 1.5)

    options = {"prompts": ["Snow fell"], "max_new_tokens": 2, "probe": False}
    sites = ["blocks", "model.layers.0.mlp"]
    capture(llama, out=tmp_path / "b", sites=sites, prepare=faulty, **options)
    bless(tmp_path / "golden", runs / "full")
    words = "check", tmp_path / "golden", tmp_path / "b", "--bless", "--keep-previous"
    code, out, _ = invoke(*words)
    text = " ".join(out.split())
    assert code == 0
    assert text.startswith(f"BLESSED: {tmp_path}/golden is the golden now, ")
    assert f"previous kept as {tmp_path}/golden.previous" in text
    assert "old to new localized: " in text and "divergence localize" not in text
    assert "added 2 sites: model.layers.0.mlp:in" in text
    assert bless(tmp_path / "golden", runs / "full")["removed_sites"]


def test_a_run_is_blessed_twice_and_holds_no_golden(runs, bless, invoke, tmp_path):
    """That it is there already is said, and no verdict; a golden in a run would go with it."""
    bless(tmp_path / "golden", runs / "full")
    again = bless(tmp_path / "golden", runs / "full")
    assert again["verdict"] is None and again["reason"].startswith("it is the same run")
    said = invoke("check", tmp_path / "golden" / "x", runs / "full", "--bless")
    assert said[0] == 2 and "is a run, and no folder of goldens" in said[2]


def test_an_incomparable_golden_is_replaced(runs, bless, monkeypatch, tmp_path):
    """Other weights are why one blesses: the reason is told."""
    bless(tmp_path / "golden", runs / "full")

    def refuse(*_, **__):
        raise IncomparableError("other weights")

    monkeypatch.setattr(sys.modules[compare.__module__], "compare", refuse)
    blessing = bless(tmp_path / "golden", runs / "sketch")
    assert (blessing["verdict"], blessing["reason"]) == (None, "other weights")
    assert Run.open(tmp_path / "golden").manifest.id == Run.open(runs / "sketch").manifest.id


@pytest.mark.parametrize("name", ["golden.zip", "golden"])
def test_what_is_no_run_is_not_replaced(runs, bless, tmp_path, name):
    """Neither a file nor a folder, whatever it is called; and a run does not replace itself."""
    (tmp_path / name).write_text("mine")
    assert bless(tmp_path / name, runs / "sketch").startswith("error: ")
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / "folder").mkdir()
    assert "no run" in bless(tmp_path / "folder", runs / "sketch")
    assert "is the golden" in bless(runs / "full", runs / "full")


@pytest.mark.parametrize(
    ("golden", "packed"),
    [("s3://bucket/golden", "s3://bucket/golden.tar"), ("s3://b/g.zip", "s3://b/g.zip --force")],
)
def test_what_to_do_where_nothing_can_be_blessed(bless, golden, packed):
    """The old one could not be kept at a URL; the command that is printed packs an archive."""
    told = bless(golden, "of me")
    assert "is no directory or archive of this machine" in told
    assert f"divergence pack 'of me' -o {packed}, and check" in told


@pytest.mark.parametrize(
    "kind", ["incomplete", "planted", "results of another", "wrong checksum", "truth"]
)
def test_what_is_unfit_becomes_no_golden(runs, bless, tmp_path, kind):
    """It must be right for years."""
    new = tmp_path / "new"
    if kind == "truth":
        truth(runs / "full", out=new)
    elif kind == "planted":
        capture(like=runs / "full", out=new, plants=["model.layers.1:out=nan"], probe=False)
    else:
        shutil.copytree(runs / "full", new)
    without_digests(new)
    if kind == "wrong checksum":
        shard = next((new / "tensors").iterdir())
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    manifest = json.loads((new / "manifest.json").read_text())
    if kind == "incomplete":
        manifest |= {"complete": False, "stopped_by": "SIGTERM"}
    if kind == "results of another":
        manifest["plan"]["substitutes"] = ["a/aten.mm:out from 0f"]
    (new / "manifest.json").write_text(json.dumps(manifest))
    assert kind in bless(tmp_path / "golden", new)
    assert not (tmp_path / "golden").exists()


def test_what_a_killed_blessing_left_is_removed(runs, bless, tmp_path):
    """By the next one; what another process writes to, and what else lies there, stays."""
    for name in ("12345678", "busy5678", "mine5678"):
        (tmp_path / f".golden.{name}" / ("own" if name == "mine5678" else "new")).mkdir(
            parents=True
        )
    with open_lock(tmp_path / ".golden.busy5678"):
        bless(tmp_path / "golden", runs / "sketch")
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == [".golden.busy5678", ".golden.mine5678", "golden"]


@contextlib.contextmanager
def open_lock(folder):
    """As another process that works there holds it."""
    fcntl = pytest.importorskip("fcntl")
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def test_a_failed_copy_leaves_the_golden(runs, bless, tmp_path, monkeypatch):
    """The golden moves only after the copy is whole."""
    bless(tmp_path / "golden", runs / "full")
    before = (tmp_path / "golden" / "manifest.json").read_bytes()

    def fail(self):
        yield "manifest.json", 1, iter([b"{"])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Run, "whole_files", fail)
    assert "No space left" in bless(tmp_path / "golden", runs / "sketch")
    assert (tmp_path / "golden" / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["golden"]


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 2), ("--yes", 0)])
def test_a_terminal_is_asked_before_a_golden_is_replaced(
    runs, bless, invoke, tmp_path, answer, code, monkeypatch
):
    """It sees what is replaced, by what, how large both are and how they differ; what is agreed to
    is what lies there then. Nothing is said to --yes."""
    golden = tmp_path / "golden.zip"
    whole = bless(tmp_path / "golden.tar", runs / "full")["num_bytes"]
    first = bless(golden, runs / "full")
    assert first["replaced_bytes"] is None  # nothing was there to be replaced
    assert first["num_bytes"] == golden.stat().st_size < 0.8 * whole
    before = golden.read_bytes()
    terminal, shown = io.StringIO(answer), io.StringIO()
    terminal.isatty = shown.isatty = lambda: True
    options = [answer] if answer == "--yes" else []
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", terminal)
        patch.setattr("sys.stderr", shown)
        ended, *_ = invoke("check", golden, runs / "sketch", "--bless", *options)
    assert ended == code
    asked = shown.getvalue()
    assert ("REPLACE?" in asked and "of a run captured" in asked) == (not options)
    assert ("nothing was replaced" in asked) == (code == 2)
    assert (golden.read_bytes() == before) == (code == 2)
    assert check(golden, runs / ("sketch" if code else "full")).passed


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
