"""A planted fault is found in the block that makes it: first, middle and last, in every model.

The candidate is a genuinely different machine where that can be had in one process: attention by
another kernel. The faults are far from subtle in each format; benchmarks tell how subtle they may
be.
"""

import functools

import pytest
from transformers import cache_utils
from transformers.models.llama import modeling_llama

from divergence import BatchOptions, LoadOptions, capture, compare, truth
from divergence.run.site import module_of
from tests.models import tiny

PROMPT = "A bridge is built twice: once on paper, where every beam is exact, and once in steel."
OTHER_KERNELS = {"bert", "gemma3", "gpt2", "llama", "mixtral", "qwen3", "qwen3-moe", "t5"}
INNER = {"llama": "self_attn.o_proj", "gpt2": "mlp.c_proj", "qwen3-moe": "self_attn.o_proj"}
INNER |= {"mamba": "mixer.out_proj"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tiny_model):
    """``reference(architecture, dtype)`` → (its run, its blocks)."""

    @functools.cache
    def make(architecture, dtype="float32"):
        run = capture(
            str(tiny_model(architecture, dtype=dtype)),
            out=tmp_path_factory.mktemp("reference") / "run",
            prompts=[PROMPT],
            max_new_tokens=3,
            loading=LoadOptions(trust_remote_code=architecture == "remote-code"),
        )
        return run, [p for p, n in run.manifest.plan.modules.items() if n.role == "block"]

    return make


def other_machine(run, out, architecture, **options):
    attention = "sdpa" if architecture in OTHER_KERNELS else None
    return capture(
        like=run,
        out=out,
        attn_implementation=attention,
        force=True,
        loading=LoadOptions(trust_remote_code=architecture == "remote-code"),
        **options,
    )


