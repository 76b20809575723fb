"""A script that runs one operator: torch and safetensors alone, short enough for a bug tracker.

Whatever the run says of itself reaches the script as a literal (repr of a number, a string or a
tuple), never as code; the operator's name is one that torch knows. Values stand beside it in
safetensors files; a dtype that not every release of safetensors has a name for as raw bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from divergence.numerics.formats import format_named, format_of
from divergence.ops.arguments import decoded
from divergence.ops.lookup import find_operator
from divergence.ops.pasted import pasted_source
from divergence.ops.refusal import Refusal
from divergence.ops.registry import PREFIX
from divergence.ops.strided import contiguous_stride
from divergence.run.call import Call
from divergence.run.manifest import Manifest, Switch

__all__ = ["operand_names", "portable", "portable_truth", "script_text"]

_PORTABLE = frozenset("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split())
"""What every release of safetensors stores under its own name."""
_PACKAGES = {"npu": "torch_npu", "torchvision": "torchvision", "vllm": "vllm",
             "transformers": "transformers.integrations.moe"}  # fmt: skip
"""Namespace of operators → the package whose import registers them."""
_SWITCH = re.compile(r"torch\.backends(\.[a-z][a-z0-9_]*)+")


def portable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as safetensors stores it: itself, or its bytes."""
    tensor = tensor.detach().contiguous().clone()
    if str(tensor.dtype).removeprefix("torch.") in _PORTABLE:
        return tensor
    return tensor.reshape(-1).view(torch.uint8)


def portable_truth(tensor: torch.Tensor) -> torch.Tensor:
    """A truth as float64: of complex numbers real and imaginary parts along a last axis."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128)).contiguous().clone()
    wide = tensor.double() if tensor.is_floating_point() else tensor
    return wide.detach().contiguous().clone()


def operand_names(call: Call) -> list[str]:
    """A name for each operand: of the argument, with its place in a list (``tensors.1``).

    Raises Refusal for an argument that is no operand's number.
    """
    names = [""] * len(call.operands)

    def walk(value: Any, name: str) -> None:
        if isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, f"{name}.{index}")
        elif isinstance(value, dict) and set(value) == {"tensor"}:
            number = value["tensor"]
            if type(number) is not int or not 0 <= number < len(names):
                raise Refusal("its arguments cannot be read", detail=repr(value)[:80])
            names[number] = names[number] or name

    for name, value in call.arguments.items():
        walk(value, name)
    return [name or f"operand.{number}" for number, name in enumerate(names)]


def script_text(
    call: Call,
    manifest: Manifest,
    expected: Mapping[str, torch.Tensor],
    *,
    site: str,
    title: str,
    device: str,
    has_truth: bool,
) -> str:
    """The whole of repro.py; ``device``: the type it runs on unless told.

    Raises Refusal where the operator cannot be called by its name.
    """
    names = operand_names(call)
    layout = "".join(
        f"    {name!r}: (torch.{format_named(operand.dtype).name}, {tuple(operand.shape)!r}, "
        f"{tuple(operand.stride or contiguous_stride(operand.shape))!r}, "
        f"{operand.misalignment_bytes}),\n"
        for name, operand in zip(names, call.operands, strict=True)
    )
    imports, definition, expression, written = _called(call, names)
    shapes = "".join(
        f"    {port!r}: (torch.{format_of(one.dtype).name}, {tuple(one.shape)!r}),\n"
        for port, one in expected.items()
    )
    return _SCRIPT.format(
        title=_comment(title),
        imports=imports,
        site=_comment(site),
        device=_kind(device),
        recorded_on=_kind(manifest.environment.device_type),
        switches=_switches(manifest.settings.switches),
        deterministic=manifest.settings.deterministic,
        threads=manifest.environment.num_threads,
        layout=layout,
        definition=definition,
        expression=expression,
        written=written,
        load_truth='load_file(HERE / "truth.safetensors")' if has_truth else "{}",
        expected=shapes,
    )


def _comment(text: str) -> str:
    """One line that cannot end a comment or a string."""
    return re.sub(r"[^\x20-\x7e]", "?", text).replace('"', "'").replace("\\", "/")


def _kind(device: str) -> str:
    """A type of device: letters alone."""
    return re.sub(r"[^a-z]", "", device) or "cpu"


def _switches(switches: Sequence[Switch]) -> str:
    """The precision switches that the run's machine took, as entries of a table."""
    rows = []
    for switch in switches:
        if switch.status == "accepted" and switch.asked != "-" and _SWITCH.fullmatch(switch.name):
            value = {"true": True, "false": False}.get(switch.asked, switch.asked)
            rows.append(f"    {switch.name!r}: {value!r},\n")
    return "".join(rows)


