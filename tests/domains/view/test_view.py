"""The terminal browser: its pages, its keys, and what a run's names cannot do to it."""

import asyncio
import sys
from collections.abc import Callable

import pytest

from divergence import Report
from divergence.cli.main import app
from divergence.comparison.result import PromptRatio
from divergence.domains.view.app import HOMES, Browser, Page
from divergence.errors import UsageError

HOSTILE = "[bold red]x[/] \x1b[2J\x1b]0;owned\x07 ‮ [link=https://x]"


def page(report, key: str) -> Page:
    return HOMES[key][1](report)


def column(page: Page, title: str) -> list[str]:
    at = page.table.titles.index(title)
    return [row[at] for row in page.table.cells()]


def test_blocks_modules_forwards_numbers(reports):
    """From the block where the error begins down to every number of one forward."""
    report = reports.make_long_report()
    blocks = page(report, "b")
    assert column(blocks, "block").count("model.layers.30") == 2  # prefill and decode
    at = blocks.table.rows.index(next(r for r in blocks.table.rows if r[0] == "model.layers.30"))
    modules = blocks.open(at)
    assert modules.title == "model.layers.30"
    assert column(modules, "module") == ["self_attn:out", "mlp.down_proj:out", ":out"]
    forwards = modules.open(1)
    assert forwards.title == "model.layers.30.mlp.down_proj:out"
    assert column(forwards, "step") == ["prefill", "1", "2"]
    numbers = dict(forwards.open(2).table.rows)
    assert (numbers["ratio"], numbers["step"], numbers["flagged"]) == ("200.0", "2", "True")
    assert forwards.open(2).open(0) is None


def test_the_onset_and_what_lies_outside_blocks_open_their_forwards(reports):
    """A row that is a site has no modules."""
    report = reports.make_long_report()
    blocks = page(report, "b")
    names = column(blocks, "block")
    assert blocks.open(names.index("lm_head:out")).title == "lm_head:out"
    inner = [blocks.table.mark(n) for n in range(len(names))].index("onset", 31)
    assert blocks.open(inner).title == "model.layers.30.mlp.down_proj:out"


@pytest.mark.parametrize("key, named", [("p", "1"), ("s", "2")])
def test_prompts_and_steps_hold_their_own_blocks(reports, key, named):
    """Behind one are the blocks of its results alone."""
    report = reports.make_large_report(num_blocks=6, num_steps=3, num_prompts=2)
    groups = page(report, key)
    names = column(groups, groups.table.titles[0])
    assert names == (["0", "1"] if key == "p" else ["prefill", "1", "2"])
    inside = groups.open(names.index(named))
    forwards = inside.open(3).open(0)
    field = "prompt" if key == "p" else "step"
    assert set(column(forwards, field)) == {named}


def test_a_prompt_of_a_batch_is_found(reports):
    """Prompts that ran together share their results."""
    shared = [PromptRatio(sample=n, ratio=1.0, num_rows=3) for n in (0, 1)]
    site = reports.make_site("m.0:out", block="m.0", role="block", prompts=shared)
    assert column(page(reports.make_report(sites=[site]), "p"), "prompt") == ["0", "1"]


def test_the_report_is_what_compare_prints(reports):
    """A suite has no blocks, and opens there."""
    lines = [row[0] for row in page(reports.make_report(sites=[]), "r").table.rows]
    assert lines[0].startswith("OK: ")


def test_a_report_is_loaded_as_it_was_written(reports, tmp_path):
    """With nan and inf; also from what check and localize print."""
    report = reports.make_nonfinite_report()
    path = tmp_path / "report.json"
    for text in (report.to_json(indent=2), f'{{"passed": false, "report": {report.to_json()}}}'):
        path.write_text(text, encoding="utf-8")
        assert Report.load(path).to_json() == report.to_json()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "it is no JSON"),
        ("[1, 2]", "holds something else"),
        ("{}", "holds something else"),
        ('{"report": 3}', "holds something else"),
        ('{"schema_version": 99}', "schema_version is 99"),
        ('{"schema_version": 1}', "missing required field"),
        ("[" * 100_000, "nested more than 100 deep"),
    ],
)
def test_what_is_no_report_is_said(text, said, tmp_path):
    """One error for each, with the file's name."""
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=said) as raised:
        Report.load(path)
    assert raised.value.where == str(path)


def shown(report, *keys: str, check: Callable, size: tuple[int, int] = (80, 24)) -> None:
    """Runs the browser without a terminal, presses keys and calls ``check(app)``."""
    pytest.importorskip("textual", reason="the extra `tui` is not installed")

    async def session() -> None:
        app = Browser(report)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
            await pilot.pause()
            assert check(app) is not False

    asyncio.run(session())


