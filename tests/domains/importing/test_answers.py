"""Answers of servers that people saved, and rollouts as torch.save wrote them."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from divergence import compare, import_dump
from divergence.errors import DumpError

TEXTS = [" a", " b", "<", " d"]
LOGPS = [-0.5, -1.25, -0.125, -2.0]


def chat(logps=LOGPS, **more):
    """As OpenAI and vLLM send it; -9999.0 stands for a token that is on no list."""
    content = [
        {
            "token": text,
            "logprob": logp,
            "bytes": list(text.encode()),
            "top_logprobs": [
                {"token": text, "logprob": logp, "bytes": []},
                {"token": "x", "logprob": -9999.0, "bytes": []},
            ],
        }
        for text, logp in zip(TEXTS, logps, strict=True)
    ]
    return {
        "object": "chat.completion",
        "model": "m",
        "usage": {"prompt_tokens": 6},
        "choices": [
            {
                "message": {"role": "assistant", "content": "".join(TEXTS)},
                "logprobs": {"content": content},
                **more,
            }
        ],
    }


def completions(logps=LOGPS):
    names = [f"token_id:{10 + n}" for n in range(4)]
    scored = {
        "tokens": names,
        "token_logprobs": logps,
        "text_offset": [0, 2, 4, 5],
        "top_logprobs": [{n: v} for n, v in zip(names, logps, strict=True)],
    }
    prompt = [None, {"6": {"logprob": -1.0, "rank": 1, "decoded_token": "p"}}]
    return {
        "object": "text_completion",
        "choices": [
            {
                "text": "".join(TEXTS),
                "prompt_token_ids": [5, 6],
                "token_ids": [10, 11, 12, 13],
                "prompt_logprobs": prompt,
                "logprobs": scored,
            }
        ],
    }


def llama(logps=LOGPS, *, form: str):
    if form == "2024":
        rows = [
            {"content": text, "probs": [{"tok_str": text, "prob": math.exp(logp)}]}
            for text, logp in zip(TEXTS, logps, strict=True)
        ]
    else:
        key, top = ("logprob", "top_logprobs") if form == "now" else ("prob", "top_probs")
        values = logps if form == "now" else [math.exp(logp) for logp in logps]
        rows = [
            {
                "id": 10 + n,
                "token": text,
                "bytes": [],
                key: value,
                top: [{"id": 10 + n, "token": text, "bytes": [], key: value}],
            }
            for n, (text, value) in enumerate(zip(TEXTS, values, strict=True))
        ]
    return {"content": "".join(TEXTS), "tokens_evaluated": 6, "completion_probabilities": rows}


FORMS = {
    "chat": chat,
    "completions": completions,
    "llama now": lambda logps=LOGPS: llama(logps, form="now"),
    "llama after sampling": lambda logps=LOGPS: llama(logps, form="post"),
    "llama of 2024": lambda logps=LOGPS: llama(logps, form="2024"),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_read(name, tmp_path):
    """One answer in a file, JSON lines, or lines of a batch; a shifted side is told."""
    off = [value - 1.5 for value in LOGPS]
    (tmp_path / "a.json").write_text(json.dumps(FORMS[name]()))
    wrapped = {"custom_id": "1", "response": {"status_code": 200, "body": FORMS[name](off)}}
    (tmp_path / "b.jsonl").write_text(json.dumps(wrapped) + "\n")
    a = import_dump(tmp_path / "a.json", out=tmp_path / "a")
    values = a.read(a.find(("free", 0, 0, "logprobs:out")))[0]
    own = values[-4:, 0]
    assert own.tolist() == pytest.approx(LOGPS, abs=1e-6)
    assert not bool((values == -9999.0).any())
    b = import_dump(tmp_path / "b.jsonl", out=tmp_path / "b")
    report = compare(a, b)
    assert report.verdict.kind not in ("identical", "within_floor"), report.verdict.summary
    again = import_dump(tmp_path / "a.json", out=tmp_path / "again", layout="answers")
    assert compare(a, again).verdict.kind == "identical"


def test_ids_and_scores_of_the_prompt(tmp_path):
    """vLLM's token_id: names and prompt_logprobs; of several choices each is a prompt."""
    answer = completions()
    answer["choices"] *= 2
    (tmp_path / "a.json").write_text(json.dumps(answer))
    run = import_dump(tmp_path / "a.json", out=tmp_path / "a")
    assert [s.prompt_ids for s in run.manifest.tokens.samples] == [[5, 6]] * 2
    assert run.manifest.tokens.samples[1].generated_ids == [10, 11, 12, 13]
    assert run.find(("free", 0, 0, "logprobs:out")).positions == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"choices": [{"message": {"content": "hi"}}]}', "no token has a log-probability"),
        (json.dumps(chat()) + '\n{"error": {"message": "overloaded"}}\n', "no answer of a server"),
    ],
)
def test_what_is_no_answer_is_refused(text, words, tmp_path):
    """A file that holds no answer of a server is refused with what it lacks."""
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(DumpError, match=words):
        import_dump(file, out=tmp_path / "a")


