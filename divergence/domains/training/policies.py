"""Precision policies: in which dtypes frameworks keep and add up what a training step has, read
from their own settings and written as options of ``capture --train``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from divergence.errors import UsageError, first_line
from divergence.facts import fact, sentence
from divergence.numerics.formats import format_named
from divergence.outside import json_value, opened, read_as

# What a framework's settings say of the dtypes of a training step.

_HALF = ("bfloat16", "float16")
_DTYPES = ("float32", *_HALF)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """``framework``: its name. ``options``: of ``capture``, by name. ``switches``: what of the
    settings said so, as it is written there."""

    framework: str
    options: Mapping[str, Any]
    switches: tuple[str, ...]

    def __str__(self) -> str:
        """``DeepSpeed: bf16.enabled, communication_data_type=fp32``."""
        return f"{self.framework}: {', '.join(self.switches) or 'defaults'}"


def named_dtype(value: Any, where: str) -> str:
    """``bf16``, ``torch.bfloat16`` → ``bfloat16``. Raises UsageError for what no simulation of a
    step keeps gradients or weights in."""
    name = format_named(str(value)).name
    if name not in _DTYPES:
        raise UsageError(
            f"{where} is {value}: only {', '.join(_DTYPES)} can be tried on this machine",
            hint="leave it out of the policy",
        )
    return name


def number(value: Any, where: str) -> float:
    """Raises UsageError for what is no finite number."""
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if isinstance(value, bool) or not math.isfinite(parsed):
        raise UsageError(f"{where} is {value!r}: no number", hint="correct the policy")
    return parsed


# DeepSpeed's configuration: ``ds_config.json``.
#
# As its engine reads it: parameters are in the dtype that is enabled; gradients are reduced in
# ``communication_data_type``, by default that dtype; they are added up over micro-batches in
# ``data_types.grad_accum_dtype``, by default float32 of a bfloat16 model without ZeRO, else the
# model's dtype; weights have float32 copies unless ``..._master_weights_and_grads`` is set.
#
# Source: deepspeed/runtime/engine.py (``communication_data_type``, ``get_data_types``) and
# deepspeed/runtime/precision_config.py.

SECTIONS = (
    "bf16 bfloat16 fp16 zero_optimization communication_data_type data_types torch_autocast "
    "train_batch_size train_micro_batch_size_per_gpu"
).split()
"""By which a configuration is known as DeepSpeed's."""


def deepspeed_policy(config: Mapping[str, Any]) -> PrecisionPolicy:
    """Raises UsageError for values that leave a dtype open (``auto``) or contradict each other."""
    reasons: list[str] = []
    bf16 = "bf16" if "bf16" in config else "bfloat16"
    switches = {"bf16": bf16, "fp16": "fp16", "torch_autocast": "torch_autocast"}
    on = [name for name, section in switches.items() if _at(config, f"{section}.enabled")]
    if len(on) > 1:
        raise UsageError(f"DeepSpeed's configuration enables {' and '.join(on)}: only one of them")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(on[0] if on else "", "float32")
    reasons += [f"{name}.enabled" for name in on]
    options: dict[str, Any] = {"dtype": dtype}
    if on == ["torch_autocast"]:
        place = "torch_autocast.dtype"
        options["autocast"] = named_dtype(_at(config, place, "bfloat16"), place)
    place = "zero_optimization.stage"
    stage = int(number(_at(config, place, 0), place))
    for option, place in (
        ("reduce_dtype", "communication_data_type"),
        ("accumulate_dtype", "data_types.grad_accum_dtype"),
    ):
        value = _at(config, place)
        if value is not None:
            options[option] = named_dtype(value, place)
            reasons.append(f"{place}={value}")
    if on != ["torch_autocast"]:  # there each parameter's gradient may have its own
        options.setdefault("reduce_dtype", dtype)
    if "accumulate_dtype" not in options:
        wide = dtype == "bfloat16" and stage == 0
        options["accumulate_dtype"] = "float32" if wide else dtype
        reasons += [f"zero_optimization.stage={stage}"] if dtype == "bfloat16" else []
    if dtype in _HALF:
        switch = on[0]
        without = f"{switch}_master_weights_and_grads"
        options["main_weights"] = not _at(config, f"{switches[switch]}.{without}")
        if not options["main_weights"]:
            reasons.append(f"{switch}.{without}")
            narrow = _at(config, f"{switches[switch]}.bf16_optimizer_states")
            options["moments_dtype"] = dtype if narrow else "float32"
            reasons += [f"{switch}.bf16_optimizer_states"] if narrow else []
    if dtype == "float16":
        place = "fp16.loss_scale"
        scale = number(_at(config, place, 0), place)
        if scale:
            options["loss_scale"] = scale
            reasons.append(f"{place}={scale:g}")
    clip = config.get("gradient_clipping", 0)
    if clip and clip != "auto":  # no dtype is left open by that
        options["clip_grad_norm"] = number(clip, "gradient_clipping")
        reasons.append(f"gradient_clipping={clip}")
    return PrecisionPolicy(framework="DeepSpeed", options=options, switches=tuple(reasons))


