"""Two configurations, key by key.

A key that moved (``rope_theta`` into ``rope_parameters``, as from one version of transformers to
another) is found by its last name.
"""

from __future__ import annotations

from divergence.comparison.results.preflight import PreflightLine, PreflightStatus
from divergence.run.schema.manifest import ConfigValue, Manifest

__all__ = ["config_differences", "config_line"]

_MOST = 6
_ANYWHERE = ("factor", "type", "name", "value", "rope_type")
"""Last names that stand under many keys: no sign of one that moved."""


def config_line(a: Manifest, b: Manifest) -> PreflightLine:
    """The line of preflight: keys whose values differ, reference first."""
    digests = [one.model.config_digest[:12] for one in (a, b)]
    same = digests[0] == digests[1]
    detail = None
    status: PreflightStatus = "same" if same else "differs"
    if a.model.config and b.model.config:
        found, moved = config_differences(a.model.config, b.model.config)
        if found:
            more = len(found) - _MOST
            status = "differs"
            detail = "; ".join(found[:_MOST]) + (f"; and {more} more" if more > 0 else "")
        elif moved and not same:
            status, detail = "same", f"the same values, {moved} of them under other keys"
        elif not same:
            detail = "in what is not recorded of it"
    return PreflightLine(
        check="config", status=status, reference=digests[0], candidate=digests[1], detail=detail
    )  # fmt: skip


def config_differences(
    a: dict[str, ConfigValue], b: dict[str, ConfigValue]
) -> tuple[list[str], int]:
    """(sentences, how many keys only moved). Values that differ come before keys that one side
    alone has; of those, what is null says nothing."""
    found = [
        f"{key} {_text(a[key])} / {_text(b[key])}" for key in a if key in b and a[key] != b[key]
    ]
    only_a = {key: value for key, value in a.items() if key not in b and value is not None}
    only_b = {key: value for key, value in b.items() if key not in a and value is not None}
    moved = 0
    for key in list(only_a):
        leaf = key.rpartition(".")[2]
        there = [other for other in only_b if other.rpartition(".")[2] == leaf]
        if len(there) != 1 or (leaf in _ANYWHERE and only_a[key] != only_b[there[0]]):
            continue
        one, two = only_a.pop(key), only_b.pop(there[0])
        if one == two:
            moved += 1
        else:
            found.append(f"{leaf} {_text(one)} / {_text(two)} ({key}, there {there[0]})")
    for side, only in (("reference", only_a), ("candidate", only_b)):
        if only:
            texts = [f"{key}={_text(value)}" for key, value in list(only.items())[:_MOST]]
            more = len(only) - len(texts)
            told = ", ".join(texts) + (f" and {more} more" if more > 0 else "")
            found.append(f"only in the {side}: {told}")
    return found, moved


def _text(value: ConfigValue) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:.10g}"
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"
