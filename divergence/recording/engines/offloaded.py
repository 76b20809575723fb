"""Weights that do not lie on a device: ``device_map`` leaves some in host memory or on disk.

accelerate's hooks bring such a weight in for its module's forward and take it away again; in
between torch shows it on the meta device, as a shape without values. Whoever needs the values asks
the same hook, for one module at a time, so that never more than one is held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from divergence.errors import ModelError, UsageError
from divergence.run.schema.layout import expanded

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMap", "device_map_of", "input_device", "map_text", "weights_of"]

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")

DeviceMap = str | Mapping[str, str | int]


def device_map_of(given: DeviceMap) -> str | dict[str, str | int]:
    """What ``from_pretrained`` takes: its words, a device, or module path → device, which may be
    ``cpu`` or ``disk``; also the name of a JSON file of that."""
    if not isinstance(given, str):
        return dict(given)
    path = expanded(given)
    if given in _WORDS or not (given.endswith(".json") or given.startswith("{")):
        return given
    try:
        found = json.loads(given if given.startswith("{") else path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--device-map {given} cannot be read: {error}",
            hint='a JSON object of module paths: {"model.layers.0": 0, "model.layers.1": "disk"}',
        ) from error
    if not isinstance(found, dict) or not all(isinstance(v, str | int) for v in found.values()):
        raise UsageError(
            f"--device-map {given} is no JSON object of module path → device",
            hint='for example {"": "cpu"}, or {"model.layers.0": 0, "model.layers.1": "disk"}',
        )
    return found


def map_text(given: DeviceMap | None) -> str | None:
    """As a run records it: words as they are, a map as one line of JSON."""
    if given is None or isinstance(given, str):
        return given
    return json.dumps(dict(given), sort_keys=True)


def input_device(module: torch.nn.Module) -> torch.device:
    """Where token ids are put: with the first weight that is anywhere; hooks move them on."""
    import torch

    found = next((p.device for p in module.parameters() if p.device.type != "meta"), None)
    return torch.device("cpu") if found is None else found


def weights_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name → weight for all of ``state_dict``, in its order as far as weights are at hand. One that
    is offloaded is there while the loop is at it, and no longer."""
    from divergence.recording.engines.distributed import whole_tensor

    away: dict[str, list[str]] = {}
    for name, tensor in module.state_dict().items():
        if tensor.device.type == "meta":
            away.setdefault(name.rpartition(".")[0], []).append(name)
            continue
        yield name, whole_tensor(tensor)
    for path, names in away.items():
        with _brought_in(module.get_submodule(path), path):
            for name in names:
                tensor = getattr(module.get_submodule(path), name.rpartition(".")[2])
                if tensor.device.type == "meta":
                    raise ModelError(
                        f"the weight {name} has no values: nothing brings it in",
                        hint="was the model loaded with --device-map?",
                    )
                yield name, tensor.detach()


def _brought_in(owner: Any, path: str) -> Any:
    try:
        from accelerate.utils import align_module_device
    except ImportError as error:
        raise ModelError(
            f"the weights of {path} are offloaded, and accelerate, which brings them in, is not "
            "there",
            hint="pip install 'divergence-debug[accelerate]'",
        ) from error
    return align_module_device(owner, execution_device="cpu")
