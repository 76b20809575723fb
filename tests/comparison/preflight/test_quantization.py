"""Quantised against not, or otherwise: said in one plain line, and never as equal weights."""

from __future__ import annotations

import msgspec
import pytest

from divergence.comparison.preflight.lines import preflight
from divergence.recording.api import capture
from divergence.run.reader import Run
from divergence.run.schema.provenance import QuantizationNote, QuantizedNumbers, QuantizedScheme


def note(bits):
    numbers = QuantizedNumbers(kind="int", bits=bits, per="channel")
    return QuantizationNote(method="gptq", schemes=[QuantizedScheme(weights=numbers)])


@pytest.fixture(scope="module")
def plain(llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "run"
    return capture(llama, out=out, prompts=["Snow"], max_new_tokens=1, probe=False)


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
    lines = {line.check: line for line in preflight(*runs)}
    assert lines["weights"].status == "differs"
    assert lines["weights"].detail.startswith(said.format(dtype=plain.manifest.model.dtype))
    assert lines["quantization"].status == "differs"


def test_a_dtype_does_not_hide_it(plain):
    """Codes beside float16 are no other rounding of float32 weights."""
    lines = {one.check: one for one in preflight(plain, quantised(plain, 8, dtype="float16"))}
    assert "not the same model" in lines["weights"].detail
