"""explain_token(): one block's error alone, put into the healthy side's model."""

import functools
import json
import shutil
import uuid

import pytest
import torch
from msgspec import structs

from divergence import BatchOptions, RecordOptions, capture, compare
from divergence import truth as make_truth
from divergence.cli.main import app
from divergence.errors import IncomparableError, ModelError, PlantError, UsageError
from divergence.experiments.explain import Injection, explain_token
from divergence.recording.plant import FORWARDS
from tests.digests import without_digests

PROMPTS = ["Why do machines disagree?", "Snow fell"]
FAULT = "model.layers.1.mlp.down_proj:out=scale:1.6"


@pytest.fixture(scope="module")
def run(tmp_path_factory, llama):
    """``run("bfloat16", FAULT, ...)`` → (the model's run, the same with faults); made once each."""

    @functools.cache
    def usual(dtype, batch):
        return capture(
            str(llama),
            out=tmp_path_factory.mktemp("explain") / "a",
            prompts=PROMPTS,
            max_new_tokens=6,
            dtype=dtype,
            batching=BatchOptions(batch=batch),
        )

    @functools.cache
    def make(dtype, *plants, batch=False):
        a, out = usual(dtype, batch), tmp_path_factory.mktemp("explain") / "b"
        return a, capture(like=a, out=out, plants=plants, attn_implementation="sdpa")

    return make


def explained(a, b, **options):
    report = explain_token(compare(a, b, **options), a, b)
    assert report.tokens.explanation is not None, report.notes
    return report.tokens.explanation


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_fault_explains_its_flip(dtype, run):
    """One planted block, other kernels everywhere: its error alone moves the logits all the way."""
    found = explained(*run(dtype, FAULT))
    assert found.sites == ["model.layers.1:out"]
    assert (found.flagged, found.differs, found.disturbed) == (True, True, "reference")
    assert found.share == pytest.approx(1.0, abs=0.2)
    assert found.flips
    assert found.baseline_choice.id == found.reference.id
    assert found.injected_choice.id == found.candidate.id
    assert found.baseline_margin == pytest.approx(found.reference_margin, abs=1e-6)
    assert found.num_forwards == found.step + 1


@pytest.mark.slow
def test_a_fault_is_explained_before_a_tie(run):
    """Where a truth has judged them, an early tie is passed over."""
    a, b = run("float32", FAULT)
    report = compare(a, b)
    first, *_, last = report.tokens.differences
    flips = [structs.replace(first, judgement="tie"), structs.replace(last, judgement="fault")]
    report = structs.replace(report, tokens=structs.replace(report.tokens, differences=flips))
    found = explain_token(report, a, b).tokens.explanation
    assert (found.sample, found.step) == (last.sample, last.step) != (first.sample, first.step)
    assert found.share == pytest.approx(1.0, abs=0.2)


@pytest.mark.slow
def test_a_bystander_explains_nothing_of_it(run, monkeypatch):
    """The error of a healthy block is rounding: put in alone it leaves the token as it was."""
    monkeypatch.setattr(
        "divergence.experiments.explain._sites", lambda report: (["model.layers.2:out"], False)
    )
    found = explained(*run("bfloat16", FAULT))
    assert abs(found.share) < 0.1
    assert not found.flips


@pytest.mark.slow
def test_the_second_sample_of_a_batch_is_explained(run, monkeypatch):
    """The batch that holds the flip is repeated, and its own row of it read."""
    a, b = run("float32", FAULT, batch=True)
    report = compare(a, b)
    flips = [flip for flip in report.tokens.differences if flip.sample == 1]
    report = structs.replace(
        report, tokens=structs.replace(report.tokens, first_difference=flips[0], differences=flips)
    )
    found = explain_token(report, a, b).tokens.explanation
    assert found.sample == 1
    assert found.share == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_a_faulty_reference_disturbs_the_candidates_model(llama, tmp_path):
    """Where the truth blames the reference, its error is put into the candidate's run."""
    a = capture(
        str(llama), out=tmp_path / "a", prompts=PROMPTS[:1], max_new_tokens=3, plants=[FAULT]
    )
    b = capture(like=a, out=tmp_path / "b")
    truth = make_truth(a, out=tmp_path / "truth")
    report = compare(a, b, truth=truth)
    assert report.verdict.side == "reference"
    found = explain_token(report, a, b).tokens.explanation
    assert found.disturbed == "candidate"
    assert found.baseline_margin == pytest.approx(found.candidate_margin, abs=1e-6)
    assert found.share == pytest.approx(1.0, abs=0.2)


