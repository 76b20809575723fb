"""Megatron-LM's arguments: a launch script, a YAML file, or the list that it prints at its start.

As its argument checks read them: with ``--bf16`` gradients are added up and reduced in float32
unless ``--grad-reduce-in-bf16`` is given; with ``--fp16`` only where
``--accumulate-allreduce-grads-in-fp32`` is. Either keeps float32 copies of the weights. With
``--use-precision-aware-optimizer`` moments may have another dtype.

Source: megatron/training/arguments.py (``validate_args``).
"""

from __future__ import annotations

import re
from typing import Any

from divergence.errors import UsageError
from divergence.training.policies.policy import PrecisionPolicy, named_dtype, number

__all__ = ["read"]

_LOGGED = re.compile(r"^.*?\b([a-z][a-z0-9_]*) \.{2,} *(\S.*)$", re.MULTILINE)
"""``  bf16 .............................. True``, behind what a launcher puts before it."""
_YAML = re.compile(r"^[ \t]*([a-z][a-z0-9_]*)[ \t]*:[ \t]*([^\s#]+)[ \t\r]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)(?:[ =]+([^\s-]\S*))?")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_KNOWN = ("bf16", "fp16", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16",
          "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
          "use_precision_aware_optimizer", "loss_scale", "clip_grad")  # fmt: skip
_NO = ("false", "none", "no", "0")


def read(text: str, where: str) -> PrecisionPolicy:
    """Raises UsageError where none of its arguments is found, or one cannot be tried here."""
    given = _arguments(text)
    if not given:
        raise UsageError(
            f"{where} holds neither DeepSpeed's configuration nor arguments of Megatron-LM",
            hint="a ds_config.json; a launch script, YAML file or log with --bf16 or the like; or "
            "FSDP's policy as text",
        )

    def on(name: str) -> bool:
        return given.get(name, "none").lower() not in _NO

    if on("bf16") and on("fp16"):
        raise UsageError(f"{where} has both --bf16 and --fp16", hint="leave one out")
    dtype = "bfloat16" if on("bf16") else "float16" if on("fp16") else "float32"
    wide = on("accumulate_allreduce_grads_in_fp32")
    main_grads = given.get("main_grads_dtype", "fp32").removeprefix("torch.")
    if dtype == "bfloat16" and on("grad_reduce_in_bf16"):
        wide = False
    elif dtype == "bfloat16" and named_dtype(main_grads, "main_grads_dtype") == "float32":
        wide = True
    sums = "float32" if wide else dtype
    options: dict[str, Any] = {"dtype": dtype, "reduce_dtype": sums, "accumulate_dtype": sums}
    if dtype != "float32":
        options["main_weights"] = True
    if on("use_precision_aware_optimizer"):
        options |= _of_optimizer(given)
    if on("loss_scale"):
        options["loss_scale"] = number(given["loss_scale"], "loss_scale")
    if on("clip_grad"):
        options["clip_grad_norm"] = number(given["clip_grad"], "clip_grad")
    switches = tuple(
        name if value.lower() == "true" else f"{name}={value}"
        for name, value in given.items()
        if value.lower() not in _NO
    )
    return PrecisionPolicy(framework="Megatron-LM", options=options, switches=switches)


def _arguments(text: str) -> dict[str, str]:
    """Those that are known, by their name in Python; not those that are commented out."""
    text = _COMMENT.sub("", text)
    arguments: dict[str, str] = {}
    for pattern in (_YAML, _LOGGED):
        arguments |= {
            name: value.rstrip() for name, value in pattern.findall(text) if name in _KNOWN
        }
    for name, value in _ARGUMENT.findall(text):
        name = name.replace("-", "_")
        if name in _KNOWN:
            arguments[name] = value.rstrip("\"'\\") or "true"
    return {name: value.strip("\"'") for name, value in arguments.items()}


def _of_optimizer(given: dict[str, str]) -> dict[str, Any]:
    main = given.get("main_params_dtype", "fp32")
    if named_dtype(main, "main_params_dtype") != "float32":
        raise UsageError(f"main_params_dtype is {main}: main weights are tried in float32 alone")
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    moments = {named_dtype(given.get(name, "fp32"), name) for name in names}
    if len(moments) > 1:
        raise UsageError("exp_avg_dtype and exp_avg_sq_dtype differ: moments are tried in one")
    return {"moments_dtype": moments.pop()}
