"""Runs written by hand: a manifest that says little, and any tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from divergence.run.manifest import (
    Environment,
    Manifest,
    ModelIdentity,
    Plan,
    SampleTokens,
    Settings,
    Tokens,
)


def _manifest(**changes: Any) -> Manifest:
    values = {
        "id": "0" * 32,
        "tool_version": "0.0.0",
        "created": "2026-01-01T00:00:00+00:00",
        "model": ModelIdentity(
            source="by-hand",
            model_class="Toy",
            task="causal-lm",
            config_digest="c",
            dtype="float32",
            num_parameters=1,
            digest="d",
        ),
        "tokens": Tokens(
            samples=[SampleTokens(prompt_ids=[1, 2]), SampleTokens(prompt_ids=[3])],
            groups=[[0], [1]],
        ),
        "settings": Settings(
            deterministic=True, seed=0, device="cpu", max_new_tokens=1, batch=False
        ),
        "environment": Environment(
            label="here",
            platform="Linux",
            python="3.11",
            device_type="cpu",
            device_name="cpu",
            cpu="cpu",
            cpu_capability="DEFAULT",
            num_threads=1,
            versions={},
        ),
        "plan": Plan(passes=["free"], sites=["blocks"]),
    }
    return Manifest(**{**values, **changes})


@pytest.fixture
def manifest() -> Callable[..., Manifest]:
    """``manifest(**changes)`` → a small valid manifest of two prompts."""
    return _manifest


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """``write_run({"a:out": tensor})`` → the directory of a complete run that holds them."""
    from divergence.run.writer import Item, RunWriter

    def write(tensors: dict[str, Any], path: Path | None = None, **changes: Any) -> Path:
        path = path or tmp_path / "run"
        with RunWriter(path, _manifest(**changes)) as writer:
            for order, (site, tensor) in enumerate(tensors.items()):
                item = tensor if isinstance(tensor, Item) else Item(tensor)
                writer.put(item, pass_="free", sample=0, step=0, site=site, order=order)
        return path

    return write


@pytest.fixture
def small_run(write_run: Callable[..., Path]) -> Path:
    """Three sites, two tensors: the first two sites share one."""
    import torch

    first = torch.arange(12, dtype=torch.float32).reshape(1, 3, 4)
    return write_run({"a:out": first, "b:in": first.clone(), "b:out": first.to(torch.bfloat16)})


@pytest.fixture
def mutated() -> Callable[[bytes, random.Random], bytes]:
    """``mutated(data, random)`` → the bytes with one kind of damage."""
    return _mutated


def _mutated(data: bytes, random_: random.Random) -> bytes:
    kind = random_.choice(["flip", "flip", "cut", "insert", "remove", "swap", "token"])
    place = random_.randrange(len(data) + 1)
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(random_.choice([1, 1, 4])):
            changed[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        return bytes(changed)
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return data[:place] + random_.randbytes(random_.choice([1, 8])) + data[place:]
    if kind == "remove":
        return data[:place] + data[place + random_.choice([1, 9]) :]
    if kind == "swap":
        other = random_.randrange(len(data) + 1)
        low, high = sorted((place, other))
        return data[:low] + data[high:] + data[low:high]
    token = random_.choice([b"1e999", b"-1", b"null", b"[]", b"{}", b'"', b"9" * 25, b"NaN", b"\n"])
    return data[:place] + token + data[place + len(token) :]
