"""Whatever is captured carries its truth, which names the side; or it says why there is none."""

import pytest

import divergence
from divergence.run.site import module_of

PROMPTS = ["The quick brown fox jumps over", "hello world this is"]
STEPS = {"max_new_tokens": 4}
STEP = {"train": True, "truth": "full"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", STEPS | {"whole": True}),
        ("llama", STEPS | {"repeat": 2}),
        ("llama", STEPS | {"batch": True}),
        ("llama", STEPS | {"prefill_chunk": 4}),
        ("llama", STEPS | {"use_cache": False}),
        ("llama", STEPS | {"attn_implementation": "eager"}),
        ("llama", STEPS | {"sites": ["blocks", "ops@model.layers.1"]}),
        pytest.param(
            "llama",
            STEPS | {"engine": "quantize", "engine_options": ["scheme=int8"]},
            marks=pytest.mark.whole,
        ),
        ("llama", STEP),
        ("llama", STEP | {"optimizer": "adamw"}),
        ("bert", {}),
        ("t5", STEPS),
        ("mixtral", STEPS),
        ("qwen3-moe", STEPS),
        ("mamba", STEPS),
    ],
    ids=str,
)
def test_it_names_the_side(own_truths, tiny_model, tmp_path, architecture, options, dtype):
    """With two commands and a compare: a fault of B is B's, at its block, and health is health."""
    a = divergence.capture(
        str(tiny_model(architecture, dtype=dtype)),
        out=tmp_path / "a",
        prompts=PROMPTS,
        probe=False,
        **options,
    )
    assert "truth" in a.manifest.plan.passes
    blocks = [path for path, note in a.manifest.plan.modules.items() if note.role == "block"]
    block = blocks[1]
    attention = None if architecture == "mamba" else options.get("attn_implementation", "sdpa")
    sides = {}
    for name, plants in {"healthy": [], "faulty": [f"{block}:out=scale:1.3"]}.items():
        b = divergence.capture(
            like=a, out=tmp_path / name, plants=plants, attn_implementation=attention, probe=False
        )
        verdict = divergence.compare(a, b).verdict
        sides[name] = verdict.side
        if plants:
            assert verdict.kind == "localized", verdict
            assert module_of(verdict.onset.site) == block
    assert sides == {"healthy": "neither", "faulty": "candidate"}
