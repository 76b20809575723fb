"""What a record is, and with that, how it is compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from divergence.run.reader import Run
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.record import Record
from divergence.run.schema.site import is_operator_site, unescape_path

__all__ = ["Kind", "kinds_of"]

_DIGEST = re.compile("[0-9a-f]{32}")

Kind = Literal["tensor", "operator", "weight", "whole"]


def kinds_of(run: Run) -> Callable[[Record], Kind]:
    """What a record of the run is, and with that how it is compared: an ``operator``'s by its
    place in the sequence of calls, which may differ (calls.match); a ``weight``, stored for
    replays, by its digest in preflight; a ``whole`` pass with its own run's decode steps
    (comparison.within); any other ``tensor`` with the one at the same site.

    An operator is known by its call and not by the ``/`` in its site alone.
    """
    calls = {r.site.rpartition(":")[0] for r in run.records if r.call is not None}
    digests: dict[str, str | None] = {}
    """By site: of the weight that is named like it."""

    def kind(record: Record) -> Kind:
        site = record.site
        if "/" in site and is_operator_site(site) and site.rpartition(":")[0] in calls:
            return "operator"
        if site not in digests:
            digests[site] = _digest_of_weight(site, run.manifest)
        digest = digests[site]
        if digest is not None and _is_weight(record, digest, run.manifest):
            return "weight"
        return "whole" if record.pass_ == "whole" else "tensor"

    return kind


def _digest_of_weight(site: str, manifest: Manifest) -> str | None:
    path, _, port = site.partition(":")
    if not port.startswith("in."):
        return None
    name = f"{unescape_path(path)}.{port.removeprefix('in.')}".removeprefix(".")
    return manifest.model.digests.get(name)


def _is_weight(record: Record, digest: str, manifest: Manifest) -> bool:
    """Has it the bytes of the weight that it is named like? An argument of a module may be named
    so too."""
    # a rank's part, an offloaded weight and an accelerator's digest cannot be told by it
    told = manifest.mesh is None and record.xxh3 is not None and _DIGEST.fullmatch(digest)
    return not told or record.xxh3 == digest
