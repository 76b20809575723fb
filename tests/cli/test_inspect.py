"""`divergence inspect` of a run that holds operators."""

import json

from divergence import capture


def test_inspect_says_in_which_dtype_the_parts_ran(invoke, tiny_model, tmp_path):
    """As text with one column, in JSON under ``audit``, and not where one site is asked for."""
    path = str(tmp_path / "a")
    capture(
        str(tiny_model("llama")),
        out=path,
        prompts=["A bridge."],
        max_new_tokens=1,
        attn_implementation="eager",
        sites=["ops@model.layers.1"],
    )
    code, out, _ = invoke("inspect", path)
    assert code == 0
    assert "precision   each part as expected: bfloat16, float32\n" in out
    _, out, _ = invoke("inspect", path, "--verbose")
    assert "precision  in which dtype each part ran" in out
    assert "  norm statistics   float32            float32 (common practice)" in out
    assert "modeling_llama.py:" in out[out.index("precision  ") :]
    _, out, _ = invoke("inspect", path, "--json")
    rows = {row["part"]: row for row in json.loads(out)["audit"]["rows"]}
    assert rows["softmax"]["reference"] == ["float32"]
    _, out, _ = invoke("inspect", path, "--site", "model.layers.1*")
    assert "precision  " not in out


def test_inspect_of_a_run_without_operators_has_no_audit(invoke, tiny_model, tmp_path):
    """Neither as text nor in JSON."""
    path = str(tmp_path / "a")
    capture(str(tiny_model("llama")), out=path, prompts=["A bridge."], max_new_tokens=1)
    assert "precision  " not in invoke("inspect", path)[1]
    assert "audit" not in json.loads(invoke("inspect", path, "--json")[1])


def test_inspect_of_an_operator_tells_how_it_was_called(invoke, tiny_model, tmp_path):
    """Its name, the line of Python, and of each operand where its value is from."""
    path = str(tmp_path / "a")
    capture(
        str(tiny_model("llama")),
        out=path,
        prompts=["A bridge."],
        max_new_tokens=1,
        sites=["ops@model.layers.1.mlp"],
    )
    code, out, _ = invoke("inspect", path, "--site", "model.layers.1.mlp.down_proj/aten.mm:out")
    assert code == 0
    text = " ".join(out.split())
    assert "operator aten.mm.default called at modeling_llama.py:" in text
    assert "operand self: model.layers.1.mlp/aten.mul:out, bfloat16 " in text
    assert "operand mat2: weight model.layers.1.mlp.down_proj.weight, bfloat16 " in text
    assert "by t()" in text


def test_prompts_are_named_by_what_sets_them_apart(invoke, tiny_model, tmp_path):
    """What all begin and end with, as a template's system text, says nothing of any."""
    path, system = str(tmp_path / "a"), "<|system|> You are a helpful assistant. <|user|> "
    prompts = [f"{system}{text} <|end|><|assistant|>" for text in ("A bridge.", "Snow fell")]
    capture(str(tiny_model("llama")), out=path, prompts=prompts, max_new_tokens=1, probe=False)
    out = invoke("inspect", path, "-v")[1]
    assert "  …'A bridge.'…\n" in out and "  …'Snow fell'…\n" in out
