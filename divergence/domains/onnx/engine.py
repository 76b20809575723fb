"""ONNX Runtime as an engine: its graph, cut at the sites that are recorded."""

from __future__ import annotations

import ast
import contextlib
import importlib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from divergence.errors import ModelError, UsageError, first_line
from divergence.numerics.formats import format_named
from divergence.outside import MAX_DEPTH, inside, is_plain, read_as, read_bytes
from divergence.recording.engines.engine import (
    EngineOptions,
    Feature,
    GroupResult,
    choices,
    control,
    ends_of,
    failures,
    inputs,
    pad_id,
)
from divergence.recording.engines.load import LoadedModel, Loading, load_tokenizer, resolve_task
from divergence.recording.engines.sessions import TorchSession, blocks_of
from divergence.recording.recorder import Recorder
from divergence.recording.structure import describe_modules
from divergence.run.manifest import EngineNote, ModelIdentity, ModuleNote, SampleTokens
from divergence.run.record import expanded
from divergence.run.site import ROOT, did_you_mean, escape_path, join_site

# A graph by modules: which module each node belongs to, and which values pass a module's edge.
#
# torch's exporter writes the modules that were on the stack into each node (``name_scopes``), older
# exporters put them into the node's name (``/model/layers.0/mlp/up_proj/MatMul``). A module's
# output is the value that is made in it and used outside, its input the value that is used in it
# and made outside. Optimisers of graphs move what several modules share (rotary tables, masks)
# into the first of them, so values count by where they come from: the *stream* is what depends on
# the tokens otherwise than by their number. Where a value of the stream passes an edge, others do
# not count.
#
# A file without modules has a site for each value, under the value's own name.

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
            self.nodes = [
                replace(node, scopes=tuple(filter(None, node.outputs))[:1], told=True)
                for node in self.nodes
            ]
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
        is_named = bool(scopes) and not scopes[0]  # else what torch writes there is no path
        if is_named:
            scopes, classes = scopes[:-1], classes[: len(scopes) - 1]  # the last is the operator
            scopes = [_CALL.sub("", scope) for scope in scopes]
        else:
            # what lies deeper is no module
            is_named = proto.name.startswith("/")
            parts = proto.name.strip("/").split("/", MAX_DEPTH)[:-1]
            scopes = (
                [".".join(parts[: count + 1]) for count in range(len(parts))] if is_named else []
            )
        if len(scopes) > MAX_DEPTH or any(path.count(".") > MAX_DEPTH for path in scopes):
            raise ModelError(f"its modules are nested more than {MAX_DEPTH} deep")
        for number, path in enumerate(scopes):
            kind = classes[number].rpartition(".")[2] if number < len(classes) else "Module"
            if path not in self.kinds or self.kinds[path] in ("Graph", "Module"):
                self.kinds[path] = kind
        if len(self.kinds) > _MAX_NODES:
            raise ModelError(f"the graph has more than {_MAX_NODES:,} modules")
        return GraphNode(
            proto,
            tuple(_inputs(proto)),
            tuple(proto.output),
            tuple(dict.fromkeys(scope for scope in scopes if scope)),
            properties,
            is_named,
        )

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
            scopes_before = [
                self.nodes[n].scopes for n in around if n < number or self.nodes[n].told
            ]
            shared = scopes_before[0] if scopes_before else ()
            for scopes in scopes_before[1:]:
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
            made = [value for value in leaving.get(path, ()) if self.is_float(value)]
            counting = [value for value in made if value in self.stream] or made
            outs = sorted(counting, key=lambda v: self.maker[v])
            events.append((first, 0, depth, [Port(name, "in", value) for value in ins]))
            named = [Port(name, f"out.{n}" if n else "out", v) for n, v in enumerate(outs)]
            events.append((last, 1, -depth, named))
        events.sort(key=lambda event: event[:3])
        inner = [port for *_, ports in events for port in ports]
        return [Port(ROOT, "in", self.tokens), *inner, Port(ROOT, "out", self.logits)]

    def is_float(self, value: str) -> bool:
        """Is it a float by its type, where the file tells it? A value of unknown type may be."""
        return self.types.get(value, 1) in (0, 1, 10, 11, 16)

    def slice(
        self, targets: Iterable[str], cuts: Collection[str]
    ) -> tuple[list[int], set[str], set[str]]:
        """Return what computes ``targets`` where the values of ``cuts`` are given: the nodes in
        order, the cuts that are met, and the graph's own inputs that are."""
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


# An ONNX file: read, checked, and its tensors as torch's, without a copy where that can be.
#
# A file is data. Weights may lie in files beside it, in its own folder or below, and nowhere else;
# operators that ONNX Runtime does not have itself are not loaded from anywhere.

_EXTERNAL = 1
"""``data_location`` of a tensor whose bytes lie in a file beside the model's."""
_MAX_BYTES = 1 << 31
"""What protobuf reads; more weights lie in files beside."""
_KINDS_OF_DATA = ("float", "int32", "int64", "double", "uint64")
_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    16: "bfloat16",
}


