"""Tensors that modules make and no checkpoint stores: other ones are told before any number, with
all weights equal."""

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


def changed(reference, path, change):
    """The report on a run whose model was changed once it was loaded, and its lines that differ."""

    def prepare(model):
        change(model)
        return model

    candidate = capture(like=reference, out=path, prepare=prepare, probe=False)
    report = compare(reference, candidate)
    return report, {line.check: line.detail for line in report.preflight if line.status != "same"}


def no_last(model):
    model.model.rotary_emb.inv_freq[-1:] = 0.0


def transposed(model):
    for block in model.model.layers:
        weight = block.mlp.down_proj.weight
        weight.data = weight.data.t().contiguous().t()


def test_equal_parameters_that_lie_otherwise_in_memory_are_named(reference, tmp_path):
    """Their kernels may be others, so it is not said that nothing explains another rounding."""
    report, lines = changed(reference, tmp_path / "b", transposed)
    strides = "model.layers.*.mlp.down_proj.weight: contiguous / strides 1, 64"
    assert lines == {"memory layout": strides}
    assert "nothing that is recorded" not in report.verdict.summary


def test_a_head_of_its_own_with_the_embedding_s_values_is_named(shared_run, tmp_path):
    """Both hold the same values, and one tensor is two on one side."""
    reference = shared_run("gpt2", prompts=PROMPTS, max_new_tokens=1, probe=False)

    def untied(model):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())

    _, lines = changed(reference, tmp_path / "b", untied)
    names = "transformer.wte.weight and lm_head.weight"
    assert lines == {"memory layout": f"{names} are one tensor on A alone"}


def test_dropout_that_is_active_on_one_side_is_named(shared_run, tmp_path):
    """A side that was never put into its mode of inference."""
    reference = shared_run("gpt2", prompts=PROMPTS, max_new_tokens=1, probe=False)
    report, lines = changed(reference, tmp_path / "b", lambda model: model.train())
    assert lines == {"code": "Dropout.training False / True"}
    assert "Dropout.training False / True" in report.verdict.summary


@pytest.mark.slow
def test_a_lost_number_that_rounding_hides_is_no_same_model(shared_run, tmp_path):
    """In bfloat16 a lost last frequency moves nothing beyond rounding, and yet it is lost."""
    reference = shared_run(prompts=PROMPTS, dtype="bfloat16", probe=False)
    report, _ = changed(reference, tmp_path / "b", no_last)
    assert report.verdict.kind == "within_floor"
    assert "model.rotary_emb.inv_freq: from index 7 on" in report.verdict.summary
    assert "the same model" not in report.verdict.summary


@pytest.mark.slow
def test_a_table_s_fault_is_in_every_prompt_where_any_of_its_outputs_is(shared_run, tmp_path):
    """A lost frequency moves cosines of late tokens alone beyond a limit, and every sine."""
    prompts = [[5, 9, 17, 33, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24], [7, 8, 9, 10, 11]]
    reference = shared_run(prompts=prompts, dtype="float32", probe=False)
    report, _ = changed(reference, tmp_path / "b", no_last)
    assert report.verdict.onset.site == "model.rotary_emb:out"
    assert "prompt" not in report.verdict.summary
