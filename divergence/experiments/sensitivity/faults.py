"""Faults that have a size, from too small to be seen to gross.

Each is a plant (recording.plant) at a block's output with its argument made of the
size s, save ``update-scale``: what a block adds to the residual stream, out - in, becomes
(1 + s)(out - in), as a wrong constant inside its attention or its MLP makes it. That one has no
plant: a plant sees the output alone.

There is no zeroed head here: a head lies inside a block, whose recorded output does not tell it
apart. Plant that one for real: capture --plant 'BLOCK.self_attn.o_proj:in=zero:FIRST-LAST'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from divergence.errors import UsageError
from divergence.facts import Fact, fact
from divergence.recording.plant import parse_plant
from divergence.run.site import did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = ["DEFAULT_FAULTS", "FAULTS", "SizedFault", "faults_named"]

UPDATE_SCALE = "update-scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFault:
    """``unit``: what the size is a share of. ``phrase``: the code of the fault of one size.
    ``spelled(size, channel, num_features)``: its plant, where it has one. ``high``: the largest
    size that is tried; ``in_features``: it comes in whole features."""

    name: str
    unit: Fact
    phrase: str
    spelled: Callable[[float, int, int], str] | None
    high: float = 1.0
    in_features: bool = False

    def rounded(self, size: float, num_features: int) -> float:
        """The size that is planted where ``size`` is asked for: whole features, or as it is."""
        if not self.in_features:
            return size
        return max(1, round(size * num_features)) / num_features

    def apply(
        self,
        tensor: torch.Tensor,
        size: float,
        *,
        site: str,
        entering: torch.Tensor | None,
        channel: int,
        forward: int,
    ) -> torch.Tensor:
        """The faulty tensor, a new one. ``entering``: the block's input, of the same shape."""
        if self.spelled is not None:
            fault = self.spelled(size, channel, tensor.shape[-1])
            return parse_plant(f"{site}={fault}").apply(tensor, forward)
        assert entering is not None
        before = entering.double()
        # float64: only the result is rounded, and that to where it is stored
        return (before + (1 + size) * (tensor.double() - before)).to(tensor.dtype)


def _zero(size: float, channel: int, num_features: int) -> str:
    return f"zero:0-{max(1, round(size * num_features)) - 1}"


FAULTS = {
    fault.name: fault
    for fault in (
        SizedFault(
            name="scale",
            unit=fact("experiments.unit_of_output"),
            phrase="experiments.fault_scale",
            spelled=lambda size, _, __: f"scale:{1 + size!r}",
        ),
        SizedFault(
            name=UPDATE_SCALE,
            unit=fact("experiments.unit_of_update"),
            phrase="experiments.fault_update",
            spelled=None,
        ),
        SizedFault(
            name="noise",
            unit=fact("experiments.unit_of_rms"),
            phrase="experiments.fault_noise",
            spelled=lambda size, _, __: f"noise:{size!r}",
        ),
        SizedFault(
            name="bias",
            unit=fact("experiments.unit_of_rms"),
            phrase="experiments.fault_bias",
            spelled=lambda size, _, __: f"bias:{size!r}",
        ),
        SizedFault(
            name="channel",
            unit=fact("experiments.unit_of_channel"),
            phrase="experiments.fault_channel",
            spelled=lambda size, channel, _: f"channel:{channel}:{1 + size!r}",
            high=100.0,
        ),
        SizedFault(
            name="zero",
            unit=fact("experiments.unit_of_features"),
            phrase="experiments.fault_zero",
            spelled=_zero,
            in_features=True,
        ),
    )
}
"""Every fault by its name."""

DEFAULT_FAULTS = ("scale", UPDATE_SCALE, "noise", "bias", "channel")


def faults_named(names: Sequence[str]) -> list[SizedFault]:
    """The faults asked for, once each. Raises UsageError with what there is."""
    faults: dict[str, SizedFault] = {}
    for name in names:
        if name not in FAULTS:
            raise UsageError(
                f"no fault of growing size is called {name!r}",
                where="--faults",
                hint=did_you_mean(name, FAULTS, count=1, then=f"one of {', '.join(FAULTS)}"),
            )
        faults[name] = FAULTS[name]
    if not faults:
        raise UsageError("no fault to plant", where="--faults", hint=f"some of {', '.join(FAULTS)}")
    return list(faults.values())
