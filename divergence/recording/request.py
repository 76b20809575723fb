"""A request says what is to be captured: the caller's arguments, merged with a run to be repeated.

With ``--like`` everything comes from the recorded run unless the caller says
otherwise, and every such override is noted, because a comparison must know it. A run comes from
elsewhere, and what it names is loaded and run here: so the user is told in one line, before it is
used, what is taken from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

from divergence.domain import additions, hook_places, placed, sources
from divergence.errors import RunFormatError, UsageError
from divergence.numerics.formats import format_named
from divergence.options.commands import CaptureOptions
from divergence.options.option import Options, fields_of, kinds_of
from divergence.recording.engines.engine import DEFAULT, given_options, recorded_options
from divergence.recording.engines.load import Loading
from divergence.recording.plant import Plant, Substitute, parse_plant, parse_substitutes
from divergence.recording.prompts import Prompt, collect_prompts
from divergence.recording.selection import chosen_store, select_positions, step_selected
from divergence.run.captured import DEFAULT_BUFFER_BYTES, buffer_bytes
from divergence.run.command import command_line
from divergence.run.contents import site_names
from divergence.run.manifest import EngineNote, EngineValue, Manifest, Override, StoreMode
from divergence.run.ranks import unsharded
from divergence.run.reader import Run
from divergence.run.record import MANIFEST
from divergence.run.site import ROOT, join_site, one_or_more
from divergence.run.storage import Location
from divergence.run.trust import (
    recorded_attention,
    recorded_revision,
    recorded_seed,
    recorded_sites,
    recorded_source,
)


@dataclass(frozen=True, kw_only=True)
class Request(CaptureOptions):
    """Everything decided before the model is loaded: the options, and none of them open. ``named``:
    the user named the model; else the run to be repeated did, and it is data alone.
    ``engine_named``: likewise the engine, which then comes with divergence."""

    model: str
    engine: str
    like: Run | None = None
    named: bool = True
    engine_named: bool = True
    stepping: bool = False
    """Is more made of each group of prompts than its forwards (a ``GroupStep``)?"""
    overrides: list[Override] = dataclasses.field(default_factory=list)
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    attn_implementation: str
    prompts: list[Prompt]
    batch: bool
    use_cache: bool
    max_new_tokens: int
    sites: list[str]
    engine_options: dict[str, EngineValue]
    hooks: bool
    deterministic: bool
    seed: int
    store: StoreMode
    plants: list[Plant]
    substitutes: dict[str, Substitute]

    @property
    def loading(self) -> Loading:
        """Says how the model is loaded, but for the device and the ranks that are there."""
        names = "task revision dtype attn_implementation trust_remote_code device_map".split()
        return Loading(self.model, **{name: getattr(self, name) for name in names})

    @property
    def recorded_sites(self) -> set[str] | None:
        """Return what the repeated run holds, where its own sites are recorded again."""
        if self.like is None or self.sites != self.like.manifest.plan.sites:
            return None
        return site_names(self.like.records)

    @property
    def regrouped(self) -> bool:
        """Are the recorded prompts to run in other batches than in the run that is repeated?"""
        if self.like is None:
            return False
        other = self.batch != self.like.manifest.settings.batch
        return other or self.batches is not None or max(self.pad_left, self.pad_right) > 0

    @property
    def grouping(self) -> dict[str, Any]:
        """Return the arguments of ``group_samples``, but for the side of the batch's own pads."""
        batches = self.batches
        if self.like is not None and batches is None:
            settings, groups = self.like.manifest.settings, self.like.manifest.tokens.groups
            if self.batch == settings.batch:
                batches = " ".join(",".join(map(str, group)) for group in groups)
        more = {"more_left": self.pad_left, "more_right": self.pad_right}
        return {"batch": self.batch, "batches": batches, **more}


