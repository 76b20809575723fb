"""The first screen: 25 lines of 80 columns, the answer first, one command last."""

import re

import msgspec
import pytest

from divergence.comparison.result import Coverage, PreflightLine, TokensResult, Visible
from divergence.facts import Fact
from divergence.run.command import command
from divergence.words import HEADLINES

WIDTH = 80


@pytest.fixture
def screen(printed):
    """``screen(report)``: the lines of the first screen, on a terminal of 80 columns."""

    def lines(report):
        text = printed(report, columns=WIDTH)
        return re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()

    return lines


def plain(reports):
    """A report of a pair without planted faults, in which little is said of settings."""
    report = reports.make_long_report()
    sides = {
        side: msgspec.structs.replace(getattr(report, side), plants=[])
        for side in ("reference", "candidate")
    }
    tokens = msgspec.structs.replace(report.tokens, explanation=None)
    settings = [PreflightLine(check="cpu", status="differs", reference="one", candidate="other")]
    return msgspec.structs.replace(report, **sides, tokens=tokens, preflight=settings)


@pytest.mark.parametrize("name", ["make_report", "make_long_report", "make_nonfinite_report"])
def test_fits_on_a_screen(reports, screen, name):
    """Only a command, which is to be copied, may be wider."""
    text = screen(getattr(reports, name)())
    assert len(text) <= 25
    wide = [one for one in text if len(one) > WIDTH]
    assert all(one.lstrip().startswith("divergence ") for one in wide)


@pytest.mark.parametrize("kind", HEADLINES)
def test_every_kind_of_verdict_has_a_word(reports, screen, kind):
    """The answer begins with it."""
    report = reports.make_report(verdict=reports.make_verdict(kind))
    assert screen(report)[0].startswith(HEADLINES[kind] + ": ")


def test_two_dtypes_are_no_plain_ok(reports, screen):
    """They are a difference of precision."""
    report = reports.make_report()
    other = msgspec.structs.replace(report.candidate, dtype="float16")
    report = msgspec.structs.replace(report, candidate=other)
    assert screen(report)[0].startswith("DIFFERENT PRECISION: ")


@pytest.mark.parametrize("check", ["weights", "quantization"])
def test_other_weights_of_one_path_are_not_called_the_same_model(reports, screen, check):
    """As of a run and its quantised one."""
    report = reports.make_report()
    assert any("the same model" in line for line in screen(report) if line.startswith("B "))
    other = PreflightLine(check=check, status="differs", reference="none", candidate="W8A8")
    report = msgspec.structs.replace(report, preflight=[*report.preflight[1:], other])
    assert not any("the same model" in line for line in screen(report) if line.startswith("B "))


def test_the_worst_rows_and_one_command(reports, screen):
    """One place in a line; of several beyond a limit at most five rows; the first command alone."""
    report = reports.make_long_report()
    text = screen(report)
    assert sum(one.startswith("worst  ") for one in text) == 1
    assert sum(one.startswith("  divergence ") for one in text) == min(1, len(report.verdict.next))
    # of the onset the reasons tell as much
    known = msgspec.structs.replace(
        report.verdict,
        evidence=[Fact(text="B's error is 6 × A's")],
        onset=msgspec.structs.replace(report.verdict.onset, site="model.layers.30:out"),
    )
    text = screen(msgspec.structs.replace(report, verdict=known))
    assert not any(one.startswith("worst") for one in text)
    sites = [msgspec.structs.replace(site, flagged=True) for site in report.sites]
    verdict = reports.make_verdict("systematic")
    report = msgspec.structs.replace(plain(reports), sites=sites, tokens=None, verdict=verdict)
    text = screen(report)
    start = next(n for n, one in enumerate(text) if one.startswith("worst of"))
    rows = [one for one in text[start + 2 :] if one.startswith("  ") and "prompt" in one]
    assert 2 <= len(rows) <= 5
    assert all("!" in row for row in rows)


