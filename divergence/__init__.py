"""divergence: why the same model gives different numbers on different hardware.

    from divergence import capture, compare, check, Run

    a = capture("Qwen/Qwen3-0.6B", out="a")
    report = compare("a", "b")
    print(report.verdict.summary)

Importing this package imports nothing else: torch and transformers come with the
first call that needs them. Comparing runs, checking and reading them needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from divergence._version import __version__
    from divergence.comparison.api import compare
    from divergence.comparison.result import Report
    from divergence.domains import public
    from divergence.domains.public import *  # noqa: F403 - what the domains add
    from divergence.experiments.diff import DiffResult, diff
    from divergence.experiments.localization.localize import localize
    from divergence.experiments.result import SelfcheckResult
    from divergence.experiments.selfcheck import selfcheck
    from divergence.experiments.selftest import selftest
    from divergence.experiments.sensitivity import sensitivity
    from divergence.fleet.many import compare_many
    from divergence.fleet.result import Matrix
    from divergence.gate.check import check
    from divergence.ops.replay import replay
    from divergence.ops.reproducer import repro
    from divergence.options.commands import (
        BatchOptions,
        CaseOptions,
        LoadOptions,
        MachineOptions,
        RecordOptions,
    )
    from divergence.recording.any_module import record
    from divergence.recording.api import capture, truth
    from divergence.run.reader import Run
    from divergence.run.target import pack, unpack
    from divergence.sending import bundle

    __all__ = [
        "BatchOptions",
        "CaseOptions",
        "DiffResult",
        "LoadOptions",
        "MachineOptions",
        "Matrix",
        "RecordOptions",
        "Report",
        "Run",
        "SelfcheckResult",
        "__version__",
        "bundle",
        "capture",
        "check",
        "compare",
        "compare_many",
        "diff",
        "localize",
        "pack",
        "record",
        "replay",
        "repro",
        "selfcheck",
        "selftest",
        "sensitivity",
        "truth",
        "unpack",
    ]
    __all__ += public.__all__

_HOMES = {
    "BatchOptions": "divergence.options.commands",
    "CaseOptions": "divergence.options.commands",
    "DiffResult": "divergence.experiments.diff",
    "LoadOptions": "divergence.options.commands",
    "MachineOptions": "divergence.options.commands",
    "Matrix": "divergence.fleet.result",
    "RecordOptions": "divergence.options.commands",
    "Report": "divergence.comparison.result",
    "Run": "divergence.run.reader",
    "SelfcheckResult": "divergence.experiments.result",
    "__version__": "divergence._version",
    "bundle": "divergence.sending",
    "capture": "divergence.recording.api",
    "check": "divergence.gate.check",
    "compare": "divergence.comparison.api",
    "compare_many": "divergence.fleet.many",
    "diff": "divergence.experiments.diff",
    "localize": "divergence.experiments.localization.localize",
    "pack": "divergence.run.target",
    "record": "divergence.recording.any_module",
    "replay": "divergence.ops.replay",
    "repro": "divergence.ops.reproducer",
    "selfcheck": "divergence.experiments.selfcheck",
    "selftest": "divergence.experiments.selftest",
    "sensitivity": "divergence.experiments.sensitivity",
    "truth": "divergence.recording.api",
    "unpack": "divergence.run.target",
}
"""By name: the module. Those of domains stand in each domain's ``public``."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return _placed(_HOMES[name], name)
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from divergence.domain import added

    homes = _HOMES | added("public")
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _placed(homes[name], name)


def _placed(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        from divergence.errors import missing

        lacking = missing(error)
        if lacking is None:
            raise
        raise lacking from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
