"""The floor: how far apart two correct implementations of one dtype may be at one site.

A stated model, not a fit. Both sides compute the same formula from the same input;
they differ in the roundings of stored intermediates and in the order of additions.
Write u for the unit roundoff of the storage format and u32 = 2^-24 for that of the
accumulator (16-bit formats accumulate in float32 on every current matrix unit).

Rounding to nearest gives a relative error that is uniform in its binade; its rms is
0.41 u (|e| <= ulp/2, averaged over a logarithmic mantissa). Two independent roundings
differ by √2 · 0.41 u = 0.58 u.

One token's row of a residual block, out = x + f(x), then differs by

    s² = (0.58 u ‖out‖)²                                  both sides store the stream
       + (‖f(x)‖)² · [ n_r (0.58 u)²                      stored intermediates within f
                     + n_g K (0.41 u32)² ]                 sums of K terms, added otherwise

with n_r = 12 stored intermediates on the longest path (two norms of two stores,
projection, rotation, scores, softmax, weighted sum, output projection, gate product,
down projection) and n_g = 4 matrix products on it. A sum of K terms of random sign,
added one after the other, makes an error of 0.41 u32 √(K/2) relative to its result
(partial sums grow like √k); two different orders √2 of that. Blocked and pairwise
additions stay below it, so it is an upper typical value, not a worst case. A site
that adds to no stream (embedding, norm, head, an inner module) is the same with
f = out.

Attention scores of magnitude |s| turn a relative error into |s| times as much in the
probabilities; trained models reach |s| of 10 and more. That, fused and unfused
stores, and other polynomials for exp and rsqrt are why a threshold is a multiple
of this floor (THRESHOLDS) and not the floor itself.

Sources: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections
2.8 and 4.5 (statistical error of sums); Higham and Mary, SIAM J. Sci. Comput. 41,
2019 (probabilistic bounds, √n).
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import msgspec

from divergence.errors import ConfigError
from divergence.numerics.formats import Format, format_named

ONE_ROUNDING = 0.41
ACCUMULATOR_ROUNDOFF = 2.0**-24
_STORES, _PRODUCTS = 12, 4
"""Inside a block, on the way from its input to its output."""
_TRUNK_STORES, _TRUNK_PRODUCTS = 2, 1
"""Of a module outside all blocks."""
_WIDENING = 4  # K is the widest inner dimension: four times the hidden size in most models

# Of log-probabilities: what rounding explains, as a mean of |Δ log p| in nats, by the dtype that a
# side computed in. A random Llama of 16 blocks, whose logits spread by 3 nats, is 0.069 nats from
# its own float64 in bfloat16 (``benchmarks/logprobs.py`` prints it), and two such sides √2 times
# that from one another: 0.1, and 0.125 here. Random models gather more rounding than trained ones,
# so this is a wide bound. float16 has three bits more; float32, whose accumulators are no wider
# than its stores, shows 4e-6 there and more where sums are longer.

LOGPROB_LIMIT_BY_DTYPE = {
    "bfloat16": 2.0**-3,
    "float16": 2.0**-6,
    "float32": 2.0**-14,
    "float64": 2.0**-20,
}
LOGPROB_LIMIT_WIDEST = LOGPROB_LIMIT_BY_DTYPE["bfloat16"]
"""Of the widest dtype whose rounding is called rounding: narrower ones are another quantisation."""

ENOUGH = 64
"""With this many values, thresholds already hold what is left of chance."""
_RARE = 1e-6
_DEVIATIONS = 3.7


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multiples of the floor at which a site is flagged. docs/verdicts.md has the table.

    Siblings are the other sites of a site's kind. They share its dtype, shapes and kernels, and so
    are its controls. With a truth, W = err(candidate, truth) / err(reference, truth). For tokens,
    the floor is the error of the side nearer to the truth.
    """

    typical: float = 6.0
    """The median token's ratio."""
    least_sibling: float = 0.5
    """Floors that are added to a typical ratio (as squares) where it is held against siblings.
    Kernels that agree bit for bit would otherwise make any difference look large."""
    ratio_spread: float = 0.2
    """What the log of healthy typical ratios varies by from sibling to sibling, beyond chance, over
    all forwards and in each (comparison.judge). Tried on recorded pairs: with 0.25 some faults are
    lost (benchmarks/observations.py judge)."""
    token: float = 12.0
    """A single token's ratio, wider where a number or two hold its error. Tried on recorded pairs:
    benchmarks/observations.py judge."""
    standout: float = 3.0
    """The typical token's ratio over its siblings', within all limits, from which on a block is
    pointed out."""
    free_gain: float = 4.0
    """How much a block may enlarge an inherited relative error of its update."""
    drift: float = 8.0
    """The free run's error over the sum of what the blocks make."""
    escalated: float = 2.0
    """Factor on all limits in the escalated pass. A wrong formula exceeds them a hundredfold."""
    site_spread: float = 0.08
    """What log W of healthy kernels varies by from sibling to sibling, beyond chance, over all rows
    (comparison.judge). Tried on recorded pairs, as the next two: benchmarks/observations.py judge.
    """
    forward_spread: float = 0.12
    """The same in one forward of one prompt."""
    row_spread: float = 0.2
    """The same of one row, or of one channel over all rows; and of one column or slice of an
    operator's result, which has no siblings."""
    lone_spread: float = 0.3
    """The same of a site without siblings (embedding, final norm, head), beside the block outputs'
    median W, and of its ratio beside their median ratio; and of one row of an operator's result:
    within a block errors come of fewer numbers than a row's columns show."""
    truth_systematic: float = 4.0
    """The median W itself."""
    truth_standout: float = 1.3
    """The median W, within that limit and beyond chance, from which on it is pointed out: one
    side's arithmetic is coarser. A healthy pair of a CPU and a GPU reaches 1.4, within chance."""
    truth_confirm: float = 1.5
    """By how much two errors of one size may differ: from there on one is the larger."""
    truth_least: float = 0.25
    """Share of a family's typical error that is added to both errors, so that two tiny ones make no
    large ratio."""
    truth_drift: float = 4.0
    """W of the free run."""
    widen: float = 1.5
    """Room over what a ``--floor`` run shows."""
    flip: float = 6.6
    """A flip across a larger gap is a fault. In standard deviations of the difference of two logits
    of the floor: 3 · 2.2, three of them for a side whose error is W = 2.2 times the floor's, the
    largest taken as healthy (docs/verdicts.md)."""
    kl: float = 6.0
    """KL between the sides over the floor's KL from the truth. KL is half the variance of the
    logits' error, so two independent errors give 1 + W²: 2 for equal ones, 1 + 2.2² = 5.8 for the
    largest healthy W."""
    operator: float = 3.0
    """An operator's W, each error with the operator's floor in quadrature. PyTorch's check of
    compiled kernels accepts 2 in float32 and 3 in 16 bits (torch/_dynamo/utils.py, ``same``)."""
    operator_growth: float = 8.0
    """Without a truth: the difference over what came in."""
    operator_roundings: float = 2.0
    """What a region of products and additions stored in 16 bits adds by itself, in roundings of its
    result. An ideal product makes one; √2 with its bias added afterwards or in two parts, 1.8 in
    four parts, 2.3 in eight."""

    @property
    def of_one_machine(self) -> Thresholds:
        """Tighten the limits where nothing that is recorded lets two runs differ, since there are
        no other kernels to leave room for: a side that is coarser, in one block or in all, is so
        beyond chance. What was chosen otherwise than by default stays."""
        narrower = {"site_spread": ALLOWED[0], "truth_systematic": self.truth_standout}
        usual = {name for name in narrower if getattr(self, name) == getattr(THRESHOLDS, name)}
        return msgspec.structs.replace(
            self, **{name: value for name, value in narrower.items() if name in usual}
        )


