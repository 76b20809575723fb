"""Manifests, policies and measured numbers by hand: they say little, and what a test is about is
changed.

Each part of a manifest may be given as a whole, or as the fields of it that are other ones.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from divergence import Run
from divergence.comparison.result import SiteResult
from divergence.gate.policy import load_policy
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import (
    Environment,
    Manifest,
    ModelIdentity,
    Plan,
    SampleTokens,
    Settings,
    Sizes,
    Tokens,
)
from divergence.run.writer import RunWriter

_PARTS: dict[str, tuple[type, dict[str, Any]]] = {
    "model": (
        ModelIdentity,
        {
            "source": "by-hand",
            "model_class": "Toy",
            "task": "causal-lm",
            "config_digest": "c",
            "dtype": "float32",
            "num_parameters": 1,
            "digest": "d",
        },
    ),
    "settings": (
        Settings,
        {"deterministic": True, "seed": 0, "device": "cpu", "max_new_tokens": 1, "batch": False},
    ),
    "environment": (
        Environment,
        {
            "label": "here",
            "platform": "Linux",
            "python": "3.11",
            "device_type": "cpu",
            "device_name": "cpu",
            "cpu": "cpu",
            "cpu_capability": "DEFAULT",
            "num_threads": 1,
            "versions": {},
        },
    ),
    "plan": (Plan, {"passes": ["free"], "sites": ["blocks"]}),
}


def part(name: str, **changes: Any) -> Any:
    """``part("environment", label="there")``"""
    kind, values = _PARTS[name]
    return kind(**values | changes)


def manifest(**changes: Any) -> Manifest:
    """A valid manifest of two prompts; ``prompts``: others, as token ids."""
    prompts = changes.pop("prompts", [[1, 2], [3]])
    values = {
        "id": "0" * 32,
        "tool_version": "0.0.0",
        "created": "2026-01-01T00:00:00+00:00",
        "tokens": Tokens(
            samples=[SampleTokens(prompt_ids=ids) for ids in prompts],
            groups=[[number] for number in range(len(prompts))],
        ),
        **{name: {} for name in _PARTS},
        **changes,
    }
    parts = {name: part(name, **values[name]) for name in _PARTS if isinstance(values[name], dict)}
    return Manifest(**values | parts)


_PLACE = ("pass_", "sample", "step", "site", "order")
_ZERO = (
    "rel_l2",
    "one_minus_cosine",
    "max_abs",
    "gain",
    "gain_se",
    "token_rel_l2_median",
    "token_rel_l2_p99",
    "token_rel_l2_max",
    "channel_rel_l2_max",
)


def measured(site: str, ratio: float, *, rows: int = 8, features: int = 64, **changes: Any) -> Any:
    """What is measured of a pair of tensors whose median row is ``ratio`` floors off. Blocks are
    called h.0, h.1, ... or g.0, ..."""
    path = site.partition(":")[0]
    block = ".".join(path.split(".")[:2]) if path.startswith(("h.", "g.")) else None
    values = {
        "pass_": "anchored",
        "sample": 0,
        "step": 0,
        "site": site,
        "order": 0,
        "block": block,
        "role": "block" if path == block else "trunk" if block is None else "inner",
        "kind": "Block",
        "shape": (1, rows, features),
        "numel": rows * features,
        "reference_dtype": "float32",
        "candidate_dtype": "float32",
        "identical": False,
        "cosine": 1.0,
        "sqnr_db": math.inf,
        "reference_norm": 1.0,
        "candidate_norm": 1.0,
        "ratio": ratio,
        "ratio_max": ratio,
    }
    return SiteResult(**(dict.fromkeys(_ZERO, 0.0) | values | changes))


def policy(**tables: Any) -> Any:
    """The policy of these tables, as a file of TOML holds them."""
    return msgspec.convert(tables, type(load_policy()))


def put(writer: RunWriter, tensor: Any, site: str = "a:out", **changes: Any) -> None:
    """Hand a tensor to the writer, of the first forward of the first prompt."""
    place = {"pass_": "free", "sample": 0, "step": 0, "site": site, "order": 0, **changes}
    writer.put(CapturedTensor(tensor), **place)


def rewritten(run: Run, path: Path, change: Callable[..., Any], **manifest: Any) -> Run:
    """The run written again, its manifest changed: of each record what ``change(record, tensor)``
    makes of its tensor, or of (tensor, call); without those of which it makes None."""
    written = Run.open(run.path).manifest
    for name, value in {"complete": False, "sizes": Sizes(), **manifest}.items():
        setattr(written, name, value)
    with RunWriter(path, written) as writer:
        for record in run.records:
            if (made := change(record, run.read(record))) is not None:
                tensor, call = made if isinstance(made, tuple) else (made, record.call)
                place = {name: getattr(record, name) for name in _PLACE}
                put(writer, tensor, call=call, **place)
    return Run.open(path)
