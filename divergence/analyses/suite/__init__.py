"""Suite: operators by themselves. Which does which side compute worse?"""

from divergence.run.reader import Run

_COLLECTIVES = "suite:collectives"
"""Judged by an analysis of its own."""


def applies(a: Run, b: Run) -> bool:
    """Where both runs are of operator suites."""
    models = (a.manifest.model, b.manifest.model)
    return all(
        model.task == "operators"
        and model.source.startswith("suite:")
        and model.source != _COLLECTIVES
        for model in models
    )
