"""What Δ log p shows: rounding of each dtype, and planted causes beside healthy pairs.

    python benchmarks/logprobs.py              # both tables, a minute
    python benchmarks/logprobs.py --trained    # the first one of a trained model (see _trained.py)
    python benchmarks/logprobs.py --experts    # rounding of a model with experts: its tail
    python benchmarks/logprobs.py --causes     # the second one alone, without a model

First table: a random Llama in its dtype against float64, the same tokens forced: mean |Δ log p| of
the tokens, beside what divergence.domains.logprobs.pattern takes as rounding. Second table: made-
up trainer-rollout pairs with a cause each, many times over: the verdict that they get. A verdict of
another kind is counted as wrong, and one with high confidence as wrong with confidence.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from divergence import compare, import_dump
from divergence.numerics.floor import LOGPROB_LIMIT_BY_DTYPE

Change = Callable[[int, int, float, random.Random], float]

NUM_PAIRS, NUM_PROMPTS, NUM_TOKENS = 20, 24, 60


def _expert(sequence: int, n: int, value: float, r: random.Random) -> float:
    return value + (r.choice((-3, 3)) if r.random() < 0.02 else r.gauss(0, 0.02))


def _other_experts(sequence: int, n: int, value: float, r: random.Random) -> float:
    return value + r.gauss(0, 3 if r.random() < 0.08 else 0.04)


CAUSES: dict[str, tuple[Change, str]] = {
    "none: rounding of bfloat16": (lambda s, n, v, r: v + r.gauss(0, 0.02), "within"),
    "none: heavy tails": (
        lambda s, n, v, r: v + r.gauss(0, 0.01) * r.expovariate(1) * (1 - v / 2),
        "within",
    ),
    "none: 8% of tokens sent to other experts": (_other_experts, "within"),
    "quantisation": (lambda s, n, v, r: v + r.gauss(0, 0.35), "everywhere"),
    "one prompt of 24": (lambda s, n, v, r: v + r.gauss(0, 1.5 if s == 7 else 0.02), "sequences"),
    "an expert, 2% of tokens": (_expert, "positions"),
    "a cache, growing": (lambda s, n, v, r: v + r.gauss(0, 0.01 + n * 0.01), "growing"),
    "another model": (lambda s, n, v, r: v - abs(r.gauss(0.8, 0.5)), "shifted"),
    "temperature 0.7": (lambda s, n, v, r: v / 0.7 + r.gauss(0, 0.02), "shifted"),
}


def rounding() -> None:
    """A random Llama of 4 and of 16 blocks; of trained models it is larger with the spread of their
    logits, which is printed beside."""
    from divergence.experiments import tiny

    _heading("blocks")
    for num_blocks in (4, 16):
        with tempfile.TemporaryDirectory() as folder:
            path = tiny.build(Path(folder) / "m", num_blocks=num_blocks, hidden=128)
            ids = torch.randint(3, 500, (16, 64), generator=torch.Generator().manual_seed(0))
            _rows(str(num_blocks), path, ids)


def trained() -> None:
    """SmolLM2-135M-Instruct on its own answers, and on English that it did not write."""
    from _trained import CHAT_PROMPTS, checkpoint
    from transformers import AutoTokenizer

    path = checkpoint("float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = (Path(__file__).parents[1] / "docs" / "faq.md").read_text(encoding="utf-8")
    english = torch.tensor(tokenizer(text).input_ids[: 8 * 96]).reshape(8, 96)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    written = []
    for prompt in CHAT_PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        whole = model.generate(**ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)
        written.append(whole[0, -64:])
    _heading("text")
    _rows("its own answers", path, torch.stack(written))
    _rows("docs/faq.md", path, english)


def _heading(first: str) -> None:
    print(f"| {first} | dtype | mean abs Δ log p | p99 | spread of logits | taken as rounding |")
    print("|---|---|---|---|---|---|")


def _rows(what: str, path: Path, ids: torch.Tensor) -> None:
    """Each dtype against float64 with the weights that the dtype rounded."""

    def scores(dtype: torch.dtype, rounded: torch.dtype) -> tuple[torch.Tensor, float]:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=rounded).to(dtype)
        with torch.no_grad():
            logits = model(ids).logits.double()
        table = torch.log_softmax(logits, -1)[:, :-1]
        return table.gather(-1, ids[:, 1:, None])[..., 0], float(logits.std(-1).mean())

    for name in ("bfloat16", "float16", "float32"):
        dtype = getattr(torch, name)
        truth, spread = scores(torch.float64, dtype)
        size = (scores(dtype, dtype)[0] - truth).abs().flatten()
        p99 = float(size.quantile(0.99))
        print(
            f"| {what} | {name} | {float(size.mean()):.1e} | {p99:.1e} | "
            f"{spread:.1f} | {LOGPROB_LIMIT_BY_DTYPE[name]:.1e} |",
            flush=True,
        )


def experts() -> None:
    """A random Mixtral of 8 blocks in bfloat16 against float32 with the same weights: how far
    rounding moves the tokens that it sends to other experts. ``gain``: of the experts' weights."""
    print("| gain | mean abs Δ log p | median | beyond 0.5 nats | they hold |")
    print("|---|---|---|---|---|")
    ids = torch.randint(0, 1000, (20, 64), generator=torch.Generator().manual_seed(1))
    for gain in (1, 3, 8):
        torch.manual_seed(0)
        model = MixtralForCausalLM(
            MixtralConfig(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=8,
                num_attention_heads=8,
                num_key_value_heads=4,
                vocab_size=1000,
                num_local_experts=8,
                num_experts_per_tok=2,
            )
        )
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight *= gain if "experts" in name else 8 if "lm_head" in name else 1
        model.to(torch.bfloat16).eval()
        scores = []
        for dtype in (torch.bfloat16, torch.float32):
            with torch.no_grad():
                table = torch.log_softmax(model.to(dtype)(ids).logits.double(), -1)[:, :-1]
            scores.append(table.gather(-1, ids[:, 1:, None]))
        size = (scores[0] - scores[1]).abs().flatten()
        far = size > 4 * LOGPROB_LIMIT_BY_DTYPE["bfloat16"]
        print(
            f"| {gain} | {float(size.mean()):.1e} | {float(size.median()):.1e} | "
            f"{float(far.double().mean()):.1%} | {float(size[far].sum() / size.sum()):.0%} |",
            flush=True,
        )


