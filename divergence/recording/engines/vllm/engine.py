"""vLLM as an engine: in this process, eager, greedy, one prompt at a time, whole prompts.

What would make a forward depend on others is off: prefix caching, chunked prefill, speculative
decoding, CUDA graphs, asynchronous scheduling. The structure of transformers' model of the same
checkpoint, without weights, gives names and roles; a name map says where its modules are in vLLM's
(``names``), and views show them in its form (``views``).

vLLM reads many settings from environment variables as it is imported or starts. Those that this
engine needs are set before that, recorded, and put back when it is done.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec
import torch

from divergence.errors import DivergenceError, ModelError, UsageError, first_line
from divergence.recording.engines.engine import EngineOptions, Loading
from divergence.recording.engines.identity import identify
from divergence.recording.engines.load import LoadedModel, empty_model
from divergence.recording.engines.vllm.names import Place, map_for, places_of
from divergence.recording.engines.vllm.session import VllmSession
from divergence.recording.engines.vllm.worker import EXTENSION, FORMAT, register_loader
from divergence.run.schema.fingerprint import digest_many
from divergence.run.schema.manifest import ModelIdentity
from divergence.run.schema.site import escape_path

__all__ = ["VllmEngine", "VllmOptions"]

_OLDEST = (0, 32)
"""The version that it is tested with; names that it uses moved before."""
_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Set where the user has not: they change no number."""
_MOST_TOKENS = 4096


class VllmOptions(EngineOptions, frozen=True, kw_only=True):
    """What vLLM is given."""

    max_model_len: int | None = None
    """Tokens of a prompt and what follows it; None: the model's own, at most 4096."""
    block_size: int | None = None
    """Tokens in a block of the cache; None: vLLM's choice."""
    kv_cache_dtype: str = "auto"
    """``auto``: the model's."""
    kv_cache_gib: int = 1
    """GiB of the cache."""
    batch_invariant: bool = False
    """``VLLM_BATCH_INVARIANT``: kernels whose result does not depend on the batch."""
    tensor_parallel_size: int = 1
    """Processes that a model is divided among. More than one cannot be recorded yet."""
    name_map: str | None = None
    """A name map, by name (configs/maps/) or path; None: the family's own."""


class VllmEngine:
    """Models as vLLM runs them."""

    name: ClassVar[str] = "vllm"
    Options: ClassVar[type[EngineOptions]] = VllmOptions

    def load(self, loading: Loading, options: VllmOptions) -> VllmSession:
        twin = empty_model(
            loading.source, task=loading.task, revision=loading.revision, dtype=loading.dtype,
            trust_remote_code=loading.trust_remote_code,
        )  # fmt: skip
        _check(loading, options, twin)
        family = str(getattr(twin.module.config, "model_type", ""))
        found = map_for(family, options.name_map)
        shown: dict[str, Any] = {}

        def on_loaded(module: torch.nn.Module) -> None:
            shown["places"] = places_of(
                found, structure=twin.module, module=module, model_type=family
            )
            shown["identity"] = _identity(twin, module, shown["places"])

        variables = _QUIET | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_BATCH_INVARIANT": str(int(options.batch_invariant)),
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        }
        closing = contextlib.ExitStack()
        try:
            closing.enter_context(_surroundings(variables))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it and its packages find outdated
                _import()
                register_loader(on_loaded)
                llm = _made(loading, options, twin)
            closing.callback(_let_go, llm)
            module = _model_of(llm)
        except BaseException:
            closing.close()
            raise
        loaded = LoadedModel(
            source=twin.source, revision=twin.revision, task=twin.task, module=module,
            tokenizer=twin.tokenizer, device=torch.device(loading.device),
            trust_remote_code=twin.trust_remote_code, twin=twin.module,
        )  # fmt: skip
        return VllmSession(
            loaded, msgspec.structs.asdict(options), llm=llm, places=shown["places"],
            identity=shown["identity"], facts=_facts(llm, module, variables), ends=_ends(loading),
            on_close=closing.close,
        )  # fmt: skip