def _called(call: Call, names: Sequence[str]) -> tuple[str, str, str, str]:
    """(imports, definitions, the call as an expression, the tensors it writes to)."""
    if call.operator.startswith(PREFIX):
        imports, source, function = pasted_source(call.operator)
        inside = ", ".join(f"{n}={_literal(v, names)}" for n, v in call.arguments.items())
        return imports, f"\n{source}\n", f"{function}({inside})", ""
    operator = find_operator(call.operator)
    package = _PACKAGES.get(operator.namespace)
    imports = ""
    if package is not None:
        imports = f"import {package}  # registers torch.ops.{operator.namespace}\n"
    elif operator.namespace not in ("aten", "prims"):
        imports = f"# import here the package that registers torch.ops.{operator.namespace}\n"
    words: list[str] = []
    written: list[str] = []
    gap: list[str] = []  # defaults between arguments that were given by position
    for argument in operator._schema.arguments:
        given = argument.name in call.arguments
        text = _literal(call.arguments[argument.name], names) if given else None
        if argument.kwarg_only:
            if given:
                words.append(f"{argument.name}={text}")
        elif given:
            words += [*gap, text]
            gap.clear()
        else:
            gap.append(repr(argument.default_value))
        if given and argument.alias_info is not None and argument.alias_info.is_write:
            written.append(text)
    back = "" if operator._schema.returns else f"\n    result = [{', '.join(written)}]"
    return imports, "", f"torch.ops.{call.operator}({', '.join(words)})", back


def _literal(value: Any, names: Sequence[str]) -> str:
    """An argument as Python source."""
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item, names) for item in value) + "]"
    if isinstance(value, dict) and "tensor" in value:
        return f"x[{names[value['tensor']]!r}]"
    if isinstance(value, dict) and "device" in value:
        return "torch.device(DEVICE)"
    found = decoded(value, (), "cpu")
    if isinstance(found, float) and (found != found or found in (float("inf"), -float("inf"))):
        return f"float({str(found)!r})"
    return repr(found)


