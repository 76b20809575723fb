"""Tensors that modules make and no checkpoint stores: other ones are told before any number, with
all weights equal."""

from __future__ import annotations

import pytest
import torch

from divergence import capture, compare
from divergence.facts import sentence

NAME = "model.rotary_emb.inv_freq"
PROMPTS = ["The bridge was built", "one two three four"]


@pytest.fixture
def reference(shared_run):
    return shared_run(prompts=PROMPTS, max_new_tokens=1, probe=False)


def line_of(reference, path, change):
    """The line of preflight of a run whose model was changed once it was loaded."""

    def prepare(model):
        change(model.model.rotary_emb)
        return model

    candidate = capture(like=reference, out=path, prepare=prepare, probe=False)
    report = compare(reference, candidate)
    (line,) = [line for line in report.preflight if line.check == "derived tensors"]
    return report, line


def zeros(rotary):
    rotary.inv_freq[1:] = 0.0


def doubled(rotary):
    rotary.inv_freq *= 2.0


def narrow(rotary):
    rotary.inv_freq = rotary.inv_freq.bfloat16()


def other_theta(rotary):
    rotary.inv_freq = rotary.inv_freq**1.5


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (zeros, "B's is 0 from index 1 on"),
        (doubled, "B = 2 x A"),
        (narrow, "float32 / bfloat16, equal values but for rounding"),
        (other_theta, "from index 1 on 0.31"),
    ],
)
def test_other_frequencies_are_named_with_equal_weights(reference, tmp_path, change, how):
    """A derived table that differs is named, although the weights are the same."""
    report, line = line_of(reference, tmp_path / "b", change)
    assert report.to_json()
    assert next(line for line in report.preflight if line.check == "weights").status == "same"
    assert line.status == "differs"
    assert f"{NAME}: {how}" in sentence(line.details[0])


def test_equal_ones_are_told_to_be_so(reference, tmp_path):
    """Also where libraries round a power otherwise."""

    def an_ulp(rotary):
        rotary.inv_freq = torch.nextafter(rotary.inv_freq, torch.tensor(9.0))

    _, line = line_of(reference, tmp_path / "b", an_ulp)
    assert (line.status, line.details) == ("same", [])
    assert NAME in reference.manifest.model.derived
    assert not reference.manifest.model.derived.keys() & reference.manifest.model.digests.keys()


def test_what_is_lost_while_the_model_runs_is_told_with_the_prompt(reference, tmp_path):
    """As a server loses its tables when it sleeps: from the second prompt on."""

    def sleepy(rotary):
        calls = []

        def lose(module, args):
            calls.append(1)
            if len(calls) > 1:
                module.inv_freq.zero_()

        rotary.register_forward_pre_hook(lose)

    report, line = line_of(reference, tmp_path / "b", sleepy)
    assert line.status == "differs"
    assert "changed while running, on B, while prompt 1 ran" in sentence(line.details[0])
    assert report.verdict.kind not in ("identical", "within_floor")


def test_a_number_that_changes_while_the_model_runs_is_told_with_the_prompt(reference, tmp_path):
    """As code that sets a scale by the first long prompt, and leaves it so."""

    def prepare(model):
        calls = []

        def rescale(module, args):
            calls.append(1)
            if len(calls) > 1:
                for block in model.model.layers:
                    block.self_attn.scaling = 0.3

        model.register_forward_pre_hook(rescale)
        return model

    candidate = capture(like=reference, out=tmp_path / "b", prepare=prepare, probe=False)
    notes = candidate.manifest.model.code["LlamaAttention"]
    assert notes.changed_after == {"scaling": 1}
    assert reference.manifest.model.code["LlamaAttention"].changed_after == {}
    report = compare(reference, candidate)
    (line,) = [line for line in report.preflight if line.check == "code"]
    texts = " ".join(sentence(item) for item in line.details)
    assert "LlamaAttention.scaling changed while running, on B, while prompt 1 ran" in texts
