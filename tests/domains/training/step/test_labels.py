"""Labels of a training step: read from a file, recorded, repeated; and what makes no step."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import divergence
from divergence import BatchOptions, TrainOptions
from divergence.domains.training.recording.options import label_rows, prompts_of
from divergence.errors import DivergenceError, PromptError, UsageError
from divergence.options.commands import CaptureOptions
from divergence.recording.prompts import Prompt, check_labels
from divergence.run.manifest import NO_LABEL, SampleTokens

N = NO_LABEL
IDS = [
    [5, 9, 33, 21, 77, 100, 43, 12, 6, 91, 18],
    [45, 99, 33, 21, 17, 20, 43, 112, 66],
    [7, 14, 21, 28, 35, 42, 49],
]
LINES = [{"completion_from": 8}, [N, N, 33, N, 17, 20, N, 112, 66], {"labels": [N] * 6 + [50]}]
LABELS = [[N] * 8 + [6, 91, 18], LINES[1], [N] * 6 + [50]]
PROMPTS = [Prompt(input_ids=tuple(ids)) for ids in IDS]


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("llama", dtype="float32", num_blocks=2))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "labels.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory, model, file):
    out = tmp_path_factory.mktemp("step") / "run"
    step = {"train": True, "optimizer": "adamw", "probe": False}
    return divergence.capture(
        model, out=out, prompts=IDS, training=TrainOptions(labels=file), **step
    )


def test_the_loss_and_its_gradients_are_those_of_transformers(model, run):
    """A step with labels has the loss and gradients that transformers gives."""
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    count, total = 0, torch.zeros(())
    for ids, labels in zip(IDS, LABELS, strict=True):
        num = sum(label != N for label in labels)
        given = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        total, count = total + plain(**given).loss * num, count + num
    loss = total / count
    loss.backward()
    told = [float(run.read(run.find(("free", n, 0, "loss:out")))) for n in range(3)]
    assert count == 9 and sum(told) == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in plain.named_parameters():
        module, _, leaf = name.rpartition(".")
        gradient = run.read(run.find(("free", 0, 0, f"{module}#backward:out.{leaf}")))
        assert (gradient - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name


@pytest.mark.slow
def test_labels_are_recorded_and_repeated(run, tmp_path):
    """In one padded batch as well, with another kernel, and in a truth."""
    assert [sample.labels for sample in run.manifest.tokens.samples] == LABELS
    again = divergence.capture(
        like=run,
        out=tmp_path / "b",
        attn_implementation="sdpa",
        batching=BatchOptions(batch=True),
        probe=False,
    )
    assert [sample.labels for sample in again.manifest.tokens.samples] == LABELS
    truth = divergence.truth(run, out=tmp_path / "truth")
    for right in (None, truth):
        report = divergence.compare(run, again, truth=right)
        assert report.verdict.kind == "within_floor", report.verdict.summary
    (line,) = [line for line in report.preflight if line.check == "labels"]
    assert (line.status, line.reference) == ("same", "9 of 24 tokens")
    with pytest.raises(UsageError, match="--labels cannot be given"):
        divergence.capture(like=run, out=tmp_path / "c", training=TrainOptions(labels=LINES))


@pytest.mark.slow
@pytest.mark.parametrize("site", ["loss#backward:out", "model.layers.1#backward:out"])
def test_a_fault_is_found_where_most_gradients_are_zero(site, run, answer):
    """At its site, though few tokens have a label."""
    fault = {"plants": [f"{site}=scale:1.01"], "attn_implementation": "sdpa", "probe": False}
    verdict = answer(run, **fault)
    assert (verdict.verdict.kind, verdict.verdict.onset.site) == ("localized", site)


def test_other_labels_are_another_experiment(run, model, tmp_path):
    """They are named by prompt and token."""
    other = [LINES[0], [N, N, 33, N, 17, 21, N, 112, 66], LINES[2]]
    b = divergence.capture(
        model,
        out=tmp_path / "b",
        prompts=IDS,
        training=TrainOptions(labels=other, train=True),
        probe=False,
    )
    verdict = divergence.compare(run, b).verdict
    assert (verdict.kind, verdict.summary) == ("incomparable", "other labels")
    assert verdict.evidence[0].text == "labels: prompt 1, token 5: label 20 against 21"


def test_labels_in_the_prompts_themselves(model, tmp_path):
    """A row of a data set as it is, or the number from which on the completion begins."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"input_ids": IDS[0], "completion_from": 8}, {"input_ids": IDS[2], "labels": LABELS[2]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = divergence.capture(
        model,
        out=tmp_path / "a",
        batching=BatchOptions(prompts_file=path),
        training=TrainOptions(train=True),
        probe=False,
    )
    assert [sample.labels for sample in run.manifest.tokens.samples] == [LABELS[0], LABELS[2]]
    with pytest.raises(PromptError, match="prompt 0 has labels"):
        divergence.capture(
            model, out=tmp_path / "b", batching=BatchOptions(prompts_file=path), probe=False
        )
    with pytest.raises(PromptError, match="labels of its own"):
        divergence.capture(
            model,
            out=tmp_path / "b",
            batching=BatchOptions(prompts_file=path),
            training=TrainOptions(train=True, labels=LINES[:2]),
        )


