"""Losses are read from what trainings write."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from divergence import compare_losses
from divergence.errors import DumpError, UsageError

ROWS = [{"step": 1, "loss": 2.5, "grad_norm": 1.0}, {"step": 2, "loss": 2.25, "grad_norm": 0.5}]
LOSSES = {1: 2.5, 2: 2.25}


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.fixture
def notes(tmp_path):
    """``notes(path, metrics)``: a file holds just these metrics, step by step; what is noted."""
    file = tmp_path / "expected.jsonl"

    def compared(path, metrics):
        steps = sorted({step for values in metrics.values() for step in values})
        rows = ({"step": step, **values_at(metrics, step)} for step in steps)
        file.write_text("\n".join(map(json.dumps, rows)))
        found = compare_losses(path, file, warmup_steps=0)
        compared_steps = {item.metric: (item.num_steps, item.num_equal) for item in found.metrics}
        assert compared_steps == {name: (len(metrics[name]),) * 2 for name in metrics}
        assert not [note for note in found.notes if "A has" in note or "is in" in note], found.notes
        return found.notes

    return compared


def values_at(metrics, step):
    return {name: values[step] for name, values in metrics.items() if step in values}


def test_json_lines(tmp_path, notes):
    """One object a line; other fields and blank lines are passed over."""
    text = "".join(json.dumps({**row, "lr": 1}) + "\n\n" for row in ROWS) + '{"note": "done"}\n'
    path = write(tmp_path / "a.jsonl", text)
    assert notes(path, {"loss": LOSSES, "grad_norm": {1: 1.0, 2: 0.5}}) == []


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables(tmp_path, name, sign, notes):
    """Columns by their names, empty cells passed over."""
    text = f"iteration{sign}lm loss{sign}eval_loss\n1{sign}2.5{sign}\n2{sign}2.25{sign}3\n"
    notes(write(tmp_path / name, text), {"loss": LOSSES, "eval_loss": {2: 3.0}})


def test_the_state_of_transformers_trainer(tmp_path, notes):
    """The file or its folder, without the summary at the end, which is a mean over all steps."""
    history = [
        *ROWS,
        {"eval_loss": 3.0, "step": 2},
        {"train_loss": 9.0, "train_runtime": 1, "step": 2},
    ]
    (tmp_path / "of").mkdir()
    path = write(tmp_path / "of" / "trainer_state.json", json.dumps({"log_history": history}))
    for place in (path, str(tmp_path / "of")):
        metrics = {"loss": LOSSES, "eval_loss": {2: 3.0}, "grad_norm": {1: 1.0, 2: 0.5}}
        notes(place, metrics)


@pytest.mark.parametrize("value", ["NaN", '"inf"'])
def test_nan_is_a_value(tmp_path, value):
    """As Python's json writes it, and as text."""
    path = write(tmp_path / "a.jsonl", f'{{"step":1,"loss":2}}\n{{"step":2,"loss":{value}}}\n')
    other = write(tmp_path / "b.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    found = compare_losses(path, other)
    assert (found.verdict.kind, found.metrics[0].nonfinite_a) == ("nonfinite", 2)


def test_what_is_odd_is_noted(tmp_path, notes):
    """Steps that come twice, and rows without one."""
    text = '{"step":1,"loss":3}\n{"step":1,"loss":2.5}\n'
    (line,) = notes(write(tmp_path / "a.jsonl", text), {"loss": {1: 2.5}})
    assert "came before" in line
    path = write(tmp_path / "b.jsonl", '{"loss":3}\n{"loss":2}\n')
    (line,) = notes(path, {"loss": {0: 3.0, 1: 2.0}})
    assert "have no step" in line


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"step": 1, "loss": 2}\n{broken', "(?s)it is no JSON.*line 2"),
        ("a.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("a.jsonl", '{"step": 1, "loss": "high"}\n', "not a number"),
        ("a.jsonl", '{"step": 1, "loss": [2]}\n', "is list, not a number"),
        ("a.jsonl", '{"step": 1.5, "loss": 2}\n', "not a whole number"),
        ("a.jsonl", '{"step": 1, "reward": 2}\n', "no losses were found"),
        ("a.jsonl", "", "no losses were found"),
        ("a.csv", "step,reward\n1,2\n", "no losses were found"),
        ("a.json", "{", "it is no JSON"),
        ("a.json", '{"verdict": 1}', "no log_history"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_place(tmp_path, name, text, said):
    """And nothing is guessed."""
    path = write(tmp_path / name, text)
    with pytest.raises(DumpError, match=said):
        compare_losses(path, write(tmp_path / "good.jsonl", json.dumps(ROWS[0])))


def test_no_file_is_a_usage_error(tmp_path):
    """Said as such."""
    with pytest.raises(UsageError, match="no file"):
        compare_losses(tmp_path / "none.jsonl", tmp_path / "nor.jsonl")


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("train/loss", "loss"),
        ("Loss", "loss"),
        ("lm loss", "loss"),
        ("eval/loss", "eval_loss"),
        ("validation loss", "eval_loss"),
        ("train/grad-norm", "grad_norm"),
        ("aux_loss", None),
        ("learning_rate", None),
        ("lm loss validation", None),
    ],
)
def test_names_of_metrics(name, metric, tmp_path, notes):
    """As common trainers write them; another loss is not taken for the loss."""
    rows = [{"step": 1, "training loss": 2.0, name: 3.0}]
    if metric == "loss":
        del rows[0]["training loss"]
    other = {} if metric is None else {metric: {1: 3.0}}
    notes(write(tmp_path / "a.jsonl", json.dumps(rows[0])), {"loss": {1: 2.0}} | other)


def test_a_run_is_no_file_of_losses(tmp_path):
    """Nor is an archive, an address or an empty folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    (tmp_path / "run" / "trainer_state.json").write_text("{}")
    good = write(tmp_path / "good.jsonl", json.dumps(ROWS[0]))
    for path in (tmp_path / "run", tmp_path, "a.tar", "https://host/a.jsonl", "a"):
        with pytest.raises(UsageError, match=r"no file|no run at all"):
            compare_losses(path, good)


def test_event_files_without_tensorboard(tmp_path, monkeypatch):
    """The line that installs it."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    good = write(tmp_path / "good.jsonl", json.dumps(ROWS[0]))
    with pytest.raises(UsageError) as caught:
        compare_losses(write(tmp_path / "events.out.tfevents.1.host", ""), good)
    assert "pip install" in str(caught.value.hint)


def test_event_files_are_read_through_tensorboard(tmp_path, monkeypatch, notes):
    """Scalars, and the tensors of one number that TensorFlow 2 writes."""

    class Events:
        def __init__(self, path, size_guidance):
            assert size_guidance["scalars"] == 0  # all of them

        def Reload(self):
            pass

        def Tags(self):
            return {"scalars": ["train/loss"], "tensors": ["train/grad_norm"]}

        def Scalars(self, tag):
            return [SimpleNamespace(step=step, value=value) for step, value in LOSSES.items()]

        def Tensors(self, tag):
            shapes = [[], [10**6, 10**6]]  # the second is said to be large, and holds one number
            return [
                SimpleNamespace(
                    step=step,
                    tensor_proto=SimpleNamespace(
                        tensor_shape=SimpleNamespace(dim=[SimpleNamespace(size=n) for n in shape])
                    ),
                )
                for step, shape in enumerate(shapes, 1)
            ]

    package = "tensorboard.backend.event_processing.event_accumulator"
    for name in """
        tensorboard tensorboard.backend tensorboard.backend.event_processing tensorboard.util
    """.split():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    sys.modules[package].EventAccumulator = Events
    sys.modules["tensorboard.util"].tensor_util = SimpleNamespace(
        make_ndarray=lambda _: np.array(0.5, np.float32)
    )
    (tmp_path / "of").mkdir()
    (tmp_path / "of" / "events.out.tfevents.1.host").write_text("")
    notes(str(tmp_path / "of"), {"loss": LOSSES, "grad_norm": {1: 0.5}})
