"""Values as source, and scripts that hold nothing but what was meant."""

import ast
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.errors import FaultError
from divergence.ops.allowed import Refusal
from divergence.ops.reproducer import call_node, check_script, literal, node, place

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(PLAIN)
def test_a_literal_is_the_value(value):
    """Python reads back what was written, on one line."""
    text = literal(value)
    assert ast.literal_eval(text) == value
    assert len(text.splitlines()) == 1
    check_script(f"x = {text}", f"x = {place('x')}", {"x": node(value)})


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        -math.inf,
        complex(math.inf, -0.0),
        -5,
        5e-324,
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
    ],
    ids=str,
)
def test_values_that_python_has_no_word_for(value):
    """Infinities, the sign of zero, and torch's own."""
    text = literal(value)
    found = eval(text, {"torch": torch})
    assert repr(found) == repr(value)
    check_script(f"x = {text}", f"x = {place('x')}", {"x": node(value)})


def test_not_a_number():
    """It is written as a call, alone and within a complex number."""
    assert literal(math.nan) == "float('nan')"
    assert literal(complex(math.nan, 1)) == "complex(float('nan'), 1.0)"


@pytest.mark.parametrize("value", [object(), print, 2**64, {1, 2}, b"x", int], ids=type)
def test_what_is_no_plain_value_is_refused(value):
    """Nothing else has a text of its own."""
    with pytest.raises(Refusal):
        literal(value)


@pytest.mark.parametrize("name", ["a b", "a;b", "a(", "", "a\nb", "1a", "a.b", "from"])
def test_names_are_identifiers(name):
    """Of functions and of arguments."""
    with pytest.raises(Refusal, match="is no name"):
        call_node(["torch", name], [])
    with pytest.raises(Refusal, match="is no name"):
        call_node(["torch"], [], {name: 1})


@pytest.mark.parametrize(
    "text",
    [
        '"""doc"""\nx = 1\nimport os',
        '"""doc"""; import os\nx = 1',
        '"""d""" + f()\nx = 1',
        '"""doc"""\nx = (1, f())',
        "x = 1",
        '"""doc"""\nx = 2',
        '"""doc"""\nx = True',
        '"""doc"""\nx = 1.0',
        "f()\nx = 1",
        '"""doc"""\nx = (',
        '"""doc"""\nx = 1\0',
    ],
)
def test_a_script_with_anything_else_is_not_written(text):
    """A statement, an expression or another value: a fault of the tool, said as such."""
    template = f'"""what"""\nx = {place("x")}  # why'
    check_script('"""any text"""\nx = 1  # another comment', template, {"x": node(1)})
    with pytest.raises(FaultError):
        check_script(text, template, {"x": node(1)})
