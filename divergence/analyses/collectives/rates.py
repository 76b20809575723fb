"""How fast each collective was, from the recorded seconds of its calls."""

from __future__ import annotations

import statistics

from divergence.analyses.collectives.recorded import Recorded
from divergence.collectives.bandwidth import bus_factor
from divergence.comparison.results.suites import BandwidthRow

__all__ = ["bandwidth_of"]


def bandwidth_of(recorded: Recorded) -> list[BandwidthRow]:
    """One row a collective and size, by the median of its calls."""
    rows = []
    for timed in recorded.timed():
        seconds = statistics.median(timed.seconds)
        algbw = timed.num_bytes / max(seconds, 1e-12)
        rows.append(
            BandwidthRow(
                collective=timed.collective, bytes=timed.num_bytes, seconds=seconds, algbw=algbw,
                busbw=algbw * bus_factor(timed.collective, recorded.num_ranks),
                link_rate=timed.link_rate,
            )
        )  # fmt: skip
    return rows
