"""Does a row's result depend on the rows beside it?

The same row alone (M = 1, decoding) and among 16 (prefill); and in batches of every size up to 17,
whose kernels have blocks, tails and switches. Rows are independent in exact arithmetic, so any
differing bit is another order of additions. Sizes that give the same bits stand together:
``1 | 2-16 | 17``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from divergence.arithmetic.notebook import Notebook
from divergence.arithmetic.values import exact_values
from divergence.numerics.formats import format_of

__all__ = ["SIZES", "batch_groups", "probe_rows", "row_share", "spans"]

Rowwise = Callable[[torch.Tensor], torch.Tensor]

SIZES = tuple(range(1, 18))
FEW_SIZES = (1, 2, 3, 4, 5, 8, 12, 16, 17)
"""For the quick form: where kernels switch, as far as was seen."""
_COLUMNS = 64


def row_share(call: Rowwise, x: torch.Tensor, *, every: int = 1) -> tuple[int, int]:
    """(outputs that differ, outputs) of row 0, ``every``, … alone against all rows together."""
    rows = range(0, len(x), every)
    together = call(x)[::every]
    alone = torch.cat([call(x[row : row + 1]) for row in rows])
    return int((alone != together).sum()), together.numel()


def batch_groups(call: Rowwise, x: torch.Tensor, sizes: tuple[int, ...] = SIZES) -> list[list[int]]:
    """Batch sizes that give row 0 the same bits, in order of their smallest."""
    groups: dict[bytes, list[int]] = {}
    for size in sizes:
        bits = call(x[:size])[0].contiguous().view(torch.uint8).numpy().tobytes()
        groups.setdefault(bits, []).append(size)
    return list(groups.values())


def spans(groups: list[list[int]]) -> str:
    """``[[1], [2, 3, 4], [5, 7]]`` → ``1 | 2-4 | 5, 7``."""
    texts = []
    for group in groups:
        runs: list[list[int]] = []
        for size in group:
            if runs and size == runs[-1][-1] + 1:
                runs[-1].append(size)
            else:
                runs.append([size])
        texts.append(
            ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        )
    return " | ".join(texts)


def probe_rows(
    notebook: Notebook,
    device: str,
    dtypes: tuple[torch.dtype, ...],
    lengths: tuple[int, ...],
    *,
    few: bool = False,
) -> None:
    """Linear, and the sums that norms and softmax make over a row. ``few``: fewer of
    them, which the names of the facts tell."""
    for dtype in dtypes:
        for length in lengths:
            weight = exact_values(7, (_COLUMNS, length), dtype).to(device)
            x = exact_values(8, (max(SIZES), length), dtype)
            calls: dict[str, Rowwise] = {
                f"linear K={length} N={_COLUMNS}": _linear(weight, device),
                f"sum n={length}": lambda rows: rows.to(device).sum(-1, keepdim=True).cpu(),
                f"softmax n={length}": lambda rows: rows.to(device).softmax(-1).cpu(),
                f"layer_norm n={length}": _layer_norm(length, device),
            }
            for name, call in calls.items():
                _one(notebook, f"{name} {format_of(dtype).name}", call, x, few=few)


def _linear(weight: torch.Tensor, device: str) -> Rowwise:
    return lambda rows: torch.nn.functional.linear(rows.to(device), weight).cpu()


def _layer_norm(length: int, device: str) -> Rowwise:
    return lambda rows: torch.nn.functional.layer_norm(rows.to(device), (length,)).cpu()


def _one(notebook: Notebook, subject: str, call: Rowwise, x: torch.Tensor, *, few: bool) -> None:
    sizes = FEW_SIZES if few else SIZES
    name, _, dtype = subject.rpartition(" ")
    subject = f"{name} sizes={len(sizes)} {dtype}"
    try:
        differ, total = row_share(call, x[:16], every=5 if few else 1)
        groups = batch_groups(call, x, sizes)
    except (RuntimeError, NotImplementedError) as error:
        notebook.absent("rows", subject, error)
        return
    notebook.note(
        "rows", subject,
        "the same bits at M=1 and M=16" if not differ else "other bits at M=1 than at M=16",
        numbers={"differ": differ, "outputs": total},
        evidence=f"{differ} of {total} outputs differ",
    )  # fmt: skip
    notebook.note(
        "batch", subject,
        "invariant" if len(groups) == 1 else f"varies with the batch: {spans(groups)}",
        numbers={"groups": len(groups), "sizes": len(sizes)},
    )  # fmt: skip
