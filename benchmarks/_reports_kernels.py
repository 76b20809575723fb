"""Reports of wrong kernels and wrong code: masks, attention, products, norms, positions, state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks._fault_patches import _attend, _masked, _replace, _visible
from benchmarks._reports import Case

__all__ = ["KERNELS"]


# ── parts of a model ────────────────────────────────────────────────────────────────────────────


def _blocks(model: nn.Module) -> nn.ModuleList:
    inner = getattr(model, "transformer", None) or getattr(model, "model", None)
    inner = inner or getattr(model, "gpt_neox", None) or model.backbone
    return inner.h if hasattr(inner, "h") else inner.layers


def _attentions(model: nn.Module) -> list[nn.Module]:
    names = ("self_attn", "attn", "attention")
    return [next(getattr(b, n) for n in names if hasattr(b, n)) for b in _blocks(model)]


def _linears(block: nn.Module) -> list[nn.Linear]:
    return [part for part in block.modules() if isinstance(part, nn.Linear)]


# ── masks and attention ─────────────────────────────────────────────────────────────────────────


def _window(width: int) -> Callable[[nn.Module], None]:
    """Every attention sees ``width`` keys."""

    def faulty(call: Any) -> Any:
        _, _, index = _visible(call)
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        last = torch.arange(keys - queries, keys)[:, None]
        return _masked(call, (index <= last) & (index > last - width)).run()

    return lambda model: [_attend(part, faulty, 1.0) for part in _attentions(model)]


def _window_forgotten(model: nn.Module) -> None:
    """Layers of a sliding window attend to everything before them."""

    def faulty(call: Any) -> Any:
        if call.query.shape[-2] == 1:
            return call.run()
        _, newest, index = _visible(call)
        return _masked(call, index <= newest).run()

    for part in _attentions(model):
        if getattr(part, "sliding_window", None):
            _attend(part, faulty, 1.0)


def _causality(blocks: slice = slice(None)) -> Callable[[nn.Module], None]:
    """Every token of the prefill sees all of them."""

    def faulty(call: Any) -> Any:
        seen = torch.ones(call.query.shape[-2], call.key.shape[-2], dtype=torch.bool)
        return _masked(call, seen).run()

    return lambda model: [_attend(part, faulty, 1.0) for part in _attentions(model)[blocks]]


def _averages(model: nn.Module) -> None:
    """One layer's attention weighs all visible keys alike."""

    def faulty(call: Any) -> Any:
        visible, _, _ = _visible(call)
        share = visible.to(call.value.dtype)
        share = share / share.sum(-1, keepdim=True)
        groups = call.query.shape[1] // call.key.shape[1]
        value = call.value.repeat_interleave(groups, dim=1)
        return (share @ value).transpose(1, 2).contiguous(), None

    _attend(_attentions(model)[1], faulty, 1.0)


def _nan_rows(number: int) -> Callable[[nn.Module], None]:
    """A row that sees nothing is NaN in one layer. In the next one it is a value times 0."""

    def faulty(call: Any) -> Any:
        heads, weights = call.run()
        visible, _, _ = _visible(call)
        empty = ~visible.any(-1).expand(heads.shape[0], 1, heads.shape[1])
        return heads.masked_fill(empty[:, 0, :, None, None], float("nan")), weights

    return lambda model: _attend(_attentions(model)[number], faulty, 1.0)


# ── products ────────────────────────────────────────────────────────────────────────────────────


def _strided(model: nn.Module) -> None:
    """The kernel reads a transposed weight as if it were contiguous."""
    part = _blocks(model)[2].mlp.down_proj
    part.weight.data = part.weight.data.t().contiguous().t()

    def wrong(healthy: Any, x: torch.Tensor) -> torch.Tensor:
        weight = part.weight
        return F.linear(x, weight.as_strided(weight.shape, (weight.shape[1], 1)))

    _replace(part, wrong)


def _coarse(width: int, *, everywhere: bool) -> Callable[[nn.Module], None]:
    """Partial sums of ``width`` products are added in the run's dtype, from bfloat16 values."""

    def plant(model: nn.Module) -> None:
        parts = [part for block in _blocks(model) for part in _linears(block)]
        for part in parts if everywhere else [_blocks(model)[2].mlp.down_proj]:

            def wrong(healthy: Any, x: torch.Tensor, part: nn.Linear = part) -> torch.Tensor:
                total = None
                pieces = zip(x.split(width, -1), part.weight.split(width, -1), strict=True)
                for piece, weight in pieces:
                    added = (piece @ weight.t()).bfloat16()
                    total = added if total is None else total + added
                return total.to(x.dtype)

            _replace(part, wrong)

    return plant


_OVERFLOW = 3e5


