"""Files of log-probabilities: the fields of each framework, and what is refused."""

import json
import math
import struct

import numpy as np
import pytest

from divergence import compare, import_dump
from divergence.errors import DumpError, UsageError

PROMPT, ANSWER = [5, 6, 7], [11, 12, 13]
ROLLOUT, TRAINER = [-0.5, -1.0, -2.0], [-0.25, -1.5, -2.0]

LINES = {
    "verl": {
        "prompts": [0, *PROMPT],
        "responses": [*ANSWER, 0],
        "attention_mask": [0, 1, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 1, 1, 0],
        "rollout_log_probs": [*ROLLOUT, 0.0],
        "old_log_probs": [*TRAINER, 0.0],
    },
    "verl's agent loop": {
        "prompt_ids": PROMPT,
        "response_ids": ANSWER,
        "response_mask": [1, 1, 1],
        "response_logprobs": ROLLOUT,
        "old_log_probs": TRAINER,
    },
    "slime": {
        "tokens": [*PROMPT, *ANSWER],
        "response_length": 3,
        "loss_mask": [1, 1, 1],
        "rollout_log_probs": ROLLOUT,
        "log_probs": TRAINER,
    },
    "TRL": {
        "prompt_ids": PROMPT,
        "completion_ids": ANSWER,
        "sampling_per_token_logps": ROLLOUT,
        "old_per_token_logps": TRAINER,
    },
    "NeMo-RL": {  # a batch of one a line
        "token_ids": [[*PROMPT, *ANSWER, 0, 0]],
        "input_lengths": [6],
        "token_loss_mask": [[0, 0, 0, 1, 1, 1, 0, 0]],
        "generation_logprobs": [[0.0, 0.0, 0.0, *ROLLOUT, 0.0, 0.0]],
        "prev_logprobs": [[0.0, 0.0, 0.0, *TRAINER, 0.0, 0.0]],
    },
}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", LINES)
def test_each_frameworks_fields(name, tmp_path):
    """Both sides of one file: the same tokens, each with its own log-probabilities."""
    path = write(tmp_path / "r.jsonl", *[LINES[name]] * 2)
    for layout, values in (("auto", ROLLOUT), ("trainer", TRAINER)):
        run = import_dump(path, out=tmp_path / layout, layout=layout)
        sample, record = run.manifest.tokens.samples[1], run.find(("free", 1, 0, "logprobs:out"))
        assert (sample.prompt_ids, sample.generated_ids) == (PROMPT, ANSWER)
        assert record.positions == (3, 4, 5)
        assert run.read(record)[0, :, 0].tolist() == values
        assert run.manifest.engine.name == name.partition("'")[0]
    metrics = compare(tmp_path / "auto", tmp_path / "trainer").logprobs.rollout
    expected = sum(r - t for r, t in zip(ROLLOUT, TRAINER, strict=True)) / 3
    assert metrics["k1"] == pytest.approx(expected, abs=1e-9)


def test_one_list_is_read_as_lines_are(tmp_path):
    """json.dump of all answers, and what is wrong in one of them is said with its place."""
    write(tmp_path / "r.jsonl", *[LINES["TRL"]] * 2)
    path = tmp_path / "r.json"
    path.write_text(json.dumps([LINES["TRL"]] * 2, indent=1))
    runs = [import_dump(tmp_path / f"r.{form}", out=tmp_path / form) for form in ("jsonl", "json")]
    assert compare(*runs).verdict.kind == "identical"
    path.write_text(json.dumps([LINES["TRL"], {"completion_ids": [-1]}]))
    with pytest.raises(DumpError) as told:
        import_dump(path, out=tmp_path / "bad")
    assert str(told.value.where).endswith("r.json, entry 1")


def test_another_order_is_said(tmp_path):
    """The same prompts, shuffled: neither another template nor another tokenizer."""
    for change in ({"prompt_ids": [*PROMPT, 9]}, {"completion_ids": [1, 2, 3]}):
        lines = [LINES["TRL"] | change, *[LINES["TRL"]] * 2]
        for name, some in (("a", lines), ("b", lines[::-1])):
            path = write(tmp_path / f"{name}.jsonl", *some)
            import_dump(path, out=tmp_path / name, force=True)
        verdict = compare(tmp_path / "a", tmp_path / "b").verdict
        assert verdict.kind == "incomparable"
        assert "in another order: A's prompt 0 is B's prompt 2" in verdict.summary


