"""The protocol of engines, and how transformers generate under it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import msgspec
import torch

from divergence.domain import own_domains, placed
from divergence.errors import ModelError, UsageError, first_line
from divergence.recording.engines.load import LoadedModel, Loading
from divergence.recording.forwards import patched
from divergence.recording.machine import free_bytes
from divergence.recording.processes import Ranks
from divergence.recording.recorder import Recorder
from divergence.run.manifest import (
    EngineNote,
    EngineValue,
    Manifest,
    ModelIdentity,
    ModuleNote,
    SampleTokens,
    StepPrecision,
    Training,
)
from divergence.run.site import did_you_mean
from divergence.run.trust import recorded_engine_options

# Running one group of prompts: greedy decoding with the KV cache, or one forward.
#
# Decoding goes through transformers' own ``generate``, which knows each architecture's caches and
# inputs; a logits processor takes the argmax or forces a recorded token. The model's generation
# config (sampling, penalties, stop words) is left out on purpose: it belongs to the deployment, and
# would hide what the forward pass computes.

_TOP = 5
_KEEP, _POSITIONS = "logits_to_keep", "position_ids"
NO_TEXT = ("pixel_values", "input_features", "input_values")
"""Inputs that are no text; where one is a model's main input, it reads none."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The tokens of a group of samples, one list for each sample."""

    generated: list[list[int]]
    """Ids that were fed forward, or chosen last."""
    chosen: list[list[int]]
    """The greedy choice at each step."""
    decoder_prompt: list[list[int]]
    """What an encoder-decoder's decoder began with."""
    seen_ids: set[int] = field(default_factory=set)
    """Every id that a report may want to show as text: choices and top-5."""


def run_group(
    loaded: LoadedModel,
    samples: list[SampleTokens],
    *,
    max_new_tokens: int,
    forced: list[list[int]] | None = None,
    num_logits: int | None = None,
    given: Mapping[str, torch.Tensor] | None = None,
) -> GroupResult:
    """One forward for each generated token over a group of equally long (padded) prompts.

    ``forced``: the tokens to feed instead of the own choice, equally many for each sample.
    ``given``: what a processor made of the pictures and sound of a prompt that runs alone. Where an
    encoder-decoder is given any, the prompt is what its decoder begins with.
    ``num_logits``: of how many last positions the prefill computes logits; None leaves it to the
    model, and so does a model that cannot be asked.
    Raises ModelError when the forward itself fails.
    """
    ids, mask = inputs(loaded, samples)
    count = max_new_tokens if forced is None else len(forced[0])
    model: Any = loaded.module
    if loaded.ranks is not None:
        loaded.ranks.idle = False
    with failures(loaded, samples, count), torch.no_grad():
        if padded_right(loaded, samples):
            return _prefill(loaded, samples, ids, mask, forced if count else [[] for _ in samples])
        if loaded.task != "encoder" and count > 0 and can_generate(model):
            ends = ends_of(loaded, forced)
            made = control(forced, count, ends, loaded.ranks)
            output = generate(
                loaded,
                ids,
                mask,
                count,
                ends=ends,
                control=made,
                num_logits=num_logits,
                given=given,
            )
            before, fed = output.tensor_split([output.shape[1] - len(made.chosen)], dim=1)
            generated = fed.tolist()
            decoder = loaded.task == "encoder-decoder"
            begun: list[list[int]] = before.tolist() if decoder else [[] for _ in generated]
            return GroupResult(generated, choices(made, generated, ends), begun, made.seen)
        kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **(given or {})}
        prompt: list[list[int]] = [[] for _ in samples]
        if loaded.task == "encoder-decoder" and given:
            prompt = ids.tolist()
            kwargs = {**given, "decoder_input_ids": ids}
        elif loaded.task == "encoder-decoder":
            prompt = [[decoder_start(model)] for _ in samples]
            kwargs["decoder_input_ids"] = torch.tensor(prompt, device=ids.device)
        model(**kwargs)
        return GroupResult([[] for _ in samples], [[] for _ in samples], prompt)


