"""Names in the code: a class is found by its name alone, and a local says what it is."""

import ast
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from divergence import Report, Run

PACKAGE = Path(__file__).parents[1] / "divergence"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {"one", "two", "found", "right", "told", "held", "known", "mine", "theirs", "said"}
"""Whatever they stand for has a noun of its own."""
MAYBE = re.compile(rf"\b({'|'.join(NAMES)})\b *([,:=)]|in |:=)")
"""How the text looks where one of them is bound; often it is prose."""
NUMBERS = {("numerics/compiled.py", "one"), ("domains/suite/operators.py", "one")}
"""Where it is the number."""
FIELDS = {("recording/machine.py", "found")}
"""Arguments named after what they become: a setting as it was found."""


def bound(tree: ast.AST) -> Iterator[str]:
    """Names that a function, a lambda or a comprehension gives to something; fields of classes are
    none: they are read with what they belong to."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        if isinstance(node, ast.AnnAssign) and isinstance(tree, ast.ClassDef):
            continue
        yield from bound(node)


def test_locals_say_what_they_are():
    """No ``one`` for a record, no ``found`` for what was looked for; ``right`` is beside a left.
    Call it what it is: a site, a record, a finding."""
    vague = set()
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        names = set(bound(ast.parse(text))) if MAYBE.search(text) else set()
        if {"left", "right"} <= names:
            names.discard("right")
        vague |= {(file.relative_to(PACKAGE).as_posix(), name) for name in names & NAMES}
    assert vague <= NUMBERS | FIELDS


def test_no_two_public_classes_share_a_name():
    """Whoever reads a name elsewhere finds what it is by searching for it."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for name in re.findall(r"^class ([A-Za-z]\w*)", file.read_text(encoding="utf-8"), re.M):
            places[name].append(file.relative_to(PACKAGE).as_posix())
    assert not {name: files for name, files in places.items() if len(files) > 1}


NAMED = re.compile(r"(?<![\w./:'\"-])(?:divergence\.)?([a-z]\w*)\.([a-z_]\w*)((?:\.\w+)*)\b(?!\()")
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
SUFFIXES = {"html", "json", "md", "tar"}
VALUES = {"run": Run, "report": Report}
"""Values that are called as a package is: an attribute of theirs is no name of a module."""


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments and docstrings of a file."""
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line.partition("#")[2]
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node.lineno, value.value


def test_names_in_comments_and_docstrings_exist():
    """``package.module.name`` is found where it says, also after what it names was moved."""
    stale = []
    for file in FILES:
        for line, text in prose(file):
            for folder, name, rest in NAMED.findall(text):
                if folder not in FOLDERS or name in SUFFIXES or hasattr(VALUES.get(folder), name):
                    continue
                try:
                    pkgutil.resolve_name(f"divergence.{folder}.{name}{rest}")
                except (ImportError, AttributeError):
                    stale.append(f"{file.relative_to(PACKAGE)}:{line}: {folder}.{name}{rest}")
    assert not stale, "name what is there now: " + ", ".join(stale)


def test_the_formatter_lays_out_every_line():
    """No statement asks the formatter to look away."""
    marks = re.compile(r"#\s*fmt:\s*(skip|off)")
    assert not [path for path in FILES if marks.search(path.read_text(encoding="utf-8"))]
