"""The machine a run was made on, described without secrets.

No host name, user or file path is recorded; environment variables only by the
allow-list below: what decides which kernels run and how exactly they compute. ``--label`` gives a
machine a name of the user's own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

from divergence.errors import UsageError
from divergence.recording.machine.hardware import cpu_model, cpu_name, torch_build
from divergence.run.schema.manifest import Environment
from divergence.run.schema.site import did_you_mean

__all__ = [
    "DEVICE_TYPES", "SETTABLE", "VARIABLES", "accelerator_type", "collect_environment",
    "resolve_device", "variables_to_set",
]  # fmt: skip

DEVICE_TYPES = ("auto", "cpu", "cuda", "npu", "xpu", "mps")

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "accelerate", "kernels",
    "triton", "flash-attn", "flash-attn-3", "flashinfer-python", "xformers", "bitsandbytes",
    "torchao", "gptqmodel", "autoawq", "peft", "liger-kernel", "unsloth", "mamba-ssm",
    "causal-conv1d", "flash-linear-attention", "transformer-engine", "deepspeed", "megablocks",
    "sgl-kernel", "torch-npu", "triton-ascend", "intel-extension-for-pytorch", "mkl",
    "intel-openmp", "vllm",
)  # fmt: skip

VARIABLES = (
    # the CPU: instruction sets, threads (how a sum is divided), reproducible modes
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS",
    "MKL_DYNAMIC", "MKL_THREADING_LAYER", "MKL_INTERFACE_LAYER", "MKL_DEBUG_CPU_TYPE",
    "OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_PLACES",
    "OMP_SCHEDULE", "OMP_THREAD_LIMIT", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_BLOCKTIME",
    "KMP_DETERMINISTIC_REDUCTION", "KMP_FORCE_REDUCTION", "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE", "OPENBLAS_MAIN_FREE", "GOTO_NUM_THREADS", "BLIS_NUM_THREADS",
    "BLIS_ARCH_TYPE", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS", "LRU_CACHE_CAPACITY",
    "GLIBC_TUNABLES",
    # torch
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_LINALG_PREFER_CUSOLVER", "TORCH_CUDA_ARCH_LIST",
    "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_CPP_WRAPPER", "TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG",
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG", "TORCHINDUCTOR_CPP_ENABLE_TILING_HEURISTIC",
    "PYTORCH_JIT", "PYTORCH_NVFUSER_DISABLE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TRITON_INTERPRET", "TRITON_F32_DEFAULT", "PYTHONHASHSEED",
    # NVIDIA
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY", "CUDNN_CONV_WSCAP_DBG",
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS", "FLASH_ATTENTION_DETERMINISTIC",
    # AMD
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION",
    "HIPBLASLT_ALLOW_TF32",
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL", "ROCBLAS_DEFAULT_ATOMICS_MODE", "ROCBLAS_USE_HIPBLASLT",
    "MIOPEN_FIND_MODE", "MIOPEN_FIND_ENFORCE", "MIOPEN_DEBUG_CONVOLUTION_ATTRIB_FP16_ALT_IMPL",
    "MIOPEN_DEBUG_CONV_IMPLICIT_GEMM", "MIOPEN_DEBUG_CONV_WINOGRAD",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    # Ascend
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC", "HCCL_ALGO",
    "HCCL_OP_EXPANSION_MODE", "TORCH_NPU_USE_COMPATIBLE_IMPL", "TORCH_NPU_LAZY_FUSION",
    "TORCH_NPU_FALLBACK_CPU_DISABLE",
    "LCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT", "ATB_MATMUL_SHUFFLE_K_ENABLE",
    "ATB_LLM_LCOC_ENABLE", "ATB_OPERATION_EXECUTE_ASYNC", "ACL_OP_DETERMINISTIC",
    "ACL_PRECISION_MODE", "ACLNN_CACHE_LIMIT", "TASK_QUEUE_ENABLE", "INF_NAN_MODE_ENABLE",
    "INF_NAN_MODE_FORCE_DISABLE", "ALLOW_INTERNAL_FORMAT",
    # Intel GPUs, TPUs, Apple
    "ZE_AFFINITY_MASK", "IPEX_FP32_MATH_MODE", "IPEX_XPU_ONEDNN_LAYOUT", "XLA_FLAGS",
    "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "JAX_DEFAULT_MATMUL_PRECISION",
    "PYTORCH_MPS_PREFER_METAL", "PYTORCH_MPS_FAST_MATH", "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_ENABLE_XPU_FALLBACK",
    # engines
    "USE_HUB_KERNELS", "VLLM_ATTENTION_BACKEND", "VLLM_BATCH_INVARIANT", "VLLM_USE_V1",
    "VLLM_USE_TRITON_FLASH_ATTN", "VLLM_FLASH_ATTN_VERSION", "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_USE_DEEP_GEMM", "VLLM_USE_AITER",
    "VLLM_ROCM_USE_AITER", "VLLM_CPU_SGL_KERNEL", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
)  # fmt: skip
"""Recorded where they are set: what decides which kernels run and how exactly they compute."""

_BEYOND = (
    "XLA_FLAGS", "GLIBC_TUNABLES", "TORCH_CUDA_ARCH_LIST",  # flags of programs
    "USE_HUB_KERNELS",  # fetches code
    "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING", "MIOPEN_FIND_ENFORCE",  # write files
)  # fmt: skip
SETTABLE = tuple(name for name in VARIABLES if name not in _BEYOND)
"""Those that a capture may be given from a recorded run: the others reach beyond arithmetic."""
_VALUE = re.compile(r"[\w.,:;=+@|(){}\[\] -]{0,200}", re.ASCII)
_MOST_THREADS = 4096


def variables_to_set(recorded: Environment) -> dict[str, str | None]:
    """What must be set here, or taken away (None), to have the recorded values of ``SETTABLE``:
    names, numbers and lists of them. Others (paths, thousands of threads) are passed over."""
    wanted = {name: recorded.variables.get(name) for name in SETTABLE}
    return {
        name: value
        for name, value in wanted.items()
        if value != os.environ.get(name) and (value is None or _is_plain(name, value))
    }


def _is_plain(name: str, value: str) -> bool:
    numbers = [int(number) for number in re.findall(r"[0-9]+", value[:200])]
    too_many = name.endswith("_THREADS") and max(numbers, default=0) > _MOST_THREADS
    return _VALUE.fullmatch(value) is not None and not too_many


def resolve_device(name: str = "auto") -> str:
    """``auto`` → the accelerator if there is one, else ``cpu``; others are checked to be there.

    ``cuda`` is also the name of ROCm devices, as in torch. An index (``cuda:1``) is kept.
    Raises UsageError for a name torch does not know and for a device that is not there.
    """
    kind, _, index = name.partition(":")
    if kind not in DEVICE_TYPES:
        known = f"known: {', '.join(DEVICE_TYPES)} (ROCm devices are called cuda, as in torch)"
        raise UsageError(
            f"unknown device {name!r}", hint=did_you_mean(kind, DEVICE_TYPES, count=1, then=known)
        )
    if index and not (index.isascii() and index.isdecimal()):
        raise UsageError(f"device index {index!r} is not a number", hint="for example cuda:0")
    if kind == "cpu":
        return "cpu"
    if kind in ("auto", "npu"):
        _load_npu(required=kind == "npu")
    if kind == "auto":
        return accelerator_type() or "cpu"
    module = getattr(torch, kind, None)
    count = 0
    if kind == "mps":
        count = int(torch.backends.mps.is_available())
    elif module is not None and module.is_available():
        count = module.device_count()
    if count == 0:
        present = accelerator_type() or "cpu"
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
    device = resolve_device(device)
    kind = device.partition(":")[0]
    cpu, capability = cpu_name(), torch.backends.cpu.get_cpu_capability()
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
        variables={key: _told(os.environ[key]) for key in VARIABLES if key in os.environ},
        architecture=platform.machine() or None,
        cpu_model=cpu_model(),
        torch_build=torch_build(),
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


def accelerator_type() -> str | None:
    """Type of the available accelerator, or None."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def _accelerator_facts(kind: str, device: str) -> tuple[str, int, str | None, str | None]:
    """(name, count, driver, runtime) of an accelerator; what cannot be asked is None."""
    if kind == "mps":
        chip = _asked(torch.backends.mps, "get_name") or f"Apple {platform.processor() or 'GPU'}"
        return chip, 1, platform.mac_ver()[0] or None, None
    module = getattr(torch, kind)
    name = str(module.get_device_name(device))
    driver = runtime = None
    if kind == "cuda":
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        driver = _first_match(
            Path("/proc/driver/nvidia/version"), r"Module\s+(?:for \S+\s+)?([\d.]+)"
        )
    elif kind == "npu":
        home = os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest")
        utils = getattr(module, "utils", None)
        runtime = _asked(utils, "get_cann_version", "CANN")
        runtime = runtime or _first_match(Path(home) / "version.cfg", r"\[([\d.A-Za-z]+)")
        driver = _first_match(Path("/usr/local/Ascend/driver/version.info"), r"Version=(\S+)")
        driver = driver or _asked(utils, "get_cann_version", "DRIVER")
    elif kind == "xpu":
        driver = getattr(module.get_device_properties(device), "driver_version", None)
    return name, module.device_count(), driver, runtime


def _asked(owner: object, name: str, *arguments: object) -> str | None:
    """What a vendor's function answers; None where there is none, or it fails."""
    try:
        answer = getattr(owner, name)(*arguments)
    except Exception:  # of a driver or runtime that is not as its package expects
        return None
    return str(answer) or None


def _told(value: str) -> str:
    """A variable's value without paths (``XLA_FLAGS`` may name one), and of no great length."""
    return re.sub(r"(?<![\w.-])(~?/|[A-Za-z]:\\)[^\s,;:]*", "(a path)", value)[:400]


@functools.cache
def _installed(name: str) -> str | None:
    """A package's version; asked once, since what runs was imported once."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        match = re.search(pattern, path.read_text(errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def _versions() -> dict[str, str]:
    versions = {name: text for name in PACKAGES if (text := _installed(name)) is not None}
    versions["torch"] = str(torch.__version__)  # with the build, e.g. 2.13.0+cpu
    cudnn = _asked(torch.backends.cudnn, "version")
    if cudnn not in (None, "None"):
        versions["cudnn"] = str(cudnn)
    return versions
