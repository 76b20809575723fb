"""Rows whose terms cancel: their own norm is no measure of their error, which is that of the terms.

*A parameter's gradient* is a sum over tokens. Where its terms cancel the row is small and their
rounding is not, so such a row is held against the median row. All rows of a bias's gradient may
cancel: that of keys without rotary positions is zero, since what adds the same to all scores
changes no softmax. The size of its terms is known from the weight's gradient of the same module:
with g_t entering the module's backward at token t, and x_t its D inputs of rms 1 (as norms leave
them),

    ‖db‖ = ‖Σ g_t‖     ‖dW‖ = ‖Σ g_t x_tᵀ‖ ≈ √D √(Σ ‖g_t‖²)

so ‖dW‖/√D is what the terms of db come to where they do not cancel. Smaller inputs make that too
small, and the limit as narrow as without it; larger ones make the limit as much wider, for a bias
whose terms cancel.

*The loss*, and what passes the last norm backward, are small where a model predicts well.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from divergence.numerics.floor import ACCUMULATOR_ROUNDOFF
from divergence.numerics.formats import Format
from divergence.numerics.pairs.metrics import RowMetrics
from divergence.run.reader import Run
from divergence.run.schema.contents import num_labels
from divergence.run.schema.record import Record
from divergence.run.schema.site import BACKWARD, LOSS, module_of, of_parameter

__all__ = ["cancels", "small_rows", "usual_norm"]


def cancels(site: str, role: str | None) -> bool:
    """May its terms cancel, as those of the loss, and of gradients of parameters, inside blocks and
    behind the last one do? ``role``: of its module; None where it is none of the model's."""
    if module_of(site) == LOSS:
        return site.endswith(":out")
    trunk = role == "trunk" and site.endswith(f"{BACKWARD}:out")
    return of_parameter(site) or trunk or (role == "inner" and BACKWARD in site)


def small_rows(rows: RowMetrics, usual: float) -> RowMetrics:
    """Of what is made of terms that may cancel: errors are held against ``usual``, where a row is
    less. Where it is 0, no such measure is known, and they stay as they are."""
    if not usual:
        return rows
    with np.errstate(all="ignore"):
        held = np.maximum(rows.norm, usual)
        return msgspec.structs.replace(
            rows,
            rel_l2=np.where(np.isnan(rows.rel_l2), math.nan, rows.diff / held),
            norm=np.where(rows.diff > 0, held, rows.norm),  # a row of zeros on both sides is none
        )


def usual_norm(run: Run, record: Record, norm: np.ndarray, form: Format, role: str) -> float:
    """What errors are held against in rows of ``norm`` (T,) whose terms cancelled. Of a gradient,
    the median row or the terms of a bias; outside blocks, its terms. Of the loss its terms, which
    are computed in float32, in roundings of ``form``."""
    if module_of(record.site) == LOSS:
        return _loss_terms(run, record) * min(1.0, ACCUMULATOR_ROUNDOFF / form.unit_roundoff)
    if role == "trunk" and record.site.endswith(f"{BACKWARD}:out"):
        return _gradient_terms(run, record)
    middle = float(np.median(norm[norm > 0])) if (norm > 0).any() else 0.0
    return max(middle, size_of_terms(run, record))


def _gradient_terms(run: Run, record: Record) -> float:
    """A module that makes its input k times as large makes a gradient that passes it so, too. Less
    is left where terms cancel: a norm takes the part along its input away, and where a prediction
    is good but not sure that is nearly all. 0 where it is not known."""
    path = module_of(record.site)
    sizes = []
    for site in (f"{path}{BACKWARD}:in", f"{path}:out", f"{path}:in"):
        beside = run.find((record.pass_, record.sample, record.step, site)) or run.find(
            ("free", record.sample, record.step, site)
        )
        if beside is None or beside.summary is None or not beside.summary.rms:
            return 0.0
        sizes.append(beside.summary.rms)
    gradient, made, given = sizes
    return gradient * made / given * math.sqrt(record.shape[-1] if record.shape else 1)


def _loss_terms(run: Run, record: Record) -> float:
    """A token that is predicted well makes a loss of log(1 + ε) over the number of labels, and a
    gradient of (p - 1) over that, both from terms of 1: these are what rounds."""
    labels = [num_labels(sample) for sample in run.manifest.tokens.samples]
    share = 1 if BACKWARD in record.site else max(labels, default=1)
    return share / max(1, sum(labels))


def size_of_terms(run: Run, record: Record) -> float:
    """What the terms of a bias's gradient come to, by the weight's beside it; 0 where it is no
    bias, or that is not known."""
    path, _, port = record.site.partition(":")
    if not of_parameter(record.site) or not path.endswith(BACKWARD) or not port.endswith(".bias"):
        return 0.0
    beside = f"{path}:{port.removesuffix('bias')}weight"
    weight = run.find((record.pass_, record.sample, record.step, beside))
    if weight is None or weight.summary is None or not weight.summary.rms:
        return 0.0
    return float(weight.summary.rms * math.sqrt(record.numel))
