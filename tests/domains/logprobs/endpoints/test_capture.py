"""capture(endpoint=...): a server's answers as a run, from a server that behaves."""

import json

import pytest

from divergence import RecordOptions, Run, ServerOptions, capture, compare, doctor, import_dump
from divergence.cli.main import app
from divergence.errors import RunFormatError, UsageError
from divergence.run.manifest import Sizes
from divergence.run.writer import RunWriter
from tests.by_hand import put

PROMPTS = [f"prompt number {n}" for n in range(12)]
GIVEN = {"prompts": PROMPTS, "max_new_tokens": 8}


def test_a_server_is_a_run(stub, serve):
    """One site, the chosen token first, then the likeliest; the machine stays unknown."""
    run = serve("a", top_logprobs=4)
    manifest = run.manifest
    assert manifest.complete and run.sites() == ["logprobs:out", "logprobs:out.ids"]
    assert manifest.engine.name == "endpoint" and "0.0.stub" in manifest.engine.version
    assert manifest.settings.dtype is None and manifest.environment.device_type == "unknown"
    record = run.find(("free", 3, 0, "logprobs:out"))
    values, ids = run.read(record), run.read(run.find(("free", 3, 0, "logprobs:out.ids")))
    sample = manifest.tokens.samples[3]
    assert record.positions[-1] == len(sample.prompt_ids) + 8 - 1
    whole = [*sample.prompt_ids, *sample.generated_ids]
    assert ids[0, :, 0].tolist() == [whole[place] for place in record.positions]
    expected = stub.logits(whole[: record.positions[-1]])[whole[-1]]
    assert float(values[0, -1, 0]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_equal_servers_are_identical(serve):
    """Two captures of one server agree in every token."""
    report = compare(serve("a"), serve("b"))
    assert report.verdict.kind == "identical", report.verdict
    assert report.logprobs.num_equal == 12 * 8


@pytest.mark.slow
def test_rounding_is_no_alarm_and_other_weights_are(stub, serve):
    """Healthy noise below what bfloat16 explains; other weights beyond any precision."""
    a = serve("a")
    stub.noise = 0.02
    noisy = compare(a, serve("b", like=a))
    assert noisy.verdict.kind == "within_floor", noisy.verdict
    assert noisy.verdict.confidence == "low"  # a side's dtype is not known
    stub.noise, stub.weights = 0.0, 1
    other = compare(a, serve("c", like=a))
    assert (other.verdict.kind, other.logprobs.pattern) == ("systematic", "shifted")
    assert other.logprobs.num_flips == 0  # forced: every token is compared


@pytest.mark.slow
def test_another_template_stops(stub, serve):
    """The prompt's tokens are not the same: nothing is compared."""
    a = serve("a")
    stub.template = 2
    report = compare(a, serve("b"))
    assert report.verdict.kind == "incomparable" and "template" in report.verdict.summary


def test_another_template_stops_by_its_length(stub, serve):
    """Without ids, by the number of tokens alone."""
    stub.lacks = {"ids", "prompt_logprobs"}
    a = serve("a")
    stub.template = 2
    report = compare(a, serve("b"))
    assert report.verdict.kind == "incomparable" and "had" in report.verdict.summary


@pytest.mark.slow
def test_sampling_left_on_is_named(stub, serve):
    """A server that samples is said to, and which side it is."""
    stub.samples = True
    b = serve("b")
    stub.samples = False
    report = compare(serve("a"), b)
    assert report.verdict.side == "candidate" and "samples" in report.verdict.summary


def test_what_it_lacks_is_told_and_compared_all_the_same(stub, serve):
    """Tokens by text: no forcing, up to the first difference."""
    a = serve("a")
    stub.lacks = {"ids", "prompt_logprobs", "models"}
    notes = []
    b = serve("b", progress=lambda event, done, total, text: notes.append(text))
    assert any("by text" in note for note in notes)
    facts = b.manifest.engine.facts
    assert facts["token ids"] == "numbered by text" and facts["prompts scored"] in ("no", "echo")
    report = compare(b, b.path)
    assert report.logprobs.delta.max_abs == 0
    report = compare(a, b)  # ids of one side have the same texts only where it told them
    assert report.verdict.kind in ("undetermined", "identical", "within_floor")


def test_a_shorter_list_is_asked_for_where_the_server_refuses(stub, serve):
    """Of a server that gives five likeliest tokens five are recorded."""
    stub.most_top = 5
    run = serve("a", top_logprobs=20)
    assert run.manifest.engine.facts["top-k"] == "5"


def test_the_key_is_in_no_run(stub, serve, tmp_path, monkeypatch):
    """It goes into one header, and nowhere else."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-key")
    stub.key = "sk-secret-key"
    run = serve("a")
    assert stub.headers[-1]["Authorization"] == "Bearer sk-secret-key"
    for file in run.path.rglob("*"):
        assert not file.is_file() or b"sk-secret" not in file.read_bytes()


def test_options_of_models_are_refused(stub, tmp_path):
    """What means nothing to a server, and what needs one, is refused."""
    with pytest.raises(UsageError, match="--dtype means nothing to a server"):
        capture(
            "tiny", server=ServerOptions(endpoint=stub.url), out=tmp_path / "a", dtype="float32"
        )
    with pytest.raises(UsageError, match="needs --endpoint"):
        capture("tiny", out=tmp_path / "a", server=ServerOptions(resume=True))
    with pytest.raises(UsageError, match="address alone"):
        capture("tiny", server=ServerOptions(endpoint="http://me:pw@host:1"), out=tmp_path / "a")


@pytest.mark.whole
def test_a_models_run_has_the_log_probabilities_of_its_logits(llama, tmp_path):
    """Beside a run of log-probabilities, a run with recorded logits is one too."""
    a = capture(
        llama,
        out=tmp_path / "t",
        prompts=[[5, 6, 7, n] for n in range(9)],
        probe=False,
        max_new_tokens=3,
        recording=RecordOptions(anchor=False),
        device="cpu",
    )
    report = compare(a, _as_scores(a, tmp_path))
    assert report.logprobs.num_tokens == 27
    assert report.logprobs.delta.num_tokens == 27 and report.logprobs.delta.max_abs < 1e-6
    assert report.verdict.kind == "within_floor", report.verdict


def _as_scores(run: Run, tmp_path):
    """The same log-probabilities as a file, through an import."""
    import torch

    lines = []
    for number, sample in enumerate(run.manifest.tokens.samples):
        values = []
        for step, token in enumerate(sample.chosen_ids):
            logits = run.read(run.find(("free", number, step, ".:out")))[0, -1].double()
            values.append(float(torch.log_softmax(logits, -1)[token]))
        lines.append(
            {
                "prompt_ids": sample.prompt_ids,
                "completion_ids": sample.chosen_ids,
                "logprobs": values,
            }
        )
    path = tmp_path / "scores.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return import_dump(path, out=tmp_path / "scores")


def test_a_server_of_text_alone(stub, serve):
    """Nothing is concluded of numbers that nobody gave; texts are the same, or not."""
    stub.lacks = {"ids", "logprobs", "prompt_logprobs"}
    a, b = serve("a"), serve("b")
    report = compare(a, b)
    assert (report.verdict.kind, report.verdict.confidence) == ("undetermined", "low")
    assert "12 of 12 answers are the same text" in report.verdict.summary
    stub.weights = 1
    report = compare(a, serve("c"))
    assert "0 of 12 answers" in report.verdict.summary


@pytest.mark.parametrize(
    "lacks", [{"logprobs"}, {"logprobs", "prompt_logprobs"}, {"ids", "logprobs", "prompt_logprobs"}]
)
def test_what_a_server_does_not_tell_is_no_nan(lacks, stub, serve, monkeypatch):
    """Its answer's characters are the other side's tokens by text, and have no number there."""
    place = "tests.domains.logprobs.endpoints.conftest.token_text"
    monkeypatch.setattr(place, lambda number: chr(97 + number))
    stub.lacks = {"ids"}
    a = serve("a")
    stub.lacks = lacks
    b = serve("b")
    for report in (compare(a, b), compare(b, a)):
        assert report.verdict.kind == "undetermined", report.verdict
        assert "12 of 12 answers are the same text" in report.verdict.summary


def test_the_command_line(stub, tmp_path, capsys):
    """As the documents have it, and what it says in the end."""
    words = [
        "capture",
        "--endpoint",
        stub.url,
        "--model",
        "tiny",
        "-o",
        str(tmp_path / "a"),
        "--prompt",
        "one",
        "--max-new-tokens",
        "3",
        "--label",
        "here",
    ]
    app(words, prog_name="divergence", standalone_mode=False)
    shown = capsys.readouterr()
    assert "here, dtype and device unknown" in shown.out and "--endpoint URL" in shown.out
    assert "gives log-probabilities" in shown.err


def test_a_model_scores_what_a_server_answered(stub, serve, llama, tmp_path):
    """--like without --endpoint: transformers is forced through the recorded answers."""
    served = serve("a", prompts=PROMPTS[:2], max_new_tokens=3)
    with pytest.raises(UsageError, match="holds log-probabilities alone"):
        capture(like=served, out=tmp_path / "b")
    own = capture(llama, like=served, out=tmp_path / "b", device="cpu", probe=False)
    fed = [one.generated_ids[:2] for one in own.manifest.tokens.samples]
    assert fed == [one.generated_ids[:2] for one in served.manifest.tokens.samples]
    assert own.manifest.engine.name == "transformers"
    report = compare(served, own)
    assert report.logprobs.num_equal == 6 and report.logprobs.delta.num_tokens == 6
    assert report.verdict.kind == "undetermined"  # two prompts, and another model


@pytest.mark.parametrize(
    "lacks", [{"ids"}, {"ids", "prompt_logprobs"}, {"ids", "logprobs", "prompt_logprobs"}]
)
def test_what_a_server_told_without_ids_is_not_forced(lacks, stub, serve, llama, tmp_path):
    """It says that the server gave none, and the way that is left works."""
    stub.lacks = lacks | {"usage"}  # whose tokenizer is another
    served = serve("a", prompts=PROMPTS[:2], max_new_tokens=3)
    with pytest.raises(UsageError, match="no token ids to be forced") as caught:
        capture(llama, like=served, out=tmp_path / "b", device="cpu", probe=False)
    hint = str(caught.value.hint)
    assert "--prompts FILE" in hint and "return_token_ids" in hint
    own = capture(
        llama,
        prompts=PROMPTS[:2],
        max_new_tokens=3,
        out=tmp_path / "b",
        device="cpu",
        sites="modules",
        probe=False,
    )
    assert compare(served, own).verdict.kind == "undetermined"


def test_a_doctor_needs_models(serve):
    """The checklist is for runs of models, not for log-probabilities alone."""
    a = serve("a", prompts=PROMPTS[:2])
    with pytest.raises(UsageError, match="log-probabilities alone"):
        doctor(a, a)


def test_a_run_of_another_form_is_refused(serve, tmp_path):
    """Records of a run from elsewhere may have any shape."""
    import torch
    from msgspec.structs import replace

    a = serve("a", prompts=PROMPTS[:2])
    manifest = replace(a.manifest, id="0" * 32, sizes=Sizes())
    with RunWriter(tmp_path / "b", manifest) as writer:
        for order, site in enumerate(("logprobs:out", "logprobs:out.ids")):
            put(writer, torch.zeros(1, 2), site=site, order=order, positions=(1, 2))
    with pytest.raises(RunFormatError, match="are expected"):
        compare(a, tmp_path / "b")
