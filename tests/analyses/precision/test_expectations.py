"""What is expected of each family, held against the transformers that is installed."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from divergence.analyses.precision.audit import FAMILIES, expectation, family_of, is_below
from divergence.comparison.results import PARTS

MODELS = Path(importlib.util.find_spec("transformers").origin).parent / "models"


def parsed(file: str) -> ast.Module:
    path = MODELS / file / f"modeling_{file}.py"
    if not path.is_file():
        pytest.skip(f"this transformers has no {file}")
    return ast.parse(path.read_text(encoding="utf-8"))


def class_text(tree: ast.Module, name: str) -> str:
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return ast.unparse(found)


def softmaxes(node: ast.AST) -> set[str]:
    """``float32`` or ``model`` for each softmax that is called there."""
    found = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "softmax":
            words = [ast.unparse(k.value) for k in call.keywords if k.arg == "dtype"]
            upcast = words and words[0] in ("torch.float32", "torch.float")
            before = call.args and ast.unparse(call.args[0]).endswith(".float()")
            found.add("float32" if upcast or before else "model")
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_are_as_the_code_has_them(name):
    """The norm's class casts to float32 before the mean, and its weight is applied where it says;
    a family without such a class uses nn.LayerNorm and takes no rsqrt itself."""
    family = FAMILIES[name]
    tree = parsed(family.file)
    if family.norm is None:
        assert "nn.LayerNorm" in ast.unparse(tree)
        assert "rsqrt" not in ast.unparse(tree)
        return
    text = class_text(tree, family.norm)
    assert "rsqrt" in text
    assert ".to(torch.float32)" in text or ".float()" in text
    wide = any(
        sign in text
        for sign in (
            "self.weight.float()",
            "self.weight.to(torch.float32)",
            "(self.weight * hidden_states).to(",
        )
    )
    assert wide == (family.weight == "float32")


@pytest.mark.parametrize("name", FAMILIES)
def test_softmax_is_as_the_code_has_it(name):
    """What eager attention casts its scores to; the state space models have none."""
    family = FAMILIES[name]
    tree = parsed(family.file)
    places = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name == "eager_attention_forward")
        or (isinstance(node, ast.ClassDef) and node.name.endswith("Attention"))
    ]
    found = set().union(*(softmaxes(node) for node in places))
    assert found == ({family.softmax} if family.softmax else set())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.router])
def test_routers_are_as_the_code_has_them(name):
    """The scores' dtype, and whether the product before them is in float32."""
    family = FAMILIES[name]
    router, scores, product = family.router
    text = class_text(parsed(family.file), router)
    assert ("self.weight.type(torch.float32)" in text) == (product == "float32")
    words = softmaxes(ast.parse(text))
    assert words == {scores} or (product == "float32" and words <= {"float32"})


def test_mamba_keeps_its_stream_in_float32_by_default():
    """Both configurations say so."""
    for name in ("mamba", "mamba2"):
        text = (MODELS / name / f"configuration_{name}.py").read_text(encoding="utf-8")
        assert "residual_in_fp32: bool = True" in text
        assert FAMILIES[name.capitalize()].residual_in_fp32


@pytest.mark.parametrize(
    ("model_class", "file"),
    [
        ("LlamaForCausalLM", "llama"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("GPT2LMHeadModel", "gpt2"),
        ("T5ForConditionalGeneration", "t5"),
        ("Gemma3ForCausalLM", "gemma3"),
        ("BertForMaskedLM", "bert"),
        ("LlamaGuessForCausalLM", None),
        ("Llama4ForCausalLM", None),
        ("TinyRemoteForCausalLM", None),
    ],
)
def test_a_family_is_told_by_the_whole_name(model_class, file):
    """Qwen3Moe is not Qwen3, and a name that only begins alike is nobody's."""
    family = family_of(model_class)
    assert (family and family.file) == file


@pytest.mark.parametrize(
    ("dtype", "expected", "below"),
    [
        ("bfloat16", ("float32",), True),
        ("float32", ("float32",), False),
        ("float64", ("float32",), False),
        ("float32", ("bfloat16",), False),
        ("float16", ("bfloat16",), True),  # less range
        ("bfloat16", ("float16",), True),  # fewer bits
        ("bfloat16", ("float32", "bfloat16"), False),
        ("float8_e4m3fn", ("bfloat16",), True),
        ("int8", ("bfloat16",), True),
        ("bfloat16", (), False),
    ],
)
def test_below_is_fewer_bits_or_less_range(dtype, expected, below):
    """Than each of the dtypes that would do."""
    assert is_below(dtype, expected) == below


def test_practice_stands_in_for_an_unknown_family():
    """It asks for float32 statistics and softmax, and it is nobody's own word."""
    found = expectation("softmax", None, "bfloat16")
    assert (found.dtypes, found.own) == (("float32",), False)
    assert expectation("router", None, "bfloat16").dtypes == ("float32", "bfloat16")
    assert expectation("softmax", FAMILIES["GPT2"], "bfloat16").dtypes == ("bfloat16",)
    assert expectation("norm weight", FAMILIES["Gemma3"], "bfloat16").dtypes == ("float32",)


def test_nothing_is_expected_of_codes():
    """A model whose dtype is no floating-point one is not judged."""
    assert all(expectation(part, None, "int8") is None for part in PARTS)
