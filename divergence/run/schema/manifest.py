"""manifest.json: what ran, on which tokens, under which settings, where.

Typed and strict: unknown keys are refused, and an error names the path of the
wrong value. Everything a second machine needs to re-execute the run is here or
in the shards; nothing here is executed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import xxhash

from divergence.run.schema.provenance import (
    ArithmeticFact,
    Calibration,
    CodeNote,
    CompiledNote,
    EngineNote,
    EngineValue,
    ParameterNote,
    QuantizationNote,
    Training,
)
from divergence.run.schema.record import Count

if TYPE_CHECKING:
    import torch

__all__ = [
    "COLLECTIVES",
    "NO_TENSOR",
    "SCHEMA_VERSION",
    "SUITE",
    "UNKNOWN",
    "Calibration",
    "CodeNote",
    "CompiledNote",
    "EngineNote",
    "EngineValue",
    "Environment",
    "Manifest",
    "Mesh",
    "MeshAxis",
    "ModelIdentity",
    "ModuleNote",
    "ModuleRole",
    "Override",
    "OwnTruth",
    "Plan",
    "QuantizationNote",
    "Repeatability",
    "SampleTokens",
    "Settings",
    "Sizes",
    "StoreMode",
    "Switch",
    "SwitchStatus",
    "Task",
    "Tokens",
]  # fmt: skip

SCHEMA_VERSION = 8
SUITE = "suite:"
"""Before the name of an operator suite, which stands where a model's source would."""
COLLECTIVES = f"{SUITE}collectives"
"""The suite that several processes run."""

NO_TENSOR = "returns no tensor"
"""How a reason in ``Plan.skipped_operators`` ends, of an operator that takes a number out of one.
"""
NO_DIGEST = "0" * 32
"""Stands in the place of a manifest's digest while that is made."""
UNKNOWN = "unknown"
"""The device of an imported dump, and the digest of a parameter: not told."""

ModuleRole = Literal["block", "trunk", "inner"]
SwitchStatus = Literal["accepted", "set", "refused", "absent"]
TokenId = Count
NO_LABEL = -100
"""The label of a token that has none, as torch and transformers have it."""
Task = Literal["causal-lm", "encoder", "encoder-decoder", "operators"]
"""``operators``: no model; a suite, a replay or a probe of single operators."""

StoreMode = Literal["full", "sketch", "stats", "hash"]
"""What is kept of a tensor: every byte, projections and statistics, statistics, or digests."""


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Shared strictness; no fields of its own."""


ConfigValue = bool | int | float | str | list[bool | int | float | str | None] | None
"""One value of a model's configuration."""


class ModelIdentity(_Strict, kw_only=True):
    """Which model ran, so that two runs can be shown to have used the same one."""

    source: str
    revision: str | None = None
    model_class: str
    task: Task
    """What the model does, and so how it is run."""
    config_digest: str
    """Digest of the configuration."""
    dtype: str
    """The dtype of the weights as run."""
    num_parameters: Count
    digest: str
    """One digest over all of ``digests``."""
    digests: dict[str, str] = {}
    """xxh3-128 of each parameter and buffer, in the run's dtype; or ``offloaded``, ``unknown``."""
    rounded_digests: dict[str, str] = {}
    """By narrower dtype: the overall digest of the same weights rounded to it. So a float32 run and
    a bfloat16 run of one checkpoint can be recognised as such."""
    parameters: dict[str, ParameterNote] = {}
    """Of floating-point ones, what else tells how two that differ belong together."""
    dequantized: dict[str, str] = {}
    """Of modules whose codes were dequantised as they were loaded: the digest of the weight."""
    quantization: QuantizationNote | None = None
    attn_implementation: str | None = None
    tokenizer_digest: str | None = None
    chat_template_digest: str | None = None
    trust_remote_code: bool = False
    missing: list[str] = []
    """Parameters that the checkpoint lacks, and that are therefore random."""
    config: dict[str, ConfigValue] = {}
    """The configuration by dotted key, without names, paths and what changes no number."""
    code: dict[str, CodeNote] = {}
    """By class of module: ``ModuleNote.kind`` without what follows a slash. Where two classes share
    a name, the Python module's name and a dot come before it."""
    tied: list[list[str]] = []
    """Groups of parameter names that share their memory."""
    embedding_rows: Count | None = None
    """Rows of the input embedding."""
    head_rows: Count | None = None
    """Rows of the output matrix."""
    tokenizer_size: Count | None = None
    """Number of tokens in the tokenizer."""
    chat_example: str | None = None
    """A fixed conversation, as the chat template renders it."""


