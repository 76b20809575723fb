"""The worked case of docs/training.md: losses that part, and the layer that makes them.

    python benchmarks/training_case.py [--work DIR]     # two minutes on two cores

A small Llama is trained twice on the same batches from the same weights. The second "machine" has
an attention kernel of its own: its forward is right, its backward leaves out the scale by which
scores are multiplied. Then one step is recorded on both, from a checkpoint before the curves part.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from divergence import TrainOptions

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

import divergence  # noqa: E402
from divergence.experiments import tiny  # noqa: E402
from divergence.layout import print_lines  # noqa: E402
from divergence.report.localization import localization_document  # noqa: E402
from divergence.report.text import document_lines  # noqa: E402

STEPS, EVERY = 400, 100
PROMPTS = ["the model of a machine", "one step of training", "every gradient has a place"]


class _Scores(torch.autograd.Function):
    """q k^T · scale, whose backward forgets the scale for q."""

    @staticmethod
    def forward(context: Any, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        context.save_for_backward(q, k)
        context.scale = scale
        return (q @ k.transpose(-1, -2)) * scale

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        q, k = context.saved_tensors
        return gradient @ k, (gradient.transpose(-1, -2) @ q) * context.scale, None


def vendor_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers' eager attention is, but for the backward of the scores."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = _Scores.apply(query, key, scaling)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def on_vendor(model: PreTrainedModel) -> None:
    """The second machine's kernel, in every block."""
    AttentionInterface.register("vendor", vendor_attention)
    for module in model.modules():
        if type(module).__name__ == "LlamaAttention":
            module.config = copy.copy(module.config)
            module.config._attn_implementation = "vendor"


def train(folder: Path, out: Path, *, vendor: bool) -> None:
    """Losses go to ``out``.jsonl, a checkpoint of every ``EVERY`` steps to ``out``-STEP."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if vendor:
        on_vendor(model)
    text = Path(tiny.__file__).with_name("tiny.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    draws = torch.Generator().manual_seed(0)
    with out.with_suffix(".jsonl").open("w") as losses:
        for step in range(STEPS):
            if step % EVERY == 0 and not vendor:
                model.save_pretrained(f"{out}-{step}")
                tokenizer.save_pretrained(f"{out}-{step}")
            starts = torch.randint(len(ids) - 32, (8,), generator=draws)
            batch = torch.stack([ids[start : start + 32] for start in starts])
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.write(json.dumps({"step": step, "loss": float(loss.detach())}) + "\n")


def show(work: Path, *words: str) -> None:
    print("$ divergence", *words, flush=True)
    subprocess.run([sys.executable, "-m", "divergence", *words], cwd=work, check=False)
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--work", type=Path, help="a directory for what is made, which is kept")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="training-case-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        model = tiny.build(work / "model", seed=0, dtype="float32", num_blocks=4)
        train(model, work / "gpu", vendor=False)
        train(model, work / "npu", vendor=True)
        show(work, "compare", "gpu.jsonl", "npu.jsonl")
        a = divergence.capture(
            str(work / f"gpu-{EVERY}"),
            out=work / "a",
            training=TrainOptions(train=True),
            prompts=PROMPTS,
            machine=divergence.MachineOptions(probe=False),
        )
        divergence.capture(
            like=a,
            out=work / "b",
            prepare=on_vendor,
            machine=divergence.MachineOptions(probe=False),
        )
        divergence.truth(a, out=work / "truth")
        show(work, "compare", "a", "b", "--truth", "truth")
        print(">>> divergence.localize(a, b, truth=truth, prepare_candidate=on_vendor)")
        found = divergence.localize(
            work / "a",
            work / "b",
            truth=work / "truth",
            out=work / "down",
            prepare_candidate=on_vendor,
        )
        print_lines(document_lines(localization_document(found)))
        narrow = ["--dtype", "bfloat16", "--reduce-dtype", "bfloat16", "--learning-rate", "1e-4"]
        words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        show(
            work,
            "capture",
            f"gpu-{EVERY}",
            "-o",
            "narrow",
            "--train",
            "--optimizer-step",
            "adamw",
            *narrow,
            *words,
        )
        show(work, "inspect", "narrow")


if __name__ == "__main__":
    main()