def test_labels_lie_behind_pads():
    """(B, T): of a batch with pads in front. The first token's label is never used."""
    samples = [
        SampleTokens(prompt_ids=[3, 4, 5, 6]),
        SampleTokens(prompt_ids=[7, 8, 9], labels=[7, N, 1], num_left_pad=1),
    ]
    ids = torch.tensor([[3, 4, 5, 6], [0, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    assert label_rows(samples, ids, mask).tolist() == [[N, 4, 5, 6], [N, N, N, 1]]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (LINES[:2], "labels for 2 prompts, and there are 3"),
        ([*LINES[:2], {"labels": [1], "completion_from": 1}], "either labels or completion_from"),
        ([*LINES[:2], [1, -3000]], "not labels"),
        ([*LINES[:2], ["a"]], "not labels"),
        ([*LINES[:2], {"completion": 3}], "not labels"),
    ],
)
def test_what_is_no_labels(lines, said, tmp_path):
    """From a file the error names its line."""
    path = tmp_path / "labels.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    for given in (lines, path):
        with pytest.raises(PromptError, match=said) as error:
            prompts_of(CaptureOptions(train=True, prompts=PROMPTS), given)
        if given is path and "prompts" not in said:
            assert error.value.where == f"{path}, line 5"


def test_labels_of_a_program():
    """Tensors and arrays are lists; anything else is refused by name."""
    given = [torch.tensor(labels) for labels in LABELS]
    found = prompts_of(CaptureOptions(train=True, prompts=PROMPTS), given)
    assert [list(prompt.labels) for prompt in found] == LABELS
    for wrong in (7, [object()] * 3):
        with pytest.raises(PromptError, match="not labels"):
            prompts_of(CaptureOptions(train=True, prompts=PROMPTS), wrong)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1, 2], "3 tokens and 2 labels"),
        ([1, N, N], "no token has a label"),
        ([N, N, 64], "label 64 is no token id of the model's vocabulary of 64"),
        ([N, 2, -7], "label -7 is no token id"),
    ],
)
def test_labels_that_make_no_loss(labels, said):
    """Labels that fit no prompt, or are all left out, are refused."""
    with pytest.raises(PromptError, match=said):
        check_labels([SampleTokens(prompt_ids=[1, 2, 3], labels=labels)], 64)


def test_a_completion_behind_the_prompt(model, tmp_path):
    """It begins within the prompt, and the hint says where at most."""
    with pytest.raises(
        PromptError, match="has 7 tokens, and its completion is to begin at"
    ) as told:
        divergence.capture(
            model,
            out=tmp_path / "a",
            prompts=[IDS[2]],
            training=TrainOptions(train=True, labels=[{"completion_from": 7}]),
        )
    assert "at most 6" in told.value.hint and isinstance(told.value, DivergenceError)
