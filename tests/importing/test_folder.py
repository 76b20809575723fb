"""A dump is hostile until proven otherwise."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from divergence.errors import DumpError
from divergence.importing.folder import DumpFolder


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def _torch(path: Path, value: object) -> None:
    torch.save(value, path)


def _half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _claiming(path: Path) -> None:
    """A pickle that claims 2^26 elements of 16, in a zip whose members are whole."""
    torch.save({"a": torch.arange(16.0)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if name.endswith("data.pkl"):
                data = data.replace(b"K\x10", b"J" + struct.pack("<i", 1 << 26))
            archive.writestr(name, data)


def _packed(path: Path) -> None:
    torch.save(torch.zeros(1000), path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


BAD = {
    "code.pt": (lambda p: _torch(p, {"a": Evil()}), "which is code"),
    "bare.pt": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "could run code"),
    "empty.pt": (lambda p: p.touch(), "is empty"),
    "half.pt": (lambda p: (_torch(p, torch.ones(9)), _half(p)), "cut off"),
    "claims.pt": (_claiming, "ends at element 67108864 of 16"),
    "packed.pt": (_packed, "compressed members"),
    "spread.pt": (lambda p: _torch(p, torch.zeros(1).expand(1 << 40)), "more than is unpacked"),
    "sparse.pt": (lambda p: _torch(p, torch.eye(2).to_sparse()), "not plain numbers"),
    "half.npy": (lambda p: (numpy.save(p, numpy.arange(99.0)), _half(p)), "one array"),
    "objects.npy": (lambda p: numpy.save(p, numpy.array([{}], dtype=object)), "one array"),
    "empty.npy": (lambda p: p.touch(), "is empty"),
    "half.safetensors": (lambda p: (save_file({"x": torch.ones(99)}, p), _half(p)), "cut off"),
    "huge.safetensors": (
        lambda p: p.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "header of 1152921504606846976"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_with_the_reason(tmp_path, monkeypatch, name):
    """Nothing is executed, nothing is believed beyond the file's end."""
    monkeypatch.chdir(tmp_path)
    make, words = BAD[name]
    make(tmp_path / name)
    with pytest.raises(DumpError) as caught:
        DumpFolder(tmp_path).value(name)
    assert words in str(caught.value) and name in str(caught.value.where)
    assert not (tmp_path / "pwned").exists()


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
    with pytest.raises(DumpError, match="no such file"):
        DumpFolder(tmp_path / "absent")
    with pytest.raises(DumpError, match="holds no file"):
        DumpFolder(tmp_path)
