"""A precision policy, whosever it is."""

from __future__ import annotations

import json
from pathlib import Path

from divergence.errors import UsageError
from divergence.training.policies import deepspeed, fsdp, megatron
from divergence.training.policies.policy import PrecisionPolicy

__all__ = ["read_policy"]

MAX_BYTES = 64 << 20
"""A log may be long; its arguments stand at its beginning."""


def read_policy(text: str) -> PrecisionPolicy:
    """``text``: FSDP's policy, or the path of a file of DeepSpeed or Megatron-LM. Raises UsageError
    where it is none of them."""
    if fsdp.is_policy(text):
        return fsdp.read(text)
    path = Path(text).expanduser()
    if not path.is_file():
        raise UsageError(
            f"--precision-policy {text}: there is no such file",
            hint="a ds_config.json, Megatron-LM's arguments or log, or the text "
            "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)",
        )
    with path.open("rb") as file:
        content = file.read(MAX_BYTES).decode("utf-8", "replace")
    try:
        config = json.loads(content)
    except ValueError as error:
        if content.lstrip().startswith("{"):
            raise UsageError(f"--precision-policy {text}: no valid JSON, {error}") from None
        return megatron.read(content, str(path))
    if not isinstance(config, dict) or not config.keys() & {*deepspeed.SECTIONS}:
        raise UsageError(
            f"--precision-policy {text}: JSON, but no configuration of DeepSpeed",
            hint=f"it has none of {', '.join(deepspeed.SECTIONS[:5])}",
        )
    return deepspeed.read(config)