def resolve_request(
    model: str | Path | None, *, like: Run | None, options: CaptureOptions
) -> Request:
    """Check and merge. Raises UsageError, PromptError, PlantError or RunFormatError."""
    step_selected(options.steps, 0)
    select_positions(options.positions, 1)
    if options.dtype is not None:
        options = replace(options, dtype=format_named(options.dtype).name)
    if options.repeat < 1:
        raise UsageError(f"--repeat {options.repeat}: at least one run is needed")
    seed = options.seed
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise UsageError(f"--seed {seed} does not fit 64 bits", hint="for example --seed 1")
    stepping = False
    for place in hook_places("step_options").values():
        if (settled := placed(place)(options, like)) is not None:
            options, stepping = settled, True
    if like is not None and like.manifest.training.train and not stepping:
        raise UsageError(f"{like.path} is a training step, and nothing installed makes one")
    max_new_tokens = options.max_new_tokens
    if max_new_tokens is not None and max_new_tokens < 0:
        raise UsageError(f"--max-new-tokens {max_new_tokens} is negative")
    if options.truth not in (None, "auto", "full", "floor", "no"):
        raise UsageError(f"--truth {options.truth}: unknown", hint="auto, full, floor or no")
    options = check_pad_right(options, like)
    if options.batches is not None:
        options = replace(options, batch=True)
    if options.hooks is False:  # nothing is seen but what the model returns
        given = {
            "--sites": options.sites,
            "--plant": options.plants,
            "--substitute": options.substitutes,
            "--whole": options.whole,
            "--escalate": options.escalate,
            "--weights": options.weights,
        }
        named = [option for option, value in given.items() if value]
        if named:
            raise UsageError(
                f"{' and '.join(named)} needs hooks in the model",
                hint="leave out --no-hooks, or make two runs",
            )
    if options.mesh is not None and options.device_map is not None:
        raise UsageError(
            "--mesh and --device-map both divide the model",
            hint="--mesh with torchrun, or --device-map in one process",
        )
    decided: dict[str, Any] = {
        "stepping": stepping,
        "plants": [
            plant if isinstance(plant, Plant) else parse_plant(str(plant))
            for plant in options.plants
        ],
        "substitutes": parse_substitutes(options.substitutes or {}),
        "buffer_bytes": buffer_bytes(options.buffer),
    }
    name = None if model is None else str(model)
    if like is not None:
        decided |= _decided_by(like, name, options)
    else:
        decided |= _decided_anew(name, options, stepping=stepping)
    request = Request(**{**vars(options), **decided})
    if request.hooks:
        return request
    # what the model returns alone, in the free pass
    return replace(request, sites=[join_site(ROOT, "out")], anchor=False)


def check_pad_right(options: CaptureOptions, like: Run | None) -> CaptureOptions:
    """Refuses what does not go with --pad-right; a causal model then makes the prefill alone, since
    nothing goes on behind pads."""
    if not options.pad_right:
        return options
    if like is None or options.pad_left:
        raise UsageError(
            "--pad-right needs --like"
            if like is None
            else "--pad-left and --pad-right both place the pads",
            hint="divergence capture --like RUN -o OTHER --pad-right 8",
        )
    plan, settings = like.manifest.plan, like.manifest.settings
    if options.positions or plan.positions:
        raise UsageError("--pad-right: --positions count from the pads' end", hint="leave it out")
    if like.manifest.model.task != "causal-lm":
        return options
    if options.prefill_chunk or settings.prefill_chunk:
        raise UsageError("--pad-right: a prompt in chunks (--prefill-chunk) has no pads behind it")
    if (options.max_new_tokens or 0) > 1:
        raise UsageError(
            f"--max-new-tokens {options.max_new_tokens}: no token follows the pads of --pad-right",
            hint="leave it out, or --pad-left",
        )
    num = settings.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    return replace(options, max_new_tokens=min(num, 1))


