"""Reproducers: one operator in a folder that runs without this package."""

import ast
import errno
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from divergence import Run, replay, repro
from divergence.errors import RunExistsError, RunWriteError, UsageError
from divergence.ops.reproducer import FILES
from divergence.recording.machine import collect_environment
from divergence.run.captured import CapturedTensor
from divergence.run.record import Call, Operand
from divergence.run.writer import RunWriter
from tests import by_hand

BARE = """
import json, os, runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("divergence", "transformers", "msgspec", "typer", "xxhash"):
            raise ImportError("not in a bare environment: " + name)

sys.meta_path.insert(0, Absent())
import safetensors.torch, torch
for line in sys.stdin:
    folder, scripts = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    for script in scripts:
        sys.argv = [script]
        print("==", script)
        runpy.run_path(script, run_name="__main__")
    sys.exit()
"""
"""Only torch and safetensors can be imported, and what they need themselves: once, by the process
whose forks run scripts."""


@pytest.fixture(scope="module")
def bare() -> Iterator[Callable[[list[Path], Path], str]]:
    """``bare(folders, tmp_path)``: what their scripts print in another directory; it fails where
    one does not exit with 0."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", BARE], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def run(folders: list[Path], tmp_path: Path) -> str:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        scripts = [str(folder / "repro.py") for folder in folders]
        print(json.dumps([str(elsewhere), scripts]), file=process.stdin, flush=True)
        status, said = int(process.stdout.readline()), (elsewhere / "stderr").read_text()
        assert status == 0 and not said, said
        return (elsewhere / "stdout").read_text()

    yield run
    process.communicate(timeout=60)


X = (torch.arange(24.0).reshape(4, 6) - 11) / 7


@pytest.mark.slow
def test_it_runs_in_a_bare_environment(record, tmp_path, bare):
    """Bit for bit what was recorded, with a transposed weight too, and how far it is off."""
    weight = torch.linspace(-1, 1, 30).reshape(5, 6)
    run = record(lambda: X @ weight.t())
    made = repro(run, site="block/aten.mm:out", out=tmp_path / "bug")
    assert sorted(made.files) == sorted(FILES)
    printed = bare([made.path], tmp_path)
    assert "from the expected output: max abs 0, rel L2 0, max 0 ulp, 0 of 20 elements" in printed
    found = made.from_truth["out"]
    assert (
        f"from the float64 truth : max abs {found.max_abs:.6g}, rel L2 {found.rel_l2:.6g}"
        in printed
    )
    assert f"max {found.max_ulp} ulp" in printed
    assert f"torch {torch.__version__}" in printed
    truth = load_file(made.path / "truth.safetensors")["out"]
    torch.testing.assert_close(truth, X.double() @ weight.double().t(), rtol=1e-15, atol=1e-15)


def _foreach():
    torch._foreach_mul_([X.clone(), X.clone() + 1], 2.0)


ODD = {
    "aten.masked_fill_": lambda: X.clone().masked_fill_(X > 0, -math.inf),
    "aten.cat": lambda: torch.cat([X, X.flip(0).t().reshape(4, 6)], 1),
    "aten.index": lambda: X[:, torch.tensor([2, 0])],
    "aten.mul": lambda: torch.complex(X, -X) * (1j * torch.complex(X, X)),
    "aten._to_copy": lambda: X.to(torch.float8_e4m3fn),
    "aten.add": lambda: X[0].expand(4, 6) + X.reshape(-1).unfold(0, 6, 2)[:4],
    "aten.topk": lambda: X.to(torch.bfloat16).topk(3),
    "aten.sum": lambda: torch.empty(0, 3).sum(0, dtype=torch.float64),
    "aten._foreach_mul_": _foreach,
    "aten.exp": lambda: torch.tensor(3.0).exp(),
    "aten.nonzero": lambda: (X > 0).nonzero(),
    "aten.abs": lambda: X.to(torch.float8_e5m2).float().abs(),
}


@pytest.mark.slow
def test_odd_operators(record, tmp_path, bare):
    """In place, lists, complex, 8-bit, integer, empty, scalar and overlapping operands."""
    run = record(lambda: [function() for function in ODD.values()])
    for name in ODD:
        made = repro(run, site=f"block/{name}", out=tmp_path / "bug" / name)
        assert made.from_truth["out"].rel_l2 < 0.1
    printed = bare([tmp_path / "bug" / name for name in ODD], tmp_path)
    parts = printed.split("== ")[1:]
    assert len(parts) == len(ODD)
    for part in parts:
        assert "from the expected output: max abs 0, rel L2 0" in part, part
        assert "shapes" not in part


def test_the_worst_call_beside_another_run(record, tmp_path):
    """The other machine's figures stand in the report, of the step where it differs most."""
    run = record(lambda: X @ X.t())
    again = replay(run, out=tmp_path / "again", device="cpu", label="machine B")
    other = by_hand.rewritten(again, tmp_path / "other", lambda record, tensor: tensor * 1.5)
    made = repro(run, site="block/aten.mm:out", against=other, out=tmp_path / "bug")
    assert made.against["out"].rel_l2 == pytest.approx(0.5, rel=1e-6)
    report = (made.path / "report.md").read_text()
    assert made.title.startswith("aten.mm.default (float32 4x6, float32 6x4): machine B differs")
    for text in ("machine B", "here", "`self`", "(1, 6)", "## Environment", "python repro.py"):
        assert text in report
    assert "0.5" in report
    # both values, where they are farthest apart
    assert re.search(r"; at \[\d, \d\] here \S+, machine B \S+, float64 \S+$", made.title)
    here, there = re.findall(r"(?:here|machine B) (-?[\d.]+)", made.title.rpartition("; at ")[2])
    assert float(there) == pytest.approx(1.5 * float(here), rel=1e-5)
    assert "`here` " in report.splitlines()[0] and "`machine B` " in report.splitlines()[0]


