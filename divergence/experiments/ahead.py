"""The process of a step of diff, which imports what it needs while the step before it runs, and is
told its words then. A script: the other side's Python may have another divergence.

    ahead.py MODEL

Its last line on stdout names, as JSON, the files that ran: Python's modules, the libraries that are
mapped, and the folders into which packages are installed."""

import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import sys

SLOW = (
    "torch",
    "transformers",
    "divergence.recording.api",
    "divergence.recording.engines.sessions",
)
"""What takes long to import."""


def import_classes(model: str) -> None:
    """Import the classes that loading the model will need."""
    from divergence.recording.engines.load import import_classes

    import_classes(model)


def files() -> list[str]:
    """List the files that this process runs."""
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {os.path.abspath(path) for path in modules if isinstance(path, str)}
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths |= set(re.findall(r"(/\S+\.so\S*)$", maps.read(), re.MULTILINE))
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return sorted(filter(os.path.exists, [*paths, *folders]))


if __name__ == "__main__":
    words = ""
    gc.disable()  # what is imported stays: a collector would walk over it again and again
    with contextlib.suppress(KeyboardInterrupt):
        for name in SLOW:
            with contextlib.suppress(Exception):  # the command itself says what is missing
                importlib.import_module(name)
        with contextlib.suppress(Exception):
            import_classes(sys.argv[1])
        words = sys.stdin.readline()
    gc.freeze()
    gc.enable()
    if words:
        sys.argv[1:] = json.loads(words)
        sys.path[0] = ""  # as of ``python -m``, not this script's folder
        try:
            runpy.run_module("divergence", run_name="__main__", alter_sys=True)
        finally:
            print(json.dumps(files()))
