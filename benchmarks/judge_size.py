"""How large is what decides: lines, branches and constants, room by room.

    python benchmarks/judge_size.py [--constants]

What decides is the judge and what is held against it: ``comparison`` without its results, advice
and sentences, the analyses without theirs, and of every domain the modules that find, measure and
compare. Branches are ``if``
statements and expressions; constants are names of modules that hold a number, and the fields of
``Thresholds``. ``--constants`` lists them.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from divergence.domain import domains
from divergence.numerics.floor import Thresholds

HOME = Path(__file__).resolve().parents[1]
_SAYING = (
    "__init__",
    "sections",
    "sentences",
    "command",
    "commands",
    "advice",
    "result",
    "results",
    "api",
)
"""Modules that say what was decided."""
_OF_DOMAINS = ("find", "measure", "compare")


def modules() -> dict[str, list[Path]]:
    """By room, the files that decide."""
    package = HOME / "divergence"
    rooms = {"comparison": sorted((package / "comparison").rglob("*.py"))}
    for folder in sorted((package / "analyses").iterdir()):
        rooms[folder.name] = sorted(folder.glob("*.py"))
    for domain in domains():
        for name, at in ((name, question.package) for name, question in domain.analyses.items()):
            spec = importlib.util.find_spec(at)
            if spec is not None and spec.origin is not None:
                files = sorted(Path(spec.origin).parent.glob("*.py"))
                rooms[name] = [file for file in files if file.stem in _OF_DOMAINS]
    return {
        room: kept
        for room, files in rooms.items()
        if (kept := [file for file in files if file.stem not in _SAYING])
    }


def constants_of(tree: ast.Module) -> list[str]:
    """The names of a module that hold a number."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            numbers = [
                part
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and type(part.value) in (int, float)
            ]
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names += [ast.unparse(target)] if numbers else []
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--constants", action="store_true", help="list them")
    listed = parser.parse_args().constants
    total, lists = Counter[str](), []
    print("| room | files | lines | branches | constants |\n|---|---|---|---|---|")
    for room, files in modules().items():
        count = Counter(files=len(files))
        for file in files:
            text = file.read_text()
            tree = ast.parse(text)
            names = constants_of(tree)
            count["lines"] += len(text.splitlines())
            count["branches"] += sum(isinstance(n, ast.If | ast.IfExp) for n in ast.walk(tree))
            count["constants"] += len(names)
            lists += [f"{file.relative_to(HOME / 'divergence')}: {name}" for name in names]
        total += count
        cells = (count[name] for name in ("files", "lines", "branches", "constants"))
        print(f"| {room} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    cells = (total[name] for name in ("files", "lines", "branches", "constants"))
    print(f"| all | {' | '.join(f'{cell:,}' for cell in cells)} |")
    print(f"\nthresholds that a policy may set: {len(Thresholds.__struct_fields__)}")
    for text in lists if listed else ():
        print(f"- {text}")


if __name__ == "__main__":
    main()
