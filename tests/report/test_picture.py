"""Pictures by themselves: the page's curves with their colours, and what a notebook shows."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from divergence import DiffResult
from divergence.comparison.result import TruthDiff
from divergence.errors import UsageError
from divergence.run.reader import Run

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>\x1b[31m\"'><img src=x onerror=alert(1)> &amp; ]]>"


def drawn(report) -> ElementTree.Element:
    return ElementTree.fromstring(report.plot().svg)


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text for node in root.iter(f"{SVG}text")]


def test_a_picture_is_a_whole_file(reports):
    """It is XML, says what it shows, and needs no style sheet, no script and no other file."""
    report = reports.make_long_report()
    root = drawn(report)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    title = "DIVERGED: the error is made in model.layers.30.mlp.down_proj"
    assert root.find(f"{SVG}title").text == texts(root)[0] == title
    assert root.get("aria-label").startswith(f"{title}. Difference between A and B")
    assert "on a logarithmic axis" in root.find(f"{SVG}desc").text
    allowed = {"svg", "g", "title", "desc", "rect", "text", "path", "circle", "line"}
    for node in root.iter():
        assert node.tag.removeprefix(SVG) in allowed
        assert not {"class", "id", "href", "onload"} & set(node.attrib)
        assert "var(" not in "".join(node.attrib.values())
    assert root.find(f"{SVG}rect").get("fill") == "#ffffff"


def test_it_shows_what_the_page_shows(reports):
    """Both phases, the floor, the passes, the block beyond its limit, and the runs."""
    root = drawn(reports.make_long_report())
    said = texts(root)
    assert "Difference between A and B. Prefill: the prompt" in said
    assert "Difference between A and B. Decode: 2 steps" in said
    for key in ("made in this block", "on its own values", "one rounding floor"):
        assert said.count(key) == 2
    assert "A a: tiny/llama, bfloat16, host-a" in said
    colours = {node.get("stroke") or node.get("fill") for node in root.iter(f"{SVG}path")}
    assert {"#1565ab", "#565f6b", "none"} <= colours
    dots = [node for node in root.iter(f"{SVG}circle") if node.get("fill") == "#b93a06"]
    assert len(dots) == 2 * 2  # in each plot, and its legend


def test_a_truth_adds_both_sides(reports):
    """A's distance from it is a line with circles, B's a dashed one with squares."""
    numbers = dict.fromkeys(TruthDiff.__struct_fields__, 1.0)
    truth = TruthDiff(**{**numbers, "reference_error": 1e-3, "candidate_error": 2e-2})
    site = reports.make_site(
        "model.layers.0:out", block="model.layers.0", role="block", truth=truth
    )
    root = drawn(reports.make_report(sites=[site]))
    assert "Distance from the truth. Prefill: the prompt" in texts(root)
    squares = [node for node in root.iter(f"{SVG}rect") if node.get("fill") == "#9c2f7c"]
    assert len(squares) == 1 + 1  # the point, and its legend


@pytest.mark.parametrize("values", [(0.0,), (float("nan"),), (float("inf"), 1e-30)])
def test_odd_values_are_drawn(reports, values):
    """Equal bits, nan and inf have lanes of their own; no number of the file is one of them."""
    sites = [
        reports.make_site(
            f"model.layers.{n}:out",
            block=f"model.layers.{n}",
            role="block",
            rel_l2=value,
            token_rel_l2_median=value,
        )
        for n, value in enumerate(values)
    ]
    svg = reports.make_report(sites=sites).plot().svg
    assert not re.search(r'="[^"]*\b(nan|inf)\b[^",. ]*"', re.sub(r'(aria-label)="[^"]*"', "", svg))


def test_without_blocks_there_is_no_curve(reports):
    """The error says so, and what to do."""
    empty = reports.make_report(sites=[])
    with pytest.raises(UsageError, match="no curve to draw"):
        empty.plot()
    assert "<svg" not in empty._repr_html_()


def test_names_are_text(reports, tmp_path):
    """What a run is called changes nothing of a picture or a notebook."""
    run = reports.make_run(HOSTILE, label=HOSTILE, model=HOSTILE)
    site = reports.make_site(f"{HOSTILE}:out", block=HOSTILE, role="block")
    verdict = reports.make_verdict("localized", summary=HOSTILE, next=[HOSTILE])
    report = reports.make_report(reference=run, candidate=run, sites=[site], verdict=verdict)
    manifest = SimpleNamespace(
        model=SimpleNamespace(source=HOSTILE, dtype=HOSTILE),
        environment=SimpleNamespace(device_type=HOSTILE, device_name=HOSTILE, label=HOSTILE),
        complete=False,
        stopped_by=HOSTILE,
        plan=SimpleNamespace(plants=[HOSTILE]),
        tokens=SimpleNamespace(samples=[]),
        sizes=SimpleNamespace(stored_bytes=0),
    )
    result = DiffResult(report=report, folder=Path(HOSTILE), localize_words=[HOSTILE])
    for shown in (
        report.plot().svg,
        report._repr_html_(),
        result._repr_html_(),
        Run(HOSTILE, manifest, [])._repr_html_(),
    ):
        assert "<script" not in shown and "<img" not in shown and "\x1b" not in shown
        assert "&lt;script&gt;" in shown
        ElementTree.fromstring(shown)


def test_a_notebook_shows_verdict_and_curve(reports):
    """One table and one picture, of the phase that the verdict is about; no style sheet, which
    would hold for the whole notebook."""
    report = reports.make_long_report()
    root = ElementTree.fromstring(report._repr_html_())
    assert root.find("table/caption/b").text.startswith("DIVERGED: the error is made")
    rows = {row.find("th").text: row.find("td").text for row in root.iter("tr")}
    assert rows["side"] == "B is wrong" and "tiny/llama" in rows["A"]
    assert len(list(root.iter(f"{SVG}svg"))) == 1
    assert not list(root.iter("style")) and len(report._repr_html_()) < 60_000
    assert report.plot()._repr_svg_() == report.plot().svg


def test_a_picture_is_saved_by_its_name(reports, tmp_path):
    """Whole, and as what the name says; another name is an error, and so is no folder."""
    picture = reports.make_long_report().plot()
    assert picture.save(tmp_path / "a.SVG") == tmp_path / "a.SVG"
    assert (tmp_path / "a.SVG").read_text(encoding="utf-8") == picture.svg + "\n"
    with pytest.raises(UsageError, match=r"saved as \.svg or \.png"):
        picture.save(tmp_path / "a.jpg")
    with pytest.raises(UsageError, match="cannot write the picture"):
        picture.save(tmp_path / "nowhere" / "a.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["a.SVG"]


def test_a_png_is_the_same_picture(reports, tmp_path):
    """Twice as many dots as the picture has, for a screen or a slide."""
    pytest.importorskip("resvg_py", reason="the extra `plot` is not installed")
    picture = reports.make_long_report().plot()
    data = picture.save(tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    root = ElementTree.fromstring(picture.svg)
    size = [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)]
    assert size == [2 * float(root.get(name)) for name in ("width", "height")]


def test_a_png_needs_its_library_and_a_font(reports, monkeypatch):
    """Each is said with what to do; letters are not left out in silence."""
    picture = reports.make_long_report().plot()
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UsageError, match="not installed") as raised:
        picture.png()
    assert 'pip install "divergence-debug[plot]"' in str(raised.value)
    fontless = SimpleNamespace(svg_to_bytes=lambda svg_string, zoom: b"always the same")
    monkeypatch.setitem(sys.modules, "resvg_py", fontless)
    with pytest.raises(UsageError, match="needs a font"):
        picture.png()
