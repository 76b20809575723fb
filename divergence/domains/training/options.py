"""Options that training adds to commands of the core."""

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


@dataclass(frozen=True, kw_only=True)
class LossOptions(Options):
    """What `compare` asks of two files of losses alone."""

    warmup_steps: int | None = option(
        "--warmup-steps N",
        "Of two files of losses: leave out steps below N. Default: the first tenth of those in "
        "both, at most 100.",
        minimum=0,
        after="model",
    )
