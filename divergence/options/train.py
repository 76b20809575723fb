"""The options of a training step: ``capture --train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from divergence.options.option import Option, Options

__all__ = ["TRAINING", "PlanOptions", "TrainOptions"]

TRAINING = "Training"
"""The panel of ``capture --help``."""


class TrainOptions(Options, frozen=True, kw_only=True):
    """None means "as recorded" with ``--like``, and the default without."""

    train: Annotated[
        bool | None,
        Option(
            "--train",
            "Forward and backward on the prompts, each token's label being the next one: the loss, "
            "the gradients of blocks and parameters. Nothing is generated.",
            TRAINING,
            recorded="training.train",
        ),
    ] = None
    autocast: Annotated[
        str | None,
        Option(
            "--autocast DTYPE",
            "The forward under torch.autocast in bfloat16 or float16.",
            TRAINING,
            recorded="training.autocast",
        ),
    ] = None
    gradient_checkpointing: Annotated[
        bool | None,
        Option(
            "--gradient-checkpointing",
            "Run each block's forward again in the backward, in place of keeping activations.",
            TRAINING,
            recorded="training.gradient_checkpointing",
        ),
    ] = None
    dropout: Annotated[
        bool | None,
        Option(
            "--dropout",
            "Keep the model's dropout, which draws from this machine's generator. Default: off.",
            TRAINING,
            recorded="training.dropout",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        Option(
            "--optimizer-step NAME",
            "One step of adamw or sgd behind the backward: moments and updates are recorded.",
            TRAINING,
            recorded="training.optimizer",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Option(
            "--learning-rate RATE",
            "Of the optimizer. Default: 1e-3.",
            TRAINING,
            recorded="training.learning_rate",
        ),
    ] = None
    weight_decay: Annotated[
        float | None,
        Option(
            "--weight-decay SHARE",
            "Of the optimizer, on matrices alone. Default: 0.01 of adamw, 0 of sgd.",
            TRAINING,
            recorded="training.weight_decay",
        ),
    ] = None
    clip_grad_norm: Annotated[
        float | None,
        Option(
            "--clip-grad-norm NORM",
            "Scale the gradients down to this norm before the optimizer's step.",
            TRAINING,
            recorded="training.clip_grad_norm",
        ),
    ] = None
    loss_scale: Annotated[
        float | None,
        Option(
            "--loss-scale FACTOR",
            "Multiply the loss before the backward, and divide the gradients behind it, as mixed "
            "precision in float16 does.",
            TRAINING,
            recorded="training.loss_scale",
        ),
    ] = None
    reduce_dtype: Annotated[
        str | None,
        Option(
            "--reduce-dtype DTYPE",
            "Add up the prompts' gradients as so many ranks would, sending float32, bfloat16 or "
            "float16.",
            TRAINING,
            recorded="training.reduce_dtype",
        ),
    ] = None
    reduce_order: Annotated[
        str | None,
        Option(
            "--reduce-order ORDER",
            "With --reduce-dtype: ring or tree. Default: ring.",
            TRAINING,
            recorded="training.reduce_order",
        ),
    ] = None
    accumulate_dtype: Annotated[
        str | None,
        Option(
            "--accumulate-dtype DTYPE",
            "Add up the prompts' gradients in float32, bfloat16 or float16. Default: the "
            "parameters' dtype.",
            TRAINING,
            recorded="training.accumulate_dtype",
        ),
    ] = None
    main_weights: Annotated[
        bool | None,
        Option(
            "--main-weights",
            "The optimizer steps float32 copies of weights in 16 bits. Default: off, as in torch; "
            "on with --dry-run.",
            TRAINING,
            recorded="training.main_weights",
        ),
        Option("--no-main-weights", "The optimizer steps the weights themselves.", TRAINING),
    ] = None
    moments_dtype: Annotated[
        str | None,
        Option(
            "--moments-dtype DTYPE",
            "In which the optimizer keeps its moments. Default: that of the weights it steps.",
            TRAINING,
            recorded="training.moments_dtype",
        ),
    ] = None
    buffer_dtype: Annotated[
        str | None,
        Option(
            "--buffer-dtype DTYPE",
            "Cast the model's floating-point buffers (rotary frequencies), as FSDP's buffer_dtype "
            "does.",
            TRAINING,
            recorded="training.buffer_dtype",
        ),
    ] = None
    precision_policy: Annotated[
        str | None,
        Option(
            "--precision-policy POLICY",
            "Take these dtypes from a DeepSpeed configuration, Megatron-LM's arguments or log "
            "(files), or FSDP's policy as text: MixedPrecisionPolicy(param_dtype=bfloat16, ...).",
            TRAINING,
            recorded="training.precision_policy",
        ),
    ] = None
    zero: Annotated[
        int | None,
        Option(
            "--zero STAGE",
            "With --mesh: what ranks divide, as the stages of ZeRO do. dp: 0 nothing, 1 the "
            "optimizer's state; fsdp: 2 gradients too, 3 parameters too. Default: 3 of a mesh with "
            "fsdp, else 0.",
            TRAINING,
            minimum=0,
        ),
    ] = None
    labels: Annotated[
        Path | str | Sequence[object] | None,
        Option(
            "--labels FILE",
            "What the tokens are to be predicted as, where not as themselves: JSON lines, for each "
            "prompt a list of token ids, -100 for a token without a label, or "
            '{"completion_from": N}: tokens from N on.',
            TRAINING,
        ),
    ] = None


class PlanOptions(Options, frozen=True, kw_only=True):
    """What ``--dry-run --train`` alone is told: how a step would be kept and fed."""

    micro_batch_size: Annotated[
        int | None,
        Option(
            "--micro-batch-size N",
            "With --dry-run: sequences of one forward on a rank. Default: as the prompts.",
            TRAINING,
            minimum=1,
        ),
    ] = None
    sequence_length: Annotated[
        int | None,
        Option(
            "--sequence-length N",
            "With --dry-run: tokens of each sequence. Default: as the prompts.",
            TRAINING,
            minimum=2,
        ),
    ] = None
