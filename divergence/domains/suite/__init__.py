"""Operators by themselves: which of them does which side compute worse?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.domain import Addition, AnalysisPackage, Claim, Domain, SelftestStep, Suite

if TYPE_CHECKING:
    from divergence.run.reader import Run

_AT = "divergence.domains.suite"
_SUITES = {
    "llm": "every operator, shape, dtype and distribution",
    "quick": "float32 and bfloat16, small shapes",
}

STEPS = (SelftestStep("a suite of operators", f"{_AT}.trial:tried", slow=True),)
DOMAIN = Domain(
    name="suite",
    suites=tuple(
        Suite(name, f"{_AT}.capturing", line, takes=("--impl",)) for name, line in _SUITES.items()
    ),
    analyses={"suite": AnalysisPackage(_AT, whole=True)},
    claims={"suite": Claim(20, measured=False, alone=True)},
    parts={"suite": f"{_AT}.result:SuiteResult"},
    sentences={"suite": f"{_AT}.sentences"},
    hooks={"operators": f"{_AT}.operators:OPERATORS", "selftest": f"{_AT}:STEPS"},
    adds={
        "capture": Addition(
            examples=(
                "divergence capture suite:llm -o a                           "
                "# the operators alone, no model",
            )
        ),
    },
)


def applies(a: Run, b: Run) -> bool:
    """Are both runs of its suites?"""
    models = (a.manifest.model, b.manifest.model)
    names = [f"suite:{name}" for name in _SUITES]
    return all(model.task == "operators" and model.source in names for model in models)
