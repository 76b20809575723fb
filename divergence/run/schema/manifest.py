"""manifest.json: what ran, on which tokens, under which settings, where.

Typed and strict: unknown keys are refused, and an error names the path of the
wrong value. Everything a second machine needs to re-execute the run is here or
in the shards; nothing here is executed.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from divergence.run.schema.arithmetic import ArithmeticFact
from divergence.run.schema.record import Count

__all__ = [
    "SCHEMA_VERSION",
    "SUITE",
    "ArithmeticFact",
    "CodeNote",
    "CompiledNote",
    "Environment",
    "Manifest",
    "Mesh",
    "MeshAxis",
    "ModelIdentity",
    "ModuleNote",
    "ModuleRole",
    "Override",
    "Plan",
    "Repeatability",
    "SampleTokens",
    "Settings",
    "Sizes",
    "StoreMode",
    "Switch",
    "SwitchStatus",
    "Task",
    "Tokens",
]

SCHEMA_VERSION = 4
SUITE = "suite:"
"""Before the name of an operator suite, which stands where a model's source would."""

ModuleRole = Literal["block", "trunk", "inner"]
SwitchStatus = Literal["accepted", "set", "refused", "absent"]

TokenId = Count
Task = Literal["causal-lm", "encoder", "encoder-decoder", "operators"]
"""``operators``: no model; a suite, a replay or a probe of single operators."""


StoreMode = Literal["full", "sketch", "stats", "hash"]
"""What is kept of a tensor: every byte, projections and statistics, statistics, or digests."""


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Shared strictness; no fields of its own."""


ConfigValue = bool | int | float | str | list[bool | int | float | str | None] | None
"""One value of a model's configuration."""


class CodeNote(_Strict, kw_only=True):
    """The code that modules of one class ran, so that two runs can be told to have run the same.

    ``digest``: of the syntax of ``forward`` and of what it calls, without comments, docstrings,
    annotations and line numbers. ``functions``: the digest of each of those functions, by name;
    an empty digest where it is no function of Python. ``origin``: Python module of
    ``forward``, with the file's name and line where it is no library's. ``replaced``: what was put
    in place of the class' own code, and by what. ``wrapped``: what stands around the module or in
    it (an adapter, sharding, offloading, quantised weights). ``compiled``: by what. ``odd``:
    modules of this class that run other code than most, each with its digest. ``places``: paths of
    the modules, with ``*`` for the numbers in them. ``attributes``: plain numbers that they hold,
    as most have them, followed by the modules that have others.
    """

    digest: str
    origin: str
    functions: dict[str, str] = {}
    replaced: list[str] = []
    wrapped: list[str] = []
    compiled: str | None = None
    odd: dict[str, str] = {}
    places: list[str] = []
    attributes: dict[str, str] = {}


class ModelIdentity(_Strict, kw_only=True):
    """Which model, so that two runs can be told to have used the same one.

    ``digests``: xxh3-128 of each parameter and buffer in the run's dtype, by name;
    ``digest``: one over all of them. ``rounded_digests``: the overall digest that
    the same weights have once rounded to a narrower dtype, so that a float32 run
    and a bfloat16 run of one checkpoint can be recognised as such.

    ``config``: the configuration by dotted key, without names, paths and what changes no number.
    ``code``: by class of module, as ``ModuleNote.kind`` calls it (less what follows a slash); where
    two classes have one name, with the Python module's name and a dot before it. ``tied``: names
    of parameters that share their memory, group by group. ``embedding_rows``, ``head_rows``: of the
    input embedding and the output matrix; ``tokenizer_size``: how many tokens there are.
    ``chat_example``: a fixed conversation as the chat template renders it.
    """

    source: str
    revision: str | None = None
    model_class: str
    task: Task
    config_digest: str
    dtype: str
    num_parameters: Count
    digest: str
    digests: dict[str, str] = {}
    rounded_digests: dict[str, str] = {}
    quantization: str | None = None
    attn_implementation: str | None = None
    tokenizer_digest: str | None = None
    chat_template_digest: str | None = None
    trust_remote_code: bool = False
    missing: list[str] = []
    config: dict[str, ConfigValue] = {}
    code: dict[str, CodeNote] = {}
    tied: list[list[str]] = []
    embedding_rows: Count | None = None
    head_rows: Count | None = None
    tokenizer_size: Count | None = None
    chat_example: str | None = None


class SampleTokens(_Strict, kw_only=True):
    """One prompt as data: text for people, ids for machines.

    ``prompt_ids`` without padding. ``num_left_pad``/``num_right_pad``: what the
    batch added around them. ``decoder_prompt_ids``: what an encoder-decoder's
    decoder began with. ``generated_ids``: what was fed forward as decode tokens
    (forced or own); ``chosen_ids``: what greedy choice wanted at each step, which
    differs from ``generated_ids`` only where tokens were forced.
    """

    text: str | None = None
    prompt_ids: list[TokenId]
    num_left_pad: Count = 0
    num_right_pad: Count = 0
    decoder_prompt_ids: list[TokenId] = []
    generated_ids: list[TokenId] = []
    chosen_ids: list[TokenId] = []


class Tokens(_Strict, kw_only=True):
    """All prompts and how they were put together.

    ``groups``: samples run together in one forward, each a list of consecutive
    sample numbers; a record's ``sample`` is the first of its group.
    ``forced_by``: id of the run whose tokens were forced, or None for own choice.
    ``texts``: decoded text of token ids that a report may want to show.
    """

    samples: list[SampleTokens]
    groups: list[list[Count]]
    forced_by: str | None = None
    texts: dict[str, str] = {}


