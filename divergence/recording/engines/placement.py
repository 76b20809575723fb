"""Where the weights of a model lie, if not all on one device.

``device_map`` leaves some in host memory or on disk. accelerate's hooks bring such a weight in for
its module's forward and take it away again; in between torch shows it on the meta device, as a
shape without values. Whoever needs the values asks the same hook, for one module at a time, so that
never more than one is held.

Ranks divide a model by transformers' own means, ``DistributedConfig`` (5.23): tensor parallel
(``tp_plan``), FSDP2 (``fully_shard``), pipeline stages; every rank then reads only its own part of
the weights. That needs accelerate. Without it, or for ranks on the CPU of a machine with an
accelerator, each rank loads the whole model into the host's memory, divides it, and keeps its part:
the same result, at the price of that memory.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from divergence.errors import ModelError, UsageError
from divergence.outside import json_value, read_bytes
from divergence.recording.machine.environment import accelerator_type
from divergence.recording.ranks.processes import Ranks
from divergence.run.schema.layout import expanded
from divergence.run.schema.site import escape_path

__all__ = [
    "DeviceMap", "as_loaded", "device_map_of", "distribution", "divide", "input_device", "map_text",
    "tensor_plan", "weights_of", "why_not",
]  # fmt: skip

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")

DeviceMap = str | Mapping[str, str | int]


def device_map_of(given: DeviceMap) -> str | dict[str, str | int]:
    """What ``from_pretrained`` takes: its words, a device, or module path → device, which may be
    ``cpu`` or ``disk``; also the name of a JSON file of that."""
    if not isinstance(given, str):
        return dict(given)
    if given in _WORDS or not (given.endswith(".json") or given.startswith("{")):
        return given
    hint = '--device-map {"": "cpu"}, or {"model.layers.0": 0, "model.layers.1": "disk"}'
    data = (
        given.encode() if given.startswith("{")
        else read_bytes(expanded(given), error=UsageError, hint=hint)
    )  # fmt: skip
    device_map = json_value(data, where=f"--device-map {given}", error=UsageError, hint=hint)
    if not isinstance(device_map, dict) or not all(
        isinstance(v, str | int) for v in device_map.values()
    ):
        raise UsageError(
            f"--device-map {given} is no JSON object of module path → device", hint=hint
        )
    return device_map


def map_text(given: DeviceMap | None) -> str | None:
    """As a run records it: words as they are, a map as one line of JSON."""
    if given is None or isinstance(given, str):
        return given
    return json.dumps(dict(given), sort_keys=True)


def input_device(module: torch.nn.Module) -> torch.device:
    """Where token ids are put: with the first weight that is anywhere; hooks move them on."""
    device = next((p.device for p in module.parameters() if p.device.type != "meta"), None)
    return torch.device("cpu") if device is None else device


def weights_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name → weight for all of ``state_dict``, whole, in its order as far as weights are at hand.
    One that is offloaded is there while the loop is at it, and no longer. All ranks of a mesh must
    ask, in the same order."""
    away: dict[str, list[str]] = {}
    for name, tensor in module.state_dict().items():
        if tensor.device.type == "meta":
            away.setdefault(name.rpartition(".")[0], []).append(name)
            continue
        gather = getattr(tensor, "full_tensor", None)  # of a weight in pieces on several ranks
        yield from _parts(name, tensor if gather is None else gather())
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


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor class that holds codes and scales (torchao's) is the tensors it holds."""
    held = getattr(tensor, "__tensor_flatten__", None)
    if held is None or type(tensor).__module__.startswith("torch."):
        yield name, tensor
        return
    for part in held()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


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


_NAMES = {"tp": "tp_size", "fsdp": "fsdp_size", "pp": "pp_size", "dp": "dp_replicate_size"}


def distribution(ranks: Ranks) -> Any | None:
    """What ``from_pretrained`` is told; None where every rank has the whole model."""
    if set(ranks.sizes) <= {"dp"}:
        return None
    try:
        from transformers.distributed import DistributedConfig

        sizes: dict[str, Any] = {_NAMES[name]: size for name, size in ranks.sizes.items()}
        return DistributedConfig(**sizes)
    except (ImportError, TypeError) as error:
        import transformers

        raise UsageError(
            f"transformers {transformers.__version__} cannot divide a model by "
            f"{' and '.join(ranks.sizes)}",
            hint="pip install -U transformers (5.23 can), or --mesh dp",
        ) from error
    except ValueError as error:  # combinations that it does not have
        raise UsageError(f"--mesh cannot be carried out: {error}", hint="fewer axes") from error


def as_loaded(ranks: Ranks) -> bool:
    """Can the model be divided while it is read?"""
    kind = accelerator_type() or "cpu"
    return importlib.util.find_spec("accelerate") is not None and ranks.device.startswith(kind)


def divide(module: Any, config: Any, ranks: Ranks) -> Any:
    """Divide a model that this rank holds whole, and let go of what is not its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.utils import TransformersDeviceMesh

    kind = ranks.device.partition(":")[0]
    shape = tuple(ranks.sizes.get(name, 1) for name in ("pp", "dp", "fsdp", "tp"))
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    tied = "tp" in ranks.sizes and _untie(module)
    module = type(module).maybe_distribute_model(module, config, TransformersDeviceMesh(mesh, mesh))
    if tied:
        module.tie_weights()
    return module.to(ranks.device)


def _untie(module: Any) -> bool:
    """Give the output matrix a name of its own where it is the embedding: the plan looks for both,
    since it expects a model that is still to be filled. Was it the embedding?"""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", head):
        return False
    head.weight = torch.nn.Parameter(embedding.weight.detach(), requires_grad=False)
    return True


def why_not(module_class: str, error: BaseException, ranks: Ranks | None) -> ModelError | None:
    """The clear word for a model that cannot be divided so; None for another error."""
    match = re.search(r"has no `(\w+)_plan`", str(error))
    # stages are cut from a list called ``layers``, without looking whether there is one
    stages = ranks is not None and "pp" in ranks.sizes and isinstance(error, AttributeError)
    if match is None and not stages:
        return None
    axis = "pp" if match is None else match[1]
    return ModelError(
        f"{module_class or 'this model'} has no plan for --mesh {axis}",
        hint="--mesh dp (each rank the whole model)"
        + ("" if axis == "fsdp" else ", perhaps --mesh fsdp")
        + ", or a model whose transformers class has a plan",
    )


def tensor_plan(module: Any) -> dict[str, str]:
    """Module path → style, of modules that tensor parallelism touches."""
    plan: dict[str, str] = getattr(module, "tp_plan", None) or {}
    styles = {}
    for path, _ in module.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is not None:
            styles[escape_path(path)] = style
    return styles
