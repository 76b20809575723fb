"""The truth that a run carries: its own anchored pass in float64, made by the capture itself, and
with ``full`` the free one, in which errors add up and tokens flip.

The weights are there, so it takes no second command: each block gets the input that the free pass
recorded, and every operator is computed in float64 (recording.widening), an operator's weights at a
time, on the CPU where the device has no float64. It is made last, so that nothing else that is
recorded depends on it.

``auto`` keeps to a share of the time that the capture has taken until then: the prompts' prefills
first, then as many decode steps as fit, equally long for each group of prompts. What was covered
stands in the manifest. A forward costs about what the last one did.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence

import torch

from divergence.errors import UsageError
from divergence.layout import size
from divergence.numerics.floor import floor_weights
from divergence.numerics.formats import format_named
from divergence.recording.anchors import can_anchor
from divergence.recording.engines.engine import DEFAULT as TRANSFORMERS
from divergence.recording.engines.engine import QUANTIZE, Session
from divergence.recording.machine.hardware import free_bytes
from divergence.recording.model.compiled import compiled_regions
from divergence.recording.request import Request
from divergence.recording.widening import check_device
from divergence.run.floor import OwnFloor
from divergence.run.reader import Run
from divergence.run.schema.manifest import ModuleNote
from divergence.run.schema.site import module_of
from divergence.run.storage.location import Location, Url

__all__ = [
    "Allowance", "Enough", "disagreement", "keeps_tensors", "mode_of", "other_device",
    "why_no_room", "why_no_truth", "why_not_anchored",
]  # fmt: skip

DEFAULT = "auto"
"""Where no run is repeated and nothing else is asked for."""
SHARE = 0.5
"""Of the time that the capture has taken before."""
LEAST_SECONDS = 5.0
"""Less is not worth a share: small models get all of their truth."""
_BEYOND = 16.0
"""Times what rounding makes, from which on a capture says that its own float64 disagrees. The
widest limit of one token's ratio is 12."""


def mode_of(request: Request) -> str:
    """``auto``, ``full``, ``floor`` or ``no``. A run that repeats another is judged by that one's
    truth."""
    return request.truth or (DEFAULT if request.like is None and request.hooks else "no")


def keeps_tensors(request: Request) -> bool:
    """Are the truth's tensors kept, or its floor alone? No other tensors are kept, no true ones."""
    return mode_of(request) in ("auto", "full") and request.store == "full"


def why_no_truth(request: Request, session: Session, device: str, out: Location) -> str | None:
    """None if a capture can make its own truth, else why it cannot."""
    engine, plan = session.note().name, "divergence truth makes one"
    if session.loaded.ranks is not None:
        return f"of several processes {plan} in one"
    if engine not in (TRANSFORMERS, QUANTIZE):
        return f"the engine {engine} has no weights that could be widened; {plan} with transformers"
    if compiled_regions(session.loaded.module):
        return "compiled code cannot be widened"
    if request.device_map is not None:
        return f"the weights are spread over devices; {plan} on a CPU"
    if isinstance(out, Url):
        return f"it reads the recorded inputs, which lie far away; {plan}"
    if request.train and not keeps_tensors(request):
        return "of a training step there is no floor; --store full keeps its truth"
    model, elsewhere = session.loaded.module, other_device(device) is not None
    if elsewhere and (request.train or session.loaded.codes is not None):
        what = "gradients must lie" if request.train else "codes are dequantised"
        return f"{device} has no float64, and there {what}; {plan} on a CPU"
    if request.train and mode_of(request) != "full":  # gradients are as wide as their parameters
        needed = 2 * 8 * sum(parameter.numel() for parameter in model.parameters())
        if needed > free_bytes(session.loaded.device) // 2 > 0:
            return (
                f"of a training step it takes {needed / 2**30:,.1f} GiB, for all weights and "
                "their gradients in float64; --truth full makes one"
            )
    return None


def other_device(device: str) -> str | None:
    """Where the operators of a truth are computed, if ``device`` has no float64."""
    try:
        check_device(device, torch.float64)
    except UsageError:
        return "cpu"
    return None


def why_no_room(num_bytes: int) -> str | None:
    """None if what the float64 pass starts from fits beside a run that keeps none of it."""
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if num_bytes <= free // 2:
        return None
    return (
        f"its inputs take {size(num_bytes)} for the time of the capture, and {place} has "
        f"{size(free)}; TMPDIR names another place"
    )


def why_not_anchored(own: Run, notes: Mapping[str, ModuleNote]) -> str | None:
    """None if the free pass holds what the truth starts from, else why it does not."""
    if not any(note.role == "block" for note in notes.values()):
        return "the model has no blocks"
    return can_anchor(own, notes)


class Enough(Exception):  # no error: what fitted was made
    """The time that a truth may take is used up."""


class Allowance:
    """How far a truth goes. ``seconds``: in all; None for as far as the run. ``num_tokens``: of the
    prompts of each group."""

    def __init__(self, seconds: float | None, num_tokens: Sequence[int]) -> None:
        self.seconds, self._num_tokens = seconds, num_tokens
        self.num_steps: list[int] = []
        self.together = False
        """Are the steps counted by who makes many in one forward?"""
        self._begun = self._last = time.monotonic()
        self._until = self._cost = self._per_token = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def begins(self) -> bool:
        """Is the next group's prefill made? The first one's always is."""
        group = len(self.num_steps)
        self.num_steps.append(0)
        self._last = time.monotonic()
        expected = self.elapsed + self._per_token * self._num_tokens[group]
        return group == 0 or self.seconds is None or expected <= self.seconds

    def count(self, num_steps: int = 1) -> None:
        """So many steps more were made."""
        now = time.monotonic()
        self._cost, self._last = now - self._last, now
        first = self.num_steps[-1] == 0
        self.num_steps[-1] += num_steps
        if first and self.seconds is not None:
            group = len(self.num_steps) - 1
            self._per_token = self._cost / max(1, self._num_tokens[group])
            rest = self._num_tokens[group + 1 :]
            reserved = self._per_token * sum(rest)
            spare = max(0.0, self.seconds - self.elapsed - reserved)
            self._until = now + spare / (1 + len(rest))

    def goes_on(self, factor: float = 1.0) -> bool:
        """Does another forward fit, at ``factor`` times the cost of the last?"""
        return self.seconds is None or time.monotonic() + factor * self._cost <= self._until

    def after_forward(self) -> None:
        """Raises Enough where no further forward fits."""
        if self.together:
            return
        self.count()
        if not self.goes_on():
            raise Enough


def disagreement(run: Run) -> tuple[str, float] | None:
    """The block whose own float64 is farthest from the free pass, in units of what rounding makes,
    where that is far beyond it."""
    ratios: dict[str, float] = {}
    free = {record.site: record for record in run.records if record.pass_ == "free"}
    for site, record in OwnFloor(run).channels.items():
        own = free[site]
        weight = max(
            floor_weights(format_named(own.dtype), num_features=own.shape[-1], role="block")
        )
        error, energy = run.read(record).double().square().sum(dim=1).tolist()
        if weight and energy:
            ratios[site] = math.sqrt(error / energy) / weight
    worst = max(ratios, key=ratios.__getitem__, default=None)
    if worst is None or not ratios[worst] > _BEYOND:
        return None
    return module_of(worst), ratios[worst]
