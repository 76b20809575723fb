"""The machine: hardware, software, switches, and the settings that make it deterministic."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import random
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy
import torch

from divergence.errors import UsageError, first_line
from divergence.run.manifest import Environment, Settings, Switch, SwitchStatus
from divergence.run.site import did_you_mean

# The processor and the build of torch, which decide the kernels that run; and free memory.
#
# The name that the processor gives itself (the brand string of cpuid, in Linux ``model name``) is
# shortened by clouds; maker, family, model and stepping tell two processors of one name apart. An
# Arm core has no brand string: implementer and part number have the names below (Arm, "Main ID
# Register"; Linux ``arch/arm64/include/asm/cputype.h``; util-linux ``lscpu-arm.c``).
#
# The machine's own count of free memory is not enough in a container: its control group (v2, or the
# older v1, and every group around it) may allow less.

_CPUINFO = Path("/proc/cpuinfo")
_MAKERS = {
    0x41: "Arm",
    0x42: "Broadcom",
    0x43: "Cavium",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x50: "Ampere",
    0x51: "Qualcomm",
    0x61: "Apple",
    0x6D: "Microsoft",
    0x70: "Phytium",
    0xC0: "Ampere",
}
_PARTS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x43, 0x0AF): "ThunderX2-99xx",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "TaiShan-v110",
    (0x48, 0xD02): "TaiShan-v120",
    (0x4E, 0x004): "Carmel",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
    (0x6D, 0xD49): "Azure Cobalt 100",
    (0x70, 0x663): "FTC663",
    (0x70, 0x862): "FTC862",
}
_BUILD = (
    ("compiler", r"^\s*-?\s*((?:GCC|clang|MSVC|Clang|AppleClang) \S+)"),
    ("C++", r"C\+\+ Version: (\d+)"),
    ("MKL", r"Math Kernel Library Version (\S+)"),
    ("oneDNN", r"MKL-DNN (v[\d.]+)"),
    ("OpenMP", r"OpenMP (\d+)"),
    ("BLAS", r"\bBLAS_INFO=(\w+)"),
    ("LAPACK", r"\bLAPACK_INFO=(\w+)"),
    ("ACL", r"\bUSE_ACL=(\w+)"),
    ("OpenBLAS", r"OpenBLAS (\d\S*)"),
    ("CUDA runtime", r"CUDA Runtime ([\d.]+)"),
    ("cuDNN", r"CuDNN ([\d.]+)"),
    ("MAGMA", r"Magma ([\d.]+)"),
    ("commit", r"COMMIT_SHA=([0-9a-f]{12})"),
    ("flags", r"CXX_FLAGS=.*?(-O\d)"),
)
"""Name → where it stands in torch.__config__.show()."""
_ODD_FLAGS = ("-ffast-math", "-funsafe-math-optimizations", "-ffp-contract=fast", "-march=native")


def cpu_name() -> str:
    """Return what the processor calls itself."""
    info = _cpuinfo()
    name = info.get("model name", "")
    if name and not name.startswith("ARM"):  # old Arm kernels: "ARMv8 Processor rev 1"
        return name
    return _arm(info) or info.get("Model") or platform.processor() or platform.machine()


def cpu_model() -> str | None:
    """``GenuineIntel family 6 model 143 stepping 8``; ``Arm Neoverse-V2 (0x41/0xd4f) r0p1``."""
    info = _cpuinfo()
    if "vendor_id" in info and "cpu family" in info:
        numbers = (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
        words = " ".join(f"{say} {info[key]}" for say, key in numbers if key in info)
        return f"{info['vendor_id']} {words}"
    core = _arm(info)
    if core is None:
        return None
    ids = f"{info['CPU implementer']}/{info['CPU part']}"
    variant = f"r{_number(info.get('CPU variant'))}p{_number(info.get('CPU revision'))}"
    return f"{core} ({ids}) {variant}"


def torch_build() -> dict[str, str]:
    """Compiler and linear algebra of this torch, by name; what it does not tell is left out."""
    text = torch.__config__.show()
    build = {}
    for name, pattern in _BUILD:
        match = re.search(pattern, text, re.MULTILINE)
        if match is not None:
            build[name] = match[1].rstrip(",")
    flags = [flag for flag in _ODD_FLAGS if flag in text]
    if flags:
        build["flags"] = " ".join([*filter(None, [build.get("flags")]), *flags])
    return build


def _arm(info: dict[str, str]) -> str | None:
    try:
        maker, part = int(info["CPU implementer"], 16), int(info["CPU part"], 16)
    except (KeyError, ValueError):
        return None
    maker_name = _MAKERS.get(maker, f"maker {maker:#x}")
    return f"{maker_name} {_PARTS.get((maker, part), f'part {part:#x}')}"


def _number(text: str | None) -> str:
    try:
        return str(int(text or "", 0))
    except ValueError:
        return "?"


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines; on machines with cores of two kinds, all parts are in the last
    ones' names alone, and the first stands for them."""
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that can be taken on ``device`` now; 0 where nobody tells."""
    if device.type != "cpu":
        asked = getattr(getattr(torch, device.type, None), "mem_get_info", None)
        try:  # of CUDA, torch_npu, XPU; a driver may refuse to tell
            return 0 if asked is None else int(asked(device)[0])
        except (RuntimeError, NotImplementedError, AttributeError):
            return 0
    available = _count(_MEMINFO, "MemAvailable:")
    return min([*([] if available is None else [available * 1024]), *_groups()], default=0)


def _groups() -> Iterator[int]:
    """Yield the bytes that each control group of this process may still take."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            root, limit, used, cached = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = _GROUPS / "memory", "memory.limit_in_bytes"
            used, cached = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            allowed, taken = _count(folder / limit), _count(folder / used)
            if allowed is not None and taken is not None:
                # pages of files that nobody reads now are given back when asked for
                taken -= _count(folder / "memory.stat", cached) or 0
                yield max(0, allowed - taken)