def _check(loading: Loading, options: VllmOptions, twin: LoadedModel) -> None:
    """Raise UsageError for what this engine does not do."""
    if options.tensor_parallel_size != 1:
        raise UsageError(
            f"--engine-option tensor_parallel_size={options.tensor_parallel_size}: vLLM then runs "
            "the model in other processes, where nothing is recorded",
            hint="leave it out: one process",
        )
    if twin.task != "causal-lm":
        raise UsageError(
            f"--engine vllm: {loading.source} is no causal language model but an {twin.task}",
            hint="--engine transformers runs it",
        )
    given = {"--device-map": loading.device_map, "--mesh": loading.ranks}
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"--engine vllm places the model itself: {option} cannot be given")


def _import() -> None:
    """Raise ModelError where vLLM is not there, cannot be imported, or is too old."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise _broken(error) from error
        raise ModelError(
            "--engine vllm: vllm is not installed",
            hint="install it in an environment of its own (docs/engines.md); runs are compared "
            "anywhere",
        ) from error
    except Exception as error:  # its compiled parts raise their own kinds
        raise _broken(error) from error
    version = str(vllm.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST:
        raise ModelError(
            f"--engine vllm: vllm {version} is too old",
            hint=f"{'.'.join(map(str, _OLDEST))} or newer",
        )


def _broken(error: Exception) -> ModelError:
    return ModelError(
        f"--engine vllm: vllm cannot be imported: {first_line(error, most=300)}",
        hint="python -c 'import vllm' shows why",
    )


def _made(loading: Loading, options: VllmOptions, twin: LoadedModel) -> Any:
    """vLLM with its model. Raises ModelError."""
    from vllm import LLM
    from vllm.platforms import current_platform

    kind = loading.device.partition(":")[0]
    if current_platform.device_type != kind:
        raise ModelError(
            f"--engine vllm: this vllm runs on {current_platform.device_type or 'no device'}, not "
            f"on {kind}",
            hint=f"--device {current_platform.device_type or 'cpu'}",
        )
    config: Any = twin.module.config
    own = getattr(config.get_text_config(), "max_position_embeddings", None) or _MOST_TOKENS
    length = options.max_model_len or min(own, _MOST_TOKENS)
    dtype = next(p.dtype for p in twin.module.parameters() if p.dtype.is_floating_point)
    optional = {} if options.block_size is None else {"block_size": options.block_size}
    try:
        return LLM(
            model=os.path.expanduser(loading.source),
            revision=loading.revision,
            trust_remote_code=loading.trust_remote_code,
            dtype=str(dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            load_format=FORMAT,
            use_tqdm_on_load=False,
            worker_extension_cls=EXTENSION,
            tensor_parallel_size=options.tensor_parallel_size,
            max_model_len=length,
            max_num_batched_tokens=length,  # so no prompt is divided
            max_num_seqs=1,
            kv_cache_dtype=options.kv_cache_dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            async_scheduling=False,
            disable_log_stats=True,
            seed=0,
            **optional,
        )
    except DivergenceError:
        raise
    except Exception as error:  # a configuration that it refuses, memory, a kernel: its own kinds
        raise ModelError(
            f"vLLM cannot load {loading.source!r}: {first_line(error, most=300)}",
            hint="VLLM_LOGGING_LEVEL=INFO shows what it does",
        ) from error


def _model_of(llm: Any) -> torch.nn.Module:
    """The worker's model, in this process."""
    found = (
        llm.collective_rpc("divergence_model")
        if hasattr(llm, "collective_rpc")
        else llm.apply_model(lambda model: model)
    )
    module: torch.nn.Module = found[0]
    return module


