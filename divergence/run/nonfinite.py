"""Nan and inf in a run by itself: the first record that holds what no block should hand on.

From statistics alone, which every run holds but those of ``--store hash``. -inf is left to masks,
to logits and to what lies inside a block; rows of padding, which the statistics count too, are
passed over.
"""

from __future__ import annotations

from divergence.run.reader import Run
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.record import Record
from divergence.run.schema.site import is_operator_site, module_of

__all__ = ["first_nonfinite", "is_mask", "nonfinite_text"]


def is_mask(site: str) -> bool:
    """Does its name say that it tells attention what to look at? T5 adds its mask to a bias."""
    path, _, port = site.partition(":")
    words = (port, path.rpartition(".")[2])
    return any(word in part for word in ("mask", "bias") for part in words)


def first_nonfinite(run: Run) -> Record | None:
    """The first record, in execution order of the free pass, with nan or inf that is no mask's."""
    found = [
        record
        for record in run.records
        if record.pass_ == "free" and _counts(record) and not _may_be_padding(record, run.manifest)
    ]
    return min(found, key=lambda record: (record.sample, record.step, record.order), default=None)


def nonfinite_text(record: Record) -> str:
    """``model.layers.1:out (sample 0, step 0) holds 64 nan and 0 inf among 64 elements``"""
    assert record.summary is not None
    num_inf = record.summary.num_posinf + record.summary.num_neginf
    return (
        f"{record.site} (sample {record.sample}, step {record.step}) holds "
        f"{record.summary.num_nan} nan and {num_inf} inf among {record.numel} elements"
    )


def _counts(record: Record) -> int:
    summary = record.summary
    if summary is None or is_operator_site(record.site):
        return 0
    return summary.num_nan + (0 if is_mask(record.site) else summary.num_posinf)


def _may_be_padding(record: Record, manifest: Manifest) -> bool:
    """Are there rows of padding, or is it inside a block, where they may be anything?"""
    note = manifest.plan.modules.get(module_of(record.site))
    if note is None or note.role == "inner":
        return True
    if record.step > 0 or record.positions is not None:
        return False
    group = next((g for g in manifest.tokens.groups if g and g[0] == record.sample), [])
    samples = [manifest.tokens.samples[number] for number in group]
    return any(sample.num_left_pad or sample.num_right_pad for sample in samples)
