"""--engine compile: blocks compiled one by one, compared with the eager model."""

import pytest
import torch

from divergence import LoadOptions, capture, compare, truth
from divergence.errors import ModelError, UsageError

WISHES = {"prompts": ["one two", "three"], "max_new_tokens": 3, "probe": False}
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model("llama", num_blocks=3, hidden=16, dtype="float32")


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    return capture(folder, out=tmp_path_factory.mktemp("plain") / "run", **WISHES)


def compiled(run, out, backend="eager", dynamic=True, **options):
    return capture(
        like=run,
        out=out,
        engine="compile",
        probe=False,
        loading=LoadOptions(engine_options={"backend": backend, "dynamic": dynamic}),
        **options,
    )


@pytest.mark.slow
def test_every_block_runs_compiled(plain, tmp_path):
    """Also more of them than torch compiles of one function; outputs are those of the model."""
    import torch._dynamo

    before = torch._dynamo.config.recompile_limit
    run = compiled(plain, tmp_path / "run", dynamic=None)
    assert torch._dynamo.config.recompile_limit == before
    notes = run.manifest.plan.compiled
    assert list(notes) == [f"model.layers.{n}" for n in range(3)]
    assert {note.state for note in notes.values()} == {"compiled"}
    assert all(note.num_recompilations > before for note in notes.values())
    assert not any(note.graph_breaks for note in notes.values())
    assert run.manifest.plan.passes == ["free", "anchored"]
    report = compare(plain, run)
    assert report.verdict.kind == "identical"
    assert {line.check for line in report.preflight if line.status != "same"} == {"code", "engine"}


@pytest.mark.slow
def test_a_graph_break_is_recorded(plain, tmp_path):
    """By its block, with the compiler's reason."""

    def prepare(model):
        layer = model.model.layers[1]
        inner = layer.mlp.forward

        def broken(x):
            torch._dynamo.graph_break()
            return inner(x)

        layer.mlp.forward = broken

    run = compiled(plain, tmp_path / "run", prepare=prepare)
    breaks = run.manifest.plan.compiled["model.layers.1"].graph_breaks
    assert breaks
    assert any("graph_break" in text for text in breaks)


@pytest.mark.slow
def test_a_planted_fault_is_found_in_its_block(plain, tmp_path):
    """In compiled code as in eager code."""
    run = compiled(plain, tmp_path / "run", plants=["model.layers.1.mlp:out=scale:1.05"])
    verdict = compare(plain, run).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", "model.layers.1:out")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backend": "inducto"}, "no such backend"),
        ({"mode": "max-autotun"}, "no such mode"),
        ({"mod": "x"}, "no such option"),
    ],
)
def test_options_that_torch_does_not_know(folder, tmp_path, options, match):
    """They are refused with the nearest one."""
    with pytest.raises(UsageError, match=match) as caught:
        capture(
            folder,
            out=tmp_path / "run",
            engine="compile",
            loading=LoadOptions(engine_options=options),
            **WISHES,
        )
    assert "did you mean" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_without_a_compiler(folder, tmp_path, monkeypatch):
    """What is to be installed is said."""

    def none(*args):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    with pytest.raises(ModelError, match=r"needs a C\+\+ compiler") as caught:
        capture(folder, out=tmp_path / "run", engine="compile", **WISHES)
    assert "install g++" in caught.value.hint


def test_a_model_without_blocks(tiny_model, tmp_path, monkeypatch):
    """There is nothing to compile block by block."""
    monkeypatch.setattr("divergence.recording.engines.sessions.blocks_of", lambda model: [])
    with pytest.raises(UsageError, match="no repeated blocks to compile"):
        capture(
            tiny_model("llama"),
            out=tmp_path / "run",
            engine="compile",
            loading=LoadOptions(engine_options={"backend": "eager"}),
            **WISHES,
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as inductor is imported
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductor_and_eager_differ_by_rounding(tiny_model, tmp_path, architecture, dtype):
    """And no side is wrong by the truth."""
    folder = tiny_model(architecture, num_blocks=3, dtype=dtype)
    a = capture(folder, out=tmp_path / "a", **WISHES)
    b = compiled(a, tmp_path / "b", backend="inductor")
    right = truth(a, out=tmp_path / "truth")
    report = compare(a, b, truth=right)
    assert report.verdict.kind == "within_floor"
    assert report.verdict.side == "neither"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fault_in_compiled_code_is_found(tiny_model, tmp_path):
    """Another epsilon in one norm, clearly beyond what bfloat16 rounds: its block, its side."""
    folder = tiny_model("llama", num_blocks=3, dtype="bfloat16")
    a = capture(folder, out=tmp_path / "a", **WISHES)

    def prepare(model):
        model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.2

    b = compiled(a, tmp_path / "b", backend="inductor", prepare=prepare)
    verdict = compare(a, b, truth=truth(a, out=tmp_path / "truth")).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", "model.layers.1:out")
    assert verdict.side == "candidate"
