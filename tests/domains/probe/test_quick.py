"""The quick form: fast, and a capture is the same with it and without."""

import random
import time
import warnings

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from divergence import RecordOptions, capture, replay
from divergence import truth as make_truth
from divergence.domains.probe import quick
from divergence.domains.probe.quick import quick_facts


class Calls(TorchDispatchMode):
    """Counts calls of operators and the elements of their results."""

    count = num_elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.count += 1
        self.num_elements += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(quick, "_cache", {})


@pytest.mark.slow
def test_it_is_little_work():
    """Some calls of operators, on small tensors; about 0.6 s (benchmarks/probe.py)."""
    with Calls() as calls:
        facts = quick_facts("cpu")
    assert calls.count < 60_000 and calls.num_elements < 300_000_000
    assert {fact.probe for fact in facts} >= {
        "order",
        "accumulator",
        "input bits",
        "fma",
        "rows",
        "batch",
        "subnormals",
        "rounding",
        "ulp",
        "lanes",
    }
    names = [fact.name for fact in facts]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_the_same_machine_says_the_same_twice(monkeypatch):
    """Facts hold nothing of time or chance."""
    first = quick_facts("cpu")
    monkeypatch.setattr(quick, "_cache", {})
    assert quick_facts("cpu") == first


@pytest.mark.slow
def test_it_is_made_once_a_process_and_setting():
    """Asked again, it is there at once; other threads are another setting."""
    quick_facts("cpu")
    assert len(quick._cache) == 1
    quick_facts("cpu")
    assert len(quick._cache) == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        quick_facts("cpu")
    finally:
        torch.set_num_threads(threads)
    assert len(quick._cache) == 2


@pytest.mark.slow
def test_it_disturbs_nothing():
    """Random states, default dtype, warnings and grad mode are as before."""
    torch.manual_seed(3)
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quick_facts("cpu")
    assert caught == []
    assert random.getstate() == states[0]
    assert numpy.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_it_does_not_depend_on_the_default_dtype():
    """A model may have set another."""
    facts = quick_facts("cpu")
    quick._cache.clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert quick_facts("cpu") == facts
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_machine_that_refuses_has_one_fact_that_says_why():
    """Whatever a backend raises."""
    (fact,) = quick_facts("cuda:77" if not torch.cuda.is_available() else "xpu")
    assert (fact.name, fact.value, fact.verified) == ("probe: quick form", "failed", False)
    assert fact.evidence
    assert quick._cache == {}


@pytest.mark.slow
def test_a_slow_machine_tries_the_same(monkeypatch):
    """However late it gets, no fact is left out: the set is fixed."""
    names = [fact.name for fact in quick_facts("cpu")]
    quick._cache.clear()
    late = iter(range(0, 1 << 30, 1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(late)))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(late)))
    facts = quick_facts("cpu")
    assert [fact.name for fact in facts] == names
    assert not any(fact.value == "no answer" for fact in facts)


@pytest.mark.slow
def test_a_capture_notes_it_and_records_the_same(llama, tmp_path):
    """With and without: the same tensors, warnings and tokens."""
    with_, without = (
        capture(
            str(llama),
            out=tmp_path / str(probe),
            prompts=["a bridge"],
            probe=probe,
            max_new_tokens=2,
        )
        for probe in (True, False)
    )
    assert with_.manifest.arithmetic
    assert without.manifest.arithmetic == []
    digests = [[(r.coordinates, r.xxh3) for r in run.records] for run in (with_, without)]
    assert digests[0] == digests[1]
    for name in ("switches", "nondeterministic_warnings"):
        assert getattr(with_.manifest.settings, name) == getattr(without.manifest.settings, name)


def test_a_failing_probe_fails_no_capture(llama, tmp_path, monkeypatch):
    """The run is whole, and says what happened."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is on fire\nat line 1")

    monkeypatch.setattr(quick, "probe_all", fail)
    run = capture(str(llama), out=tmp_path / "run", prompts=["a bridge"], max_new_tokens=1)
    assert run.manifest.complete
    (fact,) = run.manifest.arithmetic
    assert (fact.value, fact.evidence) == ("failed", "the device is on fire")


@pytest.mark.slow
def test_a_replay_notes_it_and_its_truth_does_not(tmp_path, shared_run):
    """Operators run again are run on a machine too."""
    run = shared_run(
        prompts=["a bridge"],
        max_new_tokens=1,
        sites=["ops@model.layers.0.mlp"],
        recording=RecordOptions(weights=True),
    )
    again = replay(run, out=tmp_path / "again", device="cpu")
    assert again.manifest.arithmetic == run.manifest.arithmetic
    truth = replay(run, out=tmp_path / "truth", device="cpu", truth=True)
    assert truth.manifest.arithmetic == []


@pytest.mark.slow
def test_a_truth_is_not_probed(tmp_path, shared_run):
    """It computes in float64, whatever the machine does."""
    run = shared_run(prompts=["a"], max_new_tokens=1)
    truth = make_truth(run, out=tmp_path / "truth")
    assert truth.manifest.arithmetic == []
