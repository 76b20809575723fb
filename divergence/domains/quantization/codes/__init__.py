"""Codes: what quantisers of activations made, or that it was not recorded."""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    runs = measured.reference, measured.candidate
    return all(run.manifest.quantizes_activations for run in runs)
