"""One operator by itself, as a script that shows it without the model, and as a report for whoever
made it."""

from __future__ import annotations

import ast
import contextlib
import inspect
import keyword
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from divergence.comparison.arithmetic import is_about
from divergence.document import Column, Table
from divergence.errors import FaultError, RunExistsError, RunWriteError, UsageError
from divergence.numerics.formats import format_named, format_of
from divergence.numerics.ulp import NAN_DISTANCE, ulp_distance
from divergence.ops.allowed import (
    Refusal,
    Unsafe,
    asked_for,
    find_operator,
    is_function,
    plain_function,
)
from divergence.ops.replay import (
    RANDOM,
    UNINITIALISED,
    RecordedCall,
    check_names,
    contiguous_stride,
    decoded,
    execute_ports,
    operand_value,
    operand_values,
    recorded_calls,
    replayable_pass,
)
from divergence.ops.weights import Weights
from divergence.output import write_output
from divergence.recording.code import global_names
from divergence.recording.machine import resolve_device
from divergence.run.command import command_line
from divergence.run.manifest import Manifest, digest_tensor
from divergence.run.reader import Run
from divergence.run.record import (
    Call,
    Record,
    operand_indices,
    other_scalars,
    scalar_words,
)
from divergence.run.site import did_you_mean, is_operator_site, module_of, natural_key
from divergence.run.storage import folder_of
from divergence.words import Progress, markdown_code, silent

# What a script is made of: a run's values as Python source, and functions of domains.
#
# A run may come from anyone, and a script that is made of it is run on other machines. So whatever
# a run says reaches the script through ``node`` alone: a syntax tree of a value whose type is
# checked, whose text Python itself writes. A script is then read back: its tree must be that of its
# template with these trees in their places. A domain's operator is pasted with all that it stands
# on in this package: torch's, the standard library's, constants that ``repr`` writes, and functions
# of this package that stand alone themselves.

_MAX_BITS = 64
_PLACE = "MEANT_"


def literal(value: Any) -> str:
    """``value`` as Python source. Raises Refusal for what is no plain value."""
    return ast.unparse(node(value))


def node(value: Any) -> ast.expr:
    """The syntax tree of a value: None, bool, int, float, complex, str, torch's dtypes, layouts and
    memory formats, and lists, tuples and dicts of them. A tree is taken as it is. Raises Refusal
    for anything else."""
    kind = type(value)
    if isinstance(value, ast.expr):
        return value
    if value is None or kind in (bool, str):
        return ast.Constant(value)
    if kind is int and value.bit_length() <= _MAX_BITS:
        return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))
    if kind is float:
        if not math.isfinite(value):  # Python has no word for them
            return call_node(["float"], [str(value)])
        sign = math.copysign(1.0, value) < 0
        return ast.UnaryOp(ast.USub(), ast.Constant(-value)) if sign else ast.Constant(value)
    if kind is complex:
        return call_node(["complex"], [value.real, value.imag])
    if kind is list:
        return ast.List([node(item) for item in value], ast.Load())
    if kind is tuple:
        return ast.Tuple([node(item) for item in value], ast.Load())
    if kind is dict:
        return ast.Dict([node(key) for key in value], [node(item) for item in value.values()])
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        name = str(value).removeprefix("torch.")
        if getattr(torch, name, None) is value:
            return dotted(["torch", name])
    raise Refusal("its arguments cannot be written down", detail=repr(value)[:80])