@pytest.mark.slow
def test_without_a_flip_the_closest_decision_is_explained(run):
    """A healthy pair: the block with the largest error, which is said to be unflagged."""
    a, b = run("float32")
    report = explain_token(compare(a, b), a, b)
    found = report.tokens.explanation
    assert (found.differs, found.flagged, found.flips) == (False, False, False)
    assert report.verdict.kind == "within_floor"
    assert found.reference_margin >= 0


def test_equal_runs_have_nothing_to_explain(run):
    """A note says so; it is no error."""
    a, _ = run("float32")
    report = explain_token(compare(a, a), a, a)
    assert report.tokens.explanation is None
    assert "nothing to explain: the runs are equal bit for bit" in report.notes


def test_free_runs_alone_are_refused(run, tmp_path):
    """A block's error is known from equal inputs only; the message says how to get them."""
    a, _ = run("float32")
    b = capture(like=a, out=tmp_path / "b", recording=RecordOptions(anchor=False), plants=[FAULT])
    with pytest.raises(UsageError, match="no anchored pass") as caught:
        explain_token(compare(a, b), a, b)
    assert "--like" in caught.value.hint


@pytest.mark.slow
def test_a_missing_model_is_an_error(llama, tmp_path):
    """The runs are enough to compare, but not to run the model."""
    copy = shutil.copytree(llama, tmp_path / "model")
    a = capture(str(copy), out=tmp_path / "a", prompts=PROMPTS[:1], max_new_tokens=2)
    b = capture(like=a, out=tmp_path / "b", plants=[FAULT])
    report = compare(a, b)
    shutil.rmtree(copy)
    with pytest.raises(ModelError):
        explain_token(report, a, b)
    assert explain_token(report, a, b, model=str(llama)).tokens.explanation is not None


@pytest.mark.slow
def test_other_weights_are_refused(run, tiny_model):
    """Another checkpoint explains another model's tokens."""
    a, b = run("bfloat16", FAULT)
    with pytest.raises(IncomparableError, match="other weights"):
        explain_token(compare(a, b), a, b, model=str(tiny_model("llama", seed=1)))


def test_an_error_is_added_at_its_step_and_positions():
    """Only where it was recorded: other steps are left alone, other shapes refused."""
    error = torch.full((1, 1, 2), 0.5, dtype=torch.float64)
    plant = Injection("m:out", {0: (error, (2,)), 1: (error, None)}).plant()
    prefill, decode = torch.zeros(1, 3, 2), torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    assert plant.apply(prefill, 0).tolist() == [[[0, 0], [0, 0], [0.5, 0.5]]]
    assert plant.apply(decode, FORWARDS + 1).tolist() == [[[0.5, 0.5]]]
    assert plant.apply(decode, 2) is decode
    assert prefill.abs().sum() == 0
    with pytest.raises(PlantError, match="shape"):
        plant.apply(prefill, 1)


@pytest.mark.slow
def test_an_error_of_the_head_is_added_to_the_one_row_it_makes(run):
    """The prefill's logits are the last token's alone, there as here."""
    found = explained(*run("float32", "lm_head:out=scale:1.3"))
    assert found.sites == ["lm_head:out"]
    assert found.share == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
def test_the_command_explains(run, tmp_path, capsys, monkeypatch):
    """compare --explain-token: lines under the tokens, and the same as JSON."""
    a, b = run("float32", FAULT)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            app([str(word) for word in words], prog_name="divergence")
        return caught.value.code, *capsys.readouterr()

    for option in ((), ("-v",)):
        code, out, err = call("compare", a.path, b.path, "--explain-token", *option)
        assert code == 0, err
        out = " ".join(out.split())
        assert "by B's error at model.layers.1:out alone" in out
        assert "of the movement explained; the error flips the token" in out
    shutil.copytree(a.path, tmp_path / "a")
    without_digests(tmp_path / "a")
    manifest = tmp_path / "a/manifest.json"
    manifest.write_text(manifest.read_text().replace(a.manifest.id, uuid.uuid4().hex))
    out = call("compare", a.path, tmp_path / "a", "--explain-token")[1]
    assert "explained nothing to explain: the runs" in " ".join(out.split())
    code, out, _ = call("compare", a.path, b.path, "--explain-token", "--json")
    assert json.loads(out)["tokens"]["explanation"]["flips"] is True
    assert call("compare", a.path, "--explain-token")[0] == 2
    assert call("compare", a.path, b.path, "--model", "x")[0] == 2
