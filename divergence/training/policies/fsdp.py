"""FSDP's policy as text: ``MixedPrecisionPolicy(param_dtype=torch.bfloat16, ...)``.

Ranks keep their parts of the weights in the dtype in which the model was loaded, which its guide
expects to be float32, and the optimizer steps those: float32 main weights. Forward and backward are
made in ``param_dtype``. Gradients are reduced in ``reduce_dtype``, by default ``param_dtype``, and
added up in the weights' own dtype.

Source: torch.distributed.fsdp.MixedPrecisionPolicy (FSDP2), torch.distributed.fsdp.MixedPrecision
(FSDP1, with ``buffer_dtype``).
"""

from __future__ import annotations

import ast
import re
from typing import Any

from divergence.errors import UsageError, first_line
from divergence.training.policies.policy import PrecisionPolicy, half, named_dtype

__all__ = ["is_policy", "read"]

_POLICY = re.compile(r"\s*(?:[\w.]+\.)?MixedPrecision(?:Policy)?\(")
_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype")
_OTHERS = ("output_dtype", "cast_forward_inputs", "cast_root_forward_inputs",
           "keep_low_precision_grads", "_module_classes_to_ignore")  # fmt: skip


def is_policy(text: str) -> bool:
    """Is it the text of one?"""
    return _POLICY.match(text) is not None


def read(text: str) -> PrecisionPolicy:
    """Raises UsageError for text that is no call with named arguments."""
    given = _arguments(text)
    dtypes = {
        name: named_dtype(value, name)
        for name, value in given.items()
        if name in _DTYPES and value is not None
    }
    computed = dtypes.get("param_dtype")
    options: dict[str, Any] = {"accumulate_dtype": "float32"}
    if computed is not None:
        options |= {"dtype": computed, "main_weights": half(computed)}
    sent = dtypes.get("reduce_dtype", computed)
    options |= {} if sent is None else {"reduce_dtype": sent}
    if "buffer_dtype" in dtypes:
        options["buffer_dtype"] = dtypes["buffer_dtype"]
    switches = tuple(f"{name}={value}" for name, value in dtypes.items())
    return PrecisionPolicy(framework="FSDP", options=options, switches=switches)


def _arguments(text: str) -> dict[str, Any]:
    hint = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (MemoryError, RecursionError, SyntaxError, ValueError) as error:
        raise UsageError(f"--precision-policy {text}: {first_line(error)}", hint=hint) from None
    if not isinstance(call, ast.Call) or call.args:
        raise UsageError(f"--precision-policy {text}: name each argument", hint=hint)
    given: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in (*_DTYPES, *_OTHERS):
            raise UsageError(f"--precision-policy: FSDP's policy has no {keyword.arg}", hint=hint)
        value = keyword.value
        given[keyword.arg] = value.value if isinstance(value, ast.Constant) else ast.unparse(value)
    return given
