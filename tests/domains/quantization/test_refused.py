"""quantize(): what cannot be is refused before the work, with what to try; and odd input."""

import pytest
import torch

from divergence import Run, capture, compare, quantize, truth
from divergence.domains.quantization import quantize as alone
from divergence.domains.quantization.quantize import _Numbers, _statistics
from divergence.errors import RunExistsError, UsageError


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model("llama", num_blocks=2, hidden=32, dtype="float32")


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    return made(folder, tmp_path_factory.mktemp("plain") / "run")


def made(folder, out, prompts=("one two three", "the cat sat"), **options):
    return capture(folder, out=out, prompts=prompts, max_new_tokens=2, probe=False, **options)


@pytest.mark.slow
def test_static_scales_are_known_of_what_is_kept_too(plain):
    """--each quantises the head as well, which the scheme keeps."""
    found = quantize(plain, scheme="w8a8-static", smooth=0.5, target=1e-4)
    head = next(one for one in found.matrices if one.name == "lm_head")
    assert not head.by_default
    assert head.cost.kl_mean > 0
    assert found.policy.measured <= 1e-4


@pytest.mark.slow
def test_pads_are_no_calibration(folder, plain, tmp_path):
    """Limits are those of the prompts' own tokens."""
    limits = []
    for name, run in (("a", plain), ("b", made(folder, tmp_path / "padded", pad_left=3))):
        quantize(run, scheme="w8a8-static", out=tmp_path / name)
        limits.append(Run.open(tmp_path / name).manifest.engine.calibration)
    assert limits[0] == limits[1]


@pytest.mark.slow
def test_expressions_come_in_any_order(plain, tmp_path):
    """Names and expressions together keep what any of them names."""
    keep = ["re:.*down_pro{1,2}j", "model.layers.0", "!lm_head", "re:.*up_proj"]
    found = quantize(plain, scheme="w8a8", keep=keep, out=tmp_path / "q")
    assert found.num_quantized == 5 + 1  # the head, which is kept otherwise
    assert Run.open(tmp_path / "q").manifest.engine.facts["quantised"] == "6 matrices"
    assert any("--keep model.layers.0" in command for command in found.next)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "kv8", "each": True}, "quantises no matrix"),
        ({"scheme": "w8a8+kv8", "target": 1e-9}, "cannot be held"),
        ({"keep": ["Linear"]}, "nothing is left to quantise"),
    ],
)
def test_what_says_nothing_is_refused(plain, options, words):
    """An option that would be without effect is an error."""
    with pytest.raises(UsageError, match=words):
        quantize(plain, **options)


def test_a_cache_that_is_not_there_is_not_quantised(folder, tiny_model, tmp_path):
    """A run without a cache, and an encoder, have no keys and values."""
    bare = made(folder, tmp_path / "bare", use_cache=False)
    with pytest.raises(UsageError, match="without a cache"):
        quantize(bare, scheme="kv8")
    encoder = capture(
        tiny_model("bert", num_blocks=2), out=tmp_path / "bert", prompts=["one two"], probe=False
    )
    with pytest.raises(UsageError, match="no keys and values"):
        quantize(encoder, scheme="kv8")


def test_keys_and_values_are_no_matrices(plain, invoke):
    """A scheme of the cache alone quantises no weight, and says what it does."""
    lines = invoke("quantize", plain.path, "--scheme", "kv8")[1].splitlines()
    assert "quantised   keys and values" in lines


def test_a_run_that_exists_is_told_before_the_work(plain, tmp_path):
    """Nothing is loaded before the output's place is known to be free."""
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine").touch()
    told = []
    with pytest.raises(RunExistsError):
        quantize(plain, out=tmp_path / "q", progress=lambda *it: told.append(it))
    with pytest.raises(RunExistsError):
        quantize(plain, out=plain.path, force=True, progress=lambda *it: told.append(it))
    assert told == []


def test_commands_name_no_folder_that_is_gone(folder):
    """What was captured for the while stands in no printed command."""
    found = quantize(folder, prompts=["one two"])
    assert found.run == str(folder)
    assert all(f"{folder} " in one and "--prompt 'one two'" in one for one in found.next)
    assert any("--target" in one for one in found.next) == (found.cost.kl_mean > 0.01)


def test_another_model_is_told(plain, tiny_model):
    """Other weights than the recorded run's are noted."""
    other = tiny_model("gpt2", num_blocks=2, dtype="float32")
    found = quantize(plain, model=str(other))
    assert found.model == str(other)
    assert any("not the weights of the recorded run" in note for note in found.notes)


def test_one_token_has_no_standard_error(folder, tmp_path, invoke):
    """A figure of one value shows no nan."""
    run = capture(folder, out=tmp_path / "run", prompts=[[5]], max_new_tokens=1, probe=False)
    code, text, _ = invoke("quantize", run.path)
    assert code == 0 and "nan" not in text


@pytest.mark.slow
def test_quartiles_of_many_numbers(monkeypatch):
    """More than torch.quantile takes."""
    monkeypatch.setattr(alone, "_MOST", 1 << 24)
    watch = _Numbers()
    watch.see(torch.arange(1 << 12).repeat(1 << 12, 1), None)
    watch.see(torch.ones(1, 1 << 12), None)
    found = _statistics(watch, torch.ones(4))
    assert 2 / 254 / (found.quantile_score) == pytest.approx(2048, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "kv8"])
def test_what_quantisation_costs_is_no_machines_fault(plain, tmp_path, scheme):
    """Neither is a side wrong against the float model's truth, nor are both one model."""
    quantize(plain, scheme=scheme, out=tmp_path / "q")
    truth(plain, out=tmp_path / "t")
    found = compare(plain, tmp_path / "q", truth=tmp_path / "t").verdict
    assert found.side is None
    assert found.summary.startswith("A is not quantised and B is ")
    assert "scheme not known" not in found.summary
    assert ", by B" not in found.summary