def _at(config: Mapping[str, Any], place: str, default: Any = None) -> Any:
    """The value of ``key``, or of ``section.key``."""
    name, dot, key = place.partition(".")
    section = config.get(name, {}) if dot else config
    if not isinstance(section, Mapping):
        raise UsageError(f"DeepSpeed's configuration: {name} is no section, but {section!r}")
    value = section.get(key if dot else name, default)
    if value == "auto":
        raise UsageError(
            f"DeepSpeed's configuration leaves {place} open (auto): the trainer decides it",
            hint="write the value that the trainer puts there",
        )
    return value


# FSDP's policy as text: ``MixedPrecisionPolicy(param_dtype=torch.bfloat16, ...)``.
#
# Ranks keep their parts of the weights in the dtype in which the model was loaded, which its guide
# expects to be float32, and the optimizer steps those: float32 main weights. Forward and backward
# are made in ``param_dtype``. Gradients are reduced in ``reduce_dtype``, by default
# ``param_dtype``, and added up in the weights' own dtype.
#
# Source: torch.distributed.fsdp.MixedPrecisionPolicy (FSDP2), torch.distributed.fsdp.MixedPrecision
# (FSDP1, with ``buffer_dtype``).

_POLICY = re.compile(r"\s*(?:[\w.]+\.)?MixedPrecision(?:Policy)?\(")
_DTYPE_NAMES = ("param_dtype", "reduce_dtype", "buffer_dtype")
_OTHERS = (
    "output_dtype cast_forward_inputs cast_root_forward_inputs keep_low_precision_grads "
    "_module_classes_to_ignore"
).split()


def fsdp_policy(text: str) -> PrecisionPolicy:
    """Raises UsageError for text that is no call with named arguments."""
    given = _arguments(text)
    dtypes = {
        name: named_dtype(value, name)
        for name, value in given.items()
        if name in _DTYPE_NAMES and value is not None
    }
    computed = dtypes.get("param_dtype")
    options: dict[str, Any] = {"accumulate_dtype": "float32"}
    if computed is not None:
        options |= {"dtype": computed, "main_weights": computed in _HALF}
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
        if keyword.arg not in (*_DTYPE_NAMES, *_OTHERS):
            raise UsageError(f"--precision-policy: FSDP's policy has no {keyword.arg}", hint=hint)
        value = keyword.value
        given[keyword.arg] = value.value if isinstance(value, ast.Constant) else ast.unparse(value)
    return given


# Megatron-LM's arguments: a launch script, a YAML file, or the list that it prints at its start.
#
# As its argument checks read them: with ``--bf16`` gradients are added up and reduced in float32
# unless ``--grad-reduce-in-bf16`` is given; with ``--fp16`` only where
# ``--accumulate-allreduce-grads-in-fp32`` is. Either keeps float32 copies of the weights. With
# ``--use-precision-aware-optimizer`` moments may have another dtype.
#
# Source: megatron/training/arguments.py (``validate_args``).

_LOGGED = re.compile(r"^.*?\b([a-z][a-z0-9_]*) \.{2,} *(\S.*)$", re.MULTILINE)
"""``  bf16 .............................. True``, behind what a launcher puts before it."""
_YAML = re.compile(r"^[ \t]*([a-z][a-z0-9_]*)[ \t]*:[ \t]*([^\s#]+)[ \t\r]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)(?:[ =]+([^\s-]\S*))?")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_KNOWN = (
    "bf16 fp16 accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 main_grads_dtype "
    "main_params_dtype exp_avg_dtype exp_avg_sq_dtype use_precision_aware_optimizer loss_scale "
    "clip_grad"
).split()
_NO = ("false", "none", "no", "0")


def megatron_policy(text: str, where: str) -> PrecisionPolicy:
    """Raises UsageError where none of its arguments is found, or one cannot be tried here."""
    given = _megatron_arguments(text)
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
        main = given.get("main_params_dtype", "fp32")
        if named_dtype(main, "main_params_dtype") != "float32":
            raise UsageError(
                f"main_params_dtype is {main}: main weights are tried in float32 alone"
            )
        names = ("exp_avg_dtype", "exp_avg_sq_dtype")
        moments = {named_dtype(given.get(name, "fp32"), name) for name in names}
        if len(moments) > 1:
            raise UsageError("exp_avg_dtype and exp_avg_sq_dtype differ: moments are tried in one")
        options["moments_dtype"] = moments.pop()
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


def _megatron_arguments(text: str) -> dict[str, str]:
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


# A precision policy, whosever it is.

MAX_BYTES = 16 << 20
"""A log may be long; its arguments stand at its beginning."""


def read_policy(text: str) -> PrecisionPolicy:
    """``text``: FSDP's policy, or the path of a file of DeepSpeed or Megatron-LM. Raises UsageError
    where it is none of them."""
    if _POLICY.match(text) is not None:
        return fsdp_policy(text)
    path, hint = Path(text).expanduser(), sentence(fact("training.policy_forms"))
    with opened(path, error=UsageError, hint=hint) as file:
        content = file.read(MAX_BYTES)
    with read_as("DeepSpeed or Megatron-LM", where=str(path), error=UsageError, hint=hint):
        if not content.lstrip().startswith(b"{"):
            return megatron_policy(content.decode("utf-8", "replace"), str(path))
        config = json_value(content, where=f"--precision-policy {text}", error=UsageError)
        if not config.keys() & {*SECTIONS}:
            raise UsageError(
                f"--precision-policy {text}: JSON, but no configuration of DeepSpeed",
                hint=f"it has none of {', '.join(SECTIONS[:5])}",
            )
        return deepspeed_policy(config)