def decoder_start(model: Any) -> int:
    """Return the token that an encoder-decoder's decoder begins with."""
    owners = (getattr(model, "generation_config", None), model.config)
    starts = [getattr(owner, "decoder_start_token_id", None) for owner in owners]
    return next((int(start) for start in starts if start is not None), 0)


def padded_right(loaded: LoadedModel, samples: Sequence[SampleTokens]) -> bool:
    """Are there pads behind the prompts of a causal language model? Only its prefill is made then:
    a token behind the pads would not follow its prompt in a cache or a state."""
    return loaded.task == "causal-lm" and any(sample.num_right_pad for sample in samples)


def _prefill(
    loaded: LoadedModel,
    samples: list[SampleTokens],
    ids: torch.Tensor,
    mask: torch.Tensor,
    forced: list[list[int]] | None,
) -> GroupResult:
    """One forward over prompts (B, T) with pads behind them. Like those of any prefill its logits
    are (B, 1, V): the head gets the last token of each prompt."""
    model: Any = loaded.module
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"pads behind a prompt: {type(model).__name__} does not say which module gives its "
            "logits, which are to be those of each prompt's last token",
            hint="--pad-left",
        )
    ends = [sample.num_left_pad + len(sample.prompt_ids) - 1 for sample in samples]
    rows = range(len(samples))

    def deciding(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0][rows, ends][:, None], *args[1:]  # (B, T, H) → (B, 1, H)

    parameters = inspect.signature(model.forward).parameters
    more = {_POSITIONS: mask.cumsum(-1).sub(1).clamp(min=0)} if _POSITIONS in parameters else {}
    with head.register_forward_pre_hook(deciding, prepend=True):  # before what records it
        logits = model(input_ids=ids, attention_mask=mask, **more).logits
    made = control(forced, 1, set(), loaded.ranks)
    fed: list[list[int]] = [[] for _ in samples]
    if forced is None or forced[0]:
        scores = made(ids, logits[:, -1].float())
        fed = scores.argmax(dim=-1, keepdim=True).tolist()
    return GroupResult(fed, choices(made, fed, set()), [[] for _ in samples], made.seen)