def test_the_title_says_what_the_call_is_given(record, tmp_path):
    """A right operator with a wrong argument: its own error is not what matters."""
    made = repro(
        record(lambda: X * 0.5),
        site="block/aten.mul:out",
        out=tmp_path / "bug",
        called="other=0.5 (A 0.25)",
    )
    assert made.title.endswith("called with other=0.5 (A 0.25)")
    report = (made.path / "report.md").read_text()
    assert "`other=0.5 (A 0.25)`" in report.splitlines()[0]


def test_a_pair_with_other_inputs_is_refused(record, tmp_path):
    """Its result is no fault of its operator: the message says what differs and what to do."""
    run = record(lambda: X @ X.t())
    other = record(lambda: (X * 1.5) @ X.t(), path=tmp_path / "other")
    with pytest.raises(UsageError) as refused:
        repro(run, site="block/aten.mm:out", against=other, out=tmp_path / "bug")
    text = str(refused.value)
    assert "inputs differ at block/aten.mm: this reproducer would blame the operator" in text
    assert "self differs by rel L2 0.5" in text
    assert f"divergence replay {run.path} -o OTHER" in text
    assert not (tmp_path / "bug").exists()


def test_a_pair_with_other_scalars_is_refused(record, tmp_path):
    """The scale of the one is not the other's, and both are named."""
    run = record(lambda: X * 0.125)
    other = record(lambda: X * 0.13125, path=tmp_path / "other")
    with pytest.raises(UsageError, match=r"other=0\.13125 there, 0\.125 here"):
        repro(run, site="block/aten.mul:out", against=other, out=tmp_path / "bug")
    alpha = record(lambda: torch.add(X, X, alpha=2), path=tmp_path / "alpha")
    plain = record(lambda: torch.add(X, X), path=tmp_path / "plain")
    with pytest.raises(UsageError, match="alpha=2 there, 1 here"):
        repro(plain, site="block/aten.add:out", against=alpha, out=tmp_path / "bug")


