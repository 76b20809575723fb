"""The collector's numbers come back, whoever is last to leave."""

from __future__ import annotations

import gc
import threading

from divergence.run.collector import rarely_collecting


def test_overlapping_blocks():
    before = gc.get_threshold()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with rarely_collecting():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with rarely_collecting():
        assert gc.get_threshold()[0] == 100_000
        thread.start()
        assert inside.wait(30)
    assert gc.get_threshold()[0] == 100_000
    leave.set()
    thread.join()
    assert gc.get_threshold() == before


def test_one_that_is_switched_off_stays_so():
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rarely_collecting():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
