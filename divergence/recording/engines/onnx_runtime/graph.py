"""A graph by modules: which module each node belongs to, and which values pass a module's edge.

torch's exporter writes the modules that were on the stack into each node (``name_scopes``), older
exporters put them into the node's name (``/model/layers.0/mlp/up_proj/MatMul``). A module's output
is the value that is made in it and used outside, its input the value that is used in it and made
outside. Optimisers of graphs move what several modules share (rotary tables, masks) into the first
of them, so values count by where they come from: the *stream* is what depends on the tokens
otherwise than by their number. Where a value of the stream passes an edge, others do not count.

A file without modules has a site for each value, under the value's own name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from divergence.errors import ModelError
from divergence.outside import MAX_DEPTH
from divergence.run.schema.site import ROOT, escape_path

__all__ = ["Graph", "GraphNode", "Port"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_CALL = re.compile(r"@\d+$")
_TOKENS = ("input_ids", "inputs_embeds", "input.1")
_MAX_NODES, _MAX_LIST = 200_000, 1 << 16
"""Of a graph; and letters of a list of modules, which becomes a hundred times its size."""
_CACHE = re.compile(r"present|past_key|cache", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of the graph."""

    proto: Any
    inputs: tuple[str, ...]
    """With what its inner graphs take from outside."""
    outputs: tuple[str, ...]
    scopes: tuple[str, ...]
    """Paths of the modules that it runs in, outermost first, without the root."""
    properties: Mapping[str, str]
    told: bool
    """Does the file say in which modules?"""


@dataclass(frozen=True, slots=True)
class Port:
    """A value at the edge of a module."""

    path: str
    """As sites write it."""
    port: str
    value: str


