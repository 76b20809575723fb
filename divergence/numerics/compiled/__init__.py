"""The same sums, in loops compiled for this processor (numba, the extra ``fast``).

numpy makes a pass over memory for every operation; a compiled loop does them all on a value while
it is in a register, and sums in float64 throughout, so that only a nan or inf needs a second
look. What is measured, and every definition, is the same: the tests of the metrics run over both
ways. Nothing outside this folder imports numba, and nothing here is imported before
divergence.numerics.kernels has found it.

What was weighed against it: benchmarks.md, "Compare".
"""
