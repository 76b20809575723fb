"""vLLM against transformers, for real: healthy pairs, and faults in vLLM's own modules.

Run by ``make test-vllm``, in an environment that has vLLM; left out elsewhere.
"""

import functools
import importlib.util
import os

import pytest
import torch

from divergence import BatchOptions, LoadOptions, Run, capture, compare, truth
from divergence.errors import ModelError, PlantError
from tests.models.families import build

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of vLLM's own calls
]

PROMPTS = ["Hello there, who are you?", [5, 6, 7]]
MORE = ["one two three four"]
DTYPES = ("float32", "bfloat16")
PAIRS = [
    *((name, dtype) for name in ("llama", "qwen3") for dtype in DTYPES),
    *(
        (name, "bfloat16")
        for name in "gemma2 gemma3 granite mistral mixtral phi3 qwen2 qwen3-moe".split()
    ),
    ("gpt2", "float32"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(architecture, dtype) → model, transformers' run of it and the truth; made once each."""

    @functools.cache
    def make(architecture, dtype, *, batch=False):
        folder = tmp_path_factory.mktemp("runs")
        model = build(architecture, folder / "model", dtype=dtype, hidden=128)
        a = capture(
            model,
            out=folder / "a",
            prompts=PROMPTS + MORE * batch,
            batching=BatchOptions(batch=batch),
            max_new_tokens=4,
            sites="modules",
            probe=False,
        )
        return model, a, truth(a, out=folder / "t")

    return make


def paths_of(run):
    return {record.site.rpartition(":")[0] for record in run.records}


@pytest.mark.parametrize(("architecture", "dtype"), PAIRS)
def test_healthy_pairs_are_within_the_floor(made, tmp_path, architecture, dtype):
    """Block by block, inner modules and decode steps too; the weights are the same bits."""
    _, a, wide = made(architecture, dtype)
    before = dict(os.environ)
    b = capture(like=a, out=tmp_path / "b", engine="vllm", probe=False)
    assert dict(os.environ) == before
    report = compare(a, b, truth=wide)
    assert report.verdict.kind in ("within_floor", "identical"), report.verdict.summary
    lines = {line.check: line for line in report.preflight}
    if architecture == "gpt2":
        assert lines["weights"].status == "unknown"
    else:
        assert lines["weights"].status == "same"
    assert lines["attention"].candidate == "CPU_ATTN"
    assert not any(line.status == "blocking" for line in report.preflight)
    assert b.manifest.engine.facts["prefix caching"] == "off"
    assert b.manifest.plan.passes == ["free", "anchored"]
    found = paths_of(b)
    assert found <= paths_of(a), "no name of vLLM's own"
    if architecture == "gpt2":  # of which no map is known
        assert found == {".", "transformer.h.0", "transformer.h.1", "transformer.h.2"}
        return
    layer = "model.layers.1"
    qkv = "qkv_proj" if architecture == "phi3" else "k_proj"
    mlp = {"phi3": ".gate_up_proj", "mixtral": ".gate", "qwen3-moe": ".gate"}
    assert {layer, f"{layer}.self_attn.{qkv}", f"{layer}.mlp", "model.norm", "lm_head"} <= found
    assert f"{layer}.mlp{mlp.get(architecture, '.up_proj')}" in found


def compared(report):
    """(pass, sample, step, site) of what was held against the reference."""
    return {(site.pass_, site.sample, site.step, site.site) for site in report.sites}


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), ("qwen3-moe", "bfloat16")],
)
def test_a_batch(made, tmp_path, architecture, dtype):
    """Prompts of several lengths in one forward: each row in its own prompt and step."""
    _, a, wide = made(architecture, dtype, batch=True)
    b = capture(like=a, out=tmp_path / "b", engine="vllm", probe=False)
    assert b.manifest.tokens.groups == [[0, 1, 2]]
    report = compare(a, b, truth=wide)
    assert report.verdict.kind in ("within_floor", "identical"), report.verdict.summary
    assert {step for _, _, step, _ in compared(report)} == {0, 1, 2, 3}
    if architecture == "qwen3-moe":  # a router has no axis of prompts
        gate = {site for _, _, _, site in compared(report) if "mlp.gate" in site}
        assert {site.rpartition(":")[2] for site in gate} == {"in", "out"}
    assert b.manifest.engine.facts["forwards of several steps"] == "0"


