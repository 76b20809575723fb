"""vLLM as an engine: in this process, eager, greedy, whole prompts; a batch through its scheduler.

What would make a forward depend on others of its batch, or on what ran before, is off: prefix
caching, chunked prefill, speculative decoding, CUDA graphs, asynchronous scheduling. The structure
of transformers' model of the same checkpoint, without weights, gives names and roles; a name map
says where its modules are in vLLM's (``names``), views show them in its form (``views``), and the
rows of a forward are divided into its prompts (``batches``).

vLLM reads many settings from environment variables as it is imported or starts. Those that this
engine needs are set before that, recorded, and put back when it is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
import torch
import transformers

from divergence.errors import DivergenceError, ModelError, UsageError, first_line
from divergence.recording.engines.engine import EngineOptions, Loading
from divergence.recording.engines.load import LoadedModel, empty_model
from divergence.recording.engines.vllm.names import map_for, parameters_of, places_of
from divergence.recording.engines.vllm.session import VllmSession
from divergence.recording.engines.vllm.weights import identity_of
from divergence.recording.engines.vllm.worker import EXTENSION, FORMAT, register_loader
from divergence.recording.hooks.patch import patched
from divergence.run.command import command_line

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
_MOST_AT_ONCE = 8192


_Count = Annotated[int, msgspec.Meta(ge=1)]


class VllmOptions(EngineOptions, frozen=True, kw_only=True):
    """What vLLM is given."""

    max_model_len: _Count | None = None
    """Tokens of a prompt and what follows it; None: the model's own, at most 4096."""
    block_size: _Count | None = None
    """Tokens in a block of the cache; None: vLLM's choice."""
    max_num_seqs: _Count = 64
    """Prompts of a batch that run at a time; the others wait."""
    max_num_batched_tokens: _Count | None = None
    """Tokens that one forward may have; prompts that do not fit wait for the next. None: 8192, or
    max_model_len where that is more."""
    kv_cache_dtype: str = "auto"
    """``auto``: the model's."""
    kv_cache_gib: _Count = 1
    """GiB of the cache."""
    batch_invariant: bool = False
    """``VLLM_BATCH_INVARIANT``: kernels whose result does not depend on the batch."""
    tensor_parallel_size: _Count | None = None
    """Processes that a model is divided among; None: as many as ``--mesh tp`` says."""
    name_map: str | None = None
    """A name map, by name (configs/maps/) or path; None: the family's own."""


class VllmEngine:
    """Models as vLLM runs them."""

    name: ClassVar[str] = "vllm"
    Options: ClassVar[type[EngineOptions]] = VllmOptions

    def load(self, loading: Loading, options: VllmOptions) -> VllmSession:
        twin = empty_model(replace(loading, attn_implementation="eager"))
        _check(loading, options, twin)
        family = str(getattr(twin.module.config, "model_type", ""))
        name_map = map_for(family, options.name_map)
        shown: dict[str, Any] = {}

        def on_loaded(module: torch.nn.Module) -> None:
            places = shown["places"] = places_of(
                name_map, structure=twin.module, module=module, model_type=family
            )
            more = parameters_of(name_map, structure=twin.module, module=module)
            gather = None if loading.ranks is None else loading.ranks.gather
            shown["identity"] = identity_of(twin, module, places, more, gather=gather)

        variables = _QUIET | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_BATCH_INVARIANT": str(int(options.batch_invariant)),
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        }
        closing, llm = contextlib.ExitStack(), None
        try:
            closing.enter_context(_surroundings(variables))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it and its packages find outdated
                _import()
                closing.callback(lambda: _let_go(llm, with_group=loading.ranks is None))
                register_loader(on_loaded)
                llm = _made(loading, options, twin)
            runner = llm.collective_rpc("divergence_runner")[0]
            module = runner.get_model()
            module.generation_config = _generation_config(loading)
        except BaseException:
            closing.close()
            raise
        loaded = replace(
            twin, module=module, device=torch.device(loading.device), twin=twin.module,
            ranks=loading.ranks,
        )  # fmt: skip
        return VllmSession(
            loaded, msgspec.structs.asdict(options), llm=llm, runner=runner, places=shown["places"],
            identity=shown["identity"], facts=_facts(llm, module, variables),
            on_close=closing.close,
        )  # fmt: skip


