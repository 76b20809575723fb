"""What people read: text is snapshotted, and how it reaches a file or a terminal is tested."""

import dataclasses
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from divergence.comparison.result import Coverage, Skipped
from divergence.document import Table
from divergence.facts import Fact
from divergence.layout import MAX_WIDTH, fold, line, print_lines, prose, write_text
from divergence.report.summary import report_lines, verdict_lines
from divergence.report.text import table_lines

SNAPSHOTS = Path(__file__).parent / "snapshots"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(lines, file=None) -> str:
    file = file or io.StringIO()
    print_lines(lines, file=file)
    return file.getvalue()


def assert_snapshot(text: str, name: str) -> None:
    """Equal to the stored text. UPDATE_SNAPSHOTS=1 writes it anew."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"UPDATE_SNAPSHOTS=1 rewrites {path.name}"


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize("name", ["make_report", "make_long_report", "make_nonfinite_report"])
def test_snapshot(reports, name):
    """The whole report of a healthy, a faulty and a non-finite pair."""
    assert_snapshot(text_of(report_lines(getattr(reports, name)())), name.removeprefix("make_"))


def test_snapshot_of_check(reports, checked, printed):
    """A failed check says which rules are not met before it shows the report."""
    report = reports.make_long_report()
    text = printed(checked(report, name="ci", tokens={"min_equal": 1.0}))
    stored = (SNAPSHOTS / "check_failed.txt").read_text(encoding="utf-8")
    assert text.startswith(stored)


def test_leads_with_verdict_and_onset(reports):
    """The first two lines hold the verdict and the onset."""
    lines = text_of(report_lines(reports.make_long_report())).splitlines()
    assert lines[0].startswith("DIVERGED: ")
    assert lines[1].startswith("onset       model.layers.30.mlp.down_proj:out")
    assert text_of(verdict_lines(reports.make_long_report())).splitlines()[:2] == lines[:2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"judgement": "tie", "z": 1.5}, "a tie: rounding may flip it"),
        ({"judgement": "fault"}, "a fault: no rounding of this dtype moves logits that far"),
        ({"judgement": None, "z": 4.0}, "between: more than the floor's own rounding flips"),
        ({"z_of": "difference", "judgement": None, "truth_choice": None}, "not judged"),
    ],
)
def test_a_flip_is_called_what_it_is(reports, changes, said):
    """Tie, fault, neither, or not judged for want of a truth."""
    report = reports.make_long_report()
    flip = msgspec.structs.replace(report.tokens.first_difference, **changes)
    report = msgspec.structs.replace(
        report, tokens=msgspec.structs.replace(report.tokens, first_difference=flip)
    )
    text = " ".join(text_of(report_lines(report)).split())
    assert said in text
    assert ("it agrees with A" in text) is (flip.truth_choice is not None)


def test_table_fits_one_hundred_columns(reports):
    """No table row is wider than 100 columns, however long the names are."""
    report = reports.make_long_report(num_blocks=4, onset=1)
    deep = "model.language_model.text.decoder."
    report.sites[:] = [
        msgspec.structs.replace(
            site,
            site=deep + site.site,
            block=site.block and deep + site.block,
            sample=11,
            worst_position=123456,
            ratio=1.23e37,
            ratio_max=1.23e37,
        )
        for site in report.sites
    ]
    for every in (False, True):
        for item in report_lines(report, all_sites=every):
            if item.hang is None:
                assert len(item.text) <= MAX_WIDTH, item.text


def test_inputs_are_left_to_all(reports):
    """An input is another site's output: shown with --all, or where nothing else is there."""
    report = reports.make_report()
    report.sites.append(reports.make_site("lm_head:in", order=3))
    assert "lm_head:in" not in text_of(report_lines(report))
    assert "lm_head:in" in text_of(report_lines(report, all_sites=True))
    report.sites[-1] = msgspec.structs.replace(report.sites[-1], flagged=True)
    assert "lm_head:in" in text_of(report_lines(report))
    report = msgspec.structs.replace(report, sites=[reports.make_site("lm_head:in")])
    assert "lm_head:in" in text_of(report_lines(report))


def test_long_models_elide_healthy_rows(reports):
    """More than 40 rows: what lies far from the onset is counted, and --all brings it back."""
    report = reports.make_long_report(num_blocks=60)
    short = text_of(report_lines(report))
    assert "… 23 healthy rows, at most 1.2 ×" in short
    assert "model.layers.10 " not in short
    assert "model.layers.30 " in short
    every = text_of(report_lines(report, all_sites=True))
    assert "healthy rows" not in every
    assert "model.layers.10:out" in every


def test_forty_blocks_are_not_elided(reports):
    """A model that fits is shown whole."""
    report = reports.make_report()
    sites = [
        reports.make_site(f"model.layers.{n}:out", order=n, block=f"model.layers.{n}")
        for n in range(40)
    ]
    report = msgspec.structs.replace(report, sites=sites)
    assert "healthy row" not in text_of(report_lines(report))


def test_flagged_rows_are_never_elided(reports):
    """Where everything is at fault everything is shown."""
    report = reports.make_long_report()
    report.sites[:] = [msgspec.structs.replace(site, flagged=True) for site in report.sites]
    assert "healthy row" not in text_of(report_lines(report))


