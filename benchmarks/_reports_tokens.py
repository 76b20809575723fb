"""Reports of tokens, templates and log-probabilities: no tensors, or other prompts."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import divergence
from benchmarks._reports import Case, Runs, prompts_of
from benchmarks._reports_models import make
from divergence import MachineOptions, capture

__all__ = ["TOKENS"]

_NUM_ANSWERS, _NUM_TOKENS, _VOCABULARY = 12, 24, 256
_TOP_P = 0.9

Told = tuple[float, float]
"""What the rollout and the trainer say of one token."""


def _temperature(logits: torch.Tensor, token: int) -> Told:
    return (
        float(logits.log_softmax(-1)[token]),
        float((logits / 0.6).log_softmax(-1)[token]),
    )


def _renormalised(logits: torch.Tensor, token: int) -> Told:
    """The rollout's is over the likeliest tokens that hold 90% together."""
    whole = logits.log_softmax(-1)
    order = whole.argsort(descending=True)
    before = whole[order].exp().cumsum(0) - whole[order].exp()
    kept = order[before < _TOP_P]
    return float(whole[token] - whole[kept].exp().sum().log()), float(whole[token])


def _rollouts(told: Callable[[torch.Tensor, int], Told], noise: float) -> Callable[..., Runs]:
    """Answers of a made-up model, as a rollout and as a trainer tell them."""

    def made(case: Case, folder: Path) -> Runs:
        generator, draw = torch.Generator().manual_seed(0), random.Random(0)
        lines = []
        for _ in range(_NUM_ANSWERS):
            prompt = [draw.randrange(3, _VOCABULARY) for _ in range(6)]
            answer, rollout, trainer = [], [], []
            for _ in range(_NUM_TOKENS):
                logits = 2.5 * torch.randn(_VOCABULARY, generator=generator).double()
                whole = logits.softmax(-1).sort(descending=True)
                likely = whole.indices[whole.values.cumsum(0) - whole.values < _TOP_P]
                chances = logits.softmax(-1)[likely]
                token = int(likely[torch.multinomial(chances, 1, generator=generator)])
                first, second = told(logits, token)
                answer.append(token)
                rollout.append(min(0.0, first))
                trainer.append(min(0.0, second + draw.gauss(0, noise)))
            lines.append(
                {
                    "tokens": prompt + answer,
                    "response_length": len(answer),
                    "rollout_log_probs": rollout,
                    "log_probs": trainer,
                    "loss_mask": [1] * len(answer),
                }
            )
        file = folder / "rollouts.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        divergence.import_dump(file, out=folder / "a")
        divergence.import_dump(file, out=folder / "b", layout="trainer")
        return Runs(folder / "a", folder / "b", is_localized=False)

    return made


def _one_token_too_many(case: Case, folder: Path) -> Runs:
    """Documents of one batch: in B each but the longest counts the first pad behind it."""
    draw = random.Random(0)
    for name in ("a", "b"):
        lines = []
        draw.seed(0)
        for number in range(8):
            length = 24 - (number % 4) * 3
            answer = [draw.randrange(3, _VOCABULARY) for _ in range(length)]
            values = [math.log(draw.uniform(0.05, 0.9)) for _ in answer]
            if name == "b" and length < 24:
                answer, values = [*answer, 0], [*values, -7.5]
            lines.append(
                {
                    "tokens": [5, 6, 7, number + 10, *answer],
                    "response_length": len(answer),
                    "rollout_log_probs": values,
                    "loss_mask": [1] * len(answer),
                }
            )
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        divergence.import_dump(file, out=folder / name)
    return Runs(folder / "a", folder / "b", is_localized=False)


def _beginning(*ids: int) -> Callable[..., Runs]:
    """A's prompts begin with one BOS, B's with ``ids``."""

    def made(case: Case, folder: Path) -> Runs:
        model = make(case.model, folder / "model")
        texts = prompts_of(case)
        for name, start in (("a", [1]), ("b", list(ids))):
            capture(
                model,
                out=folder / name,
                prompts=[[*start, *text] for text in texts],
                max_new_tokens=case.new_tokens,
                dtype=case.dtype,
                machine=MachineOptions(probe=False),
            )
        return Runs(folder / "a", folder / "b")

    return made


_TEXTS = ("the sea is blue", "eBay sells 1234 and I don't", "the sky is blue and so is the sea")


def _other_tokenizer(case: Case, folder: Path) -> Runs:
    """One vocabulary, two regular expressions that split texts before the merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = make(case.model, folder / "model")
    shutil.copytree(model, folder / "other")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.train_from_iterator([*_TEXTS * 9, "eBay don't 12 34 1234 sells blue"], trainer)
    patterns = {"model": r"\s+|\d|[^\s\d]+", "other": r"\s+|\d+|[A-Z]?[a-z]+|[^\s\da-zA-Z]"}
    for name, pattern in patterns.items():
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            unk_token="<unk>",
        )
        wrapped.save_pretrained(folder / name)
    for name, source in (("a", model), ("b", folder / "other")):
        capture(
            source,
            out=folder / name,
            prompts=list(_TEXTS),
            max_new_tokens=2,
            machine=MachineOptions(probe=False),
        )
    return Runs(folder / "a", folder / "b")


def _cases() -> Iterator[Case]:
    scored = {"kinds": ("systematic",), "side": None, "letter": "S"}
    for name, noise in (("exact", 1e-7), ("bfloat16", 0.02)):
        yield Case(
            name=f"temperature-{name}",
            **scored,
            report="huggingface/trl#4159, modelscope/ms-swift#8427",
            cause="the engine's log-probabilities are raw, the trainer divides by the temperature",
            runs=_rollouts(_temperature, noise),
            # log p' = log p / T + c, with another c at each place: chosen tokens alone bound T.
            words=(("temperature 0.6", r"temperature (0\.6|of at most 0\.6)"),),
        )
        yield Case(
            name=f"top-p-{name}",
            **scored,
            report="huggingface/trl#6789, vllm-project/vllm#42259, verl-project/verl#6240",
            cause="the engine renormalises over the likeliest tokens, the trainer does not",
            runs=_rollouts(_renormalised, noise),
            words=(("top-p", r"top[-_ ]p"),),
        )
    yield Case(
        name="one-token-too-many",
        report="ml-explore/mlx-lm#1855",
        letter="M",
        side=None,
        cause="documents shorter than the longest count one pad's log-probability",
        runs=_one_token_too_many,
        kinds=("systematic",),
        words=(("that one token more is counted", r"pad|one (more )?token|21.*22"),),
    )
    template = {
        "letter": "T",
        "kinds": ("incomparable",),
        "side": None,
        "report": "deepseek-ai/DeepSeek-R1#151, huggingface/open-r1#462, allenai/reward-bench#164",
    }
    yield Case(
        name="bos-twice",
        **template,
        cause="template and tokenizer both write the first token",
        runs=_beginning(1, 1),
        words=(("that BOS stands twice", r"(BOS|first|begin).*(twice|double|two)"),),
    )
    yield Case(
        name="bos-missing",
        **template,
        cause="neither template nor tokenizer writes it",
        runs=_beginning(),
        words=(("that BOS is missing", r"(BOS|first|begin).*(missing|without|lacks)"),),
    )
    yield Case(
        name="tokenizer",
        report="huggingface/transformers#42299, #42589, #45444",
        letter="T",
        cause="another regular expression splits the text before the merges",
        runs=_other_tokenizer,
        kinds=("incomparable",),
        side=None,
        words=(("that the tokenizers differ", "tokenizer|same text"), "prompt 1"),
    )


TOKENS: tuple[Case, ...] = tuple(_cases())
