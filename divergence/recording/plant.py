"""A capture may put something in place of a value: known faults, and another run's results.

A plant is proof that a set-up would see a real fault. ``SITE=FAULT``: a fault is ``NAME`` or
``NAME:ARGUMENT``, with ``@RANK`` behind it for one process of several, or ``@sample=N``,
``@step=N``, ``@rank=N`` (several with commas) for one prompt, one forward or one process alone. A
padded batch counts as its first prompt. Random faults draw from torch's CPU generator under a seed
made of the fault's own seed and the forward number, so that the same plant is the same on every
machine.

A substitute is the causal check of a suspicion. If an operator is what makes a side wrong, then
with the healthy side's result in its place everything that follows must be as near to the truth as
the healthy side is; what stays wrong has another cause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch

from divergence.errors import PlantError, UsageError
from divergence.numerics.formats import format_named
from divergence.run.contents import site_names
from divergence.run.reader import Run
from divergence.run.site import did_you_mean, is_operator_site, one_or_more, split_site

FORWARDS = 100_003
"""A forward's number is sample · FORWARDS + step: more than any run has steps, and a prime, so
that seeds made of it differ."""

Change = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault at a site. ``apply(tensor, forward)`` returns the faulty tensor, a new one."""

    site: str
    path: str
    port: str
    fault: str
    """The change's name in the manifest."""
    change: Change
    """Any function of the tensor and the forward's number (see FORWARDS)."""
    rank: int | None = None
    """The one process that gets the fault; None for all."""
    sample: int | None = None
    """The one prompt that gets the fault; None for all."""
    step: int | None = None
    """The one forward that gets the fault; None for all."""

    def meets(self, forward: int) -> bool:
        """Does that forward get it?"""
        sample, step = divmod(forward, FORWARDS)
        return self.sample in (None, sample) and self.step in (None, step)

    def apply(self, tensor: torch.Tensor, forward: int) -> torch.Tensor:
        """Raises PlantError where the fault does not fit the tensor."""
        if not tensor.is_floating_point():
            raise PlantError(
                f"cannot plant {self.fault} at {self.site}: the tensor there is "
                f"{str(tensor.dtype).removeprefix('torch.')}, not floating point"
            )
        if tensor.numel() == 0:
            return tensor
        try:
            return self.change(tensor, forward).to(tensor.dtype)
        except (IndexError, RuntimeError, TypeError) as error:
            raise PlantError(
                f"cannot plant {self.fault} at {self.site} of shape {tuple(tensor.shape)}: {error}"
            ) from error


def parse_plant(text: str) -> Plant:
    """``"model.layers.3:out=scale:1.01"`` → Plant. Raises PlantError with the list of faults."""
    site, equals, fault = text.partition("=")
    if not equals or not fault:
        raise PlantError(f"{text!r} is not SITE=FAULT", hint=_LIST_OF_FAULTS)
    try:
        path, port = split_site(site)
    except UsageError as error:
        raise PlantError(error.message, where=f"--plant {text}", hint=error.hint) from error
    does, at, place = fault.partition("@")
    only = _only(place, text) if at else {}
    name, *arguments = does.split(":")
    if name not in FAULTS:
        first, *faults = _LIST_OF_FAULTS
        near = did_you_mean(name, FAULTS, count=1, then=first)
        raise PlantError(f"unknown fault {name!r}", where=f"--plant {text}", hint=(near, *faults))
    syntax, maker = FAULTS[name]
    try:
        change = maker(*arguments)
    except (TypeError, ValueError, UsageError) as error:
        raise PlantError(
            f"cannot understand fault {fault!r}: {str(error).splitlines()[0]}",
            where=f"--plant {text}",
            hint=syntax,
        ) from error
    return Plant(site, path, port, fault, change, **only)


