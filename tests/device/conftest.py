"""Programs on the simulated accelerator, each in a process of its own: a device is registered once
a process, and importing torch takes seconds, so each answers many questions."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@pytest.fixture(scope="session")
def simulated_build() -> ModuleType:
    """tests/device/fake/simulated_build.py"""
    spec = importlib.util.spec_from_file_location(
        "simulated_build", FOLDER / "fake" / "simulated_build.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def device_environment(simulated_build: ModuleType) -> dict[str, str]:
    """Variables of a process that has npu:0 and npu:1. Skips, with the reason, where no device can
    be built."""
    reason = simulated_build.why_not()
    if reason is not None:
        pytest.skip(reason)
    simulated_build.library()
    paths = [str(ROOT), str(FOLDER / "fake"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "160"}


@pytest.fixture(scope="session")
def on_device(
    device_environment: dict[str, str], llama: Path, tmp_path_factory
) -> Callable[..., Any]:
    """``on_device("stores")`` → what ``answers`` of programs/stores.py returned, on the device."""

    def run(program: str, **environment: str) -> Any:
        work = tmp_path_factory.mktemp(f"device-{program}-")
        done = subprocess.run(
            [sys.executable, FOLDER / "programs" / "commands.py", program, work, llama],
            env=device_environment | environment,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {done.stderr[-3000:]}"
        return json.loads((work / "answers.json").read_text())

    return run
