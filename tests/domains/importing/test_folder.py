"""The files of a dump: which are read, and as what."""

import numpy
import pytest
import torch
from safetensors.torch import save_file

from divergence.errors import DumpError
from divergence.run.foreign import DumpFolder


def test_good_files(tmp_path):
    """Values, dtypes and shapes as they were written; a claim on the storage alone reads no more
    than the file."""
    torch.save({"a": torch.arange(3, dtype=torch.bfloat16)}, tmp_path / "a.pt")
    numpy.save(tmp_path / "b.npy", numpy.arange(4, dtype=">f4").reshape(2, 2))
    numpy.save(tmp_path / "c.npy", numpy.float32(3))
    save_file({"x": torch.ones(2, 3), "s": torch.tensor(7)}, tmp_path / "d.safetensors")
    folder = DumpFolder(tmp_path)
    assert folder.value("a.pt")["a"].dtype == torch.bfloat16
    assert folder.value("b.npy").tolist() == [[0, 1], [2, 3]]
    assert folder.value("c.npy").shape == ()
    assert folder.value("d.safetensors")["s"].item() == 7
    assert DumpFolder(tmp_path / "b.npy").names == ["b.npy"]


def test_links_are_refused(tmp_path):
    """A link may lead out of the dump, wherever it points now."""
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "x.npy").symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(DumpError, match="no symbolic link"):
        DumpFolder(tmp_path / "dump")


def test_nothing_there(tmp_path):
    """A folder that is absent or empty is refused."""
    with pytest.raises(DumpError, match="no such file"):
        DumpFolder(tmp_path / "absent")
    with pytest.raises(DumpError, match="holds no file"):
        DumpFolder(tmp_path)