def _only(place: str, text: str) -> dict[str, int]:
    """``"1"`` → rank 1; ``"sample=2,step=0"`` → that prompt's prefill."""
    only: dict[str, int] = {}
    for part in place.split(","):
        name, equals, number = part.partition("=")
        name, number = (name, number) if equals else ("rank", name)
        if name not in ("rank", "sample", "step") or not number.isdecimal() or name in only:
            raise PlantError(
                f"{part!r} is no rank, sample or step",
                where=f"--plant {text}",
                hint="for example scale:1.05@1 (rank 1), scale:1.05@sample=2,step=0",
            )
        only[name] = int(number)
    return only


def check_places(plants: Iterable[Plant], modules: Collection[str], *, num_ranks: int) -> None:
    """Raise PlantError for a module or rank that is not there."""
    for plant in plants:
        if plant.path not in modules:
            raise PlantError(
                f"no module {plant.path!r} to plant a fault at",
                hint=did_you_mean(plant.path, modules) or None,
            )
        if plant.rank is not None and plant.rank >= num_ranks:
            raise PlantError(
                f"there is no rank {plant.rank} to plant {plant.site}={plant.fault} on",
                hint="ranks are those of torchrun and --mesh, counted from 0",
            )


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    # On the CPU: not every device has float64.
    return tensor.detach().to("cpu").double().square().mean().sqrt().to(torch.float32)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the fault above the storage format, so that only the result is rounded."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def _scale(factor: str) -> Change:
    value = float(factor)
    return lambda tensor, _: _wide(tensor) * value


def _bias(share: str) -> Change:
    value = float(share)
    return lambda tensor, _: _wide(tensor) + value * _rms(tensor).to(tensor.device)


