"""The page in a real browser: it opens from disk, answers mouse and keyboard, lets nothing in."""

import csv
import importlib.util
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

_spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
browser_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser_module)

BINARY = browser_module.find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="no Chromium here (BROWSER_BINARY names one)"),
]

HOSTILE = (
    "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
    "\"><svg onload='window.pwned=1'>\u202e\x1b[31m\u2028__proto__"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    found = browser_module.Browser(BINARY)
    yield found
    found.close()


@pytest.fixture
def shown(browser, reports, tmp_path):
    """``shown(report, ...)`` opens its page."""

    def show(report, **options):
        path = tmp_path / "report.html"
        path.write_text(report.html(), encoding="utf-8")
        browser.open(path, **options)
        return browser

    return show


def test_it_opens_from_disk_and_asks_for_nothing(shown, reports):
    """No error, nothing refused by its policy, no address but its own."""
    browser = shown(reports.make_long_report())
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert browser.problems() == []
    assert [url for url in browser.requests() if not url.startswith("file:")] == []
    assert browser.run("document.querySelector('h1').textContent").startswith("The error is made")


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_it_fits_every_width(shown, reports, width):
    """Nothing but what scrolls by itself is wider than the window."""
    browser = shown(reports.make_long_report(), width=width, phone=width < 500)
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_a_block_is_chosen_by_keyboard(shown, reports):
    """Arrow keys move through a figure and say where they are; Enter opens the block."""
    browser = shown(reports.make_long_report())
    chosen = "document.querySelector('#chosen h3').textContent"
    assert browser.run(chosen) == "model.layers.30"
    assert "mlp.down_proj" in browser.run("document.querySelector('#chosen table').textContent")
    browser.run("document.querySelector('#error-prefill .surface').focus()")
    browser.press("ArrowRight")
    said = browser.run("document.querySelector('#error-prefill output').textContent")
    assert said.startswith("model.layers.31: ")
    browser.press("Enter")
    assert browser.run(chosen) == "model.layers.31"
    assert browser.run("document.activeElement.id") == "chosen-title"


def test_a_block_is_chosen_by_mouse(shown, reports):
    """A click into a figure, and the list and the buttons of the block."""
    browser = shown(reports.make_long_report())
    box = browser.run(
        "(() => { const s = document.querySelector('#error-prefill .surface');"
        " s.scrollIntoView({block: 'center'}); const b = s.getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    time.sleep(0.5)
    box[1] = browser.run(
        "document.querySelector('#error-prefill .surface').getBoundingClientRect().top"
    )
    browser.click(box[0] + 2, box[1] + box[3] / 2)
    assert browser.run("document.querySelector('#chosen h3').textContent") == "model.layers.0"
    browser.run("document.querySelector('#chosen button[aria-label=\"Block after\"]').click()")
    assert browser.run("document.querySelector('#chosen h3').textContent") == "model.layers.1"


def test_light_and_dark(shown, reports):
    """As the system has it, until the button is pressed."""
    browser = shown(reports.make_report(), dark=True)
    color = "getComputedStyle(document.body).backgroundColor"
    dark = browser.run(color)
    browser.run("document.getElementById('theme').click()")
    light = browser.run(color)
    assert dark != light
    browser.run("document.getElementById('theme').click()")
    assert browser.run(color) == dark


def test_hostile_names_do_nothing(shown, reports):
    """In whatever is shown, in every block that can be chosen."""
    report = reports.make_long_report(num_blocks=3, onset=1)
    sites = [
        reports.make_site(
            one.site.replace("model", HOSTILE),
            block=one.block and one.block.replace("model", HOSTILE),
            order=one.order,
            kind=HOSTILE,
            pass_=one.pass_,
            step=one.step,
        )
        for one in report.sites
    ]
    report = reports.make_report(
        sites=sites,
        notes=[HOSTILE],
        candidate=reports.make_run(HOSTILE, plants=[HOSTILE]),
        verdict=reports.make_verdict(summary=HOSTILE, next=[f"divergence compare '{HOSTILE}'"]),
    )
    browser = shown(report)
    browser.run(
        "(() => { const s = document.querySelector('#chosen select');"
        " for (let n = 0; n < s.options.length; n++) {"
        "  const list = document.querySelector('#chosen select'); list.selectedIndex = n;"
        "  list.dispatchEvent(new Event('change')); }"
        " for (const d of document.querySelectorAll('details')) d.open = true; })()"
    )
    assert browser.run("window.pwned === undefined")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelectorAll('script').length") == 3
    assert browser.problems() == []


def test_downloads(shown, reports, browser, tmp_path, printed):
    """JSON as `compare --json`, CSV with the figures of `compare --csv`."""
    report = reports.make_long_report(num_blocks=3, onset=1)
    shown(report)
    folder = tmp_path / "downloads"
    folder.mkdir()
    browser.downloads_to(folder)
    for kind in ("json", "csv"):
        browser.run(f"document.getElementById('download-{kind}').click()")
        wait_until(lambda kind=kind: (folder / f"report.{kind}").exists())
    assert json.loads((folder / "report.json").read_text()) == json.loads(report.to_json())
    mine, theirs = (
        list(csv.DictReader(io.StringIO(text)))
        for text in ((folder / "report.csv").read_text(), printed(report, "--csv", "-"))
    )
    assert len(mine) == len(theirs)
    for one, two in zip(mine, theirs, strict=True):
        assert {key: number(value) for key, value in one.items()} == {
            key: number(value) for key, value in two.items()
        }


def number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def wait_until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_reads_without_scripts(browser, reports, tmp_path):
    """Verdict, commands, pictures and tables are there; what needs a script is not shown."""
    path = tmp_path / "report.html"
    path.write_text(reports.make_long_report().html(), encoding="utf-8")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(path)
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    names = [node.get("name", {}).get("value", "") for node in tree if not node["ignored"]]
    assert "The error is made in model.layers.30.mlp.down_proj" in names
    assert "divergence compare a c" in names
    assert "Copy" not in names and "Download JSON" not in names


def test_a_large_report_has_few_elements(shown, reports):
    """100 blocks × 64 steps × 8 prompts are drawn as pictures, not as an element each."""
    browser = shown(reports.make_large_report(num_blocks=100, num_steps=64, num_prompts=8))
    assert 0 < browser.run("document.querySelectorAll('*').length") < 100 * 64


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_accessible(shown, reports, dark, width):
    """axe-core finds no fault worth the name; ``AXE_CORE`` names its axe.min.js."""
    axe = os.environ.get("AXE_CORE")
    if not axe:
        pytest.skip("AXE_CORE names no axe.min.js (npm pack axe-core)")
    report = reports.make_long_report()
    report = msgspec.structs.replace(report, notes=[*report.notes, "a long note " * 200])
    browser = shown(report, dark=dark, width=width, phone=width < 500)
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true; 0")
    browser.run(Path(axe).read_text(encoding="utf-8") + "; 0")
    script = """axe.run().then((result) => result.violations.map((one) => [
        one.impact, one.id, one.nodes.map((n) => n.target.join(" ") + ": " + n.failureSummary)]))"""
    assert browser.run(script) == []