def test_a_pair_with_other_weights_is_refused(record, tmp_path):
    """Also where no side stored them: their digests tell."""
    one, two = torch.linspace(-1, 1, 36).reshape(6, 6), torch.linspace(-1, 2, 36).reshape(6, 6)
    run = record(lambda: (X @ one) @ X.t(), weights={"w": one})
    same = record(lambda: (X @ one) @ X.t(), weights={"w": one}, path=tmp_path / "same")
    other = record(lambda: (X @ two) @ X.t(), weights={"w": two}, path=tmp_path / "other")
    made = repro(run, site="block/aten.mm#2:out", against=same, out=tmp_path / "bug")
    assert made.against["out"].rel_l2 == 0
    with pytest.raises(UsageError, match="inputs differ"):
        repro(run, site="block/aten.mm#2:out", against=other, out=tmp_path / "bug2")


def test_a_run_with_the_very_same_inputs_needs_no_replay(record, tmp_path):
    """Two captures whose operator was given the same bits are a pair."""
    run = record(lambda: X @ X.t())
    other = record(lambda: X @ X.t(), path=tmp_path / "other")
    made = repro(run, site="block/aten.mm:out", against=other, out=tmp_path / "bug")
    assert made.against["out"].rel_l2 == 0
    assert made.notes == ()


def test_a_truth_can_be_given(record, tmp_path):
    """A float64 replay of the run; any other run is refused."""
    run = record(lambda: X @ X.t())
    truth = replay(run, out=tmp_path / "truth", truth=True)
    given = repro(run, site="block/aten.mm:out", truth=truth, out=tmp_path / "a")
    computed = repro(run, site="block/aten.mm:out", out=tmp_path / "b")
    assert given.from_truth == computed.from_truth
    assert "in a run of its own" in (given.path / "report.md").read_text()
    again = replay(run, out=tmp_path / "again", device="cpu")
    with pytest.raises(UsageError, match="is no float64 replay of"):
        repro(run, site="block/aten.mm:out", truth=again, out=tmp_path / "c")


def test_without_float64(record, tmp_path):
    """There is no truth then: the script and the report do without, and say so."""
    with torch.library._scoped_library("divtest2", "DEF") as library:

        def refuse(x):
            if x.dtype != torch.float32:
                raise NotImplementedError("float32 alone")
            return x + 1

        library.define("second(Tensor x) -> Tensor")
        library.impl("second", refuse, "CPU")
        run = record(lambda: torch.ops.divtest2.second(X), path=tmp_path / "second")
        with pytest.raises(UsageError, match="only on request"):
            repro(run, site="block/divtest2.second:out", out=tmp_path / "bug")
        made = repro(
            run, site="block/divtest2.second:out", out=tmp_path / "bug", operators=["divtest2"]
        )
    assert "truth.safetensors" not in made.files
    assert made.notes == ("no truth: divtest2.second has no float64 kernel on cpu",)
    script = (made.path / "repro.py").read_text()
    assert "import here the package that registers torch.ops.divtest2" in script
    assert "no float64 result" in (made.path / "report.md").read_text()


def test_sites_that_are_no_operator(record, tmp_path):
    """A module's operators are listed; a slip is answered with the nearest names."""
    run = record(lambda: torch.relu(X @ X.t()))
    with pytest.raises(UsageError) as module:
        repro(run, site="block:out", out=tmp_path / "bug")
    assert "is a module" in str(module.value)
    assert "block/aten.mm:out, block/aten.relu:out" in str(module.value)
    with pytest.raises(UsageError, match=r"did you mean block/aten\.relu:out"):
        repro(run, site="block/aten.rela:out", out=tmp_path / "bug")
    with pytest.raises(UsageError, match="sample/step with it: 0/0"):
        repro(run, site="block/aten.mm:out", step=3, out=tmp_path / "bug")
    assert not (tmp_path / "bug").exists()


def test_what_cannot_run_alone_is_said(record, tmp_path):
    """Random numbers, and weights that were not stored."""
    weight = torch.randn(6, 6)
    run = record(lambda: torch.rand_like(X @ weight), weights={"w": weight})
    with pytest.raises(UsageError, match="draws random numbers"):
        repro(run, site="block/aten.rand_like:out", out=tmp_path / "bug")
    with pytest.raises(UsageError, match=r"its weight was not stored .*\n.*where: w"):
        repro(run, site="block/aten.mm:out", out=tmp_path / "bug")


