"""probe(): what this machine's arithmetic does, seen from outside, as a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from divergence.arithmetic.additions import (
    FULL,
    QUICK,
    Notebook,
    OperatorOrders,
    operators,
    probe_orders,
    write_drawings,
)
from divergence.arithmetic.quick import DTYPES, QUICK_TERMS, probe_scalars
from divergence.errors import RunExistsError, UsageError
from divergence.recording.machine import deterministic_settings, resolve_device
from divergence.recording.new_run import check_output, provenance
from divergence.run.captured import CapturedTensor
from divergence.run.location import location_of
from divergence.run.manifest import Manifest, ModelIdentity, Plan, SampleTokens, Settings, Tokens
from divergence.run.reader import Run
from divergence.run.writer import RunWriter
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
    on_progress = progress or silent
    with deterministic_settings(device.partition(":")[0], seed=0, enabled=deterministic) as state:
        plan = f"probe 1, {'quick' if quick else 'full'}, terms {lengths}"
        manifest = Manifest(
            **provenance(device, label=label, command=command),
            model=ModelIdentity(
                source="probe", model_class="probe", task="operators",
                config_digest=xxhash.xxh3_128_hexdigest(plan.encode()), dtype="float32",
                num_parameters=0, digest="",
            ),
            tokens=Tokens(samples=[SampleTokens(text=None, prompt_ids=[])], groups=[[0]]),
            settings=Settings(
                deterministic=deterministic, seed=0, device=device, max_new_tokens=0, batch=False,
                switches=state.switches,
            ),
            plan=Plan(passes=["free"], sites=["probe.*"]),
        )  # fmt: skip
        with RunWriter(place, manifest, force=force) as writer:
            notebook = Notebook()
            manifest.arithmetic = notebook.facts  # as far as it comes, if it is interrupted
            try:
                findings = _probe_all(notebook, device, lengths, quick, on_progress)
            finally:
                state.note_in(manifest.settings)
                for order, (site, tensor) in enumerate(notebook.tensors):
                    item = CapturedTensor(tensor)
                    writer.put(item, pass_="free", sample=0, step=0, site=site, order=order)
    if svg is not None:
        write_drawings(Path(svg), findings)
    return Run.open(place)


def _probe_all(
    notebook: Notebook, device: str, lengths: tuple[int, ...], quick: bool, on_progress: Progress
) -> list[OperatorOrders]:
    names = QUICK if quick else FULL
    wanted = [
        operator
        for length in lengths
        for dtype in DTYPES
        for operator in operators(names, length, dtype, device)
    ]
    on_progress("probe", 0, len(wanted) + 1, "elementary functions")
    findings: list[OperatorOrders] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = 2048 if quick else 65536
        for dtype in DTYPES:
            probe_scalars(notebook, device, dtype, count=count, lengths=lengths, few=quick)
        for number, operator in enumerate(wanted):
            on_progress("probe", number + 1, len(wanted) + 1, operator.title)
            findings += probe_orders(notebook, [operator])
    return findings
