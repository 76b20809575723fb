"""Arguments of the Python API: what means the same is taken, what is wrong is named beforehand."""

import contextlib
import threading

import numpy as np
import pytest
import torch

from divergence import capture, compare, replay
from divergence import truth as make_truth
from divergence.errors import UsageError
from divergence.recording.engines.load import Loading, load_model
from divergence.recording.machine import deterministic_settings

SHORT = {"max_new_tokens": 1, "probe": False}


@pytest.fixture
def run(shared_run):
    return shared_run(**SHORT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sites": "blocks"}, {"sites": ["blocks"]}),
        ({"dtype": torch.float32}, {"dtype": "float32"}),
        ({"device": torch.device("cpu")}, {"device": "cpu"}),
        ({"prompts": "one two"}, {"prompts": ["one two"]}),
        ({"prompts": [[1, 2, 3]]}, {"prompts": [torch.tensor([1, 2, 3])]}),
        ({"plants": "model.layers.1:out=scale:2"}, {"plants": ["model.layers.1:out=scale:2"]}),
        ({"max_new_tokens": np.int64(1)}, {"max_new_tokens": 1}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_one_thing_in_two_ways_is_one_run(one, other, llama, tmp_path):
    """The same records, and the same words in the manifest."""
    made = [
        capture(llama, out=tmp_path / str(number), **{**SHORT, **wishes})
        for number, wishes in enumerate((one, other))
    ]
    assert made[0].records == made[1].records
    a, b = (made[number].manifest for number in (0, 1))
    assert (a.plan, a.settings, a.tokens) == (b.plan, b.settings, b.tokens)


def test_token_ids_are_taken_as_they_are(llama, tmp_path):
    """No tokenizer stands between."""
    run = capture(llama, out=tmp_path / "a", prompts=[[1, 2, 3], "four"], **SHORT)
    samples = run.manifest.tokens.samples
    assert (samples[0].prompt_ids, samples[0].text, samples[1].text) == ([1, 2, 3], None, "four")


BAD = [
    {"label": 3},
    {"max_new_tokens": True},
    {"max_new_tokens": 1.5},
    {"max_new_tokens": "2"},
    {"dtype": 32},
    {"device": 0},
    {"sites": [3]},
    {"sites": 3},
    {"prompts": 3},
    {"prompts": [3]},
    {"prompts": [[1, "a"]]},
    {"prompts": [[]]},
    {"prompts": [[-1]]},
    {"seed": "x"},
    {"batch": 1},
    {"deterministic": "yes"},
    {"store": 1},
    {"steps": 0},
    {"revision": 1},
    {"repeat": None},
    {"chat": None},
    {"prompts_file": 3},
    {"weights": 1},
    {"force": 1},
    {"command": 1},
    {"task": None},
    {"mesh": 2},
    {"positions": [0]},
]


@pytest.mark.parametrize("wish", BAD, ids=str)
def test_a_wrong_argument_is_named_before_anything_is_loaded(wish, tmp_path):
    """There is no such model: it is not even looked for."""
    with pytest.raises(UsageError) as caught:
        capture(tmp_path / "no-model", out=tmp_path / "out", **wish)
    assert caught.value.message.startswith(next(iter(wish)))
    assert not (tmp_path / "out").exists()


def test_the_other_functions_name_their_arguments_too(run, tmp_path):
    """Whatever makes a run."""
    for call in (
        lambda: make_truth(run, out=tmp_path / "x", label=3),
        lambda: replay(run, out=tmp_path / "x", label=3),
    ):
        with pytest.raises(UsageError, match=r"^label=3 is int, not text"):
            call()


def test_one_floor_is_no_list_of_letters(run, tmp_path):
    """A path, alone or in a list, as text or not."""
    for floor in (str(run.path), run.path, run, [run.path]):
        with pytest.raises(UsageError, match="is A itself"):
            compare(run, capture_again(run, tmp_path), floor=floor)


def capture_again(run, folder):
    place = folder / "again"
    plants = ["model.layers.1:out=scale:1.01"]
    return place if place.exists() else capture(like=run, out=place, plants=plants, probe=False)


def switches() -> dict[str, object]:
    backends = torch.backends
    return {
        "mkldnn": backends.mkldnn.deterministic,
        "fp32": getattr(backends, "fp32_precision", None),
        "matmul": getattr(backends.mkldnn.matmul, "fp32_precision", None)
        if hasattr(backends.mkldnn, "matmul")
        else None,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def test_threads_put_every_switch_back():
    """Each would find the other's settings and put those back, the last of all for good."""
    before = switches()
    inside = threading.Barrier(3, timeout=0.3)
    errors = []

    def work():
        try:
            with deterministic_settings("cpu", seed=0):
                with contextlib.suppress(threading.BrokenBarrierError):
                    inside.wait()  # where they can be in it together, they are
                errors.extend([] if torch.are_deterministic_algorithms_enabled() else ["off"])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert switches() == before


def test_settings_within_settings_are_put_back():
    """Of one thread, as where an experiment captures."""
    before = switches()
    with deterministic_settings("cpu", seed=0), deterministic_settings("cpu", seed=1):
        assert torch.are_deterministic_algorithms_enabled()
    assert switches() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_the_progress_bars_of_transformers_come_back(enabled, llama, monkeypatch):
    """A notebook that has them keeps them."""
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", enabled)
    load_model(Loading(str(llama)))
    assert logging.is_progress_bar_enabled() is enabled