def _count(path: Path, key: str | None = None) -> int | None:
    """The number in a file, or beside ``key`` in it; None where there is none, or ``max``."""
    try:
        words = path.read_text().split()
        return int(words[0 if key is None else words.index(key) + 1])
    except (OSError, ValueError, IndexError):
        return None


# The machine a run was made on, described without secrets.
#
# No host name, user or file path is recorded; environment variables only by the
# allow-list below: what decides which kernels run and how exactly they compute. ``--label`` gives a
# machine a name of the user's own.

DEVICE_TYPES = ("auto", "cpu", "cuda", "npu", "xpu", "mps")

PACKAGES = """
    torch transformers tokenizers safetensors numpy accelerate kernels triton flash-attn
    flash-attn-3 flashinfer-python xformers bitsandbytes torchao gptqmodel autoawq peft
    liger-kernel unsloth mamba-ssm causal-conv1d flash-linear-attention transformer-engine
    deepspeed megablocks sgl-kernel torch-npu triton-ascend intel-extension-for-pytorch mkl
    intel-openmp vllm
""".split()

_VARIABLES_BY_OWNER = """
    # the CPU: instruction sets, threads (how a sum is divided), reproducible modes
    ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ONEDNN_CPU_ISA_HINTS
    DNNL_CPU_ISA_HINTS ONEDNN_DEFAULT_FPMATH_MODE DNNL_DEFAULT_FPMATH_MODE
    ONEDNN_PRIMITIVE_CACHE_CAPACITY MKL_CBWR MKL_ENABLE_INSTRUCTIONS MKL_NUM_THREADS MKL_DYNAMIC
    MKL_THREADING_LAYER MKL_INTERFACE_LAYER MKL_DEBUG_CPU_TYPE OMP_NUM_THREADS OMP_DYNAMIC
    OMP_PROC_BIND OMP_PLACES OMP_SCHEDULE OMP_THREAD_LIMIT GOMP_CPU_AFFINITY KMP_AFFINITY
    KMP_BLOCKTIME KMP_DETERMINISTIC_REDUCTION KMP_FORCE_REDUCTION OPENBLAS_NUM_THREADS
    OPENBLAS_CORETYPE OPENBLAS_MAIN_FREE GOTO_NUM_THREADS BLIS_NUM_THREADS BLIS_ARCH_TYPE
    VECLIB_MAXIMUM_THREADS NUMEXPR_NUM_THREADS LRU_CACHE_CAPACITY GLIBC_TUNABLES
    # torch
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_CUDNN_V8_API_DISABLED TORCH_BLAS_PREFER_CUBLASLT
    TORCH_BLAS_PREFER_HIPBLASLT TORCH_LINALG_PREFER_CUSOLVER TORCH_CUDA_ARCH_LIST
    TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE TORCHINDUCTOR_FREEZING TORCHINDUCTOR_MAX_AUTOTUNE
    TORCHINDUCTOR_EMULATE_PRECISION_CASTS TORCHINDUCTOR_CPP_WRAPPER
    TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG
    TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG TORCHINDUCTOR_CPP_ENABLE_TILING_HEURISTIC
    PYTORCH_JIT PYTORCH_NVFUSER_DISABLE PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
    PYTORCH_TUNABLEOP_ENABLED PYTORCH_TUNABLEOP_TUNING PYTORCH_NO_CUDA_MEMORY_CACHING
    TRITON_INTERPRET TRITON_F32_DEFAULT PYTHONHASHSEED
    # NVIDIA
    CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE CUBLAS_EMULATE_SINGLE_PRECISION
    CUBLAS_EMULATE_DOUBLE_PRECISION CUBLAS_EMULATION_STRATEGY CUDNN_CONV_WSCAP_DBG
    CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING NVIDIA_TF32_OVERRIDE NCCL_ALGO
    NCCL_PROTO NCCL_NVLS_ENABLE NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS
    FLASH_ATTENTION_DETERMINISTIC
    # AMD
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HSA_OVERRIDE_GFX_VERSION HIPBLASLT_ALLOW_TF32
    ROCBLAS_INTERNAL_FP16_ALT_IMPL ROCBLAS_DEFAULT_ATOMICS_MODE ROCBLAS_USE_HIPBLASLT
    MIOPEN_FIND_MODE MIOPEN_FIND_ENFORCE MIOPEN_DEBUG_CONVOLUTION_ATTRIB_FP16_ALT_IMPL
    MIOPEN_DEBUG_CONV_IMPLICIT_GEMM MIOPEN_DEBUG_CONV_WINOGRAD
    TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL
    # Ascend
    ASCEND_RT_VISIBLE_DEVICES ASCEND_LAUNCH_BLOCKING HCCL_DETERMINISTIC HCCL_ALGO
    HCCL_OP_EXPANSION_MODE TORCH_NPU_USE_COMPATIBLE_IMPL TORCH_NPU_LAZY_FUSION
    TORCH_NPU_FALLBACK_CPU_DISABLE LCCL_DETERMINISTIC CLOSE_MATMUL_K_SHIFT
    ATB_MATMUL_SHUFFLE_K_ENABLE ATB_LLM_LCOC_ENABLE ATB_OPERATION_EXECUTE_ASYNC
    ACL_OP_DETERMINISTIC ACL_PRECISION_MODE ACLNN_CACHE_LIMIT TASK_QUEUE_ENABLE
    INF_NAN_MODE_ENABLE INF_NAN_MODE_FORCE_DISABLE ALLOW_INTERNAL_FORMAT
    # Intel GPUs, TPUs, Apple
    ZE_AFFINITY_MASK IPEX_FP32_MATH_MODE IPEX_XPU_ONEDNN_LAYOUT XLA_FLAGS XLA_USE_BF16
    XLA_DOWNCAST_BF16 JAX_DEFAULT_MATMUL_PRECISION PYTORCH_MPS_PREFER_METAL PYTORCH_MPS_FAST_MATH
    PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_ENABLE_XPU_FALLBACK
    # engines
    USE_HUB_KERNELS VLLM_ATTENTION_BACKEND VLLM_BATCH_INVARIANT VLLM_USE_V1
    VLLM_USE_TRITON_FLASH_ATTN VLLM_FLASH_ATTN_VERSION VLLM_USE_FLASHINFER_SAMPLER
    VLLM_FLOAT32_MATMUL_PRECISION VLLM_USE_DEEP_GEMM VLLM_USE_AITER VLLM_ROCM_USE_AITER
    VLLM_CPU_SGL_KERNEL SGLANG_ENABLE_DETERMINISTIC_INFERENCE
"""
_LINES = (line for line in _VARIABLES_BY_OWNER.splitlines() if "#" not in line)
VARIABLES = [name for line in _LINES for name in line.split()]
"""Recorded where they are set: what decides which kernels run and how exactly they compute."""


