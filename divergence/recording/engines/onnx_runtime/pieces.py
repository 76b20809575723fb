"""Parts of a graph that run by themselves, each a session of ONNX Runtime.

Values from within are fetched as further outputs of the graph. ONNX Runtime then keeps them, which
keeps it from fusing across them: the run notes how many there are. Nothing is written to disk; the
weights that lie beside the file are read from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from divergence.errors import ModelError, first_line
from divergence.recording.engines.onnx_runtime.graph import Graph

__all__ = ["Runtime", "Subgraph"]

_BFLOAT16 = 16
_LEVELS = {"disable": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED",
           "all": "ENABLE_ALL"}  # fmt: skip
_FOLDER = "session.model_external_initializers_file_folder_path"
LEVELS = tuple(_LEVELS)


@dataclass(frozen=True, slots=True)
class Runtime:
    """How sessions are made."""

    folder: Path
    """Where weights beside the file lie."""
    provider: str
    provider_options: Mapping[str, str]
    optimization: str
    threads: int | None

    def session(self, model: Any, *, deterministic: bool) -> Any:
        """A session for ``model``. Raises ModelError."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        level = f"ORT_{_LEVELS[self.optimization]}"
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.use_deterministic_compute = deterministic
        options.log_severity_level = 3  # errors, which are raised as well
        options.intra_op_num_threads = self.threads or torch.get_num_threads()
        options.add_session_config_entry(_FOLDER, str(self.folder))
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options,
                providers=[(self.provider, dict(self.provider_options))],
            )  # fmt: skip
        except Exception as error:  # ONNX Runtime's own kinds
            raise _refused(self.provider, error) from error
        if self.provider not in session.get_providers():
            raise ModelError(
                f"ONNX Runtime could not start {self.provider} and went back to "
                f"{', '.join(session.get_providers())}",
                hint="its libraries are not found here; --engine-option provider=cpu runs without",
            )
        return session


class Subgraph:
    """A part of the graph: it is given ``cuts`` and the graph's inputs, and gives ``targets``.

    ``whole``: all of the graph, as it is, with the targets beside its outputs.
    """

    def __init__(
        self,
        graph: Graph,
        runtime: Runtime,
        *,
        targets: Iterable[str],
        cuts: Collection[str] = (),
        whole: bool = False,
    ) -> None:
        given = {*graph.inputs, *cuts}
        self.targets = [target for target in dict.fromkeys(targets) if target not in given]
        if whole:
            nodes = list(range(len(graph.nodes)))
            self.cuts, self.inputs = set[str](), set(graph.inputs)
        else:
            nodes, self.cuts, self.inputs = graph.slice(self.targets, cuts)
        self._types = graph.types
        model = _part(graph, nodes, [*sorted(self.inputs), *sorted(self.cuts)], self.targets, whole)
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._session = runtime.session(model, deterministic=deterministic)

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The targets by name. Raises what ONNX Runtime does, as RuntimeError."""
        feeds = {key: _given(values[key], self._types[key]) for key in (*self.inputs, *self.cuts)}
        try:
            results = self._session.run_with_ort_values(self.targets, feeds)
        except Exception as error:  # ONNX Runtime's own kinds
            raise RuntimeError(first_line(error, most=300)) from error
        return {name: _taken(result) for name, result in zip(self.targets, results, strict=True)}


def _part(
    graph: Graph, nodes: Sequence[int], inputs: Sequence[str], targets: Sequence[str], whole: bool
) -> Any:
    import onnx

    part = onnx.ModelProto()
    part.CopyFrom(_frame(graph.model))
    known = {spec.name: spec for spec in (*graph.model.graph.value_info, *graph.model.graph.output,
                                       *graph.model.graph.input)}  # fmt: skip
    chosen = [graph.nodes[number] for number in nodes]
    used = {name for node in chosen for name in node.inputs} | set(targets)
    part.graph.name = graph.model.graph.name
    part.graph.node.extend(node.proto for node in chosen)
    part.graph.initializer.extend(
        constant for n, constant in graph.constants.items() if whole or n in used
    )
    for name in graph.inputs if whole else inputs:
        part.graph.input.append(known.get(name) or _typed(name, graph.types.get(name, 1)))
    outputs = [*graph.outputs, *targets] if whole else targets
    for name in dict.fromkeys(outputs):
        part.graph.output.append(known.get(name) or onnx.ValueInfoProto(name=name))
    return part


def _frame(model: Any) -> Any:
    """The model without its graph: versions and functions."""
    import onnx

    frame = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    frame.opset_import.extend(model.opset_import)
    frame.functions.extend(model.functions)
    return frame


def _typed(name: str, element: int) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, element, None)


def _given(tensor: torch.Tensor, element: int) -> Any:
    from onnxruntime import OrtValue

    tensor = tensor.detach().cpu().contiguous()
    if element == _BFLOAT16:  # numpy has none
        array = tensor.view(torch.uint16).numpy()
        return OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
    return OrtValue.ortvalue_from_numpy(tensor.numpy())


def _taken(value: Any) -> torch.Tensor:
    """As a tensor on the host, of its own memory or the value's."""
    if value.data_type() == "tensor(bfloat16)":
        return from_dlpack(value._ortvalue.to_dlpack())
    return torch.from_numpy(value.numpy())


def _refused(provider: str, error: Exception) -> ModelError:
    text = first_line(error, most=300)
    if "NOT_IMPLEMENTED" in text or "Could not find an implementation" in text:
        return ModelError(
            f"{provider} has no kernel for what the graph needs: {text}",
            hint="export the model in a dtype that it has (float32, mostly float16), or choose "
            "another --engine-option provider=NAME",
        )
    return ModelError(
        f"ONNX Runtime cannot load the graph: {text}",
        hint="was it exported for a newer ONNX Runtime, or for operators of another library?",
    )