@contextlib.contextmanager
def failures(loaded: LoadedModel, samples: Sequence[SampleTokens], count: int) -> Iterator[None]:
    """Raise what a forward raises as ModelError; ``count`` tokens were to follow each sample."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"out of memory on {loaded.device} during the forward pass",
            hint="shorter prompts, --device-map auto, or a smaller --dtype",
        ) from error
    except NotImplementedError as error:
        raise ModelError(
            f"the forward pass needs an operator that {loaded.device} lacks: {first_line(error)}",
            hint="use --device cpu, or a newer torch for this device",
        ) from error
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        length = max(len(sample.prompt_ids) for sample in samples)
        config: Any = loaded.module.config
        limit = getattr(config.get_text_config(), "max_position_embeddings", None)
        takes = inspect.signature(loaded.module.forward).parameters
        named = [name for name, each in takes.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        asked = {name for name in named if takes[name].default is inspect.Parameter.empty}
        more = "what takes more than tokens runs in Python: capture(model, inputs=[{...}], out=...)"
        others = asked - {"input_ids", "attention_mask"} or takes.keys() & set(NO_TEXT)
        hint = more if others else None
        if "dtype" in str(error) or "scalar type" in str(error):
            hint = "the model's own code mixes dtypes: --dtype float32"
        if limit is not None and 0 <= limit < length + count:  # XLNet has -1: no limit
            hint = (
                f"the prompt has {length} tokens and {count} are to follow; "
                f"the model has {limit} positions"
            )
        why = first_line(error, most=300)
        raise ModelError(f"the forward pass failed: {why}", hint=hint) from error


def check_ids(loaded: LoadedModel, samples: Sequence[SampleTokens], *, itemsize: int = 4) -> None:
    """Raise ModelError for a token id, of a prompt or forced, that the model does not have, and for
    a prompt whose attention the host has no memory for: the system would end the process.
    ``itemsize``: bytes of a number that it computes with."""
    config: Any = loaded.module.config
    vocab = getattr(config.get_text_config(), "vocab_size", None)
    if loaded.device.type == "cpu" and getattr(config, "_attn_implementation", "") == "eager":
        length = max((len(sample.prompt_ids) for sample in samples), default=0)
        heads = getattr(config.get_text_config(), "num_attention_heads", None) or 1
        # scores and what softmax makes of them
        needed, free = 2 * itemsize * heads * length**2, free_bytes(loaded.device)
        if 0 < free < needed:
            raise ModelError(
                f"a prompt of {length:,} tokens needs {needed / 2**30:,.1f} GiB for the attention "
                f"of a block, and {free / 2**30:,.1f} GiB are free",
                hint="a shorter prompt, or --attn-implementation sdpa",
            )
    for number, sample in enumerate(samples):
        top = max((*sample.prompt_ids, *sample.generated_ids), default=0)
        if vocab is not None and top >= vocab:
            raise ModelError(
                f"prompt {number}: token id {top} is outside the model's vocabulary of {vocab}",
                hint="the prompt ids or the tokenizer belong to another model",
            )


def ends_of(loaded: LoadedModel, forced: list[list[int]] | None) -> set[int]:
    """The tokens after which a sample has ended; none where tokens are forced."""
    model: Any = loaded.module
    eos = model.generation_config.eos_token_id if forced is None else None
    return {eos} if isinstance(eos, int) else set(eos or ())


def choices(control: Any, generated: list[list[int]], ends: set[int]) -> list[list[int]]:
    """Return what ``control`` chose for each sample, to which the ``generated`` tokens were fed."""
    chosen = [list(row) for row in zip(*control.chosen, strict=True)]
    for row, fed in zip(chosen, generated, strict=True):
        # A sample that has ended is fed padding while its batch goes on: no choice any more.
        last = next((place for place, token in enumerate(fed) if token in ends), len(fed))
        del row[last + 1 :]
    return chosen


def generate(
    loaded: LoadedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    count: int,
    *,
    control: Any = None,
    ends: Collection[int] = (),
    num_logits: int | None = None,
    with_cache: bool = False,
    cache: Any = None,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """transformers' own result for ``count`` more tokens, which ``control`` may choose: the ids, or
    what holds the cache too (``past_key_values``). ``cache``: of the first ``ids``, which are not
    fed again. ``given``: as in ``run_group``."""
    from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

    model: Any = loaded.module
    own, pad = model.generation_config, pad_id(loaded)
    plain = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=count,
        use_cache=loaded.forwards.cached,
        prefill_chunk_size=loaded.forwards.chunk,
        return_dict_in_generate=with_cache,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    parameters = inspect.signature(model.forward).parameters
    more = {} if num_logits is None or _KEEP not in parameters else {_KEEP: num_logits}
    fed, make = {"inputs": ids, "attention_mask": mask, **(given or {})}, model.generate
    if given and loaded.task == "encoder-decoder":
        # Whisper's own cuts long sound into windows, and chooses language and task
        make = functools.partial(GenerationMixin.generate, model)
        fed = {"decoder_input_ids": ids, **given}
    with patched(model, "generation_config", plain):  # generate() fills gaps from there
        return make(
            **fed,
            generation_config=plain,
            logits_processor=LogitsProcessorList([] if control is None else [control]),
            **more,
            **({} if cache is None else {"past_key_values": cache}),
        )


def control(forced: list[list[int]] | None, count: int, ends: set[int], ranks: Ranks | None) -> Any:
    """A logits processor: notes the greedy choice, and forces the recorded one if there is one. Of
    ``ranks`` with the same prompts one chooses. After ``count`` steps, or when each row has met one
    of ``ends``, this rank is done, and runs on only for the others."""
    from transformers import LogitsProcessor

    class Control(LogitsProcessor):
        def __init__(self) -> None:
            self.chosen: list[list[int]] = []
            self.seen: set[int] = set()
            self._open: set[int] | None = None

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            step = len(self.chosen)
            # On ties the lowest id: argmax does not promise it on every device.
            best = scores.amax(dim=-1, keepdim=True)
            index = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
            choice = torch.where(scores == best, index, scores.shape[-1]).amin(dim=-1)
            choice = choice.clamp_max(scores.shape[-1] - 1)  # a row of nan has no best
            if ranks is not None:
                choice = torch.tensor(ranks.agree(choice.tolist()), device=scores.device)
            self.chosen.append(choice.tolist())
            self.seen.update(scores.topk(min(_TOP, scores.shape[-1])).indices.flatten().tolist())
            if forced is not None:
                choice = torch.tensor([row[step] for row in forced], device=scores.device)
            self.seen.update(choice.tolist())
            if ranks is not None:
                rows = self._open if self._open is not None else set(range(len(scores)))
                self._open = {row for row in rows if int(choice[row]) not in ends}
                if not self._open or len(self.chosen) == count:
                    ranks.idle = True
            out = torch.full_like(scores, float("-inf"))
            return out.scatter_(1, choice[:, None], 0.0)

    return Control()


def inputs(loaded: LoadedModel, samples: list[SampleTokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both (B, T), padded as the samples say."""
    pad, ids, mask = pad_id(loaded), [], []
    for sample in samples:
        left, right = sample.num_left_pad, sample.num_right_pad
        ids.append([pad] * left + sample.prompt_ids + [pad] * right)
        mask.append([0] * left + [1] * len(sample.prompt_ids) + [0] * right)
    return torch.tensor(ids, device=loaded.device), torch.tensor(mask, device=loaded.device)


