"""Name maps: the same module under two names.

A base model and its causal-LM wrapper differ by a prefix (``layers.0`` and
``model.layers.0``); two ports of one model may differ everywhere. Prefixes are found
automatically; anything else is given as a file:

    [map]
    "model.layers.{n}.mlp" = "transformer.h.{n}.ffn"
    "model.embed_tokens" = "transformer.wte"

A key maps a module and everything below it; ``{n}`` stands for a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from divergence.config import decode, find_config, load_toml
from divergence.errors import ConfigError
from divergence.run.site import module_of

__all__ = ["NameMap", "find_prefix", "load_name_map"]

NameMap = Callable[[str], str]
"""A reference site (or module path) → the candidate's."""


class _MapFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    map: dict[str, str]


def load_name_map(path: str | Path) -> NameMap:
    """Read a name map by path, or by name from configs/. Raises ConfigError."""
    found = find_config(path, what="name map")
    content = decode(load_toml(found), _MapFile, where=str(found))
    rules: list[tuple[re.Pattern[str], str]] = []
    for source, target in sorted(content.map.items(), key=lambda item: -len(item[0])):
        if source.count("{n}") != target.count("{n}"):
            raise ConfigError(
                f"{source!r} and {target!r} do not hold equally many {{n}}", where=str(found)
            )
        pattern = re.escape(source).replace(re.escape("{n}"), r"(\d+)")
        rules.append((re.compile(rf"{pattern}(?=$|[.#:])"), target))

    def rename(path: str) -> str:
        for pattern, target in rules:
            match = pattern.match(path)
            if match:
                numbers = iter(match.groups())
                named = re.sub(r"\{n\}", lambda _, found=numbers: next(found), target)
                return named + path[match.end() :]
        return path

    return rename


def find_prefix(reference: Iterable[str], candidate: Iterable[str]) -> tuple[str, str] | None:
    """(prefix in the reference, prefix in the candidate) under which most sites agree.

    None where no pair of prefixes matches more sites than the names as they stand.
    """
    ours, theirs = set(reference), set(candidate)
    best, most = None, len(ours & theirs)
    for one in _prefixes(ours):
        stripped = {site[len(one) :] for site in ours if site.startswith(one)}
        for two in _prefixes(theirs):
            if one == two:
                continue
            count = len(stripped & {site[len(two) :] for site in theirs if site.startswith(two)})
            if count > most:
                best, most = (one, two), count
    return best


def _prefixes(sites: set[str]) -> list[str]:
    """Leading path components worth trying: '', 'model.', 'model.language_model.' …"""
    found = {""}
    for site in sites:
        parts = module_of(site).split(".")
        for count in range(1, min(3, len(parts) - 1) + 1):
            if not parts[count - 1].isdigit():
                found.add(".".join(parts[:count]) + ".")
    return sorted(found, key=lambda prefix: (prefix.count("."), prefix))