def _half_input(model: nn.Module) -> None:
    """From 64 rows on the input of one product goes through float16; one channel is large there."""
    part = _blocks(model)[2].mlp.down_proj

    def wrong(healthy: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-2] >= 64:
            x = (x * (_OVERFLOW / x.abs().max())).half().float()
        return healthy(x)

    _replace(part, wrong)


def _bias_again(blocks: slice) -> Callable[[nn.Module], None]:
    """A row-parallel product of two ranks: each adds the bias."""

    def plant(model: nn.Module) -> None:
        for block in _blocks(model)[blocks]:
            part = block.attn.c_proj
            _replace(part, lambda healthy, x, part=part: healthy(x) + part.bias)

    return plant


# ── norms, activations, embeddings ──────────────────────────────────────────────────────────────


def _epsilon(model: nn.Module) -> None:
    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = 1e-6


def _exact_gelu(model: nn.Module) -> None:
    for block in _blocks(model):
        _replace(block.mlp.act_fn, lambda healthy, x: F.gelu(x))


def _norm_in_16_bits(model: nn.Module) -> None:
    for part in model.modules():
        if type(part).__name__ == "Gemma2RMSNorm":

            def wrong(healthy: Any, x: torch.Tensor, part: Any = part) -> torch.Tensor:
                return part._norm(x.float()).type_as(x) * (1 + part.weight)

            _replace(part, wrong)


def _embedding_scale(model: nn.Module) -> None:
    """The scale is not rounded to the run's dtype before it is multiplied by."""
    part = model.model.embed_tokens

    def wrong(healthy: Any, ids: torch.Tensor) -> torch.Tensor:
        wide = F.embedding(ids, part.weight).float()
        return (wide * (math.sqrt(part.weight.shape[1]) * 1.004)).to(part.weight.dtype)

    _replace(part, wrong)


def _fused_rotary(model: nn.Module) -> None:
    """The rotation is computed in float32 and rounded once, as a fused kernel does."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb

    def fused(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, *args: Any) -> Any:
        wide = own(q.float(), k.float(), cos.float(), sin.float(), *args)
        return tuple(tensor.to(q.dtype) for tensor in wide)

    for part in _attentions(model):

        def wrong(healthy: Any, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", fused):
                return healthy(*args, **kwargs)

        _replace(part, wrong)


# ── positions and state ─────────────────────────────────────────────────────────────────────────


def _angles_in_bfloat16(model: nn.Module) -> None:
    """Positions and frequencies are rounded to bfloat16: 256 and 257 are one position."""
    for part in model.modules():
        if hasattr(part, "inv_freq"):

            def wrong(healthy: Any, x: torch.Tensor, position_ids: Any, part: Any = part) -> Any:
                low = part.inv_freq.bfloat16() * position_ids[0, :, None].bfloat16()
                angles = torch.cat((low, low), dim=-1)[None].float()
                scale = getattr(part, "attention_scaling", 1.0)
                return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

            _replace(part, wrong)


def _one_row_of_positions(*, decode_only: bool) -> Callable[[nn.Module], None]:
    """Every row of a batch has the positions of the longest. ``decode_only``: the prefill has its
    own, and steps go on with those of the longest."""

    def plant(model: nn.Module) -> None:
        inner = getattr(model, "transformer", None) or model.model

        def wrong(healthy: Any, *args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("input_ids")
            ids = args[0] if ids is None else ids
            cache = kwargs.get("past_key_values")
            start = cache.get_seq_length() if cache is not None else 0
            if not decode_only or ids.shape[1] == 1:
                row = torch.arange(start, start + ids.shape[1])
                kwargs["position_ids"] = row.expand(ids.shape)
            return healthy(*args, **kwargs)

        _replace(inner, wrong)

    return plant


def _pads_enter(model: nn.Module) -> None:
    """The states of pads are not zeroed before the convolution and behind it."""
    for block in _blocks(model):

        def wrong(healthy: Any, *args: Any, **kwargs: Any) -> Any:
            return healthy(*args, **{**kwargs, "attention_mask": None})

        _replace(block.mixer, wrong)


def _stale_convolution(model: nn.Module) -> None:
    """The convolution's state of the prompt is that of pads: zeros."""
    for number, block in enumerate(_blocks(model)):

        def wrong(healthy: Any, x: Any, *args: Any, n: int = number, **kwargs: Any) -> Any:
            cache = kwargs.get("cache_params")
            out = healthy(x, *args, **kwargs)
            if cache is not None and x.shape[1] > 1:
                cache.get_conv_state(n, state_idx=0).zero_()
            return out

        _replace(block.mixer, wrong)


# ── the cases ───────────────────────────────────────────────────────────────────────────────────


