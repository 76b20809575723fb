"""A host's run and the device's, in full and as digests; the other forms are in forms.py."""

import torch_npu
from commands import captured, divergence, made


def _num_waits(model: str, sites: str) -> int:
    """How often the model's thread waited for the device while so much was recorded."""
    before = torch_npu.counted("num_waits")
    # a truth would hand recorded inputs back to the device
    captured(model, "n-waits", "npu", "--sites", sites, "--truth", "no")
    return torch_npu.counted("num_waits") - before


def answers(work, model) -> dict:
    found = {}
    captured(model, "c", "cpu", "--sites", "modules")
    before = torch_npu.counted("num_unpinned")
    captured(model, "n", "npu", "--sites", "modules", pinned_by_base=1)
    found["unpinned"] = torch_npu.counted("num_unpinned") - before
    found["modules"] = divergence("compare", "c", "n")
    found["waits"] = [_num_waits(model, sites) for sites in ("lm_head", "modules")]
    captured(model, "c-stats", "cpu", "--store", "stats")
    made("capture", "--like", "c-stats", "-o", "n-stats", "--device", "npu", "--no-probe")
    found["stats"] = divergence("compare", "c-stats", "n-stats")
    found["env"] = divergence("env", "--device", "npu")
    return found
