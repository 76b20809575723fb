"""Tokens: is the text the same, and if not, may rounding have done that?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Did a side generate tokens? A replay chose none: its tokens are its source's."""
    runs = (measured.reference.manifest, measured.candidate.manifest)
    return all(run.plan.replayed_pass is None for run in runs) and any(
        sample.chosen_ids for run in runs for sample in run.tokens.samples
    )
