"""What a repetition takes from the run that it repeats, in one line for the user.

Said before it is used: a run comes from elsewhere, and what it names is loaded and run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from divergence.recording.options.request import Request
from divergence.run.reader import Run
from divergence.run.storage.location import Location

__all__ = ["also_taken", "taken", "taken_from"]


def taken(request: Request) -> str:
    """``from a: model ~/llama at main (as data), bfloat16, sdpa, 3 prompts in one batch, ...``,
    less what the user chose. Everything named here has been checked by run.trust."""
    assert request.like is not None
    run, chosen = request.like, {override.name for override in request.overrides}
    tokens = run.manifest.tokens
    said = []
    if not request.named:
        at = "" if request.revision is None else f" at {request.revision}"
        said.append(f"model {request.model}{at} ({_kind(request.trust_remote_code)})")
    said += [
        value
        for name, value in (
            ("dtype", request.dtype),
            ("attn_implementation", f"{request.attn_implementation} attention"),
        )
        if value is not None and name not in chosen
    ]
    num = len(tokens.samples)
    how = " in one batch" if request.batch and num > 1 and "batch" not in chosen else ""
    said.append(f"{num} prompt{'' if num == 1 else 's'}{how}")
    if request.max_new_tokens and "max_new_tokens" not in chosen:
        said.append(f"up to {request.max_new_tokens} new tokens")
    return taken_from(run.path, said)


def also_taken(
    run: Run,
    model: str | None,
    values: Mapping[str, Any],
    variables: Mapping[str, str | None],
    *,
    with_code: bool,
) -> str | None:
    """What is taken from ``run``, of which another run is repeated: its ``model`` (None: the user's
    or the other run's), settings and environment variables. None where that is nothing."""
    said = [] if model is None else [f"model {model} ({_kind(with_code)})"]
    said += [str(values[name]) for name in ("dtype", "attn_implementation") if name in values]
    said += [f"{name}={value}" for name, value in variables.items() if value is not None]
    return taken_from(run.path, said) if said else None


def _kind(with_code: bool) -> str:
    return "with its code" if with_code else "as data, no code"


def taken_from(place: Location, said: list[str]) -> str:
    """The line itself, also of what else repeats a run."""
    return f"from {place}: {', '.join(said)}"
