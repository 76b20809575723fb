"""Scalars of TensorBoard's event files, through its own reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from divergence.errors import DumpError, UsageError, first_line

__all__ = ["scalars"]


def scalars(place: Path) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Rows of one value each, from a file or a folder of files. Raises UsageError without the
    package."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util
    except ImportError as error:
        raise UsageError(
            "event files are read with tensorboard, which is not installed", where=str(place),
            hint='pip install "divergence-debug[tensorboard]", or export the scalar as CSV',
        ) from error  # fmt: skip
    everything = {"scalars": 0, "tensors": 0, "images": 1, "audio": 1, "histograms": 1}
    try:
        events = EventAccumulator(str(place), size_guidance=everything)
        events.Reload()
        tags = events.Tags()
    except Exception as error:  # a damaged file: whatever its reader raises
        raise DumpError(
            f"the event files cannot be read: {first_line(error)}", where=str(place)
        ) from error
    for tag in tags["scalars"]:
        for event in events.Scalars(tag):
            yield f"{tag} at step {event.step}", {"step": event.step, tag: event.value}
    for tag in tags["tensors"]:  # as TensorFlow 2 writes a scalar
        for event in events.Tensors(tag):
            value = tensor_util.make_ndarray(event.tensor_proto)
            if value.size == 1 and value.dtype.kind in "fiu":
                yield f"{tag} at step {event.step}", {"step": event.step, tag: float(value)}
