"""compare --html, --svg, --png: a page or a picture beside the answer."""

import gzip
import json
import re
import shutil
import sys
from base64 import b64decode
from pathlib import Path

import pytest

from divergence import capture, compare


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory) -> tuple[Path, Path]:
    """A small run, and its repetition with a fault in block 1."""
    folder = tmp_path_factory.mktemp("runs")
    a, b = folder / "a", folder / "b"
    capture(llama, out=a, prompts=["Snow fell", "Rain"], max_new_tokens=3, probe=False)
    capture(like=a, out=b, plants=["model.layers.1.mlp.down_proj:out=scale:1.5"], probe=False)
    return a, b


def test_a_page_is_written_beside_the_answer(runs, invoke, tmp_path):
    """The terminal says what it says without; the page has both machines, and the prompts."""
    code, out, err = invoke("compare", *runs, "--html", "report.html", "-q")
    assert code == 0, err
    assert out.startswith("DIVERGED")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Snow fell" in page
    for part in ("blocks", "tokens", "settings", "machines", "map-tokens", "map-steps"):
        assert f'id="{part}"' in page, part
    packed = re.search(r'id="attachment">([^<]*)<', page)[1]
    report = json.loads(gzip.decompress(b64decode(packed)))
    assert report["verdict"]["kind"] == "localized"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_python_writes_the_same_page(runs, invoke, tmp_path):
    """``Report.to_html`` is what the option calls."""
    assert invoke("compare", *runs, "--html", "one.html", "-q")[0] == 0
    report = compare(*runs)
    assert report.to_html(tmp_path / "two.html") == tmp_path / "two.html"
    assert report.html() == (tmp_path / "two.html").read_text(encoding="utf-8")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_the_error_of_each_token(runs):
    """Block by block, in floors; the blocks whose bits are equal have none."""
    report = compare(*runs)
    page = report.html()
    assert f"tokens of prompt {report.verdict.onset.sample}" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    figure = data["figures"]["map-tokens"]
    assert figure["rows"] == [f"model.layers.{number}" for number in range(3)]
    clean, faulty, _ = figure["values"]
    assert set(clean) == {0.0} and min(faulty) > 1
    (site,) = (
        one
        for one in report.sites
        if one.site == "model.layers.1:out"
        and one.pass_ == "anchored"
        and one.step == 0
        and one.sample == report.verdict.onset.sample
    )
    assert max(faulty) * site.floor == pytest.approx(site.token_rel_l2_max, rel=0.01)


def test_runs_that_are_gone_leave_a_page(runs, tmp_path):
    """What only they hold is left out, and the page says so."""
    a, b = tmp_path / "a", tmp_path / "b"
    for source, target in zip(runs, (a, b), strict=True):
        shutil.copytree(source, target)
    report = compare(a, b)
    shutil.rmtree(b)
    shutil.rmtree(a)
    shutil.copytree(runs[1], a)
    page = report.html()
    assert "holds another run now" in page and "could not be opened again" in page
    assert 'id="machines"' not in page


def test_check_writes_the_policys_answer_first(runs, invoke, tmp_path):
    """PASSED or FAILED with each rule that is not met, then the report."""
    golden, _ = runs
    new = tmp_path / "new"
    capture(like=golden, out=new, probe=False)
    assert invoke("check", golden, new, "--html", "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.index(">PASSED</p>") < page.index('id="verdict-1"') < page.index('id="blocks"')
    assert invoke("check", golden, new, "--bless", "--html", "page.html")[0] == 2


def test_check_writes_a_page_where_it_had_to_stop(runs, invoke, tmp_path, llama):
    """What differs is what one sends."""
    golden, _ = runs
    other = tmp_path / "other"
    capture(llama, out=other, prompts=["Something else"], max_new_tokens=1, probe=False)
    assert invoke("check", golden, other, "--html", "stopped.html")[0] == 2
    page = (tmp_path / "stopped.html").read_text(encoding="utf-8")
    title = re.search(r"<title>STOPPED: (.*?) · ", page)[1]
    assert page.casefold().count(title.casefold()) > 1, "it is the answer's own sentence"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a", "b", "--html", "nowhere/x.html"), "there is no folder nowhere"),
        (("a", "b", "c", "--svg", "x.svg"), "--svg and --png are the picture of two runs"),
        (("a", "b", "--svg", "nowhere/x.svg"), "there is no folder nowhere"),
        (("a", "b", "--png", "nowhere/x.png"), "there is no folder nowhere"),
    ],
)
def test_bad_input_is_told_before_the_work(words, said, invoke):
    """Nothing was read yet."""
    code, out, err = invoke("compare", *words)
    assert (code, out) == (2, "") and said in err


@pytest.mark.slow
def test_a_picture_is_written_beside_the_answer(runs, invoke, tmp_path):
    """As Python draws it; the answer is what it is without."""
    pytest.importorskip("resvg_py", reason="the extra `plot` is not installed")
    code, out, err = invoke("compare", *runs, "--svg", "e.svg", "--png", "e.png", "-q")
    assert code == 0 and out.startswith("DIVERGED"), err
    picture = compare(*runs).plot()
    assert (tmp_path / "e.svg").read_text(encoding="utf-8") == picture.svg + "\n"
    assert (tmp_path / "e.png").read_bytes() == picture.png()


def test_a_missing_extra_is_told_before_the_work(invoke, monkeypatch):
    """Neither run was looked for."""
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    code, out, err = invoke("compare", "a", "b", "--png", "e.png")
    assert (code, out) == (2, "")
    assert 'pip install "divergence-debug[plot]"' in err


@pytest.mark.whole
def test_without_a_curve_the_answer_stands(invoke, tmp_path):
    """Runs of a suite have no blocks: the report is printed, and the exit code says that the
    picture is not there."""
    for name in "ab":
        words = "--sites", "rms_norm.float32.odd*", "--no-probe", "-q"
        assert invoke("capture", "suite:quick", "-o", name, *words)[0] == 0
    code, out, err = invoke("compare", "a", "b", "--svg", "e.svg")
    assert code == 2 and "IDENTICAL" in out and "no curve to draw" in err
    assert not (tmp_path / "e.svg").exists()
