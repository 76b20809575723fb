"""Parts recognised by what they compute: small modules, each written one way or another."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from divergence.analyses.precision.audit import find_parts
from divergence.comparison.calls import CallNode, forwards_of
from divergence.recording.dispatch import OperatorRecorder
from divergence.recording.keeper import CopyKeeper
from divergence.run.record import Call, Operand

BF16, F32 = torch.bfloat16, torch.float32


def parts(module, *inputs, blocks=(), logits=None):
    """part → [(operators, narrowest dtype, kernel)] of what one call of ``module`` does."""
    records = []

    def emit(site, item, call=None):
        tensor = item.tensor
        records.append(
            SimpleNamespace(
                pass_="free",
                sample=0,
                step=0,
                order=len(records),
                site=site,
                call=call,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
            )
        )

    recorder = OperatorRecorder(
        module,
        {"."},
        emit=emit,
        call_of=lambda path: "",
        active=lambda: True,
        keep=CopyKeeper().keep,
    )
    with torch.no_grad(), recorder.installed():
        module(*inputs)
    (nodes,) = forwards_of(SimpleNamespace(records=records), "free").values()
    found = {}
    for item in find_parts(nodes, set(blocks), logits):
        names = [node.path.rpartition("/")[2].removeprefix("aten.") for node in item.nodes]
        dtypes = [node.results[0].dtype for node in item.nodes]
        found.setdefault(item.part, []).append((names, dtypes, item.kernel))
    return found


class Module(torch.nn.Module):
    def __init__(self, function, **weights):
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            setattr(self, name, torch.nn.Parameter(weight))

    def forward(self, *inputs):
        return self.function(self, *inputs)


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def rms(self, x):
    wide = x.float()
    return self.w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_rounded(self, x):
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    return self.w * (x * scale)


def layer_norm(self, x):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return self.w * (centred * torch.rsqrt(variance + 1e-6))


def by_sqrt(self, x):
    return x / (x.pow(2).sum(-1, keepdim=True) / 8 + 1e-6).sqrt()


def by_variance(self, x):
    variance = torch.var(x, -1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-6)


@pytest.mark.parametrize(
    ("function", "expected", "dtype"),
    [
        (rms, ["_to_copy", "pow", "mean", "add", "rsqrt"], "float32"),
        (rms_rounded, ["_to_copy", "mul", "mean", "add", "rsqrt", "_to_copy#2"], "bfloat16"),
        (layer_norm, ["mean", "sub", "pow", "mean#2", "add", "rsqrt"], "bfloat16"),
        (by_sqrt, ["pow", "sum", "div", "add", "sqrt"], "bfloat16"),
        (by_variance, ["var", "add", "sqrt"], "bfloat16"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_norm_statistics(function, expected, dtype):
    """From the square to the root, and the cast of what comes of it; not the input's past."""
    found = parts(Module(function, w=torch.ones(8, dtype=BF16)), X.to(BF16))
    ((names, dtypes, kernel),) = found["norm statistics"]
    assert names == expected
    assert (dtype in dtypes, "bfloat16" in dtypes, kernel) == (True, dtype == "bfloat16", False)


def test_what_made_the_norms_input_is_no_part_of_it():
    """A cast down before the norm, as of a float32 stream, does not narrow the statistics."""
    found = parts(Module(lambda m, x: rms(m, x.to(BF16)), w=torch.ones(8, dtype=BF16)), X)
    ((names, dtypes, _),) = found["norm statistics"]
    assert set(dtypes) == {"float32"}
    assert names[0] == "_to_copy#2"


def test_the_norms_weight_is_a_part_of_its_own():
    """Llama multiplies in the model's dtype, Gemma adds 1 and multiplies in float32."""
    weight = torch.ones(8, dtype=BF16)
    assert parts(Module(rms, w=weight), X.to(BF16))["norm weight"] == [
        (["mul#2"], ["bfloat16"], False)
    ]

    def gemma(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * (1 + self.w.float())).to(x.dtype)

    found = parts(Module(gemma, w=weight), X.to(BF16))
    assert found["norm weight"] == [(["mul#2"], ["float32"], False)]


def test_a_layer_norm_kernel_is_one():
    """What it does inside is not seen."""
    norm = torch.nn.LayerNorm(8, dtype=BF16)
    assert parts(norm, X.to(BF16)) == {
        "norm statistics": [(["native_layer_norm"], ["bfloat16"], True)]
    }


