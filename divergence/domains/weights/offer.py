"""Offers commands that relate the weights of two runs, where their checkpoints are at hand."""

from __future__ import annotations

from divergence.run.command import Command, command
from divergence.run.reader import Run
from divergence.run.record import expanded


def commands_for(a: Run, b: Run) -> list[Command]:
    """The comparison of both checkpoints; none where one lies elsewhere."""
    sources = [run.manifest.model.source for run in (a, b)]
    if sources[0] == sources[1] or not all(expanded(source).exists() for source in sources):
        return []
    return [command("weights", *sources)]
