"""The map of a dump: which of its names is which site.

    [[file]]                               # a file, by its path inside the folder
    pattern = "layer_{layer}_step{step}.npy"
    site = "model.layers.{layer}:out"

    [[key]]                                # a tensor inside a file, or a name of the dump's own
    file = "step{step}.safetensors"        # default: any file
    pattern = "blocks.{layer}.hidden"
    site = "model.layers.{layer}:out"

``{layer}``, ``{step}``, ``{sample}`` and ``{rank}`` are numbers, any other group is text without a
slash, ``*`` is anything. ``step``, ``sample`` and ``rank`` place the tensor (default 0), and may
also be written as keys: ``step = 0``. The first rule that matches counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from divergence.config import decode, load_toml
from divergence.errors import ConfigError, UsageError
from divergence.run.schema.layout import expanded
from divergence.run.schema.site import near_names, split_site

__all__ = ["Found", "Rules", "load_rules"]

_NUMBERS = ("layer", "step", "sample", "rank")
_PART = re.compile(r"\{(\w+)\}|(\*)")


class _Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    pattern: str
    site: str
    file: str = "*"
    step: int | None = None
    sample: int | None = None
    rank: int | None = None

    @cached_property
    def compiled(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        return _compiled(self.file), _compiled(self.pattern)


class _MapFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: list[_Rule] = []
    key: list[_Rule] = []


@dataclass(frozen=True, slots=True)
class Found:
    """Where a tensor belongs. None: neither the rule nor the name says."""

    site: str
    step: int | None
    sample: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class Rules:
    """A map that was read."""

    path: str
    files: list[_Rule]
    keys: list[_Rule]

    def near(self, names: Iterable[str]) -> list[str]:
        """The names most like its patterns, then the first few."""
        names = list(names)
        wanted = [_PART.sub("0", rule.pattern) for rule in (*self.files, *self.keys)]
        near = [name for pattern in wanted for name in near_names(pattern, names)]
        return list(dict.fromkeys([*near, *names]))[:4]

    def of_file(self, name: str) -> Found | None:
        """Where the tensor of a file belongs."""
        return self._first(self.files, "", name)

    def of_key(self, file: str, key: str, tags: dict[str, str] | None = None) -> Found | None:
        """Where a tensor inside a file belongs. ``tags``: groups that the dump itself gives."""
        return self._first(self.keys, file, key, tags)

    def _first(
        self, rules: list[_Rule], file: str, name: str, tags: dict[str, str] | None = None
    ) -> Found | None:
        for rule in rules:
            outer, inner = rule.compiled
            around, match = outer.fullmatch(file), inner.fullmatch(name)
            if around is not None and match is not None:
                groups = {**(tags or {}), **around.groupdict(), **match.groupdict()}
                return self._found(rule, groups, name)
        return None

    def _found(self, rule: _Rule, groups: dict[str, str], name: str) -> Found:
        try:
            site = rule.site.format_map(groups)
            split_site(site)
        except (KeyError, ValueError, IndexError, AttributeError, UsageError) as error:
            raise ConfigError(
                f"{rule.site!r} makes no site of {name!r}", where=self.path,
                hint="a site is MODULE_PATH:PORT, as model.layers.{layer}:out; its groups are "
                f"those of the pattern: {', '.join(groups) or 'none'}",
            ) from error  # fmt: skip

        def number(key: str, said: int | None) -> int | None:
            text = groups.get(key, "")
            return said if said is not None or not text.isdecimal() else int(text)

        return Found(
            site, number("step", rule.step), number("sample", rule.sample),
            number("rank", rule.rank),
        )  # fmt: skip


def load_rules(path: str | os.PathLike[str]) -> Rules:
    """Reads a map. Raises ConfigError."""
    given = expanded(path)
    content = decode(load_toml(given), _MapFile, where=str(given))
    if not content.file and not content.key:
        raise ConfigError("the map holds no rule", where=str(given), hint="[[file]] or [[key]]")
    rules = Rules(str(given), content.file, content.key)
    for rule in (*rules.files, *rules.keys):
        try:
            _ = rule.compiled
        except re.error as error:
            raise ConfigError(
                f"{rule.pattern!r} is no pattern: {error}", where=str(given),
                hint="each {group} may stand once, and begins with a letter",
            ) from error  # fmt: skip
    return rules


def _compiled(pattern: str) -> re.Pattern[str]:
    parts, at = [], 0
    for match in _PART.finditer(pattern):
        parts.append(re.escape(pattern[at : match.start()]))
        name = match[1]
        if name is None:
            parts.append(".*")
        else:
            parts.append(f"(?P<{name}>{'[0-9]{1,9}' if name in _NUMBERS else '[^/]+'})")
        at = match.end()
    return re.compile("".join([*parts, re.escape(pattern[at:])]))
