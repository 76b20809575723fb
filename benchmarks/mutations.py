"""Does a test notice a small fault of the code?

    MUTATIONS_MAP=map.jsonl python -m pytest -p benchmarks.mutations tests
    python benchmarks/mutations.py map.jsonl [--number 300] [--seed 0] [--seconds 40]

The first line makes a map: which test runs which branch, and its processor seconds (not what it
does in other processes). The second draws mutations of the core (``divergence/`` without
``domains/``) with a fixed seed: an operator, a constant, a branch taken the other way, a value that
is not returned, a bound that is off by one. A process of its own gets each as the source of its
module, and is asked the tests that run its branch, the quickest first, as many as take
``--seconds``: the first that fails kills it. ``--without FILE`` leaves out the tests it names.
Several maps of parts of the suite are one; ``--part 1/3`` asks every third of the mutations, from
the second on.
"""

from __future__ import annotations

import argparse
import ast
import base64
import builtins
import importlib.machinery as machinery
import itertools
import json
import os
import random
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "divergence"
COMPILED = PACKAGE / "numerics" / "compiled.py"
"""Left as it is: numba takes no probe, and keeps what it has compiled by the file's own date."""
SWAPS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def branches(file: Path, tree: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Each body that may run or not, with its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.While | ast.ExceptHandler):
            for body in filter(None, (node.body, getattr(node, "orelse", []))):
                lines = f"{body[0].lineno}:{body[-1].end_lineno}"
                yield f"{file.relative_to(PACKAGE)}:{lines}", body


def mutations(tree: ast.AST) -> Iterator[tuple[str, ast.AST, str, object]]:
    """Kind, node, and which attribute becomes what: every mutation inside of functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in [node for function in functions for node in ast.walk(function)]:
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield "operator", node, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            yield "operator", node, "op", SWAPS[type(node.op)]()
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield "constant", node, "value", not node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield "constant", node, "value", node.value + 1
        elif isinstance(node, ast.If | ast.IfExp):
            yield "branch", node, "test", ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
            yield "returned", node, "value", ast.Constant(None)
        elif isinstance(node, ast.Slice) and node.lower is not None:
            yield "bound", node, "lower", ast.BinOp(node.lower, ast.Add(), ast.Constant(1))


def draw(number: int, seed: int) -> Iterator[tuple[Path, str, int, str]]:
    """That many mutations of the core: file, kind, line, and the source with it."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if "domains" not in file.parts]
    files.remove(COMPILED)
    sizes = [file.stat().st_size for file in files]
    generator = random.Random(seed)
    while number:
        file = generator.choices(files, sizes)[0]
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if not (choices := list(mutations(tree))):
            continue  # a table of sentences
        number -= 1
        kind, node, attribute, value = generator.choice(choices)
        setattr(node, attribute, value)
        yield file, kind, node.lineno, ast.unparse(ast.fix_missing_locations(tree))


def read_map(paths: list[Path], without: set[str]) -> dict[str, list[tuple[float, str]]]:
    """By branch: processor seconds and name of each test that runs it."""
    tests: dict[str, list[tuple[float, str]]] = {}
    for path in paths:
        *lines, names = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for test, seconds, packed in lines:
            if test in without:
                continue
            for number, ran in enumerate(zlib.decompress(base64.b64decode(packed))):
                if ran:
                    tests.setdefault(names[number], []).append((seconds, test))
    return tests


def tests_of(file: Path, line: int, tests: dict, seconds: float) -> list[str]:
    """The tests that run the innermost branch with this line, the quickest first."""
    inner = {
        body[-1].end_lineno - body[0].lineno: name
        for name, body in branches(file, ast.parse(file.read_text(encoding="utf-8")))
        if body[0].lineno <= line <= body[-1].end_lineno
    }
    chosen, total = [], 0.0
    for cost, test in sorted(tests.get(inner[min(inner)], ())) if inner else ():
        total += cost
        if total < seconds or not chosen:
            chosen.append(test)
    return chosen


