"""Runs of operators written by hand: what a capture records, without a capture."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from divergence import Run
from divergence.ops import allowed
from divergence.recording.dispatch import tensors_in
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import Manifest, ModuleNote, digest_tensor
from divergence.run.record import Call, Operand
from divergence.run.site import operator_path
from divergence.run.writer import RunWriter
from tests import by_hand


def manifest(**changes: Any) -> Manifest:
    values = {
        "id": "a" * 32,
        "prompts": [[1, 2]],
        "environment": {"versions": {"torch": "2.13.0"}},
        "plan": {
            "sites": ["ops@block"],
            "modules": {"block": ModuleNote(kind="Block", role="block")},
        },
    }
    return by_hand.manifest(**values | changes)


def encoded(value: Any, operands: list[torch.Tensor]) -> Any:
    """An argument as the JSON of a call."""
    if isinstance(value, torch.Tensor):
        for number, known in enumerate(operands):
            if known is value:
                return {"tensor": number}
        operands.append(value)
        return {"tensor": len(operands) - 1}
    if isinstance(value, list | tuple):
        return [encoded(item, operands) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for kind in ("dtype", "layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return None if isinstance(value, torch.Generator) else value


class _Recorder(TorchDispatchMode):
    """Every operator that is no view: its operands each as a record of its own."""

    def __init__(self, writer: RunWriter, weights: dict[str, torch.Tensor], step: int) -> None:
        super().__init__()
        self._writer, self._weights, self._step = writer, weights, step
        self._counts: dict[str, int] = {}
        self._order = 0

    def _put(self, site: str, tensor: torch.Tensor, call: Call | None = None) -> None:
        self._order += 1
        self._writer.put(
            CapturedTensor(tensor.detach().clone().contiguous()),
            pass_="free",
            sample=0,
            step=self._step,
            site=site,
            order=self._order,
            call=call,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        kwargs = kwargs or {}
        alias = [result.alias_info for result in func._schema.returns]
        if any(one is not None and not one.is_write for one in alias):
            return func(*args, **kwargs)
        name = func.name().replace("::", ".").split(".")
        short = ".".join(name[:2])
        self._counts[short] = self._counts.get(short, 0) + 1
        path = operator_path("block", short, self._counts[short])
        tensors: list[torch.Tensor] = []
        names = [argument.name for argument in func._schema.arguments]
        values = dict(zip(names, args, strict=False)) | kwargs
        arguments = {key: encoded(value, tensors) for key, value in values.items()}
        operands = [self._operand(path, number, one) for number, one in enumerate(tensors)]
        result = func(*args, **kwargs)
        call = Call(
            operator=f"{short}.{func._overloadname}", arguments=arguments, operands=tuple(operands)
        )
        for index, tensor in enumerate(tensors_in(result) or tensors[:1]):
            port = f"out.{index}" if index else "out"
            self._put(f"{path}:{port}", tensor, None if index else call)
        return result

    def _operand(self, path: str, number: int, tensor: torch.Tensor) -> Operand:
        layout = {
            "shape": tuple(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "stride": None if tensor.is_contiguous() else tensor.stride(),
            "misalignment_bytes": tensor.data_ptr() % 64,
        }
        for name, weight in self._weights.items():
            if tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
                return Operand(
                    weight=name,
                    xxh3=digest_tensor(weight),
                    offset=tensor.storage_offset(),
                    **layout,
                )
        site = f"{path}:in.{number}"
        self._put(site, tensor)
        return Operand(site=site, **layout)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Run]:
    """``record(function, weights={}, path=..., **manifest changes)`` → a run of its operators."""

    def make(
        function: Callable[[], Any],
        *,
        weights: dict[str, torch.Tensor] | None = None,
        path: Path | None = None,
        **changes: Any,
    ) -> Run:
        out = path or tmp_path / "recorded"
        writer = RunWriter(out, manifest(**changes))
        with writer, torch.no_grad(), _Recorder(writer, weights or {}, 0):
            function()
        return Run.open(out)

    return make


@pytest.fixture
def own_operators(monkeypatch) -> Callable[[dict[str, Any]], None]:
    """``own_operators({"suite.half": ...})``: these are the plain functions that a domain knows."""

    def put(table: dict[str, Any]) -> None:
        monkeypatch.setattr(allowed, "_tables", lambda: {"suite": "here"})
        monkeypatch.setattr(allowed, "placed", lambda place: table)

    return put


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and digest_tensor(a) == digest_tensor(b)


def results(run: Run) -> dict[str, torch.Tensor]:
    """Every operator's results by site."""
    return {r.site: run.read(r) for r in run.records if ":out" in r.site}
