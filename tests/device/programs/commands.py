"""``python commands.py NAME WORK MODEL``: runs ``answers`` of NAME.py, writes WORK/answers.json."""

import contextlib
import io
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


class Said(NamedTuple):
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def verdict(self) -> str:
        """The first word of ``compare``, or the error."""
        return self.out.partition(":")[0] if self.out else self.err.strip().partition("\n")[0]


def divergence(*args: object, **switches: object) -> Said:
    """One command, in this process, on a device with these switches (see fake/torch_npu.py)."""
    import torch_npu

    from divergence.cli.main import app
    from divergence.numerics import sketches as sketch

    torch_npu.configure(**switches)
    sketch.sum_dtype_name.cache_clear()  # of another device, as it were
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app([str(arg) for arg in args], prog_name="divergence")
        except SystemExit as ended:
            code = ended.code or 0
    return Said(code, out.getvalue(), err.getvalue())


def made(*args: object, **switches: object) -> Said:
    """A command that must succeed."""
    said = divergence(*args, **switches)
    if said.code:
        raise RuntimeError(f"{args}, {switches}: exit {said.code}\n{said.out}{said.err}")
    return said


def captured(model: object, out: str, device: str, *args: object, **switches: object) -> Said:
    """A short capture on ``device``."""
    return made(
        "capture",
        model,
        "-o",
        out,
        "--device",
        device,
        "--max-new-tokens",
        2,
        "--no-probe",
        "--force",
        *args,
        **switches,
    )


if __name__ == "__main__":
    name, work, model = sys.argv[1:]
    # the programs import this module, which is not to be executed twice
    sys.modules["commands"] = sys.modules["__main__"]
    found = import_module(name).answers(Path(work), model)
    Path(work, "answers.json").write_text(json.dumps(found))
    sys.stdout.flush()
    # torch's backward threads may want Python's lock from an interpreter that has ended
    os._exit(0)
