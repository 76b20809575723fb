"""Who may import whom: the drawing in the architecture, enforced.

    errors <- numerics <- {run, options} <- {recording, ops, comparison} <- analyses
    <- {experiments, gate, fleet} <- report <- cli <- domains

Every import counts, at module level or inside a function, and under TYPE_CHECKING too.
"""

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import divergence
from divergence import capture
from divergence.comparison.analysis import places

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "divergence"
FILES = sorted(PACKAGE.rglob("*.py"))

LEVELS = {
    "errors": 0,
    "_version": 0,
    "layout": 1,
    "facts": 1,  # codes and values, and the sentences that are made of them
    "html": 1,  # elements of pages
    "document": 1,  # what an analysis shows, as values
    "words": 0,
    "domain": 0,  # what a domain is, and which are installed
    "outside": 1,
    "output": 1,
    "numerics": 1,
    "run": 2,
    "options": 2,  # what each command may be told: types alone
    "config": 2,  # may be imported by all above; itself names sites
    "recording": 3,
    "ops": 3,
    "comparison": 3,
    "analyses": 4,  # what comparison looks up by name
    "experiments": 5,  # made of captures and comparisons
    "gate": 5,
    "fleet": 5,
    "report": 6,
    "sending": 7,  # a report and what lies beside it, in one file
    "cli": 8,
    "domains": 9,  # nothing names one: divergence.domain finds them
    "pytest_plugin": 9,  # of pytest's command line, as cli is of ours
    "__main__": 9,
    "__init__": 9,
}
"""A room may import itself and what stands lower; rooms of one level see exceptions below."""

APART = {("recording", "comparison"), ("comparison", "recording")}
"""Level 3 rooms may use each other (ops uses recording's hooks), except these pairs."""

MAX_LOADED = {"identical": 40, "within_floor": 40}
"""Modules of ours that a plain comparison loads, by its verdict; apart from what says whether an
analysis applies, and what domains there are. They may only shrink."""

UNASKED = (
    "operators/find",
    "precision/find",
    "ranks/find",
    "experts/find",
    "blocks/onset",
    "code/find",
    "ends/integers",
)
"""What does not apply to such a pair."""

REPORT_READS = (
    "divergence.fleet.result",
    "divergence.gate.result",
    "divergence.comparison.result",
    "divergence.experiments.result",
    "divergence.analyses",
    "divergence.comparison.analysis",
    "divergence.run.contents",
    "divergence.run.site",
    "divergence.run.record",
    "divergence.run.command",
    "divergence.run.manifest",
)
"""All that report may take from run and from levels 3 and 4: types, and counts over
records. It never opens a run."""

OWNERS = {
    "transformers": (
        "recording/engines/",
        "domains/onnx/",
        "domains/quantization/",
        "domains/vllm/",
    ),
    "vllm": ("domains/vllm/", "domains/suite/"),  # its kernels, where a suite is asked for them
    "onnx": ("domains/onnx/",),
    "onnxruntime": ("domains/onnx/",),
    "numba": ("numerics/compiled.py",),
    "scipy": ("domains/scores/statistics.py",),
    "zstandard": ("domains/scores/formats/",),
    "llvmlite": ("numerics/compiled.py",),
    "resvg_py": ("html/picture.py",),
    "tensorboard": ("domains/training/",),
    "textual": ("domains/view/",),
    "typer": ("cli/",),
    "rich": ("cli/", "layout.py"),
}
"""Third-party packages with one home each."""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, ``from a import b`` as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and (node.func.id if isinstance(node.func, ast.Name) else node.func.attr)
            in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def violation(path: str, target: str) -> str | None:
    """Why ``divergence/PATH`` may not import ``target``, or None where it may."""
    package, _, rest = target.partition(".")
    if package in OWNERS:
        if path.startswith(OWNERS[package]):
            return None
        return f"only {' and '.join(OWNERS[package])} may import {package}"
    if package != "divergence":
        return None
    room = path.partition("/")[0].removesuffix(".py")
    other = rest.partition(".")[0]
    if other not in LEVELS and rest in divergence.__all__:
        other = ""  # ``from divergence import name``: the lazy public API, above all rooms but cli
    if room not in LEVELS or (other and other not in LEVELS):
        unknown = room if room not in LEVELS else other
        return f"{unknown} has no place in the architecture"
    if not other:
        return None if LEVELS[room] >= LEVELS["cli"] else "import the module that is meant"
    if LEVELS[other] > LEVELS[room]:
        return f"{room} stands below {other}"
    if (room, other) in APART:
        return f"{room} and {other} never import each other"
    if room == other == "domains" and path.split("/")[1] != rest.split(".")[1] != "public":
        return None if path == "domains/public.py" else "a domain does not know another"
    if room == other == "analyses" and path.split("/")[1] != rest.split(".")[1]:
        return "an analysis does not know another"
    if other == "html" and room in ("analyses", "domains", "document", "report"):
        return None if path == "report/page.py" else "html/ alone writes markup"
    if (
        room == "report"
        and other not in ("report", "config", "layout")
        and LEVELS[other] >= LEVELS["run"]
    ):
        allowed = any(target == name or target.startswith(name + ".") for name in REPORT_READS)
        return None if allowed else f"report may read {', '.join(REPORT_READS)} only"
    return None


