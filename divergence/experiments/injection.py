"""One side's error at a site, taken from two runs' records and added while the model runs.

The error of block l is what its output differs by where both sides' blocks got the same input:
the anchored pass. As a plant (recording.hooks.plant) it is added to that output in every forward,
so the rest of the model computes what it would have made of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from divergence.comparison.align.pieces import Pair
from divergence.errors import PlantError
from divergence.recording.hooks.plant import FORWARDS, Plant
from divergence.run.reader import Run
from divergence.run.schema.site import split_site
from divergence.words import Side

__all__ = ["Injection", "injections_of"]


@dataclass(slots=True)
class Injection:
    """The error of the guilty side at ``site`` (as the healthy run names it), by step."""

    site: str
    errors: dict[int, tuple[torch.Tensor, tuple[int, ...] | None]] = field(default_factory=dict)

    def plant(self) -> Plant:
        """Adds the error where there is one, in float64, rounded once to the model's dtype."""
        path, port = split_site(self.site)
        return Plant(self.site, path, port, "another run's error", self._add)

    def _add(self, tensor: torch.Tensor, forward: int) -> torch.Tensor:
        found = self.errors.get(forward % FORWARDS)
        if found is None:
            return tensor
        error, positions = found
        wide = tensor.detach().to("cpu").to(torch.float64, copy=True)  # not every device has it
        if wide.shape == error.shape:
            wide += error
        elif positions is not None and wide.ndim > 1 and max(positions) < wide.shape[1]:
            wide[:, list(positions)] += error  # only these tokens were recorded
        else:
            raise PlantError(
                f"the error recorded at {self.site} has the shape {tuple(error.shape)}, the tensor "
                f"here {tuple(tensor.shape)}",
                hint="--model PATH must name the model that the runs were made of",
            )
        return wide.to(tensor.dtype).to(tensor.device)


def injections_of(
    pairs: Iterable[Pair],
    sites: Iterable[str],
    reference: Run,
    candidate: Run,
    *,
    guilty: Side,
    sample: int,
    last_step: int,
) -> list[Injection]:
    """The errors at ``sites`` (the reference's names) in the batch that begins with ``sample``,
    up to ``last_step``. Sites of which no anchored pair is there are left out."""
    wanted = set(sites)
    found: dict[str, Injection] = {}
    for pair in pairs:
        one, two = pair.reference.record, pair.candidate.record
        if pair.pass_ != "anchored" or one.site not in wanted:
            continue
        if pair.reference.row is not None or one.sample != sample or one.step > last_step:
            continue
        own = one if guilty == "candidate" else two
        a, b = reference.read(one).double(), candidate.read(two).double()
        injection = found.setdefault(one.site, Injection(own.site))
        injection.errors[one.step] = (b - a if guilty == "candidate" else a - b, own.positions)
    return list(found.values())
