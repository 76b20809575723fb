"""A host's runs and the device's, whatever runs late, in every form in which a model is run."""

import json

import torch_npu
from commands import captured, divergence, made

from divergence import Run

FORMS = {
    "modules": ("--sites", "modules"),
    "batch": ("--batch", "--prompt", "one two three", "--prompt", "four five six seven eight"),
    "whole": ("--whole",),
    "repeated": ("--repeat", 2),
    "planted": ("--plant", "model.layers.1.mlp.down_proj:out=zero"),
}


def answers(work, model) -> dict:
    halves = {name: 0 for name in ("model.embed_tokens", "model.rotary_emb", "model.layers.0")}
    halves |= {name: 1 for name in ("model.layers.1", "model.layers.2", "model.norm", "lm_head")}
    (work / "halves.json").write_text(json.dumps(halves))
    forms = FORMS | {"two devices": ("--sites", "modules", "--device-map", work / "halves.json")}
    for name, options in forms.items():
        captured(model, f"c-{name}", "cpu", *(options if name != "two devices" else options[:2]))
    found = {}
    for schedule in torch_npu.SCHEDULES:
        for name, options in forms.items():
            device = "npu:1" if name == "modules" else "npu"
            captured(model, "n", device, *options, schedule=schedule, strict_threads=1)
            found[f"{name}, {schedule}"] = divergence(
                "compare", f"c-{name}", "n", schedule=schedule
            )
            if name == "planted" and schedule == "both":
                found["found"] = divergence("compare", "c-repeated", "n")
            if name == "repeated":
                found[f"differences, {schedule}"] = Run.open(
                    "n"
                ).manifest.repeatability.num_different
        made(
            "capture",
            "--like",
            "c-modules",
            "-o",
            "n-like",
            "--device",
            "npu",
            "--escalate",
            "--force",
            "--no-probe",
            schedule=schedule,
        )
        found[f"anchored, {schedule}"] = divergence("compare", "c-modules", "n-like")
    return found
