"""Precision policies: in which dtypes frameworks keep and add up what a training step has, read
from their own settings and written as options of ``capture --train``."""