def places(blocks):
    """First, middle and last block; of both stacks where there are two."""
    stacks: dict[str, list[str]] = {}
    for block in blocks:
        stacks.setdefault(block.rpartition(".")[0], []).append(block)
    return [stack[k] for stack in stacks.values() for k in (0, len(stack) // 2, len(stack) - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["scale:1.2", "noise:0.02"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_fault_is_found_in_its_block(architecture, fault, reference, tmp_path):
    """A block whose output is wrong is named, among blocks that round otherwise."""
    run, blocks = reference(architecture)
    for block in places(blocks):
        plant = f"{block}:out={fault}"
        faulty = other_machine(run, tmp_path / "run", architecture, plants=[plant])
        verdict = compare(run, faulty).verdict
        assert (verdict.kind, verdict.onset and verdict.onset.block) == ("localized", block)
        assert verdict.confidence == "high"
        assert verdict.onset.site == f"{block}:out"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", INNER)
def test_a_fault_is_found_in_16_bits(architecture, dtype, reference, tmp_path):
    """One projection wrong by a fifth stands out of the rounding of 16 bits."""
    run, blocks = reference(architecture, dtype)
    for block in places(blocks):
        plant = f"{block}.{INNER[architecture]}:out=scale:1.2"
        faulty = other_machine(run, tmp_path / "run", architecture, plants=[plant])
        verdict = compare(run, faulty).verdict
        assert (verdict.kind, verdict.onset and verdict.onset.block) == ("localized", block)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    """
        bias:0.1 cast:float8_e4m3fn cast:int8 channel:3:1.5 noise:0.003 roll scale:1.001
        zero:0-15
    """.split(),
)
def test_every_kind_of_fault_is_found_in_float32(fault, reference, tmp_path):
    """Quantised, noisy, shifted, cut: in float32 the smallest of them is far above rounding."""
    run, blocks = reference("llama")
    plant = f"{blocks[1]}.mlp.down_proj:out={fault}"
    faulty = other_machine(run, tmp_path / "run", "llama", plants=[plant])
    verdict = compare(run, faulty).verdict
    assert (verdict.kind, verdict.onset.block) == ("localized", blocks[1])


def test_the_same_fault_in_every_block_is_systematic(reference, tmp_path):
    """A kernel that is wrong everywhere is no fault of the first block."""
    run, blocks = reference("llama")
    plants = [f"{block}.mlp.down_proj:out=scale:1.05" for block in blocks]
    faulty = other_machine(run, tmp_path / "run", "llama", plants=plants)
    verdict = compare(run, faulty).verdict
    assert verdict.kind == "systematic"
    assert verdict.onset.block == blocks[0]


@pytest.mark.slow
def test_a_fault_outside_the_blocks_is_found(reference, tmp_path):
    """Embedding, final norm and head are judged like blocks."""
    run, _ = reference("llama")
    for path in ("model.embed_tokens", "model.norm", "lm_head"):
        faulty = other_machine(run, tmp_path / "run", "llama", plants=[f"{path}:out=scale:1.05"])
        verdict = compare(run, faulty).verdict
        assert (verdict.kind, verdict.onset.site) == ("localized", f"{path}:out")
        assert verdict.onset.block is None


def test_a_fault_in_decoding_alone_is_found(reference, tmp_path):
    """A kernel that fails for single tokens shows in the first decode step, not in the prefill."""
    run, blocks = reference("llama")
    plants = [f"{blocks[1]}.mlp.down_proj:out=scale:1.1@step={step}" for step in (1, 2)]
    faulty = other_machine(run, tmp_path / "run", "llama", plants=plants)
    verdict = compare(run, faulty).verdict
    assert (verdict.kind, verdict.onset.block, verdict.onset.step) == ("localized", blocks[1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mamba", "t5"])
def test_free_runs_alone_find_a_fault_in_float32(architecture, reference, tmp_path):
    """Without an anchored pass the block is named too, with low confidence and the way to more."""
    run, blocks = reference(architecture)
    for block in places(blocks):
        faulty = other_machine(
            run, tmp_path / "run", architecture, plants=[f"{block}:out=scale:1.2"], anchor=False
        )
        verdict = compare(run, faulty).verdict
        assert (verdict.kind, verdict.onset and verdict.onset.block) == ("localized", block)
        assert verdict.confidence == "low"
        assert any("--like" in command for command in verdict.next)


@pytest.mark.slow
def test_inner_sites_name_the_operator(tmp_path, tiny_model):
    """With --sites modules the onset is the module inside the block."""
    run = capture(
        str(tiny_model("llama", dtype="float32")),
        out=tmp_path / "a",
        prompts=[PROMPT],
        max_new_tokens=2,
        sites=["modules"],
    )
    site = "model.layers.1.mlp.up_proj:out"
    faulty = other_machine(run, tmp_path / "b", "llama", plants=[f"{site}=scale:1.2"])
    verdict = compare(run, faulty).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", site)


@pytest.mark.slow
def test_anchoring_is_exact(reference, tmp_path):
    """A fault in one block leaves every other block's anchored tensors as they were, bit for bit:
    the error of a healthy block is the healthy pair's own."""
    run, blocks = reference("llama", "bfloat16")
    healthy = compare(run, other_machine(run, tmp_path / "healthy", "llama"))
    plant = f"{blocks[1]}.self_attn.o_proj:out=scale:1.3"
    faulty = compare(run, other_machine(run, tmp_path / "faulty", "llama", plants=[plant]))

    def anchored(report):
        return {
            (site.sample, site.step, site.site): (site.rel_l2, site.max_abs, site.ratio)
            for site in report.sites
            if site.pass_ == "anchored" and module_of(site.site) != "."
        }

    before, after = anchored(healthy), anchored(faulty)
    changed = {
        site
        for (_, _, site) in before
        if any(before[key] != after[key] for key in before if key[2] == site)
    }
    assert before.keys() == after.keys()
    assert changed == {f"{blocks[1]}:out"}
    assert any(value[0] > 0 for value in before.values())


@pytest.fixture(scope="module")
def decoded(tmp_path_factory, tiny_model):
    """A run of three prompts and ten steps in bfloat16, and its truth."""
    folder = tmp_path_factory.mktemp("decoded")
    model = tiny_model("llama", dtype="bfloat16")
    prompts = [PROMPT, "Rain falls mainly on the plain.", "2 + 2 = 4, and 7 x 8 = 56."]
    a = capture(str(model), out=folder / "a", prompts=prompts, max_new_tokens=10)
    return a, truth(a, out=folder / "truth")


def cached_twice(first_step):
    """From that decode step on the newest key and value are those of the token before."""
    healthy = cache_utils.DynamicLayer.update

    def update(self, keys, values, *args, **kwargs):
        steps = self.steps = getattr(self, "steps", -1) + 1
        out = healthy(self, keys, values, *args, **kwargs)
        if keys.shape[-2] > 1 or steps < first_step:
            return out
        for name in ("keys", "values"):
            kept = getattr(self, name).clone()
            kept[..., -1, :] = kept[..., -2, :]
            setattr(self, name, kept)
        return self.keys, self.values

    return update


@pytest.mark.slow
@pytest.mark.parametrize("judged", [False, True])
def test_a_cache_that_goes_wrong_is_told_of_all_blocks_from_its_step_on(
    judged, decoded, monkeypatch, answer
):
    """Each step shows it in some blocks more than in others. A truth does not withdraw what two
    runs alone tell: siblings that have the same fault are no excuse."""
    a, true_run = decoded
    monkeypatch.setattr(cache_utils.DynamicLayer, "update", cached_twice(5))
    verdict = answer(a, truth=true_run if judged else None).verdict
    assert verdict.kind == "systematic"
    assert verdict.summary.startswith("every LlamaDecoderLayer differs")
    assert "from decode step 5 on: what is" in verdict.summary
    assert verdict.side == ("candidate" if judged else None)


@pytest.mark.parametrize("size", [1.15, 2.0])
def test_every_block_wrong_in_one_step_of_one_prompt_is_found_by_a_truth(size, decoded, answer):
    """One row of each block: together they are as many as a prompt's."""
    a, true_run = decoded
    plants = [f"model.layers.{n}.mlp:out=scale:{size}@sample=2,step=7" for n in range(3)]
    verdict = answer(a, truth=true_run, plants=plants, attn_implementation="eager").verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate")
    assert (verdict.onset.sample, verdict.onset.step) == (2, 7)
    assert "in prompt 2 alone (of 3) and decode step 7 alone (of 9)" in verdict.summary


@pytest.mark.slow
def test_prompts_beside_a_wrong_one_are_not_blamed_on_the_other_side(
    tiny_model, tmp_path, monkeypatch
):
    """Of three prompts in one batch those with padding, which is not masked, are off in every
    block. For a healthy one the median W of the two others is no control: a mean of one that is
    wrong and one that is not."""
    prompts = ["a b c", "Rain falls mainly on the plain.", PROMPT]
    model = tiny_model("llama", dtype="float32")
    a = capture(
        str(model),
        out=tmp_path / "a",
        prompts=prompts,
        max_new_tokens=2,
        batching=BatchOptions(batch=True),
        attn_implementation="eager",
    )
    healthy = modeling_llama.create_causal_mask
    with monkeypatch.context() as patch:
        patch.setattr(
            modeling_llama,
            "create_causal_mask",
            lambda **given: healthy(**given | {"attention_mask": None}),
        )
        b = capture(like=a, out=tmp_path / "b")
    verdict = compare(a, b, truth=truth(a, out=tmp_path / "truth")).verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate")