def _decided_anew(model: str | None, options: CaptureOptions, *, stepping: bool) -> dict[str, Any]:
    """Decide what is open where no run is repeated."""
    if model is None:
        raise UsageError(
            "no model given",
            hint="divergence capture MODEL -o RUN, or divergence capture --like RUN -o RUN2",
        )
    num = options.max_new_tokens
    max_new_tokens = 16 if num is None else num
    _check_steps(options.steps, max_new_tokens)
    return {
        "model": model,
        "engine": options.engine or DEFAULT,
        "engine_options": given_options(options.engine_options),
        "attn_implementation": options.attn_implementation or "eager",
        "prompts": collect_prompts(
            options.prompts, options.prompts_file, labelled=stepping, media=True
        ),
        "batch": bool(options.batch),
        "use_cache": options.use_cache is not False,
        "hooks": options.hooks is not False,
        "max_new_tokens": max_new_tokens,
        "sites": list(options.sites) or ["blocks"],
        "deterministic": options.deterministic is not False,
        "seed": options.seed or 0,
        "store": chosen_store(options.store, only_changed=options.only_changed, like=None),
    }


def _decided_by(like: Run, model: str | None, options: CaptureOptions) -> dict[str, Any]:
    """Merge what the recorded run decides and what the caller overrides: each option that says
    where the manifest holds it is taken from there."""
    if options.prompts or options.prompts_file or options.chat:
        raise UsageError(
            "--like repeats the recorded tokens, so prompts cannot be given with it",
            hint="leave out --prompt, --prompts and --chat, or capture without --like",
        )
    run = unsharded(like)
    recorded = run.manifest
    if recorded.plan.replayed_pass is not None:
        raise UsageError(
            f"{run.path} is a replay of single operators: no model ran in it",
            hint="give the run whose operators it ran again "
            f"({recorded.plan.anchored_to}), or divergence replay that run",
        )
    overrides: list[Override] = []
    store = chosen_store(options.store, only_changed=options.only_changed, like=run)
    options = replace(options, store=store)

    def choose(
        name: str, given: Any, recorded_value: Any, allowed: Callable[[Manifest], Any] | None = None
    ) -> Any:
        if given is None and allowed is not None:  # of what the user chooses the run is not asked
            return allowed(recorded)
        if given is None or given == recorded_value:
            return recorded_value
        overrides.append(Override(name=name, reference=str(recorded_value), used=str(given)))
        return given

    settings, plan, identity = recorded.settings, recorded.plan, recorded.model
    _check_recorded(run)
    max_new_tokens = options.max_new_tokens
    if max_new_tokens is not None and max_new_tokens > settings.max_new_tokens:
        raise UsageError(
            f"--max-new-tokens {max_new_tokens}: the run to be repeated has "
            f"{settings.max_new_tokens}, and its tokens are forced",
            hint="ask for fewer, or capture without --like",
        )
    if options.steps is not None or max_new_tokens is not None:
        _check_steps(
            plan.steps if options.steps is None else options.steps,
            settings.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )
    # What the manifest holds in two places, or a run may not choose freely.
    served = recorded.scores_alone
    if served and model is None:
        again: dict[str, Any] = {"like": run.path, "o": "OTHER", "note": "records it again"}
        raise UsageError(
            f"no model ran here for {run.path}: it holds log-probabilities alone",
            hint=(
                "--model PATH names this machine's copy",
                *(command_line("capture", **{item.option: "URL"} | again) for item in sources()),
            ),
        )
    transformers = EngineNote(name=DEFAULT, version="")
    engine = transformers if served else recorded.engine or transformers
    narrow = identity.dtype.startswith("float8")
    same_engine = options.engine in (None, engine.name)
    engine_options = engine.options if same_engine else {}
    given_values = given_options(options.engine_options)
    kept = recorded_options(engine, given_values) if same_engine else {}
    options = replace(options, engine_options=kept | given_values)
    special: dict[str, tuple[Any, Callable[[Manifest], Any] | None]] = {
        "revision": (identity.revision, recorded_revision) if model is None else (None, None),
        # 8-bit weights are no dtype to load in: then as it was asked for, or the checkpoint's own
        "dtype": (settings.dtype if narrow or served else identity.dtype, None),
        "attn_implementation": (
            identity.attn_implementation or settings.attn_implementation or "eager",
            recorded_attention,
        ),
        "sites": (["blocks"], None) if served else (plan.sites, recorded_sites),
        "engine": (engine.name, None),
        "engine_options": (engine_options, None),
    }
    used = {"model": choose("model", model, identity.source, recorded_source)}
    for field in fields_of(CaptureOptions):
        name, place = field.name, field.option.recorded
        if place is not None:
            value = getattr(options, name)
            value = list(value) if isinstance(value, tuple) else value
            given = None if value in (field.default, []) else value
            recorded_value, allowed = special.get(name) or (attrgetter(place)(recorded), None)
            used[name] = choose(name, given, recorded_value, allowed)
    used["attn_implementation"] = used["attn_implementation"] or "eager"
    return used | {
        "like": run,
        "named": model is not None,
        "engine_named": options.engine is not None,
        "prompts": [],
        "overrides": overrides,
        "store": store,
    }