def serve(change: Callable[[Path, bytes], bytes | ast.AST | None]) -> None:
    """Modules of the package are compiled of what ``change(file, source)`` makes of them; of those
    of which it makes nothing Python's own cache is taken."""
    from _pytest.assertion.rewrite import AssertionRewritingHook

    find, load = AssertionRewritingHook.find_spec, machinery.SourceFileLoader.get_code
    AssertionRewritingHook.find_spec = lambda self, name, path=None, target=None: (
        None if name.partition(".")[0] == "divergence" else find(self, name, path, target)
    )

    def get_code(self, name):
        path = Path(self.path)
        inside = path.is_relative_to(PACKAGE)
        changed = change(path, path.read_bytes()) if inside else None
        return (
            load(self, name)
            if changed is None
            else compile(changed, self.path, "exec", dont_inherit=True)
        )

    machinery.SourceFileLoader.get_code = get_code


PATIENT = [*hypothesis.HealthCheck]
ENDED = "the process ended"
_names: list[str] = []
"""What the numbers of the map stand for; from here on the plugin of pytest."""


def _probed(file: Path, source: bytes) -> ast.AST:
    tree = ast.parse(source)
    for name, body in [] if file == COMPILED else list(branches(file, tree)):
        text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        probe = ast.parse(f"__ran__[{len(_names)}] = 1").body[0]
        for node in ast.walk(probe):
            ast.copy_location(node, body[0])
        _names.append(name)
        body.insert(int(text), probe)
    return tree


if "MUTATIONS_MAP" in os.environ:  # before pytest loads the package's own plugin
    builtins.__ran__ = bytearray(50_000)
    serve(_probed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    builtins.__ran__[:] = bytes(50_000)
    before, failed = sum(os.times()[:4]), item.session.testsfailed
    result = yield
    if item.session.testsfailed > failed:
        return result  # it would kill everything
    packed = base64.b64encode(zlib.compress(bytes(builtins.__ran__))).decode()
    with open(os.environ["MUTATIONS_MAP"], "a", encoding="utf-8") as file:
        file.write(json.dumps([item.nodeid, sum(os.times()[:4]) - before, packed]) + "\n")
    return result


def pytest_sessionfinish() -> None:
    with open(os.environ["MUTATIONS_MAP"], "a", encoding="utf-8") as file:
        file.write(json.dumps(_names) + "\n")


def kills(file: Path, source: str, tests: list[str]) -> str | None:
    """The first of the tests that fails where the file has this source."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        signal.setitimer(signal.ITIMER_PROF, 300)  # of a loop without an end: processor seconds,
        signal.alarm(3600)  # or of one that waits
        serve(lambda path, data: source if path == file else None)

        class Watch:
            def pytest_runtest_logreport(self, report):
                if report.failed:
                    os.write(writer, f"{report.nodeid}\n".encode())

            pytest_collectreport = pytest_runtest_logreport

        options = ["-x", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
        try:
            os._exit(pytest.main([*options, *tests], plugins=[Watch()]))
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file_of_child:
        failed = file_of_child.readline().strip()
    _, status = os.waitpid(child, 0)
    return failed or (None if status == 0 else ENDED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("map", type=Path, nargs="+")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--without", type=Path, default=os.devnull)
    for name, value in (("--number", 300), ("--seed", 0), ("--seconds", 40)):
        parser.add_argument(name, type=int, default=value)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import transformers  # once, for all that are forked

    _ = (
        transformers.AutoModelForCausalLM,
        transformers.LlamaForCausalLM,
        transformers.GenerationMixin,
    )

    # a busy machine is no fault
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=PATIENT)
    hypothesis.settings.load_profile("patient")
    known, killed = read_map(options.map, {*Path(options.without).read_text().splitlines()}), 0
    first, step = map(int, options.part.split("/"))
    drawn = list(itertools.islice(draw(options.number, options.seed), first, None, step))
    for file, kind, line, source in drawn:
        tests = tests_of(file, line, known, options.seconds)
        test = kills(file, source, tests) if tests else None
        original = file.read_text(encoding="utf-8")
        if test == ENDED and kills(file, original, tests) == ENDED:
            test = None  # it does so without the mutation, too
        killed += test is not None
        text = original.splitlines()[line - 1].strip()
        place = f"{file.relative_to(PACKAGE)}:{line}  {kind}  {text[:60]}"
        print(f"{place}\n    {test or f'SURVIVES {len(tests)} tests'}", flush=True)
    print(f"{killed} of {len(drawn)} killed")


if __name__ == "__main__":
    main()
