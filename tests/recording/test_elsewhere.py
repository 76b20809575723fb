"""A model on a device without float64: its truth is computed on the CPU, operator by operator.

No such device is here. ``tests.models.mps`` stands in for one: its tensors say that they lie
elsewhere and refuse float64 and operands of two devices, as MPS does. What its kernels compute, and
what torch's own code does beside its dispatcher, it cannot show.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import divergence
from divergence.errors import UsageError
from divergence.recording import own_truth, widening
from divergence.recording.widening import Widening
from tests.models.mps import MPS, Mps, OnMps, on_mps

IDS = torch.arange(3, 19)[None]


def test_the_stand_in_refuses_what_mps_refuses():
    """Neither float64 nor operands of two devices: what passes below has not leaned on them."""
    with Mps():
        x = OnMps(torch.ones(3))
        with pytest.raises(TypeError, match="float64"):
            x.double()
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(2, dtype=torch.float64, device=MPS)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        assert torch.equal((x + 1).cpu(), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "architecture",
    ["bert", "gemma3", "llama", "mamba", "mamba2", "mixtral", "qwen3", "qwen3-moe", "t5"],
)
def test_a_model_elsewhere_is_widened_on_the_cpu(tiny_model, architecture):
    """Its float64 is that of the same model on the CPU."""
    kind = {"bert": "MaskedLM", "t5": "Seq2SeqLM"}.get(architecture, "CausalLM")
    folder = tiny_model(architecture, dtype="bfloat16")
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, dtype="auto")
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :4]} if kind[0] == "S" else {})
    with torch.no_grad(), Widening(torch.float64):
        true = model(**inputs).logits
    elsewhere = on_mps(copy.deepcopy(model))
    before = {name: value.on_cpu.clone() for name, value in elsewhere.named_parameters()}
    with torch.no_grad(), Mps():
        inputs = {name: OnMps(ids) for name, ids in inputs.items()}
        with Widening(torch.float64, device="cpu"):
            logits = elsewhere(**inputs).logits
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, true, rtol=1e-13, atol=1e-13)
    for name, value in elsewhere.named_parameters():
        assert torch.equal(value.on_cpu, before[name])


def test_what_is_written_there_is_moved_back():
    """A tensor that the model owns gets its own dtype's numbers, and stays where it is."""
    state, counter, mask = (
        OnMps(torch.zeros(4)), OnMps(torch.zeros(4, dtype=torch.int64)), OnMps(torch.ones(4) > 0)
    )  # fmt: skip
    with Mps(), Widening(torch.float64, device="cpu") as wide:
        third = torch.ones(4, device=MPS) / 3
        state[1:3].add_(third[1:3])
        counter += 2
        picked = state[OnMps(torch.tensor([1, 2]))]
        masked = third.masked_fill(mask, 0.5)
        made = torch.arange(3, device=MPS)
    assert torch.equal(state.on_cpu, torch.tensor([0, 1 / 3, 1 / 3, 0]))
    assert torch.equal(counter.on_cpu, torch.full((4,), 2))
    assert wide.num_rounded == 1  # integers lose nothing
    for tensor in (third, picked, masked, made):
        assert type(tensor) is torch.Tensor
    assert third.dtype == picked.dtype == masked.dtype == torch.float64
    assert float(third[0]) == 1 / 3


def test_large_weights_go_in_slices(monkeypatch):
    """Memory of the CPU holds a slice of a large matrix, wherever that lies."""
    monkeypatch.setattr(widening, "SLICE_NUMEL", 64)
    x, weight = torch.randn(3, 16), torch.randn(40, 16)
    with Widening(torch.float64):
        true = torch.nn.functional.linear(x, weight)
    with Mps(), Widening(torch.float64, device="cpu"):
        assert torch.equal(torch.nn.functional.linear(OnMps(x), OnMps(weight)), true)


@pytest.fixture
def no_float64(monkeypatch):
    """No device of this machine has float64, as far as a capture knows."""

    def refuse(device, dtype):
        raise UsageError(f"{device} cannot compute in {dtype}")

    monkeypatch.setattr(own_truth, "check_device", refuse)


@pytest.mark.parametrize("architecture", ["llama", "bert", "t5", "mixtral"])
def test_a_capture_takes_the_cpu(no_float64, tiny_model, tmp_path, architecture):
    """Its truth says where it was made, and has the numbers of any other."""
    options = {"prompts": ["hello world this is"], "max_new_tokens": 3, "truth": "full"}
    model = str(tiny_model(architecture))
    moved = divergence.capture(model, out=tmp_path / "a", probe=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_truth, "check_device", lambda device, dtype: None)
        plain = divergence.capture(model, out=tmp_path / "b", probe=False, **options)
    assert moved.manifest.plan.truth.device == "cpu"
    digests = [{r.coordinates: r.xxh3 for r in run.records} for run in (moved, plain)]
    assert digests[0] == digests[1]
