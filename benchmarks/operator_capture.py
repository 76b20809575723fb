"""What recording operators costs: one block's forward, bare, recorded, and recorded to disk.

    python benchmarks/operator_capture.py [--rounds 15] [--dtype bfloat16]

bare       the block alone, on the input that an anchored forward gives it
recorded   the same under ``ops@BLOCK``, records handed to a sink that drops them
written    records written into a run, until that is closed

Rounds are interleaved, times are medians. Tiny shapes are those of the tests' models (hidden 64),
large ones those of a model of about a billion parameters (hidden 2048, two blocks of it).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from divergence.recording.api import capture
from divergence.recording.dispatch import OperatorRecorder
from divergence.recording.keeper import CopyKeeper
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import Manifest, Sizes
from divergence.run.record import Call
from divergence.run.writer import RunWriter
from tests.models.tiny import build

BLOCK = "model.layers.1"
SHAPES = (("tiny, hidden 64", 64, 4), ("large, hidden 2048", 2048, 32))
TOKENS = (1, 128, 512)


def model_of(hidden: int, heads: int, dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    """A random Llama of two blocks; its values do not matter, only its shapes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        vocab_size=512,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


class Bench:
    """One block with the arguments of one forward."""

    def __init__(self, model: LlamaForCausalLM, num_tokens: int, manifest: Manifest) -> None:
        self.model, self.manifest = model, manifest
        self.block = model.get_submodule(BLOCK)
        self.folder = tempfile.TemporaryDirectory()
        self.number = self.num_records = self.num_bytes = 0
        given: list[tuple[tuple, dict]] = []
        handle = self.block.register_forward_pre_hook(
            lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
        )
        ids = torch.randint(0, 512, (1, num_tokens))
        with torch.no_grad():
            model(ids, use_cache=False)
        handle.remove()
        ((self.args, self.kwargs),) = given

    def bare(self) -> None:
        with torch.no_grad():
            self.block(*self.args, **self.kwargs)

    def recorded(self) -> None:
        self._under(lambda site, item, call=None: None)

    def written(self) -> None:
        self.number += 1
        self.manifest.sizes = Sizes()
        order = 0
        with RunWriter(Path(self.folder.name) / str(self.number), self.manifest) as writer:

            def put(site: str, item: CapturedTensor, call: Call | None = None) -> None:
                nonlocal order
                writer.put(
                    item, pass_="anchored", sample=0, step=0, site=site, order=order, call=call
                )
                order += 1

            self._under(put)
        self.num_records, self.num_bytes = order, self.manifest.sizes.stored_bytes

    def _under(self, emit: Callable[..., Any]) -> None:
        recorder = OperatorRecorder(
            self.model,
            {BLOCK},
            emit=emit,
            call_of=lambda path: "",
            active=lambda: True,
            keep=CopyKeeper().keep,
        )
        recorder._weight_digests = self._digests = getattr(self, "_digests", {})
        with recorder.installed():
            self.bare()


def manifest_of_a_run() -> Manifest:
    """Of any run: only its form is needed."""
    with tempfile.TemporaryDirectory() as folder:
        model = build("llama", Path(folder) / "model", num_blocks=1)
        run = capture(
            model, out=Path(folder) / "run", prompts=["a"], max_new_tokens=0, device="cpu"
        )
        return run.manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="eager")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    manifest = manifest_of_a_run()
    print(
        f"Llama, one block, {args.dtype}, {args.attention} attention, "
        f"{torch.get_num_threads()} threads, {args.rounds} rounds\n"
    )
    print(
        "| shapes | tokens | bare ms | recorded ms | × bare | written ms | × bare | MB | records |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, hidden, heads in SHAPES:
        model = model_of(hidden, heads, getattr(torch, args.dtype), args.attention)
        for num_tokens in TOKENS:
            bench = Bench(model, num_tokens, manifest)
            times: dict[str, list[float]] = {"bare": [], "recorded": [], "written": []}
            for number in range(args.rounds + 1):
                for way, taken in times.items():
                    start = time.perf_counter()
                    getattr(bench, way)()
                    if number:  # the first round warms up
                        taken.append(1e3 * (time.perf_counter() - start))
            middle = {way: statistics.median(taken) for way, taken in times.items()}
            ratios = {
                way: statistics.median(
                    own / base for own, base in zip(times[way], times["bare"], strict=True)
                )
                for way in times
            }
            print(
                f"| {name} | {num_tokens} | {middle['bare']:.2f} | {middle['recorded']:.2f} | "
                f"{ratios['recorded']:.2f} | {middle['written']:.2f} | {ratios['written']:.2f} | "
                f"{bench.num_bytes / 1e6:.2f} | {bench.num_records} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
