"""ONNX Runtime as an engine: ``--engine onnx --model DIR/model.onnx``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
import torch

from divergence.errors import ModelError, UsageError, first_line
from divergence.outside import read_as
from divergence.recording.engines.engine import EngineOptions, Feature, Loading
from divergence.recording.engines.generate import GroupResult, failures
from divergence.recording.engines.load import LoadedModel
from divergence.recording.engines.onnx_runtime.file import read_model
from divergence.recording.engines.onnx_runtime.forward import GraphRecorder, decode
from divergence.recording.engines.onnx_runtime.graph import Graph
from divergence.recording.engines.onnx_runtime.model import model_of
from divergence.recording.engines.onnx_runtime.pieces import LEVELS, Runtime
from divergence.recording.engines.sessions import TorchSession, blocks_of
from divergence.run.schema.layout import expanded
from divergence.run.schema.manifest import EngineNote, ModelIdentity, ModuleNote, SampleTokens
from divergence.run.schema.site import did_you_mean

__all__ = ["OnnxEngine", "OnnxOptions", "OnnxSession", "check_level", "installed", "provider_for"]

_OLDEST = {"onnx": (1, 16), "onnxruntime": (1, 20)}
_PROVIDERS = {
    "cpu": ("CPUExecutionProvider", "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", "onnxruntime-gpu"),
    "tensorrt": ("TensorrtExecutionProvider", "onnxruntime-gpu"),
    "cann": ("CANNExecutionProvider", "onnxruntime-cann"),
    "openvino": ("OpenVINOExecutionProvider", "onnxruntime-openvino"),
    "rocm": ("ROCMExecutionProvider", "onnxruntime-rocm"),
    "migraphx": ("MIGraphXExecutionProvider", "onnxruntime-migraphx"),
    "coreml": ("CoreMLExecutionProvider", "onnxruntime (on macOS)"),
    "dml": ("DmlExecutionProvider", "onnxruntime-directml"),
    "qnn": ("QNNExecutionProvider", "onnxruntime-qnn"),
}
"""Short name → (name, the package that brings it)."""
_BY_DEVICE = {"cuda": "cuda", "npu": "cann", "xpu": "openvino", "mps": "coreml"}


class OnnxOptions(EngineOptions, frozen=True, kw_only=True):
    """How ONNX Runtime runs the graph."""

    provider: str | None = None
    """``cpu``, ``cuda``, ``cann``, ``openvino`` …, or ONNX Runtime's own name. None: the one of
    ``--device``."""
    optimization: str = "all"
    """Of the graph: ``disable``, ``basic``, ``extended``, ``all``."""
    threads: int | None = None
    """None: as many as torch has."""
    tokenizer: str | None = None
    """The directory of config and tokenizer; None: that of the ONNX file."""


def check_level(level: str) -> None:
    """Raise UsageError for a level of optimisation that there is none of."""
    if level not in LEVELS:
        raise UsageError(
            f"--engine-option optimization={level}: there is no such level",
            hint=did_you_mean(level, LEVELS, count=1) or f"one of {', '.join(LEVELS)}",
        )


def installed(name: str) -> str:
    """The version. Raises ModelError where it is not installed, broken or too old."""
    hint = "pip install 'divergence-debug[onnx]'"
    try:
        version = str(importlib.import_module(name).__version__)
    except ImportError as error:
        broken = isinstance(error, ModuleNotFoundError) and error.name == name
        what = "which is not installed" if broken else f"which fails: {first_line(error)}"
        raise ModelError(f"--engine onnx needs {name}, {what}", hint=hint) from error
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    oldest = _OLDEST[name]
    if len(numbers) == 2 and numbers < oldest:
        raise ModelError(
            f"--engine onnx needs {name} {'.'.join(map(str, oldest))} or newer, and this is "
            f"{version}", hint=f"{hint} --upgrade",
        )  # fmt: skip
    return version


def provider_for(given: str | None, device: str) -> str:
    """ONNX Runtime's name of the execution provider. Raises UsageError for one that there is none
    of, and for one that this build lacks."""
    import onnxruntime

    given = given or _BY_DEVICE.get(device, "cpu")
    every = {*onnxruntime.get_all_providers(), *(name for name, _ in _PROVIDERS.values())}
    names: dict[str, str] = {name.lower(): name for name in every} | {
        short: name for short, (name, _) in _PROVIDERS.items()
    }
    here: list[str] = onnxruntime.get_available_providers()
    listed = ", ".join(here)
    name = names.get(given.lower())
    if name is None:
        raise UsageError(
            f"--engine-option provider={given}: there is no such execution provider",
            hint=did_you_mean(given.lower(), names, count=1, then=f"here there are {listed}"),
        )
    if name not in here:
        package = next((p for n, p in _PROVIDERS.values() if n == name), None)
        raise UsageError(
            f"--engine-option provider={given}: this ONNX Runtime has no {name}",
            hint=f"here there are {listed}" + (f"; {package} brings it" if package else ""),
        )
    return name


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
        with read_as("an exporter of ONNX", where=str(path), error=ModelError):
            graph = Graph(read_model(path))
        runtime = Runtime(
            path.parent.resolve(), provider, {"device_id": number} if number else {},
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
        self, recorder: Any, samples: list[SampleTokens], *, max_new_tokens: int,
        forced: list[list[int]] | None = None, **_: Any,
    ) -> GroupResult:  # fmt: skip
        count = max_new_tokens if forced is None else len(forced[0])
        with failures(self.loaded, samples, count), torch.no_grad():
            result = decode(self.loaded, self._graph, recorder, samples, count, forced)
        self._num_taps = max(self._num_taps, recorder.num_taps)
        return result

    def note(self) -> EngineNote:
        model, runtime = self._graph.model, self._runtime
        opsets = [f"{opset.domain or 'ai.onnx'} {opset.version}" for opset in model.opset_import]
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
