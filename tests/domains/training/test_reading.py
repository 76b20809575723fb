"""Losses are read from what trainings write."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from divergence.domains.training.reading import is_losses, metric_of, read_losses
from divergence.errors import DumpError, UsageError
from divergence.facts import sentence

ROWS = [{"step": 1, "loss": 2.5, "grad_norm": 1.0}, {"step": 2, "loss": 2.25, "grad_norm": 0.5}]
LOSSES = {1: 2.5, 2: 2.25}


def write(path, text):
    path.write_text(text)
    return str(path)


def test_json_lines(tmp_path):
    """One object a line; other fields and blank lines are passed over."""
    text = "".join(json.dumps({**row, "lr": 1}) + "\n\n" for row in ROWS) + '{"note": "done"}\n'
    found = read_losses(write(tmp_path / "a.jsonl", text))
    assert found.metrics == {"loss": LOSSES, "grad_norm": {1: 1.0, 2: 0.5}}
    assert found.remarks == []


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables(tmp_path, name, sign):
    """Columns by their names, empty cells passed over."""
    text = f"iteration{sign}lm loss{sign}eval_loss\n1{sign}2.5{sign}\n2{sign}2.25{sign}3\n"
    found = read_losses(write(tmp_path / name, text))
    assert found.metrics == {"loss": LOSSES, "eval_loss": {2: 3.0}}


def test_the_state_of_transformers_trainer(tmp_path):
    """The file or its folder, without the summary at the end, which is a mean over all steps."""
    history = [
        *ROWS,
        {"eval_loss": 3.0, "step": 2},
        {"train_loss": 9.0, "train_runtime": 1, "step": 2},
    ]
    path = write(tmp_path / "trainer_state.json", json.dumps({"log_history": history}))
    for place in (path, str(tmp_path)):
        assert is_losses(place)
        found = read_losses(place)
        assert found.metrics["loss"] == LOSSES
        assert found.metrics["eval_loss"] == {2: 3.0}


def test_nan_is_a_value(tmp_path):
    """As Python's json writes it, and as text."""
    found = read_losses(
        write(tmp_path / "a.jsonl", '{"step":1,"loss":NaN}\n{"step":2,"loss":"inf"}\n')
    )
    assert np.isnan(found.metrics["loss"][1])
    assert np.isinf(found.metrics["loss"][2])


def test_what_is_odd_is_noted(tmp_path):
    """Steps that come twice, and rows without one."""
    text = '{"step":1,"loss":3}\n{"step":1,"loss":2.5}\n'
    found = read_losses(write(tmp_path / "a.jsonl", text))
    assert found.metrics["loss"] == {1: 2.5}
    assert "came before" in sentence(found.remarks[0])
    found = read_losses(write(tmp_path / "b.jsonl", '{"loss":3}\n{"loss":2}\n'))
    assert found.metrics["loss"] == {0: 3.0, 1: 2.0}
    assert "have no step" in sentence(found.remarks[0])


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
    with pytest.raises(DumpError, match=said):
        read_losses(write(tmp_path / name, text))


def test_no_file_is_a_usage_error(tmp_path):
    """Said as such."""
    with pytest.raises(UsageError, match="no file"):
        read_losses(str(tmp_path / "none.jsonl"))


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
def test_names_of_metrics(name, metric):
    """As common trainers write them; another loss is not taken for the loss."""
    assert metric_of(name) == metric


def test_a_run_is_no_file_of_losses(tmp_path):
    """Nor is an archive, an address or an empty folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    (tmp_path / "run" / "trainer_state.json").write_text("{}")
    for path in (tmp_path / "run", tmp_path, "a.tar", "https://host/a.jsonl", "a"):
        assert not is_losses(str(path))


def test_event_files_without_tensorboard(tmp_path, monkeypatch):
    """The line that installs it."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError) as caught:
        read_losses(write(tmp_path / "events.out.tfevents.1.host", ""))
    assert "pip install" in str(caught.value.hint)


def test_event_files_are_read_through_tensorboard(tmp_path, monkeypatch):
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
    for name in (
        "tensorboard",
        "tensorboard.backend",
        "tensorboard.backend.event_processing",
        "tensorboard.util",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    sys.modules[package].EventAccumulator = Events
    sys.modules["tensorboard.util"].tensor_util = SimpleNamespace(
        make_ndarray=lambda _: np.array(0.5, np.float32)
    )
    (tmp_path / "events.out.tfevents.1.host").write_text("")
    assert is_losses(str(tmp_path))
    found = read_losses(str(tmp_path))
    assert found.metrics == {"loss": LOSSES, "grad_norm": {1: 0.5}}
