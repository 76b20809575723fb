"""Schemes by name, and names that there are none of."""

import pytest

from divergence.domains.quantization.coding import Quantizer
from divergence.domains.quantization.scheme import SCHEMES, scheme_named
from divergence.errors import UsageError


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_found_by_its_name(name):
    """And has a text."""
    found = scheme_named(name)
    assert found == SCHEMES[name]
    assert str(found)


def test_what_a_scheme_says():
    """Its text names bits, granularity, symmetry and migration."""
    assert str(scheme_named("w8a8+kv8", smooth=0.5)) == (
        "int8 weights per channel, int8 activations per token, dynamic, int8 keys and values per "
        "token, scales migrated (alpha 0.5)"
    )
    assert str(scheme_named("w4a16-g32", asymmetric="weights")) == (
        "asymmetric int4 weights per group of 32"
    )
    assert "per tensor, static" in str(scheme_named("w8a8-static"))


def test_other_granularity():
    """Options change what the name stands for."""
    found = scheme_named("w8a8", weights_per="tensor", activations_per="group:64")
    assert found.weights == Quantizer(per="tensor")
    assert found.activations == Quantizer(per="group", group=64)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("w8a9", {}, "did you mean w8a8"),
        ("nonsense", {}, "one of w8a8"),
        ("w8a8+w4a16", {}, "both say how weights"),
        ("w8a16", {"smooth": 0.5}, "no activations"),
        ("w8a8", {"smooth": 1.5}, "from 0 to 1"),
        ("w8a16", {"activations_per": "token"}, "leaves the activations"),
        ("fp8", {"asymmetric": "both"}, "no zero point"),
        ("w8a8", {"asymmetric": "wieghts"}, "what gets a zero point"),
        ("w8a8", {"weights_per": "token"}, "weights per 'token'"),
        ("w8a8", {"weights_per": "group"}, "weights per 'group'"),
        ("w8a8", {"weights_per": "group:0"}, "at least one"),
        ("w8a8-static", {"activations_per": "token"}, "known beforehand are per tensor"),
    ],
)
def test_what_cannot_be_is_refused(name, options, words):
    """With what is wrong, or what would do."""
    with pytest.raises(UsageError) as caught:
        scheme_named(name, **options)
    assert words in f"{caught.value} {caught.value.hint}"
