"""Each tool's files, real where the tool installs: pairs, repeats, clusters, what is left out."""

import json
import shutil
import zipfile

import pytest

from divergence import scores
from divergence.domains.scores.formats import prompts_of, read
from divergence.domains.scores.formats.reading import ReadRequest
from divergence.errors import DumpError, UsageError
from divergence.facts import sentence
from tests.domains.scores.conftest import FIXTURES, sample


def test_lm_evals_own_files():
    """Made by lm-eval 0.4.13: hashes, likelihoods of choices, settings, the facts as clusters."""
    report = scores(FIXTURES / "lm_eval" / "a", FIXTURES / "lm_eval" / "b", cluster="fact")
    (task,) = report.candidates[0].tasks
    assert (task.task, task.metric, task.pairing.num_paired) == ("facts", "acc", 24)
    assert task.pairing.num_clusters == 24
    assert report.reference.tool == "lm-eval 0.4.13" and report.reference.dtype == "bfloat16"
    assert (task.num_lost, task.num_gained, task.causes.num_judged) == (3, 3, 24)
    told = {line.check: line.status for line in task.preflight}
    assert {told[name] for name in ("few-shot", "prompts", "targets", "task settings")} == {"same"}


def test_evalscopes_own_files():
    """Made by evalscope 1.14.1: two answers to each of twelve questions are repeats of them."""
    report = scores(FIXTURES / "evalscope" / "a", FIXTURES / "evalscope" / "b")
    (task,) = report.candidates[0].tasks
    assert (task.task, task.metric) == ("general_mcq_sums", "accuracy")
    assert (task.pairing.num_paired, task.pairing.repeats) == (12, (2.0, 2.0))
    assert (task.reference, task.candidate) == pytest.approx((20 / 24, 17 / 24))
    assert report.reference.tool == "evalscope 1.14.1"
    found = {line.check: line.status for line in task.preflight}
    assert found["generation settings"] == found["prompts"] == "same"