def resolve_device(name: str = "auto") -> str:
    """``auto`` → the accelerator if there is one, else ``cpu``; others are checked to be there.
    ``cuda`` is also the name of ROCm devices, as in torch. An index (``cuda:1``) is kept. Raises
    UsageError for a name torch does not know and for a device that is not there."""
    kind, _, index = name.partition(":")
    if kind not in DEVICE_TYPES:
        names = f"known: {', '.join(DEVICE_TYPES)} (ROCm devices are called cuda, as in torch)"
        raise UsageError(
            f"unknown device {name!r}", hint=did_you_mean(kind, DEVICE_TYPES, count=1, then=names)
        )
    if index and not (index.isascii() and index.isdecimal()):
        raise UsageError(f"device index {index!r} is not a number", hint="for example cuda:0")
    if kind == "cpu":
        return "cpu"
    if kind in ("auto", "npu"):
        try:  # registers torch.npu
            import torch_npu  # noqa: F401
        except Exception as error:  # also a torch_npu built for another torch
            if kind == "npu":
                raise UsageError(
                    "device npu is not there: torch_npu cannot be imported",
                    where=str(error),
                    hint="install the torch-npu that fits this torch and CANN, and source "
                    "set_env.sh",
                ) from error
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
    versions = {name: text for name in PACKAGES if (text := _installed(name)) is not None}
    versions["torch"] = str(torch.__version__)  # with the build, e.g. 2.13.0+cpu
    cudnn = _answer_of(torch.backends.cudnn, "version")
    if cudnn not in (None, "None"):
        versions["cudnn"] = str(cudnn)
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
        versions=versions,
        variables={key: _without_paths(os.environ[key]) for key in VARIABLES if key in os.environ},
        architecture=platform.machine() or None,
        cpu_model=cpu_model(),
        torch_build=torch_build(),
    )


