"""The package's own sources, for the tests that read them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "divergence"


def trees(pattern: str, package: Path = PACKAGE) -> Iterator[tuple[str, ast.Module]]:
    """(path in the package, tree) of each module whose text the pattern is found in: most of the
    time goes into parsing."""
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(pattern, text):
            yield path.relative_to(PACKAGE).as_posix(), ast.parse(text)