def read_model(path: Path) -> Any:
    """The file's ``ModelProto``, its weights left where they lie. Raises ModelError."""
    import onnx

    if not path.is_file():
        missing = "is a directory" if path.is_dir() else "does not exist"
        raise ModelError(
            f"no ONNX file: {path} {missing}", hint="give the .onnx file: --model DIR/model.onnx"
        )
    data = read_bytes(path, most=_MAX_BYTES, error=ModelError)
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own kinds
        raise _broken(path, first_line(error, most=200)) from error
    graph = model.graph
    if not graph.node or not graph.output or not graph.input:
        raise _broken(path, "there is no graph in it")
    for tensor in _tensors(model):
        if min(tensor.dims, default=0) < 0:
            raise _broken(path, f"the weight {tensor.name[:80]} has a negative size")
        if tensor.data_location == _EXTERNAL:
            data_file(tensor, path.parent)
    for tensor in graph.initializer:
        lies_here = tensor.data_type in _DTYPES and tensor.data_location != _EXTERNAL
        fields = ("raw_data", *(f"{kind}_data" for kind in _KINDS_OF_DATA))
        has_values = any(len(getattr(tensor, field)) for field in fields)
        if lies_here and math.prod(tensor.dims) and not has_values:
            raise _broken(path, f"the weight {tensor.name} has no values")
    return model


def data_file(tensor: Any, folder: Path) -> tuple[Path, int, int | None]:
    """(file, offset, length) of a tensor that lies beside the model. Raises ModelError where that
    is not in the model's folder, or not there."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = entries.get("location", "").removeprefix("./")
    if not is_plain(name):
        raise ModelError(
            f"the weight {tensor.name} is said to lie in {name!r}, outside the model's folder",
            hint="weights of an ONNX file are read from its own folder alone",
        )
    place = inside(
        folder,
        name,
        error=ModelError,
        hint=("copy the weights of the ONNX file beside it; the exporter wrote both"),
    )
    try:
        offset, length = int(entries.get("offset", 0)), entries.get("length")
        count = None if length is None else int(length)
    except ValueError:
        offset, count = -1, None
    if offset < 0 or offset + (count or 0) > place.stat().st_size:
        raise _broken(place, f"it ends before the weight {tensor.name}")
    return place, offset, count


def tensor_of(tensor: Any, folder: Path) -> Any:
    """The values as a torch tensor that must not be written to; None for a type that torch does not
    have (4-bit numbers, text)."""
    from onnx import numpy_helper

    name = _DTYPES.get(tensor.data_type)
    if name is None:
        return None
    dtype = torch.bool if name == "bool" else format_named(name).torch_dtype
    shape = tuple(tensor.dims)
    num_bytes = math.prod(shape) * dtype.itemsize
    if tensor.data_location == _EXTERNAL:
        place, offset, _ = data_file(tensor, folder)
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        if offset + num_bytes > place.stat().st_size:
            raise _broken(place, f"it ends before the weight {tensor.name}")
        data: Any = np.memmap(place, mode="c", offset=offset, shape=(num_bytes,), dtype=np.uint8)
    elif tensor.raw_data:
        data = np.frombuffer(tensor.raw_data, dtype=np.uint8)
    else:
        data = np.array(numpy_helper.to_array(tensor)).reshape(-1).view(np.uint8)
    if data.size != num_bytes:
        raise ModelError(
            f"the weight {tensor.name} has {data.size} bytes, and its shape {list(shape)} takes "
            f"{num_bytes}",
            hint="the ONNX file is damaged; export it again",
        )
    with warnings.catch_warnings():  # that it must not be written to
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data).view(dtype).reshape(shape)


def _tensors(model: Any) -> Iterator[Any]:
    """Every tensor in it: of the graph, of the graphs in its nodes, and of its functions. ONNX
    Runtime reads what any of them names."""
    waiting: list[Any] = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        yield from getattr(graph, "initializer", ())  # functions have none
        sparse = [*getattr(graph, "sparse_initializer", ())]
        for node in graph.node:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                sparse += (attribute.sparse_tensor, *attribute.sparse_tensors)
                waiting += (attribute.g, *attribute.graphs)
        for tensor in sparse:
            yield from (tensor.values, tensor.indices)


def _broken(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path} cannot be read as an ONNX file: {why}",
        hint="it is damaged or of another kind; export it again",
    )


# Parts of a graph that run by themselves, each a session of ONNX Runtime.
#
# Values from within are fetched as further outputs of the graph. ONNX Runtime then keeps them,
# which keeps it from fusing across them: the run notes how many there are. Nothing is written to
# disk; the weights that lie beside the file are read from there.

_BFLOAT16 = 16
_LEVELS = ("disable", "basic", "extended", "all")
_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True, slots=True)
class Runtime:
    """Says how sessions are made."""

    folder: Path
    """Where weights beside the file lie."""
    provider: str
    provider_options: Mapping[str, str]
    optimization: str
    threads: int | None

    def session(self, model: Any, *, deterministic: bool) -> Any:
        """A session for ``model``. Raises ModelError."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        levels, level = onnxruntime.GraphOptimizationLevel, self.optimization.upper()
        name = "ORT_DISABLE_ALL" if level == "DISABLE" else f"ORT_ENABLE_{level}"
        options.graph_optimization_level = getattr(levels, name)
        options.use_deterministic_compute = deterministic
        options.log_severity_level = 3  # errors, which are raised as well
        options.intra_op_num_threads = self.threads or torch.get_num_threads()
        options.add_session_config_entry(_FOLDER, str(self.folder))
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(),
                options,
                providers=[(self.provider, dict(self.provider_options))],
            )
        except Exception as error:  # ONNX Runtime's own kinds
            text = first_line(error, most=300)
            if "NOT_IMPLEMENTED" in text or "Could not find an implementation" in text:
                raise ModelError(
                    f"{self.provider} has no kernel for what the graph needs: {text}",
                    hint="export the model in a dtype that it has (float32, mostly float16), or "
                    "choose another --engine-option provider=NAME",
                ) from error
            raise ModelError(
                f"ONNX Runtime cannot load the graph: {text}",
                hint="was it exported for a newer ONNX Runtime, or for operators of another "
                "library?",
            ) from error
        if self.provider not in session.get_providers():
            raise ModelError(
                f"ONNX Runtime could not start {self.provider} and went back to "
                f"{', '.join(session.get_providers())}",
                hint="its libraries are not found here; --engine-option provider=cpu runs without",
            )
        return session


