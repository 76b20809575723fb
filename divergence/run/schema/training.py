"""A training step in a manifest."""

from __future__ import annotations

import msgspec

__all__ = ["Training"]


class Training(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The training step that was recorded in place of decoding."""

    train: bool = False
    """Was there one?"""
    autocast: str | None = None
    """The dtype of the forward under autocast. None: without."""
    gradient_checkpointing: bool = False
    """Blocks ran again in the backward."""
    dropout: bool = False
    """The model's own was kept."""
    optimizer: str | None = None
    """``adamw`` or ``sgd``, of which one step was made. None: without a step."""
    learning_rate: float | None = None
    weight_decay: float | None = None
    clip_grad_norm: float | None = None
    """The norm to which the gradients were scaled down. None: not clipped."""
    loss_scale: float | None = None
    """By what the loss was multiplied before the backward. None: by nothing."""