def pad_id(loaded: LoadedModel) -> int:
    """Padding, or any stand-in: padded positions are masked."""
    own = getattr(loaded.module, "generation_config", None)
    for owner, name in (
        (own, "pad_token_id"),
        (loaded.tokenizer, "pad_token_id"),
        (own, "eos_token_id"),
    ):
        value = getattr(owner, name, None)
        if isinstance(value, list):
            value = value[0] if value else None
        if value is not None:
            return int(value)
    return 0


def can_generate(model: Any) -> bool:
    check: Callable[[], bool] | None = getattr(model, "can_generate", None)
    return bool(check and check() and getattr(model, "generation_config", None) is not None)


# What runs a model: an *engine* loads it, and a *session* takes tokens and gives forwards.
#
# An engine is a class with three things (docs/extending.md walks through one):
#
# ``name``      what ``--engine`` calls it;
# ``Options``   a struct with a field for each ``--engine-option KEY=VALUE``, recorded in the
#               manifest, from where ``--like`` takes them;
# ``load``      makes a session of a model.
#
# ``sessions.TorchSession`` is the session of any engine whose modules lie in this process and can
# be hooked; an engine that differs in one thing overrides one method. Engines of the core stand in
# ``CORE``, others in the ``engines`` of a domain (divergence.domain); an installed package may add
# one alone, by an entry point of the group ``divergence.engines``:
#
#     [project.entry-points."divergence.engines"]
#     mine = "my_package.engine:MyEngine"

DEFAULT = "transformers"
CORE = {
    "transformers": "divergence.recording.engines.sessions:TransformersEngine",
    "compile": "divergence.recording.engines.sessions:CompileEngine",
}
"""By name: module and class. A module is imported when its engine is used."""
_GROUP = "divergence.engines"

