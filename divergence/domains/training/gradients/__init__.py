"""Gradients: are those of parameters off where no block's backward is?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Two training steps."""
    return measured.reference.manifest.training.train and measured.candidate.manifest.training.train
