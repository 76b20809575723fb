"""divergence: why the same model gives different numbers on different hardware.

    from divergence import capture, compare, check, Run

    a = capture("Qwen/Qwen3-0.6B", out="a")
    report = compare("a", "b")
    print(report.verdict.summary)

Importing this package imports nothing else: torch and transformers come with the
first call that needs them.

``capture``, ``compare`` and ``probe`` name a function here and a package below. Both are
true: the packages are made callable when they are loaded, so that
``divergence.compare(a, b)`` and ``import divergence.compare.result`` work in any
order.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from divergence._version import __version__
    from divergence.capture.api import capture, truth
    from divergence.compare.api import compare
    from divergence.compare.check import check
    from divergence.compare.many import compare_many
    from divergence.compare.matrix_result import Matrix
    from divergence.compare.result import Report
    from divergence.experiments.localize import localize
    from divergence.experiments.selftest import selftest
    from divergence.experiments.sensitivity import sensitivity
    from divergence.ops.replay import replay
    from divergence.ops.repro import repro
    from divergence.probe.api import probe
    from divergence.run.packing import pack, unpack
    from divergence.run.reader import Run

__all__ = [
    "Matrix",
    "Report",
    "Run",
    "__version__",
    "capture",
    "check",
    "compare",
    "compare_many",
    "localize",
    "pack",
    "probe",
    "replay",
    "repro",
    "selftest",
    "sensitivity",
    "truth",
    "unpack",
]

_HOMES = {
    "Matrix": "divergence.compare.matrix_result",
    "Report": "divergence.compare.result",
    "Run": "divergence.run.reader",
    "__version__": "divergence._version",
    "check": "divergence.compare.check",
    "compare_many": "divergence.compare.many",
    "localize": "divergence.experiments.localize",
    "pack": "divergence.run.packing",
    "replay": "divergence.ops.replay",
    "repro": "divergence.ops.repro",
    "selftest": "divergence.experiments.selftest",
    "sensitivity": "divergence.experiments.sensitivity",
    "truth": "divergence.capture.api",
    "unpack": "divergence.run.packing",
}
_VERBS = ("capture", "compare", "probe")
"""Packages that are called like functions: ``divergence.NAME.api.NAME``."""


class _Verb(ModuleType):
    """A package that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(f"{self.__name__}.api"), name)(*args, **kwargs)


class _Package(ModuleType):
    """This package. The import system assigns each sub-package once, on loading it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _VERBS and type(value) is ModuleType:
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
