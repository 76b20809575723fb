"""Graphs as torch's exporter writes them, and transformers' runs of the same models."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from divergence import Run, capture
from tests.models import onnx_graphs

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Hello there"]
QUICK: dict[str, Any] = {"probe": False}


@pytest.fixture(scope="session")
def graph_of(tmp_path_factory, tiny_model) -> Callable[[str], Path]:
    """``graph_of("llama")`` → an ONNX file with config and tokenizer beside it."""

    @functools.cache
    def build(name: str) -> Path:
        checkpoint = tiny_model(**onnx_graphs.MODELS[name])
        return onnx_graphs.build(name, checkpoint, tmp_path_factory.mktemp(f"onnx-{name}-"))

    return build


@pytest.fixture(scope="session")
def recorded(tmp_path_factory, tiny_model) -> Callable[..., Run]:
    """transformers' run of a model."""
    runs: dict[str, Run] = {}

    def make(name: str, **options: Any) -> Run:
        options = {"sites": "modules", "max_new_tokens": 3, "prompts": PROMPTS} | options
        key = repr((name, sorted(options.items())))
        if key not in runs:
            out = tmp_path_factory.mktemp("transformers-") / "run"
            checkpoint = tiny_model(**onnx_graphs.MODELS[name])
            runs[key] = capture(checkpoint, out=out, **options, **QUICK)
        return runs[key]

    return make


@pytest.fixture
def again(tmp_path) -> Callable[..., Run]:
    """``again(run, file)``: the run repeated by ONNX Runtime."""
    numbers: Iterator[int] = iter(range(99))

    def run(like: Run, file: Path | None, **options: Any) -> Run:
        out = tmp_path / f"run-{next(numbers)}"
        return capture(file, like=like, out=out, **({"engine": "onnx"} | QUICK | options))

    return run


@pytest.fixture
def damaged(graph_of, tmp_path) -> Callable[[Callable[[Any], None]], Path]:
    """The llama's graph with something done to it."""

    def make(change: Callable[[Any], None]) -> Path:
        import shutil

        import onnx

        shutil.copytree(graph_of("llama").parent, tmp_path / "damaged")
        path = tmp_path / "damaged" / "model.onnx"
        model = onnx.load(path)
        change(model)
        onnx.save(model, path)
        return path

    return make
