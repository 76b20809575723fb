"""Options that training adds to commands of the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from divergence.options.option import Option, Options, option

TRAINING = "Training"
"""The panel of ``capture --help``."""
_late = partial(option, panel=TRAINING, late=2)
_step = partial(_late, recorded="training")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """None means "as recorded" with ``--like``, and the default without."""

    train: bool | None = _step(
        "--train",
        "Forward and backward on the prompts, each token's label being the next one: the loss, "
        "the gradients of blocks and parameters. Nothing is generated.",
    )
    autocast: str | None = _step(
        "--autocast DTYPE", "The forward under torch.autocast in bfloat16 or float16."
    )
    gradient_checkpointing: bool | None = _step(
        "--gradient-checkpointing",
        "Run each block's forward again in the backward, in place of keeping activations.",
    )
    dropout: bool | None = _step(
        "--dropout",
        "Keep the model's dropout, which draws from this machine's generator. Default: off.",
    )
    optimizer: str | None = _step(
        "--optimizer-step NAME",
        "One step of adamw or sgd behind the backward: moments and updates are recorded.",
    )
    learning_rate: float | None = _step("--learning-rate RATE", "Of the optimizer. Default: 1e-3.")
    weight_decay: float | None = _step(
        "--weight-decay SHARE",
        "Of the optimizer, on matrices alone. Default: 0.01 of adamw, 0 of sgd.",
    )
    clip_grad_norm: float | None = _step(
        "--clip-grad-norm NORM",
        "Scale the gradients down to this norm before the optimizer's step.",
    )
    loss_scale: float | None = _step(
        "--loss-scale FACTOR",
        "Multiply the loss before the backward, and divide the gradients behind it, as mixed "
        "precision in float16 does.",
    )
    reduce_dtype: str | None = _step(
        "--reduce-dtype DTYPE",
        "Add up the prompts' gradients as so many ranks would, sending float32, bfloat16 or "
        "float16.",
    )
    reduce_order: str | None = _step(
        "--reduce-order ORDER", "With --reduce-dtype: ring or tree. Default: ring."
    )
    accumulate_dtype: str | None = _step(
        "--accumulate-dtype DTYPE",
        "Add up the prompts' gradients in float32, bfloat16 or float16. Default: the "
        "parameters' dtype.",
    )
    main_weights: bool | None = _step(
        "--main-weights",
        "The optimizer steps float32 copies of weights in 16 bits. Default: off, as in torch; "
        "on with --dry-run.",
        also=Option(
            "--no-main-weights", "The optimizer steps the weights themselves.", TRAINING, late=2
        ),
    )
    moments_dtype: str | None = _step(
        "--moments-dtype DTYPE",
        "In which the optimizer keeps its moments. Default: that of the weights it steps.",
    )
    buffer_dtype: str | None = _step(
        "--buffer-dtype DTYPE",
        "Cast the model's floating-point buffers (rotary frequencies), as FSDP's buffer_dtype "
        "does.",
    )
    precision_policy: str | None = _step(
        "--precision-policy POLICY",
        "Take these dtypes from a DeepSpeed configuration, Megatron-LM's arguments or log "
        "(files), or FSDP's policy as text: MixedPrecisionPolicy(param_dtype=bfloat16, ...).",
    )
    zero: int | None = _late(
        "--zero STAGE",
        "With --mesh: what ranks divide, as the stages of ZeRO do. dp: 0 nothing, 1 the "
        "optimizer's state; fsdp: 2 gradients too, 3 parameters too. Default: 3 of a mesh with "
        "fsdp, else 0.",
        minimum=0,
    )
    labels: Path | str | Sequence[object] | None = option(
        "--labels FILE",
        "What the tokens are to be predicted as, where not as themselves: JSON lines, for each "
        "prompt a list of token ids, -100 for a token without a label, or "
        '{"completion_from": N}: tokens from N on.',
        TRAINING,
        late=2,
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """Says what ``--dry-run --train`` alone is told: how a step would be kept and fed."""

    micro_batch_size: int | None = _late(
        "--micro-batch-size N",
        "With --dry-run: sequences of one forward on a rank. Default: as the prompts.",
        minimum=1,
    )
    sequence_length: int | None = _late(
        "--sequence-length N",
        "With --dry-run: tokens of each sequence. Default: as the prompts.",
        minimum=2,
    )


@dataclass(frozen=True, kw_only=True)
class LossOptions(Options):
    """Says what `compare` asks of two files of losses alone."""

    warmup_steps: int | None = option(
        "--warmup-steps N",
        "Of two files of losses: leave out steps below N. Default: the first tenth of those in "
        "both, at most 100.",
        minimum=0,
        after="model",
    )
