"""In which dtype each part of a model is expected to run, and who says so.

First the model's own code, read from transformers 5 and held against the installed one by a test:
which class casts to float32 before it takes a mean, a softmax or a router's scores, and which does
not (GPT-2, BERT and T5 take the softmax in the model's dtype: a float32 one there would be the
oddity). Where the family is not in the table, common practice for inference: norm statistics and
softmax in float32, the router in float32 or bfloat16, everything else in the model's dtype, a
cache possibly narrower. Practice alone accuses nobody: see ``own``.

``nn.LayerNorm`` is one kernel; that its statistics are float32 inside is PyTorch's word (CPU and
CUDA), so only a layer norm written out in narrower operators is below it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from divergence.comparison.results import Part
from divergence.facts import Fact, fact, plain
from divergence.numerics.formats import FORMATS, format_named

__all__ = ["FAMILIES", "Expectation", "OperatorFamily", "expectation", "family_of", "is_below"]

MODEL = "model"
"""The model's own dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """``dtypes``: any of them is enough. ``own``: the model's own code says so."""

    dtypes: tuple[str, ...]
    by: Fact
    own: bool


@dataclass(frozen=True, slots=True)
class OperatorFamily:
    """One modeling file of transformers. ``norm``: the class that casts to float32 before it takes
    a norm's statistics, None for ``nn.LayerNorm``. ``weight``: dtype of the product with the
    norm's weight; ``softmax``: of attention; None where it has none. ``router``: the class, the
    dtype of its scores and of its matrix product. ``residual_in_fp32``: the configuration's
    switch for the residual stream, on unless it says otherwise."""

    file: str
    norm: str | None
    weight: str = MODEL
    softmax: str | None = "float32"
    router: tuple[str, str, str] | None = None
    residual_in_fp32: bool = False


_SCORES = "float32", MODEL
_ALL = "float32", "float32"

FAMILIES: dict[str, OperatorFamily] = {
    "Bart": OperatorFamily("bart", None, softmax=MODEL),
    "Bert": OperatorFamily("bert", None, softmax=MODEL),
    "Cohere": OperatorFamily("cohere", "CohereLayerNorm", weight="float32"),
    "DeepseekV2": OperatorFamily(
        "deepseek_v2", "DeepseekV2RMSNorm", router=("DeepseekV2TopkRouter", *_ALL)
    ),
    "DeepseekV3": OperatorFamily(
        "deepseek_v3", "DeepseekV3RMSNorm", router=("DeepseekV3TopkRouter", *_ALL)
    ),
    "Electra": OperatorFamily("electra", None, softmax=MODEL),
    "GPT2": OperatorFamily("gpt2", None, softmax=MODEL),
    "GPTNeoX": OperatorFamily("gpt_neox", None),
    "Gemma": OperatorFamily("gemma", "GemmaRMSNorm", weight="float32"),
    "Gemma2": OperatorFamily("gemma2", "Gemma2RMSNorm", weight="float32"),
    "Gemma3": OperatorFamily("gemma3", "Gemma3RMSNorm", weight="float32"),
    "Glm4": OperatorFamily("glm4", "Glm4RMSNorm"),
    "Glm4Moe": OperatorFamily("glm4_moe", "Glm4MoeRMSNorm", router=("Glm4MoeTopkRouter", *_ALL)),
    "GptOss": OperatorFamily(
        "gpt_oss",
        "GptOssRMSNorm",
        weight="float32",
        softmax=MODEL,
        router=("GptOssTopKRouter", MODEL, MODEL),
    ),
    "Granite": OperatorFamily("granite", "GraniteRMSNorm"),
    "Llama": OperatorFamily("llama", "LlamaRMSNorm"),
    "Mamba": OperatorFamily("mamba", "MambaRMSNorm", softmax=None, residual_in_fp32=True),
    "Mamba2": OperatorFamily("mamba2", "Mamba2RMSNorm", softmax=None, residual_in_fp32=True),
    "Mistral": OperatorFamily("mistral", "MistralRMSNorm"),
    "Mixtral": OperatorFamily("mixtral", "MixtralRMSNorm", router=("MixtralTopKRouter", *_SCORES)),
    "OPT": OperatorFamily("opt", None),
    "Olmo2": OperatorFamily("olmo2", "Olmo2RMSNorm", weight="float32"),
    "Olmoe": OperatorFamily("olmoe", "OlmoeRMSNorm", router=("OlmoeTopKRouter", *_SCORES)),
    "Phi": OperatorFamily("phi", None),
    "Phi3": OperatorFamily("phi3", "Phi3RMSNorm"),
    "Qwen2": OperatorFamily("qwen2", "Qwen2RMSNorm"),
    "Qwen2Moe": OperatorFamily(
        "qwen2_moe", "Qwen2MoeRMSNorm", router=("Qwen2MoeTopKRouter", *_SCORES)
    ),
    "Qwen3": OperatorFamily("qwen3", "Qwen3RMSNorm"),
    "Qwen3Moe": OperatorFamily(
        "qwen3_moe", "Qwen3MoeRMSNorm", router=("Qwen3MoeTopKRouter", *_SCORES)
    ),
    "Roberta": OperatorFamily("roberta", None, softmax=MODEL),
    "SmolLM3": OperatorFamily("smollm3", "SmolLM3RMSNorm"),
    "StableLm": OperatorFamily("stablelm", None),
    "Starcoder2": OperatorFamily("starcoder2", None),
    "T5": OperatorFamily("t5", "T5LayerNorm", softmax=MODEL),
}
"""By the beginning of the model's class name: ``Qwen3MoeForCausalLM``."""

