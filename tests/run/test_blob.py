"""A shard that was changed after its run was opened."""

import pytest
import torch

from divergence import Run
from divergence.errors import RunFormatError
from divergence.run.writer import RunWriter
from tests.by_hand import put


@pytest.mark.parametrize("damage", ["removed", "cut", "garbage"])
def test_a_shard_that_is_damaged_meanwhile_is_an_error(tmp_path, manifest, damage):
    """Never a crash, nor other numbers."""
    with RunWriter(tmp_path / "run", manifest()) as writer:
        put(writer, torch.randn(1000), site="m:out")
    run = Run.open(tmp_path / "run")
    (shard,) = (tmp_path / "run/tensors").iterdir()
    if damage == "removed":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:50] if damage == "cut" else b"x" * 50)
    with pytest.raises(RunFormatError):
        run.read(run.records[0])
