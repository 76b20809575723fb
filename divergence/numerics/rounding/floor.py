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

import math
from typing import Literal

import msgspec

from divergence.numerics.formats import Format

__all__ = ["THRESHOLDS", "Thresholds", "floor_weights"]

_ONE_ROUNDING = 0.41
_ACCUMULATOR_ROUNDOFF = 2.0**-24
_STORES = {"block": 12, "inner": 12, "trunk": 2}
_PRODUCTS = {"block": 4, "inner": 4, "trunk": 1}
_WIDENING = 4  # K is the widest inner dimension: four times the hidden size in most models


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multiples of the floor at which a site is flagged. One place, one table in docs/verdicts.md.

    ``typical``: the median token's ratio, absolutely. ``sibling``: the same over the
    median of the other sites of its kind, which share dtype, shapes and kernels and so
    are its controls. ``least_sibling``: that median is taken as at least this, because
    kernels that agree bit for bit make any difference look large. ``lone``: the same as
    ``sibling`` for a site that has no siblings (embedding, final norm, head), over the
    median of all block outputs, which tell how unlike the two sides' kernels are.
    ``token``: a single token's ratio; ``token_sibling``: over the siblings' worst tokens.
    ``forward``: one forward of one prompt, its ratio over its siblings' there, over the largest
    that a sibling shows among as many forwards (blocks.looks).
    ``standout``: the typical token's ratio over its siblings', within all limits, from which on a
    block is pointed at.
    ``free_gain``: by how much a block may enlarge an inherited relative error of its update.
    ``drift``: the free run's error over the sum of what the blocks make.
    ``escalated``: by how much all limits are wider in the escalated pass, where a wrong
    formula exceeds them a hundredfold.

    With a truth, W = err(candidate, truth) / err(reference, truth). ``truth_sibling``: a
    site's W over the median W of its siblings (or the inverse, which blames the reference):
    both sides' difficulties with this block and both sides' kernels cancel in it.
    ``truth_lone``: the same over the block outputs' median, for a site without siblings.
    ``truth_systematic``: the median W itself; ``truth_standout``: the same, within that limit,
    from which on it is pointed at: the largest W that is taken as healthy. ``truth_confirm``: W
    over its siblings' where the two sides' difference is beyond ``sibling`` as well.
    ``truth_forward``:
    one forward's W over its siblings' there, over the largest that a sibling shows among as many
    forwards. ``truth_token``, ``truth_channel``: one token's, one channel's error over the other
    side's there. ``truth_gain``: a scale error in standard deviations. ``truth_least``: in a
    family's typical error, what is added to both errors so that two tiny ones make no large ratio.
    ``truth_drift``: the W of the free run. ``widen``: room over what a ``--floor`` run shows.

    Tokens, with a truth; the floor is there the error of the side nearer to the truth.
    ``flip``: the gap, in standard deviations of the difference of two logits of the floor, beyond
    which a flip is a fault: three of them, for a healthy side whose error is W = 2.2 times the
    floor's (the largest taken as healthy, docs/verdicts.md): 3 · 2.2. ``kl``: KL between
    the sides over the floor's KL from the truth. KL is half the variance of the logits' error
    over the distribution, so it goes with the square: two independent errors give 1 + W², 2 for
    equal ones and 1 + 2.2² = 5.8 for the largest healthy W.

    Operators: ``operator``: an operator's W, each side's error with the operator's own floor in
    quadrature; PyTorch's own check of compiled kernels accepts 2 in float32 and 3 in 16 bits
    (torch/_dynamo/utils.py, ``same``). ``operator_row``, ``operator_column``: one row's, one
    column's error over the other side's there. ``operator_growth``: without a truth, the
    difference over what came in. ``operator_roundings``: what a region of products and additions
    stored in 16 bits adds by itself, in roundings of its result (an ideal product makes one, with
    its bias added afterwards or in two parts √2, in four parts 1.8, in eight 2.3).
    """

    typical: float = 6.0
    sibling: float = 4.0
    least_sibling: float = 0.25
    lone: float = 8.0
    token: float = 12.0
    token_sibling: float = 8.0
    forward: float = 2.5
    standout: float = 3.0
    free_gain: float = 4.0
    drift: float = 8.0
    escalated: float = 2.0
    truth_sibling: float = 2.5
    truth_lone: float = 4.0
    truth_systematic: float = 4.0
    truth_standout: float = 2.2
    truth_confirm: float = 1.5
    truth_forward: float = 2.0
    truth_token: float = 8.0
    truth_channel: float = 4.0
    truth_gain: float = 6.0
    truth_least: float = 0.25
    truth_drift: float = 4.0
    widen: float = 1.5
    flip: float = 6.6
    kl: float = 6.0
    operator: float = 3.0
    operator_row: float = 8.0
    operator_column: float = 6.0
    operator_growth: float = 8.0
    operator_roundings: float = 2.0


THRESHOLDS = Thresholds()


def floor_weights(
    form: Format, *, num_features: int, role: Literal["block", "inner", "trunk"]
) -> tuple[float, float]:
    """(store, update): the floor of a row is √((store ‖out‖)² + (update ‖f(x)‖)²).

    ``num_features``: length of the last axis, which tells the length K of the sums.
    Both are 0 for integer formats, where correct implementations do not differ.
    """
    u = form.unit_roundoff
    if u == 0:
        return 0.0, 0.0
    pair = math.sqrt(2) * _ONE_ROUNDING
    length = max(1, num_features) * (_WIDENING if role != "trunk" else 1)
    accumulator = min(_ACCUMULATOR_ROUNDOFF, u)
    stores = _STORES[role] * (pair * u) ** 2
    sums = _PRODUCTS[role] * length * (_ONE_ROUNDING * accumulator) ** 2
    return pair * u, math.sqrt(stores + sums)
