"""Precision: in which dtype did each part of the model really run?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Did a side record operators, or a training step?"""
    runs = measured.reference, measured.candidate
    return measured.has_operators or any(run.manifest.training.train for run in runs)
