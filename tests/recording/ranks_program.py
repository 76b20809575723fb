"""One process of several: makes the captures that a JSON file lists, one after another.

Started by torchrun, or with the number of ranks behind the file: then they are forks of one
process, which has imported what all of them need. A capture is the keyword arguments of
``divergence.recording.api.capture``, and perhaps ``fails``: then the rank and the forward at which
its first block raises, or is killed; or ``fault``: the name of one of
tests/domains/training/step/rank_faults.py.
In ``out`` RANK stands for the process's own.
Errors are written beside the run, by rank, and do not end the process.
"""

import contextlib
import json
import os
import signal
import socket
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


def fork(number: int) -> None:
    """Makes a rank of each of so many forks, and waits for them."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from divergence import capture  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(number)}
    for rank in range(number):
        if not os.fork():
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return main()
    for _ in range(number):
        os.wait()


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
    fork(int(sys.argv[2])) if len(sys.argv) > 2 else main()