def test_other_tokens_than_were_sampled_are_no_tie(tmp_path):
    """Rollout and trainer tell of one text: a token that differs is wrong data, and no rounding."""
    lines = [LINES["TRL"] | {"prompt_ids": [*PROMPT, n]} for n in range(12)]
    import_dump(write(tmp_path / "a.jsonl", *lines), out=tmp_path / "a")
    lines[3] = lines[3] | {"completion_ids": [11, 14, 13]}
    equal = [line | {"old_per_token_logps": ROLLOUT} for line in lines]
    import_dump(write(tmp_path / "b.jsonl", *equal), out=tmp_path / "b", layout="trainer")
    for sides in (("a", "b"), ("b", "a")):
        verdict = compare(*[tmp_path / side for side in sides]).verdict
        assert (verdict.kind, verdict.confidence) == ("systematic", "high")
        assert "other tokens than were sampled, in 1 of 12 answers" in verdict.summary


def test_what_the_mask_leaves_out_is_not_scored(tmp_path):
    """A tool's output in the middle of an answer stays text, and has no log-probability."""
    line = LINES["slime"] | {"loss_mask": [1, 0, 1]}
    run = import_dump(write(tmp_path / "r.jsonl", line), out=tmp_path / "a")
    assert run.find(("free", 0, 0, "logprobs:out")).positions == (3, 5)
    assert run.manifest.tokens.samples[0].generated_ids == ANSWER


def test_a_map_names_other_fields(tmp_path):
    """A map says where a line has its prompt, answer and log-probabilities."""
    names = tmp_path / "map.toml"
    names.write_text(
        '[fields]\nprompt = "in.ids"\nanswer = "out.0.ids"\nlogprobs = "out.0.lp"\ntop = "top"\n'
    )
    line = {
        "in": {"ids": PROMPT},
        "out": [{"ids": ANSWER, "lp": ROLLOUT}],
        "top": [{"11": -0.5, "3": -1.0}, [[12, -1.0]], None],
    }
    run = import_dump(write(tmp_path / "r.jsonl", line), out=tmp_path / "a", map=names)
    ids = run.read(run.find(("free", 0, 0, "logprobs:out.ids")))
    assert ids[0].tolist() == [[11, 11, 3], [12, 12, -1], [13, -1, -1]]
    values = run.read(run.find(("free", 0, 0, "logprobs:out")))
    assert math.isnan(values[0, 2, 1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"log_probs": None, "rollout_log_probs": [0.5, 0.5, 0.1]}, "no log-probability"),
        ({"rollout_log_probs": [-1.0]}, "1 entries for 3 tokens"),
        ({"rollout_log_probs": ["x", -1.0, -1.0]}, "is no number"),
        ({"tokens": [1, 2, -3, 4]}, "is no token id"),
        ({"response_length": 9}, "is 9 of 6 tokens"),
        ({"tokens": "text"}, "is no list"),
        ({"loss_mask": [1]}, "1 entries for 3 tokens"),
    ],
)
def test_what_is_no_score_is_refused(change, said, tmp_path):
    """With the file, the line and the field; nothing is written."""
    path = write(tmp_path / "r.jsonl", LINES["slime"], LINES["slime"] | change)
    with pytest.raises(DumpError, match=said) as failed:
        import_dump(path, out=tmp_path / "a")
    assert "line 2" in failed.value.where and not (tmp_path / "a").exists()


