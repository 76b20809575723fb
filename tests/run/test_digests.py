"""A run closes with digests over its manifest and records: what was changed since is named."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from divergence import Run, pack, unpack
from divergence.cli.main import app
from divergence.errors import RunFormatError
from divergence.run.reader import without_passes
from divergence.run.target import write_directory
from divergence.run.writer import RunWriter
from tests.by_hand import put
from tests.digests import without_digests
from tests.run.test_lines import write_many


@pytest.fixture
def run(tmp_path, manifest) -> Path:
    """A closed run of some hundred records."""
    write_many(tmp_path / "a", manifest(), seed=5)
    return tmp_path / "a"


@pytest.mark.parametrize("name", ["manifest.json", "records.jsonl"])
def test_every_flipped_bit_is_named(run, name):
    """Whether what it makes is still JSON, still sound and still plausible, or not."""
    data = (run / name).read_bytes()
    draw = random.Random(7)
    for _ in range(150):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (run / name).write_bytes(flipped)
        with pytest.raises(RunFormatError) as error:
            Run.open(run)
        assert name in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"label": "here"', '"label": "there"'),
        lambda text: json.dumps(json.loads(text)),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text + " ",
    ],
    ids=["a value", "another layout", "line ends", "a space"],
)
def test_a_manifest_that_was_edited_is_named_before_anything_is_compared(run, change, capsys):
    """The error says what to do where it was meant."""
    path = run / "manifest.json"
    path.write_bytes(change(path.read_text()).encode())
    with pytest.raises(SystemExit) as end:
        app(["compare", str(run), str(run)])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "manifest.json is not as it was when the run was written" in printed.err
    assert "take digest and record_digests out" in printed.err
    without_digests(run)
    assert Run.open(run).verify() == []


def test_a_copy_keeps_the_digests_and_a_part_gets_its_own(run, tmp_path):
    """Archives, directories made of them, and a run without one of its passes."""
    digests = Run.open(run).manifest.record_digests
    for kind in (".tar", ".zip"):
        copy = unpack(pack(run, out=tmp_path / f"a{kind}"), out=tmp_path / f"copy{kind[1:]}")
        assert copy.manifest.record_digests == digests
    part = without_passes(Run.open(run), ("anchored",))
    (tmp_path / "part").mkdir()
    write_directory(part, tmp_path / "part")
    manifest = Run.open(tmp_path / "part").manifest
    assert manifest.record_digests.keys() == digests.keys()
    assert manifest.record_digests != digests


def test_a_run_that_ended_early_is_closed_too(tmp_path, manifest):
    """Then no line of it may be a part; of a run that was killed the last one may."""
    with pytest.raises(ValueError), RunWriter(tmp_path / "a", manifest()) as writer:
        for step in range(3):
            put(writer, torch.ones(3), step=step)
        raise ValueError("stop")
    lines = tmp_path / "a" / "records.jsonl"
    assert len(Run.open(tmp_path / "a").records) == 3
    lines.write_bytes(lines.read_bytes()[:-20])
    with pytest.raises(RunFormatError, match="records"):
        Run.open(tmp_path / "a")
    without_digests(tmp_path / "a")
    assert Run.open(tmp_path / "a").torn_tail


def test_digests_that_fit_each_other_and_not_the_files_are_refused(run, tmp_path):
    """Records of another run beside this one's manifest."""
    shutil.copytree(run, tmp_path / "b")
    records = tmp_path / "b" / "records.jsonl"
    first, second, *rest = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join([second, first, *rest]))
    with pytest.raises(RunFormatError, match=r"records\.jsonl is not as it was"):
        Run.open(tmp_path / "b")


def test_inspect_says_of_a_run_without_digests_that_it_has_none(run, capsys):
    """Of an older one that it was recorded before them, of others nothing."""
    older = Path(__file__).parents[1] / "fixtures" / "run-v7"
    for path, said in ((run, None), (older, "recorded before digests"), (run, "without digests")):
        if path == run and said:
            without_digests(run)
        with pytest.raises(SystemExit):
            app(["inspect", str(path)])
        printed = capsys.readouterr().out
        assert ("digests of manifest and records" in printed) == bool(said)
        assert (said or "") in printed