class SampleTokens(_Strict, kw_only=True):
    """One prompt: text for people, ids for machines."""

    text: str | None = None
    prompt_ids: list[TokenId]
    """Without padding."""
    num_left_pad: Count = 0
    """Pads that the batch put before the prompt."""
    num_right_pad: Count = 0
    """Pads that the batch put after the prompt."""
    decoder_prompt_ids: list[TokenId] = []
    """What an encoder-decoder's decoder began with."""
    generated_ids: list[TokenId] = []
    """What was fed forward as decode tokens, forced or the model's own choice."""
    chosen_ids: list[TokenId] = []
    """The greedy choice at each step. It differs from ``generated_ids`` only where tokens were
    forced."""
    labels: list[Annotated[int, msgspec.Meta(ge=NO_LABEL, le=2**63 - 1)]] | None = None
    """Of a training step: what each token of the prompt is to be predicted as, -100 where the loss
    leaves it out. None: as itself."""

    @property
    def used_labels(self) -> list[int]:
        """Those of the loss: all but the first token's, which nothing predicts."""
        return (self.prompt_ids if self.labels is None else self.labels)[1:]

    @property
    def num_padded(self) -> int:
        """Length of its row in the batch: the prompt and its pads."""
        return self.num_left_pad + len(self.prompt_ids) + self.num_right_pad


class Tokens(_Strict, kw_only=True):
    """All prompts, and how they were batched."""

    samples: list[SampleTokens]
    groups: list[list[Count]]
    """Samples that ran together in one forward, in the order of its rows; each sample is in one
    group. A record's ``sample`` is the first of its group."""
    forced_by: str | None = None
    """Id of the run whose tokens were forced; None where the model chose its own."""
    texts: dict[str, str] = {}
    """Decoded text of the token ids that a report may want to show."""

    def group_of(self, sample: int) -> list[int]:
        """The group whose first sample this is; empty where there is none."""
        return next((group for group in self.groups if group and group[0] == sample), [])

    def pads(self, sample: int) -> torch.Tensor | None:
        """(B, T), True where the prompts of the group whose first sample this is have pads; None
        where they have none."""
        members = [self.samples[number] for number in self.group_of(sample)]
        if not any(member.num_left_pad or member.num_right_pad for member in members):
            return None
        import torch

        place = torch.arange(max(member.num_padded for member in members))
        begins = torch.tensor([[member.num_left_pad] for member in members])
        ends = torch.tensor([[member.num_left_pad + len(member.prompt_ids)] for member in members])
        return (place < begins) | (place >= ends)

    @property
    def layout(self) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """The groups, and each sample's pads: forwards of equal layout have equal rows."""
        return self.groups, [(sample.num_left_pad, sample.num_right_pad) for sample in self.samples]


class Switch(_Strict, kw_only=True):
    """One determinism or precision switch: what was asked for, and what the machine did."""

    name: str
    asked: str
    found: str
    """The value before."""
    status: SwitchStatus
    """``accepted``: read back as asked for. ``set``: cannot be read back (an environment
    variable)."""
    note: str | None = None


