"""The machine a run was made on, described without secrets.

No host name, user or file path is recorded; environment variables only by the
allow-list below. ``--label`` gives a machine a name of the user's own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from divergence.errors import UsageError
from divergence.run.manifest import Environment
from divergence.run.site import near_names

__all__ = ["DEVICE_TYPES", "VARIABLES", "collect_environment", "resolve_device"]

DEVICE_TYPES = ("auto", "cpu", "cuda", "npu", "xpu", "mps")

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "accelerate", "kernels",
    "triton", "flash-attn", "bitsandbytes", "torch-npu", "intel-extension-for-pytorch", "vllm",
)  # fmt: skip

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY",
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_ALGO", "NCCL_PROTO", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC",
    "LCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT", "ATB_MATMUL_SHUFFLE_K_ENABLE",
    "ATB_LLM_LCOC_ENABLE", "ZE_AFFINITY_MASK", "PYTORCH_MPS_PREFER_METAL",
    "PYTORCH_ENABLE_MPS_FALLBACK", "TORCHINDUCTOR_FREEZING", "PYTHONHASHSEED",
)  # fmt: skip


def resolve_device(name: str = "auto") -> str:
    """``auto`` → the accelerator if there is one, else ``cpu``; others are checked to be there.

    ``cuda`` is also the name of ROCm devices, as in torch. An index (``cuda:1``) is kept.
    Raises UsageError for a name torch does not know and for a device that is not there.
    """
    import torch

    kind, _, index = name.partition(":")
    if kind not in DEVICE_TYPES:
        near = near_names(kind, DEVICE_TYPES)
        raise UsageError(
            f"unknown device {name!r}",
            hint=(f"did you mean {near[0]}? " if near else "")
            + f"known: {', '.join(DEVICE_TYPES)} (ROCm devices are called cuda, as in torch)",
        )
    if index and not (index.isascii() and index.isdecimal()):
        raise UsageError(f"device index {index!r} is not a number", hint="for example cuda:0")
    if kind == "cpu":
        return "cpu"
    if kind in ("auto", "npu"):
        _load_npu(required=kind == "npu")
    if kind == "auto":
        accelerator = _accelerator()
        return accelerator if accelerator is not None else "cpu"
    module = getattr(torch, kind, None)
    count = 0
    if kind == "mps":
        count = int(torch.backends.mps.is_available())
    elif module is not None and module.is_available():
        count = module.device_count()
    if count == 0:
        present = _accelerator() or "cpu"
        build = ""
        if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
            build = f"; this torch ({torch.__version__}) was built without CUDA or ROCm"
        raise UsageError(
            f"device {kind} is not there{build}",
            hint=f"here is: {present}; use --device {present} or --device auto",
        )
    if index and int(index) >= count:
        raise UsageError(f"device {name} is not there", hint=f"{kind} has {count} device(s)")
    return name


def collect_environment(device: str = "auto", *, label: str | None = None) -> Environment:
    """Describe this machine as seen through ``device`` (see resolve_device)."""
    import torch

    device = resolve_device(device)
    kind = device.partition(":")[0]
    cpu, capability = _cpu_name(), torch.backends.cpu.get_cpu_capability()
    name, count, driver, runtime = cpu, 0, None, None
    if kind != "cpu":
        name, count, driver, runtime = _accelerator_facts(kind, device)
    return Environment(
        label=label or (f"{name} ({capability})" if kind == "cpu" else name),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        device_type=kind,
        device_name=name,
        num_devices=count,
        driver=driver,
        runtime=runtime,
        cpu=cpu,
        cpu_capability=capability,
        num_threads=torch.get_num_threads(),
        versions=_versions(),
        variables={key: os.environ[key] for key in VARIABLES if key in os.environ},
    )


def _load_npu(*, required: bool) -> None:
    """torch_npu registers torch.npu when imported; asked for only where npu is wanted."""
    try:
        import torch_npu  # noqa: F401
    except Exception as error:  # also a torch_npu built for another torch
        if required:
            raise UsageError(
                "device npu is not there: torch_npu cannot be imported",
                where=str(error),
                hint="install the torch-npu that fits this torch and CANN, and source set_env.sh",
            ) from error


def _accelerator() -> str | None:
    """Type of the available accelerator, or None. torch.accelerator came with torch 2.6."""
    import torch

    if hasattr(torch, "accelerator"):
        if not torch.accelerator.is_available():
            return None
        return torch.accelerator.current_accelerator().type
    for kind in ("cuda", "npu", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "mps" if torch.backends.mps.is_available() else None


def _accelerator_facts(kind: str, device: str) -> tuple[str, int, str | None, str | None]:
    """(name, count, driver, runtime) of an accelerator; what cannot be asked is None."""
    import torch

    if kind == "mps":
        return f"Apple {platform.processor() or 'GPU'}", 1, platform.mac_ver()[0] or None, None
    module = getattr(torch, kind)
    name = str(module.get_device_name(device))
    driver = runtime = None
    if kind == "cuda":
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        driver = _first_match(
            Path("/proc/driver/nvidia/version"), r"Module\s+(?:for \S+\s+)?([\d.]+)"
        )
    elif kind == "npu":
        runtime = _first_match(
            Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
            / "version.cfg",
            r"\[([\d.A-Za-z]+)",
        )
        driver = _first_match(Path("/usr/local/Ascend/driver/version.info"), r"Version=(\S+)")
    elif kind == "xpu":
        driver = getattr(module.get_device_properties(device), "driver_version", None)
    return name, module.device_count(), driver, runtime


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        match = re.search(pattern, path.read_text(errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def _cpu_name() -> str:
    return _first_match(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or (
        platform.processor() or platform.machine()
    )


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import torch

    versions["torch"] = str(torch.__version__)  # with the build, e.g. 2.13.0+cpu
    return versions
