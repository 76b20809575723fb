"""The page of the JSON's keys and their schema, printed from the types of a report.

python tests/json_page.py       rewrites docs/json.md and docs/report.schema.json
"""

import ast
import functools
import importlib
import inspect
import itertools
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "json.md"
SCHEMA = ROOT / "docs" / "report.schema.json"

HEAD = """\
# The keys of `compare --json`

<!-- printed by `python tests/json_page.py` from the types themselves; do not edit -->

```console
$ divergence compare a b --json > report.json
```

```python
from divergence import Report

report = Report.load("report.json")  # or compare("a", "b")
print(report.verdict.kind, report.verdict.onset and report.verdict.onset.site)
worst = max(report.sites, key=lambda site: site.limit_usage or 0)
```

`check --json` shares these types; in Python a key is an attribute of the same name (`pass` is
`pass_`). A number that is no finite one is a string (`"nan"`, `"inf"`). `reference` is A on every
screen, `candidate` is B. Words are in the [glossary](glossary.md), facts in [facts](facts.md). Here
are the types that scripts read; [report.schema.json](report.schema.json) has all of them as a JSON
Schema, each key with its description, and the parts that log-probabilities, suites and collectives
add to a report.
"""


def added() -> dict[str, type[msgspec.Struct]]:
    """The parts of a report that domains bring, by their key."""
    from divergence.domain import own_domains

    places = {key: at for domain in own_domains() for key, at in domain.parts.items()}
    return {
        key: getattr(importlib.import_module(at.split(":")[0]), at.split(":")[1])
        for key, at in places.items()
    }


SHOWN = """
    Report Verdict Onset Check Fact SiteResult TruthDiff TokensResult Coverage
""".split()
"""Types that stand on the page, in their order; the others stand in the schema alone."""


def types_of(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """The type and those in its fields, each once, in their order."""
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


@functools.cache
def classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes that a module defines, by name."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def described(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field of a struct, by its key; empty where there is none."""
    node = classes(kind.__module__)[kind.__name__]
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
    kinds = {kind.__name__: kind for kind in types_of(Report)}
    for kind in map(kinds.__getitem__, SHOWN):
        about = first_sentence(inspect.getdoc(kind) or "")
        texts = described(kind)
        rows = [f"- `{key}`: {first_sentence(text)}" for key, text in texts.items() if text]
        bare = ", ".join(f"`{key}`" for key, text in texts.items() if not text)
        parts.append(f"\n## {kind.__name__}\n\n{about}." + (f" Also {bare}." if bare else ""))
        if rows:
            parts.append("\n" + "\n".join(rows))
    return "\n".join(parts) + "\n"


def schema() -> str:
    """The JSON Schema of a report, with the parts of domains and every field's description."""
    from divergence import Report
    from divergence.comparison.result import BESIDE

    kinds = [Report, *added().values()]
    (whole, *parts), definitions = msgspec.json.schema_components(
        kinds, ref_template="#/$defs/{name}"
    )
    for kind in itertools.chain(*map(types_of, kinds)):
        properties = definitions[kind.__name__]["properties"]
        for key, text in described(kind).items():
            if text and key in properties:
                properties[key]["description"] = " ".join(text.split())
    report = definitions["Report"]["properties"]
    report.pop(BESIDE)
    report |= {
        key: {"anyOf": [part, {"type": "null"}]} for key, part in zip(added(), parts, strict=True)
    }
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}
    text = json.dumps({**top, "$defs": definitions}, indent=1, ensure_ascii=False) + "\n"
    return text.replace('"type": "number"', '"type": ["number", "string"]')  # nan and inf


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