def dotted(names: Sequence[str]) -> ast.expr:
    """``["torch", "ops"]`` → the tree of ``torch.ops``. Raises Refusal for what is no name."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise Refusal(f"{name[:80]!r} is no name")
    tree: ast.expr = ast.Name(names[0], ast.Load())
    for name in names[1:]:
        tree = ast.Attribute(tree, name, ast.Load())
    return tree


def call_node(
    function: Sequence[str], args: Sequence[Any], keywords: Mapping[str, Any] | None = None
) -> ast.expr:
    """The tree of ``function(*args, **keywords)``. Raises Refusal for what is no name or value."""
    for name in keywords or ():
        dotted([name])
    return ast.Call(
        dotted(function),
        [node(value) for value in args],
        [ast.keyword(name, node(value)) for name, value in (keywords or {}).items()],
    )


def place(name: str) -> str:
    """Return what stands in a template for the value ``name``."""
    return _PLACE + name


def check_script(text: str, template: str, meant: Mapping[str, ast.expr]) -> None:
    """Is ``text`` the script ``template`` with the trees ``meant`` in their places, and no other?
    Docstrings and comments may differ. Raises FaultError: such a script is not to be written."""
    wanted = _Filled(meant).visit(ast.parse(template))
    try:
        syntax = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise FaultError(f"the script would be no Python: {error}") from error
    if _plain(syntax) != _plain(wanted):
        raise FaultError("the script would hold something that was not meant: it is not written")


class _Filled(ast.NodeTransformer):
    def __init__(self, meant: Mapping[str, ast.expr]) -> None:
        self._meant = meant

    def visit_Name(self, name: ast.Name) -> ast.expr:
        return self._meant[name.id.removeprefix(_PLACE)] if name.id.startswith(_PLACE) else name


def _plain(tree: ast.Module) -> str:
    """The tree as text, without the docstring: one constant text, or it would be another tree."""
    first = tree.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        first.value.value = ""
    return ast.dump(tree)


_OWN = "divergence."
_THERE = frozenset({"torch", "numpy"})
"""Packages that are wherever torch is, beside the standard library."""


def _collect(
    function: Callable[..., Any], operator: str, imports: dict[str, str], parts: dict[str, str]
) -> None:
    """Collect into ``parts`` the functions that ``function`` names, of its module or this package,
    then itself; into ``imports`` the rest."""
    if not inspect.isfunction(function) or function.__closure__:
        raise _not_alone(operator, getattr(function, "__name__", repr(function)))
    for name in sorted(global_names(function.__code__)):
        defined = name in imports or name in parts or name == function.__name__
        if not defined and name in function.__globals__:  # else an attribute's name, or a builtin
            value = function.__globals__[name]
            own: str = getattr(value, "__module__", None) or ""
            if inspect.isfunction(value) and (own == function.__module__ or own.startswith(_OWN)):
                if value.__name__ != name:
                    raise _not_alone(operator, name)
                _collect(value, operator, imports, parts)
            else:
                _name(name, value, operator, imports, parts)
    parts[function.__name__] = textwrap.dedent(inspect.getsource(function)).rstrip()


def _name(
    name: str, value: Any, operator: str, imports: dict[str, str], parts: dict[str, str]
) -> None:
    if isinstance(value, types.ModuleType):
        home = value.__name__
        if home.partition(".")[0] not in _THERE | sys.stdlib_module_names:
            raise _not_alone(operator, home)
        if name not in ("torch", "sys", "platform"):  # those the script has
            imports[name] = f"import {home} as {name}\n" if name != home else f"import {home}\n"
    elif _is_literal(value):
        parts[name] = f"{name} = {value!r}"
    else:
        home = getattr(value, "__module__", None) or type(value).__module__
        if home.partition(".")[0] not in _THERE | sys.stdlib_module_names:
            raise _not_alone(operator, name)
        imports[name] = f"from {home} import {getattr(value, '__name__', name)} as {name}\n"


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_literal(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _not_alone(operator: str, name: str) -> Refusal:
    return Refusal(f"{operator} does not stand alone: it needs {name}")


# How two recorded calls differ: in what they were given, and in what they gave.
#
# A reproducer shows what an operator makes of its inputs on two machines. Where the other machine's
# operator had other inputs, other weights or other scalars, its result would blame it for what it
# was given. Equal means equal bit for bit; where a side did not store an operand, its weight's
# digest counts, and otherwise nothing can be said.


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """``max_abs``: greatest |a - b|. ``rel_l2``: ‖a - b‖ / ‖b‖ (0/0 = 0, x/0 = inf). ``max_ulp``:
    greatest distance in representable values of a's format, b rounded to it; None where it has
    none. ``num_different`` of ``numel`` elements; all in float64, nan where a value is nan."""

    max_abs: float
    rel_l2: float
    max_ulp: int | None
    num_different: int
    numel: int


def difference(a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    """Measure the difference of ``a`` from ``b``; None where their shapes differ."""
    if a.shape != b.shape:
        return None
    a, b = a.reshape(-1), b.reshape(-1)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    lhs, rhs = a.to(wide), b.to(wide)
    gap = torch.where(lhs == rhs, 0.0, (lhs - rhs).abs())  # equal infinities differ by nothing
    top, bottom = float(gap.norm()), float(rhs.abs().norm())
    ulp = None
    form = format_of(a.dtype)
    if form.kind == "float" and form.name != "float64":
        distances = ulp_distance(a, b.to(a.dtype), form)
        ulp = int(distances.max()) if distances.numel() else 0
        ulp = None if ulp == NAN_DISTANCE else ulp
    return Difference(
        max_abs=float(gap.max()) if gap.numel() else 0.0,
        rel_l2=0.0 if top == 0 else (top / bottom if bottom else math.inf),
        max_ulp=ulp,
        num_different=int((gap != 0).sum()),
        numel=a.numel(),
    )


def farthest_values(
    sides: Sequence[tuple[str, torch.Tensor | None]], *, shown: Callable[[str], str] = str
) -> str:
    """Return what each side gives at the element where the first two are farthest apart, as words;
    empty where they are equal, or cannot be held against one another."""
    named = [(name, tensor) for name, tensor in sides if tensor is not None]
    if len({tensor.shape for _, tensor in named}) != 1 or len(named) < 2 or not named[0][1].numel():
        return ""
    wide = [tensor.reshape(-1).to(torch.float64) for _, tensor in named if not tensor.is_complex()]
    if len(wide) < len(named):
        return ""
    gap = torch.where(wide[0] == wide[1], 0.0, (wide[0] - wide[1]).abs()).nan_to_num(math.inf)
    at = int(gap.argmax())
    if gap[at] == 0:
        return ""
    index = [int(n) for n in torch.unravel_index(torch.tensor(at), named[0][1].shape)]
    values = [
        f"{shown(name)} {float(values[at]):.6g}"
        for (name, _), values in zip(named, wide, strict=True)
    ]
    return f"at {index} {', '.join(values)}"


def what_differs(
    call_a: RecordedCall, values: Sequence[torch.Tensor], other: Run, call_b: RecordedCall
) -> str | None:
    """Say what differs of the call ``call_a``, whose operands have ``values``, and the call
    ``call_b`` of ``other``; None where they were given the same."""
    node, call = call_a.call, call_b.call
    if node.operator != call.operator or len(node.operands) != len(call.operands):
        return f"it is {call.operator} with {len(call.operands)} tensors there"
    scalars = other_scalars(node, call)
    if scalars:
        item = scalars[0]
        return (
            f"{item.argument}={scalar_words(item.candidate)} there, "
            f"{scalar_words(item.reference)} here"
        )
    named = zip(operand_names(node), node.operands, call.operands, values, strict=True)
    for name, x, y, own in named:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{name} is {y.dtype} {y.shape} there, {x.dtype} {x.shape} here"
        if x.weight is not None and y.weight is not None:
            if (x.xxh3, x.offset, x.stride) != (y.xxh3, y.offset, y.stride):
                return f"{name} is another weight there ({y.weight}, here {x.weight})"
            continue
        try:
            value = operand_value(other, call_b.first, y, None)
        except Refusal:
            return f"what {name} was is not recorded there"
        if digest_tensor(value) != digest_tensor(own):
            apart = difference(value, own)
            by = "" if apart is None else f" by rel L2 {apart.rel_l2:.3g}"
            return f"{name} differs{by}"
    return None


# A script that runs one operator: torch and safetensors alone, short enough for a bug tracker.
#
# Whatever the run says of itself reaches the script as a literal (reproducer.source), never as
# code; the names of the operator and of its arguments are those that torch, or a domain, knows.
# Values stand beside it in safetensors files; a dtype that not every release of safetensors has a
# name for as raw bytes.

_PORTABLE = frozenset("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split())
"""What every release of safetensors stores under its own name."""
_PACKAGES = {
    "npu": "torch_npu",
    "torchvision": "torchvision",
    "vllm": "vllm",
    "transformers": "transformers.integrations.moe",
}
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
    """A name for each operand: of the argument, with its place in a list (``tensors.1``). Raises
    Refusal for an argument that is no operand's number."""
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
    """The whole of repro.py; ``device``: the type it runs on unless told. Raises Refusal where the
    operator cannot be called by its name, or an argument has none of its."""
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
        # the precision switches that the run's machine took
        "switches": {
            switch.name: {"true": True, "false": False}.get(switch.asked, switch.asked)
            for switch in manifest.settings.switches
            if switch.status == "accepted"
            and switch.asked != "-"
            and _SWITCH.fullmatch(switch.name)
        },
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
        title=_comment(title),
        site=_comment(site),
        kind=_kind(device),
        written=back(literal(written)),
        **fixed,
        **{name: _table(value) for name, value in tables.items()},
        **{name: literal(value) for name, value in values.items()},
    )
    template = _SCRIPT.format(
        title="",
        site="",
        kind="",
        written=back(place("written")),
        **fixed,
        **{name: place(name) for name in tables | values},
    )
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


