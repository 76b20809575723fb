"""The edits that a net must notice can be planted: a file that moves takes its edit along."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.sharpness import EDITS, ROOT

pytestmark = pytest.mark.whole


@pytest.mark.parametrize(("file", "old", "new", "_questions"), EDITS)
def test_an_edit_stands_exactly_once(file, old, new, _questions):
    """Else it would count as not noticed, whatever the net sees."""
    assert (ROOT / "divergence" / file).read_text().count(old) == 1
    assert old != new