class Settings(_Strict, kw_only=True):
    """How the run was made."""

    deterministic: bool
    seed: int
    device: str
    device_map: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    max_new_tokens: Count
    batch: bool
    """Prompts ran together in batches."""
    use_cache: bool = True
    """False: each decode step was a forward over the whole sequence, its own token recorded."""
    prefill_chunk: Count | None = None
    """Tokens of the prompt that were fed at a time. None: all of them in one forward."""
    hooks: bool = True
    """Modules were watched by hooks. False: what the model returns was recorded, without any."""
    compute_dtype: str | None = None
    """What every operator of every pass was computed in, where that is wider than the model's
    dtype: ``float64`` in a truth."""
    switches: list[Switch] = []
    nondeterministic_warnings: list[str] = []
    """Operators that torch reported as nondeterministic."""
    cpu_fallbacks: list[str] = []
    """Operators that the CPU ran, since torch said that the device has none of them."""


class Environment(_Strict, kw_only=True):
    """The machine: no host name, no user, no path. Variables are recorded by allow-list only."""

    label: str
    """What to call the machine."""
    platform: str
    python: str
    device_type: str
    device_name: str
    num_devices: Count = 0
    driver: str | None = None
    runtime: str | None = None
    cpu: str
    """The name that the processor itself gives."""
    cpu_capability: str
    num_threads: Count
    versions: dict[str, str]
    variables: dict[str, str] = {}
    architecture: str | None = None
    """``x86_64``, ``aarch64``."""
    cpu_model: str | None = None
    """Maker and numbers of family, model and stepping, which virtual machines hide less often than
    the name."""
    torch_build: dict[str, str] = {}
    """Compiler and linear algebra libraries that torch was built with."""


class ModuleNote(_Strict, kw_only=True):
    """What a captured module is: its class, and its part in the model."""

    kind: str
    """Class of the module."""
    role: ModuleRole
    """``block``: a repeated block. ``trunk``: run once, outside the blocks (embedding, rotary
    table, final norm, head). ``inner``: inside either."""
    routed: bool = False
    """The block sends each token to some of its experts, a discrete choice that rounding may
    flip."""


class OwnTruth(_Strict, kw_only=True):
    """The run's own truth, in float64: each block got the input that the free pass recorded, and
    with ``full`` the free run was made too."""

    mode: Literal["auto", "full", "floor"]
    """``auto``: as many forwards as fitted the share of the capture's time; ``full``: all;
    ``floor``: no tensors, but the sums of the pass ``floor``, which the other two have as well."""
    num_steps: list[Count]
    """By group of prompts: the forwards that were made, from the prefill on."""
    device: str
    """Where it was computed: the CPU, of a model on a device that has no float64."""
    seconds: float
    """What it took."""
    budget_seconds: float | None = None
    """What it was allowed. None: as long as it takes."""
    stopped_by: str | None = None
    """What ended it early, other than its time."""


class Plan(_Strict, kw_only=True):
    """What the run was asked to record."""

    passes: list[str]
    sites: list[str]
    steps: str | None = None
    """Selected steps; None for all."""
    positions: str | None = None
    """Selected token positions; None for all."""
    store: StoreMode = "full"
    only_changed: str | None = None
    """Id of the run that holds the bytes of the records that have none here."""
    anchored_to: str | None = None
    """Id of the run whose recorded inputs were put in place."""
    plants: list[str] = []
    """Faults that were planted."""
    logits_site: str | None = None
    """The site whose tensor is the logits."""
    replayed_pass: str | None = None
    """In a replay: the pass of the run in ``anchored_to`` whose operators were run again."""
    substitutes: list[str] = []
    """Operators whose results were replaced by another run's."""
    skipped_operators: dict[str, Count] = {}
    """Number of calls that were not recorded or not run again, by reason: ``NO_TENSOR``, or words.
    """
    modules: dict[str, ModuleNote] = {}
    """Every hooked module, by path."""
    not_called: dict[str, Count] = {}
    """Outermost modules that the free pass never called, with their number of parameters."""
    compiled: dict[str, CompiledNote] = {}
    """Modules that were given to ``torch.compile``, by path."""
    truth: OwnTruth | None = None
    """The passes ``truth``, ``truth_free`` and ``floor``, where the run has one."""