THRESHOLDS = Thresholds()


@functools.lru_cache(maxsize=256)
def floor_weights(form: Format, *, num_features: int, in_block: bool = True) -> tuple[float, float]:
    """(store, update): the floor of a row is √((store ‖out‖)² + (update ‖f(x)‖)²).

    ``num_features``: length of the last axis, which tells the length K of the sums. ``in_block``:
    of a repeated block or a module inside one; else of one of the trunk.
    Both are 0 for integer formats, where correct implementations do not differ.
    """
    u = form.unit_roundoff
    if u == 0:
        return 0.0, 0.0
    pair = math.sqrt(2) * ONE_ROUNDING
    stores, products, widening = _TRUNK_STORES, _TRUNK_PRODUCTS, 1
    if in_block:
        stores, products, widening = _STORES, _PRODUCTS, _WIDENING
    length = max(1, num_features) * widening
    accumulator = min(ACCUMULATOR_ROUNDOFF, u)
    stored = stores * (pair * u) ** 2
    sums = products * length * (ONE_ROUNDING * accumulator) ** 2
    return pair * u, math.sqrt(stored + sums)


_IN_A_BLOCK = 1.9
"""What coarse inputs to all products of a block make of its update's error, over what they make of
one product's: a test holds Llama, GPT-2, Qwen3 and Gemma to it, within 0.6 bits."""


def input_bits(ratio: float, num_features: int) -> float:
    """Return the fraction bits of products' inputs that make a block's float32 error so many
    floors.

    Two inputs, each off by 0.41 u, make a product's error √2 · 0.41 u of it, and a sum of products
    of either sign has the same relative error, whatever its length. ``ratio``: of the update's
    floor.
    """
    _, update = floor_weights(format_named("float32"), num_features=num_features)
    roundoff = ratio * update / (math.sqrt(2) * ONE_ROUNDING * _IN_A_BLOCK)
    return -math.log2(roundoff) - 1 if roundoff > 0 else math.inf


