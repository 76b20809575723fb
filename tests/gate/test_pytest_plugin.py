"""The plugin of pytest, run by pytest in a folder of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from divergence import capture, check

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """A run, the same again, one of another dtype and one with a fault."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"prompts": ["Snow fell"], "max_new_tokens": 1, "probe": False}
    capture(llama, out=folder / "one", **options)
    capture(llama, out=folder / "two", **options)
    capture(llama, out=folder / "half", dtype="float16", store="sketch", **options)
    plant = "model.layers.1.mlp.down_proj:out=scale:1.5"
    capture(llama, out=folder / "faulty", plants=[plant], **options)
    return folder


@pytest.fixture
def project(pytester, monkeypatch):
    """``project(body)`` writes a test; ``pytester.runpytest_inprocess`` runs it with the plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p divergence.pytest_plugin -p no:cacheprovider")

    def write(body: str) -> None:
        pytester.makepyfile(f"def test_it(divergence_golden):\n    {body}\n")

    return write


@pytest.mark.slow
def test_a_golden_is_blessed_checked_and_chosen(project, pytester, runs):
    """First there is none; blessed, the next run passes; a fault fails with the report."""
    project(f"divergence_golden('llama', run={str(runs / 'one')!r})")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*there is no golden in *goldens?llama*", "*--divergence-bless*"])

    result = pytester.runpytest_inprocess("--divergence-bless")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*= divergence =*", "*BLESSED: *llama?cpu-*.zip is the golden*"])
    (golden,) = (pytester.path / "goldens" / "llama").iterdir()

    project(f"divergence_golden('llama', run={str(runs / 'two')!r})")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*passed: held against *{golden.name}, of 1 there: the same *"])

    project(f"divergence_golden('llama', run={str(runs / 'faulty')!r})")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["golden: *", "FAILED: 1 of *", "*verdicts: *", "*FAILED: held against*"]
    )

    result = pytester.runpytest_inprocess("--divergence-bless")
    result.stdout.fnmatch_lines(["*cannot become a golden*planted faults*"])


@pytest.mark.slow
def test_a_model_is_captured_and_kept_as_a_sketch(project, pytester, llama):
    """With the options of capture."""
    project(
        f"divergence_golden('llama', model={str(llama)!r}, prompts='Snow fell', max_new_tokens=1)"
    )
    pytester.runpytest_inprocess("--divergence-bless").assert_outcomes(passed=1)
    (golden,) = (pytester.path / "goldens" / "llama").iterdir()
    assert golden.stat().st_size < 100_000
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    # blessed again, it says how the two differ
    result = pytester.runpytest_inprocess("--divergence-bless")
    result.stdout.fnmatch_lines(["*BLESSED*", "old to new*identical*", "IDENTICAL*"])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("divergence_golden('../x', run='a')", "is no name of a golden"),
        ("divergence_golden('x')", "needs a run, or a model"),
        ("divergence_golden('x', run='a', prompts='b')", "needs a run, or a model"),
        ("divergence_golden('x', run='gone')", "gone"),
    ],
)
def test_wrong_calls_say_what_to_do(project, pytester, call, told):
    """A golden's name stays in its folder."""
    project(call)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{told}*"])


def test_the_golden_that_fits_best_is_chosen_and_said(runs, bless, tmp_path):
    """The same dtype before the same device; what fits less is said. A run is no folder of them."""

    def chosen():
        result = check(tmp_path, runs / "two")
        return Path(result.report.reference.path).name, result.notes[0]

    bless(tmp_path / "a-half.zip", runs / "half")
    name, note = chosen()
    assert name == "a-half.zip" and "of another dtype: none here is cpu-" in note
    bless(tmp_path / "b.zip", runs / "half", "--keep-previous")
    bless(tmp_path / "b.zip", runs / "one", "--keep-previous")
    (tmp_path / "README.md").write_text("not a golden")
    name, note = chosen()
    assert name == "b.zip" and note.endswith("of 2 there: the same device and dtype")
    assert not [note for note in check(runs / "one", runs / "two").notes if "golden" in note]


def test_starting_pytest_stays_fast():
    """The plugin imports nothing heavy, nor anything of ours but the package."""
    program = (
        "import sys, divergence.pytest_plugin\n"
        "print(*(n for n in sys.modules if n.partition('.')[0] in "
        "('torch', 'transformers', 'numpy', 'msgspec', 'rich', 'divergence')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["divergence", "divergence.pytest_plugin"]
