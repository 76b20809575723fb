"""compare_losses(): two files of losses."""

from __future__ import annotations

import os

from divergence.errors import UsageError
from divergence.facts import with_sentences
from divergence.training.curves.judging import judge
from divergence.training.curves.reading import is_losses, read_losses
from divergence.training.curves.result import LossReport


@with_sentences
def compare_losses(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str] | None,
    *,
    warmup_steps: int | None = None,
) -> LossReport:
    """``reference`` and ``candidate``: JSON lines, CSV, a ``trainer_state.json``, or TensorBoard's
    event files. ``warmup_steps``: leave out steps below this one. Default: the first tenth of the
    steps that both have, at most 100.

    Raises UsageError for a path that is none of these, and DumpError for a damaged file.
    """
    if candidate is None:
        raise UsageError(
            "one file of losses is given, and a comparison needs two", where=os.fspath(reference),
            hint="divergence compare A.jsonl B.jsonl",
        )  # fmt: skip
    paths = [os.fspath(reference), os.fspath(candidate)]
    wrong = [path for path in paths if not is_losses(path)]
    if wrong:
        raise UsageError(
            "losses are compared with losses, runs with runs: one of these is a file of losses, or "
            "no run at all", where=" and ".join(paths),
            hint=("two runs, each the directory or archive that `divergence capture` wrote",
                  "two of JSON lines, CSV, trainer_state.json, TensorBoard's event files"),
        )  # fmt: skip
    if os.path.realpath(paths[0]) == os.path.realpath(paths[1]):
        raise UsageError(
            "a file of losses compared with itself proves nothing", where=paths[0],
            hint="name the other training's file",
        )  # fmt: skip
    a, b = (read_losses(path) for path in paths)
    return judge(a, b, warmup_steps=warmup_steps)
