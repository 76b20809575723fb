"""A run that holds another run's results is not taken for a machine's own."""

import pytest

from divergence import RecordOptions, Run, capture, compare, pack, unpack
from divergence.errors import RunExistsError

BLOCK = "model.layers.1"
SITE = f"{BLOCK}.mlp/aten.mul:out"


@pytest.fixture(scope="module")
def operators(llama, tmp_path_factory):
    """A run of one forward with a block's operators."""
    return capture(
        llama,
        out=tmp_path_factory.mktemp("substitution") / "a",
        prompts=["one two"],
        max_new_tokens=1,
        sites=["blocks", f"ops@{BLOCK}"],
    )


@pytest.mark.slow
def test_a_run_with_results_of_another_says_so(operators, bless, invoke, tmp_path, answer):
    """In preflight, in the heading of every report, and it becomes no golden."""
    b = capture(
        like=operators, out=tmp_path / "b", recording=RecordOptions(substitutes={SITE: operators})
    )
    said = f"{SITE} from {operators.manifest.id}"
    report = compare(operators, b)
    assert report.candidate.substitutes == [said]
    line = next(line for line in report.preflight if line.check == "substituted operators")
    assert (line.status, line.reference, line.candidate) == ("differs", "none", said)
    again = ("capture", "--like", operators.path, "-o", "d", "--substitute")
    for words in (
        ("compare", operators.path, b.path, "-v"),
        ("inspect", b.path),
        (*again, f"{SITE}={operators.path}"),
    ):
        shown = f"SUBSTITUTED from run {operators.manifest.id[:8]}: {SITE}"
        assert shown in " ".join(invoke(*words)[1].split())
    assert "holds results of another run" in bless(tmp_path / "golden", b.path)
    healthy = answer(operators)
    assert "substituted operators" not in [line.check for line in healthy.preflight]


@pytest.mark.parametrize("kind", ["", ".tar"])
def test_a_run_whose_results_are_used_is_not_replaced(operators, tmp_path, kind):
    """Nor the directory in which it would be gathered: it is read while the new one is written."""
    healthy = (
        pack(operators, out=tmp_path / "a.tar") if kind else unpack(operators, out=tmp_path / "a")
    )
    for out in [healthy.path] + [tmp_path / "a.tar.partial"] * bool(kind):
        if not out.exists():
            unpack(operators, out=out)
        with pytest.raises(RunExistsError, match="is the run that --substitute reads"):
            capture(
                like=operators,
                out=tmp_path / f"a{kind}",
                force=True,
                recording=RecordOptions(substitutes={SITE: out}),
            )
        assert Run.open(out).verify() == []


def test_a_substitution_that_met_no_operator_is_said(operators, tmp_path):
    """No operators were recorded in this capture, so none could be replaced."""
    notes = []
    capture(
        like=operators,
        out=tmp_path / "b",
        sites=["blocks"],
        recording=RecordOptions(substitutes={SITE: operators}),
        progress=lambda event, done, total, text: notes.append(text),
    )
    assert "no operator was met whose result was to be replaced" in notes
