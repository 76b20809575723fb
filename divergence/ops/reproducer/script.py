"""A script that runs one operator: torch and safetensors alone, short enough for a bug tracker.

Whatever the run says of itself reaches the script as a literal (reproducer.source), never as
code; the names of the operator and of its arguments are those that torch, or the suite, knows.
Values stand beside it in safetensors files; a dtype that not every release of safetensors has a
name for as raw bytes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from divergence.numerics.formats import format_named
from divergence.ops.allowed import Refusal, find_operator
from divergence.ops.arguments import check_names, contiguous_stride, decoded
from divergence.ops.reproducer.source import (
    call_node,
    check_script,
    literal,
    node,
    pasted_source,
    place,
)
from divergence.ops.suite.definition import PREFIX
from divergence.run.schema.manifest import Manifest, Switch
from divergence.run.schema.record import Call

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

    Raises Refusal where the operator cannot be called by its name, or an argument has none of its.
    """
    check_names(call)
    names = operand_names(call)
    imports, definition, expression, written = _called(call, names)
    tables: dict[str, Mapping[str, Any]] = {
        "layout": {
            name: (
                format_named(operand.dtype).torch_dtype,
                tuple(operand.shape),
                tuple(operand.stride or contiguous_stride(operand.shape)),
                operand.misalignment_bytes,
            )
            for name, operand in zip(names, call.operands, strict=True)
        },
        "expected": {port: (out.dtype, tuple(out.shape)) for port, out in expected.items()},
        "switches": _switches(manifest.settings.switches),
    }
    values = {
        "device": _kind(device),
        "recorded_on": _kind(manifest.environment.device_type),
        "deterministic": manifest.settings.deterministic,
        "threads": manifest.environment.num_threads,
        "expression": expression,
    }
    meant = {name: node(value) for name, value in (tables | values).items()}
    fixed = {
        "imports": imports,
        "definition": definition,
        "load_truth": 'load_file(HERE / "truth.safetensors")' if has_truth else "{}",
    }
    back = "\n    result = {}".format if written is not None else lambda _: ""
    if written is not None:
        meant["written"] = node(written)
    text = _SCRIPT.format(
        title=_comment(title), site=_comment(site), kind=_kind(device),
        written=back(literal(written)), **fixed,
        **{name: _table(value) for name, value in tables.items()},
        **{name: literal(value) for name, value in values.items()},
    )  # fmt: skip
    template = _SCRIPT.format(
        title="", site="", kind="", written=back(place("written")), **fixed,
        **{name: place(name) for name in tables | values},
    )  # fmt: skip
    check_script(text, template, meant)
    return text


def _table(rows: Mapping[str, Any]) -> str:
    """A dict, one entry a line."""
    return "{\n" + "".join(f"    {literal(k)}: {literal(v)},\n" for k, v in rows.items()) + "}"


def _comment(text: str) -> str:
    """One line that cannot end a comment or a string."""
    return re.sub(r"[^\x20-\x7e]", "?", text).replace('"', "'").replace("\\", "/")


def _kind(device: str) -> str:
    """A type of device: letters alone."""
    return re.sub(r"[^a-z]", "", device) or "cpu"


def _switches(switches: Sequence[Switch]) -> dict[str, str | bool]:
    """The precision switches that the run's machine took."""
    return {
        switch.name: {"true": True, "false": False}.get(switch.asked, switch.asked)
        for switch in switches
        if switch.status == "accepted" and switch.asked != "-" and _SWITCH.fullmatch(switch.name)
    }


def _called(call: Call, names: Sequence[str]) -> tuple[str, str, ast.expr, list[ast.expr] | None]:
    """(imports, definitions, the call, the tensors it writes to where it returns none)."""
    if call.operator.startswith(PREFIX):
        imports, source, function = pasted_source(call.operator)
        inside = {name: _argument(value, names) for name, value in call.arguments.items()}
        return imports, f"\n{source}\n", call_node([function], [], inside), None
    operator = find_operator(call.operator)
    package = _PACKAGES.get(operator.namespace)
    imports = ""
    if package is not None:
        imports = f"import {package}  # registers torch.ops.{operator.namespace}\n"
    elif operator.namespace not in ("aten", "prims"):
        imports = f"# import here the package that registers torch.ops.{operator.namespace}\n"
    args: list[ast.expr] = []
    keywords: dict[str, ast.expr] = {}
    written: list[ast.expr] = []
    gap: list[ast.expr] = []  # defaults between arguments that were given by position
    for argument in operator._schema.arguments:
        if argument.name not in call.arguments:
            if not argument.kwarg_only:
                gap.append(node(argument.default_value))
            continue
        tree = _argument(call.arguments[argument.name], names)
        if argument.kwarg_only:
            keywords[argument.name] = tree
        else:
            args += [*gap, tree]
            gap.clear()
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(tree)
    called = call_node(["torch", "ops", *call.operator.split(".")], args, keywords)
    return imports, "", called, None if operator._schema.returns else written


def _argument(value: Any, names: Sequence[str]) -> ast.expr:
    """An argument as a syntax tree."""
    if isinstance(value, list):
        return node([_argument(item, names) for item in value])
    if isinstance(value, dict) and set(value) == {"tensor"}:
        return ast.Subscript(ast.Name("x", ast.Load()), node(names[value["tensor"]]), ast.Load())
    if isinstance(value, dict) and set(value) == {"device"}:
        return call_node(["torch", "device"], [ast.Name("DEVICE", ast.Load())])
    return node(decoded(value, (), "cpu"))


_SCRIPT = '''\
"""{title}

Recorded at {site}
Needs torch and safetensors, nothing else:

    python repro.py            # on {kind}; or name a device: python repro.py cuda:1
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
{imports}
HERE = Path(__file__).resolve().parent
DEVICE = sys.argv[1] if len(sys.argv) > 1 else {device}
RECORDED_ON = {recorded_on}

# name: dtype, shape, strides in elements, address modulo 64 bytes. Kernels are chosen by layout.
INPUTS = {layout}

EXPECTED = {expected}

# Switches of the run that recorded this; one that this torch does not have is passed over.
SWITCHES = {switches}
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
