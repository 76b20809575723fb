"""The wrong implementations, and one small suite captured once with its truth."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from divergence import MachineOptions, Run
from tests.shared_fixtures import *  # noqa: F403


@pytest.fixture(scope="session")
def faulty() -> ModuleType:
    """benchmarks/_wrong_operators.py, which is in no package."""
    path = Path(__file__).parents[3] / "benchmarks" / "_wrong_operators.py"
    spec = importlib.util.spec_from_file_location("suite_faulty", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """(suite:quick, its truth), made once."""
    from divergence import capture
    from divergence import truth as make_truth

    folder = tmp_path_factory.mktemp("suite")
    run = capture("suite:quick", out=folder / "a", machine=MachineOptions(label="machine A"))
    return run, make_truth(run, out=folder / "truth")