def test_a_file_that_was_cut_off(tmp_path):
    """What is wrong is said, though nobody knows what it was."""
    (tmp_path / "a.json").write_text(json.dumps(chat())[:300])
    with pytest.raises(DumpError, match="no JSON, or was cut off"):
        import_dump(tmp_path / "a.json", out=tmp_path / "a")


def slime(folder, *, shift=0.0):
    """What --save-debug-rollout-data and --save-debug-train-data leave."""
    folder.mkdir()
    samples, trained = [], []
    torch.manual_seed(0)
    for number in range(9):
        tokens = [1, 2, *range(10, 40)]
        logps = (-torch.rand(30)).tolist()
        samples.append(
            {
                "index": number,
                "prompt": "p",
                "tokens": tokens,
                "response_length": 30,
                "reward": 1.0,
                "loss_mask": [1] * 30,
                "rollout_log_probs": logps,
                "status": "completed",
                "weight_versions": ["0"],
                "metadata": {},
            }
        )
        trained.append(
            {
                "data_parallel_rank": 0,
                "rollout_position": number,
                "tokens": torch.tensor(tokens),
                "total_lengths": 32,
                "response_lengths": 30,
                "loss_masks": torch.ones(30).int(),
                "rollout_log_probs": torch.tensor(logps),
                "log_probs": torch.tensor(logps) * (1 + shift),
            }
        )
    torch.save({"rollout_id": 0, "samples": samples}, folder / "data_0.pt")
    torch.save(
        {
            "format_version": 2,
            "rollout_id": 0,
            "rank": 0,
            "samples": trained,
            "dp_shards": [],
            "raw_reward": [1.0],
        },
        folder / "train_0.pt",
    )


def test_slimes_files_of_torch_save(tmp_path):
    """Read without their pickle: the engine's side of the one, the trainer's of the other."""
    slime(tmp_path / "s", shift=2.0)
    a = import_dump(tmp_path / "s" / "data_0.pt", out=tmp_path / "a")
    b = import_dump(tmp_path / "s" / "train_0.pt", out=tmp_path / "b", layout="trainer")
    assert a.manifest.engine.name == b.manifest.engine.name == "slime"
    assert compare(a, b).verdict.kind in ("systematic", "drift")
    slime(tmp_path / "same")
    c = import_dump(tmp_path / "same" / "train_0.pt", out=tmp_path / "c", layout="trainer")
    assert compare(a, c).verdict.kind == "identical"


def test_a_batch_of_tensors_by_name(tmp_path):
    """verl's fields, saved as a plain dict."""
    ones = torch.ones(2, 3)
    batch = {
        "prompts": torch.full((2, 2), 5),
        "responses": torch.full((2, 3), 7),
        "attention_mask": torch.ones(2, 5).long(),
        "response_mask": ones.long(),
        "rollout_log_probs": -ones,
        "old_log_probs": -2 * ones,
    }
    torch.save(batch, tmp_path / "batch.pt")
    run = import_dump(tmp_path / "batch.pt", out=tmp_path / "a")
    assert run.manifest.tokens.samples[1].generated_ids == [7, 7, 7]


