"""What `make test` leaves out are further cases of tests that are there."""

import re

import pytest

from tests.conftest import SLOW


@pytest.mark.whole
def test_each_listed_case_is_one_of_a_test():
    """Of a test that was renamed or removed nothing is left in the list, which is in order."""
    lines = SLOW.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        file, name = re.fullmatch(r"(tests/\S+\.py)::(\w+)\[.*\]", line).groups()
        text = (SLOW.parents[1] / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in text, line
