"""A planted fault is in its block, from its block on, and nowhere else."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._fault_patches import PATCHES, _through_fp8, fast_silu
from benchmarks._faults import FAULTS, applicable, plant
from divergence.recording.widening import Widening

BLOCK = 1  # of three
PREFILL_ONLY = {"mask-long"}
DECODE_ONLY = {"kv-stale"}
ANYWHERE = {"scale", "bias", "noise", "channel", "norm-eps", "norm-bf16"}
ANYWHERE |= {name for name, fault in FAULTS.items() if fault.needs == "linear"}
LACKS = {
    "llama": {"router-low"},
    "qwen3": {"router-low"},
    "gemma3": {"router-low"},
    "gpt2": {"router-low", "rope-base", "rope-shift", "kv-heads", "gate-up"},
    "qwen3-moe": set(),
    "mixtral": set(),
    "mamba": set(FAULTS) - ANYWHERE,
}
LLAMA = sorted(set(FAULTS) - LACKS["llama"])
ATTENTION = {"attention", "cache", "grouped-heads", "rotary"}
KERNELS = [(name, "sdpa") for name in LLAMA]
KERNELS += [(name, "eager") for name in LLAMA if FAULTS[name].needs in ATTENTION]


@pytest.fixture(scope="module")
def fresh(tiny_model):
    """``fresh("llama", dtype="float32")`` → a loaded model that the test may patch."""
    loaded = {}

    def load(architecture, dtype="float32", attention="sdpa"):
        key = architecture, dtype, attention
        if key not in loaded:
            folder = tiny_model(architecture, dtype=dtype)
            kwargs = {} if architecture == "mamba" else {"attn_implementation": attention}
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)
            loaded[key] = model.eval()
        return copy.deepcopy(loaded[key])

    return load


@pytest.fixture(scope="module")
def healthy(fresh):
    """Block outputs of the model as it is, by the arguments of ``fresh``."""
    outputs = {}

    def run(*key):
        if key not in outputs:
            outputs[key] = blocks_of(fresh(*key))
        return outputs[key]

    return run


@pytest.fixture(scope="module")
def faulty(fresh):
    """Block outputs of a Llama under one fault, by its name and the arguments of ``fresh``."""
    outputs = {}

    def run(name, *key):
        if (name, *key) not in outputs:
            model = fresh("llama", *key)
            plant(model, name, BLOCK)
            outputs[name, *key] = blocks_of(model)
        return outputs[name, *key]

    return run


@torch.no_grad()
def blocks_of(model):
    """Outputs by step and block: a prefill of 12 tokens, then two decode steps on the cache."""
    stack = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    steps, current = [], {}

    def keep(number):
        return lambda _, __, out: current.update({number: (out, out[0])[type(out) is tuple]})

    hooks = [block.register_forward_hook(keep(number)) for number, block in enumerate(stack)]
    ids = torch.randint(5, 500, (1, 12), generator=torch.Generator().manual_seed(0))
    cache = {}
    for token in (40, 41, None):
        out = model(input_ids=ids, use_cache=True, **cache)
        steps.append([current[number].clone() for number in range(len(stack))])
        name = "cache_params" if "cache_params" in out else "past_key_values"
        cache, ids = {name: out[name]}, torch.tensor([[token or 0]])
    for hook in hooks:
        hook.remove()
    return steps


def off(faulty, right):
    """‖faulty - right‖ / ‖right‖ of the block, over all steps."""
    a = torch.cat([step[BLOCK].double().flatten() for step in faulty])
    b = torch.cat([step[BLOCK].double().flatten() for step in right])
    return float((a - b).norm() / b.norm())


def test_the_faults_are_many_and_complete():
    """Every fault has its patch, its kind and a title of its own."""
    assert len(FAULTS) >= 18
    assert set(FAULTS) == set(PATCHES)
    assert {fault.kind for fault in FAULTS.values()} == {"formula", "data", "arithmetic"}
    assert len({fault.title for fault in FAULTS.values()}) == len(FAULTS)
    assert all(name == fault.name for name, fault in FAULTS.items())


@pytest.mark.parametrize(("name", "attention"), KERNELS)
def test_only_the_chosen_block_is_wrong(name, attention, faulty, healthy):
    """Blocks before it are the same bit for bit; its own output is not, where the fault acts."""
    right = healthy("llama", "float32", attention)
    for step, (a, b) in enumerate(zip(right, faulty(name, "float32", attention), strict=True)):
        assert torch.equal(a[0], b[0])
        quiet = name in (DECODE_ONLY if step == 0 else PREFILL_ONLY)
        assert torch.equal(a[BLOCK], b[BLOCK]) == quiet
        assert b[BLOCK].dtype == a[BLOCK].dtype and bool(b[BLOCK].isfinite().all())


def test_no_weight_is_touched(fresh):
    """Under all faults at once."""
    model = fresh("llama")
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for name in LLAMA:
        assert plant(model, name, BLOCK) == f"model.layers.{BLOCK}"
    blocks_of(model)
    after = model.state_dict()
    assert list(after) == list(weights)
    assert all(torch.equal(tensor, weights[key]) for key, tensor in after.items())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", LACKS)
def test_what_applies_follows_the_structure(architecture, fresh, healthy):
    """Faults whose part is missing are refused; the others show, in a 16-bit model too."""
    right = healthy(architecture, "float16")
    for name in FAULTS:
        model = fresh(architecture, "float16")
        if name in LACKS[architecture]:
            assert not applicable(model, name, BLOCK)
            with pytest.raises(ValueError, match=FAULTS[name].needs):
                plant(model, name, BLOCK)
        else:
            assert applicable(model, name, BLOCK)
            plant(model, name, BLOCK)
            wrong = blocks_of(model)
            assert all(torch.equal(a[0], b[0]) for a, b in zip(right, wrong, strict=True)), name
            assert 1e-4 < off(wrong, right) < 2, name


@pytest.mark.parametrize("name", LLAMA)
def test_strength_goes_from_nothing_to_all(name, fresh, healthy, faulty):
    """0 changes no bit; a hundredth is far less than 1, and is not lost in its own rounding."""
    model, right = fresh("llama"), healthy("llama", "float32", "sdpa")
    before = {path: part.forward for path, part in model.named_modules()}
    plant(model, name, BLOCK, strength=0)
    assert all(part.forward == before[path] for path, part in model.named_modules())
    plant(model, name, BLOCK, strength=0.01)
    little, much = off(blocks_of(model), right), off(faulty(name, "float32", "sdpa"), right)
    assert 0.003 < little / much < 0.03


def test_a_blend_is_rounded_once(fresh):
    """Half of 5% too large is 1.025 times, computed in float32, rounded to bfloat16."""
    model = fresh("llama", "bfloat16")
    mlp = model.model.layers[BLOCK].mlp
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    right = mlp(x).float()
    plant(model, "scale", BLOCK, strength=0.5)
    expected = right + 0.5 * (right * 1.05 - right)
    assert torch.equal(mlp(x), expected.bfloat16())


@pytest.mark.parametrize("name", LLAMA)
def test_the_model_generates_under_every_fault(name, fresh):
    """Through transformers' own loop, with its caches."""
    model = fresh("llama", "bfloat16")
    plant(model, name, BLOCK)
    ids = torch.arange(20, 32)[None]
    kwargs = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)
    assert tokens.shape == (1, 15)