class Subgraph:
    """A part of the graph: it is given ``cuts`` and the graph's inputs, and gives ``targets``.
    ``whole``: all of the graph, as it is, with the targets beside its outputs."""

    def __init__(
        self,
        graph: Graph,
        runtime: Runtime,
        *,
        targets: Iterable[str],
        cuts: Collection[str] = (),
        whole: bool = False,
    ) -> None:
        given = {*graph.inputs, *cuts}
        self.targets = [target for target in dict.fromkeys(targets) if target not in given]
        if whole:
            nodes = list(range(len(graph.nodes)))
            self.cuts, self.inputs = set[str](), set(graph.inputs)
        else:
            nodes, self.cuts, self.inputs = graph.slice(self.targets, cuts)
        self._types = graph.types
        model = _part(graph, nodes, [*sorted(self.inputs), *sorted(self.cuts)], self.targets, whole)
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._session = runtime.session(model, deterministic=deterministic)

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The targets by name. Raises what ONNX Runtime does, as RuntimeError."""
        feeds = {key: _given(values[key], self._types[key]) for key in (*self.inputs, *self.cuts)}
        try:
            results = self._session.run_with_ort_values(self.targets, feeds)
        except Exception as error:  # ONNX Runtime's own kinds
            raise RuntimeError(first_line(error, most=300)) from error
        return {name: _taken(result) for name, result in zip(self.targets, results, strict=True)}


def _part(
    graph: Graph, nodes: Sequence[int], inputs: Sequence[str], targets: Sequence[str], whole: bool
) -> Any:
    import onnx

    # versions and functions of the whole
    model = graph.model
    part = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    whole_graph = model.graph
    infos = (*whole_graph.value_info, *whole_graph.output, *whole_graph.input)
    specs = {spec.name: spec for spec in infos}
    chosen = [graph.nodes[number] for number in nodes]
    used = {name for node in chosen for name in node.inputs} | set(targets)
    part.graph.name = whole_graph.name
    part.graph.node.extend(node.proto for node in chosen)
    part.graph.initializer.extend(
        constant for n, constant in graph.constants.items() if whole or n in used
    )
    for name in graph.inputs if whole else inputs:
        element = graph.types.get(name, 1)
        value = specs.get(name) or onnx.helper.make_tensor_value_info(name, element, None)
        part.graph.input.append(value)
    outputs = [*graph.outputs, *targets] if whole else targets
    for name in dict.fromkeys(outputs):
        part.graph.output.append(specs.get(name) or onnx.ValueInfoProto(name=name))
    return part


def _given(tensor: torch.Tensor, element: int) -> Any:
    from onnxruntime import OrtValue

    tensor = tensor.detach().cpu().contiguous()
    if element == _BFLOAT16:  # numpy has none
        array = tensor.view(torch.uint16).numpy()
        return OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
    return OrtValue.ortvalue_from_numpy(tensor.numpy())


def _taken(value: Any) -> torch.Tensor:
    """Take the value as a tensor on the host, of its own memory or the value's."""
    if value.data_type() == "tensor(bfloat16)":
        return from_dlpack(value._ortvalue.to_dlpack())
    return torch.from_numpy(value.numpy())


# An ONNX file as a model: modules, parameters, and the config and tokenizer beside it.
#
# torch's exporter notes the operator each node was made of, and that the parameters it used
# (``%p_model_norm_weight``). A matrix of ``linear`` is stored transposed; equal tensors are stored
# once, under the first one's name. So parameters are named by who uses them. What the exporter
# computed from a parameter beforehand is no parameter any more: where constants are left that no
# name fits, the model's weights as a whole cannot be told from another's, and that is said.

_INPUTS = ("attention_mask", "position_ids", "token_type_ids", "use_cache_branch")


