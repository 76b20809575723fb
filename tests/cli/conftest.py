"""The hand-made answers, and functions in place of an API's own."""

import sys
from types import ModuleType

import pytest

from tests.shared_fixtures import *  # noqa: F403


@pytest.fixture
def replace_api(monkeypatch):
    """``replace_api("comparison", compare=function)`` puts functions in place of an API module."""

    def replace(room: str, **functions: object) -> None:
        module = ModuleType(f"divergence.{room}.api")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return replace