@functools.cache
def imports_of(file: Path) -> list[tuple[int, str]]:
    return list(imports(ast.parse(file.read_text(encoding="utf-8"))))


def test_the_package_is_here():
    """The tests below look at something."""
    assert len(FILES) > 10


def test_imports_follow_the_arrow():
    """No module imports a room above it, or a package that has another home."""
    wrong = []
    for file in FILES:
        path = file.relative_to(PACKAGE).as_posix()
        for line, target in imports_of(file):
            reason = violation(path, target)
            if reason is not None:
                wrong.append(f"divergence/{path}:{line} imports {target}: {reason}")
    assert not wrong, "\n".join(wrong)


def test_no_file_needs_itself():
    """No circle of files, however long, and whatever kind of import ties it."""
    names = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in FILES
    }

    def module_of(target: str) -> str | None:
        while target and target not in names:
            target = target.rpartition(".")[0]
        return target or None

    needs = {
        name: {
            found
            for _, target in imports_of(file)
            if (found := module_of(target)) not in (None, name, "divergence")
        }
        for name, file in names.items()
    }
    needs["divergence"] = set()  # the public API: names of everything, loaded when asked for
    graphlib.TopologicalSorter(needs).prepare()  # CycleError names the circle


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("numerics/pairs.py", "divergence.run.reader.Run"),
        ("errors.py", "divergence.numerics.pairs"),
        ("comparison/align.py", "divergence.recording.recorder"),
        ("recording/api.py", "divergence.comparison.result.Report"),
        ("run/writer.py", "divergence.analyses.blocks.sections"),
        ("report/summary.py", "divergence.run.reader.Run"),
        ("report/summary.py", "divergence.comparison.align.align"),
        ("analyses/tokens/sections.py", "divergence.experiments.explain.explain_token"),
        ("comparison/api.py", "divergence.experiments.explain.explain_token"),
        ("report/experiments.py", "divergence.experiments.sensitivity.SensitivityTrials"),
        ("analyses/blocks/find.py", "divergence.experiments.sensitivity.SensitivityTrials"),
        ("report/html.py", "rich.table.Table"),
        ("recording/recorder.py", "transformers.PreTrainedModel"),
        ("recording/api.py", "typer"),
        ("numerics/pairs.py", "numba.njit"),
        ("utils/misc.py", "divergence.errors.UsageError"),
        ("analyses/blocks/sections.py", "divergence.html.parts.el"),
        ("domains/suite/sections.py", "divergence.html.parts.el"),
        ("analyses/blocks/find.py", "divergence"),
        ("analyses/blocks/find.py", "divergence.Run"),
    ],
)
def test_the_rules_can_fail(path, target):
    """Each kind of forbidden import is seen as one."""
    assert violation(path, target) is not None


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("cli/main.py", "typer"),
        ("cli/main.py", "divergence.__version__"),
        ("cli/compare.py", "divergence.comparison.api.compare"),
        ("layout.py", "rich.console.Console"),
        ("report/summary.py", "divergence.comparison.result.Report"),
        ("recording/engines/load.py", "transformers.AutoModel"),
        ("ops/replay.py", "divergence.recording.recorder"),
        ("experiments/explain.py", "divergence.recording.api.make_run"),
        ("experiments/explain.py", "divergence.comparison.align.align"),
        ("experiments/sensitivity/trials.py", "divergence.analyses.blocks.find"),
        ("experiments/sensitivity/sensitivity.py", "divergence.recording.api"),
        ("analyses/blocks/find.py", "divergence.numerics.pairs"),
        ("recording/api.py", "divergence.config.load_settings"),
        ("numerics/pairs.py", "torch"),
    ],
)
def test_the_rules_can_pass(path, target):
    """What the architecture allows is allowed."""
    assert violation(path, target) is None


