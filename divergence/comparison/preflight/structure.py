"""Are two models built alike? Parameters by name, and blocks by place.

A digest says whether two tensors are equal; which belong together, names tell. Two checkpoints of
one model may differ in a prefix (a base model and its causal LM: ``layers.0`` and
``model.layers.0``), and one may have a head besides. So names are matched one to one: by a name
map, then as they stand or by prefixes, as many as it takes (a model of several towers). A set of
equal values is no match: with a duplicated layer every value of one side is on the other too.

What is left over on one side is another architecture, unless it is no part of what runs between the
embedding and the head: outside all numbered modules (``.3.``), and either outside the prefix that
matched (a head on a base model) or a copy of a matched tensor (tied weights written out).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from divergence.comparison.align.names import NameMap, find_prefix
from divergence.comparison.result import PreflightLine
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.site import unescape_path

__all__ = ["Matching", "block_lines", "list_names", "match_parameters"]

_NAMED = 5  # names listed in a line
_MAX_PREFIXES = 6  # pairs of prefixes that are tried, one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """``pairs``: reference's name → candidate's; ``prefixes`` that it took, in the order found;
    ``mapped``: some were matched by a name map; ``alone``: what is left on each side, of which
    ``beside`` is no part of the body: it may be there or not."""

    pairs: dict[str, str]
    prefixes: list[tuple[str, str]]
    mapped: bool
    alone: tuple[list[str], list[str]]
    beside: tuple[list[str], list[str]]

    @property
    def is_one_to_one(self) -> bool:
        """Does every parameter of both sides have its one partner, heads and ties aside?"""
        return bool(self.pairs) and all(
            set(alone) <= set(beside) for alone, beside in zip(self.alone, self.beside, strict=True)
        )

    def describe(self) -> str:
        """How names were read, and what is left on which side."""
        parts = [f"{one or '(nothing)'} read as {two or '(nothing)'}" for one, two in self.prefixes]
        parts += ["by the name map"] if self.mapped else []
        for side, names in zip(("reference", "candidate"), self.alone, strict=True):
            if names:
                parts.append(f"{len(names)} only in the {side}: {list_names(names)}")
        return "; ".join(parts)


def match_parameters(
    a: Mapping[str, str], b: Mapping[str, str], names: NameMap | None = None
) -> Matching:
    """Match the parameters of two models (name → digest) by their names alone."""
    pairs: dict[str, str] = {}
    prefixes: list[tuple[str, str]] = []
    taken: set[str] = set()
    if names is not None:
        for name in a:
            other = _mapped(names, name)
            if other != name and other in b and other not in taken:
                pairs[name] = other
                taken.add(other)
    mapped = bool(pairs)
    for _ in range(_MAX_PREFIXES):
        taken = set(pairs.values())
        ours = [name for name in a if name not in pairs]
        theirs = {name for name in b if name not in taken}
        if not ours or not theirs:
            break
        one, two = find_prefix(ours, theirs) or ("", "")
        found = {
            name: two + name[len(one) :]
            for name in ours
            if name.startswith(one) and two + name[len(one) :] in theirs
        }
        if not found:
            break
        pairs |= found
        if (one, two) != ("", ""):
            prefixes.append((one, two))
    taken = set(pairs.values())
    alone = [name for name in a if name not in pairs], [name for name in b if name not in taken]
    return Matching(
        pairs=pairs,
        prefixes=prefixes,
        mapped=mapped,
        alone=alone,
        beside=(
            _beside(alone[0], a, {a[name] for name in pairs}, [one for one, _ in prefixes]),
            _beside(alone[1], b, {b[name] for name in taken}, [two for _, two in prefixes]),
        ),
    )


def _mapped(names: NameMap, parameter: str) -> str:
    """A map names modules; a parameter's name ends in its own."""
    return names(f"{parameter}:out").rpartition(":")[0]


def _beside(
    names: list[str], digests: Mapping[str, str], matched: Collection[str], prefixes: list[str]
) -> list[str]:
    """Those that may be there or not: heads, and copies of what is matched."""
    found = []
    for name in names:
        numbered = any(part.isdecimal() for part in name.split("."))
        is_copy = digests[name] in matched
        is_outside = any(one and not name.startswith(one) for one in prefixes)
        if not numbered and (is_copy or is_outside):
            found.append(name)
    return found


def block_lines(a: Manifest, b: Manifest, names: NameMap | None) -> list[PreflightLine]:
    """A line where the two have other blocks; none where they have not, or where the runs' sites
    do not tell. By the modules that were hooked, so also where digests cannot be compared."""
    if not (_tells_blocks(a) and _tells_blocks(b)):
        return []
    ours, theirs = _blocks(a), _blocks(b)
    digests = {path: "" for path in ours}, {path: "" for path in theirs}
    found = match_parameters(*digests, names)
    alone = [*found.alone[0], *found.alone[1]]
    if not alone:
        return []
    parts = [
        f"{len(left)} only in the {side}: {list_names(left)}"
        for side, left in zip(("reference", "candidate"), found.alone, strict=True)
        if left
    ]
    return [
        PreflightLine(
            check="blocks",
            # all under other names: no architecture's difference, and nothing to compare them by
            status="blocking" if found.pairs or len(ours) != len(theirs) else "differs",
            reference=str(len(ours)),
            candidate=str(len(theirs)),
            detail="; ".join(parts),
        )
    ]


def _tells_blocks(manifest: Manifest) -> bool:
    """Did the capture put a hook on every block, and on this machine alone?"""
    sites = manifest.plan.sites
    return manifest.mesh is None and ("blocks" in sites or "modules" in sites)


def _blocks(manifest: Manifest) -> list[str]:
    return [
        unescape_path(path) for path, note in manifest.plan.modules.items() if note.role == "block"
    ]


def list_names(names: list[str]) -> str:
    """The first few, and how many more."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