def model_of(
    loading: Loading, graph: Graph, path: Path, folder: Path
) -> tuple[LoadedModel, list[str]]:
    """The model; and the constants that are no parameter by name. Raises ModelError, UsageError."""
    unknown = [
        name
        for name in graph.inputs
        if name not in (graph.tokens, *_INPUTS) and not name.startswith("past_key_values")
    ]
    if unknown or graph.tokens != "input_ids":
        raise ModelError(
            f"{path} wants the input {(unknown or [graph.tokens])[0]}, which no prompt gives",
            where=f"its inputs: {', '.join(graph.inputs)}",
            hint="export it with input_ids, attention_mask and position_ids",
        )
    with read_as("an exporter of ONNX", where=str(path), error=ModelError):
        module, left = modules_of(graph, path.parent)
    config = _config(folder, loading.trust_remote_code)
    task = loading.task
    if task == "auto":
        task = resolve_task(config) if config.model_type else "causal-lm"
    if task == "encoder-decoder":
        raise UsageError(
            "--engine onnx runs decoders and encoders, and this is an encoder-decoder",
            hint="its halves are two graphs",
        )
    blocks = sum(note.role == "block" for note in describe_modules(module).values())
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if blocks and num_layers is not None and num_layers != blocks:
        raise ModelError(
            f"{path} has {blocks} blocks, and the config in {folder} tells of {num_layers}",
            hint="the two belong to different models; name the directory of config and tokenizer: "
            "--engine-option tokenizer=DIR",
        )
    generation = None
    if (folder / "generation_config.json").is_file():
        with contextlib.suppress(Exception):  # as if it were not there
            generation = GenerationConfig.from_pretrained(folder)
    parts: Any = module
    parts.config = config
    parts.generation_config = generation or GenerationConfig.from_model_config(config)
    tokenizer = None
    if config.model_type:
        tokenizer = load_tokenizer(str(folder), revision=None, trust_remote_code=False)
    loaded = LoadedModel(
        source=loading.source,
        revision=None,
        task="encoder" if task == "encoder" else "causal-lm",
        module=module.eval(),
        tokenizer=tokenizer,
        device=torch.device("cpu"),
        trust_remote_code=loading.trust_remote_code,
    )
    return loaded, left


def _config(folder: Path, trust_remote_code: bool) -> Any:
    """An empty one where there is none."""
    if not (folder / "config.json").is_file():
        return PretrainedConfig()
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (Exception, SystemExit) as error:  # a config and its code may do anything
        raise ModelError(
            f"the config of the ONNX file cannot be read: {first_line(error, most=200)}",
            where=str(folder / "config.json"),
            hint="it is damaged, or for another version of transformers",
        ) from error


_FX = "pkg.torch.onnx.fx_node"
_USED = re.compile(r"%([pb])_(\w+)")
_PRODUCT = re.compile(r"aten\.(addmm|mm|matmul|bmm)\b")
_WITH_BIAS = ("Conv", "Gemm", "LayerNormalization")
"""Their third operand is one."""
_FLOATS = (1, 10, 11, 16)


def modules_of(graph: Graph, folder: Path) -> tuple[nn.Module, list[str]]:
    """The modules as far as the graph tells them, with their parameters; and the constants that are
    no parameter by name. Nothing of it can be called."""
    kinds: dict[str, type[nn.Module]] = {}

    def made(kind: str) -> nn.Module:
        name = kind if kind.isidentifier() else "Module"
        if name not in kinds:
            kinds[name] = type(name, (nn.Module,), {"__module__": __name__})
        return kinds[name]()

    root = made(graph.kinds[""])
    for path in graph.kinds:
        parent = root
        parts = path.split(".") if path else []
        for number, part in enumerate(parts):
            child = parent._modules.get(part or "_")
            if child is None:
                here, after = ".".join(parts[: number + 1]), parts[number + 1 : number + 2]
                listed = here not in graph.kinds and after and after[0].isdecimal()
                child = nn.ModuleList() if listed else made(graph.kinds.get(here, "Module"))
                if hasattr(parent, part):
                    raise ModelError(f"no module can be called {part[:80]!r}")
                parent.add_module(part or "_", child)
            parent = child
    named, left = _named(graph)
    matrices: dict[str, nn.Parameter] = {}
    for name, (constant, transposed) in named.items():
        path, _, last = name.rpartition(".")
        parameter = matrices.get(constant)
        if parameter is None:
            tensor = tensor_of(graph.constants[constant], folder)
            parameter = nn.Parameter(tensor.T if transposed else tensor, requires_grad=False)
            if tensor.ndim == 2:  # equal vectors are stored once, whoever has them
                matrices[constant] = parameter
        root.get_submodule(path).register_parameter(last, parameter)
    _embeddings(root, graph, named)
    return root, left


def _named(graph: Graph) -> tuple[dict[str, tuple[str, bool]], list[str]]:
    """Parameter → (constant, is it transposed); and the names of constants that are none."""
    named: dict[str, tuple[str, bool]] = {}
    names: set[str] = set()
    for node in graph.nodes if graph.has_modules else ():
        for constant in {name for name in node.inputs if _counts(graph, name)}:
            choice = _choice(node, constant)
            if choice is not None:
                names.add(constant)
                kind, name, transposed = choice
                if kind == "p":
                    named.setdefault(name, (constant, transposed))
    left = [name for name in graph.constants if _counts(graph, name) and name not in names]
    return named, left


