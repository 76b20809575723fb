"""ONNX Runtime against transformers: healthy pairs, planted faults, what is told of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import numpy as np  # noqa: E402
from onnx import numpy_helper  # noqa: E402

from divergence.comparison.api import compare  # noqa: E402
from divergence.errors import ModelError, UsageError  # noqa: E402
from divergence.recording.api import capture, truth  # noqa: E402
from divergence.run.reader import Run  # noqa: E402
from tests.models import onnx_graphs  # noqa: E402

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Hello there"]
HEALTHY = ("identical", "within_floor")
RESHAPED = ("bert", "gpt2")
QUICK: dict[str, Any] = {"probe": False}


@pytest.fixture(scope="session")
def graph_of(tmp_path_factory, tiny_model) -> Callable[[str], Path]:
    """``graph_of("llama")`` → an ONNX file with config and tokenizer beside it."""
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            checkpoint = tiny_model(**onnx_graphs.MODELS[name])
            built[name] = onnx_graphs.build(
                name, checkpoint, tmp_path_factory.mktemp(f"onnx-{name}-")
            )
        return built[name]

    return build


@pytest.fixture(scope="session")
def recorded(tmp_path_factory, tiny_model) -> Callable[..., Run]:
    """transformers' run of a model."""
    runs: dict[str, Run] = {}

    def make(name: str, **options: Any) -> Run:
        options = {"sites": "modules", "max_new_tokens": 3, "prompts": PROMPTS} | options
        key = repr((name, sorted(options.items())))
        if key not in runs:
            out = tmp_path_factory.mktemp("transformers-") / "run"
            checkpoint = tiny_model(**onnx_graphs.MODELS[name])
            runs[key] = capture(checkpoint, out=out, **options, **QUICK)
        return runs[key]

    return make


@pytest.fixture
def again(tmp_path) -> Callable[..., Run]:
    """``again(run, file)``: the run repeated by ONNX Runtime."""
    numbers: Iterator[int] = iter(range(99))

    def run(like: Run, file: Path | None, **options: Any) -> Run:
        out = tmp_path / f"run-{next(numbers)}"
        return capture(file, like=like, out=out, **({"engine": "onnx"} | QUICK | options))

    return run


def scope(node: Any) -> str:
    return next((p.value for p in node.metadata_props if p.key.endswith("name_scopes")), "")


def node_of(model: Any, path: str, operator: str) -> Any:
    return next(n for n in model.graph.node if n.op_type == operator and f"'{path}'" in scope(n))


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


def test_the_sites_are_those_of_transformers(graph_of, recorded, again):
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


@pytest.mark.parametrize("optimization", ["disable", "basic", "extended"])
def test_levels_of_optimisation(optimization, graph_of, recorded, again):
    run = recorded("llama", sites="blocks")
    options = {"optimization": optimization, "threads": 1}
    other = again(run, graph_of("llama"), engine_options=options)
    assert other.manifest.engine.options["optimization"] == optimization
    assert compare(run, other).verdict.kind in HEALTHY


def test_a_batch_and_a_repeat(graph_of, recorded, again):
    run = recorded("qwen3", batch=True, sites="blocks")
    other = again(run, graph_of("qwen3"), repeat=2)
    assert compare(run, other).verdict.kind in HEALTHY
    assert other.manifest.repeatability.num_different == 0


def test_a_run_without_a_cache_has_the_same_shapes(graph_of, recorded, again):
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


def test_the_other_way_round_and_without_tokens_to_repeat(graph_of, recorded, tiny_model, tmp_path):
    """What ONNX Runtime ran by itself is what transformers would run, and can be repeated by it."""
    run = recorded("llama", sites="blocks")
    own = capture(
        graph_of("llama"), engine="onnx", out=tmp_path / "own", prompts=PROMPTS, max_new_tokens=3,
        **QUICK,
    )  # fmt: skip
    for one, two in zip(run.manifest.tokens.samples, own.manifest.tokens.samples, strict=True):
        assert (one.prompt_ids, one.generated_ids) == (two.prompt_ids, two.generated_ids)
    checkpoint = tiny_model(**onnx_graphs.MODELS["llama"])
    back = capture(checkpoint, like=own, engine="transformers", out=tmp_path / "back", **QUICK)
    assert back.manifest.plan.passes == ["free", "anchored"]
    assert compare(own, back).verdict.kind in HEALTHY


