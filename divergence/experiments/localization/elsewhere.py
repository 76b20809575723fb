"""A command of this tool in a process of its own, which has a recorded run's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from divergence.errors import ModelError
from divergence.run.reader import Run

__all__ = ["made_elsewhere"]


def made_elsewhere(words: list[str], out: Path, variables: Mapping[str, str | None]) -> Run:
    """The command ``words`` in a process with these variables."""
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    environment |= {k: v for k, v in variables.items() if v is not None}
    home = str(Path(__file__).parents[2])
    paths = [home, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PYTHONSAFEPATH"] = "1"  # nothing is imported from where the command was given
    done = subprocess.run(
        [sys.executable, "-m", *words, "--quiet"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ModelError(
            f"the {words[1]} with the recorded environment variables failed "
            f"(exit {done.returncode})",
            where=str(out),
            hint=(done.stderr.strip().splitlines() or ["no message"])[-1],
        )
    return Run.open(out)
