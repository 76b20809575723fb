"""On PYTHONPATH this makes every Python process of a machine the faulty one that it shall be."""

import os

if os.environ.get("TWO_MACHINES_FAULT"):
    from benchmarks._machine_faults import install

    install(os.environ["TWO_MACHINES_FAULT"])
