"""DeepSpeed's configuration: ``ds_config.json``.

As its engine reads it: parameters are in the dtype that is enabled; gradients are reduced in
``communication_data_type``, by default that dtype; they are added up over micro-batches in
``data_types.grad_accum_dtype``, by default float32 of a bfloat16 model without ZeRO, else the
model's dtype; weights have float32 copies unless ``..._master_weights_and_grads`` is set.

Source: deepspeed/runtime/engine.py (``communication_data_type``, ``get_data_types``) and
deepspeed/runtime/precision_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from divergence.errors import UsageError
from divergence.training.policies.policy import PrecisionPolicy, half, named_dtype, number

__all__ = ["SECTIONS", "read"]

SECTIONS = ("bf16", "bfloat16", "fp16", "zero_optimization", "communication_data_type",
            "data_types", "torch_autocast", "train_batch_size",
            "train_micro_batch_size_per_gpu")  # fmt: skip
"""By which a configuration is known as DeepSpeed's."""


def read(config: Mapping[str, Any]) -> PrecisionPolicy:
    """Raises UsageError for values that leave a dtype open (``auto``) or contradict each other."""
    said: list[str] = []
    bf16 = "bf16" if "bf16" in config else "bfloat16"
    switches = {"bf16": bf16, "fp16": "fp16", "torch_autocast": "torch_autocast"}
    on = [name for name, section in switches.items() if _at(config, f"{section}.enabled")]
    if len(on) > 1:
        raise UsageError(f"DeepSpeed's configuration enables {' and '.join(on)}: only one of them")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(on[0] if on else "", "float32")
    said += [f"{name}.enabled" for name in on]
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
            said.append(f"{place}={value}")
    if on != ["torch_autocast"]:  # there each parameter's gradient may have its own
        options.setdefault("reduce_dtype", dtype)
    if "accumulate_dtype" not in options:
        wide = dtype == "bfloat16" and stage == 0
        options["accumulate_dtype"] = "float32" if wide else dtype
        said += [f"zero_optimization.stage={stage}"] if dtype == "bfloat16" else []
    if half(dtype):
        switch = on[0]
        without = f"{switch}_master_weights_and_grads"
        options["main_weights"] = not _at(config, f"{switches[switch]}.{without}")
        if not options["main_weights"]:
            said.append(f"{switch}.{without}")
            narrow = _at(config, f"{switches[switch]}.bf16_optimizer_states")
            options["moments_dtype"] = dtype if narrow else "float32"
            said += [f"{switch}.bf16_optimizer_states"] if narrow else []
    if dtype == "float16":
        place = "fp16.loss_scale"
        scale = number(_at(config, place, 0), place)
        if scale:
            options["loss_scale"] = scale
            said.append(f"{place}={scale:g}")
    clip = config.get("gradient_clipping", 0)
    if clip and clip != "auto":  # no dtype is left open by that
        options["clip_grad_norm"] = number(clip, "gradient_clipping")
        said.append(f"gradient_clipping={clip}")
    return PrecisionPolicy(framework="DeepSpeed", options=options, switches=tuple(said))


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
