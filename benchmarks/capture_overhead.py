"""What capture costs beside the bare model: interleaved runs in one process, medians, ratios.

    python benchmarks/capture_overhead.py [--hidden 512] [--blocks 8] [--prompt 128] [--new 32]

bare      model.generate, greedy, nothing else
hooks     bare hooks that clone every block's output and keep it (the least any tool can do)
blocks    divergence capture, --sites blocks (default), written to disk
modules   divergence capture, --sites modules: every module's inputs and outputs

Each row's time is from the first forward until everything is on disk (run closed). What
happens once per capture and not per token (loading, digesting weights) is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from divergence.capture.determinism import Determinism
from divergence.capture.engines.load import LoadedModel
from divergence.capture.execution import Execution, Pass
from divergence.capture.keep import BufferKeeper
from divergence.capture.passes import run_pass
from divergence.capture.request import resolve_request
from divergence.run.buffer import DEFAULT_BUFFER_BYTES, Buffer, Limits
from divergence.run.writer import RunWriter


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    """A random Llama; its values do not matter, only its shapes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 4,
        num_hidden_layers=args.blocks,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 128),
        vocab_size=args.vocab,
        max_position_embeddings=4096,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()


def loaded_model(model: LlamaForCausalLM) -> LoadedModel:
    model.config.architectures = ["LlamaForCausalLM"]
    return LoadedModel(
        source="benchmark", revision=None, task="causal-lm", module=model, tokenizer=None,
        device=torch.device("cpu"), trust_remote_code=False,
    )  # fmt: skip


def bare(model: LlamaForCausalLM, ids: torch.Tensor, new: int) -> None:
    config = GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0, use_cache=True)
    with torch.no_grad():
        model.generate(inputs=ids, attention_mask=torch.ones_like(ids), generation_config=config)


def hooks(model: LlamaForCausalLM, ids: torch.Tensor, new: int) -> None:
    kept: list[torch.Tensor] = []

    def keep(_module: object, _args: object, output: object) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    handles = [block.register_forward_hook(keep) for block in model.model.layers]
    try:
        bare(model, ids, new)
    finally:
        for handle in handles:
            handle.remove()


class Captured:
    """divergence's own passes over a model that is loaded already."""

    def __init__(self, model: LlamaForCausalLM, ids: torch.Tensor, new: int, sites: str) -> None:
        prompt = ids[0].tolist()
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name) / "prompt.jsonl"
        file.write_text(f'{{"input_ids": {prompt}}}\n')
        request = resolve_request(
            "benchmark", like=None, task="causal-lm", revision=None, dtype=None, device="cpu",
            device_map=None, attn_implementation=None, trust_remote_code=False, prompts=(),
            prompts_file=file, chat=False, batch=False, max_new_tokens=new, sites=(sites,),
            steps=None, positions=None, deterministic=False, seed=0, repeat=1, anchor=False,
            plants=(), label=None,
        )  # fmt: skip
        self.capture = Execution(
            request, loaded_model(model), "cpu", Determinism(), lambda *_: None
        )
        self.manifest = self.capture._manifest(self.capture._plan([Pass("free")]), None)
        self.buffer = Buffer(Limits.of(DEFAULT_BUFFER_BYTES))
        self.number = 0
        self.sizes = SimpleNamespace(num_records=0, stored_bytes=0)

    def __call__(self, _model: LlamaForCausalLM, _ids: torch.Tensor, new: int) -> None:
        self.number += 1
        self.manifest.sizes = type(self.manifest.sizes)()
        path = Path(self.folder.name) / str(self.number)
        with RunWriter(path, self.manifest, buffer=self.buffer) as writer:
            self.capture.keeper = BufferKeeper(writer, self.buffer)
            run_pass(
                self.capture.loaded, self.capture._recorder(writer, Pass("free")),
                self.capture.samples, self.capture.groups, max_new_tokens=new,
            )  # fmt: skip
        self.sizes = self.manifest.sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    model = build(args)
    ids = torch.randint(0, args.vocab, (1, args.prompt))
    ways = {
        "bare": bare,
        "hooks": hooks,
        "blocks": Captured(model, ids, args.new, "blocks"),
        "modules": Captured(model, ids, args.new, "modules"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(model, ids, args.new)
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    print(
        f"Llama, {args.blocks} blocks, hidden {args.hidden}, {args.dtype}, prompt {args.prompt}, "
        f"{args.new} new tokens, {torch.get_num_threads()} threads, {args.rounds} rounds\n"
    )
    print("| way | median s | ratio to bare (median of rounds) | min | max | MB stored | records |")
    print("|---|---|---|---|---|---|---|")
    for name, way in ways.items():
        ratios = [own / base for own, base in zip(times[name], times["bare"], strict=True)]
        sizes = getattr(way, "sizes", None)
        print(
            f"| {name} | {statistics.median(times[name]):.3f} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f} | {max(ratios):.3f} "
            f"| {sizes.stored_bytes / 1e6 if sizes else 0:.1f} "
            f"| {sizes.num_records if sizes else 0} |"
        )


if __name__ == "__main__":
    main()