def norm_floor(num_values: int, *, lanes: int = 8) -> float:
    """The floor of the L2 norm of so many values, relative to it: their squares are added up in
    float32, one after the other at worst.

    Squares have one sign, so partial sums grow like k and K additions make an error of
    0.41 u32 √(K/3) of the sum, two orders √2 of that; the root halves it.

    Where the sum is large, what is below half its ulp q is lost, and both sides lose it. Squares
    of normal numbers of mean σ² lie dense near 0, so an addition loses 0.083 σ² (q/σ²)^1.5 (0.208,
    which is -ζ(-1/2), over √2π). With q = 1.4 u32 k σ² on average, K additions lose 0.4 · 0.083 ·
    (1.4 u32 K)^1.5 of the sum. torch adds float32 in 8 ``lanes``, each of K / 8, float16 in one:
    its norm of 16 million numbers is 6.5e-4 and 1.4e-2 off.
    """
    pair = math.sqrt(2) * ONE_ROUNDING
    chance = pair * ACCUMULATOR_ROUNDOFF * math.sqrt(num_values / 3)
    lost = 0.033 * (1.4 * ACCUMULATOR_ROUNDOFF * num_values / lanes) ** 1.5
    return min(1.0, math.hypot(chance, lost)) / 2


# What a threshold may be. Correct kernels reach 2.2 floors, a fault that leaves no digit right some
# 1 / u = 256 in bfloat16: both lie inside. A limit of zero would flag every healthy pair, one of a
# billion would excuse every fault, and nan is above and below nothing. Chance alone moves few
# numbers farther, so limits are wider for them (``spread``, ``rare_ratio``).

ALLOWED = (0.01, 1000.0)
"""The least and the largest threshold."""


def check_thresholds(thresholds: Thresholds, *, where: str = "thresholds") -> None:
    """Raise ConfigError for a multiple of the floor that is none."""
    for name in thresholds.__struct_fields__:
        check_range(getattr(thresholds, name), ALLOWED, where=f"{where}: thresholds.{name}")


def check_range(value: float, allowed: tuple[float, float], *, where: str) -> None:
    """Raise ConfigError for a number outside ``allowed``, and for nan."""
    least, most = allowed
    # written as "not <=", so that a nan is in no range
    if not (math.isfinite(value) and least <= value <= most):
        raise ConfigError(
            f"{value:g} is out of range; allowed is {least:g} to {most:g}", where=where
        )


def share_from_nothing(ratio: float, limit: float) -> float:
    """Return how much of its limit a ratio of two errors uses: 0 where they are the same, 1 at the
    limit, in between as their logarithms are; beyond it, how many times it is the limit."""
    if ratio >= limit or limit <= 1:
        return ratio / limit
    return math.log(ratio) / math.log(limit) if ratio > 1 else 0.0


@functools.lru_cache(maxsize=4096)
def spread(num_values: int, *, num_looks: int = 1) -> float:
    """Return by how much the relative error of few numbers may exceed that of many, by chance
    alone.

    With error and signal of n random numbers each, the square of their ratio has the
    F(n, n) distribution, whose logarithm has about the variance 4/n + 4/n² (2 ψ'(n/2)).
    3.7 standard deviations: less than one in 1,000 (its tail is heavier than a normal one).
    The thresholds themselves hold the width that is left at 64 numbers. A router over 4
    experts, one token: 4 numbers.

    ``num_looks``: of how many such errors the largest is judged. Each is then given its share of
    the chance that one look has (Bonferroni: p / n), so that the chance of any false alarm stays
    that of one look, whether the looks depend on each other or not.
    """

    def width(n: int, deviations: float) -> float:
        return deviations / 2 * math.sqrt(4 / n + 4 / n**2)

    deviations, normal = _DEVIATIONS, NormalDist()
    if num_looks > 1:  # which the largest of so many exceeds as rarely as one exceeds 3.7
        deviations = -normal.inv_cdf(normal.cdf(-_DEVIATIONS) / num_looks)
    wanted = width(max(1, num_values), deviations)
    return math.exp(max(0.0, wanted - width(ENOUGH, _DEVIATIONS)))


def rare_ratio(num_values: int) -> float:
    """Return how much wider a limit of two errors' ratio must be for few numbers than for 64, where
    one in a million healthy ones may exceed it: the operators of one block are thousands of
    questions.

    The square of the ratio of two rms errors of n random numbers has the F(n, n) distribution,
    whose tail is P(F > f) ≈ 2 / (n B(n/2, n/2)) f^(-n/2); of a single number it is
    Cauchy's. Beyond 64 numbers the normal approximation (``spread``) does.
    """

    def ratio(n: int) -> float:
        beta = 2 * math.lgamma(n / 2) - math.lgamma(n)
        return math.exp((math.log(2 / n / _RARE) - beta) / n)

    return max(1.0, ratio(max(1, num_values)) / ratio(ENOUGH))
