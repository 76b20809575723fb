"""Python's garbage collector in a command. No function of the Python API sets it: it is its
caller's.

Importing torch and transformers and making a model leaves some two million objects that stay. The
collector walks over all of them again and again meanwhile, and frees nothing: 1.9 s of a capture of
8 s. So it waits until the work begins, and never walks over those objects again.
"""

from __future__ import annotations

import gc

_RARELY = 2_000_000
"""New objects between collections, for a command whose work never begins."""
_AT_WORK = 10_000
"""And later: a forward leaves no cycles, and what waits to be written need not be walked over at
every hundredth record (a quarter of what recording small tensors costs)."""
_usual: list[tuple[int, int, int]] = []


def hold() -> None:
    """Let garbage hardly ever be collected from now on."""
    _usual.append(gc.get_threshold())
    gc.set_threshold(_RARELY, *_usual[0][1:])


def release() -> None:
    """It is collected again, of what is made from now on. Nothing without ``hold``."""
    if _usual:
        first, *others = _usual.pop()
        gc.freeze()
        gc.set_threshold(max(first, _AT_WORK), *others)
