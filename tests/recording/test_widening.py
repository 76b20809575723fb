"""Under Widening every operator is computed in the wide dtype, and nothing else changes."""

import copy
import gc
import os
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from divergence.errors import UsageError
from divergence.recording import machine as memory
from divergence.recording import widening
from divergence.recording.widening import Widening, check_device
from tests.models import tiny

WIDE = torch.float64
IDS = torch.arange(3, 19)[None]
SDPA = ("bert", "gemma3", "gpt2", "llama", "t5")
"""The other tiny models come to fused attention the way these do."""


def rel_l2(one, two) -> float:
    """‖one - two‖ / ‖two‖ in numpy's widest format."""
    one, two = (np.asarray(x, dtype=np.longdouble) for x in (one, two))
    return float(np.linalg.norm(one - two) / np.linalg.norm(two))


def exact(tensor: torch.Tensor) -> np.ndarray:
    """The very numbers, as float64 for numpy."""
    return tensor.detach().double().numpy()


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def load(tiny_model, architecture: str, *, dtype: str = "bfloat16", attention: str = "eager"):
    import transformers

    kind = {"bert": "MaskedLM", "t5": "Seq2SeqLM"}.get(architecture, "CausalLM")
    auto = getattr(transformers, f"AutoModelFor{kind}")
    folder = tiny_model(architecture, dtype=dtype)
    return auto.from_pretrained(
        folder, dtype="auto", attn_implementation=attention, trust_remote_code=True
    ).eval()


class Conversions(TorchDispatchMode):
    """Entered before Widening: sees the elements of every tensor that is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # what Widening itself converts comes as `to`, which a model's own never does
        if func is torch.ops.aten.to.dtype:
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


# --- the proof: the casts inside models are widened ----------------------------------------------


def norm():
    """(module, input, what is right): Llama's norm, gain 1, so that all rounding is its own."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = torch.randn(1, 8, 64)
    wide = exact(x).astype(np.longdouble)
    right = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.longdouble(1e-6))
    return LlamaRMSNorm(64, eps=1e-6), (x,), right


def softmax():
    """Attention weights of scores that float32 holds exactly; the values only pass them on."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    class Attention(nn.Module):
        num_key_value_groups = 1

        def forward(self, q, k, v):
            return eager_attention_forward(self, q, k, v, None, scaling=0.25)[1]

    q, k = (torch.randint(-3, 4, (1, 2, 8, 4)).float() for _ in range(2))
    scores = (exact(q) @ exact(k).swapaxes(2, 3)).astype(np.longdouble) / 4
    powers = np.exp(scores)
    return (
        Attention().eval(),
        (q, k, torch.ones(1, 2, 8, 4)),
        powers / powers.sum(-1, keepdims=True),
    )


def rotary():
    """The cosines of Llama's rotary table."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    class Cosines(LlamaRotaryEmbedding):
        def forward(self, x, ids):
            return super().forward(x, ids)[0]

    table = Cosines(LlamaConfig(hidden_size=64, num_attention_heads=4))
    angles = np.arange(8)[:, None] * exact(table.inv_freq)
    right = np.cos(np.concatenate([angles, angles], axis=-1).astype(np.longdouble))
    return table, (torch.zeros(1, 8, 64), torch.arange(8)[None]), right[None]


def router():
    """The scores of Mixtral's chosen experts; the logits are small whole numbers."""
    from transformers import MixtralConfig
    from transformers.models.mixtral import modeling_mixtral as mixtral

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            config = MixtralConfig(hidden_size=4, num_local_experts=8, num_experts_per_tok=2)
            self.gate = mixtral.MixtralTopKRouter(config)

        def forward(self, x):
            return self.gate(x)[1].double()

    module = Scores()
    module.gate.weight.copy_(torch.randint(-2, 3, (8, 4)))
    x = torch.randint(-2, 3, (16, 4)).float()
    logits = (exact(x) @ exact(module.gate.weight).T).astype(np.longdouble)
    top = np.sort(np.exp(logits), axis=-1)[:, :-3:-1]
    return module, (x,), top / top.sum(-1, keepdims=True)


