"""Where a run comes from: what every manifest says, whatever made the run."""

from __future__ import annotations

import datetime
from typing import Any

from divergence._version import __version__
from divergence.recording.engines.identity import without_home
from divergence.recording.machine.environment import collect_environment
from divergence.run.schema.arithmetic import ArithmeticFact
from divergence.run.schema.manifest import Manifest
from divergence.run.writing.writer import new_run_id
from divergence.words import Progress

__all__ = ["probed", "provenance"]


def provenance(
    device: str, *, label: str | None, command: str | None, like: Manifest | None = None
) -> dict[str, Any]:
    """``id``, ``tool_version``, ``created``, ``command``, ``like`` and ``environment`` of a new
    run on ``device``. The command names no home directory. ``like``: the run it repeats."""
    return {
        "id": new_run_id(),
        "tool_version": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": None if command is None else without_home(command),
        "like": None if like is None else like.id,
        "environment": collect_environment(device, label=label),
    }


def probed(device: str, on_progress: Progress) -> list[ArithmeticFact]:
    """What a quick probe finds of the device's arithmetic."""
    from divergence.arithmetic.quick import quick_facts

    on_progress("probe", 0, None, "")
    return quick_facts(device)
