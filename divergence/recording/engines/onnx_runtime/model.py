"""An ONNX file as a model: its modules, with the config and tokenizer that lie beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from divergence.errors import ModelError, UsageError, first_line
from divergence.recording.engines.engine import Loading
from divergence.recording.engines.load import LoadedModel, load_tokenizer, resolve_task
from divergence.recording.engines.onnx_runtime.graph import Graph
from divergence.recording.engines.onnx_runtime.weights import modules_of
from divergence.recording.model.structure import describe_modules

__all__ = ["model_of"]

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
