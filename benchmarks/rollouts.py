"""Answers of a rollout with both sides' log-probabilities, as docs/rl.md reads them.

    python benchmarks/rollouts.py [--out rollouts.jsonl] [--temperature 0.7]

SmolLM2-135M-Instruct (benchmarks/_trained.py) in bfloat16 samples an answer to each of twelve
prompts, token by token with its cache, and notes the log-probability of each token: the rollout.
One forward over the whole answer gives the trainer's log-probabilities of the same tokens. With
--temperature the trainer divides its logits by it, which the rollout did not. The fields are TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._trained import CHAT_PROMPTS, checkpoint

__all__ = ["main"]

PROMPTS = (
    *CHAT_PROMPTS,
    "Name a river in Africa.",
    "What is 12 times 12?",
    "Explain what a compiler does.",
    "Which planet is the largest?",
)
NUM_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("rollouts.jsonl"))
    parser.add_argument("--temperature", type=float, default=1.0, help="of the trainer's logits")
    given = parser.parse_args()
    write(given.out, temperature=given.temperature)


@torch.no_grad()
def write(path: Path, *, temperature: float = 1.0) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint("bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    lines = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        answer, rollout = _sampled(model, ids)
        logits = model(torch.cat([ids, answer], dim=1)[:, :-1]).logits[0, ids.shape[1] - 1 :]
        table = torch.log_softmax(logits.float() / temperature, dim=-1)
        trainer = table.gather(-1, answer[0][:, None])[:, 0]
        lines.append(
            {
                "prompt_ids": ids[0].tolist(),
                "completion_ids": answer[0].tolist(),
                "sampling_per_token_logps": rollout,
                "old_per_token_logps": trainer.tolist(),
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _sampled(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """An answer (1, T) at temperature 1, and the log-probability of each of its tokens."""
    cache, fed, tokens, logprobs = None, ids, [], []
    for _ in range(NUM_TOKENS):
        out = model(fed, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        table = torch.log_softmax(out.logits[0, -1].float(), dim=-1)
        token = int(torch.multinomial(table.exp(), 1))
        tokens.append(token)
        logprobs.append(float(table[token]))
        fed = torch.tensor([[token]])
    return torch.tensor([tokens]), logprobs


if __name__ == "__main__":
    main()
