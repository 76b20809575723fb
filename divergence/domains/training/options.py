"""What ``capture --dry-run`` is told of the plan of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from divergence.options.commands import TRAINING
from divergence.options.option import Options, option


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """What ``--dry-run --train`` alone is told: how a step would be kept and fed."""

    micro_batch_size: int | None = option(
        "--micro-batch-size N",
        "With --dry-run: sequences of one forward on a rank. Default: as the prompts.",
        TRAINING,
        minimum=1,
    )
    sequence_length: int | None = option(
        "--sequence-length N",
        "With --dry-run: tokens of each sequence. Default: as the prompts.",
        TRAINING,
        minimum=2,
    )