def _choice(node: GraphNode, constant: str) -> tuple[str, str, bool] | None:
    """(parameter or buffer, its name, is it stored transposed) of a constant that the node takes;
    None where that is not certain."""
    operator, place = node.proto.op_type, node.inputs.index(constant)
    made_of = node.properties.get(_FX, "")
    used = [(kind, _parameter(mangled, node, constant)) for kind, mangled in _USED.findall(made_of)]
    if not made_of:  # an older exporter: names are kept, of matrices that were not transposed
        path, _, last = constant.rpartition(".")
        return ("p", constant, False) if last and path in node.scopes else None
    if len(used) > 1:
        is_bias = operator == "Add" or (place == 2 and operator in _WITH_BIAS)
        used = [use for use in used if use[1] is not None and use[1].endswith("bias") == is_bias]
    if len(used) != 1 or used[0][1] is None:
        return None
    transposed = False
    if operator in ("MatMul", "Gemm") and place < 2:
        turned = any(attr.name == "transB" and attr.i for attr in node.proto.attribute)
        if "aten.linear" in made_of:
            transposed = place == 1 and not turned
        elif turned or not _PRODUCT.search(made_of):
            return None
    return used[0][0], used[0][1], transposed


def _counts(graph: Graph, name: str) -> bool:
    """Is it a tensor of numbers, and no epsilon or the like?"""
    tensor = graph.constants.get(name)
    return tensor is not None and tensor.data_type in _FLOATS and any(n > 1 for n in tensor.dims)


def _parameter(mangled: str, node: GraphNode, constant: str) -> str | None:
    """``model_norm_weight`` as ``model.norm.weight``, by the modules that the node runs in. The
    exporter writes it in lower case; of parameters that are tied it tells one name."""
    mangled = mangled.lower()
    for path in reversed(node.scopes):
        start = re.sub(r"\W", "_", path).lower() + "_"
        if mangled.startswith(start):
            last, own = mangled.removeprefix(start), constant.rpartition(".")[2]
            if own.lower() == last:
                return f"{path}.{own}"
            return f"{path}.{last}" if last in ("weight", "bias") else None
    return f"{node.scopes[-1]}.weight" if node.scopes and mangled.endswith("_weight") else None


def _embeddings(root: Any, graph: Graph, named: dict[str, tuple[str, bool]]) -> None:
    """Return what transformers' models say of themselves: the first and the last matrix."""
    matrices = [name for name, (c, _) in named.items() if len(graph.constants[c].dims) == 2]
    paths = [name.rpartition(".")[0] for name in matrices]
    first = [path for path in paths if graph.kinds.get(path) == "Embedding"][:1]
    last = [path for path in paths if not re.search(r"(^|\.)\d+(\.|$)", path)][-1:]
    last = [path for path in last if graph.kinds.get(path) == "Linear"]
    for name, ends in (("get_input_embeddings", first), ("get_output_embeddings", last)):
        module = root.get_submodule(ends[0]) if ends else None
        object.__setattr__(root, name, lambda module=module: module)


# One pass over a graph: what is fetched from it, what is put in place, what is recorded.
#
# The graph runs without a cache: each step is a forward over the whole sequence so far, of which
# the rows of that step are recorded (of a decode step the last one).
#
# In an anchored pass each block, and what of the trunk has an input of its own, is a piece of the
# graph that runs by itself. Its input is made of the rows that the other run recorded, of this step
# and of all before it: so a block sees for earlier tokens what the other run's cache was made from.
# Rotary tables are the recorded ones where they are; masks are computed from the tokens.

_DTYPES_FORWARD = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
_MAX_INPUT = 1 << 26
"""Numbers of a further input, which is zeros: caches are empty."""
_TABLES = "in.position_embeddings."
"""How transformers hands rotary tables to a block."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A module that an anchored pass runs by itself."""

    path: str
    ins: tuple[Port, ...]
    """What may be put in place: its input, and rotary tables."""
    outs: tuple[str, ...]
    is_block: bool


