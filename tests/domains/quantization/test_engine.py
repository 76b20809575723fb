"""--engine quantize: a run of a quantised variant, made and repeated."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from divergence import LoadOptions, capture, compare, truth
from divergence.domains.quantization.model import chosen, targets_of
from divergence.errors import UsageError
from divergence.recording.engines.load import Loading, load_model
from tests.digests import without_digests

PROMPTS = ["one two three four five", "six seven eight nine"]
WISHES = {"prompts": PROMPTS, "max_new_tokens": 2, "probe": False}


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model("llama", num_blocks=2, hidden=32, dtype="float32")


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    return capture(folder, out=tmp_path_factory.mktemp("plain") / "run", **WISHES)


def quantised(run, out, **options):
    return capture(
        like=run,
        out=out,
        engine="quantize",
        probe=False,
        loading=LoadOptions(engine_options=options),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "w8a8"},
        {"scheme": "w8a8-static", "smooth": 0.5},
        {"scheme": "w4a16-g16", "asymmetric": "weights"},
        {"scheme": "fp8+kv8"},
    ],
    ids=lambda options: options["scheme"],
)
def test_a_quantised_run_is_repeated_bit_for_bit(plain, tmp_path, options):
    """From itself alone: scheme, kept matrices and calibration stand in it."""
    run = quantised(plain, tmp_path / "q", **options)
    note = run.manifest.engine
    assert note.name == "quantize"
    assert note.options["scheme"] == options["scheme"]
    assert "lm_head" in note.facts["kept"]
    again = capture(like=run, out=tmp_path / "again", probe=False)
    assert again.manifest.engine == note
    assert compare(run, again).verdict.kind == "identical"
    verdict = compare(plain, run).verdict
    assert verdict.kind != "identical"
    # no capture like the plain run makes the quantised one again
    assert not [command for command in verdict.next if "localize" in command or "--like" in command]


@pytest.mark.slow
def test_the_truth_of_a_quantised_run_is_that_of_its_scheme(plain, tmp_path):
    """Codes as there, the rest in float64: a run lies within rounding of it, which the truth of the
    floating-point model does not."""
    run = quantised(plain, tmp_path / "q", scheme="w8a8")
    exact = truth(run, out=tmp_path / "truth")
    assert exact.manifest.engine.name == "quantize"
    report = compare(run, exact)
    anchored = [s for s in report.sites if s.pass_ == "anchored" and s.rel_l2 is not None]
    assert max(s.rel_l2 for s in anchored if ".codes" not in s.site) < 1e-5
    assert {s.site for s in anchored if s.site.endswith("mlp.down_proj:in.codes")}
    assert report.verdict.kind == "within_floor"


@pytest.mark.slow
def test_the_truth_quantises_the_cache_however_many_steps_it_makes_at_once(
    folder, tmp_path, answer
):
    """Of many tokens a truth feeds several in one forward: keys and values go through codes there
    too, in the prefill and behind it."""
    run = capture(
        folder,
        out=tmp_path / "q",
        engine="quantize",
        loading=LoadOptions(engine_options={"scheme": "kv8"}),
        **(WISHES | {"max_new_tokens": 10}),
    )
    exact = truth(run, out=tmp_path / "truth")
    report = answer(run, truth=exact, attn_implementation="sdpa")
    assert report.verdict.kind == "within_floor"
    assert report.verdict.side == "neither"
    assert {s.site for s in report.sites if s.site.endswith("layers.1.self_attn:in.k.codes")}


def test_weights_stay_those_of_the_checkpoint(plain, tmp_path):
    """A quantised run tells the weights that it was made of."""
    run = quantised(plain, tmp_path / "q", scheme="w8a8")
    assert run.manifest.model.digest == plain.manifest.model.digest


def test_kept_matrices_run_as_they_are(plain, tmp_path):
    """With every block kept nothing is left to quantise."""
    run = quantised(plain, tmp_path / "q", scheme="w8a8", keep="Linear")
    assert compare(plain, run).verdict.kind == "identical"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "part", "number"),
    [("gpt2", "linear", 8), ("qwen3-moe", "experts", 4), ("bert", "linear", 12)],
)
def test_other_architectures(tiny_model, tmp_path, architecture, part, number):
    """In each architecture as many matrices are quantised as it has."""
    folder = tiny_model(architecture, num_blocks=2)
    run = capture(folder, out=tmp_path / "a", **(WISHES | {"max_new_tokens": 1}))
    q = quantised(run, tmp_path / "q", scheme="w8a8")
    model = load_model(Loading(str(folder))).module
    targets = targets_of(model)
    of_part = [one for one in chosen(targets, []) if one.part == part]
    assert len(of_part) == number
    report = compare(run, q)
    flagged = [s for s in report.sites if s.rel_l2]
    assert flagged, "quantisation changes something"


def test_routers_and_heads_are_kept(tiny_model):
    """Unless a pattern asks for them, or leaves others out."""
    model = load_model(Loading(str(tiny_model("qwen3-moe", num_blocks=2)))).module
    targets = targets_of(model)
    kept = {one.part for one in targets.values()} - {one.part for one in chosen(targets, [])}
    assert kept == {"router", "head"}
    forced = chosen(targets, ["!lm_head", "re:.*self_attn.*"])
    names = {one.name for one in forced}
    assert "lm_head" in names
    assert not any("self_attn" in name for name in names)


def test_names_that_fit_nothing_are_refused(plain, tmp_path):
    """With the nearest name."""
    with pytest.raises(UsageError, match="fits no matrix") as caught:
        quantised(plain, tmp_path / "q", scheme="w8a8", keep="model.layers.0.mlp.down_porj")
    assert "down_proj" in caught.value.hint
    with pytest.raises(UsageError, match="no regular expression"):
        quantised(plain, tmp_path / "q", scheme="w8a8", keep="re:(")
    with pytest.raises(UsageError, match="no scheme 'w7a7'"):
        quantised(plain, tmp_path / "q", scheme="w7a7")


def test_groups_that_do_not_fit_name_the_matrix(plain, tmp_path):
    """A scheme whose groups do not divide a matrix is refused there."""
    with pytest.raises(UsageError, match="groups of 128") as caught:
        quantised(plain, tmp_path / "q", scheme="w4a16")
    assert caught.value.where.startswith("model.layers.0")


def test_weights_that_are_not_finite_are_refused(folder, plain, tmp_path):
    """By the matrix that holds them."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    state = load_file(broken / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.up_proj holds weights"):
        capture(str(broken), like=plain, out=tmp_path / "q", engine="quantize", probe=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"activations_per": "group:16"},
        {"keep": "!lm_head,model.layers.0.mlp.down_proj,re:.*self_attn.(k|v)_proj"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_any_scheme_is_repeated_from_its_run(plain, tmp_path, options):
    """No text of these options is ever opened as a file."""
    run = quantised(plain, tmp_path / "q", scheme="w8a8", **options)
    again = capture(like=run, out=tmp_path / "again", probe=False)
    assert again.manifest.engine == run.manifest.engine
    assert compare(run, again).verdict.kind == "identical"


@pytest.mark.slow
def test_numbers_beyond_calibrated_scales_are_cut_off_by_right_machines_too(
    folder, tmp_path, answer
):
    """Static scales with a zero point: later tokens may lie beyond what calibration saw."""
    seen = capture(
        folder,
        out=tmp_path / "seen",
        engine="quantize",
        loading=LoadOptions(engine_options={"scheme": "w8a8-static", "asymmetric": "activations"}),
        **WISHES,
    )
    said = json.loads((without_digests(seen.path) / "manifest.json").read_text())
    for limits in said["engine"]["calibration"]["limits"].values():
        limits[:] = [limits[0] / 4, limits[1] / 3]
    (seen.path / "manifest.json").write_text(json.dumps(said))
    run = capture(like=seen.path, out=tmp_path / "q", probe=False)
    assert run.manifest.engine.calibration.limits == said["engine"]["calibration"]["limits"]
    verdict = answer(
        run, truth=truth(run, out=tmp_path / "truth"), attn_implementation="sdpa"
    ).verdict
    assert verdict.side == "neither"
    assert verdict.kind in ("within_floor", "identical")
