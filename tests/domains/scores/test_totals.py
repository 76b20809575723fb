"""Scores without documents: lm-eval's results, evalscope's reports, opencompass's summary."""

import json
import math

import pytest

from divergence import scores
from divergence.errors import DumpError, UsageError


def lm_eval(folder, score, *, num=1319, version=3.0):
    folder.mkdir()
    (folder / "results_2026-01-01T00-00-00.000000.json").write_text(
        json.dumps(
            {
                "results": {
                    "gsm8k": {
                        "alias": "gsm8k",
                        "exact_match,strict-match": score,
                        "exact_match_stderr,strict-match": math.sqrt(
                            score * (1 - score) / (num - 1)
                        ),
                    }
                },
                "group_subtasks": {},
                "configs": {"gsm8k": {"task": "gsm8k", "num_fewshot": 5}},
                "versions": {"gsm8k": version},
                "n-shot": {"gsm8k": 5},
                "higher_is_better": {"gsm8k": {"exact_match": True}},
                "n-samples": {"gsm8k": {"original": num, "effective": num}},
                "config": {"model": "vllm", "model_args": {"pretrained": "m"}},
                "lm_eval_version": "0.4.9",
            }
        )
    )
    return folder


def only_task(report):
    (task,) = report.candidates[0].tasks
    return task


def test_lm_evals_results_without_samples(tmp_path):
    """An unpaired interval, and what pairing would give."""
    a, b = lm_eval(tmp_path / "gpu", 0.643), lm_eval(tmp_path / "npu", 0.545)
    report = scores(a, b)
    task = only_task(report)
    assert (task.verdict, task.test, task.metric) == ("worse", "unpaired", "exact_match")
    assert task.standard_error == pytest.approx(0.0190, abs=1e-4)
    assert task.low == pytest.approx(-0.098 - 1.96 * 0.0190, abs=1e-3)
    assert "without pairs" in report.candidates[0].summary
    assert "lm_eval --log_samples" in task.notes[0] and "0.0062" in task.notes[0]
    named = [next(side.iterdir()).rename(tmp_path / f"{side.name}.json") for side in (a, b)]
    assert only_task(scores(*named)).verdict == "worse"


def test_small_differences_stay_undecided(tmp_path):
    """Two points of 1,319 questions are no difference that separate samples show."""
    report = scores(lm_eval(tmp_path / "a", 0.41), lm_eval(tmp_path / "b", 0.39))
    assert only_task(report).verdict == "undecided"
    assert only_task(report).bands[0].needed > 1319
    other = scores(lm_eval(tmp_path / "c", 0.41), lm_eval(tmp_path / "d", 0.39, version=4.0))
    assert only_task(other).verdict == "incomparable"


def test_percent_against_shares_is_another_unit(tmp_path):
    """The same 64% is no gain; --force compares them all the same."""
    a, b = lm_eval(tmp_path / "a", 0.64), lm_eval(tmp_path / "b", 0.64)
    (file,) = b.iterdir()
    content = json.loads(file.read_text())
    results = content["results"]["gsm8k"]
    results |= {key: 100 * value for key, value in results.items() if key != "alias"}
    file.write_text(json.dumps(content))
    task = only_task(scores(a, b))
    assert task.verdict == "incomparable"
    assert "units" in scores(a, b).candidates[0].summary
    assert only_task(scores(a, b, force=True)).verdict == "better"


def evalscope(file, parts, *, name="gsm8k"):
    subsets = [
        {"name": part, "score": score, "num": num, "is_aggregate": aggregate}
        for part, score, num, aggregate in parts
    ]
    file.write_text(
        json.dumps(
            {
                "name": f"m@{name}",
                "dataset_name": name,
                "model_name": "m",
                "score": 0.6,
                "num": 10,
                "metrics": [
                    {
                        "name": "mean_acc",
                        "num": 10,
                        "score": 0.6,
                        "categories": [
                            {"name": ["default"], "num": 10, "score": 0.6, "subsets": subsets}
                        ],
                    }
                ],
                "analysis": "N/A",
            }
        )
    )
    return file


