"""Quantisers of a quantised model: healthy ones pass, a wrong one is named with its side."""

import contextlib
import functools
from unittest import mock

import pytest

from benchmarks.quantizers import PROMPTS, on_loading
from divergence import LoadOptions, Run, capture, compare, truth
from divergence.recording.engines import sessions
from divergence.run.site import CODES
from tests.models import quantized

PATH = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """(reference, its truth, ``faulty(name)`` → a run with that quantiser fault, made once)."""
    pytest.importorskip("compressed_tensors")
    folder = tmp_path_factory.mktemp("quantised")
    quantized.build(tiny_model("llama", dtype="float32"), folder / "model", "w8a8")
    a = capture(
        folder / "model", out=folder / "a", prompts=PROMPTS[:2], max_new_tokens=2, probe=False
    )

    @functools.cache
    def faulty(name: str) -> Run:
        with on_loading(name, PATH):
            return capture(like=a, out=tmp_path_factory.mktemp("faulty") / "b", probe=False)

    return a, truth(a, out=folder / "truth"), faulty


def codes_of(report):
    return [fact.text for fact in report.verdict.evidence if "codes" in fact.text]


def test_codes_are_recorded_beside_the_blocks(runs):
    """As integers, for every quantised module; in the truth as what they are rounded from."""
    a, true, _ = runs
    sites = {r.site for r in a.records if r.site.endswith(f":{CODES}")}
    assert len(sites) == 21
    site = f"{PATH}:{CODES}"
    run, right = a.find(("free", 0, 0, site)), true.find(("anchored", 0, 0, site))
    assert (run.dtype, right.dtype) == ("int8", "float64")
    codes, quotients = a.read(run).double(), true.read(right)
    assert float(quotients.abs().max()) == pytest.approx(127.5)
    assert float((codes - quotients).abs().max()) < 1.01  # a flip is one step


@pytest.mark.slow
def test_a_healthy_pair_passes(runs, answer):
    """Another attention implementation: rounding, and it is said how many codes it moved."""
    a, true, _ = runs
    report = answer(a, truth=true, attn_implementation="sdpa")
    assert report.verdict.kind in ("within_floor", "identical")
    assert report.verdict.side == "neither"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("truncating cast", "too near to zero on average"),
        ("1/128 for 1/127.5", "% in scale"),
        ("wrapped overflow", "but up to 25"),
        ("scale per tensor", "are not the nearest to x / scale"),
    ],
)
def test_a_wrong_quantiser_is_named_with_its_side(runs, fault, said):
    """Block, module and side; the other way round it is the reference."""
    a, true, faulty = runs
    verdict = compare(a, faulty(fault), truth=true).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("localized", "candidate", "high")
    assert verdict.onset.site == f"{PATH}:{CODES}"
    assert said in verdict.evidence[0].text


@pytest.mark.slow
def test_without_a_truth_no_side_is_told(runs):
    """The two differ by more than ties explain; whose codes are right is not known."""
    a, _, faulty = runs
    verdict = compare(a, faulty("truncating cast")).verdict
    assert (verdict.kind, verdict.side) == ("localized", None)
    assert verdict.onset.site == f"{PATH}:{CODES}"
    assert verdict.confidence != "high"


@pytest.mark.slow
def test_a_product_in_float16_is_no_matter_of_codes(runs):
    """Codes are right, values are not: the block is named."""
    a, true, faulty = runs
    verdict = compare(a, faulty("float16 accumulation"), truth=true).verdict
    assert (verdict.kind, verdict.side) == ("localized", "candidate")
    assert verdict.onset.site == "model.layers.1:out"


@contextlib.contextmanager
def unquantised(path):
    """The next model that is loaded hands on what enters one module as it is."""
    from compressed_tensors.quantization.lifecycle import forward as library

    own, load = library.forward_quantize, sessions.load_model
    target = []

    def load_and_note(*args, **how):
        loaded = load(*args, **how)
        target.append(loaded.module.get_submodule(path))
        return loaded

    def forward_quantize(module, value, base_name, args):
        skipped = base_name == "input" and module is target[-1]
        return value.clone() if skipped else own(module, value, base_name, args)

    with (
        mock.patch.object(library, "forward_quantize", forward_quantize),
        mock.patch.object(sessions, "load_model", load_and_note),
    ):
        yield


@pytest.mark.slow
def test_an_input_that_one_side_does_not_quantise_gets_no_codes_of_the_other(tiny_model, tmp_path):
    """Float8 codes of what was not quantised are those of the other side, and in its place would
    hide it."""
    pytest.importorskip("compressed_tensors")
    model = quantized.build(tiny_model("llama", dtype="float32"), tmp_path / "model", "fp8")
    a = capture(model, out=tmp_path / "a", prompts=PROMPTS[:2], max_new_tokens=2, probe=False)
    with unquantised(PATH):
        b = capture(like=a, out=tmp_path / "b", probe=False)
    verdict = compare(a, b, truth=truth(a, out=tmp_path / "truth")).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("localized", "candidate", "high")
    assert verdict.onset.block == "model.layers.1"
    assert not [record for record in b.records if record.site == f"{PATH}:{CODES}"]
    said = f"B makes no codes of what enters {PATH} in 4 of 4 forwards"
    assert any(fact.text.startswith(said) for fact in verdict.evidence)


@pytest.mark.slow
def test_codes_that_experts_keep_to_themselves_leave_their_block_unsure(
    tmp_path, answer, shared_run
):
    """Stacked experts quantise what enters them and tell no codes; beside them attention does. One
    that rounding flips is one token's error, as a fault's would be."""
    a = shared_run(
        "mixtral",
        model={"dtype": "float32", "num_blocks": 2},
        prompts=PROMPTS[:1],
        max_new_tokens=1,
        probe=False,
        engine="quantize",
        loading=LoadOptions(engine_options={"scheme": "w8a8"}),
    )
    plant = "model.layers.1.mlp.experts:out=scale:1.01"
    verdict = answer(a, truth=truth(a, out=tmp_path / "truth"), plants=[plant]).verdict
    assert (verdict.kind, verdict.onset.block) == ("localized", "model.layers.1")
    assert (verdict.confidence, verdict.side) == ("low", None)
    said = "what enters model.layers.*.mlp.experts.gate_up_proj were not recorded"
    assert any(said in fact.text for fact in verdict.evidence)