def _cases() -> Iterator[Case]:
    first = r"layers\.0\b|\.h\.0\b"
    window = {
        "report": "huggingface/transformers#39408",
        "letter": "C",
        "is_code": True,
        "cause": "the attention kernel's window is inclusive: one key too many",
        "model": "mistral",
    }
    for dtype in ("float32", "bfloat16"):
        yield Case(
            name=f"window-{dtype}",
            **window,
            dtype=dtype,
            plant=_window(5),
            lengths=(32,),
            place=first,
            words=(
                ("attention", r"attention|attn"),
                ("from which token on", r"token [4-9]\b|from token 4"),
            ),
        )
    yield Case(
        name="window-not-reached",
        **window,
        plant=_window(5),
        lengths=(3,),
        new_tokens=1,
        kinds=("identical", "within_floor"),
        side="neither",
        words=(("that the window was not reached", r"window.*(never|not) |(never|not) .*window"),),
    )
    for model, layers in (("gemma2", r"layers\.0\b"), ("qwen2", r"layers\.1\b")):
        yield Case(
            name=f"window-forgotten-{model}",
            report="huggingface/transformers#35924",
            letter="C",
            cause="layers with a sliding window attend to everything",
            model=model,
            is_code=True,
            plant=_window_forgotten,
            place=layers,
            words=(
                ("that it is every second layer", r"2 of 4|every second|layers\.(2|3)\b|sliding"),
            ),
        )
    for model, dtype in (("llama", "float32"), ("gpt2", "float32"), ("llama", "bfloat16")):
        yield Case(
            name=f"causal-ignored-{model}-{dtype}",
            report="vllm-project/vllm-omni#7322",
            letter="K",
            cause="the kernel ignores that attention is causal",
            model=model,
            dtype=dtype,
            plant=_causality(),
            place=first,
            words=(("attention", r"attention|attn"),),
        )
    for dtype in ("float32", "bfloat16"):
        yield Case(
            name=f"average-{dtype}",
            report="vllm-project/vllm-ascend#13699",
            letter="K",
            cause="fused attention returns the plain average of the values",
            dtype=dtype,
            plant=_averages,
            place=r"layers\.1\b",
            words=(("attention", r"attention|attn"),),
        )
        yield Case(
            name=f"strides-{dtype}",
            report="ROCm/pytorch#3230, pytorch/pytorch#161640",
            letter="K",
            cause="a product reads a strided weight as if it were contiguous",
            dtype=dtype,
            plant=_strided,
            place=r"layers\.2\b",
            words=("down_proj", ("that the weight is not contiguous", "contiguous")),
        )
    for everywhere, place in ((False, r"layers\.2\b"), (True, first)):
        yield Case(
            name="partial-sums-everywhere" if everywhere else "partial-sums-one",
            report="pytorch/pytorch#83863, #95125, #147860",
            letter="K",
            dtype="bfloat16",
            cause="a product adds its partial sums in bfloat16"
            + (", everywhere" if everywhere else ", in one layer"),
            plant=_coarse(8, everywhere=everywhere),
            place=place,
            kinds=("systematic",) if everywhere else ("localized",),
        )
    half = {
        "report": "ggml-org/llama.cpp#26044",
        "letter": "K",
        "plant": _half_input,
        "cause": "from 64 rows on a product's input is cast to float16, and overflows",
    }
    yield Case(
        name="half-input-long",
        **half,
        lengths=(80, 16),
        new_tokens=2,
        kinds=("nonfinite",),
        place=r"layers\.2\b",
        unit="prompt 0",
        words=("prompt 0", "down_proj", ("that it comes in", r"input|comes in")),
    )
    yield Case(
        name="half-input-short",
        **half,
        lengths=(16, 9),
        new_tokens=2,
        kinds=("identical",),
        side="neither",
    )
    yield Case(
        name="angles-bfloat16",
        report="deepspeedai/DeepSpeed#6929, #4932",
        letter="C",
        cause="positions and frequencies are cast to bfloat16",
        lengths=(300,),
        new_tokens=1,
        plant=_angles_in_bfloat16,
        is_code=True,
        place="rotary",
    )
    epsilon = {
        "report": "ggml-org/llama.cpp#2373",
        "letter": "S",
        "plant": _epsilon,
        "cause": "the norms' epsilon is fixed at 1e-6; the model wants 1e-5",
        "words": (("1e-06", r"1e-0?6"),),
    }
    for model in ("llama", "qwen3"):
        yield Case(name=f"epsilon-{model}", **epsilon, model=model, place="norm|layers.0")
    gemma = "huggingface/transformers#29402, google/gemma_pytorch#37, #67"
    for dtype in ("float32", "bfloat16"):
        yield Case(
            name=f"gelu-{dtype}",
            report=gemma,
            letter="C",
            model="gemma2",
            dtype=dtype,
            cause="the exact GELU in place of the one by tanh",
            plant=_exact_gelu,
            is_code=True,
            place=first,
            words=(("the activation", "gelu|act_fn|mlp"),),
            alone=("within_floor",) if dtype == "bfloat16" else (),
        )
    yield Case(
        name="norm-16-bits",
        report=gemma,
        letter="C",
        model="gemma2",
        dtype="bfloat16",
        cause="1 + w of the norms is computed in 16 bits",
        plant=_norm_in_16_bits,
        is_code=True,
        place="norm|layers.0",
        words=(("that norms are computed in 16 bits", "norm.*(bfloat16|16 bits)"),),
        kinds=("localized", "systematic", "within_floor"),  # as small as rounding
    )
    for dtype in ("float32", "bfloat16"):
        yield Case(
            name=f"embedding-scale-{dtype}",
            report=gemma,
            letter="C",
            model="gemma2",
            dtype=dtype,
            cause="the embedding's scale is another one by 0.4%",
            plant=_embedding_scale,
            is_code=True,
            place="embed_tokens",
            # Two runs alone: 0.4% is one unit in bfloat16's last place, as small as rounding.
            alone=("within_floor",) if dtype == "bfloat16" else (),
        )
    for blocks, name in ((slice(None), "everywhere"), (slice(1, 2), "one")):
        yield Case(
            name=f"bias-twice-{name}",
            report="huggingface/text-generation-inference#1036",
            letter="C",
            cause=f"two ranks both add a row-parallel bias, {name}",
            model="gpt2",
            plant=_bias_again(blocks),
            is_code=True,
            words=("c_proj", ("the bias", "bias|constant|add")),
            place=r"\.h\.0\b" if name == "everywhere" else r"\.h\.1\b",
        )
    positions = {
        "report": "unslothai/unsloth#3699, ndif-team/nnsight#672",
        "letter": "C",
        "cause": "one row of positions for all rows of a left-padded batch",
        "is_code": True,
        "lengths": (24, 16, 9),
        "options": {"batch": True},
    }
    yield Case(
        name="positions-gpt2",
        **positions,
        model="gpt2",
        plant=_one_row_of_positions(decode_only=False),
        place=r"wpe|drop|\.h\.0:in",
        words=(("positions", "wpe|position"), ("which prompt", "prompts? [12]")),
    )
    yield Case(
        name="positions-rotary-cancels",
        **positions,
        kinds=("within_floor",),
        side="neither",
        plant=_one_row_of_positions(decode_only=False),
    )
    yield Case(
        name="positions-rotary-decode",
        **positions,
        place="rotary",
        unit="step [12]",
        plant=_one_row_of_positions(decode_only=True),
        words=(("positions", "rotary|position"), ("that it is in steps", "decode|step")),
    )
    mamba = {"report": "huggingface/transformers#31540, #48256", "letter": "C", "model": "mamba"}
    yield Case(
        name="mamba-pads",
        **mamba,
        cause="pads enter the convolution and the state",
        lengths=(24, 16, 9),
        options={"batch": True},
        plant=_pads_enter,
        is_code=True,
        place=r"layers\.0\b",
        unit="prompt [12]",
    )
    yield Case(
        name="mamba-stale-state",
        **mamba,
        cause="the cached state of the convolution is of pads",
        plant=_stale_convolution,
        is_code=True,
        kinds=("localized", "systematic", "drift"),
        place=r"layers\.0\b",
        unit="step 1",
        words=(("that it is in steps", "decode|step 1|state"),),
    )
    yield Case(
        name="no-cache-no-mask",
        report="meta-pytorch/torchtune#959",
        letter="C",
        cause="without a cache no causal mask is built",
        plant=_causality(),
        is_code=True,
        other={"use_cache": False},
        place=first,
    )
    rows = {
        "report": "pytorch/pytorch#110213, #103963, huggingface/transformers#38690",
        "letter": "K",
        "lengths": (24, 16, 9),
        "options": {"batch": True},
    }
    yield Case(
        name="nan-at-pads",
        **rows,
        cause="rows that see nothing are NaN, at pads alone",
        plant=_nan_rows(-1),
        kinds=("within_floor", "identical"),
        side="neither",
    )
    yield Case(
        name="nan-spreads",
        **rows,
        cause="rows that see nothing are NaN, and spread as 0 x NaN",
        plant=_nan_rows(0),
        kinds=("nonfinite",),
        place=r"layers\.[01]\b",
        unit="prompt [12]",
        words=(("which prompt", "prompts? [12]"),),
    )
    yield Case(
        name="fused-rotary",
        report="pytorch/pytorch#182225, #159239, #183761",
        letter="R",
        cause="a compiler leaves out a rounding to bfloat16: nearer to the truth",
        dtype="bfloat16",
        plant=_fused_rotary,
        kinds=("within_floor",),
        side="neither",
    )


KERNELS: tuple[Case, ...] = tuple(_cases())
