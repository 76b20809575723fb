"""What every test stands on: no network, no settings of the user, tiny models built once."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch or huggingface_hub: both read these once. Child processes inherit
# them, so a command that a test runs is as offline as the test.
_home = tempfile.mkdtemp(prefix="divergence-tests-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
for _name in [name for name in os.environ if name.startswith("DIVERGENCE_")]:
    del os.environ[_name]
os.environ |= {
    "HF_HOME": _home,
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# One thread is fastest for tensors this small, and it leaves the other cores alone.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """A connection to any host but this one fails at once and says who asked."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {address[0]}; tests run offline")
        connect(self, address)

    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", refuse)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("llama", num_blocks=2)`` → its folder; the same arguments, the same folder.

    Takes what divergence.capture.engines.tiny.build takes, less the folder. Do not write into it.
    """
    built: dict[tuple[Any, ...], Path] = {}

    def build(architecture: str, **options: Any) -> Path:
        from divergence.capture.engines import tiny

        key = (architecture, *sorted(options.items()))
        if key not in built:
            folder = tmp_path_factory.mktemp(f"tiny-{architecture}-")
            built[key] = tiny.build(architecture, folder, **options)
        return built[key]

    return build


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[..., Path]) -> Path:
    """The folder of the model that most tests use."""
    return tiny_model("llama")