def causes() -> None:
    """Each cause NUM_PAIRS times, with enough prompts and with too few."""
    print("\n| cause | prompts | told rightly | not told | wrong | wrong with confidence |")
    print("|---|---|---|---|---|---|")
    for name, (change, pattern) in CAUSES.items():
        for num_prompts in (NUM_PROMPTS, 4):
            found: Counter[str] = Counter()
            for seed in range(NUM_PAIRS):
                report = _pair(change, seed, num_prompts)
                got, kind = report.logprobs.pattern, report.verdict.kind
                if kind == "undetermined":
                    found["untold"] += 1
                elif got == pattern:
                    found["right"] += 1
                elif report.verdict.confidence == "low":
                    found["untold"] += 1
                else:
                    found["wrong"] += 1
                    found["confident"] += report.verdict.confidence == "high"
            print(
                f"| {name} | {num_prompts} | {found['right']} of {NUM_PAIRS} | "
                f"{found['untold']} | {found['wrong']} | {found['confident']} |"
            )


def _pair(change: Change, seed: int, num_prompts: int):
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.jsonl"
        lines = []
        for sequence in range(num_prompts):
            rollout = [-generator.expovariate(1.2) for _ in range(NUM_TOKENS)]
            lines.append(
                {
                    "prompt_ids": [sequence + 1],
                    "completion_ids": list(range(NUM_TOKENS)),
                    "logprobs": rollout,
                    "old_per_token_logps": [
                        min(0.0, change(sequence, n, v, generator)) for n, v in enumerate(rollout)
                    ],
                }
            )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        a = import_dump(path, out=Path(folder) / "a")
        return compare(a, import_dump(path, out=Path(folder) / "b", layout="trainer"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--causes", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--trained", action="store_true")
    given = parser.parse_args()
    if given.trained:
        trained()
    elif given.experts:
        experts()
    else:
        if not given.causes:
            rounding()
        causes()
