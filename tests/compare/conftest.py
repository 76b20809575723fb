"""The hand-made reports, by way of a fixture: test files cannot import each other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def reports() -> ModuleType:
    """tests/report/factory.py"""
    path = Path(__file__).parents[1] / "report" / "factory.py"
    spec = importlib.util.spec_from_file_location("report_factory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