def _called(call: Call, names: Sequence[str]) -> tuple[str, str, ast.expr, list[ast.expr] | None]:
    """(imports, definitions, the call, the tensors it writes to where it returns none)."""
    if is_function(call.operator):
        function = plain_function(call.operator)
        needed: dict[str, str] = {}
        parts: dict[str, str] = {}
        _collect(function, call.operator, needed, parts)
        source = "\n\n".join(parts.values())
        inside = {name: _argument(value, names) for name, value in call.arguments.items()}
        called = call_node([function.__name__], [], inside)
        return "".join(needed.values()), f"\n{source}\n", called, None
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


# report.md: a bug report that is ready to be sent: what was run, where, and how far it is off.
#
# It is to be pasted into a tracker, and what a run says of itself may come from anyone. So each of
# its words stands in a code span, where no markup, link, picture or mention begins.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSide:
    """One machine's results by port: how far from the truth, and from the first side's."""

    label: str
    manifest: Manifest
    from_truth: Mapping[str, Difference | None]
    from_first: Mapping[str, Difference | None]
    results: Mapping[str, torch.Tensor]


Values = Sequence[tuple[str, torch.Tensor | None]]
"""(whose, its result) of each side, and of float64."""
_NEAR = 1.5  # of the error of storing the truth once