def test_a_root_of_something_else_is_no_norm():
    """No reduction leads to it."""
    assert "norm statistics" not in parts(Module(lambda m, x: (x.abs() + 1).rsqrt()), X)


def written_out(self, x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def test_softmax_written_out():
    """exp(x - max) over its sum is a softmax; exp alone is none."""
    found = parts(Module(written_out), X.to(BF16))
    assert found["softmax"] == [(["sub", "exp", "sum", "div"], ["bfloat16"] * 4, False)]
    assert "softmax" not in parts(Module(lambda m, x: x.exp() / x.sum()), X)


def test_scores_lead_back_to_their_product():
    """Scale, cap and mask between the product and the softmax; the upcast is the softmax's."""

    def attention(self, q, k, mask):
        scores = torch.tanh(q @ k.transpose(1, 2) * 0.5) + mask
        return F.softmax(scores, dim=-1, dtype=F32).to(q.dtype) @ k

    found = parts(Module(attention), X.to(BF16), X.to(BF16), torch.zeros(3, 3, dtype=BF16))
    assert found["attention scores"] == [(["bmm", "mul", "tanh", "add"], ["bfloat16"] * 4, False)]
    assert found["softmax"] == [(["_softmax"], ["float32"], False)]
    assert found["matrix product"] == [(["bmm#2"], ["bfloat16"], False)]


def test_a_fused_attention_hides_both():
    """Scores and softmax are inside one kernel."""
    q = torch.randn(1, 2, 4, 8, dtype=BF16)
    found = parts(Module(lambda m, q: F.scaled_dot_product_attention(q, q, q)), q)
    assert found.keys() == {"softmax", "attention scores"}
    assert all(kernel for items in found.values() for _, _, kernel in items)


def router(scores_of, product_dtype=None):
    def forward(self, x):
        logits = F.linear(x.to(product_dtype or x.dtype), self.w.to(product_dtype or x.dtype))
        scores = scores_of(logits)
        chosen, index = scores.topk(2, -1)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen.to(x.dtype), index.sort()[0]

    return Module(forward, w=torch.randn(4, 8, dtype=BF16))


@pytest.mark.parametrize(
    ("module", "names", "dtypes"),
    [
        (router(lambda z: z.float().softmax(-1)), None, {"float32"}),
        (router(lambda z: z.softmax(-1)), ["_softmax", "topk", "sum", "div"], {"bfloat16"}),
        (router(torch.sigmoid, F32), ["sigmoid", "topk", "sum", "div"], {"float32"}),
        (router(lambda z: z.float().softmax(-1).to(BF16)), None, {"float32", "bfloat16"}),
        (router(lambda z: z), ["topk", "sum", "div"], {"bfloat16"}),
    ],
)
def test_a_router_is_what_topk_chooses_by(module, names, dtypes):
    """From the product with a weight on, the chosen ones' weights included, but not their cast."""
    found = parts(module, X[0].to(BF16))
    ((got, seen, _),) = found["router"]
    assert set(seen) == dtypes
    assert names is None or got == names
    assert [item[0] for item in found["router product"]] == [["mm"]]
    assert "softmax" not in found


def test_groups_of_experts_are_one_router():
    """DeepSeek's: scores, groups chosen by the best two of each, then experts in them."""

    def forward(self, x):
        scores = F.linear(x.float(), self.w.float()).sigmoid()
        choice = scores + self.bias
        groups = choice.view(3, 2, 4).topk(2, -1)[0].sum(-1)
        mask = torch.zeros_like(groups).scatter_(1, groups.topk(1, -1)[1], 1)
        mask = mask.unsqueeze(-1).expand(3, 2, 4).reshape(3, 8)
        index = choice.masked_fill(~mask.bool(), float("-inf")).topk(2, -1)[1]
        weights = scores.gather(1, index)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20)

    module = Module(forward, w=torch.randn(8, 8, dtype=BF16), bias=torch.zeros(8))
    found = parts(module, X[0].to(BF16))
    assert {dtype for _, dtypes, _ in found["router"] for dtype in dtypes} == {"float32"}
    assert found["router product"] == [(["mm"], ["float32"], False)]


