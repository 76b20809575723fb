"""The first screen: 25 lines of 80 columns, the answer first, one command last."""

from __future__ import annotations

import msgspec
import pytest

from divergence.layout import fold
from divergence.report.screen import WIDTH, screen_lines, smallest_visible
from divergence.words import HEADLINES


def _text(report):
    return [piece.text for item in screen_lines(report) for piece in fold(item, WIDTH)]


@pytest.mark.parametrize("name", ["make_report", "make_long_report", "make_nonfinite_report"])
def test_fits_on_a_screen(reports, name):
    """Only a command, which is to be copied, may be wider."""
    text = _text(getattr(reports, name)())
    assert len(text) <= 25
    wide = [one for one in text if len(one) > WIDTH]
    assert all(one.startswith("  divergence ") for one in wide)


@pytest.mark.parametrize("kind", HEADLINES)
def test_every_kind_of_verdict_has_a_word(reports, kind):
    report = reports.make_report(verdict=reports.make_verdict(kind))
    assert _text(report)[0].startswith(HEADLINES[kind] + ": ")


def test_two_dtypes_are_no_plain_ok(reports):
    report = reports.make_report()
    other = msgspec.structs.replace(report.candidate, dtype="float16")
    report = msgspec.structs.replace(report, candidate=other)
    assert _text(report)[0].startswith("DIFFERENT PRECISION: ")


def test_the_worst_rows_and_one_command(reports):
    """At most five rows, flagged ones first; the first command alone."""
    report = reports.make_long_report()
    text = _text(report)
    start = next(n for n, one in enumerate(text) if one.startswith("worst of"))
    rows = [one for one in text[start + 2 :] if one.startswith("  ") and "prompt" in one]
    assert 1 <= len(rows) <= 5
    assert "!" in rows[0]
    assert sum(one.startswith("  divergence ") for one in text) == min(1, len(report.verdict.next))


def test_what_could_not_be_seen_is_the_limit_of_the_middle_block(reports):
    report = reports.make_report()
    assert smallest_visible(report) is None
    sites = [
        msgspec.structs.replace(site, role="block", limit=2.0, floor=floor)
        for site, floor in zip(report.sites, (1e-3, 2e-3, 3e-3, 4e-3), strict=True)
    ]
    seen = msgspec.structs.replace(report, sites=sites)
    assert smallest_visible(seen) == pytest.approx(5e-3)
    assert any("below about 0.5" in one for one in _text(seen))
