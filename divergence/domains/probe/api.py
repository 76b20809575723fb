"""probe(): what this machine's arithmetic does, seen from outside, as a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from divergence.domains.probe.additions import Notebook, write_drawings
from divergence.domains.probe.quick import QUICK_TERMS, probe_all
from divergence.errors import RunExistsError, UsageError
from divergence.options.commands import CaptureOptions
from divergence.recording.cases import CaseRequest
from divergence.recording.machine import resolve_device
from divergence.recording.new_run import check_output
from divergence.run.manifest import Plan
from divergence.run.reader import Run
from divergence.run.storage import location_of
from divergence.words import Progress, silent

FULL_TERMS = (64, 1024, 4096)
"""Terms of the sums whose order is looked for: a head, a small model's width, a large one's."""
MAX_TERMS = 4096
MIN_TERMS = 8


def probe(
    *,
    out: str | Path,
    device: str = "auto",
    quick: bool = False,
    terms: Sequence[int] = (),
    deterministic: bool = True,
    svg: str | Path | None = None,
    label: str | None = None,
    force: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Probe ``device`` and record facts, inputs and outputs in the directory ``out``.

    ``quick``: what a capture does by itself. ``terms``: lengths of the sums whose order is looked
    for, powers of two up to 4096; default 64, 1024 and 4096 (512 with ``quick``).
    ``deterministic``: set the switches that a capture sets; else the machine is probed as it
    stands. ``svg``: a directory for drawings of the trees.

    Raises UsageError for other lengths or a device that is not there, RunExistsError and
    RunWriteError.
    """
    lengths = tuple(terms) or ((QUICK_TERMS,) if quick else FULL_TERMS)
    for length in lengths:
        if not MIN_TERMS <= length <= MAX_TERMS or length & (length - 1):
            raise UsageError(
                f"{length} is no length that can be probed",
                hint=f"a power of two from {MIN_TERMS} to {MAX_TERMS}",
            )
    place = location_of(out)
    check_output(place, force=force, like=None)
    if svg is not None and Path(svg).exists() and not Path(svg).is_dir():
        raise RunExistsError(f"{svg} is no directory", hint="choose another --svg")
    device = resolve_device(device)
    request = CaseRequest(
        out=place,
        force=force,
        command=command,
        progress=progress or silent,
        options=CaptureOptions(label=label, deterministic=deterministic, probe=False),
    )
    plan = Plan(passes=["free"], sites=["probe.*"])
    with request.recording(plan, device=device, source="probe", kind="probe") as cases:
        asked = f"probe 1, {'quick' if quick else 'full'}, terms {lengths}"
        cases.manifest.tokens.samples[0].prompt_ids = []
        cases.manifest.model.config_digest = xxhash.xxh3_128_hexdigest(asked.encode())
        notebook = Notebook()
        cases.manifest.arithmetic = notebook.facts  # as far as it comes, if it is interrupted
        try:
            findings = probe_all(notebook, device, lengths, quick=quick, progress=request.progress)
        finally:
            for site, tensor in notebook.tensors:
                cases.put(site, tensor)
    if svg is not None:
        write_drawings(Path(svg), findings)
    return Run.open(place)