def title_of(
    call: Call,
    sides: Sequence[RunSide],
    stores: Mapping[str, float | None] | None = None,
    *,
    shown: Callable[[str], str] = str,
    called: str = "",
    values: Values = (),
) -> str:
    """One line: the operator, its dtypes and shapes, and what it shows, with both values.
    ``stores``: by port, the error of storing the truth alone; ``shown``: how words of a run are
    written; ``called``: with which other arguments than on the other side; ``values``: each side's
    result, for the element where the first two are farthest apart."""
    shapes = [  # ``bfloat16 14x64, 64x64``
        f"{operand.dtype} {'x'.join(map(str, operand.shape)) or 'scalar'}"
        for operand in call.operands
    ]
    given = ", ".join(shapes[:3]) + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")
    what = f"{shown(call.operator)} ({shown(given)})"
    at = farthest_values(values, shown=shown)
    at = f"; {at}" if at else ""
    if called:
        return f"{what}: called with {shown(called)}"
    if len(sides) < 2:
        difference = sides[0].from_truth.get("out")
        store = (stores or {}).get("out")
        if difference is not None and store is not None and difference.rel_l2 <= _NEAR * store:
            return f"{what}: result is as near to float64 as its dtype allows"
        return f"{what}: result and float64 truth" + (
            "" if difference is None else f" differ by rel L2 {difference.rel_l2:.3g}{at}"
        )
    first, other = (shown(side.label) for side in sides[:2])
    apart = sides[1].from_first.get("out")
    if apart is None:
        return f"{what}: {other} gives another shape than {first}"
    if apart.num_different == 0:
        return f"{what}: {other} and {first} give the same bits"
    ulp = "" if apart.max_ulp is None else f", {apart.max_ulp:,} ulp"
    return f"{what}: {other} differs from {first} by rel L2 {apart.rel_l2:.3g}{ulp}{at}"


