"""Hand-made answers and toy runs, by way of fixtures: test files cannot import each other."""

import functools
import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import divergence
from divergence.numerics.summary import summarize
from divergence.recording.dispatch import OperatorRecorder
from divergence.recording.keeper import CopyKeeper
from divergence.run.manifest import SampleTokens, Tokens, digest_tensor
from divergence.run.record import Place, Record
from tests import by_hand


@pytest.fixture(scope="session")
def reports() -> ModuleType:
    """tests/report/factory.py"""
    path = Path(__file__).parent / "report" / "factory.py"
    spec = importlib.util.spec_from_file_location("report_factory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def answer_of() -> Callable[..., Any]:
    """``answer_of("sensitivity", **fields)``: what that function returns, made by hand; what its
    fields hold may be given as dicts and lists."""

    def make(name: str, **fields: Any) -> Any:
        function = getattr(divergence, name)
        kind = getattr(sys.modules[function.__module__], function.__annotations__["return"])
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        return kind(**{key: msgspec.convert(value, types[key]) for key, value in fields.items()})

    return make


COMMANDS = {
    "Report": ("compare", "compare a b"),
    "Matrix": ("compare_many", "compare a b c"),
    "CheckResult": ("check", "check golden new"),
    "Localization": ("localize", "localize a b -o out"),
    "Sensitivity": ("sensitivity", "sensitivity a"),
    "SelfcheckResult": ("selfcheck", "selfcheck model"),
}
"""By answer: the function that gives it, and the command that prints it."""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def printed(invoke, monkeypatch) -> Callable[..., str]:
    """``printed(answer, *options)``: what the command prints whose function gives that answer.
    ``columns``: to a terminal so wide, with its codes; else to a pipe."""

    def call(answer: Any, *options: object, columns: int | None = None) -> str:
        name, words = COMMANDS[type(answer).__name__]
        module = sys.modules[getattr(divergence, name).__module__]
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, **__: answer)
            if columns is None:
                return invoke(*words.split(), *options)[1]
            patch.setattr(sys, "stdout", terminal := _Terminal())
            patch.setenv("TERM", "xterm-256color")
            patch.setenv("COLUMNS", str(columns))
            invoke(*words.split(), *options)
            return terminal.getvalue()

    return call


@pytest.fixture
def lines_of(printed, monkeypatch) -> Callable[..., list[str]]:
    """``lines_of(answer, *options)``: the lines that are printed, each as long as it is."""

    def call(answer: Any, *options: object) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr("divergence.layout.MAX_WIDTH", 1_000_000)
            return printed(answer, *options).splitlines()

    return call


@pytest.fixture(scope="session")
def checked() -> Callable[..., Any]:
    """``checked(report, policy)``: what `check` answers where that is the report of the two runs.
    ``**tables``: a policy of these."""

    def call(report: divergence.Report, policy: Any = None, **tables: Any) -> Any:
        module = sys.modules[divergence.compare.__module__]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "compare", lambda *_, **__: report)
            policy = by_hand.policy(**tables) if tables else policy
            return divergence.check("golden", "new", policy=policy)

    return call


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
