"""Every pass and every kind of site, of the engines that make them all."""

import pytest

from divergence import BatchOptions, LoadOptions, RecordOptions, capture, compare

pytestmark = pytest.mark.usefixtures("fresh_compiler")
MLP = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("transformers", {}),
        pytest.param("quantize", {"scheme": "w8a8-static", "smooth": 0.5}, marks=pytest.mark.whole),
        pytest.param("compile", {"backend": "eager"}, marks=pytest.mark.slow),
    ],
)
def test_every_pass_and_site(engine, options, tiny_model, tmp_path):
    """Blocks, modules in them and operators; one machine repeats itself in all of it, bit for
    bit."""
    folder = tiny_model("llama", num_blocks=2, hidden=16, dtype="bfloat16")
    a = capture(
        folder,
        out=tmp_path / "a",
        engine=engine,
        loading=LoadOptions(engine_options=options),
        batching=BatchOptions(batch=True),
        recording=RecordOptions(whole=True),
        sites=["modules", f"ops@{MLP}"],
        prompts=["one two", "three"],
        max_new_tokens=3,
        probe=False,
    )
    b = capture(
        like=a, out=tmp_path / "b", recording=RecordOptions(escalate=True, whole=True), probe=False
    )
    assert b.manifest.engine.name == engine
    assert b.manifest.plan.passes == ["free", "anchored", "escalated", "whole"]
    for run, with_operators in ((a, ["free"]), (b, ["anchored", "escalated"])):
        for pass_ in run.manifest.plan.passes:
            seen = [one for one in run.records if one.pass_ == pass_]
            assert {"model.layers.1:out", f"{MLP}.act_fn:out"} <= {one.site for one in seen}
            operators = [one.site for one in seen if one.call is not None]
            assert bool(operators) == (pass_ in with_operators), pass_
            assert all(site.startswith(MLP) for site in operators)
    assert compare(a, b).verdict.kind == "identical"
