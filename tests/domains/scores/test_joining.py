"""From a score to a layer: flips joined to two runs of their prompts."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import divergence
from divergence import scores
from divergence.cli.main import app
from divergence.errors import UsageError
from divergence.facts import plain
from tests.domains.scores.conftest import sample

FAULT = "model.layers.1.mlp:out=scale:-1"
CHOICES = [" al", "n", "'"]
"""One token each."""


def _lines(model, tokenizer):
    """As lm-eval would log the tiny model: 40 prompts, the right one being another each time."""
    lines = []
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in CHOICES]
    for number in range(40):
        prompt = f"{number} and {number * 7} flakes of snow fell on"
        with torch.no_grad():
            row = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].log_softmax(-1)
        said = [float(row[one[0]]) for one in ids]
        line = sample(
            number,
            score=float(said.index(max(said)) == number % 3),
            right=number % 3,
            likelihoods=said,
            prompt=prompt,
        )
        for choice, one in zip(CHOICES, line["arguments"].values(), strict=True):
            one["arg_1"] = choice
        lines.append(line)
    return lines


@pytest.fixture(scope="module")
def evaluated(llama, tmp_path_factory):
    """(A's folder, B's) of one evaluation in float32; B's block 1 has lost its MLP's sign."""
    tokenizer = AutoTokenizer.from_pretrained(llama)
    folders = []
    for name in "ab":
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        if name == "b":
            model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: -out)
        folder = tmp_path_factory.mktemp(name)
        text = "".join(json.dumps(one) + "\n" for one in _lines(model, tokenizer))
        (folder / "samples_quiz_2026-01-02T03-04-05.678901.jsonl").write_text(text)
        results = {"config": {"model_dtype": "torch.float32"}}
        (folder / "results_2026-01-02T03-04-05.678901.json").write_text(json.dumps(results))
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def runs(evaluated, llama, tmp_path_factory):
    """The flips as a run, again as it is, and again with the fault."""
    folder = tmp_path_factory.mktemp("runs")
    scores(*evaluated, capture=llama, out=folder / "flips", dtype="float32", num_prompts=4)
    for name, plants in (("same", ()), ("flips-b", (FAULT,))):
        divergence.capture(like=folder / "flips", out=folder / name, plants=plants, probe=False)
    return folder


def _told(capsys, *words):
    """What a command prints that ends well."""
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words], prog_name="divergence")
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_from_a_score_to_a_layer_in_three_commands(capsys, evaluated, llama, tmp_path):
    """The flips as a run, the same prompts with the fault, and compare names the block."""
    flips, other = tmp_path / "flips", tmp_path / "flips-b"
    a, b = evaluated
    out = _told(capsys, "scores", a, b, "--capture", llama, "-o", flips, "--dtype", "float32")
    assert f"capture --like {flips}" in out and f"--runs {flips} {other}" in out
    _told(capsys, "capture", "--like", flips, "-o", other, "--plant", FAULT)
    assert "model.layers.1" in _told(capsys, "compare", flips, other).splitlines()[0]
    out = _told(capsys, "scores", a, b, "--runs", flips, other)
    assert "8 real shifts" in out and f"divergence compare {flips} {other}" in out


def test_flips_with_a_real_shift(evaluated, runs):
    """Each recorded flip is reproduced, and the runs' margins are the evaluation's own."""
    (task,) = scores(*evaluated, runs=(runs / "flips", runs / "flips-b")).candidates[0].tasks
    found = task.run_causes
    assert found.num_shifts == len(found.flips) == 4 < found.num_flips
    assert found.num_ties == found.num_not_reproduced == found.num_not_told == 0
    assert not found.notes
    assert found.difference_of_shifts == pytest.approx(
        sum({True: -1, False: 1}[flip.document in _lost(evaluated)] for flip in found.flips) / 40
    )
    lines = {one["doc_hash"]: one for one in _logged(evaluated[0])}
    others = {one["doc_hash"]: one for one in _logged(evaluated[1])}
    for flip in found.flips:
        logged = [
            one[CHOICES.index(flip.reference)] - one[CHOICES.index(flip.candidate)]
            for one in (lines[flip.document]["said"], others[flip.document]["said"])
        ]
        assert [flip.reference_margin, flip.candidate_margin] == pytest.approx(logged, abs=1e-4)


def _logged(folder):
    (path,) = folder.glob("samples*")
    for line in path.read_text().splitlines():
        one = json.loads(line)
        yield {**one, "said": [float(answer[0]) for answer in one["filtered_resps"]]}


def _lost(evaluated):
    sides = [{one["doc_hash"]: one["acc"] for one in _logged(folder)} for folder in evaluated]
    return {name for name, score in sides[0].items() if score > sides[1][name]}


def test_what_the_runs_do_not_show_is_not_reproduced(evaluated, runs):
    """Two healthy runs, or the runs the other way round: they do not answer as was evaluated."""
    for names in (("flips", "same"), ("flips-b", "flips")):
        report = scores(*evaluated, runs=[runs / name for name in names])
        found = report.candidates[0].tasks[0].run_causes
        assert (found.num_not_reproduced, found.num_shifts, found.num_ties) == (4, 0, 0)
        assert "B's run is off from B's own log by a median of" in found.notes[-1]


def test_a_near_tie(evaluated, runs, monkeypatch):
    """A margin that moved by no more than the limit."""
    limit = 99.0, plain("a test")
    monkeypatch.setattr("divergence.domains.scores.joining.explained", lambda _: limit)
    monkeypatch.setattr("divergence.domains.scores.joining._LIMIT", 1e9)  # of the documents
    (task,) = scores(*evaluated, runs=(runs / "flips", runs / "flips-b")).candidates[0].tasks
    assert (task.run_causes.num_ties, task.run_causes.limit_of) == (4, "a test")


def test_generated_answers_part_at_a_token(evaluated, runs, table):
    """Of what holds no likelihoods: the first token where the greedy choices part."""
    prompts = [one["arguments"]["gen_args_0"]["arg_0"] for one in _logged(evaluated[0])]
    a, b = table("x", [1.0] * 40, prompt=prompts), table("y", [0.0] * 40, prompt=prompts)
    (task,) = scores(a, b, runs=(runs / "flips", runs / "flips-b")).candidates[0].tasks
    sides = [
        [one.chosen_ids[0] for one in divergence.Run.open(runs / name).manifest.tokens.samples]
        for name in ("flips", "flips-b")
    ]
    apart = sum(one != other for one, other in zip(*sides, strict=True))
    found = task.run_causes
    assert found.num_shifts == apart > 0 and found.num_not_reproduced == 4 - apart
    (task,) = scores(a, b, runs=(runs / "flips", runs / "same")).candidates[0].tasks
    assert {flip.why for flip in task.run_causes.flips} == {"no token differs"}


def test_without_the_tokenizer_a_choice_is_not_told(evaluated, runs, monkeypatch):
    """Never guessed."""
    monkeypatch.setattr("divergence.domains.scores.joining._tokenizer", lambda _: None)
    (task,) = scores(*evaluated, runs=(runs / "flips", runs / "flips-b")).candidates[0].tasks
    assert task.run_causes.num_not_told == 4 and not task.run_causes.num_shifts
    assert "tokenizer is not here" in task.run_causes.flips[0].why


def test_a_run_in_another_dtype_is_said(evaluated, runs):
    """It rounds otherwise than what was evaluated."""
    report = scores(*evaluated)
    assert report.reference.dtype == "float32"
    (path,) = evaluated[0].glob("results*")
    told = path.read_text()
    path.write_text(told.replace("float32", "bfloat16"))
    try:
        found = scores(*evaluated, runs=(runs / "flips", runs / "flips-b"))
    finally:
        path.write_text(told)
    (note,) = found.candidates[0].tasks[0].run_causes.notes
    assert note == "A's run is in float32, and A was evaluated in bfloat16"


def test_runs_that_tell_nothing(evaluated, runs, table, tmp_path):
    """Other prompts, the same run twice, nothing flipped: a clear error."""
    a, b = table("x", [1.0, 0.0], prompt=["p", "q"]), table("y", [0.0, 0.0], prompt=["p", "q"])
    both = (runs / "flips", runs / "flips-b")
    with pytest.raises(UsageError, match="none of the prompts"):
        scores(a, b, runs=both)
    with pytest.raises(UsageError, match="nothing to look for"):
        scores(a, table("z", [1.0, 0.0]), runs=both)
    shutil.copytree(runs / "flips", tmp_path / "copy")
    with pytest.raises(UsageError, match="the same one"):
        scores(*evaluated, runs=(runs / "flips", tmp_path / "copy"))
    with pytest.raises(UsageError, match="two runs"):
        scores(*evaluated, runs=(runs / "flips",))