def test_the_folder(record, tmp_path):
    """Nothing is overwritten without --force, and with it only a reproducer."""
    run = record(lambda: X @ X.t())
    made = repro(run, site="block/aten.mm:out", out=tmp_path / "bug")
    with pytest.raises(RunExistsError, match="exists already"):
        repro(run, site="block/aten.mm:out", out=made.path)
    repro(run, site="block/aten.mm:out", out=made.path, force=True)
    (made.path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunExistsError, match=r"holds thesis\.txt"):
        repro(run, site="block/aten.mm:out", out=made.path, force=True)
    with pytest.raises(RunExistsError, match=r"holds manifest\.json"):
        repro(run, site="block/aten.mm:out", out=run.path, force=True)


def test_a_full_disk_is_an_error_of_the_disk(record, tmp_path, monkeypatch):
    """It names the file, and what is there is no half of one."""
    run = record(lambda: X @ X.t())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("divergence.output.os.replace", full)
    with pytest.raises(RunWriteError, match="No space left"):
        repro(run, site="block/aten.mm:out", out=tmp_path / "bug")
    assert list((tmp_path / "bug").iterdir()) == []


@pytest.mark.slow
def test_nothing_in_a_run_becomes_code(tmp_path, bare):
    """Names, sites, labels and scalars of a stranger's run are literals in the script."""
    evil = '"""+__import__("os").system("x")+"""\\'
    call = Call(
        operator="aten.add.Tensor",
        arguments={"self": {"tensor": 0}, "other": {"tensor": 1}, "alpha": 1},
        operands=(
            Operand(site="m/aten.add:in.self", shape=(2,), dtype="float32", via=(evil,)),
            Operand(site="m/aten.add:in.other", shape=(2,), dtype="float32"),
        ),
        source=evil,
    )
    site = f"{evil}/aten.add:out"
    run = _by_hand(tmp_path / "run", call, site, label=evil)
    made = repro(run, site=site, out=tmp_path / "bug")
    tree = ast.parse((made.path / "repro.py").read_text())
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "__import__"]
    assert "differ" in bare([made.path], tmp_path)
    for change in ({"dtype": "float32), __import__('os')"}, {"shape": (3,)}):
        wrong = msgspec.structs.replace(call.operands[0], **change)
        bad = msgspec.structs.replace(call, operands=(wrong, call.operands[1]))
        with pytest.raises(UsageError):
            repro(_by_hand(tmp_path / f"{change.keys()}", bad, site), site=site, out=tmp_path / "y")
    for number in (7, -1, "x", 0.0, True):
        bad = msgspec.structs.replace(call, arguments={"self": {"tensor": number}})
        with pytest.raises(UsageError, match="its arguments cannot be read"):
            repro(_by_hand(tmp_path / f"n{number}", bad, site), site=site, out=tmp_path / "z")


INJECTED = [
    "x=x['x'], eps=__import__('os').system('touch pwned')) or (lambda **k: 0)(k",
    "eps=1)\nimport os\n(",
    "eps = 1, *",
    "import os; x",
    "x.__class__",
    "eps\u2028import os",
    "",
]


@pytest.mark.parametrize("name", INJECTED, ids=ascii)
@pytest.mark.parametrize("operator", ["suite.half", "aten.add.Tensor"])
def test_an_argument_s_name_becomes_no_code(operator, name, tmp_path, own_operators):
    """It is the operator's own, or the reproducer is refused, also where nothing is computed."""
    one = SimpleNamespace(run=_suite_run, truth=_suite_truth)
    own_operators({"suite.half": one})
    first = "x" if operator == "suite.half" else "self"
    names = {first: {"tensor": 0}, "eps" if first == "x" else "other": 0.25}
    call = Call(
        operator=operator,
        arguments=names,
        operands=(Operand(site="m/aten.add:in.self", shape=(2,), dtype="float32"),),
    )
    site = "half/suite.half:out"
    truth = replay(_by_hand(tmp_path / "good", call, site), out=tmp_path / "t", truth=True)
    for key in (first, None):  # in place of a name of its own, and beside them
        arguments = {(name if one == key else one): value for one, value in names.items()}
        bad = msgspec.structs.replace(call, arguments=arguments | {name: 1})
        run = _by_hand(tmp_path / f"bad{key}", bad, site)
        for given in (None, truth):
            with pytest.raises(UsageError, match="has no argument"):
                repro(run, site=site, out=tmp_path / "bug", truth=given)
        with pytest.raises(UsageError, match="has no argument"):
            replay(run, out=tmp_path / "again", device="cpu", force=True)
    assert not (tmp_path / "bug").exists()