_SCRIPT = '''\
"""{title}

Recorded at {site}
Needs torch and safetensors, nothing else:

    python repro.py            # on {device}; or name a device: python repro.py cuda:1
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
{imports}
HERE = Path(__file__).resolve().parent
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "{device}"
RECORDED_ON = "{recorded_on}"

# name: dtype, shape, strides in elements, address modulo 64 bytes. Kernels are chosen by layout.
INPUTS = {{
{layout}}}

EXPECTED = {{
{expected}}}

# Switches of the run that recorded this; one that this torch does not have is passed over.
SWITCHES = {{
{switches}}}
DETERMINISTIC = {deterministic}
NUM_THREADS = {threads}  # of the CPU


def set_up():
    if torch.device(DEVICE).type == "cpu":
        torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(DETERMINISTIC, warn_only=True)
    for name, value in SWITCHES.items():
        *parents, last = name.split(".")[1:]
        try:
            owner = torch
            for parent in parents:
                owner = getattr(owner, parent)
            getattr(owner, last)
            setattr(owner, last, value)
        except (AttributeError, RuntimeError):
            pass


def load_inputs():
    """The recorded values, laid out in memory as the operator saw them."""
    found = {{}}
    for name, stored in load_file(HERE / "inputs.safetensors").items():
        dtype, shape, stride, address = INPUTS[name]
        values = typed(stored, dtype, shape)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if values.numel() else 0
        memory = torch.zeros(span + 64, dtype=dtype, device=DEVICE)
        address = address if torch.device(DEVICE).type == RECORDED_ON else 0
        start = (address - memory.data_ptr()) % 64 // values.element_size()
        places = start + torch.zeros(shape, dtype=torch.int64)
        for axis, (n, s) in enumerate(zip(shape, stride)):
            view = [1] * len(shape)
            view[axis] = n
            places += (torch.arange(n) * s).reshape(view)
        raw = bits(memory)
        raw[places.reshape(-1).to(DEVICE)] = bits(values.reshape(-1)).to(DEVICE)
        found[name] = memory.as_strided(shape, stride, start)
    return found


def bits(flat):
    """The same memory as integers: not every dtype can be assigned by index."""
    kinds = {{1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}}
    kind = kinds.get(flat.element_size())
    return flat if kind is None else flat.view(kind)


def typed(stored, dtype, shape):
    """A dtype that safetensors has no name for is stored as bytes."""
    return stored if stored.dtype == dtype else stored.view(dtype).reshape(shape)

{definition}
def run(x):
    """The operator."""
    result = {expression}{written}
    return flat(result)


def flat(result):
    if isinstance(result, torch.Tensor):
        return [result.detach().cpu()]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in flat(item)]
    return []


def ulps(a, b):
    """Distance in representable values of a's dtype, or None."""
    kind = {{torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}}
    if a.dtype not in kind:
        return None
    keys = [t.to(a.dtype).contiguous().view(kind[a.dtype]).to(torch.int64) for t in (a, b)]
    low = torch.iinfo(kind[a.dtype]).min  # the sign bit alone is -0
    one, two = [torch.where(key < 0, low - key, key) for key in keys]
    return (one - two).abs()


def against(a, b, name):
    if a.shape != b.shape:
        print(f"  {{name}}: shapes {{tuple(a.shape)}} and {{tuple(b.shape)}} differ")
        return
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    one, two = a.to(wide), b.to(wide)
    gap = torch.where(one == two, 0.0, (one - two).abs())
    norm = two.abs().norm().item()
    rel = gap.norm().item() / norm if norm else float(gap.norm() > 0)
    distance = ulps(a, b)
    text = "" if distance is None or not a.numel() else f", max {{distance.max().item()}} ulp"
    largest = gap.max().item() if gap.numel() else 0.0
    different = int((gap != 0).sum())
    print(f"  {{name}}: max abs {{largest:.6g}}, rel L2 {{rel:.6g}}{{text}}, "
          f"{{different}} of {{a.numel()}} elements differ")


set_up()
capability = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "unknown")()
print(f"torch {{torch.__version__}}, {{platform.system()}} {{platform.machine()}}, "
      f"device {{DEVICE}}, CPU {{capability}}, {{torch.get_num_threads()}} threads")
expected_all = load_file(HERE / "expected.safetensors")
truth_all = {load_truth}
with torch.no_grad():
    results = run(load_inputs())
for number, result in enumerate(results):
    key = "out" if number == 0 else f"out.{{number}}"
    if key not in EXPECTED:
        continue
    expected = typed(expected_all[key], *EXPECTED[key])
    print(f"{{key}}: {{tuple(result.shape)}} {{result.dtype}}")
    against(result, expected, "from the expected output")
    if key in truth_all:
        truth = truth_all[key]
        truth = torch.view_as_complex(truth) if result.is_complex() else truth
        against(result, truth, "from the float64 truth ")
        against(expected, truth, "  the expected output from it")
'''