def _check_recorded(run: Run) -> None:
    """Refuse what a run by another writer may hold and no capture can repeat."""
    manifest = run.manifest
    empty = [n for n, sample in enumerate(manifest.tokens.samples) if not sample.prompt_ids]
    if empty and manifest.scores_alone:
        raise UsageError(
            f"{run.path} holds no token ids to be forced through a model: its source, "
            f"{manifest.engine.name if manifest.engine else 'a file'}, gave texts alone",
            where=str(run.path),
            hint=(
                "capture the model with the same prompts, and compare its answers as text: "
                "divergence capture MODEL --prompts FILE -o RUN",
                "or capture the server where it tells ids (vLLM's return_token_ids, sglang)",
            ),
        )
    if empty or not manifest.tokens.samples:
        raise RunFormatError(
            f"{run.path} cannot be repeated: "
            + (f"prompt {empty[0]} has no tokens" if empty else "it has no prompts"),
            where=str(run.path / MANIFEST),
            hint="divergence.record(module, out=..., like=RUN) repeats it in Python"
            if manifest.is_of_a_module
            else "it was made by another program: capture it again from prompts",
        )
    try:
        recorded_seed(manifest)
        step_selected(manifest.plan.steps, 0)
        select_positions(manifest.plan.positions, 1)
    except (UsageError, RunFormatError) as error:
        raise RunFormatError(
            f"{run.path} cannot be repeated: {error.message}",
            where=str(run.path / MANIFEST),
            hint=error.hint,
        ) from error


def _check_steps(steps: str | None, max_new_tokens: int) -> None:
    """A capture of nothing is refused beforehand. Each new token takes one forward."""
    count = max(max_new_tokens, 1)
    if not any(step_selected(steps, step) for step in range(count)):
        raise UsageError(
            f"--steps {steps} selects nothing",
            hint=f"with --max-new-tokens {max_new_tokens} there "
            + (f"are the steps 0 (the prefill) to {count - 1}" if count > 1 else "is step 0 alone"),
        )


def line_of_taken(request: Request) -> str:
    """``from a: model ~/llama at main (as data), bfloat16, sdpa, 3 prompts in one batch, ...``,
    less what the user chose. Everything named here has been checked by run.trust."""
    assert request.like is not None
    run, chosen = request.like, {override.name for override in request.overrides}
    words = []
    if not request.named:
        at = "" if request.revision is None else f" at {request.revision}"
        words.append(f"model {request.model}{at} ({code_words(request.trust_remote_code)})")
    if request.engine != DEFAULT and "engine" not in chosen:
        words.append(f"engine {request.engine}")
    if request.dtype is not None and "dtype" not in chosen:
        words.append(request.dtype)
    if "attn_implementation" not in chosen:
        words.append(f"{request.attn_implementation} attention")
    num = len(run.manifest.tokens.samples)
    how = " in one batch" if request.batch and num > 1 and "batch" not in chosen else ""
    words.append(f"{num} prompt{'' if num == 1 else 's'}{how}")
    if request.max_new_tokens and "max_new_tokens" not in chosen:
        words.append(f"up to {request.max_new_tokens} new tokens")
    return taken_from(run.path, words)


def code_words(with_code: bool) -> str:
    """Say what may run of a model that a run names."""
    return "with its code" if with_code else "as data, no code"


