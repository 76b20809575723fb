"""ONNX Runtime as an engine: ``--engine onnx --model DIR/model.onnx``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from divergence.errors import UsageError
from divergence.recording.engines.engine import EngineOptions, Feature, Loading
from divergence.recording.engines.generate import GroupResult, failures
from divergence.recording.engines.load import LoadedModel
from divergence.recording.engines.onnx_runtime.file import read_model
from divergence.recording.engines.onnx_runtime.forward import GraphRecorder, decode
from divergence.recording.engines.onnx_runtime.graph import Graph
from divergence.recording.engines.onnx_runtime.model import model_of
from divergence.recording.engines.onnx_runtime.options import (
    OnnxOptions,
    check_level,
    installed,
    provider_for,
)
from divergence.recording.engines.onnx_runtime.pieces import Runtime
from divergence.recording.engines.sessions import TorchSession, blocks_of
from divergence.run.schema.layout import expanded
from divergence.run.schema.manifest import EngineNote

if TYPE_CHECKING:
    from divergence.run.schema.manifest import ModelIdentity, ModuleNote, SampleTokens

__all__ = ["OnnxEngine", "OnnxSession"]


class OnnxEngine:
    """Graphs of ONNX as ONNX Runtime runs them."""

    name: ClassVar[str] = "onnx"
    Options: ClassVar[type[EngineOptions]] = OnnxOptions

    def load(self, loading: Loading, options: OnnxOptions) -> OnnxSession:
        version = installed("onnxruntime")
        installed("onnx")
        if loading.ranks is not None or loading.device_map is not None:
            raise UsageError(
                "--engine onnx runs in one process, on one execution provider",
                hint="leave out --mesh and --device-map",
            )
        check_level(options.optimization)
        device, _, number = loading.device.partition(":")
        provider = provider_for(options.provider, device)
        path = expanded(loading.source)
        graph = Graph(read_model(path))
        runtime = Runtime(
            path.resolve().parent, provider, {"device_id": number} if number else {},
            options.optimization, options.threads,
        )  # fmt: skip
        folder = path.parent if options.tokenizer is None else expanded(options.tokenizer)
        loaded, left = model_of(loading, graph, path, folder)
        kind = OnnxSession if blocks_of(loaded.module) else _WithoutBlocks
        return kind(loaded, graph, runtime, options, left, version=version)


class OnnxSession(TorchSession):
    """A graph, and the modules that it tells of, none of which can be called."""

    name: ClassVar[str] = "onnx"
    has_cache: ClassVar[bool] = False
    lacks: ClassVar[Mapping[Feature, str]] = {
        "escalate": "its kernels compute in the graph's own dtype",
        "whole": "each of its steps is a whole forward already",
        "pads_right": "its graph gives the logits of the last position",
        "operators": "its operators are not torch's",
        "plants": "no hook is in its forward",
        "prepare": "it runs the graph",
    }

    def __init__(
        self,
        loaded: LoadedModel,
        graph: Graph,
        runtime: Runtime,
        options: OnnxOptions,
        left: list[str],
        *,
        version: str,
    ) -> None:
        super().__init__(loaded, msgspec.structs.asdict(options))
        self._graph, self._runtime, self._left = graph, runtime, left
        self._version, self._num_taps = version, 0

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        identity = super().identity(on_parameter)
        return msgspec.structs.replace(identity, code={}, attn_implementation=None)

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> GraphRecorder:
        return GraphRecorder(
            self.loaded.module, notes, graph=self._graph, runtime=self._runtime, **how
        )

    def run_group(
        self,
        recorder: Any,
        samples: list[SampleTokens],
        *,
        max_new_tokens: int,
        forced: list[list[int]] | None = None,
        num_logits: int | None = None,
    ) -> GroupResult:
        count = max_new_tokens if forced is None else len(forced[0])
        with failures(self.loaded, samples, count), torch.no_grad():
            result = decode(self.loaded, self._graph, recorder, samples, count, forced)
        self._num_taps = max(self._num_taps, recorder.num_taps)
        return result

    def note(self) -> EngineNote:
        model, runtime = self._graph.model, self._runtime
        opsets = [f"{one.domain or 'ai.onnx'} {one.version}" for one in model.opset_import]
        facts = {
            "provider": runtime.provider,
            "exporter": f"{model.producer_name} {model.producer_version}".strip() or "unknown",
            "opset": ", ".join(opsets),
            "cache": "none, each step is a whole forward",
            "values fetched": f"{self._num_taps}, across which ONNX Runtime fuses nothing",
        }
        if "anchor" in self.lacks:
            facts["blocks"] = "not told"
        facts["weights"] = "as far as the file names them" + (
            f"; {len(self._left)} constants have no parameter's name" if self._left else ""
        )
        return msgspec.structs.replace(super().note(), facts=facts)

    def version(self) -> str:
        return self._version


class _WithoutBlocks(OnnxSession):
    lacks: ClassVar[Mapping[Feature, str]] = {
        **OnnxSession.lacks, "anchor": "the file does not tell the blocks of its model",
    }  # fmt: skip
