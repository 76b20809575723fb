"""Models from a path or a hub: their weights, dtype and place."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from divergence.domain import hook_places, placed
from divergence.errors import DivergenceError, ModelError, UsageError, first_line
from divergence.numerics.formats import format_named
from divergence.outside import MAX_LINE_BYTES, is_plain, json_value, read_bytes
from divergence.recording.engines.hub import must_lie_here
from divergence.recording.forwards import USUAL, Forwards, patched
from divergence.recording.machine import accelerator_type
from divergence.recording.processes import Ranks
from divergence.run.command import command_line
from divergence.run.manifest import ATTENTION, Task
from divergence.run.record import MANIFEST, expanded
from divergence.run.site import escape_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


# Where the weights of a model lie, if not all on one device.
#
# ``device_map`` leaves some in host memory or on disk. accelerate's hooks bring such a weight in
# for its module's forward and take it away again; in between torch shows it on the meta device.
# Whoever needs the values asks the same hook, for one module at a time.
#
# Ranks divide a model by transformers' own means, ``DistributedConfig`` (5.23): tensor parallel,
# FSDP2, pipeline stages; every rank then reads only its part of the weights. That needs accelerate.
# Without it, or for ranks on the CPU of a machine with an accelerator, each rank loads the whole
# model into the host's memory and keeps its part.

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")

DeviceMap = str | Mapping[str, str | int]


def device_map_of(given: DeviceMap) -> str | dict[str, str | int]:
    """Read a device map as ``from_pretrained`` takes it: its words, a device, or module path →
    device, which may be ``cpu`` or ``disk``; also the name of a JSON file of that."""
    if not isinstance(given, str):
        return dict(given)
    if given in _WORDS or not (given.endswith(".json") or given.startswith("{")):
        return given
    hint = '--device-map {"": "cpu"}, or {"model.layers.0": 0, "model.layers.1": "disk"}'
    data = (
        given.encode()
        if given.startswith("{")
        else read_bytes(expanded(given), error=UsageError, hint=hint)
    )
    device_map = json_value(data, where=f"--device-map {given}", error=UsageError, hint=hint)
    if not isinstance(device_map, dict) or not all(
        isinstance(v, str | int) for v in device_map.values()
    ):
        raise UsageError(
            f"--device-map {given} is no JSON object of module path → device", hint=hint
        )
    return device_map


def map_text(given: DeviceMap | None) -> str | None:
    """Write a device map as a run records it: words as they are, a map as one line of JSON."""
    if given is None or isinstance(given, str):
        return given
    return json.dumps(dict(given), sort_keys=True)


def weights_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name → weight for all of ``state_dict``, whole, in its order as far as weights are at hand.
    One that is offloaded is there while the loop is at it, and no longer. All ranks of a mesh must
    ask, in the same order."""
    away: dict[str, list[str]] = {}
    for name, tensor in module.state_dict().items():
        if tensor.device.type == "meta":
            away.setdefault(name.rpartition(".")[0], []).append(name)
            continue
        gather = getattr(tensor, "full_tensor", None)  # of a weight in pieces on several ranks
        yield from _parts(name, tensor if gather is None else gather())
    for path, names in away.items():
        try:
            from accelerate.utils import align_module_device
        except ImportError as error:
            raise ModelError(
                f"the weights of {path} are offloaded, and accelerate, which brings them in, is "
                "not there",
                hint="pip install 'divergence-debug[accelerate]'",
            ) from error
        with align_module_device(module.get_submodule(path), execution_device="cpu"):
            for name in names:
                tensor = getattr(module.get_submodule(path), name.rpartition(".")[2])
                if tensor.device.type == "meta":
                    raise ModelError(
                        f"the weight {name} has no values: nothing brings it in",
                        hint="was the model loaded with --device-map?",
                    )
                yield name, tensor.detach()


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor class that holds codes and scales (torchao's) is the tensors it holds."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor).__module__.startswith("torch."):
        yield name, tensor
        return
    for part in flatten()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


_NAMES = {"tp": "tp_size", "fsdp": "fsdp_size", "pp": "pp_size", "dp": "dp_replicate_size"}


def distribution(ranks: Ranks) -> Any | None:
    """Return the division that ``from_pretrained`` is told; None where every rank has the whole
    model."""
    if set(ranks.sizes) <= {"dp"}:
        return None
    try:
        from transformers.distributed import DistributedConfig

        sizes: dict[str, Any] = {_NAMES[name]: size for name, size in ranks.sizes.items()}
        return DistributedConfig(**sizes)
    except (ImportError, TypeError) as error:
        import transformers

        raise UsageError(
            f"transformers {transformers.__version__} cannot divide a model by "
            f"{' and '.join(ranks.sizes)}",
            hint="pip install -U transformers (5.23 can), or --mesh dp",
        ) from error
    except ValueError as error:  # combinations that it does not have
        raise UsageError(f"--mesh cannot be carried out: {error}", hint="fewer axes") from error


def divide(module: Any, config: Any, ranks: Ranks) -> Any:
    """Divide a model that this rank holds whole, and let go of what is not its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.utils import TransformersDeviceMesh

    kind = ranks.device.partition(":")[0]
    shape = tuple(ranks.sizes.get(name, 1) for name in ("pp", "dp", "fsdp", "tp"))
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    tied = "tp" in ranks.sizes and _untie(module)
    module = type(module).maybe_distribute_model(module, config, TransformersDeviceMesh(mesh, mesh))
    if tied:
        module.tie_weights()
    return module.to(ranks.device)


def _untie(module: Any) -> bool:
    """Give the output matrix a name of its own where it is the embedding: the plan looks for both,
    since it expects a model that is still to be filled. Was it the embedding?"""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", head):
        return False
    head.weight = torch.nn.Parameter(embedding.weight.detach(), requires_grad=False)
    return True


def why_not(module_class: str, error: BaseException, ranks: Ranks | None) -> ModelError | None:
    """The clear word for a model that cannot be divided so; None for another error."""
    match = re.search(r"has no `(\w+)_plan`", str(error))
    # stages are cut from a list called ``layers``, without looking whether there is one
    stages = ranks is not None and "pp" in ranks.sizes and isinstance(error, AttributeError)
    if match is None and not stages:
        return None
    axis = "pp" if match is None else match[1]
    return ModelError(
        f"{module_class or 'this model'} has no plan for --mesh {axis}",
        hint="--mesh dp (each rank the whole model)"
        + ("" if axis == "fsdp" else ", perhaps --mesh fsdp")
        + ", or a model whose transformers class has a plan",
    )


def tensor_plan(module: Any) -> dict[str, str]:
    """Module path → style, of modules that tensor parallelism touches."""
    plan: dict[str, str] = getattr(module, "tp_plan", None) or {}
    styles = {}
    for path, _ in module.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is not None:
            styles[escape_path(path)] = style
    return styles


# Codes: the stored weights of a compressed-tensors checkpoint, and what they stand for.
#
# Where no kernel multiplies codes, as on a CPU, transformers has compressed-tensors dequantise
# every weight before the first forward: code × scale, rounded to the scale's dtype. That is done
# here when the model is loaded, so that every pass runs the same weights; the codes are kept beside
# them (one byte an element and less). They are what is hashed, since they are what the checkpoint
# holds, and what a wider pass computes with: code × scale in its own dtype, so that a truth has the
# scheme's integers exactly. Activations are quantised by the library's own code in the forward;
# under a wider dtype its scales, quotients and zero points are wide, its codes the nearest integers
# of those.


class QuantizedCodes:
    """Keeps each quantised module's stored tensors, and how they become a weight."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor], Any]] = {}

    def keep(self, path: str, module: torch.nn.Module, scheme: Any) -> None:
        """The module as it was loaded, before its weight is dequantised."""
        tensors = {**module._parameters, **module._buffers}  # not those of modules in it
        own = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
        self._of[path] = module, own, scheme

    @property
    def paths(self) -> list[str]:
        return list(self._of)

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name → tensor, as the checkpoint has them."""
        for path, (_, tensors, _) in self._of.items():
            for name, tensor in tensors.items():
                yield f"{path}.{name}", tensor

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Module → what its codes became."""
        for path, (module, _, _) in self._of.items():
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            yield path, weight

    def by_storage(self) -> dict[int, str]:
        """Map where each dequantised weight lies to its module."""
        return {weight.untyped_storage().data_ptr(): path for path, weight in self.weights()}

    def exact(self, path: str, dtype: torch.dtype) -> torch.Tensor:
        """Code × scale, computed in ``dtype``."""
        from compressed_tensors.compressors.base import BaseCompressor

        _, tensors, scheme = self._of[path]
        wide = {
            name: tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
            for name, tensor in tensors.items()
        }
        compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
        weight: torch.Tensor = compressor.decompress(wide, scheme)["weight"]
        return weight.to(dtype)


def dequantize(model: torch.nn.Module, source: str) -> QuantizedCodes | None:
    """Dequantise a compressed-tensors model now, instead of in its first forward. None where it is
    none, or where its weights are brought in only when they are needed."""
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is None or any(weight.is_meta for weight in model.parameters()):
        return None
    from compressed_tensors.compressors.base import decompress_module

    codes = QuantizedCodes()
    for path, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        codes.keep(path, module, scheme)
        try:
            decompress_module(module)
        except (KeyError, RuntimeError, ValueError) as error:
            raise ModelError(
                f"the codes of {path} cannot be dequantised: {error}",
                where=source,
                hint="are its tensors those that quantization_config in config.json names?",
            ) from error
    hook.remove()
    del model.ct_decompress_hook
    return codes


# Loading a Hugging Face model by hub id or local path, without surprises.
#
# The task is read off the config's architectures; attention is ``eager`` unless asked otherwise,
# because every backend has it. Parameters that the checkpoint lacks (transformers fills them with
# random numbers) are reported: a missing shard looks exactly like a wrong kernel.

TASKS = ("auto", "causal-lm", "encoder", "encoder-decoder")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode on its device, with what is needed to feed it."""

    source: str
    revision: str | None
    task: Task
    module: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device
    trust_remote_code: bool
    missing: list[str] = field(default_factory=list)
    """Parameters that the checkpoint lacked."""
    ranks: Ranks | None = None
    """The processes that the model runs on, where there are several."""
    twin: torch.nn.Module | None = None
    """The structure of the whole model without weights, where it runs on several ranks. ``module``
    may then hold a part of it under other names."""
    forwards: Forwards = USUAL
    codes: QuantizedCodes | None = None
    """What the checkpoint holds in place of weights, where they were dequantised."""
    quantization: Any = None
    """What config.json says of quantisation; a model that is dequantised forgets it."""
    adapter: str | None = None
    """What was merged into its base as it was loaded, where ``source`` is an adapter."""

    @property
    def structure(self) -> torch.nn.Module:
        """Return what the model is made of, on however many ranks it runs."""
        return self.module if self.twin is None else self.twin


@dataclass(frozen=True, slots=True)
class Loading:
    """Says which model is loaded, and how."""

    source: str
    """A directory, a file that the engine reads, or an id of the hub."""
    device: str = "cpu"
    task: str = "auto"
    revision: str | None = None
    dtype: str | None = None
    """None: the checkpoint's own."""
    attn_implementation: str = "eager"
    trust_remote_code: bool = False
    device_map: DeviceMap | None = None
    ranks: Ranks | None = None
    """The processes that the model is divided among; all of them load."""
    local: bool = False
    """The hub is out of reach, and what it has of the model is here."""


def _load_config(loading: Loading) -> PretrainedConfig:
    """The model's config alone. Raises ModelError for no such model and for damaged configs."""
    from transformers import AutoConfig

    try:
        place, file = _load_parts(loading.source)
        config = cast(
            "PretrainedConfig",
            AutoConfig.from_pretrained(
                place,
                revision=loading.revision,
                trust_remote_code=loading.trust_remote_code,
                local_files_only=loading.local,
                **file,
            ),
        )
    except (Exception, SystemExit) as error:  # a config and its code may do anything
        raise _model_error(loading, error) from error
    # a config.json may name attention too, also a kernel of the hub, and would come before options
    config._attn_implementation = loading.attn_implementation
    return config


def resolve_task(config: PretrainedConfig, task: str = "auto") -> Task:
    """``auto`` → from the architectures' names and ``is_encoder_decoder``."""
    if task not in TASKS:
        raise UsageError(f"unknown task {task!r}", hint=f"one of {', '.join(TASKS)}")
    if task != "auto":
        return cast(Task, task)  # one of them
    names = config.architectures or []
    if getattr(config, "is_encoder_decoder", False):
        return "encoder" if _HEAD.search("".join(names[:1])) else "encoder-decoder"
    causal = re.compile("CausalLM|LMHead|ForConditionalGeneration$|GenerationDecoder$")
    if any(causal.search(name) for name in names):
        return "causal-lm"
    if names:
        return "encoder"
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return "causal-lm" if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else "encoder"


def load_tokenizer(
    source: str, *, revision: str | None, trust_remote_code: bool, local: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the model has none (token ids are then needed). ``local``: no
    network is asked."""
    from transformers import AutoTokenizer

    place, file = _load_parts(source)
    try:
        return AutoTokenizer.from_pretrained(
            place,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=local,
            **file,
        )
    except BaseException as error:  # any library's own error; reported when text needs it
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # a panic of tokenizers, whose rules are in Rust, is no Exception
        return None


def load_processor(loaded: LoadedModel) -> Any:
    """Load what makes tensors of pictures and sound. Raises ModelError where the model has none, or
    where what it imports is missing."""
    from transformers import AutoProcessor
    from transformers.processing_utils import ProcessorMixin

    revision, trusted = loaded.revision, loaded.trust_remote_code
    try:
        with _no_bars():
            processor = AutoProcessor.from_pretrained(
                os.path.expanduser(loaded.source), revision=revision, trust_remote_code=trusted
            )
    except Exception as error:  # any library's own error
        text = " ".join(str(error).split())
        raise ModelError(
            f"the processor of {loaded.source} cannot be loaded: {text[:300]}",
            hint="pip install 'divergence-debug[media]' (Pillow, soundfile); some processors "
            "take the torchvision of your torch as well",
        ) from error
    if not isinstance(processor, ProcessorMixin):
        raise ModelError(f"{loaded.source} has a tokenizer, and no processor of pictures or sound")
    return processor


def import_classes(source: str) -> None:
    """Imports what loading the model will take: its classes, which its config names."""
    config = _load_config(_settled_source(Loading(source)))
    factory = _class_of(config, resolve_task(config))
    if hasattr(factory, "_model_mapping"):
        factory._model_mapping[type(config)]  # imports the file of the class


def load_model(loading: Loading) -> LoadedModel:
    """Load model and tokenizer. Raises ModelError (no such model, no weights, not loadable, does
    not fit) and UsageError (unknown dtype or attention implementation)."""
    adapter = _adapter_at(loading.source)
    if adapter is not None:
        if loading.ranks is not None or loading.device_map is not None:
            raise UsageError(
                f"{loading.source} is an adapter, which is merged where all weights lie together",
                hint="leave out --mesh and --device-map, or merge it with PEFT",
            )
        base = load_model(replace(loading, source=str(adapter.base_folder()), revision=None))
        adapter.merge_into(base.module)
        trusted = loading.trust_remote_code
        tokenizer = load_tokenizer(loading.source, revision=None, trust_remote_code=trusted)
        return replace(
            base, source=loading.source, adapter=adapter.text, tokenizer=tokenizer or base.tokenizer
        )
    loading = _settled_source(loading)
    config, ranks = _load_config(loading), loading.ranks
    options: dict[str, Any] = {
        "config": config,
        "revision": loading.revision,
        "trust_remote_code": loading.trust_remote_code,
        "local_files_only": loading.local,
        "weights_only": True,  # of pickled weights: tensors and plain containers, no calls
        "dtype": "auto" if loading.dtype is None else _model_dtype(loading.dtype),
        "attn_implementation": loading.attn_implementation,
        "output_loading_info": True,
    }
    if loading.device_map is not None:
        options["device_map"] = device_map_of(loading.device_map)
    division = None if ranks is None else distribution(ranks)
    # can it be divided while it is read?
    at_once = division is not None and importlib.util.find_spec("accelerate") is not None
    at_once = at_once and ranks is not None and ranks.device.startswith(accelerator_type() or "cpu")
    if at_once:
        options["distributed_config"] = division
    quantization = getattr(config, "quantization_config", None)
    task = resolve_task(config, loading.task)
    factory = _class_of(config, task)
    try:
        with _no_bars():
            place, file = _load_parts(loading.source)
            module, loading_info = factory.from_pretrained(place, **options, **file)
        if ranks is not None and division is not None and not at_once:
            module = divide(module, division, ranks)
    except (Exception, SystemExit) as error:  # torn weights, pickles and custom code: each its own
        name = (config.architectures or [""])[0]
        raise (
            _attention_error(loading, error)
            or why_not(name, error, ranks)
            or _model_error(loading, error)
        ) from error
    if loading.device_map is None and division is None:
        try:
            module.to(loading.device)
        except RuntimeError as error:  # out of memory is a RuntimeError on every backend
            raise ModelError(
                f"the model does not fit on {loading.device}: {first_line(error, most=300)}",
                hint="use --device-map auto, a smaller --dtype, or --device cpu",
            ) from error
    with _no_bars():
        codes = dequantize(module, loading.source)
    device = next((p.device for p in module.parameters() if p.device.type != "meta"), None)
    return replace(
        _loaded(loading, task, module, torch.device("cpu") if device is None else device),
        missing=sorted(str(name) for name in loading_info.get("missing_keys", ())),
        ranks=ranks,
        twin=None if ranks is None else empty_model(loading).module,
        codes=codes,
        quantization=quantization,
    )


def empty_model(loading: Loading) -> LoadedModel:
    """The model's structure on torch's meta device: shapes without weights."""
    adapter = _adapter_at(loading.source)
    if adapter is not None:
        loading = replace(loading, source=str(adapter.base_folder()), revision=None)
    loading = _settled_source(loading)
    config = _load_config(loading)
    task = resolve_task(config, loading.task)
    factory = _class_of(config, task)
    options: dict[str, Any] = {}
    own_dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if loading.dtype is not None:
        options["dtype"] = _model_dtype(loading.dtype)
    elif own_dtype is not None:
        options["dtype"] = format_named(str(own_dtype)).torch_dtype
    try:
        with torch.device("meta"):
            options["attn_implementation"] = loading.attn_implementation
            if not hasattr(factory, "from_config"):  # no auto class
                module = factory._from_config(config, **options)
            else:
                trusted = loading.trust_remote_code
                module = factory.from_config(config, trust_remote_code=trusted, **options)
    except (Exception, SystemExit) as error:  # as in load_model
        raise _attention_error(loading, error) or _model_error(loading, error) from error
    return _loaded(loading, task, module, torch.device("meta"))


def _loaded(
    loading: Loading, task: Task, module: torch.nn.Module, device: torch.device
) -> LoadedModel:
    source, revision, trusted = loading.source, loading.revision, loading.trust_remote_code
    return LoadedModel(
        source=source,
        revision=revision,
        task=task,
        module=module.eval(),
        device=device,
        trust_remote_code=trusted,
        tokenizer=load_tokenizer(
            source, revision=revision, trust_remote_code=trusted, local=loading.local
        ),
    )


_WITH_TEXT = {
    "IMAGE_TEXT_TO_TEXT": "AutoModelForImageTextToText",
    "MULTIMODAL_LM": "AutoModelForMultimodalLM",
}
"""transformers' mapping of models that read text and something else → its auto class."""


_HEAD = re.compile("For(SequenceClassification|TokenClassification|QuestionAnswering)$")
"""Classes that need no decoder's tokens beside the text's."""


def _class_of(config: PretrainedConfig, task: Task) -> Any:
    """Return the class whose weights the checkpoint holds, where the auto class of its task would
    take another (and leave its head out, or draw weights at random); else that auto class."""
    import transformers as hf

    factory = _factory(config, task)
    own = getattr(hf, (config.architectures or [""])[0], None)
    fits = isinstance(own, type) and getattr(own, "config_class", None) is type(config)
    if task != resolve_task(config) or not fits or getattr(config, "auto_map", None):
        return factory
    usual = factory._model_mapping.get(type(config), None)
    return factory if own in (usual if isinstance(usual, tuple) else (usual,)) else own


def _factory(config: PretrainedConfig, task: Task) -> Any:
    import transformers as hf

    names = config.architectures or [""]
    if task == "causal-lm":
        reads_text = type(config) in hf.MODEL_FOR_CAUSAL_LM_MAPPING
        # pictures or sound beside text: of prompts of text, the text alone is run
        for name, auto_class in _WITH_TEXT.items():
            classes = getattr(hf, f"MODEL_FOR_{name}_MAPPING", {})
            # some have a class for text alone as well, which the checkpoint is not of
            if type(config) in classes and (
                not reads_text or getattr(classes[type(config)], "__name__", "") == names[0]
            ):
                return getattr(hf, auto_class)
        return hf.AutoModelForCausalLM
    if task == "encoder-decoder":
        speech = type(config) in hf.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        return hf.AutoModelForSpeechSeq2Seq if speech else hf.AutoModelForSeq2SeqLM
    head = re.search("ForMaskedLM$", names[0]) or _HEAD.search(names[0])
    return getattr(hf, f"AutoModel{head[0]}") if head else hf.AutoModel


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers and of what it calls: progress is the caller's,
    and none where stderr is no terminal. A program that has them has them again afterwards."""
    from tqdm.std import tqdm
    from transformers.utils import logging

    shown, made = logging.is_progress_bar_enabled(), tqdm.__init__
    logging.disable_progress_bar()

    def without(bar: Any, *args: Any, **how: Any) -> None:
        made(bar, *args, **how | {"disable": True})

    try:
        with patched(tqdm, "__init__", without):
            yield
    finally:
        if shown:
            with warnings.catch_warnings():  # HF_HUB_DISABLE_PROGRESS_BARS has the last word
                warnings.simplefilter("ignore")
                logging.enable_progress_bar()


def _model_dtype(name: str) -> torch.dtype:
    form = format_named(name)
    if form.kind != "float" or form.name.startswith("float8"):
        raise UsageError(
            f"a model cannot be run in dtype {form.name}",
            hint="one of float32, bfloat16, float16, float64",
        )
    return form.torch_dtype


def _load_parts(source: str) -> tuple[str, dict[str, Any]]:
    """Return what ``from_pretrained`` is given: a folder or an id; of a GGUF file its folder and
    name."""
    place = os.path.expanduser(source)
    if not is_gguf(source):
        return place, {}
    return os.path.dirname(place) or ".", {"gguf_file": os.path.basename(place)}


def is_gguf(source: str) -> bool:
    """A file of llama.cpp, which transformers widens as it reads it (with the package gguf)."""
    return source.endswith(".gguf") and expanded(source).is_file()


def _adapter_at(source: str) -> Any:
    """The adapter in a directory that holds no model beside it, as a domain reads it; else None."""
    path = expanded(source)
    if not (path / _ADAPTER).is_file() or (path / "config.json").is_file():
        return None
    places = list(hook_places("adapter").values())
    return placed(places[0])(source) if places else None


def _settled_source(loading: Loading) -> Loading:
    """Settles from where the model is read. Raises ModelError for what is no model."""
    source = loading.source
    if is_gguf(source):
        return loading
    path = expanded(source)
    if not path.exists():
        if not source.startswith((".", "/", "~")):  # an id of the hub
            return replace(loading, local=must_lie_here(source, loading.revision))
        raise ModelError(f"no such model: {path} does not exist", hint="check the path")
    if not path.is_dir():
        raise ModelError(f"{path} is a file", hint="give the model's directory, or a .gguf file")
    if (path / MANIFEST).is_file():
        raise ModelError(
            f"{source} is not a model but a run",
            hint=command_line("capture", like=source, o="OTHER", note="repeats it"),
        )
    if not (path / "config.json").is_file():
        pipeline = (path / "model_index.json").is_file()
        raise ModelError(
            f"no model in {path}: it has no config.json",
            hint=f"it is a pipeline of diffusers: {_IN_PYTHON}"
            if pipeline
            else "give the directory that save_pretrained or `hf download` wrote",
        )
    return loading


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""


_IN_PYTHON = "in Python load it, and record(module, out=...) while it runs"


def _attention_error(loading: Loading, error: BaseException) -> UsageError | None:
    implementation = loading.attn_implementation
    text = str(error).lower()
    named = "attn_implementation" in text or "attention implementation" in text
    if not named and (implementation == "eager" or "attention" not in text):
        return None
    return UsageError(
        f"attention implementation {implementation!r} cannot be used: "
        + first_line(error, most=300),
        hint=f"one of {', '.join(ATTENTION)}; eager is always there",
    )


def what_follows(source: str) -> str | None:
    """Say what sentence-transformers runs behind the model, where it wrote the folder."""
    file = expanded(source) / "modules.json"
    if not file.is_file():
        return None
    try:
        table = json_value(read_bytes(file), where=str(file))
        kinds = [str(module["type"]).rpartition(".")[2] for module in table][1:]
    except (DivergenceError, KeyError, TypeError):
        return None
    names = ", ".join(kind for kind in kinds if kind.isidentifier())
    if not names:
        return None
    return f"{names} of modules.json did not run: only the model before them is recorded"


def _model_error(loading: Loading, error: BaseException) -> DivergenceError:
    if isinstance(error, DivergenceError):
        return error  # says what it is: a rank that was told to stop meanwhile
    source, revision, text = loading.source, loading.revision, str(error)
    if "trust_remote_code" in text:
        at = "" if revision is None else f" at {revision}"
        return ModelError(
            f"{source}{at} carries its own modelling code",
            hint="read that code, then pass --trust-remote-code",
        )
    lower = text.lower()
    absent = "not found" in lower or "no such file" in lower
    if "no file named" in lower or ("safetensors" in lower and absent):
        return ModelError(
            f"no weights in {source}",
            where=first_line(error, most=300),
            hint="download the model.safetensors files (all shards) beside config.json",
        )
    if "accelerate" in text:
        return ModelError(
            "--device-map needs the accelerate package",
            hint="pip install 'divergence-debug[accelerate]', or leave out --device-map",
        )
    if isinstance(error, ImportError):
        # as of a quantised model
        asked = re.search(r"pip install (?:-\S+ )*['\"]?(\w[\w.<>=\[\]-]*)", text)
        by_itself = f"importing {error.name or 'transformers'} by itself shows why it fails"
        return ModelError(
            f"cannot load {source!r}: {first_line(error, most=300)}",
            where="a package that transformers imports here",
            hint=f"pip install '{asked[1]}'" if asked and not error.name else by_itself,
        )
    if "Unrecognized configuration class" in text:
        return ModelError(
            f"cannot load {source!r}: {first_line(error, most=300)}",
            where="config.json, whose class no auto class of transformers takes for this task",
            hint="another --task; or in Python load the model and capture(model, inputs=[...])",
        )
    if expanded(source).exists():
        hint = "its files are damaged, or for another version of transformers; download it again"
        if missing := re.search(r"have a file named (\S+?)\.?\s", text):
            hint = f"{missing[1]} is missing beside config.json: download all files of the model"
        elif "model_type" in text and "_class_name" in _text(expanded(source) / "config.json"):
            hint = f"it is a model of diffusers: {_IN_PYTHON}"
        elif '"thinker_config"' in _text(expanded(source) / "config.json"):
            hint = (
                "what reads text, pictures and sound is its thinker: in Python "
                "model.thinker.save_pretrained(PATH) makes a model of it (the processor beside it)"
            )
        elif isinstance(error, AttributeError | NotImplementedError):
            hint = (
                "the model's own class fails on what this tool asks of it: in Python load it "
                "yourself, and capture(model, inputs=[...]) or record(model, out=...)"
            )
        return ModelError(
            f"cannot load {source!r}: {first_line(error, most=300)}",
            where=type(error).__name__,
            hint=hint,
        )
    return ModelError(
        f"cannot load {source!r}: {first_line(error, most=300)}",
        hint=f"there is no directory {source} here; as a hub id: check it, and --revision",
    )


def register_operators() -> None:
    """Have transformers register its ``torch.ops.transformers``; nothing where it has none."""
    with contextlib.suppress(Exception):  # an older transformers, or a torch it cannot use
        importlib.import_module("transformers.integrations.moe")


# A checkpoint's files: are they data alone?
#
# A checkpoint that a run names, and not the user, is read only where it is data alone: safetensors.
# Pickled weights are read by torch with ``weights_only``; still a pickle is a program, so that only
# the user can choose it. An adapter (PEFT) names another model and Python modules. What
# transformers reads otherwise (config, tokenizer, chat template in jinja's sandbox) is data to it
# as long as ``trust_remote_code`` is not given.

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


def own_dtype(source: str, *, local: bool = False) -> str | None:
    """The dtype that a checkpoint's config names; None where it names none. ``local``: no network
    is asked."""
    config = None if is_gguf(source) else _file(source, None, "config.json", local=local)
    content = {} if config is None else _json(config)
    return content.get("dtype") or content.get("torch_dtype")


def check_data_alone(source: str, *, revision: str | None) -> None:
    """Raise ModelError where loading ``source`` reads a pickle or an adapter. What is not there at
    all (no config, no weights) is left to the loader, which says so."""
    config = None if is_gguf(source) else _file(source, revision, "config.json")
    if config is None:  # or GGUF, which is data
        if not is_gguf(source) and _file(source, revision, _ADAPTER) is not None:
            raise _refused(source, f"is an adapter ({_ADAPTER} names its base)")
        return
    from transformers.utils import is_peft_available  # without PEFT adapters are passed over

    if is_peft_available() and _file(source, revision, _ADAPTER) is not None:
        raise _refused(source, f"comes with an adapter ({_ADAPTER})")
    weights = _weights(source, revision, config)
    others = [name for name in weights if not name.endswith(".safetensors")]
    if away := [name for name in weights if not is_plain(name)]:
        raise _refused(source, f"names weights outside its folder ({away[0][:80]})")
    if others:
        raise _refused(source, f"has pickled weights ({others[0]})")


def _weights(source: str, revision: str | None, config: Path) -> list[str]:
    """The files that transformers takes weights from, in its order."""
    named = _json(config).get("transformers_weights")  # of the config; comes before the usual names
    if isinstance(named, str):
        if not named.endswith(".index.json") or not is_plain(named):
            return [named]
        return list(weight_map(_file(source, revision, named)).values())
    if _file(source, revision, SINGLE) is not None:
        return [SINGLE]
    index = _file(source, revision, INDEX)
    if index is not None:
        return list(weight_map(index).values())
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if _file(source, revision, name) is not None:
            return [name]
    return []


def weight_map(index: Path | None) -> dict[str, str]:
    """Weight → file, as an index names them: its name alone does not make them safetensors."""
    named = {} if index is None else _json(index).get("weight_map")
    return {str(name): str(file) for name, file in named.items()} if isinstance(named, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    """Refused where it cannot be read: the loader might read it all the same."""
    data = read_bytes(path, most=MAX_LINE_BYTES, error=ModelError)
    content = json_value(data, where=str(path), error=ModelError)
    return content if isinstance(content, dict) else {}


def _file(source: str, revision: str | None, name: str, *, local: bool = False) -> Path | None:
    """A file of the checkpoint on this machine, fetched from the hub where the loader would, unless
    ``local``."""
    folder = expanded(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils import cached_file

    try:
        place = os.path.expanduser(source)
        file = cached_file(place, name, revision=revision, local_files_only=local)
    except (OSError, ValueError):  # no such file or repository, or the hub is out of reach
        return None
    return None if file is None else Path(file)


def _refused(source: str, what: str) -> ModelError:
    return ModelError(
        f"{source} {what}, and the run alone names it",
        where="what a run names is loaded as data: config, tokenizer and safetensors",
        hint=f"if you trust that model, name it yourself: --model {source}",
    )