def _check(loading: Loading, options: VllmOptions, twin: LoadedModel) -> None:
    """Raise UsageError for what this engine does not do."""
    if twin.task != "causal-lm":
        raise UsageError(
            f"--engine vllm: {loading.source} is no causal language model but an {twin.task}",
            hint="--engine transformers runs it",
        )
    if loading.device_map is not None:
        raise UsageError("--engine vllm places the model itself: --device-map cannot be given")
    ranks, size = loading.ranks, _num_ranks(loading)
    if ranks is not None and set(ranks.sizes) != {"tp"}:
        raise UsageError(
            f"--engine vllm divides matrices alone, and --mesh is {ranks.mesh}", hint="--mesh tp"
        )
    if options.tensor_parallel_size not in (None, 1, size):
        count = options.tensor_parallel_size
        raise UsageError(
            f"--engine-option tensor_parallel_size={count}: "
            f"{'this is one process' if size == 1 else f'--mesh tp has {size} processes'}",
            hint=command_line(
                "capture", loading.source, ranks=count, engine="vllm", mesh="tp", o="RUN"
            ),
        )


def _num_ranks(loading: Loading) -> int:
    return 1 if loading.ranks is None else loading.ranks.size


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
    at_once = options.max_num_batched_tokens or max(length, _MOST_AT_ONCE)
    if at_once < length:
        raise UsageError(
            f"--engine-option max_num_batched_tokens={at_once}: a prompt may have max_model_len="
            f"{length} tokens, and is not divided",
            hint=f"max_num_batched_tokens={length}, or a smaller max_model_len",
        )
    optional: dict[str, Any] = {}
    if options.block_size is not None:
        optional["block_size"] = options.block_size
    if loading.ranks is not None:  # torchrun's processes, each with its worker in it
        optional["distributed_executor_backend"] = "external_launcher"
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
            tensor_parallel_size=_num_ranks(loading),
            max_model_len=length,
            max_num_batched_tokens=at_once,
            max_num_seqs=min(options.max_num_seqs, at_once),  # vLLM wants no more
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
            f"vLLM cannot load {loading.source!r}: {_reason(error)}",
            hint="VLLM_LOGGING_LEVEL=INFO shows what it does",
        ) from error


def _reason(error: Exception) -> str:
    """Its first line; of one that counts what it found wrong, the first of these."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    counted = len(lines) > 1 and "validation error" in lines[0]
    return lines[1].partition(" [type=")[0][:300] if counted else first_line(error, most=300)


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
        "tokens at a time": str(scheduler.max_num_batched_tokens),
        "max model length": str(config.model_config.max_model_len),
        "block size": str(cache.block_size),
        "cache dtype": str(cache.cache_dtype),
        "transformers": transformers.__version__,
    } | {name: value for name, value in variables.items() if name not in _QUIET}


def _generation_config(loading: Loading) -> Any:
    """The model's own, as transformers takes it: which tokens end a sample, which is padding."""
    source, kind = os.path.expanduser(loading.source), transformers.GenerationConfig
    try:
        return kind.from_pretrained(source, revision=loading.revision or "main")
    except OSError:  # it has none
        return kind.from_model_config(
            transformers.AutoConfig.from_pretrained(
                source, revision=loading.revision, trust_remote_code=loading.trust_remote_code
            )
        )


@contextlib.contextmanager
def _surroundings(variables: Mapping[str, str]) -> Iterator[None]:
    """With these variables; afterwards the process has its own again, and the number of its threads
    can be set as before (vLLM takes that away on a CPU)."""
    before = dict(os.environ)
    for name, value in variables.items():
        if name not in _QUIET or name not in os.environ:
            os.environ[name] = value
    try:
        with patched(torch, "set_num_threads", torch.set_num_threads):
            yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _let_go(llm: Any | None, *, with_group: bool) -> None:
    """Its memory and process groups, so that another can be made. ``with_group``: the default group
    too, where vLLM made it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    destroy = torch.distributed.destroy_process_group

    def without_default(group: Any = None) -> None:
        if with_group or group is not None:  # it ends the default group, whoever made it
            destroy(group)

    with (
        patched(torch.distributed, "destroy_process_group", without_default),
        contextlib.suppress(Exception),  # it is done with, whatever it has to say
    ):
        if llm is None:
            cleanup_dist_env_and_memory()
        else:
            llm.llm_engine.engine_core.shutdown()
