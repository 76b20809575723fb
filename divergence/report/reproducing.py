"""What `repro` says: what was written, and what to do with it."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.layout.lines import BLANK, Line, heading, line, prose
from divergence.run.command import quoted_words

__all__ = ["reproducer_lines"]

_TOLD = {
    "repro.py": "runs it: torch and safetensors alone",
    "inputs.safetensors": "its inputs, bit by bit",
    "expected.safetensors": "what the run recorded",
    "truth.safetensors": "the same in float64",
    "report.md": "the text of a bug report",
}


def reproducer_lines(path: str, title: str, files: Sequence[str]) -> list[Line]:
    """The finding, the folder's files, and the command that runs it."""
    script = f"{path}/repro.py" if not path.startswith("-") else f"./{path}/repro.py"
    lines = [line(("written", "bold green"), f" {path}"), prose("finding", title)]
    lines += [prose(f"  {name}", _TOLD[name], width=24) for name in files]
    return [*lines, BLANK, heading("next"), line("  " + quoted_words(["python", script]))]
