"""Quantised against not, or otherwise: said in one plain line, and never as equal weights."""

import msgspec
import pytest

from divergence import Run
from divergence.comparison.preflight import preflight
from divergence.comparison.result import schemes_apart
from divergence.facts import worded
from divergence.run.manifest import (
    Calibration,
    EngineNote,
    QuantizationNote,
    QuantizedNumbers,
    QuantizedScheme,
)


def note(bits):
    numbers = QuantizedNumbers(kind="int", bits=bits, per="channel")
    return QuantizationNote(method="gptq", schemes=[QuantizedScheme(weights=numbers)])


@pytest.fixture
def plain(shared_run):
    return shared_run(prompts=["Snow"], max_new_tokens=1, probe=False)


def quantised(plain, bits, **other):
    """The same run, as if its weights were codes."""
    run = Run.open(plain.path)
    digests = {name: f"{bits}-{digest}" for name, digest in run.manifest.model.digests.items()}
    model = msgspec.structs.replace(
        run.manifest.model, quantization=note(bits), digest=f"{bits}", digests=digests, **other
    )
    run.manifest.model = model
    return run


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (None, 8, "{dtype} against W8A16: not the same model"),
        (8, None, "W8A16 against {dtype}: not the same model"),
        (8, 4, "W8A16 against W4A16: not the same model"),
    ],
)
def test_other_codes_are_not_the_same_model(plain, a, b, said):
    """What quantisation costs may be asked; that it is the same model is not said."""
    runs = [plain if bits is None else quantised(plain, bits) for bits in (a, b)]
    lines = {line.check: line for line in worded(preflight(*runs))}
    assert lines["weights"].status == "differs"
    assert lines["weights"].detail.startswith(said.format(dtype=plain.manifest.model.dtype))
    assert lines["quantization"].status == "differs"


def test_a_dtype_does_not_hide_it(plain):
    """Codes beside float16 are no other rounding of float32 weights."""
    other = quantised(plain, 8, dtype="float16")
    lines = {one.check: one for one in worded(preflight(plain, other))}
    assert "not the same model" in lines["weights"].detail


def simulated(plain, kept="lm_head", calibration=None, **options):
    """The same run, as if a scheme had been simulated on its model."""
    run = Run.open(plain.path)
    numbers = QuantizedNumbers(kind="int", bits=8, per="channel")
    scheme = QuantizedScheme(weights=numbers)
    note = QuantizationNote(method="simulated", schemes=[scheme], kept=["h.*"])
    run.manifest.model = msgspec.structs.replace(run.manifest.model, quantization=note)
    run.manifest.engine = EngineNote(
        name="quantize",
        version="5",
        options=options,
        facts={"scheme": "W8A16", "kept": kept},
        calibration=None if calibration is None else Calibration(num_tokens=9, **calibration),
    )
    return run


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"smooth": None}, {"smooth": 0.5}, ("W8A16", "W8A16 (scales migrated by alpha 0.5)")),
        ({"kept": "h.1"}, {"kept": "h.2"}, ("W8A16 (kept: h.1)", "W8A16 (kept: h.2)")),
        (
            {"calibration": {"limits": {"h.1": [-1.5, 2.0], "h.2": [0, 1.0]}}},
            {"calibration": {"limits": {"h.1": [-1.5, 2.25], "h.2": [0, 1.5]}}},
            (
                "W8A16 (static range of h.1 -1.5 to 2 and 1 more)",
                "W8A16 (static range of h.1 -1.5 to 2.25 and 1 more)",
            ),
        ),
        (
            {"calibration": {"scales": {"h.norm": [1.0, 0.5, 3.0]}}},
            {"calibration": {"scales": {"h.norm": [1.0, 0.25, 3.0]}}},
            (
                "W8A16 (migrated scales of h.norm 0.5 at channel 1)",
                "W8A16 (migrated scales of h.norm 0.25 at channel 1)",
            ),
        ),
    ],
    ids=["migration", "kept", "static", "migrated"],
)
def test_other_scales_of_one_simulated_scheme_are_another_model(plain, a, b, said):
    """Migration and calibration stand in no note of the model, and starred names hide which block
    was kept: nothing that they change is a machine's."""
    lines = {line.check: line for line in preflight(simulated(plain, **a), simulated(plain, **b))}
    line = lines["quantization"]
    assert line.status == "differs"
    assert schemes_apart(line.reference, line.candidate) == said


def test_the_same_simulated_scheme_is_the_same(plain):
    """Two runs that were quantised alike differ in nothing."""
    same = {"calibration": {"limits": {"h.1": [-1.5, 2.0]}}, "smooth": 0.5, "scheme": "w8a16"}
    lines = {line.check: line for line in preflight(*(simulated(plain, **same) for _ in "ab"))}
    assert lines["quantization"].status == "same"


@pytest.mark.parametrize("dequantized", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_codes_of_a_cache_are_activations_unless_they_became_numbers(cached, dequantized):
    """Rounding flips a code of what passes, not one of the weights."""
    cache = QuantizedNumbers(kind="float", bits=8, per="tensor") if cached else None
    note = QuantizationNote(method="gguf", kv_cache=cache, dequantized=dequantized)
    assert note.has_activations == (cached and not dequantized)