@pytest.mark.parametrize("piece", [norm, softmax, rotary, router])
def test_a_pieces_own_rounding_is_seen(piece):
    """Against the widened piece a float32 piece shows the rounding of float32; against the naive
    ``.double()`` it shows none, because that one rounds to float32 inside as well."""
    if piece is router:
        pytest.importorskip("transformers", minversion="5.0")
    module, inputs, right = piece()
    narrow = module(*inputs)
    naive = copy.deepcopy(module).double()(
        *(x.double() if x.is_floating_point() else x for x in inputs)
    )
    with Widening(WIDE) as wide:
        truth = module(*inputs)
    assert rel_l2(narrow, naive) == 0
    assert 5e-9 < rel_l2(narrow, truth) < 2e-7
    assert truth.dtype == WIDE
    assert rel_l2(truth, right) < 1e-15
    assert wide.num_rounded == 0


def llama_logits(model, ids: list[int]) -> np.ndarray:
    """A Llama written again in numpy's widest format, from the very weights of ``model``."""
    weights = {name: exact(w).astype(np.longdouble) for name, w in model.named_parameters()}
    config = model.config
    T, N, K, H = len(ids), config.num_attention_heads, config.num_key_value_heads, config.head_dim
    # the table of frequencies is a buffer, so data as it stands
    angles = np.arange(T)[:, None] * exact(model.model.rotary_emb.inv_freq).astype(np.longdouble)
    angles = np.concatenate([angles, angles], axis=-1)  # (T, H)

    def normed(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[name]

    def turned(x):
        half = np.concatenate([-x[..., H // 2 :], x[..., : H // 2]], axis=-1)
        return x * np.cos(angles) + half * np.sin(angles)

    x = weights["model.embed_tokens.weight"][ids]
    for block in range(config.num_hidden_layers):
        w = {
            name.split(".")[-2]: value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{block}.") and "norm" not in name
        }
        y = normed(x, f"model.layers.{block}.input_layernorm.weight")
        # (T, N·H) -> (N, T, H)
        q = turned((y @ w["q_proj"].T).reshape(T, N, H).swapaxes(0, 1))
        k = turned((y @ w["k_proj"].T).reshape(T, K, H).swapaxes(0, 1)).repeat(N // K, axis=0)
        v = (y @ w["v_proj"].T).reshape(T, K, H).swapaxes(0, 1).repeat(N // K, axis=0)
        scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(np.longdouble(H)))
        scores = scores * np.tri(T)
        y = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + y.swapaxes(0, 1).reshape(T, N * H) @ w["o_proj"].T
        y = normed(x, f"model.layers.{block}.post_attention_layernorm.weight")
        gate = y @ w["gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up_proj"].T)) @ w["down_proj"].T
    return normed(x, "model.norm.weight") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_whole_model_is_what_its_weights_say(dtype, attention, tiny_model):
    """A widened Llama equals one written in numpy over the same weights, rounded to the run's
    dtype; the model's own arithmetic and the naive double do not."""
    model = load(tiny_model, "llama", dtype=dtype, attention=attention)
    right = llama_logits(model, IDS[0].tolist())
    with Widening(WIDE):
        truth = model(IDS).logits[0]
    assert rel_l2(truth, right) < 3e-15
    unit = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    assert unit / 2 < rel_l2(model(IDS).logits[0].float(), right) < 30 * unit
    assert rel_l2(model.double()(IDS).logits[0], right) > 1e-9


def test_widening_to_float32_has_float32s_rounding(tiny_model):
    """A 16-bit model computed in float32 is as far from the truth as float32 is."""
    model = load(tiny_model, "llama", dtype="bfloat16")
    with Widening(torch.float32):
        wide = model(IDS).logits[0]
    assert wide.dtype == torch.float32
    assert 2**-25 < rel_l2(wide, llama_logits(model, IDS[0].tolist())) < 30 * 2**-24


# --- every architecture --------------------------------------------------------------------------


def check_wide(model, dtype: torch.dtype, **inputs) -> torch.Tensor:
    """Logits of prompt and decode steps; everything that any module gave was wide."""
    narrow: list[str] = []

    def look(name):
        def hook(module, args, output):
            for leaf in tree_leaves(output):
                if (
                    isinstance(leaf, torch.Tensor)
                    and leaf.is_floating_point()
                    and leaf.dtype != dtype
                ):
                    narrow.append(f"{name}: {leaf.dtype}")

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    with Widening(dtype) as wide:
        logits = model(IDS, **inputs).logits
        if model.can_generate():
            model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    for handle in handles:
        handle.remove()
    assert narrow == []
    assert wide.num_rounded == 0
    assert logits.dtype == dtype
    assert torch.get_default_dtype() == torch.float32
    return logits


def check_both(model, **inputs) -> None:
    """In float64 and in float32, which agree as far as float32 goes."""
    wide, less = (check_wide(model, dtype, **inputs) for dtype in (WIDE, torch.float32))
    assert 1e-8 < rel_l2(less, wide) < 2e-5
    # nothing was rounded on the way: weights given in float64 change no bit
    with Widening(WIDE):
        assert torch.equal(model.double()(IDS, **inputs).logits, wide)


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        *((architecture, "eager") for architecture in tiny.ARCHITECTURES),
        *((architecture, "sdpa") for architecture in tiny.ARCHITECTURES if architecture in SDPA),
    ],
)
def test_every_architecture_widens(architecture, attention, tiny_model):
    """Every module of every architecture gives wide tensors, cached steps included."""
    inputs = {"decoder_input_ids": IDS[:, :4]} if architecture == "t5" else {}
    check_both(load(tiny_model, architecture, attention=attention), **inputs)


OTHERS = {
    # complex rotary tables, experts in one bmm
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 96},
    # sinks, experts with biases
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # linear attention, which fills its matrices in place
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    # masks by torch.tensor(torch.finfo(x.dtype).min), which float32 does not hold
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
    # low-rank attention, experts in groups
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_unusual_architectures_widen(name):
    """Models that compute with complex numbers, in place, in groups or with extreme masks."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(name, **sizes | OTHERS[name])
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.1)
    check_both(model)


# --- single operators ----------------------------------------------------------------------------

W = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
ASKED_NARROW = {
    "float()": lambda x: x.float(),
    "to(bfloat16)": lambda x: x.to(torch.bfloat16),
    "half()": lambda x: x.half(),
    "type_as": lambda x: x.type_as(W),
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "sum": lambda x: x.sum(-1, dtype=torch.float32),
    "cumsum": lambda x: x.cumsum(0, dtype=torch.bfloat16),
    "mean": lambda x: x.mean(-1, dtype=torch.float32),
    "zeros": lambda x: torch.zeros(6, 6, dtype=torch.bfloat16) + x,
    "new_zeros": lambda x: W.new_zeros(6, 6).add_(x),
    "zeros_like": lambda x: torch.zeros_like(W).copy_(x),
    "full_like": lambda x: torch.full_like(W, 0.1) * x,
    "complex": lambda x: torch.polar(torch.ones(6, 6), x).to(torch.complex64).real,
    "autocast": lambda x: torch.autocast("cpu", dtype=torch.bfloat16)(torch.mm)(x, x),
}
NO_DTYPE = {
    "integers divided": (lambda: torch.arange(36) / 7, np.arange(36) / 7),
    "integer times float": (lambda: torch.arange(36) * 0.1, np.arange(36) * 0.1),
    "square root": (lambda: torch.arange(36).sqrt(), np.sqrt(np.arange(36))),
    "arange": (lambda: torch.arange(0, 3.55, 0.1), np.arange(36) * 0.1),
    "full": (lambda: torch.full((36,), 0.1), np.full(36, 0.1)),
    "tensor": (lambda: torch.tensor([0.1] * 36), np.full(36, 0.1)),
}
MIXED = {
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "conv1d": lambda x, w: F.conv1d(x[None], w[:, :, None], w[0])[0],
    "sdpa": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None])[0],
    "layer_norm": lambda x, w: F.layer_norm(x, (6,), w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, (6,), w[0], 1e-6),
    "prelu": lambda x, w: F.prelu(x, w[0]),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, x]),
    "lerp": lambda x, w: torch.lerp(x, w, w),
    "index_add": lambda x, w: x.index_add(0, torch.tensor([1, 2]), w[:2]),
    "index_put": lambda x, w: torch.index_put(x, (torch.tensor([1]),), w[0]),
    "where": lambda x, w: torch.where(x > 0, x, w),
    "cat": lambda x, w: torch.cat([x, w]),
    "addmm": lambda x, w: torch.addmm(w[0], x, w, beta=0.5, alpha=3),
    "baddbmm": lambda x, w: torch.baddbmm(w[None], x[None], w[None])[0],
}


@pytest.mark.parametrize("name", ASKED_NARROW)
def test_a_narrower_dtype_is_not_given(name):
    """Whoever asks for a narrower dtype gets the wide one, with the digits it would have lost."""
    x = torch.randn(6, 6, dtype=WIDE)
    with Widening(WIDE) as wide:
        result = ASKED_NARROW[name](x)
    assert result.dtype == WIDE
    assert not torch.equal(result.float().double(), result)
    assert wide.num_rounded == 0


@pytest.mark.parametrize("name", NO_DTYPE)
def test_no_dtype_means_the_wide_one(name):
    """Where torch would take its default dtype, numbers are made in the wide one."""
    make, right = NO_DTYPE[name]
    with Widening(WIDE):
        result = make()
    assert result.dtype == WIDE
    assert rel_l2(result, right) < 1e-15
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", MIXED)
def test_narrow_weights_meet_wide_values(name):
    """An operator of a wide value and narrow weights is that of the widened weights."""
    x = torch.randn(6, 6, dtype=WIDE)
    with Widening(WIDE):
        result = MIXED[name](x, W)
    assert torch.equal(result, MIXED[name](x, W.double()))


@pytest.mark.parametrize("norm", [lambda x: F.rms_norm(x, (64,)), nn.RMSNorm(64), torch.rms_norm])
def test_a_norm_without_eps_keeps_its_formula(norm):
    """torch takes the eps of the dtype that it computes in; widened, that of the original."""
    x = torch.full((1, 64), 2.0**-10).bfloat16()
    with Widening(WIDE):
        found = norm(x, (64,)) if norm is torch.rms_norm else norm(x)
    right = 2.0**-10 / np.sqrt(2.0**-20 + 2.0**-23)
    assert rel_l2(found, np.full((1, 64), right)) < 1e-15


def test_wide_and_whole_numbers_are_left_alone():
    """What is wide already, whole or true/false keeps its dtype; float64 stays in float32's
    company."""
    with Widening(torch.float32):
        assert (torch.ones(2, dtype=WIDE) * 2).dtype == WIDE
        assert torch.ones(2).bfloat16().dtype == torch.float32
        assert (torch.arange(3) + 1).dtype == torch.int64
        assert torch.zeros(2, dtype=torch.int8).dtype == torch.int8
        assert (torch.arange(3) > 1).dtype == torch.bool


def test_views_stay_views():
    """A view of a narrow tensor is narrow, shares its memory, and is widened where it is used."""
    with Widening(WIDE):
        views = [W.t(), W[1], W.view(36), W.split(3)[1], W.expand(2, 6, 6), W.detach()]
        assert {view.dtype for view in views} == {torch.bfloat16}
        pointer = W.untyped_storage().data_ptr()
        assert {view.untyped_storage().data_ptr() for view in views} == {pointer}
        assert (W.t() @ W.t()).dtype == WIDE


WRITES = {
    "add_": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(y),
    "setitem": lambda x, y: x.__setitem__(slice(0, 3), y[:3]),
    "view": lambda x, y: x.t()[0].mul_(y[0]),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([1, 2]), y[:2]),
    "out": lambda x, y: torch.mm(y, y, out=x),
    "foreach": lambda x, y: torch._foreach_add_([x], [y]),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_narrow_tensors_are_counted(name):
    """A narrow tensor that the model owns is written to in place, rounded, and it is counted."""
    x, y = W.clone(), torch.randn(6, 6, dtype=WIDE)
    right = W.double()
    WRITES[name](right, y)
    before = x.data_ptr()
    with Widening(WIDE) as wide:
        result = WRITES[name](x, y)
    assert torch.equal(x, right.bfloat16())
    assert x.data_ptr() == before
    assert name not in ("add_", "copy_", "out") or result is x
    assert wide.num_rounded == 1


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_wide_tensors_are_not(name):
    """What was made under Widening is wide, so that writing to it rounds nothing."""
    y = torch.randn(6, 6, dtype=WIDE)
    with Widening(WIDE) as wide:
        x = W.clone()
        WRITES[name](x, y)
    assert x.dtype == WIDE
    assert wide.num_rounded == 0


def test_everything_is_restored_after_an_error():
    """An exception inside leaves neither mode nor default dtype behind."""
    with pytest.raises(ZeroDivisionError), Widening(WIDE):
        assert torch.get_default_dtype() == WIDE
        _ = 1 / 0
    assert torch.get_default_dtype() == torch.float32
    assert (W @ W).dtype == torch.bfloat16


# --- large matrices ------------------------------------------------------------------------------


def products(one, two, bias, stack) -> dict[str, torch.Tensor]:
    return {
        "mm": one @ two,
        "linear": F.linear(one, two.t(), bias),
        "addmm": torch.addmm(bias, one, two, beta=0.5, alpha=3),
        "no bias": torch.addmm(torch.full_like(bias, torch.nan), one, two, beta=0),
        "bmm": torch.bmm(one.expand(4, 5, 32), stack),
    }


def test_large_matrices_go_in_slices(monkeypatch):
    """In slices the product is the same, and no more than a slice is ever widened at once."""
    one, two = torch.randn(5, 32, dtype=WIDE), torch.randn(32, 48).bfloat16()
    bias, stack = torch.randn(48).bfloat16(), torch.randn(4, 32, 48).bfloat16()
    right = products(one, two.double(), bias.double(), stack.double())
    monkeypatch.setattr(widening, "SLICE_NUMEL", 200)
    with Conversions() as seen, Widening(WIDE):
        found = products(one, two, bias, stack)
    for name, value in found.items():
        assert rel_l2(value, right[name]) < 1e-15, name
    assert 48 < max(seen.numels) <= 200
    with Conversions() as seen, Widening(WIDE, weights=[two], keep_bytes=two.numel() * 8):
        assert torch.equal(one @ two, right["mm"])
        assert torch.equal(one @ two, right["mm"])  # kept whole, so widened whole, once
    assert seen.numels == [two.numel()]


def grouped_mm():
    found = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        pytest.skip("this torch has no grouped_mm")
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_equal_a_loop(transposed):
    """Rows of no expert, experts of no rows: as a loop over the experts in float64."""
    one = torch.randn(12, 16).bfloat16()
    two = torch.randn(4, 16, 8).bfloat16()
    if transposed:
        two = two.transpose(1, 2).contiguous().transpose(1, 2)
    ends = torch.tensor([3, 3, 8, 11], dtype=torch.int32)
    with Widening(WIDE):
        found = grouped_mm()(one, two, offs=ends)
    right = torch.zeros(12, 8, dtype=WIDE)
    for expert, (start, end) in enumerate([(0, 3), (3, 3), (3, 8), (8, 11)]):
        right[start:end] = one[start:end].double() @ two[expert].double()
    assert rel_l2(found, right) < 1e-15
    assert torch.equal(found[11:], right[11:])


def test_grouped_products_of_a_backward_equal_a_loop():
    """(K, S) x (S, N): the gradients of weights, one matrix an expert."""
    one, two = torch.randn(16, 16).bfloat16(), torch.randn(16, 24).bfloat16()
    ends = torch.tensor([8, 8, 16], dtype=torch.int32)
    with Widening(WIDE):
        found = grouped_mm()(one, two, offs=ends)
    right = torch.stack(
        [
            one[:, start:end].double() @ two[start:end].double()
            for start, end in [(0, 8), (8, 8), (8, 16)]
        ]
    )
    assert rel_l2(found, right) < 1e-15


def test_other_grouped_layouts_are_refused():
    """A layout that nobody has checked gives an error, not a wrong number."""
    ends = torch.tensor([8, 16], dtype=torch.int32)
    one, two = torch.randn(2, 16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    with Widening(WIDE), pytest.raises(NotImplementedError, match="layout"):
        grouped_mm()(one, two, offs=ends)


# --- kept weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_kept_weights_change_no_bit(share, tiny_model):
    """With room for none, some or all weights the results are the same, and what is not widened
    again is no more than the room."""
    model = load(tiny_model, "qwen3-moe")
    with Widening(WIDE):
        right = model(IDS).logits
    room = int(share * sum(weight.numel() for weight in model.parameters()) * 8)
    with Conversions() as seen, Widening(WIDE, weights=model.parameters(), keep_bytes=room):
        rounds = []
        for _ in range(3):
            before = sum(seen.numels)
            assert torch.equal(model(IDS).logits, right)
            rounds.append(sum(seen.numels) - before)
    assert rounds[1] == rounds[2]
    assert 8 * (rounds[0] - rounds[1]) <= room
    assert (rounds[0] > rounds[1]) == (share > 0)


def test_a_kept_weight_that_is_written_to_is_widened_again():
    """The widened copy follows its weight, whole or through a view, without using up the room."""
    weight, right, x = W.clone(), W.double(), torch.ones(1, 6, dtype=WIDE)
    with Widening(WIDE, weights=[weight], keep_bytes=weight.numel() * 8) as wide:
        for _ in range(3):
            assert torch.equal(x @ weight, x @ right)
            weight[1].mul_(2)
            right[1].mul_(2)
    assert wide.num_rounded == 3


@pytest.mark.slow
def test_nothing_comes_to_lie_where_a_kept_weight_was():
    """The memory of a weight that is replaced on the way is held until the end: another tensor
    at its place would be taken for it."""
    module = nn.Linear(6, 6, bias=False)
    array = np.ones((6, 6), dtype=np.float32)
    module.weight.data = torch.from_numpy(array)
    memory_of_weight = weakref.ref(array)
    del array
    x = torch.ones(1, 6, dtype=WIDE)
    with Widening(WIDE, weights=module.parameters(), keep_bytes=1 << 20):
        assert module(x).unique().tolist() == [6]
        module.weight.data = torch.from_numpy(np.full((6, 6), 2, dtype=np.float32))
        gc.collect()
        assert memory_of_weight() is not None
        assert module(x).unique().tolist() == [12]
    gc.collect()
    assert memory_of_weight() is None


def test_views_of_one_weight_are_told_apart():
    """Rows, columns and the transpose of one kept weight are each their own."""
    x, right = torch.ones(1, 6, dtype=WIDE), W.double()
    with Widening(WIDE, weights=[W], keep_bytes=1 << 20):
        for _ in range(2):
            assert torch.equal(x @ W, x @ right)
            assert torch.equal(x @ W.t(), x @ right.t())
            assert torch.equal(x[:, :2] @ W[:2], x[:, :2] @ right[:2])
            assert torch.equal(x[:, :2] @ W[2:4], x[:, :2] @ right[2:4])


def test_a_widening_is_used_again():
    """The room is there anew in each ``with``, and nothing is held between them."""
    wide, right = Widening(WIDE, weights=iter([W]), keep_bytes=W.numel() * 8), W.double()
    for _ in range(2):
        with Conversions() as seen, wide:
            for _ in range(3):
                assert torch.equal(W @ W, right @ right)
        assert seen.numels == [W.numel()]


# --- the room there is ---------------------------------------------------------------------------

CPU = torch.device("cpu")
GiB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """``machine(files)`` → free bytes where /proc and /sys hold these files."""

    def look(files: dict[str, str]) -> int:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
        return memory.free_bytes(CPU)

    return look


def memory_of(group, **files):
    return {f"groups/{group}/memory.{name}": f"{text}\n" for name, text in files.items()}


MEMINFO = {"meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n"}  # 16 GiB free


@pytest.mark.parametrize(
    ("files", "free_gib"),
    [
        ({}, 0),
        (MEMINFO, 16),
        ({"cgroup": "0::/\n", "groups/memory.max": "max\n"}, 16),
        (
            {"cgroup": "0::/job\n"}
            | memory_of(
                "job", max=8 * GiB, current=5 * GiB, stat=f"anon 1\ninactive_file {2 * GiB}"
            ),
            5,
        ),
        (  # the group around it is tighter
            {"cgroup": "0::/slice/job\n"}
            | memory_of("slice", max=4 * GiB, current=3 * GiB)
            | memory_of("slice/job", max="max", current=GiB),
            1,
        ),
        (  # version 1, seen from inside a container: the group's own path is the host's
            {"cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n"}
            | memory_of("memory", limit_in_bytes=6 * GiB, usage_in_bytes=7 * GiB)
            | memory_of("memory", stat=f"inactive_file 5\ntotal_inactive_file {3 * GiB}"),
            2,
        ),
    ],
)
def test_free_memory_is_what_the_tightest_bound_leaves(files, free_gib, machine):
    """The machine's count, or that of any control group around the process; 0 if nobody tells."""
    assert machine(files and MEMINFO | files) == free_gib * GiB


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="only Linux tells")
def test_free_memory_of_this_machine():
    """Some memory is free, and of a device that nobody can ask nothing is."""
    assert 2**20 < memory.free_bytes(CPU) < 2**50
    assert memory.free_bytes(torch.device("meta")) == 0


def test_a_device_must_multiply_in_the_wide_dtype():
    """Asked before the model is loaded; the hint names the host."""
    check_device("cpu", torch.float64)
    with pytest.raises(UsageError, match="meta cannot compute in float64") as caught:
        check_device("meta", torch.float64)
    assert "the CPU has it" in caught.value.hint