def scaled_weight(model: Any) -> None:
    taken = node_of(model, "model.layers.1.mlp.down_proj", "MatMul").input[1]
    weight = next(one for one in model.graph.initializer if one.name == taken)
    values = numpy_helper.to_array(weight).copy()
    values[:, :8] *= 1.05
    weight.raw_data = values.tobytes()


def wrong_epsilon(model: Any) -> None:
    add = node_of(model, "model.layers.1.post_attention_layernorm", "Add")
    model.graph.initializer.append(numpy_helper.from_array(np.array(1e-2, np.float32), "other"))
    add.input[1] = "other"


def other_function(model: Any) -> None:
    node_of(model, "model.layers.2.mlp.act_fn", "Sigmoid").op_type = "HardSigmoid"


def wrong_rotary_table(model: Any) -> None:
    table = next(one for one in model.graph.initializer if "inv_freq" in one.name)
    table.raw_data = (numpy_helper.to_array(table) * np.float32(1.02)).tobytes()


@pytest.fixture
def damaged(graph_of, tmp_path) -> Callable[[Callable[[Any], None]], Path]:
    """The llama's graph with something done to it."""

    def make(change: Callable[[Any], None]) -> Path:
        import shutil

        shutil.copytree(graph_of("llama").parent, tmp_path / "damaged")
        path = tmp_path / "damaged" / "model.onnx"
        model = onnx.load(path)
        change(model)
        onnx.save(model, path)
        return path

    return make


@pytest.fixture(scope="session")
def what_is_right(recorded, tmp_path_factory) -> Run:
    return truth(recorded("llama", sites="blocks"), out=tmp_path_factory.mktemp("truth-") / "run")


@pytest.mark.parametrize(
    ("change", "site"),
    [
        (wrong_epsilon, "model.layers.1:out"),
        (other_function, "model.layers.2:out"),
        (wrong_rotary_table, "model.rotary_emb:out"),
    ],
)
def test_a_fault_in_the_graph_is_found(change, site, damaged, recorded, again, what_is_right):
    """The block, and with a truth the side."""
    run = recorded("llama", sites="blocks")
    other = again(run, damaged(change))
    for right in (None, what_is_right):
        verdict = compare(run, other, truth=right).verdict
        assert verdict.kind == "localized"
        assert verdict.onset is not None
        assert verdict.onset.site == site
        assert verdict.side == (None if right is None else "candidate")


def test_other_weights_are_named_and_found_in_their_block(damaged, recorded, again):
    run = recorded("llama", sites="blocks")
    other = again(run, damaged(scaled_weight))
    verdict = compare(run, other).verdict
    assert verdict.kind == "incomparable"
    assert "model.layers.1.mlp.down_proj.weight" in str(verdict.evidence)
    forced = compare(run, other, force=True).verdict
    assert forced.onset is not None
    assert forced.onset.site == "model.layers.1:out"


def without_names(model: Any) -> None:
    """As of an exporter that tells modules and no parameters."""
    for node in model.graph.node:
        kept = [one for one in node.metadata_props if not one.key.endswith("fx_node")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)


def test_weights_that_are_not_told_are_no_other_weights(damaged, recorded, again):
    run = recorded("llama", sites="blocks")
    other = again(run, damaged(without_names))
    report = compare(run, other)
    assert report.verdict.kind in HEALTHY
    weights = next(line for line in report.preflight if line.check == "weights")
    assert weights.status == "unknown"
    assert "not every engine tells its weights" in weights.detail
    assert "constants have no parameter's name" in other.manifest.engine.facts["weights"]


def without_modules(model: Any) -> None:
    for node in model.graph.node:
        del node.metadata_props[:]


