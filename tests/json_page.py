"""The page of the JSON's keys, printed from the types of a report.

python tests/json_page.py       rewrites docs/json.md
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "json.md"

HEAD = """\
# The keys of `compare --json`

<!-- printed by `python tests/json_page.py` from the types themselves; do not edit -->

`compare --json`, `check --json` and `Report.load` share these types; in Python a key is an
attribute of the same name (`pass` is `pass_`). A number that is no finite one is a string (`"nan"`,
`"inf"`). `reference` is A on every screen, `candidate` is B. Each entry of `sites` is a line. Keys
without a description say what their name says; words are in the [glossary](glossary.md), facts in
[facts](facts.md).
"""


def added() -> list[type[msgspec.Struct]]:
    """The parts of a report that domains bring, where they do."""
    from divergence.domain import own_domains

    places = [at for domain in own_domains() for at in getattr(domain, "parts", {}).values()]
    return [getattr(importlib.import_module(at.split(":")[0]), at.split(":")[1]) for at in places]


def types_of(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """The type and those in its fields, each once, in the order in which they are met."""
    seen: list[type[msgspec.Struct]] = []
    waiting = [kind]
    while waiting:
        current = waiting.pop(0)
        if current in seen:
            continue
        seen.append(current)
        yield current
        for hint in typing.get_type_hints(current).values():
            waiting += [each for each in _inside(hint) if each not in seen]


def _inside(hint: object) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for part in typing.get_args(hint):
        yield from _inside(part)


def described(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field of a struct, by its key; empty where there is none."""
    (node,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    texts = {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in itertools.pairwise(node.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return {key: texts.get(name, "") for name, key in names}


def first_sentence(text: str) -> str:
    line = " ".join(text.replace("``", "`").split())
    return re.split(r"(?<=\.)\s", line)[0].rstrip(".") if line else ""


def page() -> str:
    from divergence import Report

    parts = [HEAD]
    for kind in dict.fromkeys(itertools.chain(types_of(Report), *map(types_of, added()))):
        about = first_sentence(inspect.getdoc(kind) or "")
        texts = described(kind)
        rows = [f"- `{key}`: {first_sentence(text)}" for key, text in texts.items() if text]
        bare = ", ".join(f"`{key}`" for key, text in texts.items() if not text)
        parts.append(f"\n## {kind.__name__}\n\n{about}." + (f" Also {bare}." if bare else ""))
        if rows:
            parts.append("\n" + "\n".join(rows))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
