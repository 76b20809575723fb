"""Code: what did the onset's block run otherwise, and whose is the truth?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Did the sides run other code, have parameters that are not contiguous, or is there a truth,
    whose code is one side's?"""
    differs = any(line.check == "code" and line.status == "differs" for line in measured.preflight)
    judged = measured.truth is not None or measured.floor is not None
    return (
        differs
        or judged
        or any(
            note.strides is not None
            for run in (measured.reference, measured.candidate)
            for note in run.manifest.model.parameters.values()
        )
    )