def test_aggregates_of_evalscope_count_once(tmp_path):
    """Subsets that are made of others are no scores of their own."""
    a = [("main", 0.9, 400, False), ("easy", 0.8, 200, False), ("all", 0.866, 600, True)]
    b = [("main", 0.6, 400, False), ("easy", 0.8, 200, False), ("all", 0.667, 600, True)]
    report = scores(evalscope(tmp_path / "a.json", a), evalscope(tmp_path / "b.json", b))
    verdicts = {task.task: task.verdict for task in report.candidates[0].tasks}
    assert verdicts == {"gsm8k_main": "worse", "gsm8k_easy": "undecided"}
    assert report.candidates[0].tasks[0].standard_error == pytest.approx(
        math.hypot(math.sqrt(0.09 / 399), math.sqrt(0.24 / 399)), rel=1e-3
    )


SUMMARY = (
    "dataset,version,metric,mode,gpu,npu\ngsm8k,1d7fe4,accuracy,gen,64.30,54.50\nx,-,-,-,-,-\n"
)


@pytest.mark.parametrize("form", ["csv", "txt"])
def test_both_machines_in_one_summary_of_opencompass(form, tmp_path):
    """Two columns of one file, by their names; without the number of documents no chance."""
    file = tmp_path / f"summary_20260101_000000.{form}"
    text = SUMMARY if form == "csv" else f"tabulate format\n^^^^\n$$$$\ncsv format\n{SUMMARY}$$$$\n"
    file.write_text(text)
    report = scores(f"{file}#gpu", f"{file}#npu")
    task = only_task(report)
    assert (task.reference, task.candidate) == pytest.approx((0.643, 0.545))
    assert task.verdict == "undecided" and task.standard_error is None
    assert "from 192 documents on" in task.notes[0]
    with pytest.raises(UsageError, match="2 models, and none is named") as caught:
        scores(file, tmp_path)
    assert f"'{file}#gpu' '{file}#npu'" in caught.value.hint
    with pytest.raises(UsageError, match="no model 'tpu'"):
        scores(f"{file}#gpu", f"{file}#tpu")
    with pytest.raises(UsageError, match="2 models, and none is named"):
        scores(file, file)
    if form == "csv":
        file.write_text(SUMMARY[: -len("-,-,-\n")])
        with pytest.raises(DumpError, match="as many cells"):
            scores(f"{file}#gpu", f"{file}#npu")


def every_eval(folder, rows):
    folder.mkdir()
    (folder / "record.json").write_text(
        json.dumps(
            {
                "schema_version": "0.2.1",
                "evaluation_id": "x",
                "model_info": {"name": "m"},
                "eval_library": {"name": "helm", "version": "1"},
                "evaluation_results": [
                    {
                        "evaluation_name": "gsm8k",
                        "metric_config": {"lower_is_better": False},
                        "score_details": {"score": sum(rows) / len(rows)},
                    }
                ],
            }
        )
    )
    lines = [
        {
            "schema_version": "0.2.1",
            "evaluation_id": "x",
            "model_id": "m",
            "sample_id": str(n),
            "evaluation_name": "gsm8k",
            "interaction_type": "single_turn",
            "input": {"raw": f"q{n}", "reference": ["1"]},
            "output": {"raw": [str(row)]},
            "evaluation": {"score": float(row), "is_correct": bool(row)},
            "answer_attribution": [],
        }
        for n, row in enumerate(rows)
    ]
    (folder / "instances.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_documents_of_every_eval_ever_are_paired(tmp_path):
    """Single documents are tested in pairs; totals alone decide nothing."""
    a = every_eval(tmp_path / "a", [1] * 60 + [0] * 20)
    b = every_eval(tmp_path / "b", [1] * 30 + [0] * 50)
    task = only_task(scores(a, b))
    assert (task.verdict, task.test, task.num_lost) == ("worse", "mcnemar", 30)
    for folder in (a, b):
        (folder / "instances.jsonl").unlink()
    task = only_task(scores(a, b))
    assert task.verdict == "undecided" and "JSON lines of single documents" in task.notes[0]