_REST = re.compile(r"(?:For|Model|LMHead|Encoder|Decoder|PreTrained|DoubleHeads|Text)\w*")
_CACHES = ("float8_e4m3fn", "float8_e5m2", "int8")


def family_of(model_class: str) -> OperatorFamily | None:
    """``"LlamaForCausalLM"`` → Llama's; None where the class is none of the table's."""
    for name, family in FAMILIES.items():
        if model_class.startswith(name) and _REST.fullmatch(model_class[len(name) :]):
            return family
    return None


def expectation(part: Part, family: OperatorFamily | None, dtype: str) -> Expectation | None:
    """What is expected of ``part`` in a model of ``dtype``; None where nothing is."""
    if format_named(dtype).kind != "float":
        return None  # a quantised model: its parts' dtypes are its own affair
    if family is not None:
        own = _own(part, family)
        if own is not None:
            word, by = own
            return Expectation(dtypes=(dtype if word == MODEL else word,), by=by, own=True)
    if part == "residual add" and family is not None and family.residual_in_fp32:
        by = fact("precision.residual_switch")
        return Expectation(dtypes=("float32",), by=by, own=False)
    practice = {
        "norm statistics": ("float32",),
        "softmax": ("float32",),
        "router": ("float32", "bfloat16"),
        "kv cache": (dtype, *_CACHES),
        "rotary table": ("float32",),
    }
    if part in practice:
        by = fact("precision.common_practice")
        return Expectation(dtypes=practice[part], by=by, own=False)
    return Expectation(dtypes=(dtype,), by=fact("precision.model_dtype"), own=family is not None)


def _own(part: Part, family: OperatorFamily) -> tuple[str, Fact] | None:
    """(dtype, whose code) where the family's code decides it."""
    if part == "norm statistics":
        return "float32", plain(family.norm) if family.norm else fact("precision.in_kernel")
    if part == "norm weight" and family.norm is not None:
        return family.weight, plain(family.norm)
    if part == "softmax" and family.softmax is not None:
        return family.softmax, fact("precision.attention_of", file=f"modeling_{family.file}.py")
    if family.router is not None:
        name, scores, product = family.router
        if part == "router":
            return scores, plain(name)
        if part == "router product":
            return product, plain(name)
    return None


def is_below(dtype: str, expected: tuple[str, ...] | list[str]) -> bool:
    """Has ``dtype`` fewer significant bits or a narrower range than each of ``expected``? float16
    and bfloat16 are each below the other."""
    if not expected or dtype in expected or dtype not in FORMATS:
        return False
    return all(_narrower(dtype, other) for other in expected)


def _narrower(dtype: str, other: str) -> bool:
    a, b = format_named(dtype), format_named(other)
    if a.kind != "float" or b.kind != "float":
        return a.kind in ("int", "bool") and b.kind == "float"
    return a.mantissa_bits < b.mantissa_bits or a.max < b.max / 2
