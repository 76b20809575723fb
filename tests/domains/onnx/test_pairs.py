"""ONNX Runtime against transformers: healthy pairs, whatever is recorded of them and how."""

from functools import partial

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from divergence import capture, compare, truth
from divergence.errors import ModelError
from tests.models import onnx_graphs

HEALTHY = ("identical", "within_floor")
RESHAPED = ("bert", "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "llama-float16", "qwen3", "qwen3-float16", "gpt2", "bert"]
)
def test_healthy_pairs_raise_no_alarm(name, graph_of, recorded, again):
    """Every site that both have, free and anchored: no more than rounding."""
    run = recorded(name)
    other = again(run, graph_of(name))
    report = compare(run, other)
    assert report.verdict.kind in HEALTHY, report.verdict.summary
    assert other.manifest.plan.passes == ["free", "anchored"]
    weights = next(line for line in report.preflight if line.check == "weights")
    assert weights.status == ("differs" if name == "bert" else "same")  # one name of a tied one
    limit = 3e-3 if "16" in name else 1e-5
    blocks = [path for path, note in run.manifest.plan.modules.items() if note.role == "block"]
    for path in blocks:
        seen = [site for site in report.sites if site.site == f"{path}:out"]
        assert {site.pass_ for site in seen} == {"free", "anchored"}
        anchored = [site.rel_l2 for site in seen if site.pass_ == "anchored"]
        print(f"{name:14} {path:22} anchored rel L2 {max(anchored):.1e}")
        assert max(anchored) < limit
    for record in other.records:
        one = run.find((record.pass_, record.sample, record.step, record.site))
        if one is not None:
            # of two reshapes in a row the exporter leaves one, in the inner module
            assert one.shape == record.shape or name in RESHAPED, record.site
            assert one.positions == record.positions, record.site


@pytest.mark.slow
def test_the_sites_are_those_of_transformers(graph_of, recorded, again):
    """A graph's sites have the names, kinds and roles that transformers gives."""
    run = recorded("llama")
    other = again(run, graph_of("llama"))
    ours, theirs = ({record.site for record in one.records} for one in (run, other))
    assert theirs <= ours
    lacking = {site.rpartition(":")[2] for site in ours - theirs}
    assert all("mask" in p or "position" in p or p in ("in", "out.1") for p in lacking), lacking
    notes = run.manifest.plan.modules
    for path, note in other.manifest.plan.modules.items():
        assert (note.kind, note.role) == (notes[path].kind, notes[path].role)
    assert other.manifest.engine is not None
    assert other.manifest.engine.name == "onnx"
    assert other.manifest.engine.facts["provider"] == "CPUExecutionProvider"
    assert other.manifest.engine.facts["cache"].startswith("none")
    lines = compare(run, other).preflight
    assert [line.check for line in lines if line.status == "differs"] == ["engine"]
    assert [line.check for line in lines if line.status == "unknown"] == ["attention"]


@pytest.mark.parametrize("optimization", ["disable", "basic", "extended"])
def test_levels_of_optimisation(optimization, graph_of, recorded, again):
    """At every level of the runtime's optimisation the run is healthy."""
    run = recorded("llama", sites="blocks")
    options = {"optimization": optimization, "threads": 1}
    other = again(run, graph_of("llama"), engine_options=options)
    assert other.manifest.engine.options["optimization"] == optimization
    assert compare(run, other).verdict.kind in HEALTHY


@pytest.mark.slow
def test_a_batch_and_a_repeat(graph_of, recorded, again):
    """A batched run is repeated by the runtime, which repeats itself."""
    run = recorded("qwen3", batch=True, sites="blocks")
    other = again(run, graph_of("qwen3"), repeat=2)
    assert compare(run, other).verdict.kind in HEALTHY
    assert other.manifest.repeatability.num_different == 0


@pytest.mark.slow
def test_a_run_without_a_cache_has_the_same_shapes(graph_of, recorded, again):
    """Whole sequences are compared position by position."""
    run = recorded("llama", sites="blocks", use_cache=False)
    other = again(run, graph_of("llama"))
    assert other.manifest.plan.passes == ["free", "anchored"]
    assert compare(run, other).verdict.kind in HEALTHY
    for record in (one for one in other.records if one.pass_ == "free"):
        one = run.find((record.pass_, record.sample, record.step, record.site))
        assert one is not None
        assert one.shape == record.shape, record.site
        if one.positions is not None:  # the model's own head is asked for one position alone
            assert one.positions == record.positions


def test_nothing_fetched_but_the_logits(graph_of, recorded, again):
    """What ONNX Runtime makes of the graph as it is."""
    run = recorded("llama", sites="blocks")
    other = again(run, graph_of("llama"), hooks=False)
    assert {record.site for record in other.records} == {".:out"}
    assert other.manifest.engine.facts["values fetched"].startswith("0,")
    for site in compare(run, other).sites:
        assert site.rel_l2 is not None and site.rel_l2 < 1e-5


@pytest.mark.slow
def test_the_other_way_round_and_without_tokens_to_repeat(graph_of, recorded, tiny_model, tmp_path):
    """What ONNX Runtime ran by itself is what transformers would run, and can be repeated by it."""
    run = recorded("llama", sites="blocks")
    own = capture(
        graph_of("llama"),
        engine="onnx",
        out=tmp_path / "own",
        max_new_tokens=3,
        probe=False,
        prompts=[sample.text for sample in run.manifest.tokens.samples],
    )
    for one, two in zip(run.manifest.tokens.samples, own.manifest.tokens.samples, strict=True):
        assert (one.prompt_ids, one.generated_ids) == (two.prompt_ids, two.generated_ids)
    checkpoint = tiny_model(**onnx_graphs.MODELS["llama"])
    back = capture(checkpoint, like=own, engine="transformers", out=tmp_path / "back", probe=False)
    assert back.manifest.plan.passes == ["free", "anchored"]
    assert compare(own, back).verdict.kind in HEALTHY


@pytest.mark.slow
def test_what_transformers_cannot_load_of_it(graph_of, recorded, again, tiny_model, tmp_path):
    """The run names the file: of a truth the user names the model that the file was made from."""
    other = again(recorded("llama", sites="blocks"), graph_of("llama"))
    for repeat in (truth, partial(capture, engine="transformers", probe=False)):
        with pytest.raises(ModelError, match=r"model\.onnx is a file") as caught:
            repeat(**{"run" if repeat is truth else "like": other}, out=tmp_path / "no")
        assert "was made from it by the engine onnx" in caught.value.where
        assert "--model DIR" in caught.value.hint
    checkpoint = tiny_model(**onnx_graphs.MODELS["llama"])
    right = truth(other, model=checkpoint, out=tmp_path / "truth")
    back = capture(checkpoint, like=other, engine="transformers", out=tmp_path / "b", probe=False)
    assert compare(other, back, truth=right).verdict.side == "neither"