def loaded_after(code: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter that ran ``code``.

    A child that fails is a failure here; its standard output belongs to the code.
    """
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines()[-1].split())


HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors"}


def test_importing_the_package_is_light():
    """``import divergence`` loads nothing heavy, nor the command line's packages."""
    loaded = loaded_after("import divergence; divergence.__version__")
    assert not loaded & (HEAVY | {"typer", "rich"})


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["compare", "--help"]], ids=str)
def test_help_is_light(arguments):
    """Asking for help loads none of the heavy packages, so it answers at once."""
    run = "import runpy; runpy.run_module('divergence', run_name='__main__', alter_sys=True)"
    loaded = loaded_after(f"sys.argv = ['divergence', *{arguments}]; {run}")
    assert not loaded & HEAVY


def test_the_list_of_commands_imports_none_of_them():
    """``divergence --help`` needs no options, no types of runs, and nothing to decode them."""
    program = (
        "import sys\nfrom divergence.cli.main import app\n"
        "try:\n    app(['--help'], prog_name='divergence')\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    ours = {name.removeprefix("divergence.") for name in loaded if name.startswith("divergence.")}
    needed = ("cli.answers", "cli.main", "cli.streams", "domain", "errors", "words")
    listed = {name for name in ours if name.split(".")[0] == "domains"}
    assert ours - listed == {"cli", *needed}
    assert "msgspec" not in loaded


@pytest.mark.parametrize("verdict", MAX_LOADED)
def test_a_plain_comparison_loads_what_it_needs(verdict, llama, tmp_path):
    """Two runs without operators, ranks or a probe, with equal bits and with other kernels of
    attention: nothing of what does not apply, and no more modules than ever."""
    other = {} if verdict == "identical" else {"attn_implementation": "sdpa"}
    a = capture(llama, out=tmp_path / "a", prompts=["Snow fell"], max_new_tokens=1, probe=False)
    capture(llama, like=a, out=tmp_path / "b", probe=False, **other)
    program = (
        "import sys, divergence\n"
        f"report = divergence.compare({str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r})\n"
        "print(report.verdict.kind)\n"
        "print(*(name for name in sys.modules if name.startswith(('divergence', 'torch'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    kind, names = done.stdout.splitlines()
    assert kind == verdict
    assert "torch" not in names.split()
    loaded = [name for name in names.split() if _has_code(name)]
    for name in UNASKED:
        assert (PACKAGE / "analyses" / f"{name}.py").is_file()
        assert f"divergence.analyses.{name.replace('/', '.')}" not in loaded, name
    for room in ("recording", "cli", "report", "experiments", "gate", "ops"):
        assert not [name for name in loaded if name.startswith(f"divergence.{room}.")], room
    said = r"divergence\.(analyses|domains)(\.\w+)?|divergence\.domain"
    asked = {name for name in loaded if re.fullmatch(said, name)} | {*places().values()}
    loaded = [name for name in loaded if name not in asked]
    most = MAX_LOADED[verdict]
    assert len(loaded) <= most, (
        f"{len(loaded)} modules, {most} allowed: does an analysis apply (its __init__) where "
        f"its find has nothing to find? {loaded}"
    )


def _has_code(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return bool(file.read_text(encoding="utf-8").strip())
