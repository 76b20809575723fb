"""What is expected of a part of a model: by the run's dtype and settings, or by practice."""

import pytest

from divergence.analyses.precision.audit import expectation, is_below
from divergence.comparison.result import PARTS
from tests.ops.conftest import manifest


@pytest.mark.parametrize(
    ("dtype", "expected", "below"),
    [
        ("bfloat16", ("float32",), True),
        ("float32", ("float32",), False),
        ("float64", ("float32",), False),
        ("float32", ("bfloat16",), False),
        ("float16", ("bfloat16",), True),  # less range
        ("bfloat16", ("float16",), True),  # fewer bits
        ("bfloat16", ("float32", "bfloat16"), False),
        ("float8_e4m3fn", ("bfloat16",), True),
        ("int8", ("bfloat16",), True),
        ("bfloat16", (), False),
    ],
)
def test_below_is_fewer_bits_or_less_range(dtype, expected, below):
    """Than each of the dtypes that would do."""
    assert is_below(dtype, expected) == below


def test_practice_asks_for_what_no_setting_promises():
    """Float32 statistics and softmax are nobody's own word; a product's dtype is the run's."""
    run = manifest()
    assert expectation("softmax", run)["expected"] == ["float32"]
    assert not expectation("softmax", run)["own"]
    assert expectation("router", run)["expected"] == ["float32", "bfloat16"]
    assert expectation("matrix product", run)["own"]


def test_nothing_is_expected_of_codes():
    """A model whose dtype is no floating-point one is not judged."""
    run = manifest()
    run.model.dtype = "int8"
    assert not any(expectation(part, run) for part in PARTS)