def test_a_file_without_modules_has_a_site_for_each_value(damaged, recorded, again):
    run = recorded("llama", sites="blocks")
    notes: list[str] = []
    other = again(
        run, damaged(without_modules), sites="modules",
        progress=lambda event, done, total, text: notes.append(text),
    )  # fmt: skip
    assert other.manifest.plan.passes == ["free"]
    assert any("does not tell the blocks" in note for note in notes)
    report = compare(run, other)
    assert report.verdict.kind in (*HEALTHY, "undetermined")
    sites = {record.site for record in other.records}
    assert "embedding:out" in sites and ".:out" in sites


def scopes_in_names(model: Any) -> None:
    """As older exporters write them."""
    import ast

    without_names(model)
    for number, node in enumerate(model.graph.node):
        parts = ast.literal_eval(scope(node) or "['', '']")[1:-1]
        short = [one.removeprefix(f"{before}.") for before, one in zip(["", *parts], parts)]  # noqa: B905
        node.name = "/" + "/".join([*short, f"{node.op_type}_{number}"])
        del node.metadata_props[:]


def test_modules_in_the_names_of_nodes(damaged, recorded, again):
    run = recorded("llama", sites="blocks")
    other = again(run, damaged(scopes_in_names))
    report = compare(run, other)
    assert other.manifest.plan.passes == ["free", "anchored"]
    assert report.verdict.kind in HEALTHY, report.verdict.summary


def test_weights_beside_the_file(damaged, recorded, again):
    def apart(model: Any) -> None:
        onnx.external_data_helper.convert_model_to_external_data(
            model, location="model.onnx.data", size_threshold=1024
        )

    run = recorded("llama", sites="blocks")
    path = damaged(apart)
    assert path.stat().st_size < (path.parent / "model.onnx.data").stat().st_size
    report = compare(run, again(run, path))
    assert report.verdict.kind in HEALTHY
    assert next(one for one in report.preflight if one.check == "weights").status == "same"
    (path.parent / "model.onnx.data").unlink()
    with pytest.raises(ModelError, match="the weights of the ONNX file are not there"):
        again(run, path)


def wants_a_cache(model: Any) -> None:
    """Keys of earlier tokens, before those of the first block."""
    graph = model.graph
    widened = {n.input[0] for n in graph.node if n.op_type == "Expand" and "self_attn" in scope(n)}
    wide = next(n for n in graph.node if n.op_type == "Unsqueeze" and n.output[0] in widened)
    keys, name = wide.input[0], "past_key_values.0.key"
    place = list(graph.node).index(wide)
    joined = onnx.helper.make_node("Concat", [name, keys], ["joined"], axis=2)
    joined.metadata_props.extend(wide.metadata_props)
    wide.input[0] = "joined"
    graph.node.insert(place, joined)
    shape = ["batch", 2, "past", next(
        one for one in graph.value_info if one.name == keys
    ).type.tensor_type.shape.dim[3].dim_value]  # fmt: skip
    graph.input.append(onnx.helper.make_tensor_value_info(name, 1, shape))


def test_a_cache_that_is_wanted_is_empty(damaged, recorded, again):
    run = recorded("llama", sites="blocks")
    assert compare(run, again(run, damaged(wants_a_cache))).verdict.kind in HEALTHY


def test_a_file_without_a_config(graph_of, recorded, again, tmp_path):
    path = tmp_path / "alone.onnx"
    path.write_bytes(graph_of("llama").read_bytes())
    run = recorded("llama", sites="blocks")
    assert compare(run, again(run, path)).verdict.kind in HEALTHY


def test_an_input_that_no_prompt_gives(damaged, recorded, again):
    def more(model: Any) -> None:
        model.graph.input.append(onnx.helper.make_tensor_value_info("pixel_values", 1, [1, 3]))

    with pytest.raises(ModelError, match="wants the input pixel_values"):
        again(recorded("llama", sites="blocks"), damaged(more))


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/hostname", ""])
def test_weights_outside_the_folder_are_not_read(place, damaged, recorded, again):
    path = damaged(lambda model: None)
    model = onnx.load(path)
    weight = max(model.graph.initializer, key=lambda one: len(one.raw_data))
    weight.raw_data = b""
    weight.data_location = 1
    weight.external_data.add(key="location", value=place)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="outside the model's folder"):
        again(recorded("llama", sites="blocks"), path)


