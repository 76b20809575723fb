"""A thread sets the device that it will touch."""

import threading
import types

import pytest
import torch

from divergence.numerics.sums import set_device
from divergence.run import writer
from divergence.run.writer import RunWriter


def test_a_thread_sets_its_device(monkeypatch):
    """The one that it is given, or the current one; of a host or none nothing is asked."""
    asked = []
    module = types.SimpleNamespace(set_device=asked.append, current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for device in (None, torch.device("cpu"), torch.device("cuda:1"), torch.device("cuda")):
        set_device(device)
    assert asked == [torch.device("cuda:1"), 3]


def test_a_device_without_set_device_is_left_alone(monkeypatch):
    """As torch.mps."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    set_device(torch.device("mps"))


def test_the_writers_thread_sets_the_device(tmp_path, manifest, monkeypatch):
    """Before anything else; where it cannot, the run is not written, and says why."""
    asked = []

    def set_device(device):
        asked.append((threading.current_thread().name, device))
        if device.index == 7:
            raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(writer, "set_device", set_device)
    with RunWriter(tmp_path / "r", manifest(), device=torch.device("cuda:1")):
        pass
    assert asked == [("divergence-writer", torch.device("cuda:1"))]
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        RunWriter(tmp_path / "s", manifest(), device=torch.device("cuda:7")).close(complete=True)
