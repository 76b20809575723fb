"""A run may choose some of how it is repeated.

A run comes from elsewhere. It may choose data and settings: which checkpoint is read (as data), in
which dtype, with which of transformers' own attention functions. It may not choose code: names that
lead to code (an attention kernel of the hub), files and URLs are refused, with the option by which
the user of this machine can choose them. All that repeats a run reads these settings here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from divergence.errors import RunFormatError, UsageError
from divergence.run.manifest import ATTENTION, EngineValue, Manifest

_REVISION = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*", re.ASCII)
_MAX_SOURCE = 4096  # bytes of a path


def recorded_attention(manifest: Manifest) -> str | None:
    """The attention that the run names. UsageError where that is none of transformers' own."""
    name = manifest.model.attn_implementation or manifest.settings.attn_implementation
    if name is None or name in ATTENTION:
        return name
    raise UsageError(
        f"the run names the attention implementation {_shown(name)}, which may be code of its own",
        where="a run chooses no code that is executed here",
        hint="capture --like RUN --attn-implementation NAME: eager, or that name itself if you "
        "trust its code",
    )


def recorded_revision(manifest: Manifest) -> str | None:
    """The revision that the run names: a branch, tag or commit. RunFormatError for others."""
    revision = manifest.model.revision
    if revision is None or (_REVISION.fullmatch(revision) and ".." not in revision):
        return revision
    raise RunFormatError(
        f"the run names the revision {_shown(revision)}, which is no branch, tag or commit",
        hint="pass --revision, or --model PATH",
    )


def recorded_source(manifest: Manifest) -> str:
    """The path or hub id of the model that the run names. RunFormatError for what is neither."""
    source = manifest.model.source
    if (
        source.strip()
        and source.isprintable()
        and "://" not in source
        and len(source.encode(errors="replace")) <= _MAX_SOURCE
    ):
        return source
    raise RunFormatError(
        f"the run names the model {_shown(source)}, which is neither a path nor a hub id",
        hint="name this machine's copy: --model PATH",
    )


def recorded_seed(manifest: Manifest) -> int:
    """The seed that the run names. RunFormatError for one that torch does not take."""
    seed = manifest.settings.seed
    if -(2**63) <= seed < 2**64:
        return seed
    raise RunFormatError(
        "the run names a seed that does not fit 64 bits",
        where="settings.seed",
        hint="it was changed by hand; take one of your own: --seed 0",
    )


def recorded_sites(manifest: Manifest) -> list[str]:
    """The patterns of sites that were recorded. RunFormatError for the name of a file: a run holds
    what such a file said, never its name."""
    for site in manifest.plan.sites:
        if site.endswith(".toml"):
            raise RunFormatError(
                f"the run names the file {_shown(site)} among its sites",
                where="plan.sites",
                hint="pass --sites",
            )
    return manifest.plan.sites


_WORD = re.compile(r"[\w.+-]{0,64}")


def recorded_engine_options(options: Mapping[str, EngineValue]) -> dict[str, EngineValue]:
    """Options of an engine as the run has them. RunFormatError for one that may be a path: what a
    run names is not opened here."""
    for key, value in options.items():
        if isinstance(value, str) and (not _WORD.fullmatch(value) or value.endswith(".toml")):
            raise RunFormatError(
                f"the run gives the engine's option {_shown(key)} the value {_shown(value)}, which "
                "may be a file",
                where="engine.options",
                hint="name this machine's own: --engine-option KEY=VALUE",
            )
    return dict(options)


def _shown(name: str) -> str:
    return repr(name[:80]) + ("..." if len(name) > 80 else "")