def _noise(share: str, seed: str = "0") -> Change:
    value, base = float(share), int(seed)

    def change(tensor: torch.Tensor, forward: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((base * 1_000_003 + forward) % 2**63)
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        return _wide(tensor) + value * _rms(tensor).to(tensor.device) * noise.to(tensor.device)

    return change


def _channel(index: str, factor: str) -> Change:
    which, value = int(index), float(factor)

    def change(tensor: torch.Tensor, _: int) -> torch.Tensor:
        out = _wide(tensor).clone()
        out[..., which] *= value
        return out

    return change


def _zero(features: str = "") -> Change:
    low, _, high = features.partition("-")
    first, last = (int(low), int(high or low)) if features else (0, -1)
    if features and last < first:
        raise ValueError(f"the range {features} holds nothing")

    def change(tensor: torch.Tensor, _: int) -> torch.Tensor:
        out = tensor.clone()
        if not features:
            return out.zero_()
        if last >= tensor.shape[-1]:
            raise IndexError(f"feature {last} of {tensor.shape[-1]}")
        out[..., first : last + 1] = 0
        return out

    return change


def _cast(name: str) -> Change:
    form = format_named(name)
    if form.kind == "int":
        top = float(torch.iinfo(form.torch_dtype).max)

        def change(tensor: torch.Tensor, _: int) -> torch.Tensor:
            # symmetric per-tensor quantisation: scale = absmax / top code
            wide = _wide(tensor)
            scale = wide.abs().amax().clamp_min(1e-30) / top
            return (wide / scale).round() * scale

        return change
    if form.kind != "float":
        raise ValueError(f"{name} is no number format to round through")
    limit = torch.finfo(form.torch_dtype).max
    # Saturating, as accelerators cast: float8_e4m3fn would otherwise make nan of large values.
    return lambda tensor, _: (
        _wide(tensor).clamp(-limit, limit).to(form.torch_dtype).to(torch.float32)
    )


def _roll(count: str = "1") -> Change:
    shift = int(count)

    def change(tensor: torch.Tensor, _: int) -> torch.Tensor:
        if tensor.ndim < 2:
            raise IndexError("a tensor with a token axis is needed")
        return torch.roll(tensor, shift, dims=-2)

    return change


def _poke(value: float) -> Callable[..., Change]:
    def make(index: str = "0") -> Change:
        where = int(index)

        def change(tensor: torch.Tensor, _: int) -> torch.Tensor:
            out = tensor.clone(memory_format=torch.contiguous_format)
            out.view(-1)[where] = value
            return out

        return change

    return make


FAULTS: dict[str, tuple[str, Callable[..., Change]]] = {
    "scale": ("scale:FACTOR         multiply by FACTOR, for example scale:1.01", _scale),
    "bias": ("bias:SHARE           add SHARE × the tensor's rms to every element", _bias),
    "noise": ("noise:SHARE[:SEED]   add Gaussian noise of SHARE × the tensor's rms", _noise),
    "channel": ("channel:INDEX:FACTOR multiply one feature (last axis) by FACTOR", _channel),
    "zero": ("zero[:FIRST-LAST]    set to zero, all of it or a range of features (a head)", _zero),
    "cast": ("cast:FORMAT          round through a lower format, e.g. cast:float8_e4m3fn", _cast),
    "roll": ("roll[:N]             shift along the token axis by N (default 1)", _roll),
    "nan": ("nan[:INDEX]          one element (flat index, default 0) becomes nan", _poke(nan)),
    "inf": ("inf[:INDEX]          one element becomes +inf", _poke(inf)),
}
"""Every fault by name: its syntax, and what makes it of its arguments."""
_LIST_OF_FAULTS = (
    "for example --plant model.layers.6:out=scale:1.05; faults:",
    *(syntax for syntax, _ in FAULTS.values()),
)


@dataclass(frozen=True, slots=True)
class Substitute:
    """An operator whose results are replaced by those recorded in another run."""

    run: Run
    """The run that holds the results."""
    site: str
    """The operator's site, with its port."""

    def find(self, pass_: str, sample: int, step: int, port: str) -> torch.Tensor | None:
        """Find the result of the same forward: of the same pass, else of the anchored or the free
        one."""
        path = self.site.rpartition(":")[0]
        for name in (pass_, "anchored", "free"):
            record = self.run.find((name, sample, step, f"{path}:{port}"))
            if record is not None:
                return self.run.read(record)
        return None

    def __str__(self) -> str:
        return f"{self.site} from {self.run.manifest.id}"


def parse_substitutes(given: Mapping[str, Any] | Sequence[str]) -> dict[str, Substitute]:
    """Read substitutes by operator path: ``{"model.layers.3.mlp/aten.mul:out": RUN}``; in words
    ``SITE=RUN``, or ``SITE=RUN=OTHER_SITE``. Raises UsageError for a site that is no operator's or
    that the run does not hold, and RunFormatError for an unreadable run."""
    by_path: dict[str, Substitute] = {}
    if not isinstance(given, Mapping):
        words = [(word, word.partition("=")) for word in one_or_more(given)]
        for word, parts in words:
            if not all(parts):
                raise UsageError(
                    f"--substitute {word!r}: there is no RUN after a =",
                    hint="for example --substitute model.layers.3.mlp/aten.mul:out=RUN",
                )
        given = {site: run for _, (site, _, run) in words}
    for site, source in given.items():
        if not is_operator_site(site) or ":out" not in site:
            raise UsageError(
                f"{site!r} is no operator's result, so nothing can be put in its place",
                hint="for example --substitute model.layers.3.mlp/aten.mul:out=RUN",
            )
        if not isinstance(source, Substitute):
            # ``RUN``, or ``RUN=SITE`` where the operator has another site there
            there, run = site, source
            path, _, other = str(source).rpartition("=")
            if not isinstance(source, Run) and path and is_operator_site(other) and ":out" in other:
                there, run = other, path
            source = Substitute(Run.open(run), there)
        sites = site_names(source.run.records)
        if source.site not in sites:
            raise UsageError(
                f"{source.run.path} holds no {source.site}",
                hint=did_you_mean(source.site, sites) or "capture it with --sites ops@",
            )
        by_path[site.rpartition(":")[0]] = source
    return by_path


def check_fired(plants: Sequence[Plant], fired: Collection[str]) -> None:
    """Raise PlantError for a plant whose site was not among those that fired."""
    for plant in plants:
        if plant.site not in fired:
            raise PlantError(
                f"the fault {plant.fault} was never planted: no tensor passed {plant.site}",
                hint="`divergence inspect RUN` lists the sites of a run "
                "captured with --sites modules",
            )
