"""Healthy pairs of models with massive activations, as trained models have them.

One to three output channels of one to four blocks' down projections are 100 to 1000 times as large
as the others, so that one channel carries nearly all of a block's energy. Machines, dtypes,
attention kernels, batches, whole passes and partial sums differ as they do between healthy runs;
any verdict beyond within_floor is a false alarm.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks._health import PROMPTS
from benchmarks._hidden import hidden
from benchmarks._machines import SWITCHES, Machine, planting
from divergence import MachineOptions
from divergence.recording.api import capture
from tests.models.tiny import build

__all__ = ["NUM_PAIRS", "Massive", "make", "planned"]

NUM_PAIRS = 60
WAYS = ("sdpa", "batch", "split", "whole", "machine")
_PIECES = 8


@dataclass(frozen=True, slots=True)
class Massive:
    """One pair. ``way``: what is other on B's side; ``rows``: (block, channel, factor)."""

    number: int
    architecture: str
    dtype: str
    way: str
    first: str
    second: str
    rows: tuple[tuple[int, int, float], ...]
    hidden: int
    num_blocks: int
    prompts: tuple[str, ...]

    @property
    def key(self) -> str:
        return (
            f"{self.number} {self.architecture} {self.dtype} {self.way} {self.first} {self.second}"
        )


def planned(count: int = NUM_PAIRS) -> list[Massive]:
    """The pairs: dtypes and ways take turns, the rest is drawn."""
    pairs = []
    words = " ".join(PROMPTS).split()
    for number in range(count):
        draw = random.Random(f"massive-{number}")
        width, num_blocks = draw.choice((64, 128, 192)), draw.randrange(5, 9)
        channels = draw.sample(range(width), draw.randrange(1, 4))
        blocks = draw.sample(range(num_blocks), draw.randrange(1, 5))
        rows = tuple(
            (block, channel, round(100 * 10 ** draw.random()))
            for block in sorted(blocks)
            for channel in channels
        )
        first, second = draw.sample(list(SWITCHES), 2)
        prompts = []
        for n in range(draw.randrange(2, 9)):
            start = draw.randrange(len(words) - 4)
            prompts.append(" ".join([*words[start : start + draw.randrange(2, 12)], str(n)]))
        pairs.append(
            Massive(
                number=number,
                architecture=draw.choice(("llama", "llama", "qwen3", "gemma3")),
                dtype=("bfloat16", "float16", "float32")[number % 3],
                way=WAYS[number // 3 % len(WAYS)],
                first=first,
                second=second,
                rows=rows,
                hidden=width,
                num_blocks=num_blocks,
                prompts=tuple(prompts),
            )
        )
    return pairs


def make(pair: Massive, root: Path, machine: Callable[[str], Machine]) -> tuple[Path, Path, Path]:
    """Both runs and the truth, made under ``root``."""
    model = build(
        pair.architecture,
        root / "model",
        dtype=pair.dtype,
        hidden=pair.hidden,
        num_blocks=pair.num_blocks,
        seed=pair.number,
    )
    file = model / "model.safetensors"
    weights = load_file(file)
    for block, channel, factor in pair.rows:
        weights[f"model.layers.{block}.mlp.down_proj.weight"][channel] *= factor
    save_file(weights, file, metadata={"format": "pt"})
    a, b, truth = root / "a", root / "b", root / "truth"
    whole = pair.way == "whole"
    machine(pair.first).run(
        "capture",
        model=model,
        out=a,
        prompts=pair.prompts,
        max_new_tokens=3,
        batch=False,
        whole=whole,
        attn_implementation="eager",
    )
    machine(pair.first).ask("truth", run=a, out=truth)
    attention = "eager" if pair.way == "machine" else "sdpa"
    values: dict[str, Any] = {"attn_implementation": attention, "escalate": pair.number % 2 == 0}
    if pair.way == "batch":
        values["batch"] = True
    if pair.way == "split":  # a process without switches, where other code can be put in place
        capture(
            like=a,
            out=b,
            device="cpu",
            force=True,
            machine=MachineOptions(probe=False),
            prepare=planting(split, "split", 0, 1.0),
            **values,
        ).close()
    else:
        machine(pair.second).run("capture", like=a, out=b, **values)
    machine(pair.first).wait()
    return a, b, truth


def split(model: Any, name: str, block: int, *, strength: float) -> None:
    """Each down projection as eight partial products that are added in float32: as right as one."""
    for module_name, linear in model.named_modules():
        if not module_name.endswith("down_proj"):
            continue
        own = linear.forward

        @hidden(own)
        def forward(x: torch.Tensor, linear: Any = linear) -> torch.Tensor:
            parts = zip(
                x.float().chunk(_PIECES, -1), linear.weight.float().chunk(_PIECES, -1), strict=True
            )
            return functools.reduce(torch.add, [F.linear(p, w) for p, w in parts]).to(x.dtype)

        linear.forward = functools.partial(forward, linear=linear)


def spec(pair: Massive) -> dict[str, Any]:
    return asdict(pair)