@pytest.mark.parametrize(("kind", "most"), [("within_floor", 12), ("localized", 18)])
def test_a_healthy_pair_takes_twelve_lines_and_a_faulty_one_eighteen(reports, printed, kind, most):
    """With what could not be seen, a command, tokens and a share of a limit."""
    report = plain(reports)
    sites = [msgspec.structs.replace(site, limit_usage=0.3) for site in report.sites]
    healthy = kind == "within_floor"
    commands = [command("capture", like="a", o="b")]
    report = msgspec.structs.replace(
        report,
        sites=sites if healthy else report.sites,
        visible=Visible(block=5e-3, forward=0.02, token=0.03),
        verdict=reports.make_verdict(kind, commands=commands),
    )
    text = printed(report).splitlines()
    assert len(text) <= most
    assert sum("divergence capture" in one for one in text) == 1
    if healthy:  # below the confidence that it raises
        assert text[[one[:10] for one in text].index("confidence") + 1].strip() == commands[0].text


def test_a_long_answer_of_a_healthy_pair_leaves_its_worst_place_out(reports, printed):
    """And keeps what was compared: of two dtypes there is much to say."""
    report = plain(reports)
    text = printed(
        msgspec.structs.replace(
            report,
            candidate=msgspec.structs.replace(report.candidate, dtype="float16"),
            sites=[msgspec.structs.replace(site, limit_usage=0.3) for site in report.sites],
            visible=Visible(block=5e-3, forward=0.02, token=0.03),
            verdict=reports.make_verdict(
                "within_floor", summary="s " * 60, commands=[command("capture", like="a", o="b")]
            ),
        )
    ).splitlines()
    labels = [line[:10].strip() for line in text]
    assert len(text) <= 12
    assert "compared" in labels and "worst" not in labels


