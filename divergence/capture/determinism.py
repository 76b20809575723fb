"""Deterministic settings: every switch asked for, and what the machine made of it.

Floating-point results change with the order of additions and with the precision
that a backend silently substitutes (TF32, reduced-precision reductions, HF32).
Each switch is set if this torch has it, read back, recorded as accepted, refused
or absent, and restored when the ``with`` block ends. Environment variables that a
runtime reads once are set before the device starts; where it has already started
they are recorded as refused.

What it does not do: it makes one machine repeat itself; it cannot make two
machines agree.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

from divergence.run.manifest import Switch

__all__ = ["Determinism", "deterministic_settings", "seed_everything"]


@dataclass(slots=True)
class Determinism:
    """What was set: filled while the block runs. ``warnings``: operators that torch
    itself reports as nondeterministic."""

    switches: list[Switch] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


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
_LEGACY_TF32 = (
    # Before torch 2.9; setting both generations is an error there.
    ("backends.cuda.matmul.allow_tf32", False),
    ("backends.cudnn.allow_tf32", False),
)
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


def seed_everything(seed: int) -> None:
    """Seed python, numpy, torch and every device. Inputs still travel as data, never as a seed."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds cuda, xpu, mps and registered backends too


@contextlib.contextmanager
def deterministic_settings(
    device_type: str, *, seed: int, enabled: bool = True
) -> Iterator[Determinism]:
    """Seed, and set every switch that this torch has for ``device_type``.

    With ``enabled`` false only the seeds are set, and the switches are recorded as found.
    """
    import numpy
    import torch

    state = Determinism()
    undo: list[tuple[object, str, object]] = []
    variables: dict[str, str | None] = {}
    mode = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    rng = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    seed_everything(seed)
    try:
        if enabled:
            _set_variables(device_type, state, variables)
            found = str(mode[0]).lower()
            # warn_only: an operator without a deterministic form is recorded, not fatal.
            torch.use_deterministic_algorithms(True, warn_only=True)
            _note(state, "torch.use_deterministic_algorithms", "true", found, "accepted")
            _set(state, undo, "utils.deterministic.fill_uninitialized_memory", False)
        pairs = _wanted(device_type)
        # All are read before any is set: a general fp32_precision answers for those below it.
        before = {name: _read(name) for name, _ in pairs}
        for name, wanted in pairs:
            if enabled:
                _set(state, undo, name, wanted, before[name])
            else:
                _look(state, name)
        with _collected_warnings(state):
            yield state
    finally:
        for owner, name, value in reversed(undo):
            with contextlib.suppress(Exception):
                setattr(owner, name, value)
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        for name, old in variables.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old
        random.setstate(rng[0])
        numpy.random.set_state(rng[1])
        torch.set_rng_state(rng[2])


def _wanted(device_type: str) -> list[tuple[str, object]]:
    import torch

    groups = {"any", device_type}
    wanted = [pair for group in _ATTRIBUTES if group in groups for pair in _ATTRIBUTES[group]]
    if hasattr(torch.backends, "fp32_precision"):
        return wanted
    wanted = [pair for pair in wanted if not pair[0].endswith("fp32_precision")]
    return wanted + (list(_LEGACY_TF32) if device_type == "cuda" else [])


def _owner(name: str) -> tuple[object, str]:
    import torch

    owner: object = torch
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, last


def _note(state: Determinism, name: str, asked: str, found: str, status, note=None) -> None:
    state.switches.append(Switch(name=name, asked=asked, found=found, status=status, note=note))


def _read(name: str) -> object:
    """Its value, or None where this torch cannot tell."""
    try:
        owner, last = _owner(name)
        return getattr(owner, last)
    except (AttributeError, RuntimeError, ImportError):
        return None


def _set(state: Determinism, undo: list, name: str, wanted: object, before: object = None) -> None:
    label, asked = f"torch.{name}", str(wanted).lower()
    try:
        owner, last = _owner(name)
        old = getattr(owner, last) if before is None else before
    except (AttributeError, RuntimeError, ImportError) as error:
        _note(state, label, asked, "-", "absent", f"this torch: {_first_line(error)}")
        return
    try:
        setattr(owner, last, wanted)
        now = getattr(owner, last)
    except Exception as error:  # a backend may refuse with any error of its own
        _note(state, label, asked, str(old).lower(), "refused", _first_line(error))
        return
    undo.append((owner, last, old))
    _note(state, label, asked, str(old).lower(), "accepted" if now == wanted else "refused")


def _look(state: Determinism, name: str) -> None:
    try:
        owner, last = _owner(name)
        _note(state, f"torch.{name}", "-", str(getattr(owner, last)).lower(), "accepted")
    except (AttributeError, RuntimeError, ImportError) as error:
        _note(state, f"torch.{name}", "-", "-", "absent", _first_line(error))


def _set_variables(device_type: str, state: Determinism, saved: dict[str, str | None]) -> None:
    import torch

    module = getattr(torch, device_type, None)
    started = bool(getattr(module, "is_initialized", bool)())
    for name, value in _VARIABLES.get(device_type, ()):
        found = os.environ.get(name)
        if started and found != value:
            _note(state, name, value, found or "unset", "refused", "the device had started already")
            continue
        saved[name] = found
        os.environ[name] = value
        _note(state, name, value, found or "unset", "accepted")


@contextlib.contextmanager
def _collected_warnings(state: Determinism) -> Iterator[None]:
    """Keep torch's "does not have a deterministic implementation" warnings; pass on the others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # once a place
        try:
            yield
        finally:
            others = []
            for warning in caught:
                text = str(warning.message)
                match = re.match(r"(\S+) does not have a deterministic implementation", text)
                if match is None:
                    others.append(warning)
                elif match[1] not in state.warnings:
                    state.warnings.append(match[1])
    for warning in {(str(w.message), w.category): w for w in others}.values():
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