def taken_from(place: Location, words: list[str]) -> str:
    """The line itself, also of what else repeats a run."""
    return f"from {place}: {', '.join(words)}"


# The arguments of the Python API as callers write them, before anything is loaded.
#
# Types that mean the same are taken (``torch.float32`` for ``"float32"``, one name for a list of
# one, token ids for a prompt); what is of another type is refused with the name of the argument, so
# that no capture runs for an hour and fails when its manifest is written. The types are those of
# the options (``divergence.options``).

_OTHERS = {"force": bool, "command": str | None}
"""What every function that makes a run takes beside its options."""


def plan_options(given: dict[str, Any]) -> dict[str, Options]:
    """Those that domains add for their plans, taken out of ``given``: by the domain's name."""
    chosen: dict[str, Options] = {}
    for name, more in additions("capture").items():
        if more.options is not None and name in hook_places("plan"):
            kind = placed(more.options)
            chosen[name] = kind(
                **{
                    field.name: _plain(field.name, given.pop(field.name), field.type)
                    for field in fields_of(kind)
                    if field.name in given
                }
            )
    return chosen


def plain_arguments(**arguments: Any) -> dict[str, Any]:
    """The arguments by name, each of its plain type. Raises UsageError that names the argument."""
    plain = dict(arguments)
    types = {field.name: field.type for field in fields_of(CaptureOptions)} | _OTHERS
    for name, value in arguments.items():
        if name in types and name not in ("dtype", "device"):
            plain[name] = _plain(name, value, types[name])
    for name in ("dtype", "device"):
        value = arguments.get(name)
        if value is not None and not isinstance(value, str):
            # ``torch.float32`` → ``float32``, ``torch.device("cuda", 1)`` → ``cuda:1``
            if type(value).__module__ != "torch" or type(value).__name__ != name:
                raise _not(name, value, f"text or a torch.{name}")
            plain[name] = str(value).removeprefix("torch.")
    if plain.get("dtype") == "auto":
        plain["dtype"] = None
    if "sites" in arguments:
        plain["sites"] = tuple(_text("sites", site) for site in one_or_more(arguments["sites"]))
    if "plants" in arguments:
        plain["plants"] = tuple(one_or_more(arguments["plants"]))
    if "prompts" in arguments:
        prompts = arguments["prompts"]
        if isinstance(prompts, str | Mapping | Prompt):
            prompts = [prompts]
        if not isinstance(prompts, Iterable):
            raise _not("prompts", prompts, "a text or a list")
        plain["prompts"] = tuple(map(_prompt, prompts))
    return plain


def _plain(name: str, value: Any, type_: Any) -> Any:
    """Check what the type alone can tell: a switch, a number, a text or a path."""
    if value is None and type(None) in get_args(type_):
        return None
    kinds = set(kinds_of(type_))
    if kinds == {bool} and not isinstance(value, bool):
        raise _not(name, value, "True or False")
    if kinds == {int}:
        return _whole_number(name, value)
    if kinds == {str}:
        return _text(name, value)
    if kinds == {Path, str} and not isinstance(value, str | os.PathLike):
        raise _not(name, value, "a path")
    return value


def _prompt(value: Any) -> str | Prompt:
    """Text as it is; token ids (a list of numbers, or a tensor on one axis) as a Prompt."""
    if isinstance(value, str | Prompt):
        return value
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, list | tuple) or not ids:
        raise _not("prompts", value, "a text, or token ids such as [1, 2, 3]")
    numbers = [_whole_number("prompts", token_id) for token_id in ids]
    if min(numbers) < 0:
        raise UsageError(f"prompts: {min(numbers)} is no token id")
    return Prompt(input_ids=tuple(numbers))


def _whole_number(name: str, value: Any) -> int:
    # numpy's numbers are no int, but index like one
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _not(name, value, "a whole number")
    return int(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _not(name, value, "text")
    return value


def _not(name: str, value: Any, wanted: str) -> UsageError:
    return UsageError(
        f"{name}={value!r:.60} is {type(value).__name__}, not {wanted}",
        hint=f"give {name} as {wanted}",
    )