def test_evalscopes_unusable_answers_leave_the_denominator(tmp_path):
    """A judge that failed is no score of 0."""
    shutil.copytree(FIXTURES / "evalscope" / "b", tmp_path / "b")
    file = next((tmp_path / "b" / "reviews").rglob("*.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[:2]:  # both answers to the first question
        line["sample_score"]["score"] |= {"value": {}, "status": "parse_error"}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (task,) = scores(FIXTURES / "evalscope" / "a", tmp_path / "b").candidates[0].tasks
    assert (task.pairing.num_paired, task.pairing.num_unscored) == (11, 1)
    assert task.pairing.whys == {"status parse_error": 2}
    assert task.reference == pytest.approx(18 / 22)


def test_inspects_own_logs():
    """Made by inspect 0.3.285 (events taken out): epochs are repeats, letters are scores."""
    report = scores(FIXTURES / "inspect" / "a.eval", FIXTURES / "inspect" / "b.eval")
    tasks = {task.metric: task for task in report.candidates[0].tasks}
    assert set(tasks) == {"match", "includes"}
    assert tasks["match"].pairing.repeats == (2.0, 2.0)
    assert tasks["match"].reference == pytest.approx(8 / 12)
    assert (tasks["match"].num_lost, tasks["match"].num_gained) == (2, 1)


def test_inspects_compression_is_named(tmp_path):
    """A log in zstandard on a Python that lacks it: what to install."""
    pytest.importorskip("zipfile")
    if hasattr(zipfile, "ZIP_ZSTANDARD"):
        pytest.skip("this Python reads it")
    try:
        import zstandard  # noqa: F401 - then it is read, and the bytes below are damaged
    except ImportError:
        pass
    else:
        pytest.skip("zstandard is installed")
    data = bytearray((FIXTURES / "inspect" / "a.eval").read_bytes())
    for mark, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        start = data.find(mark)
        while start >= 0:
            data[start + place : start + place + 2] = (93).to_bytes(2, "little")
            start = data.find(mark, start + 4)
    (tmp_path / "a.eval").write_bytes(data)
    with pytest.raises(UsageError, match="zstandard") as failed:
        scores(tmp_path / "a.eval", FIXTURES / "inspect" / "b.eval")
    assert "pip install zstandard" in str(failed.value)


def test_opencompasss_own_files():
    """Made by opencompass 0.5.4: details of an evaluator, and tables that do not say what was
    right, one of which holds the data set twice."""
    a, b = (read(str(FIXTURES / "opencompass" / side), ReadRequest()) for side in "ab")
    assert not a.remarks and a.model == "smollm2"
    assert {str(one.name): len(one.rows) for one in a.series} == {
        "facts_list accuracy": 24,
        "facts_table is_correct": 24,
        "facts_twice accuracy": 48,
    }
    report = scores(a.path, b.path)
    for task in report.candidates[0].tasks:
        assert (task.pairing.num_paired, task.reference, task.num_lost) == (24, 2 / 24, 2)
        assert task.num_changed in (20, None)
        twice = 2 if task.task == "facts_twice" else 1
        assert task.pairing.repeats == (twice, twice)
        told = {line.check: line.status for line in task.preflight}
        assert told["prompts"] == told["targets"] == "same"
    held = {str(one.name): one for one in a.series}
    found = prompts_of("opencompass", held["facts_list accuracy"], {2})
    assert found[2].text == "one plus one equals"


def test_a_table_of_opencompass_whose_rule_is_not_known(tmp_path):
    """Equal texts do not give the file's score, so nothing is guessed; a chat is known whole."""
    file = tmp_path / "results" / "model" / "quiz.json"
    file.parent.mkdir(parents=True)
    chats = [
        [{"role": "HUMAN", "prompt": "Q"}, {"role": "BOT", "prompt": str(n)}] for n in range(4)
    ]
    table = {"type": "GEN"} | {
        str(n): {"prompt": chat, "predictions": "x", "references": "xyyy"[n]}
        for n, chat in enumerate(chats)
    }
    file.write_text(json.dumps({"score": 50.0, "details": table}))
    with pytest.raises(DumpError, match="nothing that is scored"):
        read(str(tmp_path), ReadRequest())
    file.write_text(json.dumps({"score": 25.0, "details": table}))
    (series,) = read(str(tmp_path), ReadRequest()).series
    assert [row.score for row in series.rows] == [1.0, 0.0, 0.0, 0.0]
    assert len({row.prompt for row in series.rows}) == 4


def opencompass(folder, right, *, listed=True, parts=1):
    """As Gsm8kEvaluator's details come out of BaseEvaluator.evaluate, or AccwithDetails' do."""
    results = folder / "results" / "model"
    results.mkdir(parents=True)
    details = [
        {"example_abbr": f"gsm8k_{n}", "pred": [str(n)], "answer": [str(n)], "correct": [one]}
        for n, one in enumerate(right)
    ]
    if not listed:
        details = {"type": "GEN"} | {
            str(n): {"prompt": f"Q{n}", "pred": str(n), "refr": "x", "is_correct": one}
            for n, one in enumerate(right)
        }
    (results / "gsm8k.json").write_text(json.dumps({"accuracy": 50.0, "details": details}))
    predictions = folder / "predictions" / "model"
    predictions.mkdir(parents=True)
    asked = [
        {"origin_prompt": [{"role": "HUMAN", "prompt": f"Q{n}"}], "prediction": str(n)}
        for n in range(len(right))
    ]
    size = -(-len(asked) // parts)
    for part in range(parts):
        held = asked[part * size : (part + 1) * size]
        name = "gsm8k.json" if parts == 1 else f"gsm8k_{part}.json"
        text = json.dumps({str(n): one for n, one in enumerate(held)})
        (predictions / name).write_text(text)
    return folder


@pytest.mark.parametrize("listed", [True, False])
def test_opencompass(tmp_path, listed):
    """Both forms of details; the prompts come from predictions, also in parts."""
    right = [True, True, False, True, False, True]
    a = opencompass(tmp_path / "a", right, listed=listed)
    b = opencompass(tmp_path / "b", [*right[:3], False, False, True], listed=listed, parts=2)
    report = scores(a, b)
    (task,) = report.candidates[0].tasks
    assert (task.task, task.pairing.num_paired, task.num_lost) == ("gsm8k", 6, 1)
    assert task.reference == pytest.approx(4 / 6)
    assert next(line for line in task.preflight if line.check == "prompts").status == "same"
    (series,) = read(str(b), ReadRequest()).series
    prompts = prompts_of("opencompass", series, {5})
    assert [(one.role, one.content) for one in prompts[5].messages] == [("user", "Q4")]


def test_opencompass_without_details(tmp_path):
    """The option that writes them is named."""
    folder = tmp_path / "results" / "model"
    folder.mkdir(parents=True)
    (folder / "gsm8k.json").write_text('{"accuracy": 50.0}')
    with pytest.raises(DumpError, match="nothing that is scored") as failed:
        read(str(tmp_path), ReadRequest())
    assert "--dump-eval-details" in str(failed.value)


def test_a_csv(tmp_path):
    """Columns by name; words of truth, repeats and groups."""
    path = tmp_path / "a.csv"
    path.write_text("id,score,group,repeat\nx,true,g,0\nx,0,g,1\ny,0.5,,\nz,,,\n")
    (series,) = read(str(path), ReadRequest()).series
    assert [row.score for row in series.rows] == [1.0, 0.0, 0.5, None]
    assert [row.cluster for row in series.rows] == ["g", "g", None, None]
    assert [row.repeat for row in series.rows] == [0, 1, 0, 0]


def test_filters_and_metrics_of_lm_eval_are_rows_of_their_own(lm_eval):
    """One series for each filter and metric; globs choose."""
    lines = []
    for n in range(4):
        for name in ("strict-match", "flexible-extract"):
            line = sample(n, score=1.0, right=0, likelihoods=[-1.0, -2.0])
            lines.append(line | {"filter": name, "metrics": ["acc", "acc_norm"], "acc_norm": 0.0})
    folder = lm_eval("a", lines)
    names = {str(one.name) for one in read(str(folder), ReadRequest()).series}
    assert len(names) == 4 and "quiz strict-match acc_norm" in names
    found = read(str(folder), ReadRequest(metrics=["acc"], filters=["strict*"])).series
    assert [str(one.name) for one in found] == ["quiz strict-match acc"]


def test_equal_documents_of_lm_eval_stay_apart(lm_eval):
    """Two documents of one text have one hash, and are told apart by their order."""
    same = [sample(n, score=n % 2, right=0, likelihoods=[-1.0, -2.0]) for n in range(2)]
    same[1]["doc_hash"] = same[0]["doc_hash"]
    (series,) = read(str(lm_eval("a", same)), ReadRequest()).series
    assert len({row.document for row in series.rows}) == 2


def test_the_newest_file_of_a_task_is_taken(lm_eval, tmp_path):
    """And the older one is counted."""
    line = sample(0, score=1.0, right=0, likelihoods=[-1.0, -2.0])
    folder = lm_eval("a", [line])
    old = folder / "model" / "samples_quiz_2025-01-02T03-04-05.678901.jsonl"
    old.write_text(json.dumps(line | {"acc": 0.0}) + "\n")
    found = read(str(folder), ReadRequest())
    assert found.series[0].rows[0].score == 1.0 and "1 older file" in sentence(found.remarks[0])


def test_a_model_is_shown_whatever_its_name_is(lm_eval):
    """A number in place of the model's name is its text."""
    line = sample(0, score=1.0, right=0, likelihoods=[-1.0, -2.0])
    folder = lm_eval("a", [line], results={"config": {"model": 1.5}})
    assert read(str(folder), ReadRequest()).model == "1.5"


def test_two_models_in_one_folder_are_not_one_evaluation(lm_eval, tmp_path):
    """The newest file of both may be the other model's."""
    folder = lm_eval("a", [sample(0, score=1.0, right=0, likelihoods=[-1.0, -2.0])])
    (folder / "other").mkdir()
    for path in (folder / "model").iterdir():
        (folder / "other" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(DumpError, match="2 models: model, other"):
        read(str(folder), ReadRequest())


def test_parts_of_one_score_in_two_files_are_refused(tmp_path):
    """Of two files that hold the same task, one alone would be taken for all."""
    for part in (0, 1):
        rows = [{"id": f"q{n}", "score": 1, "task": "t"} for n in range(part * 5, part * 5 + 5)]
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (tmp_path / f"part{part}.jsonl").write_text(text)
    with pytest.raises(DumpError, match=r"two files hold t score: .*part0.*part1"):
        read(str(tmp_path), ReadRequest())
    assert len(read(str(tmp_path / "part0.jsonl"), ReadRequest()).series[0].rows) == 5


@pytest.mark.parametrize(
    ("metric", "is_higher_better"),
    [
        ("val_loss", False),
        ("WER (%)", False),
        ("word-perplexity", False),
        ("ppl_wikitext", False),
        ("latency_ms", False),
        ("ece", False),
        ("error_free", True),
        ("exact_match", True),
        ("error-rate", False),
        ("bits_per_byte", False),
        ("Brier_Score", False),
        ("acc", True),
        ("error_detection_f1", True),
        ("lossless", True),
        ("filter_acc", True),
    ],
)
def test_the_direction_is_that_of_the_words_of_a_name(metric, is_higher_better, table):
    """Losses and perplexities are better where lower, whatever they are called."""
    path = table("a", [1.0], metric=[metric])
    (series,) = read(str(path), ReadRequest()).series
    assert series.higher_is_better == is_higher_better


def test_prompts_come_back(lm_eval):
    """What the model was given, as text or chat."""
    lines = [sample(n, score=1.0, right=0, likelihoods=[-1.0, -2.0]) for n in range(3)]
    (series,) = read(str(lm_eval("a", lines)), ReadRequest()).series
    assert prompts_of("lm-eval", series, {2})[2].text == "Question 1:"
    (series,) = read(str(FIXTURES / "evalscope" / "a"), ReadRequest()).series
    (message,) = prompts_of("evalscope", series, {1})[1].messages
    assert message.role == "user" and "zero plus zero" in message.content
    series = read(str(FIXTURES / "inspect" / "a.eval"), ReadRequest()).series[0]
    (prompt,) = prompts_of("inspect", series, {1}).values()
    assert prompt.messages[0].content.startswith("What is ")


def cut(path, source):
    path.write_bytes(source.read_bytes()[:-200])
    return path


@pytest.mark.parametrize("name", ["lm_eval", "evalscope", "inspect", "csv", "jsonl"])
def test_half_a_file(name, tmp_path, table):
    """Refused with the file and the line; nothing is compared."""
    if name in ("csv", "jsonl"):
        path = tmp_path / f"half.{name}"
        text = "id,score\nx,1\ny" if name == "csv" else '{"id": 1, "score": 1}\n{"id": 2, "sc'
        path.write_text(text)
    elif name == "inspect":
        path = cut(tmp_path / "half.eval", FIXTURES / "inspect" / "a.eval")
    else:
        source = next((FIXTURES / name / "a").rglob("*.jsonl"))
        path = cut(tmp_path / source.name, source)
    with pytest.raises(DumpError) as failed:
        scores(path, table("b", [1, 0]))
    assert "half." in failed.value.where or ".jsonl" in failed.value.where


@pytest.mark.parametrize(
    "line",
    [
        {"sample_score": {"score": {"value": {"acc": 1}}}, "messages": 5},
        {
            "doc_id": 1,
            "metrics": ["acc"],
            "filter": "none",
            "arguments": {"a": 1, "b": 2},
            "resps": [1, 2],
            "acc": 1.0,
        },
    ],
)
def test_fields_of_other_types(line, tmp_path, table):
    """Bad input, never a fault of ours."""
    path = tmp_path / "reviews.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(DumpError):
        scores(path, table("b", [1]))


@pytest.mark.parametrize("repeat", [float("inf"), 0.5, "1.5", "x"])
def test_a_repeat_is_a_whole_number(repeat, table):
    """Anything else is refused."""
    with pytest.raises(DumpError, match="the repeat is no number"):
        scores(table("a", [1], repeat=[repeat]), table("b", [1]))


def test_an_integer_beyond_all_floats_is_no_score(table):
    """It is left out, with the reason."""
    (series,) = read(str(table("a", [10**400, 1])), ReadRequest()).series
    assert [row.score for row in series.rows] == [None, 1.0]
    assert sentence(series.rows[0].why) == "the score is no number" and series.rows[1].why is None


def test_what_is_no_result(tmp_path):
    """An unknown file, and a format that nobody knows."""
    (tmp_path / "a.txt").write_text("41.4")
    with pytest.raises(DumpError, match="no results of an evaluation"):
        scores(tmp_path / "a.txt", tmp_path / "b")
    with pytest.raises(UsageError, match="no format is called 'helm'"):
        scores("a", "b", format="helm")
