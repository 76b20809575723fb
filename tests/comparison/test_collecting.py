"""While runs are compared Python's garbage collector runs rarely; afterwards it is as it was."""

from __future__ import annotations

import gc

import pytest

from divergence.comparison.api import _collecting_rarely


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (200_000, 5, 5)])
def test_thresholds_come_back(before):
    """Also after an error, and where one comparison lies in another; what is off stays off."""
    found = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with pytest.raises(KeyboardInterrupt), _collecting_rarely(), _collecting_rarely():
            assert gc.get_threshold()[0] == (max(before[0], 100_000) if before[0] else 0)
            raise KeyboardInterrupt
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*found)