def test_topk_of_scores_without_a_weight_is_no_router():
    """An indexer chooses keys by q k."""
    found = parts(Module(lambda m, x: (x @ x.transpose(1, 2)).topk(2, -1)), X)
    assert "router" not in found


def half_turn(x):
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)


def pair_turn(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@pytest.mark.parametrize("turn", [half_turn, pair_turn])
def test_rotary_is_told_by_the_turn(turn):
    """Both layouts; and the table of angles is a part of its own."""

    def forward(self, x):
        angle = torch.arange(3.0)[:, None] * torch.ones(8)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return x * cos + turn(x) * sin

    found = parts(Module(forward), X.to(BF16))
    assert found["rotary"] == [(["mul#2", "mul#3", "add"], ["bfloat16"] * 3, False)] or (
        found["rotary"] == [(["mul", "mul#2", "add"], ["bfloat16"] * 3, False)]
    )
    assert [names for names, _, _ in found["rotary table"]] == [["cos"], ["sin"]]


def test_rotary_in_halves():
    """x cos - y sin beside y cos + x sin; four other factors are no rotation."""
    x, y, cos, sin = torch.randn(4, 3, 8).to(BF16)

    def turned(m, x, y, cos, sin):
        return torch.cat((x * cos - y * sin, y * cos + x * sin), -1)

    found = parts(Module(turned), x, y, cos, sin)
    assert found["rotary"] == [
        (["mul", "mul#2", "sub", "mul#3", "mul#4", "add"], ["bfloat16"] * 6, False)
    ]

    def other(m, x, y, cos, sin):
        return torch.cat((x * cos - y * sin, x * cos + x * cos), -1)

    assert "rotary" not in parts(Module(other), x, y, cos, sin)


def test_rotary_by_complex_numbers():
    """Its dtype is that of their parts."""

    def forward(self, x, turns):
        pairs = torch.view_as_complex(x.float().reshape(2, 3, 4, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)

    turns = torch.polar(torch.ones(3, 4), torch.ones(3, 4))
    found = parts(Module(forward), X.to(BF16), turns)
    assert found["rotary"] == [(["mul"], ["complex64"], False)]


def test_residual_adds_are_of_the_stream():
    """Stream plus what a product led to: not a bias, a position, a sum of two branches."""

    def forward(self, x):
        one = (x + self.bias) @ self.w
        two = F.silu(x @ self.w)
        both = one + two
        y = x + both
        return y + F.gelu(y @ self.w)

    weights = {"w": torch.randn(8, 8), "bias": torch.zeros(8)}
    found = parts(Module(forward, **weights), X, blocks={"."})
    assert [names for names, _, _ in found["residual add"]] == [["add#3"], ["add#4"]]
    assert [names for names, _, _ in found["activation"]] == [["silu"], ["gelu"]]
    assert "residual add" not in parts(Module(forward, **weights), X, blocks={"elsewhere"})


def test_logits_are_the_heads_product():
    """Of the module that makes them."""
    found = parts(Module(lambda m, x: x @ m.w, w=torch.randn(8, 4)), X, logits=".")
    assert found == {"logits": [(["mm"], ["float32"], False)]}


def test_vendor_kernels_are_told_by_name():
    """A vendor's fused norm, rotary and product; the norm that adds hides the residual add too."""

    def node(order, name):
        operand = Operand(shape=(3, 8), dtype="bfloat16")
        call = Call(operator=f"{name}.default", arguments={}, operands=(operand,))
        result = SimpleNamespace(dtype="bfloat16", shape=(3, 8), order=order, site=f"m/{name}:out")
        return CallNode(f"m/{name}", "m", name, call, [result])

    names = """
        npu.npu_add_rms_norm npu.npu_rotary_mul npu.npu_fusion_attention
        transformers.grouped_mm_fallback vllm.reshape_and_cache
    """.split()
    found = find_parts([node(*item) for item in enumerate(names)], {"m"})
    assert [(item.part, item.root.name, item.kernel) for item in found] == [
        ("norm statistics", "npu.npu_add_rms_norm", True),
        ("residual add", "npu.npu_add_rms_norm", True),
        ("rotary", "npu.npu_rotary_mul", True),
        ("softmax", "npu.npu_fusion_attention", True),
        ("attention scores", "npu.npu_fusion_attention", True),
        ("kv cache", "vllm.reshape_and_cache", False),
        ("matrix product", "transformers.grouped_mm_fallback", False),
    ]
