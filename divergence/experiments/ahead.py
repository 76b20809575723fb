"""The process of a step of diff, which imports what it needs while the step before it runs, and is
told its words then. A script: the other side's Python may have another divergence."""

import contextlib
import gc
import importlib
import json
import runpy
import sys

SLOW = ("torch", "transformers", "divergence.recording.api")
"""What takes long to import."""

if __name__ == "__main__":
    words = ""
    gc.disable()  # what is imported stays: a collector would walk over it again and again
    with contextlib.suppress(KeyboardInterrupt):
        for name in SLOW:
            with contextlib.suppress(Exception):  # the command itself says what is missing
                importlib.import_module(name)
        words = sys.stdin.readline()
    gc.freeze()
    gc.enable()
    if words:
        sys.argv[1:] = json.loads(words)
        sys.path[0] = ""  # as of ``python -m``, not this script's folder
        runpy.run_module("divergence", run_name="__main__", alter_sys=True)