def test_a_broken_file(graph_of, recorded, again, tmp_path):
    run = recorded("llama", sites="blocks")
    data = graph_of("llama").read_bytes()
    for number, content in enumerate((b"", b"no graph at all", data[: len(data) // 2])):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read as an ONNX file"):
            again(run, path)
    with pytest.raises(ModelError, match="does not exist"):
        again(run, tmp_path / "nothing.onnx")
    with pytest.raises(ModelError, match="is a directory"):
        again(run, tmp_path)


def test_a_file_of_another_model(graph_of, recorded, again, tmp_path, tiny_model):
    """Its config tells; without one the comparison does."""
    checkpoint = tiny_model("llama", dtype="float32", num_blocks=2)
    with pytest.raises(ModelError, match=r"3 blocks, and the config in .* tells of 2"):
        again(
            recorded("llama", sites="blocks"), graph_of("llama"),
            engine_options={"tokenizer": str(checkpoint)},
        )  # fmt: skip
    run = recorded("llama", sites="blocks")
    assert compare(run, again(run, graph_of("qwen3"))).verdict.kind == "incomparable"


def test_kernels_that_the_provider_lacks(graph_of, recorded, again):
    with pytest.raises(ModelError, match="CPUExecutionProvider has no kernel"):
        again(recorded("llama-bfloat16", sites="blocks"), graph_of("llama-bfloat16"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"provider": "cudaa"}, "there is no such execution provider"),
        ({"provider": "cann"}, "has no CANNExecutionProvider"),
        ({"optimization": "al"}, "there is no such level"),
        ({"provder": "cpu"}, "has no such option"),
        ({"threads": "many"}, "threads"),
    ],
)
def test_unknown_options(options, words, graph_of, recorded, again):
    with pytest.raises(UsageError, match=words) as caught:
        again(recorded("llama", sites="blocks"), graph_of("llama"), engine_options=options)
    assert caught.value.hint


def test_providers_are_listed(graph_of, recorded, again):
    with pytest.raises(UsageError) as caught:
        again(recorded("llama", sites="blocks"), graph_of("llama"),
              engine_options={"provider": "cudaa"})  # fmt: skip
    assert "did you mean cuda?" in str(caught.value.hint)
    assert "CPUExecutionProvider" in str(caught.value.hint)


def test_what_a_graph_cannot_do(graph_of, recorded, again):
    run, file = recorded("llama", sites="blocks"), graph_of("llama")
    with pytest.raises(UsageError, match="operators"):
        again(run, file, sites="ops@model.layers.1")
    with pytest.raises(UsageError, match="--plant"):
        again(run, file, plants=["model.layers.1:out=scale:1.1"])
    with pytest.raises(UsageError, match="prepare: the engine onnx has none of it"):
        again(run, file, prepare=lambda module: None)
    notes: list[str] = []
    other = again(run, file, escalate=True, whole=True,
                  progress=lambda event, done, total, text: notes.append(text))  # fmt: skip
    assert other.manifest.plan.passes == ["free", "anchored"]
    assert any(note.startswith("no whole pass") for note in notes)


def test_packages_that_are_missing_or_old(graph_of, recorded, again, monkeypatch):
    import sys

    import onnxruntime

    run, file = recorded("llama", sites="blocks"), graph_of("llama")
    monkeypatch.setattr(onnxruntime, "__version__", "1.9.0")
    with pytest.raises(ModelError, match=r"onnxruntime 1\.20 or newer, and this is 1\.9\.0"):
        again(run, file)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match="needs onnxruntime") as caught:
        again(run, file)
    assert "divergence-debug[onnx]" in str(caught.value.hint)
