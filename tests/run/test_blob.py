"""A shard that was changed after its run was opened."""

import pytest
import torch

from divergence import Run
from divergence.errors import RunFormatError
from divergence.run.captured import CapturedTensor
from divergence.run.writer import RunWriter


@pytest.mark.parametrize("damage", ["removed", "cut", "garbage"])
def test_a_shard_that_is_damaged_meanwhile_is_an_error(tmp_path, manifest, damage):
    """Never a crash, nor other numbers."""
    with RunWriter(tmp_path / "run", manifest()) as writer:
        writer.put(
            CapturedTensor(torch.randn(1000)), pass_="free", sample=0, step=0, site="m:out", order=0
        )
    run = Run.open(tmp_path / "run")
    (shard,) = (tmp_path / "run/tensors").iterdir()
    if damage == "removed":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:50] if damage == "cut" else b"x" * 50)
    with pytest.raises(RunFormatError):
        run.read(run.records[0])
