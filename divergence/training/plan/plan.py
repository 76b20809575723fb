"""The plan of a training step: what one rank keeps, holds for a while and sends.

From the model's structure and the options alone. What is not known is left out with its reason:
pipeline stages, tensor parallelism of experts, a forward that needs values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from divergence.errors import DivergenceError, UsageError, first_line
from divergence.facts import Fact, fact, with_sentences
from divergence.options.commands import PlanOptions, link_rate
from divergence.recording.engines.load import LoadedModel, tensor_plan
from divergence.recording.processes import parse_mesh
from divergence.recording.request import Request
from divergence.recording.structure import describe_modules
from divergence.run.site import escape_path
from divergence.training.plan.result import TrainingPlan
from divergence.training.plan.step import (
    GATHERED,
    REDUCED,
    SHARED,
    StepLayout,
    Stepped,
    Wanted,
    gradient_traffic,
    kept_parts,
    pieces_of,
    run_step,
    shrink,
    tensor_traffic,
    whole_parameters_bytes,
)

_AS_ASKED = ("mesh", "zero", "optimizer", "main_weights", "autocast", "link_rate")


def plan_request(
    loaded: LoadedModel, request: Request, planned: PlanOptions,
    shapes: Sequence[tuple[int, int]], *, forward_bytes: int,
) -> TrainingPlan:  # fmt: skip
    """``shapes``: (sequences, tokens) of each micro-batch of the prompts. ``forward_bytes``: what a
    capture of their forwards alone would write."""
    batch, tokens = max(shapes, key=math.prod)
    weights = sum(parameter.nbytes for parameter in loaded.module.parameters())
    copies = 1 if request.optimizer is None else 5  # gradient, the optimizer's, update, moments
    wanted = Wanted(
        batch=planned.micro_batch_size or batch,
        tokens=planned.sequence_length or tokens,
        **{name: getattr(request, name) for name in _AS_ASKED},
        gradient_checkpointing=bool(request.gradient_checkpointing),
        dropout=bool(request.dropout),
        accumulates=len(shapes) > 1,
        capture_bytes=request.buffer_bytes,
        dump_bytes=2 * forward_bytes + copies * weights,
    )
    return plan_training(loaded, wanted)


@with_sentences
def plan_training(loaded: LoadedModel, wanted: Wanted) -> TrainingPlan:
    """``loaded``: a model on the meta device, whose weights are made smaller for ``tp``.

    Raises UsageError for options that make no plan, and ModelError for a model that tensor
    parallelism cannot divide.
    """
    axes = _axes(wanted.mesh)
    rate = None if wanted.link_rate is None else link_rate(wanted.link_rate)
    zero = wanted.zero if wanted.zero is not None else 3 if axes.get("fsdp", 1) > 1 else 0
    count = _dividing(axes, zero)
    optimizer = wanted.optimizer or "adamw"
    module: Any = loaded.module
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    styles: dict[str, str] = {}
    if axes.get("tp", 1) > 1:
        styles = tensor_plan(module)
        shrink(module, styles, axes["tp"])
    pieces = pieces_of(module)
    main_weights = wanted.main_weights is not False and any(param.itemsize < 4 for param in pieces)
    kept = kept_parts(
        pieces, optimizer=optimizer, main_weights=main_weights, zero=zero, num_ranks=count
    )
    # torch's DTensor holds the gradient of a table whose rows are divided whole
    wide = {f"{path}.weight" for path, style in styles.items() if style == "embedding_rowwise"}
    tables = [piece for piece in pieces if piece.trained and piece.name in wide]
    undivided = sum((axes["tp"] - 1) * piece.bytes for piece in tables) if zero < 2 else 0
    kept = [
        msgspec.structs.replace(part, bytes=part.bytes + undivided)
        if part.name == "gradients" else part
        for part in kept
    ]  # fmt: skip
    names = {escape_path(name): name for name, _ in module.named_modules()}
    blocks = [
        names[path] for path, note in describe_modules(module).items() if note.role == "block"
    ]
    layout = StepLayout(
        zero=zero, num_ranks=count, blocks=tuple(blocks), accumulates=wanted.accumulates,
        reduced=tuple(path for path, style in styles.items() if style in REDUCED),
        shared=tuple(path for path, style in styles.items() if style in SHARED),
        gathered=tuple(path for path, style in styles.items() if style in GATHERED),
    )  # fmt: skip
    steps, remarks = _steps(loaded, wanted, layout)
    outside = [p for p in pieces if not any(p.name.startswith(f"{block}.") for block in blocks)]
    traffic = gradient_traffic(pieces, outside, zero=zero, axes=axes, rate=rate)
    used = next((s for s in steps if s.activations.checkpointing == wanted.gradient_checkpointing),
                None)  # fmt: skip
    if used is not None:
        traffic += tensor_traffic(
            used.reduced_bytes, used.shared_bytes, used.gathered_bytes,
            num_ranks=axes.get("tp", 1), rate=rate,
        )  # fmt: skip
    by_name = {part.name: part.bytes for part in kept}
    total, gradients = sum(by_name.values()), by_name["gradients"]
    peak = None
    if used is not None:
        peak = total - gradients + max(gradients, used.activations.peak_bytes + undivided)
    moments = by_name.get("moments", 0)
    if zero == 1 and moments and not main_weights:
        fullest = whole_parameters_bytes(pieces, optimizer=optimizer, num_ranks=count)
        remarks.append(fact("training.zero_optimizer", fullest_bytes=fullest, moment_bytes=moments))
    if zero < 2 and axes.get("dp", 1) * axes.get("fsdp", 1) > 1:
        remarks.append(fact("training.ddp_buckets", gradient_bytes=gradients))
    if used is not None and used.num_shared and axes.get("tp", 1) > 1:
        remarks.append(fact("training.shared_input", num_matrices=used.num_shared))
    for piece in tables:
        more, counted = (axes["tp"] - 1) * piece.bytes, undivided > 0
        table = fact("training.whole_table", parameter=piece.name, more_bytes=more, counted=counted)
        remarks.append(table)
    return TrainingPlan(
        num_parameters=num_parameters,
        num_ranks=math.prod(axes.values()),
        axes=axes,
        zero=zero,
        optimizer=optimizer,
        weight_dtype=str(next(module.parameters()).dtype).removeprefix("torch."),
        main_weights=main_weights,
        autocast=wanted.autocast,
        micro_batch=(wanted.batch, wanted.tokens),
        kept=kept,
        kept_bytes=total,
        activations=[step.activations for step in steps],
        checkpointing=wanted.gradient_checkpointing,
        peak_bytes=peak,
        traffic=traffic,
        link_rate=rate,
        accumulates=wanted.accumulates,
        capture_bytes=wanted.capture_bytes,
        dump_bytes=wanted.dump_bytes,
        remarks=remarks,
    )


def _axes(mesh: str | None) -> dict[str, int]:
    if mesh is None:
        return {}
    count = math.prod(map(int, re.findall(r"=\s*(\d+)", mesh)))
    if any("=" not in word for word in mesh.split(",")):
        parse_mesh(mesh, count)  # its own word for an axis that is none
        raise UsageError(
            f"--mesh {mesh} leaves a size open, and a plan starts no ranks that would tell it",
            hint="each axis with its size: fsdp=8,tp=2",
        )
    axes = {axis.name: axis.size for axis in parse_mesh(mesh, count).axes}
    if axes.get("pp", 1) > 1:
        raise UsageError(
            "a pipeline's activations depend on its schedule, which a plan does not know",
            hint="plan one stage without pp, or leave pp out of --mesh",
        )
    return axes


def _dividing(axes: dict[str, int], zero: int) -> int:
    """The ranks that ZeRO divides over; at stage 0 those that average gradients."""
    dp, fsdp = axes.get("dp", 1), axes.get("fsdp", 1)
    if zero == 0:
        return dp * fsdp
    count = fsdp if fsdp > 1 else dp
    if count == 1:
        raise UsageError(
            f"--zero {zero} has no ranks to divide over", hint="--mesh dp=8, or --mesh fsdp=8"
        )
    return count


def _steps(
    loaded: LoadedModel, wanted: Wanted, layout: StepLayout
) -> tuple[list[Stepped], list[Fact]]:
    """Without and with checkpointing, as far as the model has it and can be run."""
    module: Any = loaded.module
    remarks: list[Fact] = []
    ways: Sequence[bool] = (False, True)
    if not getattr(module, "supports_gradient_checkpointing", False):
        if wanted.gradient_checkpointing:
            raise UsageError(
                f"{type(module).__name__} has no gradient checkpointing",
                hint="leave out --gradient-checkpointing",
            )
        ways = (False,)
        remarks.append(fact("training.no_checkpointing"))
    steps = []
    for checkpointing in ways:
        try:
            steps.append(run_step(loaded, wanted, layout, checkpointing=checkpointing))
        except DivergenceError:
            raise
        except Exception as error:  # whatever an architecture raises without values
            remarks.append(fact("training.no_activations", error=first_line(error, most=200)))
            break
    return steps, remarks