def report_text(
    call: Call,
    sides: Sequence[RunSide],
    stores: Mapping[str, float | None],
    *,
    site: str,
    where: str,
    truth: str | None,
    called: str = "",
    values: Values = (),
) -> str:
    """The report. ``stores``: by port the error of storing the truth alone. ``truth``: what
    computed it, as markdown, or None where there is none. ``called``, ``values``: as in
    ``title_of``."""
    title = title_of(call, sides, stores, shown=markdown_code, called=called, values=values)
    offs = []
    for side in sides:
        difference = side.from_truth.get("out")
        if difference is not None:
            ulp = "" if difference.max_ulp is None else f", max {difference.max_ulp:,} ulp"
            offs.append(
                f"{markdown_code(side.label)} is off from float64 by rel L2 "
                f"{difference.rel_l2:.3g} (max abs {difference.max_abs:.3g}{ulp})."
            )
    summary = [" ".join(offs), "", f"The float64 truth was {truth}."]
    if truth is None:
        summary = ["There is no float64 result to hold it against: the operator has none here."]
    lines = [f"# {title}", "", *summary, ""]
    called = "" if call.source is None else f", called from {markdown_code(call.source)}"
    lines += [
        "## Operator",
        "",
        f"{markdown_code(call.operator)}, recorded at {markdown_code(site)}, {where}{called}.",
        "",
    ]
    operands = zip(operand_names(call), call.operands, strict=True)
    inputs = Table(
        columns=(
            "input",
            "dtype",
            Column("shape", _tuple, own=True),
            Column("strides", _tuple, "contiguous", own=True),
            Column("address mod 64", own=True),
        ),
        rows=[(name, o.dtype, o.shape, o.stride, o.misalignment_bytes) for name, o in operands],
    )
    lines += inputs.markdown()
    scalars = {n: v for n, v in call.arguments.items() if not operand_indices(call, n)}
    if scalars:
        text = ", ".join(
            f"{markdown_code(name)} = {markdown_code(scalar_words(value))}"
            for name, value in scalars.items()
        )
        lines += ["", f"Other arguments: {text}."]
    rows: list[tuple[object, ...]] = []
    for port in sides[0].from_truth:
        for number, side in enumerate(sides):
            against = [("float64", side.from_truth.get(port))]
            if number:
                against.append((sides[0].label, side.from_first.get(port)))
            for whose, difference in against:
                if difference is not None:
                    sizes = difference.rel_l2, difference.max_abs, difference.max_ulp
                    differ = f"{difference.num_different:,} of {difference.numel:,}"
                    rows.append((port, side.label, whose, *sizes, differ))
        if stores.get(port) is not None:
            rounded = "float64, rounded once to the result's dtype"
            rows.append((port, rounded, "float64", stores[port], None, None, None))
    columns: tuple[Column | str, ...] = (
        "result",
        "side",
        "held against",
        *(Column(name, "{:.4g}".format, own=True) for name in ("rel L2", "max abs")),
        Column("max ulp", "{:,}".format, own=True),
        Column("elements that differ", own=True),
    )
    lines += ["", "## Measured", "", *Table(columns=columns, rows=rows).markdown()]
    envs = [
        side.manifest.environment.facts
        | {"deterministic": "yes" if side.manifest.settings.deterministic else "no"}
        for side in sides
    ]
    names = dict.fromkeys(name for environment in envs for name in environment)
    machines = [(name, *(env.get(name) for env in envs)) for name in names]
    lines += ["", "## Environment", "", *_side_by_side("", sides, machines)]
    facts = _facts(call, sides)
    if facts:
        lines += ["", "## Arithmetic of this operation, as probed", "", *facts]
    lines += [
        "",
        "## How to run",
        "",
        "```",
        "pip install torch safetensors",
        "python repro.py         # or: python repro.py cuda",
        "```",
        "",
    ]
    lines.append(
        "`inputs.safetensors` holds the inputs bit by bit, `expected.safetensors` what "
        f"{markdown_code(sides[0].label)} gave"
        + (", `truth.safetensors` the same operator in float64." if truth is not None else ".")
    )
    return "\n".join(lines) + "\n"


def _side_by_side(
    corner: str, sides: Sequence[RunSide], rows: Sequence[tuple[str | None, ...]]
) -> list[str]:
    """A table with a column for each side."""
    columns = (corner, *(markdown_code(side.label) for side in sides))
    return Table(columns=columns, rows=rows).markdown()


def _facts(call: Call, sides: Sequence[RunSide]) -> list[str]:
    """Return what the probes of each machine proved of this operation in these dtypes; of two
    machines first what differs between them."""
    dtypes = {operand.dtype for operand in call.operands}
    facts: dict[str, list[str | None]] = {}
    for number, side in enumerate(sides):
        for fact in side.manifest.arithmetic:
            if fact.verified and is_about(fact, call.operator, dtypes):
                facts.setdefault(fact.name, [None] * len(sides))[number] = fact.value
    if not facts:
        return []
    rows = sorted(facts.items(), key=lambda item: len(set(item[1])) == 1)
    return _side_by_side("probe", sides, [(name, *row) for name, row in rows])


