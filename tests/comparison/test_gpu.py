"""Real runs of a CPU and a GPU (tests/fixtures/README.md): every later version answers them so."""

from collections.abc import Callable
from pathlib import Path

import pytest

from divergence import Run, compare

RUNS = Path(__file__).parents[1] / "fixtures" / "cpu-gpu.tar.xz"
DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def unpacked(unpack: Callable[[Path], Path]) -> Callable[[str], Path]:
    """The folder of a run."""
    where = unpack(RUNS)
    return lambda name: where / name


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_device_is_rounding(unpacked, dtype):
    """By the truth that the CPU's run carries, neither is wrong."""
    verdict = compare(unpacked(f"a-{dtype}"), unpacked(f"gpu-{dtype}")).verdict

    assert (verdict.kind, verdict.side) == ("within_floor", "neither")
    assert verdict.confidence == ("high" if dtype == "float32" else "medium")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_on_the_gpu_has_its_place_and_its_side(unpacked, dtype):
    """5% in one block, seen through another device's rounding, without a third run."""
    verdict = compare(unpacked(f"a-{dtype}"), unpacked(f"gpu-{dtype}-fault")).verdict

    assert (verdict.kind, verdict.side, verdict.confidence) == ("localized", "candidate", "high")
    assert verdict.onset is not None and verdict.onset.block == "model.layers.2"


def test_tf32_is_a_setting_and_not_one_layer(unpacked):
    """The driver rounded all products' inputs to 10 bits, which no setting of torch tells."""
    verdict = compare(unpacked("a-float32"), unpacked("gpu-float32-tf32")).verdict

    assert (verdict.kind, verdict.side, verdict.confidence) == ("systematic", "candidate", "high")
    assert "float32 inputs keep 10 bits (TF32)" in verdict.summary


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_that_came_first_is_no_fault(unpacked, dtype):
    """Both chose their tokens freely: rounding, and it is said what such runs cannot tell."""
    verdict = compare(unpacked(f"gpu-{dtype}-first"), unpacked(f"a-{dtype}")).verdict

    assert (verdict.kind, verdict.confidence) == ("within_floor", "low")


def test_their_files_are_whole(unpacked):
    """Every tensor has its digest."""
    for path in sorted(unpacked("a-float32").parent.iterdir()):
        run = Run.open(path)
        assert run.manifest.schema_version == 8
        run.verify()
