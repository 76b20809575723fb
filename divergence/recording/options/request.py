"""What is to be captured: the caller's wishes, merged with the run to be repeated.

With ``--like`` everything comes from the recorded run unless the caller says
otherwise, and every such override is noted, because a comparison must know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from divergence.errors import RunFormatError, UsageError
from divergence.numerics.formats import format_named
from divergence.recording.hooks.plant import Plant, parse_plant
from divergence.recording.hooks.substitute import Substitute, parse_substitutes
from divergence.recording.options.prompts import Prompt, collect_prompts
from divergence.recording.options.selection import select_positions, step_selected
from divergence.recording.options.store_modes import chosen_store
from divergence.run.ranks.unshard import unsharded
from divergence.run.reader import Run
from divergence.run.schema.layout import MANIFEST
from divergence.run.schema.manifest import Manifest, Override, Store
from divergence.run.untrusted.trust import (
    recorded_attention,
    recorded_revision,
    recorded_sites,
    recorded_source,
)
from divergence.run.writing.buffer import DEFAULT_BUFFER_BYTES, buffer_bytes

__all__ = ["DEFAULT_MAX_NEW_TOKENS", "Request", "resolve_request"]

DEFAULT_MAX_NEW_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class Request:
    """Everything decided before the model is loaded.

    ``named``: the user named the model; else the run to be repeated did, and it is data alone.
    """

    model: str
    task: str
    revision: str | None
    dtype: str | None
    device: str
    device_map: str | Mapping[str, str | int] | None
    attn_implementation: str
    trust_remote_code: bool
    prompts: list[Prompt]
    chat: bool
    batch: bool
    max_new_tokens: int
    sites: list[str]
    steps: str | None
    positions: str | None
    deterministic: bool
    seed: int
    repeat: int
    anchor: bool
    escalate: bool = False
    whole: bool = False
    weights: bool = False
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    substitutes: dict[str, Substitute] = field(default_factory=dict)
    probe: bool = False
    plants: list[Plant] = field(default_factory=list)
    label: str | None = None
    mesh: str | None = None
    like: Run | None = None
    named: bool = True
    overrides: list[Override] = field(default_factory=list)
    store: Store = "full"
    only_changed: bool = False

    @property
    def regrouped(self) -> bool:
        """Are the recorded prompts to run in other batches than in the run that is repeated?"""
        return self.like is not None and self.batch != self.like.manifest.settings.batch


def resolve_request(
    model: str | None,
    *,
    like: str | Path | Run | None,
    task: str,
    revision: str | None,
    dtype: str | None,
    device: str,
    device_map: str | Mapping[str, str | int] | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
    prompts: Sequence[str],
    prompts_file: str | Path | None,
    chat: bool,
    batch: bool | None,
    max_new_tokens: int | None,
    sites: Sequence[str],
    steps: str | None,
    positions: str | None,
    deterministic: bool | None,
    seed: int | None,
    repeat: int,
    anchor: bool,
    plants: Sequence[str | Plant],
    label: str | None,
    escalate: bool = False,
    whole: bool = False,
    weights: bool = False,
    substitutes: Mapping[str, str | Path | Run | Substitute] | None = None,
    probe: bool = False,
    store: str | None = None,
    only_changed: bool = False,
    mesh: str | None = None,
    buffer: int | str = DEFAULT_BUFFER_BYTES,
) -> Request:
    """Check and merge. Raises UsageError, PromptError, PlantError or RunFormatError."""
    step_selected(steps, 0)
    select_positions(positions, 1)
    if dtype is not None:
        dtype = format_named(dtype).name
    if repeat < 1:
        raise UsageError(f"--repeat {repeat}: at least one run is needed")
    _check_seed(seed)
    if max_new_tokens is not None and max_new_tokens < 0:
        raise UsageError(f"--max-new-tokens {max_new_tokens} is negative")
    parsed = [plant if isinstance(plant, Plant) else parse_plant(plant) for plant in plants]
    if isinstance(prompts, str):
        prompts = [prompts]
    if escalate and like is None:
        raise UsageError(
            "--escalate needs --like: the escalated pass repeats a recorded run block by block",
            hint="divergence capture --like RUN -o RUN2 --escalate",
        )
    if mesh is not None and device_map is not None:
        raise UsageError(
            "--mesh and --device-map both divide the model",
            hint="--mesh with torchrun, or --device-map in one process",
        )
    common = {
        "device": device,
        "device_map": device_map,
        "repeat": repeat,
        "anchor": anchor,
        "escalate": escalate,
        "whole": whole,
        "weights": weights,
        "substitutes": parse_substitutes(substitutes or {}),
        "probe": probe,
        "buffer_bytes": buffer_bytes(buffer),
        "only_changed": only_changed,
        "plants": parsed,
        "label": label,
        "mesh": mesh,
        "chat": chat,
    }
    if like is None:
        if model is None:
            raise UsageError(
                "no model given",
                hint="divergence capture MODEL -o RUN, or divergence capture --like RUN -o RUN2",
            )
        if max_new_tokens is None:
            max_new_tokens = DEFAULT_MAX_NEW_TOKENS
        _check_steps(steps, max_new_tokens)
        return Request(
            model=model,
            task=task,
            revision=revision,
            dtype=dtype,
            attn_implementation=attn_implementation or "eager",
            trust_remote_code=trust_remote_code,
            prompts=collect_prompts(prompts, prompts_file),
            batch=bool(batch),
            max_new_tokens=max_new_tokens,
            sites=list(sites) or ["blocks"],
            steps=steps,
            positions=positions,
            deterministic=True if deterministic is None else deterministic,
            seed=seed or 0,
            store=chosen_store(store, only_changed=only_changed, like=None),
            **common,
        )
    if prompts or prompts_file or chat:
        raise UsageError(
            "--like repeats the recorded tokens, so prompts cannot be given with it",
            hint="leave out --prompt, --prompts and --chat, or capture without --like",
        )
    run = unsharded(like if isinstance(like, Run) else Run.open(like))
    if run.manifest.plan.replayed_pass is not None:
        raise UsageError(
            f"{run.path} is a replay of single operators: no model ran in it",
            hint="give the run whose operators it ran again "
            f"({run.manifest.plan.anchored_to}), or divergence replay that run",
        )
    return _like(
        run,
        model=model,
        task=task,
        revision=revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        batch=batch,
        max_new_tokens=max_new_tokens,
        sites=sites,
        steps=steps,
        positions=positions,
        deterministic=deterministic,
        seed=seed,
        store=chosen_store(store, only_changed=only_changed, like=run),
        common=common,
    )


def _like(
    run: Run,
    *,
    model: str | None,
    task: str,
    revision: str | None,
    dtype: str | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
    batch: bool | None,
    max_new_tokens: int | None,
    sites: Sequence[str],
    steps: str | None,
    positions: str | None,
    deterministic: bool | None,
    seed: int | None,
    store: Store,
    common: dict,
) -> Request:
    """The recorded run's own request, with what the caller overrides."""
    recorded = run.manifest
    overrides: list[Override] = []

    def choose(name: str, given, found, allowed: Callable[[Manifest], Any] | None = None):
        if given is None and allowed is not None:  # of what the user chooses the run is not asked
            return allowed(recorded)
        if given is None or given == found:
            return found
        overrides.append(Override(name=name, reference=str(found), used=str(given)))
        return given

    settings, plan, identity = recorded.settings, recorded.plan, recorded.model
    _check_recorded(run)
    if max_new_tokens is not None and max_new_tokens > settings.max_new_tokens:
        raise UsageError(
            f"--max-new-tokens {max_new_tokens}: the run to be repeated has "
            f"{settings.max_new_tokens}, and its tokens are forced",
            hint="ask for fewer, or capture without --like",
        )
    if steps is not None or max_new_tokens is not None:
        _check_steps(
            plan.steps if steps is None else steps,
            settings.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )
    attention = identity.attn_implementation or settings.attn_implementation or "eager"
    return Request(
        like=run,
        named=model is not None,
        model=choose("model", model, identity.source, recorded_source),
        task=choose("task", None if task == "auto" else task, identity.task),
        revision=choose(
            "revision",
            revision,
            identity.revision if model is None else None,
            recorded_revision if model is None else None,
        ),
        # 8-bit weights are no dtype to load in: then as it was asked for, or the checkpoint's own
        dtype=choose(
            "dtype",
            dtype,
            settings.dtype if identity.dtype.startswith("float8") else identity.dtype,
        ),
        attn_implementation=choose(
            "attn_implementation", attn_implementation, attention, recorded_attention
        )
        or "eager",
        trust_remote_code=trust_remote_code,
        prompts=[],
        batch=choose("batch", batch, settings.batch),
        max_new_tokens=choose("max_new_tokens", max_new_tokens, settings.max_new_tokens),
        sites=choose("sites", list(sites) or None, plan.sites, recorded_sites),
        steps=choose("steps", steps, plan.steps),
        positions=choose("positions", positions, plan.positions),
        deterministic=choose("deterministic", deterministic, settings.deterministic),
        seed=choose("seed", seed, settings.seed),
        store=choose("store", store, plan.store),
        overrides=overrides,
        **common,
    )


