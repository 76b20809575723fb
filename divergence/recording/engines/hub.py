"""Whether the hub can be asked for a model, found out at once and before anything heavy is
imported: loading would try again for half a minute, in each process anew."""

from __future__ import annotations

from divergence.errors import ModelError, first_line
from divergence.run.record import expanded


def hub_out_of_reach(source: str) -> str | None:
    """Why the hub cannot be asked for ``source``. None where it can be, or where ``source`` is a
    path here."""
    if expanded(source).exists():
        return None
    from huggingface_hub import constants, utils

    try:
        utils.get_session().head(constants.ENDPOINT, timeout=5)  # type: ignore[attr-defined]  # lazy
    except Exception as error:  # of the network, by whichever client this version has
        return f"{constants.ENDPOINT}: {first_line(error, most=200)}"
    return None


def must_lie_here(source: str) -> bool:
    """Is ``source`` a model of the hub, which is out of reach, and here from before? Raises
    ModelError where it is not here."""
    away = None if source.startswith((".", "/", "~")) else hub_out_of_reach(source)
    if away is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(source, "config.json"), str):
        raise ModelError(
            f"cannot load {source!r}: there is no directory {source} here, it is no model in the "
            "cache, and the hub cannot be reached",
            where=away,
            hint="check the name; or go where the network reaches the hub (HF_ENDPOINT names a "
            "mirror)",
        )
    return True