class GraphRecorder(Recorder):
    """Records what pieces of a graph give, in place of hooks."""

    def __init__(
        self,
        model: torch.nn.Module,
        notes: Mapping[str, ModuleNote],
        *,
        graph: Graph,
        runtime: Runtime,
        **how: Any,
    ) -> None:
        self._graph, self._runtime = graph, runtime
        self._given: dict[tuple[str, int], torch.Tensor | None] = {}
        self._pieces: dict[str, Subgraph] = {}
        self._replaced: set[tuple[str, str]] = set()
        super().__init__(model, notes, **how)
        parts = _parts(graph, notes)
        self._parts = [] if self._anchor is None else parts
        tables = {part.path: part.ins[1:] for part in parts}  # rotary ones, which blocks take
        ports = [
            tap
            for port in graph.ports
            for tap in (port, *(tables.get(port.path, ()) if port.port == "in" else ()))
        ]
        self._ports = [port for port in ports if self._takes(port)]
        self.num_taps = 0

    def _takes(self, port: Port) -> bool:
        if not (self._forwards.hooks or port.path == ROOT) or port.path not in self._hooked:
            return False
        dtype = _DTYPES_FORWARD.get(self._graph.types.get(port.value, 1), torch.int64)
        return self._wanted(port.path, port.port, torch.empty(0, dtype=dtype))

    def begin(self, **group: Any) -> None:
        self._given.clear()
        super().begin(**group)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Sessions are made when they are first needed, and let go here."""
        try:
            yield self
        finally:
            self._pieces.clear()
            self._given.clear()
            self._recent.items.clear()

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logits (or the graph's first output); what passes chosen sites is recorded."""
        graph, fed = self._graph, dict[str, dict[str, torch.Tensor]]()
        if self._anchor is None:
            targets = [graph.logits, *(port.value for port in self._ports)]
            piece = self._piece(ROOT, targets, whole=True)
            self.num_taps = len(set(piece.targets) - set(graph.outputs))
            made = given | piece.run(given)
        else:
            made, fed = self._run_parts(given)
        num_tokens = given[graph.tokens].shape[1]
        rows: dict[int, torch.Tensor] = {}
        for port in self._ports:
            own = fed.get(self._owner(port.path), {})
            if (port.path, port.port) in self._replaced:
                continue  # an anchored input is the other run's, not news of this one
            tensor = own.get(port.value, made[port.value])
            if id(tensor) not in rows:
                rows[id(tensor)] = self._rows(tensor, num_tokens)
            self._emit(port.path, "", port.port, rows[id(tensor)])
        self._end_of_forward()
        return made[graph.logits]

    def _rows(self, tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the row of a decode step's token."""
        # a whole forward's is narrowed where it is kept
        whole = self.lane.step == 0 or not self._forwards.cached
        if whole or tensor.ndim < 2 or tensor.shape[1] != num_tokens:
            return tensor
        return tensor[:, -1:].contiguous()

    def _piece(self, key: str, targets: list[str], **how: Any) -> Subgraph:
        if key not in self._pieces:
            self._pieces[key] = Subgraph(self._graph, self._runtime, targets=targets, **how)
        return self._pieces[key]

    def _owner(self, path: str) -> str:
        """The part that a module is in, or none."""
        owners = (p.path for p in self._parts if path == p.path or path.startswith(f"{p.path}."))
        return next(owners, "")

    def _run_parts(
        self, given: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
        """(what was computed, what was put in place by part)."""
        made, fed = dict(given), dict[str, dict[str, torch.Tensor]]()
        self._replaced.clear()
        for part in self._parts:
            lacking = [entry.value for entry in part.ins if entry.value not in made]
            if lacking:
                before = self._piece(f"{part.path} before", lacking, cuts=made.keys() - given)
                made |= before.run(made)
            own = fed[part.path] = {}
            for entry in part.ins:
                recorded = self._recorded(entry, made[entry.value])
                if recorded is not None:
                    own[entry.value] = recorded
                    self._replaced.add((entry.path, entry.port))
                    self.anchored += 1
                elif entry.port == "in" and part.is_block:
                    self._anchor_broken = True
            inside = [port.value for port in self._ports if self._owner(port.path) == part.path]
            cuts = {entry.value for entry in part.ins}
            piece = self._piece(part.path, [*part.outs, *inside], cuts=cuts)
            made |= piece.run(made | own)
        rest = [port.value for port in self._ports if port.value not in made]
        if rest or self._graph.logits not in made:
            targets = [*rest, self._graph.logits]
            after = self._piece(f"{ROOT} after", targets, cuts=made.keys() - given.keys())
            made |= after.run(made)
        return made, fed

    def _recorded(self, port: Port, own: torch.Tensor) -> torch.Tensor | None:
        """Return what was recorded of an input, of this step and those before it; None where that
        is not all there. Of what enters the head the deciding rows alone may be: the others stay
        own."""
        if own.ndim < 2 or own.shape[1] != self._num_prompt + self.lane.step:
            return None
        assert self._anchor is not None  # asked where there is one
        whole, site = own.clone(), join_site(port.path, port.port)
        for step in range(self.lane.step + 1):
            stop = self._num_prompt + step
            rows = own[:, (stop - 1 if step else 0) : stop]
            if (site, step) not in self._given:
                self._given[site, step] = self._anchor(self._sample, step, site, rows)
            recorded = self._given[site, step]
            few = port.path in self._logit_paths
            if recorded is None or recorded.shape not in (
                rows.shape,
                rows[:, -1:].shape if few else (),
            ):
                return None
            whole[:, stop - recorded.shape[1] : stop] = recorded.to(own.dtype)
        return whole


def _parts(graph: Graph, notes: Mapping[str, ModuleNote]) -> list[_Part]:
    """List, in a forward's order, modules that take a value of the stream that others made."""
    parts: list[_Part] = []
    rotary = [path for path, kind in graph.kinds.items() if kind.endswith("RotaryEmbedding")]
    # what the one table of the trunk gives; nothing where there are several
    alone = len(rotary) == 1 and not any(part.isdecimal() for part in rotary[0].split("."))
    tables = [p for p in graph.ports if alone and p.path in rotary and p.port.startswith("out")]
    for port in graph.ports:
        note = notes.get(port.path)
        if note is None or note.role == "inner" or port.port != "in" or port.value in graph.inputs:
            continue
        outs = tuple(p.value for p in graph.ports if p.path == port.path and p.port != "in")
        ins = [port]
        if note.role == "block":
            _, met, _ = graph.slice(outs, {port.value, *(table.value for table in tables)})
            ins += [
                Port(port.path, f"{_TABLES}{n}", table.value)
                for n, table in enumerate(tables)
                if table.value in met
            ]
        if outs:
            parts.append(_Part(port.path, tuple(ins), outs, note.role == "block"))
    return parts


def feeds(graph: Graph, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The graph's inputs for a whole forward. A cache that it wants is empty."""
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    made = {
        graph.tokens: ids,
        "attention_mask": mask,
        "position_ids": positions,
        "token_type_ids": torch.zeros_like(ids),
        "use_cache_branch": torch.tensor([False]),
    }
    fed = {}
    for value in graph.model.graph.input:
        if value.name not in graph.inputs:
            continue
        kind = value.type.tensor_type
        if value.name in made:
            tensor = made[value.name]
            fed[value.name] = tensor.to(torch.int32) if kind.elem_type == 6 else tensor
            continue
        sizes = [dim.dim_value for dim in kind.shape.dim]  # 0 where it has a name
        sizes[0] = ids.shape[0]
        if min(sizes) < 0 or math.prod(sizes) > _MAX_INPUT:
            raise ModelError(
                f"the graph wants the input {value.name[:80]} of {sizes} numbers",
                hint="export it without a cache, or with one of any length",
            )
        fed[value.name] = torch.zeros(
            sizes, dtype=_DTYPES_FORWARD.get(kind.elem_type, torch.float32)
        )
    return fed


def decode(
    loaded: LoadedModel,
    graph: Graph,
    recorder: GraphRecorder,
    samples: list[SampleTokens],
    count: int,
    forced: list[list[int]] | None,
) -> GroupResult:
    """Greedy or forced tokens, each step a forward over all of them so far."""
    ids, mask = inputs(loaded, samples)
    if loaded.task == "encoder" or count == 0:
        recorder.forward(feeds(graph, ids, mask))
        return GroupResult([[] for _ in samples], [[] for _ in samples], [[] for _ in samples])
    ends = ends_of(loaded, forced)
    made = control(forced, count, ends, None)
    num_prompt, ended = ids.shape[1], torch.zeros(len(samples), dtype=torch.bool)
    for _ in range(count):
        logits = recorder.forward(feeds(graph, ids, mask))[:, -1].float()
        token = made(ids, logits).argmax(dim=-1)
        token = torch.where(ended, pad_id(loaded), token)
        ended |= torch.tensor([int(token_id) in ends for token_id in token])
        ids = torch.cat([ids, token[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(token)[:, None]], dim=1)
        if bool(ended.all()):
            break
    generated = ids[:, num_prompt:].tolist()
    return GroupResult(generated, choices(made, generated, ends), [[] for _ in samples], made.seen)


# ONNX Runtime as an engine: ``--engine onnx --model DIR/model.onnx``.

_OLDEST = {"onnx": (1, 16), "onnxruntime": (1, 20)}
_PROVIDER = "ExecutionProvider"
"""What ONNX Runtime's names of providers end in, behind their short ones."""
_BY_DEVICE = {"cuda": "cuda", "npu": "cann", "xpu": "openvino", "mps": "coreml"}


class OnnxOptions(EngineOptions, frozen=True, kw_only=True):
    """Says how ONNX Runtime runs the graph."""

    provider: str | None = None
    """``cpu``, ``cuda``, ``cann``, ``openvino`` …, or ONNX Runtime's own name. None: the one of
    ``--device``."""
    optimization: str = "all"
    """Of the graph: ``disable``, ``basic``, ``extended``, ``all``."""
    threads: int | None = None
    """None: as many as torch has."""
    tokenizer: str | None = None
    """The directory of config and tokenizer; None: that of the ONNX file."""


def installed(name: str) -> str:
    """The version. Raises ModelError where it is not installed, broken or too old."""
    hint = "pip install 'divergence-debug[onnx]'"
    try:
        version = str(importlib.import_module(name).__version__)
    except ImportError as error:
        broken = isinstance(error, ModuleNotFoundError) and error.name == name
        what = "which is not installed" if broken else f"which fails: {first_line(error)}"
        raise ModelError(f"--engine onnx needs {name}, {what}", hint=hint) from error
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    oldest = _OLDEST[name]
    if len(numbers) == 2 and numbers < oldest:
        raise ModelError(
            f"--engine onnx needs {name} {'.'.join(map(str, oldest))} or newer, and this is "
            f"{version}",
            hint=f"{hint} --upgrade",
        )
    return version


def provider_for(given: str | None, device: str) -> str:
    """ONNX Runtime's name of the execution provider. Raises UsageError for one that there is none
    of, and for one that this build lacks."""
    import onnxruntime

    given = given or _BY_DEVICE.get(device, "cpu")
    every: list[str] = onnxruntime.get_all_providers()
    names = {name.lower(): name for name in every}
    names |= {name.removesuffix(_PROVIDER).lower(): name for name in every}
    here: list[str] = onnxruntime.get_available_providers()
    listed = ", ".join(here)
    name = names.get(given.lower())
    if name is None:
        raise UsageError(
            f"--engine-option provider={given}: there is no such execution provider",
            hint=did_you_mean(given.lower(), names, count=1, then=f"here there are {listed}"),
        )
    if name not in here:
        raise UsageError(
            f"--engine-option provider={given}: this ONNX Runtime has no {name}",
            hint=f"here there are {listed}; other builds of it (onnxruntime-gpu, onnxruntime-cann "
            "...) bring others",
        )
    return name


class OnnxEngine:
    """Graphs of ONNX as ONNX Runtime runs them."""

    name: ClassVar[str] = "onnx"
    Options: ClassVar[type[EngineOptions]] = OnnxOptions

    def load(self, loading: Loading, options: OnnxOptions) -> OnnxSession:
        version = installed("onnxruntime")
        installed("onnx")
        if loading.ranks is not None or loading.device_map is not None:
            raise UsageError(
                "--engine onnx runs in one process, on one execution provider",
                hint="leave out --mesh and --device-map",
            )
        level = options.optimization
        if level not in _LEVELS:
            raise UsageError(
                f"--engine-option optimization={level}: there is no such level",
                hint=did_you_mean(level, _LEVELS, count=1) or f"one of {', '.join(_LEVELS)}",
            )
        device, _, number = loading.device.partition(":")
        provider = provider_for(options.provider, device)
        path = expanded(loading.source)
        with read_as("an exporter of ONNX", where=str(path), error=ModelError):
            graph = Graph(read_model(path))
        runtime = Runtime(
            path.parent.resolve(),
            provider,
            {"device_id": number} if number else {},
            options.optimization,
            options.threads,
        )
        folder = path.parent if options.tokenizer is None else expanded(options.tokenizer)
        loaded, left = model_of(loading, graph, path, folder)
        kind = OnnxSession if blocks_of(loaded.module) else _WithoutBlocks
        return kind(loaded, graph, runtime, options, left, version=version)


class OnnxSession(TorchSession):
    """A graph, and the modules that it tells of, none of which can be called."""

    name: ClassVar[str] = "onnx"
    has_cache: ClassVar[bool] = False
    lacks: Mapping[Feature, str] = {
        "escalate": "its kernels compute in the graph's own dtype",
        "whole": "each of its steps is a whole forward already",
        "pads_right": "its graph gives the logits of the last position",
        "operators": "its operators are not torch's",
        "plants": "no hook is in its forward",
        "prepare": "it runs the graph",
        "media": "its graph takes token ids alone",
    }

    def __init__(
        self,
        loaded: LoadedModel,
        graph: Graph,
        runtime: Runtime,
        options: OnnxOptions,
        left: list[str],
        *,
        version: str,
    ) -> None:
        super().__init__(loaded, msgspec.structs.asdict(options))
        self._graph, self._runtime, self._left = graph, runtime, left
        self._version, self._num_taps = version, 0

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        identity = super().identity(on_parameter)
        return msgspec.structs.replace(identity, code={}, attn_implementation=None)

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> GraphRecorder:
        return GraphRecorder(
            self.loaded.module, notes, graph=self._graph, runtime=self._runtime, **how
        )

    def run_group(
        self,
        recorder: Any,
        samples: list[SampleTokens],
        *,
        max_new_tokens: int,
        forced: list[list[int]] | None = None,
        **_: Any,
    ) -> GroupResult:
        count = max_new_tokens if forced is None else len(forced[0])
        with failures(self.loaded, samples, count), torch.no_grad():
            result = decode(self.loaded, self._graph, recorder, samples, count, forced)
        self._num_taps = max(self._num_taps, recorder.num_taps)
        return result

    def note(self) -> EngineNote:
        model, runtime = self._graph.model, self._runtime
        opsets = [f"{opset.domain or 'ai.onnx'} {opset.version}" for opset in model.opset_import]
        facts = {
            "provider": runtime.provider,
            "exporter": f"{model.producer_name} {model.producer_version}".strip() or "unknown",
            "opset": ", ".join(opsets),
            "cache": "none, each step is a whole forward",
            "values fetched": f"{self._num_taps}, across which ONNX Runtime fuses nothing",
        }
        if "anchor" in self.lacks:
            facts["blocks"] = "not told"
        facts["weights"] = "as far as the file names them" + (
            f"; {len(self._left)} constants have no parameter's name" if self._left else ""
        )
        return msgspec.structs.replace(super().note(), facts=facts)

    def version(self) -> str:
        return self._version


class _WithoutBlocks(OnnxSession):
    lacks: Mapping[Feature, str] = {
        **OnnxSession.lacks,
        "anchor": "the file does not tell the blocks of its model",
    }
