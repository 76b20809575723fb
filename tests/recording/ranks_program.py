"""One process of several: makes the captures that a JSON file lists, one after another.

Started by torchrun. A capture is the keyword arguments of ``divergence.recording.api.capture``, and
perhaps ``fails``: then the rank and the forward at which its first block raises, or is killed; or
``fault``: the name of one of tests/recording/training/rank_faults.py.
In ``out`` RANK stands for the process's own.
Errors are written beside the run, by rank, and do not end the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path


def _breaking(rank: int, call: int, how: str):
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == str(rank) and calls == call:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a device-side fault")

    return lambda model: model.model.layers[0].register_forward_hook(hook)


def _faulty(name: str | None) -> contextlib.AbstractContextManager[None]:
    if name is None:
        return contextlib.nullcontext()
    from tests.domains.training.step.rank_faults import FAULTS

    return FAULTS[name]()


def main() -> None:
    from divergence import capture
    from divergence.errors import DivergenceError

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    for options in json.loads(Path(sys.argv[1]).read_text()):
        fails, fault = options.pop("fails", None), options.pop("fault", None)
        options["out"] = options["out"].replace("RANK", os.environ["RANK"])
        try:
            with _faulty(fault):
                capture(prepare=_breaking(*fails) if fails else None, **options)
        except DivergenceError as error:
            Path(f"{options['out']}.rank{os.environ['RANK']}.txt").write_text(str(error))
            if fails:
                sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