@pytest.mark.parametrize("letters", [150, 180])
def test_what_is_as_usual_goes_before_a_reason(reports, printed, letters):
    """Where eighteen lines do not hold all of it."""
    report = plain(reports)
    why = [Fact(text="first"), Fact(text="z " * (letters // 2), values={"plain": True})]
    verdict = reports.make_verdict(
        "localized",
        summary="s " * 80,
        evidence=why,
        commands=[command("capture", like="a", o="b")],
        onset=report.verdict.onset,
        side="candidate",
    )
    coverage = reports.make_report().coverage
    text = printed(msgspec.structs.replace(report, coverage=coverage, verdict=verdict)).splitlines()
    assert len(text) == 18
    assert not any(line.startswith("compared") for line in text)


def test_a_healthy_pair_shows_its_worst_row(reports, screen):
    """Which comes nearest to a limit; the others stand under -v and on the page."""
    report = reports.make_report()
    sites = [
        msgspec.structs.replace(site, limit_usage=0.1 * n) for n, site in enumerate(report.sites)
    ]
    text = screen(msgspec.structs.replace(report, sites=sites))
    (worst,) = (one for one in text if one.startswith("worst  "))
    assert f"{len(sites) - 1}0% of its limit" in worst


def test_what_could_not_be_seen_is_said_by_level(reports, screen):
    """Of a block and a step; a token that is not judged is said so."""
    report = reports.make_report()
    assert not any("errors below" in one for one in screen(report))
    seen = msgspec.structs.replace(report, visible=Visible(block=5e-3, forward=0.02))
    text = " ".join(" ".join(screen(seen)).split())
    assert "errors below 0.50% of a block (a step 2.0%)" in text
    assert "; a single token alone is not judged" in text


def test_where_no_side_is_told_the_screen_says_what_tells_it(reports, screen):
    """Two runs cannot; the truth's command is there to be copied, or is the next one's anyhow."""
    truth = "divergence truth a -o a-truth"
    commands = [command("x"), command("truth", "a", o="a-truth", note="A")]
    verdict = reports.make_verdict("localized", side=None, commands=commands)
    report = reports.make_report(verdict=verdict)
    text = screen(report)
    said = text.index("side        not known from two runs; a truth tells it:")
    assert text[said + 1] == " " * 12 + truth
    verdict = msgspec.structs.replace(verdict, commands=[command("localize", "a", "b", truth="t")])
    report = msgspec.structs.replace(report, verdict=verdict)
    assert "side        not known from two runs: the command below tells it" in screen(report)
    verdict = msgspec.structs.replace(verdict, side="candidate")
    assert "side        B is wrong" in screen(msgspec.structs.replace(report, verdict=verdict))


def test_of_two_other_models_the_screen_says_that_nothing_was_compared(reports, screen):
    """Instead of a share of nothing."""
    verdict = reports.make_verdict("incomparable", summary="other weights")
    text = screen(reports.make_report(verdict=verdict, sites=[]))
    assert "compared    nothing: what differs between such runs is no machine's doing" in text


def test_a_setting_whose_values_look_alike_says_what_differs(reports, screen):
    """`4 tokens / 4 tokens` tells nobody anything."""
    ids = PreflightLine(
        check="generated ids",
        status="differs",
        reference="4 tokens",
        candidate="4 tokens",
        detail="other tokens on each side",
    )
    said = screen(reports.make_report(preflight=[ids]))
    assert "settings    generated ids other tokens on each side" in said


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (0, "all 3 next tokens equal"),
        (9, "3 of 3 next tokens equal (each continued its own text); 9 more"),
    ],
)
def test_steps_that_one_run_lacks_do_not_disagree(reports, screen, missing, said):
    """They are counted beside those that were compared."""
    tokens = TokensResult(num_tokens=3, num_equal=3, num_missing=missing, forced=False)
    text = " ".join(" ".join(screen(reports.make_report(tokens=tokens))).split())
    assert said in text and "of 12" not in text


def test_the_whole_report_keeps_what_could_not_be_seen(reports, printed):
    """It stands on the first screen, and behind -v."""
    seen = msgspec.structs.replace(reports.make_report(), visible=Visible(block=2e-3))
    for options in ([], ["-v"]):
        lines = printed(seen, *options).splitlines()
        assert sum(line.startswith("not seen") for line in lines) == 1


def test_a_row_of_the_free_pass_beside_anchored_ones_says_so(reports, screen):
    """What came in is in it, so it is no place where the error began."""
    report = reports.make_report(verdict=reports.make_verdict("localized"))
    sites = [
        msgspec.structs.replace(site, pass_=pass_, flagged=pass_ == "free", role="block")
        for site, pass_ in zip(report.sites, ("free", "anchored", "anchored", "free"), strict=True)
    ]
    text = screen(msgspec.structs.replace(report, sites=sites))
    (row,) = (row for row in text if row.startswith("worst"))
    assert "free pass" in row


@pytest.mark.parametrize(
    ("summary", "title"),
    [
        ("the error is made at lm_head:out", "The error is made at lm_head:out"),
        ("model.layers.8 is off", "model.layers.8 is off"),
        ("arc_easy: 3 of 4", "arc_easy: 3 of 4"),
        ("lm_head:out is off", "lm_head:out is off"),
    ],
)
def test_names_begin_a_page_as_they_are_written(reports, summary, title):
    """A sentence begins with a capital letter, a module or a task does not."""
    report = reports.make_report(verdict=reports.make_verdict("localized", summary=summary))
    assert f"<h1>{title}" in report.html().replace("<wbr>", "")


def test_of_no_model_tensors_are_counted(reports, screen):
    """Where there is neither a block nor a second prompt or step."""
    sites = [reports.make_site(f"case.{number}/suite.mul:out") for number in range(3)]
    counts = {"num_only_reference": 0, "num_only_candidate": 0, "num_skipped": 0}
    coverage = Coverage(num_compared=3, **counts)
    lines = screen(reports.make_report(sites=sites, coverage=coverage, tokens=None))
    assert "compared    everything: 3 tensors" in lines
    more = [*sites, reports.make_site("case.0/suite.mul:out", step=1)]
    lines = screen(reports.make_report(sites=more, coverage=coverage, tokens=None))
    assert "compared    everything: 1 prompt × 2 steps" in lines


def test_what_stops_a_comparison_stands_among_the_reasons_and_in_no_line_of_settings(
    reports, screen
):
    """Where nothing stops it, the line says that all is the same."""
    same = PreflightLine(check="cpu", status="same", reference="x", candidate="x")
    assert "settings    all the same" in screen(reports.make_report(preflight=[same]))
    stops = PreflightLine(check="weights", status="blocking", reference="x", candidate="y")
    verdict = reports.make_verdict("incomparable", summary="other weights")
    stopped = screen(reports.make_report(verdict=verdict, preflight=[stops, same]))
    assert not [line for line in stopped if line.startswith("settings")]
