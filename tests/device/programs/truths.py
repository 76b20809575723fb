"""A run's own truth, of a model on a device without float64."""

import torch
import torch_npu
import transformers
from commands import made

from divergence import Run
from divergence.recording import widening
from divergence.recording.widening import Widening
from tests.models import tiny

CAPTURED = ("bert", "gemma3", "gpt2", "llama", "qwen3", "t5")
FORWARDS = ("mamba", "mamba2", "mixtral", "qwen3-moe")
"""The simulated device lacks a kernel of theirs, which Widening need not have."""
LACKING = ("no_float64", "no_float64_products")


def _truth(run: str) -> dict[str, str | None]:
    """Pass, prompt, step and site → the digest of what is right there."""
    return {
        str(record.coordinates): record.xxh3
        for record in Run.open(run).records
        if record.pass_.startswith("truth")
    }


def _captured(folder) -> dict[str, object]:
    """By what the device lacks: what the capture said, and whether its truth is the host's."""
    command = (
        "capture",
        folder,
        "--prompt",
        "hello world this is",
        "--max-new-tokens",
        8,
        "--truth",
        "full",
        "--no-probe",
        "--force",
    )
    made(*command, "-o", "host", "--device", "cpu")
    found = {}
    for lacking in LACKING:
        said = made(*command, "-o", "there", "--device", "npu", **{lacking: 1})
        truth, right = Run.open("there").manifest.plan.truth, _truth("there")
        same = bool(right) and right == _truth("host")
        found[lacking] = [said.out, said.err, truth and truth.device, same]
    return found


def _forward(folder) -> float:
    """How far the logits of a model on the device are from those of one on the host."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        with Widening(torch.float64):
            right = model(input_ids=ids).logits
        weights = model.to("npu").parameters()
        with Widening(torch.float64, weights=weights, keep_bytes=1 << 16, device="cpu"):
            logits = model(input_ids=ids.to("npu")).logits
    return float((logits - right).abs().max() / right.abs().max())


def _written() -> dict[str, object]:
    """What code writes into tensors of the device, and what it makes there."""
    npu = torch.device("npu")
    state, counter = torch.zeros(4, device=npu), torch.zeros(4, dtype=torch.int64, device=npu)
    x, weight = torch.randn(3, 16, device=npu), torch.randn(40, 16, device=npu)
    widening.SLICE_NUMEL = 64
    with Widening(torch.float64, device="cpu") as wide:
        third = torch.ones(4, device=npu) / 3
        state[1:3].add_(third[1:3])
        counter += 2
        made_there = torch.arange(3, device=npu)
        picked = state[torch.tensor([1, 2], device=npu)]
        product = torch.nn.functional.linear(x, weight)
    return {
        "state": [state.device.type, state.cpu().tolist()],
        "counter": [counter.device.type, counter.cpu().tolist()],
        "elsewhere": [str(tensor.device) for tensor in (third, picked, made_there, product)],
        "third": float(third[0]),
        "rounded": wide.num_rounded,
        "sliced": torch.equal(product, x.cpu().double() @ weight.cpu().double().T),
    }


def answers(work, model) -> dict:
    found = {name: _captured(tiny.build(name, work / name)) for name in CAPTURED}
    torch_npu.configure(no_float64=1)
    found["forwards"] = {name: _forward(tiny.build(name, work / name)) for name in FORWARDS}
    found["written"] = _written()
    return found