class Graph:
    """A model of ONNX, with indices. ``model`` keeps its weights where they lie."""

    def __init__(self, model: Any) -> None:
        self.model = model
        graph = model.graph
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in self.constants]
        self.outputs = [value.name for value in graph.output]
        self.types = {
            value.name: value.type.tensor_type.elem_type
            for value in (*graph.value_info, *graph.input, *graph.output)
        } | {name: constant.data_type for name, constant in self.constants.items()}
        if len(graph.node) + len(self.constants) > _MAX_NODES:
            raise ModelError(f"the graph has more than {_MAX_NODES:,} nodes and constants")
        self.kinds: dict[str, str] = {"": "Graph"}
        """Class by module path, the root's included, in the order of their calls."""
        self.nodes = [self._node(proto) for proto in graph.node]
        self.has_modules = len(self.kinds) > 1
        if not self.has_modules:
            self.nodes = [_by_value(node) for node in self.nodes]
            self.kinds |= {n.scopes[0]: n.proto.op_type for n in self.nodes if n.scopes}
        self.maker = {v: n for n, node in enumerate(self.nodes) for v in node.outputs if v}
        self._place_untold()
        self.tokens = next((name for name in _TOKENS if name in self.inputs), self.inputs[0])
        self.logits = "logits" if "logits" in self.outputs else self.outputs[0]
        self.stream = self._stream()
        self.ports = self._ports()
        """Of all modules, in the order in which a forward passes them."""

    def _node(self, proto: Any) -> GraphNode:
        properties = {prop.key: prop.value for prop in proto.metadata_props}
        scopes, classes = (_listed(properties.get(key, "")) for key in (_SCOPES, _CLASSES))
        told = bool(scopes) and not scopes[0]  # else what torch writes there is no path
        if told:
            scopes, classes = scopes[:-1], classes[: len(scopes) - 1]  # the last is the operator
            scopes = [_CALL.sub("", scope) for scope in scopes]
        else:
            # what lies deeper is no module
            told = proto.name.startswith("/")
            parts = proto.name.strip("/").split("/", MAX_DEPTH)[:-1]
            scopes = [".".join(parts[: count + 1]) for count in range(len(parts))] if told else []
        if len(scopes) > MAX_DEPTH or any(path.count(".") > MAX_DEPTH for path in scopes):
            raise ModelError(f"its modules are nested more than {MAX_DEPTH} deep")
        for number, path in enumerate(scopes):
            kind = classes[number].rpartition(".")[2] if number < len(classes) else "Module"
            if path not in self.kinds or self.kinds[path] in ("Graph", "Module"):
                self.kinds[path] = kind
        if len(self.kinds) > _MAX_NODES:
            raise ModelError(f"the graph has more than {_MAX_NODES:,} modules")
        return GraphNode(
            proto, tuple(_inputs(proto)), tuple(proto.output),
            tuple(dict.fromkeys(scope for scope in scopes if scope)), properties, told,
        )  # fmt: skip

    def _place_untold(self) -> None:
        """A node that an optimiser made is in the modules that its neighbours share."""
        users: dict[str, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for value in node.inputs:
                users.setdefault(value, []).append(number)
        for number, node in enumerate(self.nodes):
            if node.told:
                continue
            around = [self.maker[value] for value in node.inputs if value in self.maker]
            around += [n for value in node.outputs for n in users.get(value, ())]
            known = [self.nodes[n].scopes for n in around if n < number or self.nodes[n].told]
            shared = known[0] if known else ()
            for scopes in known[1:]:
                shared = tuple(scope for scope in shared if scope in scopes)
            self.nodes[number] = replace(node, scopes=shared)

    def _stream(self) -> set[str]:
        stream = {self.tokens}
        for node in self.nodes:
            if node.proto.op_type not in ("Shape", "Size") and not stream.isdisjoint(node.inputs):
                stream.update(node.outputs)
        return stream

    def _ports(self) -> list[Port]:
        entering: dict[str, dict[str, None]] = {}
        leaving: dict[str, dict[str, None]] = {}
        span: dict[str, list[int]] = {}
        for number, node in enumerate(self.nodes):
            carries = not self.stream.isdisjoint(node.outputs)
            for path in node.scopes:
                seen = span.setdefault(path, [number, number, carries])
                if carries and not seen[2]:
                    seen[:] = [number, number, True]
                if carries or not seen[2]:
                    seen[1] = number
            for value in node.inputs:
                maker = self.maker.get(value)
                if value in self.constants or (maker is None and value not in self.inputs):
                    continue
                made_in = () if maker is None else self.nodes[maker].scopes
                for path in node.scopes:
                    if path not in made_in:
                        entering.setdefault(path, {})[value] = None
                for path in made_in:
                    if path not in node.scopes:
                        leaving.setdefault(path, {})[value] = None
        for value in self.outputs:
            maker = self.maker.get(value)
            if maker is not None and (value == self.logits or not _CACHE.search(value)):
                for path in self.nodes[maker].scopes:
                    leaving.setdefault(path, {})[value] = None
        events: list[tuple[int, int, int, list[Port]]] = []
        for path, (first, last, _) in span.items():
            depth, name = path.count("."), escape_path(path)
            ins = [v for v in entering.get(path, ()) if v in self.stream][:1]
            outs = sorted(self._counting(leaving.get(path, ())), key=lambda v: self.maker[v])
            events.append((first, 0, depth, [Port(name, "in", value) for value in ins]))
            named = [Port(name, f"out.{n}" if n else "out", v) for n, v in enumerate(outs)]
            events.append((last, 1, -depth, named))
        events.sort(key=lambda event: event[:3])
        inner = [port for *_, ports in events for port in ports]
        return [Port(ROOT, "in", self.tokens), *inner, Port(ROOT, "out", self.logits)]

    def _counting(self, values: Iterable[str]) -> list[str]:
        every = [value for value in values if self.is_float(value)]
        return [value for value in every if value in self.stream] or every

    def is_float(self, value: str) -> bool:
        """By its type, where the file tells it; a value of unknown type may be."""
        return self.types.get(value, 1) in (0, 1, 10, 11, 16)

    def slice(
        self, targets: Iterable[str], cuts: Collection[str]
    ) -> tuple[list[int], set[str], set[str]]:
        """What computes ``targets`` where the values of ``cuts`` are given: the nodes in order, the
        cuts that are met, and the graph's own inputs that are."""
        nodes: set[int] = set()
        met: set[str] = set()
        inputs: set[str] = set()
        waiting = list(targets)
        while waiting:
            value = waiting.pop()
            if value in cuts:
                met.add(value)
            elif (maker := self.maker.get(value)) is not None:
                if maker not in nodes:
                    nodes.add(maker)
                    waiting += self.nodes[maker].inputs
            elif value in self.inputs:
                inputs.add(value)
        return sorted(nodes), met, inputs


def _listed(text: str) -> list[str]:
    """A list of texts, as the exporter writes one into a property."""
    try:
        names = ast.literal_eval(text) if len(text) <= _MAX_LIST else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_list else []


def _inputs(proto: Any) -> Iterator[str]:
    yield from filter(None, proto.input)
    for attribute in proto.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            own |= {name for node in graph.node for name in node.output}
            yield from (name for node in graph.node for name in _inputs(node) if name not in own)


def _by_value(node: GraphNode) -> GraphNode:
    name = next(filter(None, node.outputs), "")
    return replace(node, scopes=(name,) if name else (), told=True)
