"""A thread beside the model's, whose work torch must not spread over threads of its own.

OpenMP gives each thread that runs a parallel operator its own team. Two teams on the same cores
cost the model more than the work itself: whoever waits for a core holds up all of its team, and
GNU's runtime, once there are more threads than cores, sends them to sleep between any two
operators instead of letting them wait awake.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["without_team"]


def without_team() -> None:
    """torch's operators on the calling thread run on it alone; other threads' stay as they are.

    (torch.set_num_threads would also tell MKL, which has one number for all threads.) Where no
    OpenMP can be asked nothing is done.
    """
    import torch

    torch.get_num_threads()  # first: torch sets a new thread's number when it is first needed
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