def test_noise_is_the_same_in_a_repeated_run(fresh):
    """And another one at each decode step."""
    model = fresh("llama")
    plant(model, "noise", BLOCK)
    first, second = blocks_of(model), blocks_of(model)
    assert off(first, second) == 0
    mlp = model.model.layers[BLOCK].mlp
    token = torch.ones(1, 1, 64)
    assert not torch.equal(mlp(token), mlp(token))


def test_faults_add_up(fresh, healthy):
    """Two faults of one attention: what only one of them does to decode steps stays."""
    model = fresh("llama")
    plant(model, "kv-stale", BLOCK)
    alone = blocks_of(model)
    plant(model, "mask-long", BLOCK)
    both = blocks_of(model)
    assert not torch.equal(both[0][BLOCK], healthy("llama")[0][BLOCK])
    assert torch.equal(both[1][0], alone[1][0]) and not torch.equal(both[1][1], alone[0][1])


def test_nonsense_is_refused(fresh):
    """An unknown fault and a missing block are errors, not "does not apply"."""
    model = fresh("llama")
    with pytest.raises(ValueError, match="no fault 'rust'"):
        applicable(model, "rust", 0)
    with pytest.raises(ValueError, match="no block 3"):
        plant(model, "scale", 3)


@pytest.fixture(scope="module")
def truth(fresh):
    model = fresh("llama", "bfloat16")
    with Widening(torch.float64):
        return blocks_of(model)


@pytest.mark.parametrize("name", LLAMA)
def test_formula_and_data_persist_in_wider_passes(name, fresh, healthy, faulty, truth):
    """A 16-bit model widened to float64 shows them as large as a float32 model does; coarse
    kernels vanish, and from the tool's escalated pass in float32 too."""
    key = "float32", "sdpa"
    narrow = off(faulty(name, *key), healthy("llama", *key))
    coarse = FAULTS[name].kind == "arithmetic"
    for dtype, unit in ((torch.float64, 1e-14), (torch.float32, 2e-6))[: 1 + coarse]:
        model = fresh("llama", "bfloat16")
        plant(model, name, BLOCK)
        with Widening(dtype):
            wide = off(blocks_of(model), truth)
        assert wide < unit < narrow if coarse else 0.8 < wide / narrow < 1.25


def test_fp8_is_rounded_as_by_the_cast():
    """All bfloat16 and float16 values, in reach and out of it, ties and subnormals included."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = bits.view(dtype)
        values = values[values.isfinite()]
        expected = values.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(dtype)
        assert torch.equal(_through_fp8(values), expected)
        assert torch.equal(_through_fp8(values.double()), expected.double())


def test_the_fast_silu_is_close_and_wrong():
    """It keeps the shape of silu, and is off by what its docstring says of tanh."""
    x = torch.linspace(-12, 12, 2001, dtype=torch.float64)
    error = (fast_silu(x) - torch.nn.functional.silu(x)).abs() / x.abs().clamp_min(1)
    assert 0.005 < float(error.max()) < 0.013