def _check_recorded(run: Run) -> None:
    """What a run by another writer may hold and no capture can repeat."""
    manifest = run.manifest
    empty = [n for n, sample in enumerate(manifest.tokens.samples) if not sample.prompt_ids]
    if empty or not manifest.tokens.samples:
        raise RunFormatError(
            f"{run.path} cannot be repeated: "
            + (f"prompt {empty[0]} has no tokens" if empty else "it has no prompts"),
            where=str(run.path / MANIFEST),
        )
    try:
        step_selected(manifest.plan.steps, 0)
        select_positions(manifest.plan.positions, 1)
        _check_seed(manifest.settings.seed)
    except UsageError as error:
        raise RunFormatError(
            f"{run.path} cannot be repeated: {error.message}",
            where=str(run.path / MANIFEST),
            hint=error.hint,
        ) from error


def _check_seed(seed: int | None) -> None:
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise UsageError(f"--seed {seed} does not fit 64 bits", hint="for example --seed 1")


def _check_steps(steps: str | None, max_new_tokens: int) -> None:
    """A capture of nothing is refused beforehand. Each new token takes one forward."""
    count = max(max_new_tokens, 1)
    if not any(step_selected(steps, step) for step in range(count)):
        raise UsageError(
            f"--steps {steps} selects nothing",
            hint=f"with --max-new-tokens {max_new_tokens} there "
            + (f"are the steps 0 (the prefill) to {count - 1}" if count > 1 else "is step 0 alone"),
        )
