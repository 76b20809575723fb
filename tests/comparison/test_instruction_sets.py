"""Real runs of x86-64 and arm64 (tests/fixtures/README.md): every later version answers them so."""

from collections.abc import Callable
from pathlib import Path

import pytest

from divergence import Run, compare

RUNS = Path(__file__).parents[1] / "fixtures" / "cross-isa.tar.xz"
DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def unpacked(unpack: Callable[[Path], Path]) -> Callable[[str], Path]:
    """The folder of a run."""
    where = unpack(RUNS)
    return lambda name: where / name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("judged", [True, False])
def test_another_instruction_set_is_rounding(unpacked, dtype, judged):
    """x86 and arm64 of one model differ by rounding, with and without a truth."""
    truth = unpacked(f"truth-{dtype}") if judged else None

    verdict = compare(unpacked(f"x86-{dtype}"), unpacked(f"arm64-{dtype}"), truth=truth).verdict

    assert verdict.kind == "within_floor"
    sure = judged and dtype == "float32"  # of the others A was not seen in float32
    assert verdict.confidence == ("high" if sure else "medium")
    assert verdict.side in ((None, "neither") if judged else (None,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_on_another_instruction_set_is_found(unpacked, dtype):
    """A fault on arm64 is named at its block, by B."""
    a, b = unpacked(f"x86-{dtype}"), unpacked(f"arm64-{dtype}-fault")

    verdict = compare(a, b, truth=unpacked(f"truth-{dtype}")).verdict

    assert (verdict.kind, verdict.side, verdict.confidence) == ("localized", "candidate", "high")
    assert verdict.onset is not None and verdict.onset.block == "model.layers.2"


def test_without_a_truth_float32_shows_the_fault_and_bfloat16_says_what_is_lacking(unpacked):
    """What 16 bits hide without a truth is said as what lowers the confidence."""
    found = compare(unpacked("x86-float32"), unpacked("arm64-float32-fault")).verdict
    hidden = compare(unpacked("x86-bfloat16"), unpacked("arm64-bfloat16-fault")).verdict

    assert found.kind == "localized" and found.onset.block == "model.layers.2"
    assert (hidden.kind, hidden.confidence) == ("within_floor", "medium")
    assert any(
        "float32 check takes a truth" in one.detail for one in hidden.checks if one.state != "met"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_their_files_are_whole(unpacked, dtype):
    """The stored runs open, are of version 3, and every byte has its checksum."""
    for name in (f"x86-{dtype}", f"arm64-{dtype}", f"arm64-{dtype}-fault", f"truth-{dtype}"):
        run = Run.open(unpacked(name))
        assert run.manifest.schema_version == 3
        run.verify()