class Switch(_Strict, kw_only=True):
    """One determinism or precision switch: asked for, and what the machine did. ``accepted``: read
    back as asked for; ``set``: cannot be read back (an environment variable)."""

    name: str
    asked: str
    found: str
    status: SwitchStatus
    note: str | None = None


class Settings(_Strict, kw_only=True):
    """How the run was made.

    ``compute_dtype``: what every operator of every pass was computed in, where that is wider
    than the model's dtype: ``float64`` in a truth. ``cpu_fallbacks``: operators of which torch said
    that the device has none and the CPU ran them.
    """

    deterministic: bool
    seed: int
    device: str
    device_map: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    max_new_tokens: Count
    batch: bool
    compute_dtype: str | None = None
    switches: list[Switch] = []
    nondeterministic_warnings: list[str] = []
    cpu_fallbacks: list[str] = []


class Environment(_Strict, kw_only=True):
    """The machine: no host name, no user, no path; variables by allow-list only.

    ``architecture``: ``x86_64``, ``aarch64``. ``cpu``: the name that the processor itself gives;
    ``cpu_model``: maker and numbers of family, model and stepping, which virtual machines hide less
    often. ``torch_build``: compiler and libraries of linear algebra that torch was built with.
    """

    label: str
    platform: str
    python: str
    device_type: str
    device_name: str
    num_devices: Count = 0
    driver: str | None = None
    runtime: str | None = None
    cpu: str
    cpu_capability: str
    num_threads: Count
    versions: dict[str, str]
    variables: dict[str, str] = {}
    architecture: str | None = None
    cpu_model: str | None = None
    torch_build: dict[str, str] = {}


class ModuleNote(_Strict, kw_only=True):
    """What a captured module is: its class, and its part in the model.

    ``role``: ``block`` (a repeated block), ``trunk`` (run once, outside the
    blocks: embedding, rotary table, final norm, head), ``inner`` (inside either).
    ``routed``: a block that sends each token to some of its experts, a discrete choice
    that rounding may flip.
    """

    kind: str
    role: ModuleRole
    routed: bool = False


class CompiledNote(_Strict, kw_only=True):
    """A module that was given to ``torch.compile``, and what became of it.

    ``state``: ``compiled``; ``partly``, where some of its code ran eager; ``eager``, where all did;
    ``unknown``, where this torch does not tell. ``num_graphs``: compiled pieces of it. ``reason``:
    why it is not compiled in one piece.
    """

    backend: str
    state: Literal["compiled", "partly", "eager", "unknown"]
    num_graphs: Count = 0
    reason: str | None = None


class Plan(_Strict, kw_only=True):
    """What was to be recorded. ``modules``: every hooked module, by path.

    ``only_changed``: id of the run that holds the bytes of records which have none here.
    ``substitutes``: operators whose results were replaced by another run's.
    ``replayed_pass``: in a replay, the pass of the run in ``anchored_to`` whose operators were run
    again. ``skipped_operators``: calls that were not recorded or not run again, by reason.
    ``compiled``: modules that were given to ``torch.compile``, by path.
    """

    passes: list[str]
    sites: list[str]
    steps: str | None = None
    positions: str | None = None
    store: StoreMode = "full"
    only_changed: str | None = None
    anchored_to: str | None = None
    plants: list[str] = []
    logits_site: str | None = None
    replayed_pass: str | None = None
    substitutes: list[str] = []
    skipped_operators: dict[str, Count] = {}
    modules: dict[str, ModuleNote] = {}
    compiled: dict[str, CompiledNote] = {}


class MeshAxis(_Strict, kw_only=True):
    """One way in which the work is divided, and into how many parts."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Mesh(_Strict, kw_only=True):
    """The processes of a run of several ranks: rank r stands at the row-major place r of ``axes``.

    ``environments``: of the ranks, in order, where they are not all that of the manifest.
    """

    axes: list[MeshAxis]
    environments: list[Environment] = []

    def __str__(self) -> str:
        """``4 ranks (dp 2 × tp 2)``"""
        count = math.prod(axis.size for axis in self.axes)
        axes = " × ".join(f"{axis.name} {axis.size}" for axis in self.axes)
        return f"{count} rank{'s' if count != 1 else ''} ({axes})"


class Repeatability(_Strict, kw_only=True):
    """Did this machine repeat itself bit for bit? None of it was measured if num_runs is 1."""

    num_runs: Count = 1
    num_compared: Count = 0
    num_different: Count = 0
    first_difference: str | None = None


class Override(_Strict, kw_only=True):
    """A setting of the recorded run that ``--like`` was told to change."""

    name: str
    reference: str
    used: str


class Sizes(_Strict, kw_only=True):
    """``stored_bytes`` on disk for tensors; ``seen_bytes`` before equal ones were shared."""

    num_records: Count = 0
    num_tensors: Count = 0
    num_shards: Count = 0
    stored_bytes: Count = 0
    seen_bytes: Count = 0


class Manifest(_Strict, kw_only=True):
    """The whole of manifest.json. ``arithmetic``: what probes found of this machine; ``mesh``:
    None where one process made the run."""

    schema_version: int = SCHEMA_VERSION
    id: str
    tool_version: str
    created: str
    command: str | None = None
    complete: bool = False
    stopped_by: str | None = None
    like: str | None = None
    model: ModelIdentity
    tokens: Tokens
    settings: Settings
    environment: Environment
    plan: Plan
    repeatability: Repeatability = msgspec.field(default_factory=Repeatability)
    overrides: list[Override] = []
    sizes: Sizes = msgspec.field(default_factory=Sizes)
    arithmetic: list[ArithmeticFact] = []
    mesh: Mesh | None = None