def _tuple(values: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, values)) + ")"


# repro(): one recorded operator as a folder that runs anywhere, for a vendor's bug tracker.
#
#     repro.py               runs it and prints how far the result is off
#     inputs.safetensors     its inputs, bit by bit
#     expected.safetensors   what the run recorded
#     truth.safetensors      the same in float64
#     report.md              the text of a bug report
#
# The script lays the inputs out in memory as they lay, sets the switches that the run's machine
# took, and needs neither this package nor the model.

FILES = ("repro.py", "inputs.safetensors", "expected.safetensors", "truth.safetensors", "report.md")
"""All that a reproducer's folder holds."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproducer:
    """Says what was written. ``from_truth`` and ``against``: by port, of this run's result from the
    truth, and of the other run's from this one's; ``against`` is empty without another run."""

    path: Path
    title: str
    site: str
    operator: str
    sample: int
    step: int
    files: tuple[str, ...]
    from_truth: dict[str, Difference | None]
    against: dict[str, Difference | None]
    notes: tuple[str, ...] = ()


def repro(
    run: str | Path | Run,
    *,
    site: str,
    out: str | Path,
    truth: str | Path | Run | None = None,
    against: str | Path | Run | None = None,
    sample: int | None = None,
    step: int | None = None,
    model: str | Path | None = None,
    trust_remote_code: bool = False,
    operators: Sequence[str] = (),
    called: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> Reproducer:
    """Write the operator at ``site`` of ``run`` as a reproducer into the directory ``out``.

    ``against``: a run of the other machine, best a replay of ``run``; its figures stand beside
    this run's. ``truth``: a float64 replay of ``run``; else it is computed here. ``sample``,
    ``step``: which call; by default the one that differs most from ``against``, else the first.
    ``model``, ``operators``: as in ``replay``. ``called``: for the title, what the call is given
    that the other side's is not, where that is the fault.

    Raises UsageError for a site that is no operator's or not there, for operators that cannot run
    alone, for runs that do not belong together and where ``against`` was given other inputs or
    scalars, RunFormatError, ModelError, RunExistsError and
    RunWriteError.
    """
    source, other, true_run = (
        None if given is None else Run.open(given) for given in (run, against, truth)
    )
    assert source is not None
    pass_ = replayable_pass(source)
    calls = _calls_at(source, pass_, site, sample=sample, step=step)
    if true_run is not None:
        plan = true_run.manifest.plan
        belongs = plan.anchored_to == source.manifest.id and plan.replayed_pass == pass_
        if true_run.manifest.settings.compute_dtype != "float64" or not belongs:
            raise UsageError(
                f"{true_run.path} is no float64 replay of {source.path}",
                hint=command_line("replay", source.path, o="TRUTH", truth=True)
                + "; or leave it out, and it is computed here",
            )
    out = folder_of(out)
    # only an empty or absent directory is written to, or with ``force`` a reproducer's
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RunExistsError(f"{out} exists and is not a directory")
    try:
        there = {entry.name for entry in out.iterdir()} if out.exists() else set()
    except OSError as error:
        raise RunWriteError(f"{out} cannot be used: {error.strerror}") from error
    if there and not (force and there <= set(FILES)):
        foreign = sorted(there - set(FILES))
        raise RunExistsError(
            f"{out} holds {foreign[0]}" if force and foreign else f"{out} exists already",
            hint="choose another directory with -o"
            + ("" if force else ", or pass --force to replace a reproducer"),
        )
    call = calls[0] if other is None else _worst(source, other, calls)
    weights = None
    if model is not None:
        weights = Weights(str(model), source.manifest, trust_remote_code=trust_remote_code)
    (progress or silent)("repro", 0, None, call.path)
    notes: list[str] = []
    asked = asked_for(operators, resolve_device("auto"))
    try:
        operands = operand_values(source, call, weights)
        expected = {port: source.read(record) for port, record in call.results.items()}
        true, made_by = _truth(true_run, call, operands, notes, asked)
        sides = [_side(source, expected, true, expected)]
        if other is not None:
            sides.append(_other_side(source, other, call, operands, expected, true))
        if other is not None and sides[0].label == sides[1].label:  # two machines of one name
            sides = [
                replace(side, label=f"{side.label} [{run.path.name}]")
                for side, run in zip(sides, (source, other), strict=True)
            ]
        # ‖round(R) - R‖ / ‖R‖: what storing the right result in its dtype costs
        rounded = {
            port: difference(true[port].to(expected[port].dtype), true[port]) for port in true
        }
        stores = {port: None if cost is None else cost.rel_l2 for port, cost in rounded.items()}
        values = [(side.label, side.results.get("out")) for side in sides]
        values.append(("float64", true.get("out")))
        title = title_of(call.call, sides, stores, called=called, values=values)
        device = (other or source).manifest.environment.device_type
        text = script_text(
            call.call,
            source.manifest,
            expected,
            site=call.first.site,
            title=title,
            device=device,
            has_truth=bool(true),
        )
    except Refusal as refusal:
        raise UsageError(
            f"{call.path} cannot be run alone: {refusal.reason}",
            where=refusal.detail,
            hint="choose another operator, or give --model PATH for its weights",
        ) from refusal
    report = report_text(
        call.call,
        sides,
        stores,
        site=call.first.site,
        where=f"{pass_} pass, sample {call.first.sample}, step {call.first.step}",
        truth=made_by,
        called=called,
        values=values,
    )
    inputs = dict(zip(operand_names(call.call), operands, strict=True))
    files = _write(out, text, report, inputs, expected, true)
    return Reproducer(
        path=out,
        title=title,
        site=call.first.site,
        operator=call.call.operator,
        sample=call.first.sample,
        step=call.first.step,
        files=files,
        from_truth=dict(sides[0].from_truth),
        against=dict(sides[1].from_first) if other is not None else {},
        notes=tuple(notes),
    )


def _calls_at(
    run: Run, pass_: str, site: str, *, sample: int | None, step: int | None
) -> list[RecordedCall]:
    """The calls of one site, in the order of capture. Raises UsageError with what is there."""
    calls = recorded_calls(run, pass_)
    path = site.partition(":")[0]
    at_site = [call for call in calls if call.path == path]
    if not at_site:
        paths = sorted({call.path for call in calls}, key=natural_key)
        module = module_of(site)
        inside = [p for p in paths if module_of(p) == module]
        inside = inside or [p for p in paths if module_of(p).startswith(module + ".")]
        if inside and not is_operator_site(site):
            raise UsageError(
                f"{site} is a module, not an operator",
                hint=f"its operators are {', '.join(f'{p}:out' for p in inside[:6])}"
                + (f" and {len(inside) - 6} more" if len(inside) > 6 else ""),
            )
        raise UsageError(
            f"no operator at {site} in {run.path}",
            hint=did_you_mean(site, [f"{path}:out" for path in paths])
            or f"`{command_line('inspect', run.path, v=True)}` lists the sites",
        )
    chosen = [
        call
        for call in at_site
        if sample in (None, call.first.sample) and step in (None, call.first.step)
    ]
    if not chosen:
        there = ", ".join(f"{call.first.sample}/{call.first.step}" for call in at_site[:8])
        raise UsageError(
            f"{path} was not recorded in sample {sample}, step {step}"
            if None not in (sample, step)
            else f"{path} was not recorded there",
            hint=f"sample/step with it: {there}",
        )
    return chosen


def _truth(
    true_run: Run | None,
    call_alone: RecordedCall,
    operands: list[torch.Tensor],
    notes: list[str],
    asked: frozenset[str],
) -> tuple[dict[str, torch.Tensor], str | None]:
    """The right results by port and what computed them; empty where that cannot be had. The
    operator is run here in any case: what is not safe to run comes into no script."""
    try:
        results = execute_ports(
            call_alone.call, operands, device="cpu", compute_dtype=torch.float64, namespaces=asked
        )
    except Refusal as refusal:
        if isinstance(refusal, Unsafe) or refusal.reason in (
            RANDOM,
            UNINITIALISED,
            call_alone.call.note,
        ):
            raise  # no machine's result would be the right one
        results, why = None, refusal.reason
    if true_run is not None:
        records = {
            port: _find(true_run, "replayed", record) for port, record in call_alone.results.items()
        }
        tensors = {
            port: true_run.read(record) for port, record in records.items() if record is not None
        }
        if tensors:
            return (
                tensors,
                "computed by divergence "
                f"{markdown_code(true_run.manifest.tool_version)}, in a run of its own",
            )
        notes.append(f"{true_run.path} does not hold this operator: the truth was computed here")
    if results is None:
        notes.append(f"no truth: {why}")
        return {}, None
    kept = {port: results[port] for port in call_alone.results if port in results}
    return kept, f"computed with torch {torch.__version__} on a CPU"


def _find(run: Run, pass_: str, record: Record) -> Record | None:
    return run.find((pass_, record.sample, record.step, record.site))


def _pass_of(other: Run, source: Run, pass_: str) -> str:
    """The pass of the other run that holds the partner's records."""
    plan = other.manifest.plan
    if plan.replayed_pass is not None:
        return "replayed"
    return "anchored" if plan.anchored_to == source.manifest.id else pass_


