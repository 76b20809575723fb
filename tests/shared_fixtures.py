"""Hand-made reports and toy runs, by way of fixtures: test files cannot import each other."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from divergence.numerics.summary import summarize
from divergence.recording.dispatch import OperatorRecorder
from divergence.recording.keeper import CopyKeeper
from divergence.run.manifest import SampleTokens, Tokens, digest_tensor
from divergence.run.record import Place, Record


@pytest.fixture(scope="session")
def reports() -> ModuleType:
    """tests/report/factory.py"""
    path = Path(__file__).parent / "report" / "factory.py"
    spec = importlib.util.spec_from_file_location("report_factory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Toy:
    """A run in memory: what ``forward(*inputs)`` calls, recorded as a capture records it.

    Has of a Run what comparing operators needs: records, ``read``, ``find``, the settings, and how
    many pads each prompt of its batch has on the left and on the right (``pads``), with how many
    tokens.
    """

    def __init__(
        self, forward, inputs, *, weights=None, compute_dtype=None, steps=1, pads=((0, 1, 0),)
    ):
        self.records, self._tensors = [], {}
        plan = SimpleNamespace(skipped_operators={})
        settings = SimpleNamespace(compute_dtype=compute_dtype)
        samples = [
            SampleTokens(num_left_pad=left, prompt_ids=[0] * count, num_right_pad=right)
            for left, count, right in pads
        ]
        tokens = Tokens(samples=samples, groups=[list(range(len(samples)))])
        self.manifest = SimpleNamespace(settings=settings, plan=plan, tokens=tokens)
        module = _Toy(forward, weights or {})
        for step in range(steps):
            recorder = OperatorRecorder(
                module,
                {"."},
                emit=functools.partial(self._emit, step),
                call_of=lambda path: "",
                active=lambda: True,
                keep=CopyKeeper().keep,
                weights=True,
            )
            with torch.no_grad(), recorder.installed():
                module(*(tensor.clone() for tensor in inputs))
            plan.skipped_operators.update(recorder.skipped)

    def _emit(self, step, site, item, call=None):
        digest = digest_tensor(item.tensor)
        self._tensors[step, site] = item.tensor
        self.records.append(
            Record(
                pass_="anchored",
                sample=0,
                step=step,
                site=site,
                order=len(self.records),
                shape=item.shape,
                dtype=item.dtype,
                xxh3=digest,
                call=call,
                place=Place(shard="tensors/r00000-000000.safetensors", key=digest),
                summary=summarize(item.tensor),
            )
        )

    def read(self, record):
        return self._tensors[record.step, record.site]

    def has_bytes(self, record):
        return True

    def expect(self, records):
        """It is all here."""

    def find(self, key):
        _, _, step, site = key
        return next((r for r in self.records if (r.step, r.site) == (step, site)), None)


class _Toy(torch.nn.Module):
    def __init__(self, function, weights):
        super().__init__()
        self.function = function
        for name, value in weights.items():
            self.register_buffer(name, value)

    def forward(self, *inputs):
        names = dict(self.named_buffers())
        return self.function(*inputs, **names)


@pytest.fixture(scope="session")
def toy() -> type[Toy]:
    """``toy(forward, inputs)``: a run in memory."""
    return Toy
