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
def invoke(capsys, monkeypatch, tmp_path):
    """``invoke(*args)`` → (exit code, stdout, stderr) of one command, in an empty directory."""
    from divergence.cli.main import app

    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app([str(arg) for arg in args], prog_name="divergence")
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


@pytest.fixture
def replace_api(monkeypatch):
    """``replace_api("comparison", compare=function)`` puts functions in place of an API module."""

    def replace(room: str, **functions: object) -> None:
        module = ModuleType(f"divergence.{room}.api")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return replace