def test_a_batch_that_waits(made, tmp_path):
    """Where not all prompts fit into one forward, some are begun beside others' decode steps."""
    model, a, wide = made("llama", "float32", batch=True)
    longest = max(len(sample.prompt_ids) for sample in a.manifest.tokens.samples)
    tight = {"max_model_len": longest + 4, "max_num_batched_tokens": longest + 4}
    b = capture(
        like=a,
        out=tmp_path / "b",
        engine="vllm",
        loading=LoadOptions(engine_options=tight),
        probe=False,
    )
    assert b.manifest.engine.facts["forwards of several steps"] != "0"
    report = compare(a, b, truth=wide)
    assert report.verdict.kind == "within_floor", report.verdict.summary
    ample = capture(like=a, out=tmp_path / "c", engine="vllm", probe=False)
    keys = [{(r.pass_, r.sample, r.step, r.site) for r in run.records} for run in (b, ample)]
    assert keys[0] == keys[1]
    own = capture(
        model,
        out=tmp_path / "d",
        engine="vllm",
        loading=LoadOptions(engine_options=tight),
        prompts=PROMPTS + MORE,
        batching=BatchOptions(batch=True),
        max_new_tokens=4,
        sites="modules",
        probe=False,
    )
    tokens = [[s.generated_ids for s in run.manifest.tokens.samples] for run in (a, own)]
    assert tokens[0] == tokens[1]


def test_together_what_was_recorded_one_by_one(made, tmp_path):
    """The anchored pass gets each prompt's recorded rows."""
    _, a, wide = made("llama", "float32")
    b = capture(
        like=a, out=tmp_path / "b", engine="vllm", batching=BatchOptions(batch=True), probe=False
    )
    report = compare(a, b, truth=wide)
    assert report.verdict.kind == "within_floor", report.verdict.summary
    assert "anchored" in {pass_ for pass_, _, _, _ in compared(report)}


def weight(model):
    model.model.layers[1].input_layernorm.weight.data.mul_(1.01)


def epsilon(model):
    model.model.layers[2].post_attention_layernorm.variance_epsilon = 0.1


def rotary(model):
    table = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    table.copy_(table[torch.arange(len(table)) * 2 % len(table)])


def cached_values(model):
    attention = model.model.layers[1].self_attn.attn
    inner = attention.forward

    def forward(query, key, value, **more):
        return inner(query, key, value * (1.05 if len(query) == 1 else 1), **more)

    attention.forward = forward


@pytest.mark.parametrize(
    ("fault", "block"),
    [(weight, 1), (epsilon, 2), (cached_values, 1)],
    ids=["weight", "epsilon", "cached_values"],
)
@pytest.mark.parametrize(("architecture", "dtype"), PAIRS[:4])
def test_a_fault_in_a_module_of_vllm(made, tmp_path, architecture, dtype, fault, block):
    """The right block, and the right side."""
    _, a, wide = made(architecture, dtype)
    b = capture(like=a, out=tmp_path / "b", engine="vllm", prepare=fault, probe=False)
    verdict = compare(a, b, truth=wide).verdict
    assert verdict.kind == "localized" and verdict.side == "candidate"
    assert verdict.onset.block == f"model.layers.{block}"


@pytest.mark.parametrize(
    "site", ["model.layers.1.self_attn.k_proj:out", "model.layers.1.mlp.down_proj:in"]
)
def test_a_plant_at_an_inner_module(made, tmp_path, site):
    """Through the same views, so at the same site."""
    _, a, wide = made("qwen3", "bfloat16")
    b = capture(like=a, out=tmp_path / "b", engine="vllm", plants=[f"{site}=scale:1.2"])
    verdict = compare(a, b, truth=wide).verdict
    assert verdict.kind == "localized" and verdict.onset.site == site


def test_a_fault_in_the_rotary_table(made, tmp_path):
    """Named at the table, though each block differs too, since all read it."""
    _, a, wide = made("llama", "bfloat16")
    b = capture(like=a, out=tmp_path / "b", engine="vllm", prepare=rotary, probe=False)
    report = compare(a, b, truth=wide)
    assert report.verdict.kind == "localized" and report.verdict.side == "candidate"
    assert report.verdict.onset.site == "model.rotary_emb:out"
    table = [one for one in report.sites if one.site == "model.rotary_emb:out"]
    assert min(one.limit_usage for one in table if one.pass_ == "anchored") > 10


def test_what_cannot_be_planted(made, tmp_path):
    """Said, with what to do."""
    _, a, _ = made("llama", "float32")
    site = "model.layers.1.self_attn.k_proj:in"
    with pytest.raises((PlantError, ModelError), match="in one with others"):
        capture(like=a, out=tmp_path / "b", engine="vllm", plants=[f"{site}=scale:1.2"])


def test_a_run_of_vllm_is_repeated_by_transformers(made, tmp_path):
    """The other direction: vLLM chooses the tokens, transformers is fed them."""
    model, a, _ = made("llama", "float32")
    b = capture(model, out=tmp_path / "b", engine="vllm", prompts=PROMPTS, max_new_tokens=4)
    ids = [sample.generated_ids for sample in b.manifest.tokens.samples]
    assert ids == [sample.generated_ids for sample in a.manifest.tokens.samples]
    back = capture(like=b, out=tmp_path / "back", engine="transformers")
    assert compare(b, back).verdict.kind in ("within_floor", "identical")
    again = capture(like=Run.open(tmp_path / "b"), out=tmp_path / "again")
    assert again.manifest.engine.name == "vllm"
    assert compare(b, again).verdict.kind == "identical"
