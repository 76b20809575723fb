"""The hand-made reports, by way of a fixture: test files cannot import each other."""

from __future__ import annotations

import importlib.util
import sys
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


@pytest.fixture
def replace_api(monkeypatch):
    """``replace_api("comparison", compare=function)`` puts functions in place of an API module."""

    def replace(room: str, **functions: object) -> None:
        module = ModuleType(f"divergence.{room}.api")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return replace
