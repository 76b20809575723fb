"""An ONNX file as a model: modules, parameters, and the config and tokenizer beside it.

torch's exporter notes the operator each node was made of, and that the parameters it used
(``%p_model_norm_weight``). A matrix of ``linear`` is stored transposed; equal tensors are stored
once, under the first one's name. So parameters are named by who uses them. What the exporter
computed from a parameter beforehand is no parameter any more: where constants are left that no name
fits, the model's weights as a whole cannot be told from another's, and that is said.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from divergence.errors import ModelError, UsageError, first_line
from divergence.outside import read_as
from divergence.recording.engines.engine import Loading
from divergence.recording.engines.load import LoadedModel, load_tokenizer, resolve_task
from divergence.recording.engines.onnx_runtime.file import tensor_of
from divergence.recording.engines.onnx_runtime.graph import Graph, GraphNode
from divergence.recording.model.structure import describe_modules

__all__ = ["model_of", "modules_of"]

_INPUTS = ("attention_mask", "position_ids", "token_type_ids", "use_cache_branch")


def model_of(
    loading: Loading, graph: Graph, path: Path, folder: Path
) -> tuple[LoadedModel, list[str]]:
    """The model; and the constants that are no parameter by name. Raises ModelError, UsageError."""
    unknown = [
        name for name in graph.inputs
        if name not in (graph.tokens, *_INPUTS) and not name.startswith("past_key_values")
    ]  # fmt: skip
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
    told = getattr(config.get_text_config(), "num_hidden_layers", None)
    if blocks and told is not None and told != blocks:
        raise ModelError(
            f"{path} has {blocks} blocks, and the config in {folder} tells of {told}",
            hint="the two belong to different models; name the directory of config and tokenizer: "
            "--engine-option tokenizer=DIR",
        )
    parts: Any = module
    parts.config, parts.generation_config = config, _generation(folder, config)
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


def _generation(folder: Path, config: Any) -> GenerationConfig:
    if (folder / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(folder)
        except Exception:  # as if it were not there
            pass
    return GenerationConfig.from_model_config(config)


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
    known: set[str] = set()
    for node in graph.nodes if graph.has_modules else ():
        for constant in {name for name in node.inputs if _counts(graph, name)}:
            choice = _choice(node, constant)
            if choice is not None:
                known.add(constant)
                kind, name, transposed = choice
                if kind == "p":
                    named.setdefault(name, (constant, transposed))
    left = [name for name in graph.constants if _counts(graph, name) and name not in known]
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
    """What transformers' models say of themselves: the first and the last matrix."""
    matrices = [name for name, (c, _) in named.items() if len(graph.constants[c].dims) == 2]
    first = next((n for n in matrices if graph.kinds.get(n.rpartition(".")[0]) == "Embedding"), "")
    ending = [n for n in matrices if not re.search(r"(^|\.)\d+\.", n)]
    last = (
        ending[-1] if ending and graph.kinds.get(ending[-1].rpartition(".")[0]) == "Linear" else ""
    )
    ends = [root.get_submodule(n.rpartition(".")[0]) if n else None for n in (first, last)]
    object.__setattr__(root, "get_input_embeddings", lambda: ends[0])
    object.__setattr__(root, "get_output_embeddings", lambda: ends[1])
