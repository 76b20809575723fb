"""A short piece of benchmarks/fuzz.py: damaged runs end in an answer or in the tool's own error."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import _fuzz_forms, fuzz

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks/fuzz.py"


@pytest.mark.slow
def test_stored_runs_that_were_damaged(tmp_path, monkeypatch):
    """Of each format version; another choice of runs makes other cases than ``--case``."""
    monkeypatch.setattr("logging.raiseExceptions", False)
    sources = fuzz.Sources(fuzz.stored_runs())
    assert len(sources.runs) >= 4
    codes = []
    for number in range(25):
        code, problem = fuzz.run_case(number, sources, tmp_path / "case", None)
        assert problem is None, f"case {number}: {problem}"
        codes.append(code)
    assert {0, 2} <= set(codes)  # some are still runs, most are none


@pytest.mark.slow
@pytest.mark.whole
def test_foreign_forms_that_were_damaged(tmp_path, monkeypatch):
    """What other programs write ends in an answer or an error, too; whole, each form is read."""
    monkeypatch.setattr("logging.raiseExceptions", False)
    forms = _fuzz_forms.build_forms(tmp_path / "forms", kinds=("import",))
    (tmp_path / "map.toml").write_text(_fuzz_forms.MAP)
    imported = {name: path for name, path in forms.items() if name.startswith("import")}
    for name, path in imported.items():
        names = ["--map", f"{tmp_path}/map.toml"] if name.endswith("files") else []
        out = tmp_path / name.replace(" ", "-")
        code, text = fuzz.call(["import", str(path), "-o", f"{out}-run", *names])
        assert code == 0, f"{name}: {text}"
    for number in range(40):
        code, problem = fuzz.run_case(number, fuzz.Sources({}, forms), tmp_path / "case", None)
        assert problem is None, f"case {number}: {problem}"


def test_a_case_is_the_same_every_time(tmp_path):
    """Nothing but its number decides what is damaged."""
    source = fuzz.stored_runs()["run-v4"]
    damaged = []
    for name in ("a", "b"):
        folder = tmp_path / name
        subprocess.run(["cp", "-r", source, folder], check=True)
        fuzz.damage(folder, random.Random(7))
        damaged.append({path.name: path.read_bytes() for path in folder.rglob("*.*")})
    assert damaged[0] == damaged[1]


@pytest.mark.slow
def test_every_kind_of_run_for_a_while():
    """Also behind a web server, in processes of their own that may hang or crash."""
    done = subprocess.run(
        [sys.executable, PROGRAM, "--seconds", "30", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
