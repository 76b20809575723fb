"""Reading a run larger than memory: what was measured leaves memory, and views of it stay good."""

import re
import sys
from pathlib import Path

import pytest
import torch

from divergence import Run
from divergence.run.storage import LocalBlob

STORED = Path(__file__).parents[1] / "fixtures" / "run-v2"


def mapped_file_mib() -> float:
    """File pages that count as this process's memory."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\s+(\d+)", status)[1]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_released_pages_leave_memory_and_views_stay_good(tmp_path):
    """After release the map's pages are no longer this process's; reading them again works."""
    path = tmp_path / "bytes"
    values = torch.arange(8 << 20, dtype=torch.int32)  # 32 MiB
    path.write_bytes(values.numpy().tobytes())
    blob = LocalBlob(path)
    before = mapped_file_mib()
    view = torch.frombuffer(blob.view(0, blob.size), dtype=torch.int32)
    assert torch.equal(view, values)
    touched = mapped_file_mib()
    assert touched - before > 24
    blob.release()
    assert mapped_file_mib() - before < 8
    assert torch.equal(view, values)


def test_a_part_releases_the_map_that_it_shares(tmp_path):
    """A member of an archive has no map of its own; releasing it changes nothing that is read."""
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 64)
    part = LocalBlob(path).part(256, 512, "member")
    view = part.view(0, 512)
    part.release()
    assert bytes(view) == bytes(range(256)) * 2
    part.close()  # not its own to close
    assert bytes(part.view(0, 256)) == bytes(range(256))


def test_all_that_was_read_is_given_back_in_portions(monkeypatch):
    """Of a run, when enough of it was read."""
    given_back = []
    monkeypatch.setattr("divergence.run.storage.Shard.release", lambda self: given_back.append(1))
    monkeypatch.setattr("divergence.run.reader._RELEASED_BYTES", 100)
    run = Run.open(STORED)
    run.read(next(record for record in run.records if record.place is not None))
    run.release(60)
    assert not given_back
    run.release(60)
    assert given_back