def _identity(
    twin: LoadedModel, module: torch.nn.Module, places: Mapping[str, Place]
) -> ModelIdentity:
    """Digests of the weights as vLLM has read them, under transformers' names.

    One that the map does not say where to find is noted as not digested, as one that is offloaded.
    What code ran is told by the engine's version.
    """
    filled = copy.deepcopy(twin.module)
    names = set(twin.module.state_dict())
    shared: dict[int, torch.nn.Parameter] = {}
    for path, part in filled.named_modules():
        place = places.get(escape_path(path))
        own = None if place is None or not path else module.get_submodule(place.theirs)
        for name, empty in list(part._parameters.items()):
            if empty is None:
                continue
            if id(empty) not in shared:
                weight = None if own is None else own._parameters.get(name)
                read = None if weight is None or place is None else _rows(weight, place, empty)
                if read is None:
                    part._parameters[name] = None
                    continue
                shared[id(empty)] = torch.nn.Parameter(read, requires_grad=False)
            part._parameters[name] = shared[id(empty)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = None
    found = identify(LoadedModel(
        source=twin.source, revision=twin.revision, task=twin.task, module=filled,
        tokenizer=twin.tokenizer, device=torch.device("cpu"),
        trust_remote_code=twin.trust_remote_code,
    ))  # fmt: skip
    unknown = sorted(names - set(found.digests))
    digests = found.digests | dict.fromkeys(unknown, "offloaded")
    count = sum(weight.numel() for weight in twin.module.parameters())
    sizes: dict[str, Any] = {"num_parameters": count}
    if unknown:
        sizes |= {"digests": digests, "digest": digest_many(digests), "rounded_digests": {}}
    return msgspec.structs.replace(found, code={}, attn_implementation=None, **sizes)


def _rows(
    weight: torch.nn.Parameter, place: Place, empty: torch.nn.Parameter
) -> torch.Tensor | None:
    """The part of vLLM's weight that is transformers' ``empty``: without rows that vLLM added (a
    vocabulary made longer); None where it has another form."""
    rows = place.rows or slice(0, empty.shape[0])
    part = weight.detach()[rows] if weight.ndim else weight.detach()
    return part if part.shape == empty.shape and part.dtype == empty.dtype else None


def _facts(llm: Any, module: torch.nn.Module, variables: Mapping[str, str]) -> dict[str, str]:
    """What was found set, in vLLM's own words."""
    config = llm.llm_engine.vllm_config
    attention = {
        str(backend.get_name())
        for part in module.modules()
        if (backend := getattr(part, "attn_backend", None)) is not None
    }
    cache, scheduler = config.cache_config, config.scheduler_config

    def said(value: object) -> str:
        return {True: "on", False: "off"}.get(value, str(value))  # type: ignore[call-overload,no-any-return]

    return {
        "attention backend": ", ".join(sorted(attention)) or "unknown",
        "prefix caching": said(cache.enable_prefix_caching),
        "chunked prefill": said(scheduler.enable_chunked_prefill),
        "asynchronous scheduling": said(scheduler.async_scheduling),
        "speculative decoding": said(config.speculative_config is not None),
        "CUDA graphs": said(not config.model_config.enforce_eager),
        "compilation": str(getattr(config.compilation_config.mode, "name", "unknown")).lower(),
        "sequences at a time": str(scheduler.max_num_seqs),
        "max model length": str(config.model_config.max_model_len),
        "block size": str(cache.block_size),
        "cache dtype": str(cache.cache_dtype),
        "transformers": _transformers_version(),
    } | {name: value for name, value in variables.items() if name not in _QUIET}


def _transformers_version() -> str:
    import transformers

    return transformers.__version__


def _ends(loading: Loading) -> set[int]:
    """The tokens after which a sample has ended, as transformers takes them."""
    from transformers import AutoConfig, GenerationConfig

    source = os.path.expanduser(loading.source)
    try:
        own = GenerationConfig.from_pretrained(source, revision=loading.revision or "main")
    except OSError:  # it has none
        own = GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(
                source, revision=loading.revision, trust_remote_code=loading.trust_remote_code
            )
        )
    eos = own.eos_token_id
    return {eos} if isinstance(eos, int) else set(eos or ())


@contextlib.contextmanager
def _surroundings(variables: Mapping[str, str]) -> Iterator[None]:
    """With these variables; afterwards the process has its own again, and the number of its threads
    can be set as before (vLLM takes that away on a CPU)."""
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    for name, value in variables.items():
        if name not in _QUIET or name not in os.environ:
            os.environ[name] = value
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _let_go(llm: Any) -> None:
    """Its memory and process groups, so that another can be made."""
    from vllm.distributed import cleanup_dist_env_and_memory

    shutdown: Callable[[], None] | None = getattr(llm.llm_engine.engine_core, "shutdown", None)
    with contextlib.suppress(Exception):  # it is done with, whatever it has to say
        if shutdown is not None:
            shutdown()
        cleanup_dist_env_and_memory()