class MeshAxis(_Strict, kw_only=True):
    """One way in which the work is divided between ranks."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    """Number of parts."""


class Mesh(_Strict, kw_only=True):
    """The processes of a run of several ranks."""

    axes: list[MeshAxis]
    """Rank r stands at place r of these axes, in row-major order."""
    environments: list[Environment] = []
    """The ranks' environments in order, where they are not all equal to the manifest's."""

    def __str__(self) -> str:
        """``4 ranks (dp 2 × tp 2)``"""
        axes = " × ".join(f"{axis.name} {axis.size}" for axis in self.axes)
        return f"{self.num_ranks} rank{'s' if self.num_ranks != 1 else ''} ({axes})"

    @property
    def num_ranks(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def places_of(self, rank: int) -> tuple[int, ...]:
        """The rank's index on each axis: of ``dp 2 × tp 4`` rank 5 stands at (1, 1)."""
        places = []
        for axis in reversed(self.axes):
            rank, place = divmod(rank, axis.size)
            places.append(place)
        return tuple(reversed(places))


class Repeatability(_Strict, kw_only=True):
    """Did this machine repeat itself bit for bit?"""

    num_runs: Count = 1
    """1: not measured."""
    num_compared: Count = 0
    num_different: Count = 0
    first_difference: str | None = None
    """The first tensor that differed."""


class Override(_Strict, kw_only=True):
    """A setting of the recorded run that ``--like`` was told to change."""

    name: str
    reference: str
    """The recorded run's value."""
    used: str
    """The value in this run."""


class Sizes(_Strict, kw_only=True):
    """How much the run holds."""

    num_records: Count = 0
    num_tensors: Count = 0
    num_shards: Count = 0
    stored_bytes: Count = 0
    """Bytes on disk for tensors."""
    seen_bytes: Count = 0
    """Bytes of all tensors before equal ones were stored once."""


class Manifest(_Strict, kw_only=True):
    """The whole of manifest.json."""

    schema_version: int = SCHEMA_VERSION
    digest: str | None = None
    """xxh3-128 of this file with zeros in the place of these 32 digits. None in runs made before
    version 8, and in what other programs write."""
    record_digests: dict[str, str] = {}
    """xxh3-128 of each file of records, noted when the run is closed."""
    id: str
    tool_version: str
    created: str
    command: str | None = None
    complete: bool = False
    """The run reached its end."""
    stopped_by: str | None = None
    """What ended an incomplete run."""
    like: str | None = None
    """Id of the run that this one repeats."""
    model: ModelIdentity
    engine: EngineNote | None = None
    """None in runs made before version 6, by transformers."""
    tokens: Tokens
    settings: Settings
    training: Training = msgspec.field(default_factory=Training)
    environment: Environment
    plan: Plan
    repeatability: Repeatability = msgspec.field(default_factory=Repeatability)
    overrides: list[Override] = []
    sizes: Sizes = msgspec.field(default_factory=Sizes)
    arithmetic: list[ArithmeticFact] = []
    """What probes found out about this machine."""
    mesh: Mesh | None = None
    """None where one process made the run."""

    def encode(self) -> bytes:
        """The file's text, closed by its digest, which is set. UnicodeEncodeError where a text
        holds what UTF-8 cannot."""
        self.digest = NO_DIGEST
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        self.digest = xxhash.xxh3_128_hexdigest(text)
        return text.replace(NO_DIGEST.encode(), self.digest.encode(), 1)

    def is_closed_by(self, text: bytes) -> bool:
        """Does the digest fit ``text``, the bytes that this manifest was read from?"""
        digest = self.digest or ""
        blank = text.replace(digest.encode(), NO_DIGEST.encode(), 1)
        return xxhash.xxh3_128_hexdigest(blank) == digest

    @property
    def num_ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.num_ranks

    @property
    def quantizes_activations(self) -> bool:
        """Do values become codes on their way, each a choice that rounding may flip?"""
        return self.model.quantization is not None and self.model.quantization.has_activations

    @property
    def processes(self) -> str:
        """``"4 ranks (dp 2 × tp 2)"``, or ``"1 process"``."""
        return "1 process" if self.mesh is None else str(self.mesh)
