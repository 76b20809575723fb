"""The constants by which comparisons decide, by who uses them, each with its source.

Beside them stand the thresholds that a policy may set (``numerics.floor.Thresholds``). "Recorded
pairs" are those of benchmarks/observations.py: 900 healthy, 541 faults in blocks, 60 with massive
activations, in three dtypes, with a truth, with the one that a run carries, and without one.
``python benchmarks/observations.py judge`` tells what an edit here changes in their answers.
"""

from __future__ import annotations

# The judge, and questions of several rooms.

FALSE_ALARM_RATE = 1e-4
"""The chance that a healthy comparison has a false alarm of the outlier question, over all it looks
at (comparison.judge). Chosen: one in ten thousand comparisons."""

HARD_TIMES = 2.0
"""Times the usual error of both sides: what both are off by beyond that is one number that both
enlarge, as sharp attention does a score's rounding (comparison.judge)."""

FEWEST_SIBLINGS = 3
"""Siblings, or forwards, from which on their median is a control and a kind is a kind: of two that
are unlike it cannot be told which is. Fewer rows show no vector that they share, and no order."""

FEW_ROWS = 8
"""With fewer rows the typical row is held to the limits of a single token, and nothing is told of
one channel, of a scale, or, where a row may be sent elsewhere, of the forward: in the median of
seven three such rows are nearly all."""

CLEAR_TIMES = 2.0
"""So many times as much is clearly more: beyond twice a limit confidence is high, and forwards are
off alone where the least of them uses twice as much of its limit as any other, and a difference
grows with the position where its last third is twice its first. Limits themselves
are known to less than that: 2.2 is the largest W of healthy kernels (docs/verdicts.md)."""

NOISE_DEVIATIONS = 3.0
"""Standard errors: rounding makes no larger a part of a difference that is in step with what it is
a difference of. It decides whether such inputs are named as the cause."""

EXPLAINED_SHARE = 0.9
"""A form is named where it explains so much of the squared difference."""

CAST_ROUNDINGS = 2.0
"""Roundings to nearest that a tensor may pass on its way: to a narrower format, and back."""

# Blocks (analyses.blocks).

LEAST_FLOORS = 0.05
"""Floors: what is added at least to both errors of a family that the truth judges
(``truth_least``), and what siblings differ by at least where a block stands out beside them. Where
all are exact but for a few bits, these are no large ratio."""

CANCELLING_TIMES = 2.0
"""Inside a block the terms of a few rows may cancel, which the rounding model does not know: so
many times ``least_sibling`` is added to them. Without it healthy decode steps of trained models are
named (tests/analyses/blocks/test_limits.py has the case)."""

SURE_LOG_ODDS = 3.0
"""Log odds of 20 to 1, from which on an answer is taken as one."""

NEAR_BITS = 0.6
"""Products whose inputs keep 10 bits, or 7, are told from others by so many bits: what a test holds
Llama, GPT-2, Qwen3 and Gemma to (numerics.floor, ``input_bits``). It decides a word of the cause
alone."""

BEGINS_TIMES = 100.0
"""A difference begins at a token whose squared error, as of nearly all that follow, is so many
times that of each before. Chosen: ten times the error. It decides a sentence of the structure
alone."""

# Operators (analyses.operators, comparison.calls).

SAME_VALUE_DISTANCE = 0.2
"""Two results are the same value where they differ by less, relatively: far beyond any rounding
and any fault worth the name, and far below what two different values of a block differ by."""

NEAR_LIMIT_SHARE = 0.55
"""Of an operator's limit: as far as healthy ones go. From there on what feeds an operator that is
beyond its limit may have made its error. Without it three of 68 recorded faults of operators are
named at a place before them."""

ENOUGH_ROWS = 16
"""Rows, or numbers that make a row's error: of fewer it may be small by chance."""

MOST_ELEMENTS_OF_CONSTANT = 64
"""Elements of a constant: more are a table."""

TWICE_ROUNDED_ROUNDOFFS = 4
"""Unit roundoffs by which two numbers may differ that are the same one, rounded twice each."""

# Tokens and experts (analyses.tokens, comparison.experts).

TIE_DEVIATIONS = 3.0
"""Standard deviations up to which rounding of the floor's own size flips a token."""

KL_TOKENS = 8
"""Independent numbers that are taken to make up the KL of one position: the tokens that are
likely. It sets how much wider the limit of few positions is."""

ROUTER_TIE_DISTANCE = 8 * 2.0**-24
"""Routers rank softmax or sigmoid of the logits in float32: so near, two logits may tie there. Two
roundings of the dtype they are recorded in, where that is more: they may have decided before."""

FEWEST_WITNESSES = 10
"""That logits decide is known from tokens chosen for alike, and from a side that follows its own on
every token. Something else that decides, a bias say, and overrules a lead of this size would have
overruled half of the smaller leads: not one of ten is a chance of 1 in 1,000."""

# Measuring (comparison.measure).

FEWER_CHANNELS_TIMES = 8.0
"""So many times fewer channels than a block has hold the energy of its rows, by their participation
ratio, where these are asked again in each channel's own unit. Ordinary blocks of the recorded pairs
come to 2.3 at most, the median one of those with massive activations to 31. Without the question a
twentieth of a block's update beside massive channels is not seen."""

SMALL_BY_CHANCE_TIMES = 4.0
"""A row of a tensor is smaller than the median one by chance by no more than that, where it has 16
numbers and more, and is then held against so much more than its own norm
(comparison.measure.rating)."""

SUMMARY_PRECISION = 2e-6
"""What two summaries may be off by, relative to the rms: 1e-6 each (numerics.summary)."""

# Forms that a difference has (comparison.invariances), and the arithmetic of devices
# (comparison.arithmetic).

WHOLE_SHIFT_DISTANCE = 0.05
"""Positions: a shift is said in whole ones where it is so near to them."""

TAKEN_BACK_TIMES = 10.0
"""What is taken back was so many times as large, before, as what differs behind it."""

COARSE_ULPS = 16.0
"""A function whose worst error passes so many ulp on one side alone is coarser, not rounded
otherwise. Chosen: four bits are lost. It decides a word of the arithmetic alone."""

# What manifests tell before a number is looked at (comparison.preflight).

EQUAL_SUMS_DISTANCE = 1e-4
"""Of the norm: sums of equal numbers, added up in float32 in another order, are nearer."""

MOVED_SUMS_DISTANCE = 1e-2
"""Of the norm: sums that an order of rows changes are farther apart, and small changes nearer."""

NEAR_WEIGHTS_DISTANCE = 0.25
"""Of the norm: what coarse codes make of weights, and hardly anything else."""

NEAR_TABLES_DISTANCE = 2.0**-18
"""Relative: powers and cosines differ by some ulps of float32 from library to library."""

# Whose a truth is (measure.truth).

SHARP_TIMES = 64.0
"""How much wider than the rounding model two float64 runs may differ."""
