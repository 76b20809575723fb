"""Programs that tests run in a process of their own: ``python programs.py NAME WORK MODEL``.

A device is registered once a process, so each program imports torch_npu (the simulated one) and
answers many questions at once; what it prints last is its answers as JSON.
"""
from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path


def divergence(*args: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command."""
    from divergence.cli.main import app

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app([str(arg) for arg in args], prog_name="divergence")
        except SystemExit as ended:
            code = ended.code or 0
    return code, out.getvalue(), err.getvalue()