@pytest.mark.slow
def test_a_report_has_no_markup_of_the_run_s(tmp_path):
    """Labels, versions, variables and ports: no fence, link, picture, mention, cell or HTML."""
    evil = "a`![x](http://evil/p.png)|<img src=x>\n```\n# b @team \u202e"
    call = Call(
        operator="aten.add.Tensor",
        arguments={"self": {"tensor": 0}, "other": {"tensor": 1}, "alpha": 1},
        operands=tuple(
            Operand(site=f"m/aten.add:in.{name}", shape=(2,), dtype="float32")
            for name in ("self", "other")
        ),
        source=evil,
    )
    site = "m/aten.add:out"
    run = _by_hand(tmp_path / "run", call, site, label=evil)
    run.manifest.environment.versions[evil] = evil
    run.manifest.environment.driver = evil
    made = repro(run, site=site, out=tmp_path / "bug")
    text = (made.path / "report.md").read_text()
    outside = re.sub(r"`[^`\n]*`|<code>[^<]*</code>", "", text.replace("```", ""))
    for word in ("evil", "img", "@team", "\u202e", "\n# b"):
        assert word not in outside
    assert text.count("```") == 2
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {3, 6, 8}


SCALE = 0.5


def _half(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def _suite_run(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Half of x, and a root."""
    return _half(x) + math.sqrt(eps)


def _suite_truth(x: torch.Tensor, eps: float) -> torch.Tensor:
    return 0.5 * x + eps**0.5


@pytest.mark.slow
def test_an_operator_of_a_suite_brings_its_source(tmp_path, own_operators, bare):
    """The function, what it calls and its constants are pasted; others are refused."""
    one = SimpleNamespace(run=_suite_run, truth=_suite_truth)
    odd = SimpleNamespace(run=lambda x, eps: pytest.approx(x), truth=_suite_truth)
    own_operators({"suite.half": one, "suite.odd": odd})
    call = Call(
        operator="suite.half",
        arguments={"x": {"tensor": 0}, "eps": 0.25},
        operands=(Operand(site="m/aten.add:in.self", shape=(2,), dtype="float32"),),
    )
    run = _by_hand(tmp_path / "run", call, "half/suite.half:out")
    again = replay(run, out=tmp_path / "again", device="cpu")
    assert torch.equal(again.read(again.records[0]), torch.tensor([1.0, 1.5]))
    made = repro(run, site="half/suite.half:out", out=tmp_path / "bug")
    script = (made.path / "repro.py").read_text()
    assert "def _half(x" in script and "SCALE = 0.5" in script and "import math" in script
    assert "(2,) torch.float32" in bare([made.path], tmp_path)
    strange = msgspec.structs.replace(call, operator="suite.odd")
    run = _by_hand(tmp_path / "odd", strange, "half/suite.odd:out")
    with pytest.raises(UsageError):
        repro(run, site="half/suite.odd:out", out=tmp_path / "odd-bug")


def _by_hand(path: Path, call: Call, site: str, label: str = "here") -> Run:
    """A run of one call on two small vectors."""
    values = by_hand.manifest(
        id="c" * 32,
        model={"task": "operators", "num_parameters": 0},
        prompts=[[0]],
        settings={"max_new_tokens": 0},
        environment=collect_environment("cpu", label=label),
        plan={"sites": ["ops@m"]},
    )
    tensor = torch.tensor([1.0, 2.0])
    inputs = [(f"m/aten.add:in.{name}", tensor, None) for name in ("self", "other")]
    with RunWriter(path, values) as writer:
        for order, (name, value, made_by) in enumerate([*inputs, (site, 2 * tensor, call)]):
            place = {"pass_": "free", "sample": 0, "step": 0, "site": name, "order": order}
            writer.put(CapturedTensor(value), call=made_by, **place)
    return Run.open(path)