def _worst(source: Run, other: Run, calls: list[RecordedCall]) -> RecordedCall:
    """The call whose first result differs most between the two runs."""
    pass_ = _pass_of(other, source, calls[0].first.pass_)
    sizes: list[float] = []
    partners = [(call, record) for call in calls if (record := _find(other, pass_, call.first))]
    for call, record in partners:
        apart = difference(other.read(record), source.read(call.first))
        sizes.append(math.inf if apart is None or math.isnan(apart.rel_l2) else apart.rel_l2)
    if not sizes:
        paths = {r.site.partition(":")[0] for r in other.records if r.pass_ == pass_}
        raise UsageError(
            f"{other.path} does not hold {calls[0].path}",
            hint=did_you_mean(calls[0].path, paths)
            or f"{command_line('replay', source.path, o='OTHER')}, on the other machine",
        )
    return partners[sizes.index(max(sizes))][0]


def _side(source: Run, results: Tensors, true: Tensors, first: Tensors) -> RunSide:
    return RunSide(
        label=source.manifest.environment.label,
        manifest=source.manifest,
        from_truth={
            port: difference(tensor, true[port]) if port in true else None
            for port, tensor in results.items()
        },
        from_first={port: difference(tensor, first[port]) for port, tensor in results.items()},
        results=results,
    )