Feature = Literal[
    "anchor", "escalate", "whole", "operators", "plants", "batch", "pads_right", "prepare", "media"
]
"""What a capture may ask for and an engine may lack. (What cannot be loaded, ``load`` refuses.)"""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine: bool, int, float, str, and ``X | None``."""

    opens_files: ClassVar[bool] = True
    """May a text be the name of a file? Those of a run are then taken only where they are none."""


class GroupStep:
    """Makes something of each group of prompts beside forwards: here nothing. A session that makes
    more, such as a training step, has one of its own in ``step``."""

    def __init__(self, training: Training | None = None) -> None:
        self.training = training or Training()
        """As the manifest has it."""

    def places(self, paths: Collection[str]) -> Collection[str]:
        """Return where a fault may be planted, of a model with modules at these ``paths``."""
        return paths

    def owners(self) -> set[str]:
        """Modules that the manifest describes beside those of the chosen sites."""
        return set()

    def in_dtype(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
        """Keep parts of the model in ``dtype`` while a pass runs in it, beside its operators."""
        return contextlib.nullcontext()


class Session(Protocol):
    """A loaded model, ready to run. What it records it gives to the recorder that it made. A class
    that inherits from this protocol, as ``sessions.TorchSession`` does, has the defaults below."""

    loaded: LoadedModel
    lacks: Mapping[Feature, str] = {}
    """What this engine cannot do, each with the reason in a few words."""
    makes_forwards: ClassVar[bool] = False
    """Can it be told to go without a cache, to feed a prompt in chunks, and to run backward?"""
    has_cache: ClassVar[bool] = True
    """Does a decode step read keys and values that the steps before it left?"""
    step: GroupStep = GroupStep()
    """What is made of each group of prompts beside its forwards."""

    @property
    def precision(self) -> StepPrecision | None:
        """Of a training step: the dtypes of its parts as they were, once the free pass is made."""
        return None

    def settle(
        self, samples: Sequence[SampleTokens], forced: list[list[int]] | None, like: Manifest | None
    ) -> None:
        """Called first, once the tokens are known: what of the model depends on them. ``like``: of
        the run that is repeated."""
        return None

    def notes(self) -> dict[str, ModuleNote]:
        """The modules that sites may name, by path in the names of transformers; class and role."""

    def identity(self, on_parameter: Callable[[int, int, str], None]) -> ModelIdentity:
        """Say which model this is. What cannot be known (digests of weights) is left empty."""

    def check_ids(self, samples: Sequence[SampleTokens], max_new_tokens: int) -> None:
        """Raise ModelError for a token id that the model does not have, and UsageError for more
        tokens than this engine was made for."""

    def num_bytes(
        self, hooked: Collection[str], samples: Sequence[SampleTokens], max_new_tokens: int
    ) -> int:
        """Bytes of all inputs and outputs of the ``hooked`` modules in one pass: their order of
        magnitude."""

    def recorder(self, notes: Mapping[str, ModuleNote], **how: Any) -> Recorder:
        """Make what records one pass: hooks, or their equal. ``how``: the arguments of
        ``Recorder``."""

    def run_group(
        self,
        recorder: Recorder,
        samples: list[SampleTokens],
        *,
        max_new_tokens: int,
        forced: list[list[int]] | None = None,
        num_logits: int | None = None,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> GroupResult:
        """Run prompts of one (padded) length under the recorder: the prefill, then one forward for
        each further token, greedily or with the ``forced`` ones. ``given``: what a processor made
        of the pictures and sound of a prompt that runs alone; an engine that lacks ``media`` is
        never called with it.

        ``num_logits``: of how many last positions the prefill gives logits; None: the engine's own
        choice. Raises ModelError when a forward fails.
        """

    def note(self) -> EngineNote:
        """Describe the engine for the manifest: asked before the first pass and after the last."""

    def close(self) -> None:
        """Called once, whatever happened: lets processes and memory go."""
        return None


class Engine(Protocol):
    """Loads models."""

    name: ClassVar[str]
    Options: ClassVar[type[EngineOptions]]

    def load(self, loading: Loading, options: Any) -> Session:
        """``options``: an ``Options``. Raises ModelError for a model that it cannot load, and
        UsageError for what it cannot do; both for a package that is not installed."""


def built_in() -> dict[str, str]:
    """The engines that come with divergence, by name: where the class is."""
    own = [domain.engines for domain in own_domains()]
    return CORE | {name: engine.place for engines in own for name, engine in engines.items()}


def engine_named(name: str, *, built_in_alone: bool = False) -> Engine:
    """The engine. Raises UsageError for a name that there is none of, with near ones.
    ``built_in_alone``: what a run names is no reason to import somebody's package."""
    place = built_in().get(name)
    if place is not None:
        engine: Engine = placed(place)()
        return engine
    points = {point.name: point for point in importlib.metadata.entry_points(group=_GROUP)}
    if name in points and not built_in_alone:
        try:
            engine = points[name].load()()
        except Exception as error:  # somebody's package: anything
            raise UsageError(
                f"--engine {name}: {points[name].value} cannot be imported: {error}",
                hint="importing it by itself shows why",
            ) from error
        return engine
    names = [*built_in(), *points]
    raise UsageError(
        f"--engine {name}: there is no such engine"
        + (" that comes with divergence" if name in points else ""),
        hint=f"name it yourself: --engine {name}"
        if name in points
        else did_you_mean(name, names, count=1) or f"one of {', '.join(names)}",
    )


