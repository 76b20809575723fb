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
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from divergence.errors import ConfigError
from divergence.run.site import module_of

__all__ = ["find_prefix", "load_name_map"]

_MAX_PREFIXES = 64
"""A model has some ten modules and lists of modules above its blocks."""


class _MapFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    map: dict[str, str]


def load_name_map(path: str | Path) -> Callable[[str], str]:
    """Read a name map by path, or by name from configs/. Raises ConfigError."""
    from divergence.config import decode, find_config, load_toml

    file = find_config(path, what="name map")
    content = decode(load_toml(file), _MapFile, where=str(file))
    rules: list[tuple[re.Pattern[str], str]] = []
    for source, target in sorted(content.map.items(), key=lambda item: -len(item[0])):
        if source.count("{n}") != target.count("{n}"):
            raise ConfigError(
                f"{source!r} and {target!r} do not hold equally many {{n}}", where=str(file)
            )
        pattern = re.escape(source).replace(re.escape("{n}"), r"(\d+)")
        rules.append((re.compile(rf"{pattern}(?=$|[.#:])"), target))

    def rename(path: str) -> str:
        for pattern, target in rules:
            match = pattern.match(path)
            if match:
                named = target
                for number in match.groups():
                    named = named.replace("{n}", number, 1)
                return named + path[match.end() :]
        return path

    return rename


def find_prefix(reference: Iterable[str], candidate: Iterable[str]) -> tuple[str, str] | None:
    """(prefix in the reference, prefix in the candidate) under which most sites agree.

    None where no pair of prefixes matches more sites than the names as they stand. Of each run
    the ``_MAX_PREFIXES`` with the most sites are tried, so that time grows with the sites alone.
    """
    ours, theirs = set(reference), set(candidate)
    if ours <= theirs or theirs <= ours:
        return None
    rests, others = _by_rest(ours), _by_rest(theirs)
    counts: Counter[tuple[str, str]] = Counter()
    for rest in rests.keys() & others.keys():
        counts.update((a, b) for a in rests[rest] for b in others[rest] if a != b)
    if not counts:
        return None
    best = min(counts, key=lambda pair: (-counts[pair], *map(_simplest, pair)))
    return best if counts[best] > len(ours & theirs) else None


def _simplest(prefix: str) -> tuple[int, str]:
    return (prefix.count("."), prefix)


def _by_rest(sites: set[str]) -> dict[str, list[str]]:
    """What is left of the sites without a prefix, with the prefixes worth trying that they have:
    '', 'model.', 'model.language_model.' …"""
    holds: Counter[str] = Counter()
    for site in sites:
        holds.update(_prefixes(site))
    kept = set(sorted(holds, key=lambda head: (-holds[head], *_simplest(head)))[:_MAX_PREFIXES])
    rests: dict[str, list[str]] = {}
    for site in sites:
        for prefix in _prefixes(site):
            if prefix in kept:
                rests.setdefault(site[len(prefix) :], []).append(prefix)
    return rests


def _prefixes(site: str) -> list[str]:
    """Up to three leading components of the path; a number is none to end with."""
    parts = module_of(site).split(".", 4)
    return [
        "",
        *(
            ".".join(parts[:count]) + "."
            for count in range(1, min(3, len(parts) - 1) + 1)
            if not parts[count - 1].isdigit()
        ),
    ]
