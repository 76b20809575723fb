"""Models that run through torch.compile: recorded, and what became of them is said."""

import shutil

import pytest
import torch

from divergence import capture, compare

PROMPT = ["one two"]
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model("llama", num_blocks=3, hidden=16, dtype="float32")


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    """The same model, not compiled."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return capture(folder, out=out, prompts=PROMPT, max_new_tokens=2, probe=False)


def captured(folder, out, prepare, said=None, **options):
    said = [] if said is None else said
    options = {"prompts": PROMPT, "max_new_tokens": 2, "probe": False} | options
    return capture(
        folder,
        out=out,
        prepare=prepare,
        progress=lambda event, done, total, detail: event == "note" and said.append(detail),
        **options,
    )


def compile_mlps(model, backend="eager"):
    for layer in model.model.layers:
        layer.mlp.compile(backend=backend)


@pytest.mark.slow
def test_compiled_blocks_are_recorded_whole(folder, plain, tmp_path):
    """Hooks stand around the compiled call: one graph a block, the sites and bits of the plain
    model, and a capture that repeats another anchors them."""

    def prepare(model):
        for layer in model.model.layers:
            layer.compile(backend="eager")

    said = []
    run = captured(folder, tmp_path / "a", prepare, said)
    assert [r.site for r in run.records] == [r.site for r in plain.records]
    assert compare(plain, run).verdict.kind == "identical"
    note = run.manifest.plan.compiled["model.layers.1"]
    assert (note.backend, note.state) == ("eager", "compiled")
    assert not any("torch.compile" in text for text in said)
    again = captured(folder, tmp_path / "b", prepare, like=plain, prompts=(), max_new_tokens=None)
    assert again.manifest.plan.passes == ["free", "anchored"]
    assert compare(plain, again).verdict.kind == "identical"


@pytest.mark.slow
def test_sites_inside_a_compiled_module_are_recorded(folder, plain, tmp_path):
    """Torch does not trace the hooks; that they divide the graph is said."""
    said = []
    run = captured(
        folder,
        tmp_path / "a",
        lambda model: model.model.layers[1].mlp.compile(backend="eager"),
        said,
        sites=["blocks", "model.layers.1.mlp.*"],
        max_new_tokens=1,
    )
    sites = {record.site for record in run.records}
    assert {"model.layers.1.mlp.down_proj:out", "model.layers.1.mlp.up_proj:in"} <= sites
    assert any("its graph is divided" in text for text in said)
    assert run.manifest.plan.compiled["model.layers.1.mlp"].state != "eager"


@pytest.mark.slow
def test_wrappers_of_torch_compile_leave_names_as_they_are(folder, plain, tmp_path):
    """``torch.compile(module)`` in a module's place: no ``_orig_mod`` in sites or weights."""

    def prepare(model):
        model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")

    run = captured(folder, tmp_path / "a", prepare)
    assert run.manifest.model.digests == plain.manifest.model.digests
    assert [r.site for r in run.records] == [r.site for r in plain.records]
    assert run.manifest.plan.compiled["model.layers.1.mlp"].state == "compiled"
    assert run.manifest.model.code["LlamaMLP"].compiled == "torch.compile (eager) (1 of 3)"
    line = next(line for line in compare(plain, run).preflight if line.check == "code")
    assert line.status == "differs"
    assert "torch.compile (eager)" in line.detail


@pytest.mark.slow
def test_a_compiled_model_may_be_returned(tiny_model, tmp_path):
    """``prepare=torch.compile`` compiles the whole model; names stay those of the model."""
    folder = tiny_model("llama", num_blocks=1, hidden=16, dtype="float32")
    site = "model.norm:out"
    a, b = (
        captured(folder, tmp_path / name, prepare, sites=[site], max_new_tokens=1)
        for name, prepare in (
            ("a", None),
            ("b", lambda model: torch.compile(model, backend="eager")),
        )
    )
    assert {record.site for record in b.records} == {site}
    assert b.manifest.plan.compiled["."].num_graphs > 0
    place = ("free", 0, 0, site)
    assert torch.equal(a.read(a.find(place)), b.read(b.find(place)))


def test_a_limit_of_recompilations_is_said(folder, tmp_path):
    """Beyond it calls run eager, which torch only logs."""
    import torch._dynamo

    def prepare(model):
        for number, layer in enumerate(model.model.layers):
            layer.mlp.act_fn.number = [None] * number  # a guard that each block fails
            layer.mlp.act_fn.forward = numbered.__get__(layer.mlp.act_fn)
            layer.mlp.compile(backend="eager")

    def numbered(self, x):
        return torch.nn.functional.silu(x) + len(self.number) * 0

    said = []
    with torch._dynamo.config.patch(recompile_limit=1):
        run = captured(folder, tmp_path / "a", prepare, said)
    note = run.manifest.plan.compiled["model.layers.2.mlp"]
    assert note.state == "partly"
    assert "recompile_limit (1) was reached" in note.reason
    assert any("ran eager in part" in text and "recompile_limit" in text for text in said)


def test_what_was_never_compiled_is_said(folder, tmp_path):
    """A compiler that is switched off (TORCHDYNAMO_DISABLE, a stance) leaves no other trace."""
    said = []
    with torch.compiler.set_stance("force_eager"):
        run = captured(folder, tmp_path / "a", compile_mlps, said)
    assert {note.state for note in run.manifest.plan.compiled.values()} == {"eager"}
    assert any("but ran eager" in text for text in said)


@pytest.mark.slow
def test_another_compiler_is_named(folder, plain, tmp_path):
    """The backend stands in the manifest and in preflight."""
    run = captured(folder, tmp_path / "a", lambda model: compile_mlps(model, "aot_eager"))
    assert run.manifest.plan.compiled["model.layers.0.mlp"].backend == "aot_eager"
    assert compare(plain, run).verdict.kind in ("identical", "within_floor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the code that inductor imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductor_is_recorded(folder, plain, tmp_path):
    """Generated kernels: rounded otherwise, within the floor."""
    run = captured(folder, tmp_path / "a", lambda model: compile_mlps(model, "inductor"))
    assert run.manifest.plan.compiled["model.layers.0.mlp"].state == "compiled"
    assert compare(plain, run).verdict.kind in ("identical", "within_floor")


def test_an_ordinary_model_has_nothing_of_it(plain):
    """No watch, no note."""
    assert plain.manifest.plan.compiled == {}