def recorded_options(note: EngineNote, given: Collection[str]) -> dict[str, EngineValue]:
    """Options that a run names, but for those ``given`` here. Raises RunFormatError."""
    kept = {key: value for key, value in note.options.items() if key not in given}
    if note.name in built_in() and not engine_named(note.name).Options.opens_files:
        return kept
    return recorded_engine_options(kept)


def given_options(given: Sequence[str] | Mapping[str, EngineValue]) -> dict[str, EngineValue]:
    """``KEY=VALUE`` texts, or values by key, by key. Raises UsageError."""
    if isinstance(given, Mapping):
        return dict(given)
    values: dict[str, EngineValue] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            hint = "for example mode=max-autotune"
            raise UsageError(f"--engine-option {text!r} is not KEY=VALUE", hint=hint)
        values[key.replace("-", "_")] = value
    return values


def options_for(engine: Engine, values: Mapping[str, EngineValue]) -> EngineOptions:
    """Values, or their texts, as the engine's own type. Raises UsageError for an unknown key (with
    near ones), and for a value of another type."""
    types = {field.name: field.type for field in msgspec.structs.fields(engine.Options)}
    for key in values:
        if key not in types:
            raise UsageError(
                f"--engine-option {key}: the engine {engine.name} has no such option",
                hint=did_you_mean(key, types, count=1)
                or f"it has {', '.join(sorted(types)) or 'none'}",
            )
    try:
        return msgspec.convert(dict(values), engine.Options, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"--engine-option of the engine {engine.name}: {error}",
            hint="for example KEY=true or KEY=4",
        ) from error


_ASKED: dict[Feature, str] = {
    "operators": "operators (ops@, --substitute)",
    "plants": "--plant",
    "batch": "a batch of prompts",
    "pads_right": "pads behind a prompt (--pad-right)",
    "prepare": "prepare",
    "media": "prompts with pictures or sound",
}


def refuse_lacking(session: Session, **asked: bool) -> None:
    """Raise UsageError for what is asked for, by feature, and the engine cannot do. (A pass that it
    cannot make is left out with a note.)"""
    for feature, words in _ASKED.items():
        reason = session.lacks.get(feature)
        if asked.get(feature) and reason is not None:
            raise UsageError(
                f"{words}: the engine {session.note().name} has none of it, {reason}",
                hint="--no-batch"
                if feature == "batch"
                else f"leave it out, or use --engine {DEFAULT}",
            )
