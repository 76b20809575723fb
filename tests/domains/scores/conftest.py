"""Results as each tool writes them, made small."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures" / "scores"


@pytest.fixture
def table(tmp_path) -> Callable[..., Path]:
    """``table("a", [1, 0, ...], **columns)`` → a file of JSON lines with id and score."""

    def make(name: str, scores: Sequence[object], **columns: Sequence[object]) -> Path:
        rows = [
            {"id": f"q{n}", "score": score, **{key: one[n] for key, one in columns.items()}}
            for n, score in enumerate(scores)
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return make


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sample(number: int, *, score: float, right: int, likelihoods: Sequence[float], **fields):
    """One line of lm-eval's samples: multiple choice of A, B, C…"""
    prompt = fields.pop("prompt", f"Question {number}:")
    choices = [f" {letter}" for letter in "ABCDEFG"[: len(likelihoods)]]
    doc = {"query": prompt, "gold": right, **fields.pop("doc", {})}
    said = [[str(one), str(one == max(likelihoods))] for one in likelihoods]
    return {
        "doc_id": number,
        "doc": doc,
        "target": str(right),
        "arguments": {
            f"gen_args_{n}": {"arg_0": prompt, "arg_1": choice} for n, choice in enumerate(choices)
        },
        "resps": [[one] for one in said],
        "filtered_resps": said,
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": _hash(f"doc {number}"),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(str(right)),
        "acc": score,
        **fields,
    }


@pytest.fixture
def lm_eval(tmp_path) -> Callable[..., Path]:
    """``lm_eval("a", [line, ...], results={...})`` → a folder as lm-eval writes it."""

    def make(name: str, lines: Sequence[dict], *, task: str = "quiz", results=None) -> Path:
        folder = tmp_path / name / "model"
        folder.mkdir(parents=True, exist_ok=True)
        date = "2026-01-02T03-04-05.678901"
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (folder / f"samples_{task}_{date}.jsonl").write_text(text)
        if results is not None:
            (folder / f"results_{date}.json").write_text(json.dumps(results))
        return tmp_path / name

    return make