def test_code_in_a_pickle_is_not_run(tmp_path):
    """A pickle that asks for a call is refused by the call's name."""

    class Code:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"samples": [{"tokens": [1], "metadata": Code()}]}, tmp_path / "data.pt")
    with pytest.raises(DumpError, match=r"print"):
        import_dump(tmp_path / "data.pt", out=tmp_path / "a", layout="rollouts")


def test_verls_lines_without_tokens(tmp_path):
    """A clear word, and what to do."""
    line = {"input": "2+2=", "output": "4", "gts": "4", "score": 1.0, "step": 3}
    (tmp_path / "3.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DumpError, match="texts, no tokens") as caught:
        import_dump(tmp_path / "3.jsonl", out=tmp_path / "a")
    assert "divergence capture MODEL --prompts" in caught.value.hint


def test_logits_of_llama_debug(tmp_path):
    """Of the last token, with the prompt's ids beside; another row of them is found."""
    torch.manual_seed(0)
    logits = torch.randn(64)
    for name, row in (("a", logits), ("b", logits * 1.3)):
        (tmp_path / name).mkdir()
        row.numpy().astype("<f4").tofile(tmp_path / name / "llamacpp-tiny.bin")
        np.array([3, 4, 5], "<i4").tofile(tmp_path / name / "llamacpp-tiny-tokens.bin")
    logits.numpy().tofile(tmp_path / "a" / "llamacpp-tiny-embeddings.bin")  # are no logits
    runs = [import_dump(tmp_path / name, out=tmp_path / f"run-{name}") for name in "ab"]
    assert runs[0].manifest.tokens.samples[0].prompt_ids == [3, 4, 5]
    assert runs[0].find(("free", 0, 0, "lm_head:out")).positions == (2,)
    assert runs[0].manifest.model.dtype == "bfloat16"  # float32 is what they are written as
    report = compare(*runs)
    assert report.verdict.kind in ("localized", "systematic", "drift"), report.verdict.summary


def test_tensorrt_edges_layers(tmp_path):
    """Caches as far as they are filled, and logits: the first layer that is off is named."""
    torch.manual_seed(0)

    def write(path, factor):
        tensors = {}
        cache = torch.randn(2, 1, 2, 2, 16, 8)
        for step, length in enumerate((5, 6)):
            for layer in range(2):
                kept = cache[layer].clone()
                kept[..., length:, :] = float("nan")
                kept[:, :, :, :length] *= factor if layer == 1 else 1.0
                tensors[f"round_{step}.layer_{layer}.kv"] = kept
            tensors[f"round_{step}.logits"] = torch.ones(1, 32)
            tensors[f"round_{step}.context_lengths"] = torch.tensor([length], dtype=torch.int32)
            tensors[f"round_{step}.generated_token_ids"] = torch.tensor([3], dtype=torch.int32)
        save_file(tensors, path)

    torch.manual_seed(0)
    write(tmp_path / "a.safetensors", 1.0)
    torch.manual_seed(0)
    write(tmp_path / "b.safetensors", 1.5)
    (tmp_path / "edge").mkdir()
    (tmp_path / "a.safetensors").rename(tmp_path / "edge" / "layers.safetensors")
    (tmp_path / "edge" / "config.json").write_text("{}")
    files = {"a": tmp_path / "edge", "b": tmp_path / "b.safetensors"}
    runs = [import_dump(path, out=tmp_path / name) for name, path in files.items()]
    kept = runs[0].find(("free", 0, 1, "model.layers.1.self_attn.key_cache:out"))
    assert kept.shape == (1, 6, 2, 8)
    verdict = compare(*runs).verdict
    assert verdict.onset.site == "model.layers.1.self_attn.key_cache:out"
