"""Copies of a run hold its files alone: nothing that lies beside them, and nothing through links.

Whatever copies a run (a golden that is stored, pack, unpack) gets it from elsewhere.
"""

import os
import shutil
from pathlib import Path

import pytest

from divergence import Run, pack, unpack
from divergence.errors import RunFormatError


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file outside the run."""
    path = tmp_path / "secret"
    path.write_text("secret")
    return path


@pytest.fixture
def crowded(small_run, secret) -> Path:
    """A run with links out of it, a device, a pipe and other files between its own."""
    for folder in (small_run, small_run / "tensors"):
        (folder / "link").symlink_to(secret)
        (folder / "outside").symlink_to(secret.parent, target_is_directory=True)
        (folder / "endless").symlink_to("/dev/zero")
        (folder / "run.py").write_text("raise SystemExit")
        os.mkfifo(folder / "pipe")
    (small_run / "tensors" / "more.safetensors").symlink_to("/dev/zero")
    return small_run


def names(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir())


def test_a_golden_is_the_run_alone(crowded, bless, tmp_path):
    """What the manifest and the records name is stored, byte for byte; nothing else is opened."""
    golden = tmp_path / "golden"
    bless(golden, crowded)
    own = sorted(Run.open(crowded).files())
    assert names(golden) == own
    for name in own:
        assert not (golden / name).is_symlink()
        assert (golden / name).read_bytes() == (crowded / name).read_bytes()
    bless(golden, crowded, "--keep-previous")
    assert names(tmp_path / "golden.previous") == own


def test_pack_and_unpack_take_the_run_alone(crowded, tmp_path):
    """The same of archives, and of what comes out of them."""
    packed = pack(crowded, out=tmp_path / "run.tar")
    back = unpack(packed, out=tmp_path / "back")
    assert names(back.path) == sorted(Run.open(crowded).files())
    assert names(unpack(crowded, out=tmp_path / "copy").path) == names(back.path)


@pytest.mark.parametrize("name", ["manifest.json", "records.jsonl", "tensors", "shard"])
@pytest.mark.parametrize("other", ["/dev/zero", "secret", "pipe"])
@pytest.mark.parametrize("copy", ["bless", "pack", "unpack"])
def test_the_runs_own_files_are_files(small_run, bless, secret, tmp_path, name, other, copy):
    """A link or a pipe in the place of one is refused before it is opened; nothing is left."""
    shard = next((small_run / "tensors").iterdir())
    path = shard if name == "shard" else small_run / name
    shutil.rmtree(path) if name == "tensors" else path.unlink()
    if other == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(secret if other == "secret" else other)
    out = tmp_path / ("out.tar" if copy == "pack" else "out")
    if copy == "bless":
        assert bless(out, small_run).startswith("error: ")
    else:
        with pytest.raises(RunFormatError):
            (pack if copy == "pack" else unpack)(small_run, out=out)
    assert not out.exists()
