"""What ONNX Runtime is told, and what of it is here."""

from __future__ import annotations

import importlib

from divergence.errors import ModelError, UsageError, first_line
from divergence.recording.engines.engine import EngineOptions
from divergence.recording.engines.onnx_runtime.pieces import LEVELS
from divergence.run.schema.site import near_names

__all__ = ["OnnxOptions", "check_level", "installed", "provider_for"]

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
        near = near_names(level, LEVELS)
        raise UsageError(
            f"--engine-option optimization={level}: there is no such level",
            hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(LEVELS)}",
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
        near = near_names(given.lower(), names)
        raise UsageError(
            f"--engine-option provider={given}: there is no such execution provider",
            hint=(f"did you mean {near[0]}? " if near else "") + f"here there are {listed}",
        )
    if name not in here:
        package = next((p for n, p in _PROVIDERS.values() if n == name), None)
        raise UsageError(
            f"--engine-option provider={given}: this ONNX Runtime has no {name}",
            hint=f"here there are {listed}" + (f"; {package} brings it" if package else ""),
        )
    return name