def _other_side(
    source: Run,
    other: Run,
    call: RecordedCall,
    operands: list[torch.Tensor],
    expected: Tensors,
    true: Tensors,
) -> RunSide:
    """The other run's results at the same call, given the same. Raises UsageError otherwise."""
    pass_ = _pass_of(other, source, call.first.pass_)
    results: dict[str, Any] = {}
    for port, record in call.results.items():
        other_record = _find(other, pass_, record)
        if other_record is not None:
            results[port] = other.read(other_record)
    if other.manifest.plan.anchored_to == source.manifest.id and pass_ == "replayed":
        return _side(other, results, true, expected)
    # of other inputs or scalars its result would be no fault of its operator
    first = call.first
    calls_of_other = [
        c
        for c in recorded_calls(other, pass_)
        if c.path == call.path and (c.first.sample, c.first.step) == (first.sample, first.step)
    ]
    differs: str | None = "its call was not recorded there"
    if calls_of_other:
        differs = what_differs(call, operands, other, calls_of_other[0])
    if differs is not None:
        raise UsageError(
            f"inputs differ at {call.path}: this reproducer would blame the operator for what it "
            "was given",
            where=f"{other.path}, {pass_} pass, sample {first.sample}, step {first.step}: "
            f"{differs}",
            hint=f"{command_line('replay', source.path, o='OTHER')}, on the other machine, "
            "gives its operator these inputs; then --against OTHER",
        )
    return _side(other, results, true, expected)


def _write(
    out: Path, script: str, report: str, inputs: Tensors, expected: Tensors, true: Tensors
) -> tuple[str, ...]:
    from safetensors.torch import save

    saved = {
        "inputs.safetensors": {name: portable(tensor) for name, tensor in inputs.items()},
        "expected.safetensors": {port: portable(tensor) for port, tensor in expected.items()},
        "truth.safetensors": {port: portable_truth(tensor) for port, tensor in true.items()},
    }
    files: dict[str, bytes | str] = {
        name: save(tensors)
        for name, tensors in saved.items()
        if tensors or name != "truth.safetensors"
    }
    files |= {"repro.py": script, "report.md": report}
    for name in FILES:
        with contextlib.suppress(OSError):
            (out / name).unlink()
    for name, content in files.items():
        write_output(content, out / name, what="reproducer", error=RunWriteError, make_folder=True)
    return tuple(name for name in FILES if name in files)
