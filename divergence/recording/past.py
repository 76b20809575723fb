"""What a forward leaves for the next one, twice: as the free and as the anchored forwards left it.

Modules keep caches, counters and statistics of batches in buffers and attributes, and write to what
they are given. An anchored forward that met the free pass's would see a past that is not A's, and
the next free forward one that is not its own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from divergence.run.manifest import digest_many, digest_tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.nn.Module, torch.nn.Parameter)
_OF_TORCH = {*vars(torch.nn.Module()), "_compiled_call_impl"}


def chance_of(module: torch.nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes a context that draws the random numbers that come next, and leaves them to come."""
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    kinds: Any = [] if device.type in ("cpu", "meta", "mps") else [device]
    random: Any = torch.get_device_module(device) if kinds else None
    states = torch.get_rng_state(), *(random.get_rng_state(each) for each in kinds)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(kinds, device_type=device.type if kinds else "cuda"):
            torch.set_rng_state(states[0])
            for each, state in zip(kinds, states[1:], strict=True):
                random.set_rng_state(state, each)
            yield

    return again


class Past:
    """Keeps, for the anchored forwards of ``module``, twins of what the free ones write to."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known: dict[int, tuple[Any, Any, Any]] = {}
        """By what a free forward wrote to: that, its mark when it had, and its twin."""
        self._met: dict[int, tuple[Any, Any, Any]] = {}
        self._states: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def twins(self, arguments: Any) -> Any:
        """Called before a free forward: the twins of its arguments. One goes on as the last
        anchored forward left it, where the free pass's is as the last free one left it."""
        self._met = {}
        owners = [own for part in self._module.modules() for own in (part._buffers, vars(part))]
        self._states = [(own, self._twin(own, _state(own))) for own in owners if type(own) is dict]
        return self._twin(arguments, arguments, given=True)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Called behind the free forward: within the block modules have their twins' state."""
        for key, (value, mark, twin) in self._met.items():
            now = stamp(value)
            if key in self._known or now != mark:
                self._known[key] = value, now, twin
        states = [(own, _state(own), twin) for own, twin in self._states]
        for own, _, twin in states:
            _put(own, twin)
        try:
            yield
        finally:
            for own, values, twin in states:
                twin.clear()
                twin.update(_state(own))
                _put(own, values)

    def _twin(self, value: Any, content: Any, *, given: bool = False) -> Any:
        """``given``: what is no container may be written to, too."""
        if isinstance(value, _PLAIN):
            return value
        mark, last = stamp(value), self._known.get(id(value))
        if last is not None and last[1] == mark:
            twin = last[2]
        elif isinstance(value, torch.Tensor):
            twin = value.detach().clone()
        elif type(value) is tuple:
            return tuple(self._twin(item, item, given=given) for item in value)
        elif type(value) is list:
            twin = [self._twin(item, item, given=given) for item in value]
        elif type(value) is dict:
            twin = {k: self._twin(item, item, given=given) for k, item in content.items()}
        elif isinstance(value, torch.Generator):
            twin = value.clone_state()
        elif given or hasattr(value, "get_seq_length"):
            try:
                twin = copy.deepcopy(value)
            except Exception:  # a lock, a file: what no copy can be made of is no cache
                return value
        else:
            return value
        self._met[id(value)] = value, mark, twin
        return twin


class WeightsWatch:
    """Tells when the parameters of ``module`` are no longer those that it began with, of which
    ``digests`` are known by name."""

    def __init__(self, module: torch.nn.Module, digests: Mapping[str, str]) -> None:
        self._module, self._digests = module, digests
        self._marks = self._seen()
        self._digest: str | None = None

    def changed(self) -> str | None:
        """The digest of all parameters; None where they are still those of the beginning."""
        if (marks := self._seen()) != self._marks:
            named = [
                (name, digest_tensor(parameter))
                for name, parameter in self._module.named_parameters()
                if not parameter.is_meta
            ]
            stay = all(self._digests.get(name, own) == own for name, own in named)
            by_place = ((str(place), own) for place, (_, own) in enumerate(named))
            self._marks, self._digest = marks, None if stay else digest_many(by_place)
        return self._digest

    def _seen(self) -> list[Any]:
        """Marks that are equal where nothing wrote to a parameter in between or put another in its
        place. Torch does not count what is written by way of ``.data``, so that a row of each is
        among them."""
        marks: list[Any] = []
        for parameter in self._module.parameters():
            marks.append(stamp(parameter))
            if (
                type(parameter) is torch.nn.Parameter
                and not parameter.is_meta
                and parameter.numel()
            ):
                row = parameter.detach()
                while row.ndim > 1:
                    row = row[len(row) // 2]
                marks.append((parameter.data_ptr(), row.reshape(-1)[:_OF_ROW].tolist()))
        return marks


_OF_ROW = 64


def _state(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in _OF_TORCH}


def _put(own: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name in _state(own).keys() - values.keys():
        del own[name]
    own.update(values)


def stamp(value: Any) -> Any:
    """Two marks of a value are equal where nothing wrote to it in between."""
    if isinstance(value, torch.Tensor):
        return id(value), digest_tensor(value) if value.is_inference() else value._version
    if type(value) in (list, tuple):
        return tuple(map(stamp, value))
    if type(value) is dict:
        return tuple((name, stamp(item)) for name, item in value.items() if name not in _OF_TORCH)
    length = getattr(value, "get_seq_length", None)
    if length is not None and not isinstance(value, torch.nn.Module):
        return id(value), length()
    return value if isinstance(value, bool | int | float | str) else id(value)
