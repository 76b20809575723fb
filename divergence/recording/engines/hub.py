"""The hub is asked once whether it can be reached, before anything heavy is imported: loading would
try again for half a minute, in each process anew."""

from __future__ import annotations

import os

from divergence.errors import ModelError, first_line
from divergence.run.record import expanded


def hub_out_of_reach(source: str) -> str | None:
    """Say why the hub cannot be asked for ``source``; None where it can be, or where ``source`` is
    a path here."""
    if expanded(source).exists():
        return None
    from huggingface_hub import constants, utils

    try:
        utils.get_session().head(constants.ENDPOINT, timeout=5)  # type: ignore[attr-defined]  # lazy
    except Exception as error:  # of the network, by whichever client this version has
        return f"{constants.ENDPOINT}: {first_line(error, most=200)}"
    return None


def must_lie_here(source: str, revision: str | None = None) -> bool:
    """Is ``source`` a model of the hub, which is out of reach, and here from before? Raises
    ModelError where it is not here."""
    away = None if source.startswith((".", "/", "~")) else hub_out_of_reach(source)
    if away is None:
        return False
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        config = try_to_load_from_cache(source, "config.json", revision=revision)
    except errors.HFValidationError:
        return False  # no name that the hub could have, which loading says
    if not isinstance(config, str):
        asked = os.environ.get("HF_HUB_OFFLINE", "") in ("", "0")
        raise ModelError(
            f"cannot load {source!r}: there is no directory {source} here, it is no model in the "
            "cache, and the hub " + ("cannot be reached" if asked else "may not be asked"),
            where=away,
            hint="check the name; or go where the network reaches the hub (HF_ENDPOINT names a "
            "mirror)"
            if asked
            else "HF_HUB_OFFLINE is set: only local paths and cached models can be used",
        )
    return True