def accelerator_type() -> str | None:
    """Type of the available accelerator, or None."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def _accelerator_facts(kind: str, device: str) -> tuple[str, int, str | None, str | None]:
    """(name, count, driver, runtime) of an accelerator; what cannot be asked is None."""
    if kind == "mps":
        chip = (
            _answer_of(torch.backends.mps, "get_name") or f"Apple {platform.processor() or 'GPU'}"
        )
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
        runtime = _answer_of(utils, "get_cann_version", "CANN")
        runtime = runtime or _first_match(Path(home) / "version.cfg", r"\[([\d.A-Za-z]+)")
        driver = _first_match(Path("/usr/local/Ascend/driver/version.info"), r"Version=(\S+)")
        driver = driver or _answer_of(utils, "get_cann_version", "DRIVER")
    elif kind == "xpu":
        driver = getattr(module.get_device_properties(device), "driver_version", None)
    return name, module.device_count(), driver, runtime


def _answer_of(owner: object, name: str, *arguments: object) -> str | None:
    """Return what a vendor's function answers; None where there is none, or it fails."""
    try:
        answer = getattr(owner, name)(*arguments)
    except Exception:  # of a driver or runtime that is not as its package expects
        return None
    return str(answer) or None


def _without_paths(value: str) -> str:
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


