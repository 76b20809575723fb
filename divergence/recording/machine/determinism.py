"""Deterministic settings: every switch asked for, and what the machine made of it.

Floating-point results change with the order of additions and with the precision that a backend
silently substitutes (TF32, reduced-precision reductions, HF32). Each switch that this torch has is
set, read back, recorded as accepted, refused or absent (what cannot be read back: as set), and
restored when the ``with`` block ends. Environment variables that a runtime reads once are set
before the device starts; where it has already started they are recorded as refused.

This makes one machine repeat itself; it cannot make two machines agree.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy
import torch

from divergence.errors import first_line
from divergence.run.schema.manifest import Settings, Switch, SwitchStatus

__all__ = ["Determinism", "cpu_threads", "deterministic_settings"]


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
        """What was warned of so far."""
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
    "npu": (
        ("npu.matmul.allow_hf32", False),
        ("npu.conv.allow_hf32", False),
    ),
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
            _set_variables(device_type, state, variables)
            mode_name = str(mode[0]).lower()
            # warn_only: an operator without a deterministic form is recorded, not fatal.
            torch.use_deterministic_algorithms(True, warn_only=True)
            _note(state, "torch.use_deterministic_algorithms", "true", mode_name, "accepted")
            _set(state, undo, "utils.deterministic.fill_uninitialized_memory", False)
        pairs = _wanted(device_type)
        # All are read before any is set: a general fp32_precision answers for those below it.
        before = {name: _read(name) for name, _ in pairs}
        for name, wanted in pairs:
            if enabled:
                _set(state, undo, name, wanted, before[name])
            else:
                _look(state, name)
        for name in (*_FACTS["any"], *_FACTS.get(device_type, ())):
            _look(state, name)
        with _collected_warnings(state):
            yield state
    finally:
        # The old ones, last first, then the new, general before particular: each writes others.
        old = [pair for pair in undo if _is_legacy(pair[0])]
        for name, value in [*reversed(old), *(pair for pair in undo if pair not in old)]:
            with contextlib.suppress(Exception):
                _write(name, value)
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        random.setstate(rng[0])
        numpy.random.set_state(rng[1])
        torch.set_rng_state(rng[2])


def _wanted(device_type: str) -> list[tuple[str, object]]:
    wanted = [
        pair
        for table in (_LEGACY, _ATTRIBUTES)
        for group in ("any", device_type)
        for pair in table.get(group, ())
    ]
    if hasattr(torch.backends, "fp32_precision"):
        return wanted
    return [pair for pair in wanted if not pair[0].endswith("fp32_precision")]


def _is_legacy(name: str) -> bool:
    return any(name == legacy for pairs in _LEGACY.values() for legacy, _ in pairs)


def _note(
    state: Determinism, name: str, asked: str, found: str, status: SwitchStatus,
    note: str | None = None,
) -> None:  # fmt: skip
    state.switches.append(Switch(name=name, asked=asked, found=found, status=status, note=note))


_UNREADABLE = "unreadable"
"""What torch does not tell of an old switch, since a new one was set by itself."""


def _now(name: str) -> object:
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
        return _now(name)
    except (AttributeError, RuntimeError, ImportError):
        return None


def _set(
    state: Determinism, undo: list[tuple[str, object]], name: str, wanted: object,
    before: object = None,
) -> None:  # fmt: skip
    label, asked = f"torch.{name}", str(wanted).lower()
    try:
        old = _now(name) if before is None else before
    except (AttributeError, RuntimeError, ImportError) as error:
        _note(state, label, asked, "-", "absent", f"this torch: {first_line(error)}")
        return
    try:
        _write(name, wanted)
        now = _now(name)
    except Exception as error:  # a backend may refuse with any error of its own
        _note(state, label, asked, str(old).lower(), "refused", first_line(error))
        return
    if old != _UNREADABLE:
        undo.append((name, old))
    # a new switch that is not set yet may still hide what an old one says
    taken = now == wanted or (now == _UNREADABLE and _is_legacy(name))
    _note(state, label, asked, str(old).lower(), "accepted" if taken else "refused")


def _look(state: Determinism, name: str) -> None:
    try:
        _note(state, f"torch.{name}", "-", str(_now(name)).lower(), "accepted")
    except (AttributeError, RuntimeError, ImportError) as error:
        _note(state, f"torch.{name}", "-", "-", "absent", first_line(error))


def _set_variables(device_type: str, state: Determinism, saved: dict[str, str | None]) -> None:
    module = getattr(torch, device_type, None)
    started = bool(getattr(module, "is_initialized", bool)())
    for name, value in _VARIABLES.get(device_type, ()):
        before = os.environ.get(name)
        if before is not None and before in _AS_GOOD.get(name, ()):
            _note(state, name, value, before, "set", "kept: it promises as much or more")
            continue
        if started and before != value:
            _note(
                state, name, value, before or "unset", "refused", "the device had started already"
            )
            continue
        saved[name] = before
        os.environ[name] = value
        _note(state, name, value, before or "unset", "set")


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
