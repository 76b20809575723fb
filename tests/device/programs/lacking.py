"""A device that lacks something: the run is made all the same, or the error says what to do."""

import gc

import torch
import torch_npu
from commands import captured, divergence, made


def _attempt(model: str, *args: object, **switches: object) -> list:
    said = divergence(
        "capture",
        model,
        "-o",
        "n",
        "--device",
        "npu",
        "--max-new-tokens",
        2,
        "--no-probe",
        "--force",
        *args,
        **switches,
    )
    if said.code:
        return [said, None]
    like = "c-sketch" if "sketch" in args else "c"
    return [said, divergence("compare", like, "n", "-v")]


def answers(work, model) -> dict:
    captured(model, "c", "cpu")
    captured(model, "c-sketch", "cpu", "--store", "sketch")
    made(
        "capture",
        model,
        "-o",
        "n4",
        "--device",
        "npu",
        "--max-new-tokens",
        2,
        "--no-probe",
        "--plant",
        "model.layers.1.mlp.down_proj:out=zero",
    )
    found = {}
    for name, switches in {
        "no pinned": {"no_pinned": 1},
        "no streams": {"no_streams": True},
        "no float64": {"no_float64": 1},
        "no float64 products": {"no_float64_products": 1},
        "missing": {"missing": "silu"},
        "missing for sketches": {"missing": "sqrt"},
        "fallback": {"fallback": "silu"},
    }.items():
        found[name] = _attempt(model, **switches)
        found[f"{name}, sketch"] = _attempt(model, "--store", "sketch", **switches)
    for name in ("no_float64", "no_float64_products"):
        found[f"truth, {name}"] = divergence(
            "truth", "c", "-o", "t", "--device", "npu", "--force", **{name: 1}
        )
        found[f"measured, {name}"] = divergence(
            "compare", "c", "n4", "--device", "npu", **{name: 1}
        )
    gc.collect()
    torch.npu.synchronize()
    torch_npu.configure()
    free = torch.npu.memory_allocated() + (100 << 10)
    found["memory for the model"] = _attempt(model, "--truth", "no", max_bytes=free)
    torch.npu.reset_peak_memory_stats()
    captured(model, "n", "npu", "--truth", "no")
    gc.collect()
    most = torch.npu.max_memory_allocated() - 1
    found["memory for the forward"] = _attempt(model, "--truth", "no", max_bytes=most)
    made("truth", "c", "-o", "t", "--device", "npu", "--force")
    made("truth", "c", "-o", "t-host", "--force")
    found["truth"] = divergence("compare", "t-host", "t")
    return found
