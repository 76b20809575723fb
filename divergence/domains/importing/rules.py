"""The map of a dump: which of its names is which site (docs/importing.md has one to copy)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from divergence.config import decode, load_toml
from divergence.errors import ConfigError, UsageError
from divergence.run.record import expanded
from divergence.run.site import near_names, split_site

# ``{layer}``, ``{step}``, ``{sample}`` and ``{rank}`` in a pattern are numbers, any other group is
# text without a slash, ``*`` is anything. ``step``, ``sample`` and ``rank`` place the tensor
# (default 0), and may also be written as keys. The first rule that matches counts.

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
class Target:
    """Says where a tensor belongs. None: neither the rule nor the name says."""

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

    def place(
        self, name: str, *, inside: str | None = None, tags: dict[str, str] | None = None
    ) -> Target | None:
        """Return where the tensor of a file belongs, or one of this name ``inside`` a file, by the
        first rule that matches. ``tags``: groups that the dump itself gives. Raises ConfigError."""
        for rule in self.files if inside is None else self.keys:
            outer, inner = rule.compiled
            around, match = outer.fullmatch(inside or ""), inner.fullmatch(name)
            if around is not None and match is not None:
                groups = {**(tags or {}), **around.groupdict(), **match.groupdict()}
                break
        else:
            return None
        try:
            site = rule.site.format_map(groups)
            split_site(site)
        except (KeyError, ValueError, IndexError, AttributeError, UsageError) as error:
            raise ConfigError(
                f"{rule.site!r} makes no site of {name!r}",
                where=self.path,
                hint="a site is MODULE_PATH:PORT, as model.layers.{layer}:out; its groups are "
                f"those of the pattern: {', '.join(groups) or 'none'}",
            ) from error
        step, sample, rank = (
            int(text) if given is None and (text := groups.get(key) or "").isdecimal() else given
            for key, given in (("step", rule.step), ("sample", rule.sample), ("rank", rule.rank))
        )
        return Target(site, step, sample, rank)


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
                f"{rule.pattern!r} is no pattern: {error}",
                where=str(given),
                hint="each {group} may stand once, and begins with a letter",
            ) from error
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
