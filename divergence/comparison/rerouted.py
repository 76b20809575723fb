"""Where free runs of a model with experts went apart: rounding alone may send a token elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.comparison.experts import choices_in, same_experts
from divergence.run.reader import Run

__all__ = ["free_routes_differ"]


def free_routes_differ(runs: Sequence[Run], sample: int, step: int) -> bool:
    """Did any token of this prompt go to other experts in one of these free runs, up to this step?
    It then took another way, and attention carried it to those behind. True where it is not
    known."""
    first, *others = ((run, choices_in(run)) for run in runs)
    for key, records in first[1].items():
        pass_, prompt, number, *_ = key  # of the routers' logits it has one more
        if pass_ != "free" or prompt != sample or int(number or 0) > step:
            continue
        for place, record in enumerate(records):
            found = [(first[0], record)]
            found += [(run, index[key][place]) for run, index in others
                      if len(index.get(key, ())) > place]  # fmt: skip
            if len(found) < len(runs) or not all(run.has_bytes(one) for run, one in found):
                return True
            rows = [run.read(one).flatten(0, -2).sort().values for run, one in found]
            if any(one.shape != rows[0].shape for one in rows):
                return True
            if not bool(same_experts(rows).all()):
                return True
    return False