# Deterministic settings: every switch asked for, and what the machine made of it.
#
# Floating-point results change with the order of additions and with the precision that a backend
# silently substitutes (TF32, reduced-precision reductions, HF32). Each switch that this torch has
# is set, read back, recorded as accepted, refused or absent (what cannot be read back: as set),
# and restored when the ``with`` block ends. Environment variables that a runtime reads once are
# set before the device starts; where it has already started they are recorded as refused.
#
# This makes one machine repeat itself; it cannot make two machines agree.


@dataclass(slots=True)
class Determinism:
    """The determinism switches that were set. It is filled while the block runs."""

    switches: list[Switch] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Operators that torch itself reports as nondeterministic."""
    fallbacks: list[str] = field(default_factory=list)
    """Operators of which torch says that the CPU ran them."""
    num_fallbacks: int = 0
    """How often torch said so."""

    def note_in(self, settings: Settings) -> None:
        """Write what was warned of so far into ``settings``."""
        settings.nondeterministic_warnings = list(self.warnings)
        settings.cpu_fallbacks = list(self.fallbacks)


# Attribute paths below torch, in the order they are set; restored in reverse.
_ATTRIBUTES: dict[str, tuple[tuple[str, object], ...]] = {
    "any": (
        # torch >= 2.9 names precision per backend and operator; "ieee" is plain float32.
        ("backends.fp32_precision", "ieee"),
        ("backends.mkldnn.matmul.fp32_precision", "ieee"),
        ("backends.mkldnn.conv.fp32_precision", "ieee"),
        ("backends.mkldnn.rnn.fp32_precision", "ieee"),
        ("backends.mkldnn.deterministic", True),
    ),
    "cuda": (
        ("backends.cudnn.fp32_precision", "ieee"),  # of all of CUDA
        ("backends.cuda.matmul.fp32_precision", "ieee"),
        ("backends.cudnn.conv.fp32_precision", "ieee"),
        ("backends.cudnn.rnn.fp32_precision", "ieee"),
        ("backends.cudnn.deterministic", True),
        ("backends.cudnn.benchmark", False),
        ("backends.cuda.matmul.allow_bf16_reduced_precision_reduction", False),
        ("backends.cuda.matmul.allow_fp16_reduced_precision_reduction", False),
        ("backends.cuda.matmul.allow_fp16_accumulation", False),
    ),
    "npu": (("npu.matmul.allow_hf32", False), ("npu.conv.allow_hf32", False)),
}
_FUNCTION = "set_float32_matmul_precision"
"""The one switch that is a pair of functions, of oneDNN and CUDA both."""
# Those of before torch 2.9. Set first, where there are both: torch refuses to read these, and
# its own cudnn.flags() fails, while they say other than the new ones do.
_LEGACY: dict[str, tuple[tuple[str, object], ...]] = {
    "any": ((_FUNCTION, "highest"),),
    "cuda": (("backends.cuda.matmul.allow_tf32", False), ("backends.cudnn.allow_tf32", False)),
}
_FACTS: dict[str, tuple[str, ...]] = {
    # Read and left alone: which kernels may be chosen.
    "any": (
        "backends.cuda.flash_sdp_enabled()",
        "backends.cuda.mem_efficient_sdp_enabled()",
        "backends.cuda.math_sdp_enabled()",
    ),
    "cuda": (
        "backends.cuda.cudnn_sdp_enabled()",
        "backends.cuda.fp16_bf16_reduction_math_sdp_allowed()",
        "backends.cuda.preferred_blas_library()",
        "backends.cuda.preferred_linalg_library()",
    ),
    "npu": ("npu.is_jit_compile_false()", "npu.matmul.cube_math_type"),
}
_VARIABLES: dict[str, tuple[tuple[str, str], ...]] = {
    # cuBLAS picks workspaces per stream unless told the size (cuBLAS manual, reproducibility)
    "cuda": (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),),
    # CANN: deterministic collectives, and no reordering of matmul along K
    "npu": (
        ("HCCL_DETERMINISTIC", "true"),
        ("LCCL_DETERMINISTIC", "1"),
        ("CLOSE_MATMUL_K_SHIFT", "1"),
        ("ATB_MATMUL_SHUFFLE_K_ENABLE", "0"),
        ("ATB_LLM_LCOC_ENABLE", "0"),
    ),
}


_NOISY = re.compile(r"(\S+) does not have a deterministic implementation")
_FELL_BACK = re.compile(
    r"operator '?([\w.:]+)'? is not currently supported on the \w+ backend and will fall back to "
    r"run on the CPU|Aten Op fallback from XPU to CPU"
)
"""In the words of torch_npu (VariableFallbackKernel.cpp) and MPS (MPSFallback.mm), and of XPU."""


_AS_GOOD = {"CUBLAS_WORKSPACE_CONFIG": (":16:8",), "HCCL_DETERMINISTIC": ("strict",)}
"""Values that a user may have chosen, and that are not lowered: cuBLAS names two deterministic
workspaces; ``strict`` keeps the order of reductions as well (CANN)."""


@contextlib.contextmanager
def cpu_threads(num: int | None) -> Iterator[None]:
    """torch computes on ``num`` threads of the CPU; None for as many as it has."""
    before = torch.get_num_threads()
    try:
        if num is not None:
            torch.set_num_threads(num)
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic_settings(
    device_type: str, *, seed: int, enabled: bool = True
) -> Iterator[Determinism]:
    """Seed python, numpy and torch, and set every switch that this torch has for ``device_type``.

    With ``enabled`` false only the seeds are set, and the switches are recorded as found.
    Switches, seeds and the filter of warnings are the process's: another thread waits here until
    this one has put them back.
    """
    with _ONE_THREAD, _settings(device_type, seed=seed, enabled=enabled) as state:
        yield state


_ONE_THREAD = threading.RLock()


@contextlib.contextmanager
def _settings(device_type: str, *, seed: int, enabled: bool) -> Iterator[Determinism]:
    state = Determinism()
    undo: list[tuple[str, object]] = []
    variables: dict[str, str | None] = {}
    mode = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    rng = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds cuda, xpu, mps and registered backends too
    try:
        if enabled:
            started = bool(getattr(getattr(torch, device_type, None), "is_initialized", bool)())
            for variable, text in _VARIABLES.get(device_type, ()):
                present = os.environ.get(variable)
                if present is not None and present in _AS_GOOD.get(variable, ()):
                    _note(
                        state, variable, text, present, "set", "kept: it promises as much or more"
                    )
                elif started and present != text:
                    why = "the device had started already"
                    _note(state, variable, text, present or "unset", "refused", why)
                else:
                    variables[variable], os.environ[variable] = present, text
                    _note(state, variable, text, present or "unset", "set")
            mode_name = str(mode[0]).lower()
            # warn_only: an operator without a deterministic form is recorded, not fatal.
            torch.use_deterministic_algorithms(True, warn_only=True)
            _note(state, "torch.use_deterministic_algorithms", "true", mode_name, "accepted")
            _set_switch(state, undo, "utils.deterministic.fill_uninitialized_memory", False)
        pairs = [
            pair
            for table in (_LEGACY, _ATTRIBUTES)
            for group in ("any", device_type)
            for pair in table.get(group, ())
            if hasattr(torch.backends, "fp32_precision") or not pair[0].endswith("fp32_precision")
        ]
        # All are read before any is set: a general fp32_precision answers for those below it.
        before = {name: _read(name) for name, _ in pairs}
        for name, wanted in pairs:
            if enabled:
                _set_switch(state, undo, name, wanted, before[name])
            else:
                _note_value(state, name)
        for name in (*_FACTS["any"], *_FACTS.get(device_type, ())):
            _note_value(state, name)
        with _collected_warnings(state):
            yield state
    finally:
        # The old ones, last first, then the new, general before particular: each writes others.
        old = [pair for pair in undo if _is_legacy(pair[0])]
        for name, value in [*reversed(old), *(pair for pair in undo if pair not in old)]:
            with contextlib.suppress(Exception):
                _write(name, value)
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        for variable, present in variables.items():
            os.environ.pop(variable, None)
            if present is not None:
                os.environ[variable] = present
        random.setstate(rng[0])
        numpy.random.set_state(rng[1])
        torch.set_rng_state(rng[2])


def _is_legacy(name: str) -> bool:
    return any(name == legacy for pairs in _LEGACY.values() for legacy, _ in pairs)


def _note(
    state: Determinism,
    name: str,
    asked: str,
    found: str,
    status: SwitchStatus,
    note: str | None = None,
) -> None:
    state.switches.append(Switch(name=name, asked=asked, found=found, status=status, note=note))


_UNREADABLE = "unreadable"
"""What torch does not tell of an old switch, since a new one was set by itself."""


def _value_of(name: str) -> object:
    """Raises AttributeError where this torch has no such switch."""
    try:
        if name == _FUNCTION:
            return torch.get_float32_matmul_precision()
        value = attrgetter(name.removesuffix("()"))(torch)
        return value() if name.endswith("()") else value
    except RuntimeError:
        if not _is_legacy(name):
            raise
        return _UNREADABLE


def _write(name: str, value: object) -> None:
    if name == _FUNCTION:
        torch.set_float32_matmul_precision(str(value))
        return
    owner, _, last = name.rpartition(".")
    setattr(attrgetter(owner)(torch), last, value)


def _read(name: str) -> object:
    """Its value, or None where this torch cannot tell."""
    try:
        return _value_of(name)
    except (AttributeError, RuntimeError, ImportError):
        return None


def _set_switch(
    state: Determinism,
    undo: list[tuple[str, object]],
    name: str,
    wanted: object,
    before: object = None,
) -> None:
    label, asked = f"torch.{name}", str(wanted).lower()
    try:
        old = _value_of(name) if before is None else before
    except (AttributeError, RuntimeError, ImportError) as error:
        _note(state, label, asked, "-", "absent", f"this torch: {first_line(error)}")
        return
    try:
        _write(name, wanted)
        now = _value_of(name)
    except Exception as error:  # a backend may refuse with any error of its own
        _note(state, label, asked, str(old).lower(), "refused", first_line(error))
        return
    if old != _UNREADABLE:
        undo.append((name, old))
    # a new switch that is not set yet may still hide what an old one says
    taken = now == wanted or (now == _UNREADABLE and _is_legacy(name))
    _note(state, label, asked, str(old).lower(), "accepted" if taken else "refused")


def _note_value(state: Determinism, name: str) -> None:
    try:
        _note(state, f"torch.{name}", "-", str(_value_of(name)).lower(), "accepted")
    except (AttributeError, RuntimeError, ImportError) as error:
        _note(state, f"torch.{name}", "-", "-", "absent", first_line(error))


@contextlib.contextmanager
def _collected_warnings(state: Determinism) -> Iterator[None]:
    """Keep what torch warns of while the block runs: operators "without a deterministic
    implementation", and those that "fall back to run on the CPU" (torch_npu, MPS, XPU), each time
    and not once a process; pass on the others."""
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        pass_on = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            for pattern, texts in ((_NOISY, state.warnings), (_FELL_BACK, state.fallbacks)):
                match = pattern.search(str(message))
                if match is not None:
                    name = next(filter(None, match.groups()), "an operator")
                    if name not in texts:
                        texts.append(name)
                    state.num_fallbacks += texts is state.fallbacks
                    return
            pass_on(message, category, *place, **more)

        for pattern in (_NOISY, _FELL_BACK):
            warnings.filterwarnings("always", message=f"(?s).*(?:{pattern.pattern})")
        warnings.showwarning = show
        torch.set_warn_always(True)
        try:
            yield
        finally:
            torch.set_warn_always(always)