def test_brackets_print_as_they_are(reports):
    """Paths and tokens are data and never markup."""
    report = reports.make_report()
    report = msgspec.structs.replace(report, reference=reports.make_run("runs/[red]a[/red]"))
    report = msgspec.structs.replace(report, notes=["[bold]x[/bold] :smile:"])
    for file in (io.StringIO(), Terminal()):
        text = text_of(report_lines(report), file)
        assert "runs/[red]a[/red]" in text
        assert "[bold]x[/bold] :smile:" in text


def test_piped_output_is_folded_the_same_everywhere(reports, monkeypatch):
    """Sentences fold in a pipe at 100 columns, whatever COLUMNS says; commands do not."""
    monkeypatch.setenv("COLUMNS", "40")
    report = reports.make_report(
        verdict=reports.make_verdict(
            evidence=[Fact(text="word " * 100)], next=["divergence compare" + " path" * 50]
        )
    )
    text = text_of(report_lines(report))
    assert max(len(line) for line in text.splitlines() if "word" in line) in range(95, 101)
    assert len(re.findall(r"\bword\b", text)) >= 100 and " path" * 50 in text
    assert "\x1b" not in text


def test_a_terminal_is_coloured_and_folded(reports, monkeypatch):
    """Prose folds at words in a terminal; NO_COLOR and FORCE_COLOR are honoured."""
    monkeypatch.setenv("COLUMNS", "80")
    report = reports.make_report(verdict=reports.make_verdict(evidence=[Fact(text="word " * 100)]))
    assert "\x1b[" in text_of(report_lines(report), Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    text = text_of(report_lines(report), Terminal())
    assert "\x1b[3" not in text and "\x1b[9" not in text
    assert max(len(line) for line in text.splitlines() if "word" in line) <= 90
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = text_of(report_lines(report))
    assert "\x1b[" in forced
    assert forced.count("word ") + forced.count("word\n") >= 99


@pytest.mark.parametrize("width", [1, 20, 80, 100])
@pytest.mark.parametrize("label", ["", "short", "word" * 30, "word " * 30, "x" * 100_000])
def test_a_label_of_any_length(label, width):
    """A label that leaves no room stands alone, and what it labels is below it, whole."""
    folded = fold(prose(label, "some words that are longer than a narrow terminal is wide"), width)
    said = " ".join(item.text for item in folded)
    assert said.split() == [
        *label.split(),
        *"some words that are longer than a narrow terminal is wide".split(),
    ]
    if width == 80 and len(label) > 80:
        assert folded[1].text.startswith(" " * 12 + "some words")


def test_the_same_report_gives_the_same_bytes(reports):
    """Rendering is a function of the report, whatever the order of its sites."""
    report = reports.make_long_report()
    first = text_of(report_lines(report))
    report.sites.reverse()
    assert text_of(report_lines(report)) == first


def test_an_ascii_stream_gets_ascii():
    """A stream that lacks a character gets one that stands in, and never an exception."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    write_text("a … █ é\n", file=file)
    assert raw.getvalue() == b"a ~ # \\xe9\n"


def test_a_closed_pipe_is_no_failure(tmp_path):
    """`divergence compare | head` ends with the command's own exit code."""
    code = (
        "from divergence.layout import write_text\n"
        "for _ in range(9999): write_text('x' * 99)\n"
        "raise SystemExit(7)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    child.stdout.close()
    stderr = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 7
    assert stderr == b""


def test_unmatched_sites_are_listed_and_counted(reports):
    """Beyond a dozen the rest is a number, and --all lists it."""
    unmatched = [
        Skipped(
            pass_="free",
            sample=0,
            step=0,
            site=f"m.{n}:out",
            why=None,
            reason="gone",
            side="reference",
        )
        for n in range(20)
    ]
    report = reports.make_report(
        coverage=Coverage(
            num_compared=4,
            num_only_reference=20,
            num_only_candidate=0,
            num_skipped=0,
            unmatched=unmatched,
        )
    )
    text = text_of(report_lines(report))
    assert "20 only in A" in text
    assert "… 8 more (--all lists them)" in text
    assert "m.19:out" in text_of(report_lines(report, all_sites=True))


def test_identical_runs_show_no_table(reports):
    """There is nothing to look up where every bit is the same."""
    report = reports.make_report(verdict=reports.make_verdict("identical", summary="same bits"))
    assert "rel L2" not in text_of(report_lines(report))
    assert "rel L2" in text_of(report_lines(report, all_sites=True))


def test_fold_keeps_every_word():
    """Folding loses nothing and indents what follows."""
    item = prose("why", "one two three four five six seven eight nine ten eleven twelve")
    lines = fold(item, 40)
    assert all(len(piece.text) <= 40 for piece in lines)
    assert " ".join(" ".join(piece.text.split()) for piece in lines) == " ".join(item.text.split())
    assert lines[1].text.startswith(" " * 12)


def test_control_characters_in_data_are_written_out(capsys):
    """What a run says of itself cannot colour the screen or move the cursor."""
    print_lines([line("label \x1b[31mred\x07", "tab\there")])
    assert capsys.readouterr().out == "label \\x1b[31mred\\x07tab\\x09here\n"


def test_a_row_may_stay_one_line():
    """Where programs read it: selfcheck's ways of running."""
    rows = [("batch", "within floor, " * 12)]
    table = Table(columns=("line", "result"), rows=rows, bare=True)
    assert len(text_of(table_lines(table)).splitlines()) > 1
    whole = dataclasses.replace(table, whole=True)
    assert len(text_of(table_lines(whole)).splitlines()) == 1
