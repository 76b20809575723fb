"""A domain stands on what docs/extending.md lists, and on nothing else of the core."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from tests.test_doors import listed

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "divergence" / "domains"


def taken() -> Iterator[tuple[str, str, str]]:
    """(domain, module of the core, name) of every import in the folder."""
    for path in sorted(FOLDER.glob("*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            package, _, module = node.module.partition(".")
            if package == "divergence" and not module.startswith("domains"):
                for alias in node.names:
                    yield path.relative_to(FOLDER).parts[0], module, alias.name


def test_a_domain_imports_public_names_alone():
    """Those of the page; what is private to a module is nobody else's."""
    public, wrong = listed(), []
    for domain, module, name in taken():
        names = public.get(module)
        if names is not None and (name in names or not (names or name.startswith("_"))):
            continue
        wrong.append(f"{domain} imports {name} of {module}")
    assert not wrong, "\n".join([*wrong, "see docs/extending.md, What it may import"])


def test_what_the_page_lists_is_there():
    """Each module, and each name of those that it lists one by one."""
    public = listed()
    assert len(public) > 20
    for module, names in public.items():
        made = importlib.import_module(f"divergence.{module}")
        assert not [name for name in names if not hasattr(made, name)], module
