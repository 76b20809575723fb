"""Where a known fault goes in a model that nobody has described: its middle block, there the last
module with weights whose output is as large as the block's.

That is the projection back into the residual stream (`mlp.down_proj`, `mlp.c_proj`,
`mixer.out_proj`, `mlp.experts`, `output.dense`), or the norm behind it, where there is one: a norm
would take a scale error of what comes before it away again. What makes the block's output itself
is left out: a fault there has nothing of its block behind it, and no operator to be found at.

Order and shapes come from the plan of a capture, so from no weights. Where a forward cannot be run
without values, the order is the one in which the model registers its modules.
"""

from __future__ import annotations

import math
from pathlib import Path

from divergence.errors import ModelError
from divergence.recording.dry_run import plan_capture
from divergence.recording.engines.load import empty_model
from divergence.recording.model.structure import describe_modules
from divergence.recording.planned import PlannedSite
from divergence.run.schema.site import escape_path, module_of

__all__ = ["plantable_module"]


def plantable_module(
    model: str | Path, *, dtype: str | None = None, trust_remote_code: bool = False
) -> tuple[str, str]:
    """(path of the middle block, path of the module in it whose output is to be scaled).

    Raises ModelError for a model that cannot be found or loaded, and for one without blocks.
    """
    module = empty_model(
        str(model), task="auto", revision=None, dtype=dtype, attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    ).module  # fmt: skip
    notes = describe_modules(module)
    blocks = [path for path, note in notes.items() if note.role == "block"]
    if not blocks:
        raise ModelError(
            "this model has no list of blocks to plant a fault in", where=str(model),
            hint="capture it and name a module of your own: --plant 'MODULE:out=scale:1.5'",
        )  # fmt: skip
    block = blocks[len(blocks) // 2]
    weighted = [
        escape_path(path) for path, part in module.named_modules()
        if path and any(p.ndim > 0 for p in part.parameters(recurse=False))
        and escape_path(path).startswith(f"{block}.")
    ]  # fmt: skip
    if not weighted:
        raise ModelError(f"block {block} has no module with weights", where=str(model))
    try:
        plan = plan_capture(
            model, sites=["modules"], prompts=[list(range(1, 9))], dtype=dtype,
            trust_remote_code=trust_remote_code, device="cpu", max_new_tokens=1,
        )  # fmt: skip
    except ModelError:
        return block, weighted[-1]
    outputs = [row for row in plan.rows if row.site.startswith((f"{block}:out", f"{block}."))
               and row.site.endswith(":out")]  # fmt: skip
    return block, _last_writer(block, outputs, weighted) or weighted[-1]


def _last_writer(block: str, outputs: list[PlannedSite], weighted: list[str]) -> str | None:
    """``outputs`` in the order in which they are made, the block's own last."""
    result = next((row for row in outputs if row.site == f"{block}:out"), None)
    if result is None:
        return None
    inner = [row for row in outputs if row is not result and row.bytes_prefill > 0]
    if result.bytes_prefill == 0:  # it is what the last of them made
        inner = inner[:-1]
    whole = [module_of(row.site) for row in inner
             if math.prod(row.shape) == math.prod(result.shape)]  # fmt: skip
    return next((path for path in reversed(whole) if path in weighted), None)
