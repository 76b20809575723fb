"""A parameter that is not contiguous on one side is told where its module is at fault."""

import pytest
from torch.nn import functional as F

PROMPTS = [[5, 9, 17, 101, 23, 44, 61, 8]]


def strided(name, *, is_read_wrongly=True):
    """Equal values in another layout, read as if they were contiguous."""

    def prepare(model):
        part = model.get_submodule(name)
        part.weight.data = part.weight.data.t().contiguous().t()
        if is_read_wrongly:
            shape = part.weight.shape
            part.forward = lambda x: F.linear(x, part.weight.as_strided(shape, (shape[1], 1)))

    return prepare


@pytest.fixture
def run(shared_run):
    return shared_run(prompts=PROMPTS, dtype="float32", max_new_tokens=1, probe=False)


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.gate_proj"],
)
def test_a_layout_of_one_side_alone_is_told(run, name, answer):
    """Of the onset's module: with the strides, and without those of other modules."""
    report = answer(run, strided(name), force=True)
    assert report.verdict.kind == "localized"
    told = [fact.text for fact in report.verdict.evidence if "contiguous" in fact.text]
    width = run.manifest.model.parameters[f"{name}.weight"].shape[0]
    assert told == [f"{name}.weight is contiguous in A, not contiguous (strides [1, {width}]) in B"]


def test_a_layout_that_is_read_rightly_is_no_cause(run, answer):
    """Equal weights in another layout are the same weights, and nothing is said of them."""
    prepare = strided("model.layers.0.mlp.up_proj", is_read_wrongly=False)
    report = answer(run, prepare, force=True)
    assert report.verdict.kind in ("identical", "within_floor")
    assert not any("contiguous" in fact.text for fact in report.verdict.evidence)
