"""A precision policy, whosever it is."""

from __future__ import annotations

from pathlib import Path

from divergence.errors import UsageError
from divergence.outside import json_value, opened, read_as
from divergence.training.policies import deepspeed, fsdp, megatron
from divergence.training.policies.policy import PrecisionPolicy

__all__ = ["read_policy"]

MAX_BYTES = 16 << 20
"""A log may be long; its arguments stand at its beginning."""
_HINT = (
    "a ds_config.json, Megatron-LM's arguments or log, or the text "
    "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)"
)


def read_policy(text: str) -> PrecisionPolicy:
    """``text``: FSDP's policy, or the path of a file of DeepSpeed or Megatron-LM. Raises UsageError
    where it is none of them."""
    if fsdp.is_policy(text):
        return fsdp.read(text)
    path = Path(text).expanduser()
    with opened(path, error=UsageError, hint=_HINT) as file:
        content = file.read(MAX_BYTES)
    with read_as("DeepSpeed or Megatron-LM", where=str(path), error=UsageError, hint=_HINT):
        if not content.lstrip().startswith(b"{"):
            return megatron.read(content.decode("utf-8", "replace"), str(path))
        config = json_value(content, where=f"--precision-policy {text}", error=UsageError)
        if not config.keys() & {*deepspeed.SECTIONS}:
            raise UsageError(
                f"--precision-policy {text}: JSON, but no configuration of DeepSpeed",
                hint=f"it has none of {', '.join(deepspeed.SECTIONS[:5])}",
            )
        return deepspeed.read(config)