def screen(app) -> str:
    """The text of the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in strips)


@pytest.mark.slow
def test_the_first_screen_has_verdict_rows_and_keys(reports):
    """In 80 columns and 24 lines; the row where the error begins is chosen."""

    def check(app) -> None:
        text = screen(app)
        assert "DIVERGED: the error is made in model.layers.30.mlp.down_proj" in text
        assert "relative L2" in text and "mlp.down_proj:out" in text
        for key in ("Back", "Blocks", "Prompts", "Steps", "Report", "Help", "Quit"):
            assert key in text.splitlines()[-1]
        assert app.page.table.mark(app.query_one("DataTable").cursor_row) == "onset"

    shown(reports.make_long_report(), check=check)


@pytest.mark.slow
def test_keys_go_deeper_and_back(reports):
    """Enter, Escape, and from anywhere to another first page; the row is where it was."""
    report = reports.make_large_report(num_blocks=6, num_steps=3, num_prompts=2)

    def titles(app) -> list[str]:
        return [page.title for page, _ in app.stack]

    def deep(app) -> None:
        assert titles(app) == ["blocks", "model.layers.1", "model.layers.1:out"]
        assert "blocks › model.layers.1 › model.layers.1:out" in screen(app)

    def back(app) -> None:
        assert titles(app) == ["blocks"]
        assert app.query_one("DataTable").cursor_row == 1

    shown(report, "up", "up", "enter", "enter", check=deep)
    shown(report, "up", "up", "enter", "enter", "escape", "escape", "escape", check=back)
    shown(report, "p", "enter", check=lambda app: titles(app) == ["prompts", "prompt 1"])
    shown(report, "enter", "s", "r", "enter", check=lambda app: titles(app) == ["report"])


@pytest.mark.slow
def test_help_and_quit(reports):
    """`?` says the keys, and any of them closes it; `q` ends with 0."""

    def check(app) -> None:
        assert "go deeper" in screen(app) and app.return_code is None

    shown(reports.make_report(), "question_mark", check=check)
    shown(
        reports.make_report(),
        "question_mark",
        "escape",
        "q",
        check=lambda app: app.return_code == 0,
    )


@pytest.mark.slow
def test_odd_reports_are_shown(reports):
    """nan, no site at all, a small terminal."""
    for report in (reports.make_nonfinite_report(), reports.make_report(sites=[])):
        keys = [key for home in HOMES for key in (home, "enter", "enter")]
        shown(report, *keys, check=lambda app: app.return_code is None, size=(20, 6))


@pytest.mark.slow
def test_names_are_no_markup(reports):
    """What a run calls itself is shown as it is written, and obeyed by nobody."""
    site = reports.make_site(f"{HOSTILE}:out", block=HOSTILE, role="block", kind=HOSTILE)
    verdict = reports.make_verdict("localized", summary=HOSTILE)
    run = reports.make_run(HOSTILE, label=HOSTILE)
    report = reports.make_report(sites=[site], verdict=verdict, reference=run)

    def check(app) -> None:
        text = screen(app)
        assert "[bold red]x[/] \\x1b[2J" in text
        assert "\x1b" not in text and "\x07" not in text and "‮" not in text

    for keys in ((), ("enter",), ("enter", "enter"), ("enter", "enter", "enter"), ("r",), ("p",)):
        shown(report, *keys, check=check, size=(160, 40))


NAMES = [
    "x" * 100_000,
    "#verdict DataTable > .x:hover",
    "verdict",
    "\ud800",
    "漢" * 80,
    "e\u0301" * 200,
    "\u200d\ufeff" * 30,
    "[@click=app.quit]x[/]",
    "a\nb\r\tc",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(80, 24), (20, 5), (2, 2)])
def test_names_of_any_kind_in_a_terminal_of_any_size(name, size, reports):
    """Nothing of a name is a selector, an action or a reason to fail."""
    site = reports.make_site(f"{name}:out", block=name, role="block", kind=name)
    verdict = reports.make_verdict("localized", summary=name)
    report = reports.make_report(
        sites=[site], verdict=verdict, reference=reports.make_run(name, label=name)
    )
    for keys in (("enter",) * 4, ("p", "enter", "enter"), ("r", "down"), ("question_mark",)):
        shown(report, *keys, check=lambda app: "\x1b" not in screen(app), size=size)
    assert name not in report.html() or name == "verdict" or not set(name) & set("<>&\ud800")


def test_every_prompt_of_many_is_there(reports):
    """All rows of a large report, not only those that fit."""
    report = reports.make_large_report(100, 2, 2)
    shown(report, check=lambda app: app.query_one("DataTable").row_count == 200)


def test_a_missing_extra_and_a_pipe_are_said(monkeypatch, capsys):
    """Exit code 2, before anything is read."""

    def ended() -> str:
        with pytest.raises(SystemExit) as caught:
            app(["view", "a", "b"], prog_name="divergence")
        assert caught.value.code == 2
        return capsys.readouterr().err

    for name in [name for name in sys.modules if name.startswith("divergence.domains.view.app")]:
        monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "textual", None)
        without.setitem(sys.modules, "textual.app", None)
        assert 'pip install "divergence-debug[tui]"' in ended()
    pytest.importorskip("textual", reason="the extra `tui` is not installed")
    assert "view needs a terminal" in ended()
