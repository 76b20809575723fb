"""What a capture keeps of what it sees: the mode, and what goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from divergence.errors import UsageError
from divergence.run.schema.manifest import StoreMode
from divergence.run.schema.site import near_names

if TYPE_CHECKING:
    from divergence.recording.options.sites import SiteSelection
    from divergence.run.reader import Run

__all__ = ["check_operators", "chosen_store"]

STORES: tuple[StoreMode, ...] = get_args(StoreMode)


def chosen_store(store: str | None, *, only_changed: bool, like: Run | None) -> StoreMode:
    """The mode: as asked for, else that of the run to be repeated, else ``full``.

    Raises UsageError for a mode that there is none of, and for ``only_changed`` without a run that
    has digests, or with a mode that keeps no bytes anyhow.
    """
    if store is not None and store not in STORES:
        near = near_names(store, STORES)
        raise UsageError(
            f"--store {store}: there are {', '.join(STORES)}",
            hint=f"did you mean {near[0]}?" if near else "full keeps every byte",
        )
    if not only_changed:
        recorded = like.manifest.plan.store if like is not None else "full"
        return recorded if store is None else store
    if like is None:
        raise UsageError(
            "--only-changed needs --like: the run whose bytes need not be stored again",
            hint="divergence capture --like RUN -o OTHER --only-changed",
        )
    if store not in (None, "full"):
        raise UsageError(
            f"--only-changed keeps bytes, and --store {store} keeps none", hint="leave out --store"
        )
    if not any(record.xxh3 or record.fold for record in like.records):
        raise UsageError(
            f"--only-changed: {like.path} holds no digest to tell by what has changed",
            hint="leave out --only-changed",
        )
    return "full"


def check_operators(selection: SiteSelection, *, store: StoreMode, only_changed: bool) -> None:
    """Operators are run again from their recorded inputs, which must then be there."""
    if not selection.operators or (store == "full" and not only_changed):
        return
    given = "--only-changed" if only_changed else f"--store {store}"
    raise UsageError(
        f"{given} keeps not all bytes, and operators (ops@) are run again from theirs",
        hint="capture operators in a run of their own, with --store full",
    )