def test_files_that_are_none(tmp_path):
    """A line that is cut off, of no framework, or without its field is refused."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(LINES["slime"]) + "\n" + '{"tokens": [1, 2')
    with pytest.raises(DumpError, match="cut off"):
        import_dump(path, out=tmp_path / "a")
    with pytest.raises(DumpError, match="no framework's fields"):
        import_dump(write(path, {"x": 1}), out=tmp_path / "a")
    with pytest.raises(DumpError, match="without log_probs"):
        line = {k: v for k, v in LINES["slime"].items() if k != "log_probs"}
        import_dump(write(path, line), out=tmp_path / "a", layout="trainer")
    with pytest.raises(DumpError, match="is log_prob that"):
        misspelt = {**line, "log_prob": LINES["slime"]["log_probs"]}
        import_dump(write(path, misspelt), out=tmp_path / "a", layout="trainer")


def base_file(path, logits, tokens):
    """As perplexity.cpp writes it: (chunks, rows, V) logits in float32, (chunks, n_ctx) tokens."""
    num_chunks, _, size = logits.shape
    with open(path, "wb") as file:
        file.write(b"_logits_" + struct.pack("<Iii", tokens.shape[1], size, num_chunks))
        file.write(tokens.astype("<i4").tobytes())
        for row in logits.reshape(-1, size).astype(np.float32):
            top = row.max()
            least = max(row.min(), top - 16)
            log_sum = np.log(np.exp(row - top).sum())
            scale = np.float32((top - least) / 65535)
            codes = np.rint((row - least) / scale).clip(0).astype("<u2")
            file.write(struct.pack("<ff", scale, least - top - log_sum))
            file.write(codes.tobytes() + b"\0\0" * (size % 2))
    return path


@pytest.mark.parametrize("size", [30, 31])
def test_llama_cpps_base_file(tmp_path, size):
    """Log-probabilities to a step of its 16 bits, at the tokens that they score."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, size, (2, 16))
    logits = generator.normal(0, 3, (2, 7, size))
    run = import_dump(base_file(tmp_path / "base.kld", logits, tokens), out=tmp_path / "a")
    sample, record = run.manifest.tokens.samples[1], run.find(("free", 1, 0, "logprobs:out"))
    assert [*sample.prompt_ids, *sample.generated_ids] == tokens[1].tolist()
    assert record.positions == tuple(range(9, 16))
    expected = logits[1] - np.log(np.exp(logits[1]).sum(-1, keepdims=True))
    found = run.read(record)[0, :, 0].numpy()
    assert found == pytest.approx(expected[np.arange(7), tokens[1, 9:]], abs=16 / 65535)
    data = (tmp_path / "base.kld").read_bytes()
    (tmp_path / "base.kld").write_bytes(data[:-9])
    with pytest.raises(DumpError, match="cut off"):
        import_dump(tmp_path / "base.kld", out=tmp_path / "b")


def test_a_map_of_modules_is_none_of_fields(tmp_path):
    """Log-probabilities take a map of fields alone."""
    names = tmp_path / "map.toml"
    names.write_text('[[file]]\npattern = "a"\nsite = "m:out"\n')
    with pytest.raises(UsageError):
        import_dump(write(tmp_path / "r.jsonl", LINES["TRL"]), out=tmp_path / "a", map=names)


def lm_eval(path, values, context="2 + 2 ="):
    lines = [
        {
            "doc_id": n,
            "arguments": {
                "gen_args_0": {"arg_0": f"{n} {context}", "arg_1": " 4"},
                "gen_args_1": {"arg_0": f"{n} {context}", "arg_1": " 5"},
            },
            "resps": [[[str(one), "True"]], [[str(two), "False"]]],
        }
        for n, (one, two) in enumerate(values)
    ]
    return write(path, *lines)


def test_samples_of_lm_eval(tmp_path):
    """Choice by choice, by their text; another context is another experiment."""
    values = [(-0.5 - n / 8, -2.0) for n in range(9)]
    a = import_dump(lm_eval(tmp_path / "a.jsonl", values), out=tmp_path / "a")
    assert len(a.manifest.tokens.samples) == 18 and a.manifest.engine.name == "lm-eval"
    moved = [(one - 0.25, two) for one, two in values]
    b = import_dump(lm_eval(tmp_path / "b.jsonl", moved), out=tmp_path / "b")
    delta = compare(a, b).logprobs.delta
    assert (delta.num_tokens, delta.mean) == (18, pytest.approx(-0.125))
    assert compare(a, b).logprobs.shift.num_prompts == 9  # choices of one document are one
    c = import_dump(lm_eval(tmp_path / "c.jsonl", values, "3 + 1 ="), out=tmp_path / "c")
    report = compare(a, c)
    assert report.verdict.kind == "incomparable" and "another text" in report.verdict.summary
