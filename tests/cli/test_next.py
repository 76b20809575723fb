"""The command under `next` can work with the runs that it names."""

from __future__ import annotations

import pytest
import torch

from divergence import capture, compare
from divergence.errors import RunFormatError
from divergence.recording.engines.load import Loading, load_model


@pytest.fixture(scope="module")
def first(tmp_path_factory, llama):
    return capture(llama, out=tmp_path_factory.mktemp("next") / "a", prompts=["Snow fell on"],
                   max_new_tokens=2, probe=False)  # fmt: skip


@pytest.mark.parametrize(
    "plant",
    ["lm_head:out=scale:1.5", "model.embed_tokens:out=scale:1.5", "model.norm:out=scale:1.5"],
)
def test_what_lies_outside_blocks_is_localized(first, tmp_path, plant):
    """A tensor alone tells nothing; `localize` leads to the operator."""
    b = capture(like=first, out=tmp_path / "b", plants=[plant], probe=False)
    verdict = compare(first, b).verdict
    assert verdict.kind == "localized"
    assert verdict.next[0].startswith("divergence localize ")


def test_nan_is_localized(first, tmp_path):
    """As any other error is."""

    def spoil(model):
        model.model.layers[1].mlp.register_forward_hook(lambda *args: args[2] * float("nan"))

    verdict = compare(first, capture(like=first, out=tmp_path / "b", prepare=spoil)).verdict
    assert verdict.kind == "nonfinite"
    assert verdict.next[0].startswith("divergence localize ")


def test_a_pair_made_of_tensors_is_not_captured_again(tmp_path, llama, invoke):
    """Its inputs are in no run: what is next looks at the tensors, and the error says why."""
    model = load_model(Loading(str(llama))).module
    inputs = [{"input_ids": torch.tensor([[5, 6, 7, 8]]), "use_cache": False}]
    a = capture(model, inputs=inputs, out=tmp_path / "a")
    model.model.layers[1].mlp.down_proj.weight.data *= 1.1
    verdict = compare(a, capture(model, inputs=inputs, out=tmp_path / "b"), force=True).verdict
    assert verdict.kind in ("localized", "systematic")
    for command in verdict.next:
        assert command.startswith("divergence inspect ")
        assert invoke(*command.partition("   #")[0].split()[1:])[0] == 0
    with pytest.raises(RunFormatError, match="has no tokens") as caught:
        capture(like=a, out=tmp_path / "c")
    assert "inputs=" in caught.value.hint


@pytest.mark.parametrize("faulty", ["reference", "candidate"])
def test_a_truth_is_offered_where_it_can_tell(tmp_path, llama, faulty):
    """It has A's code: where that was replaced, it cannot tell which code is meant."""

    def change(model):
        mlp = model.model.layers[1].mlp
        forward = mlp.forward
        mlp.forward = lambda x: forward(x) * 1.05

    prepare = {"reference": (change, None), "candidate": (None, change)}[faulty]
    a = capture(llama, out=tmp_path / "a", prompts=["Snow fell on"], max_new_tokens=2,
                probe=False, prepare=prepare[0])  # fmt: skip
    b = capture(like=a, out=tmp_path / "b", probe=False, prepare=prepare[1])
    offered = [c for c in compare(a, b).verdict.next if c.startswith("divergence truth ")]
    assert any("-deep" not in command for command in offered) == (faulty == "candidate")
