"""What programs read: strict JSON and CSV with every number in full."""

import csv
import io
import json
import sys
from types import SimpleNamespace

import msgspec
import pytest

from divergence.comparison.result import TruthDiff, strict_json
from divergence.errors import UsageError
from divergence.numerics.sums import Estimate


def refuse(name: str):
    raise AssertionError(f"{name} is no JSON")


def test_json_writes_nonfinite_numbers_as_strings(reports, checked, printed):
    """nan and inf are the strings "nan", "inf" and "-inf" in every document."""
    report = reports.make_nonfinite_report()
    for text in (
        report.to_json(),
        printed(checked(report), "--json"),
        strict_json({"x": [float("nan"), float("inf"), float("-inf")]}),
    ):
        json.loads(text, parse_constant=refuse)
    site = json.loads(report.to_json())["sites"][2]
    assert (site["rel_l2"], site["max_abs"], site["sqnr_db"]) == ("nan", "inf", "-inf")
    assert json.loads(strict_json({"x": [float("-inf"), 1e-3]})) == {"x": ["-inf", 1e-3]}


def test_json_keeps_full_precision(reports):
    """A float64 survives the way through JSON."""
    report = reports.make_report()
    report.sites[1] = msgspec.structs.replace(report.sites[1], rel_l2=0.1 + 0.2)
    assert json.loads(report.to_json())["sites"][1]["rel_l2"] == 0.1 + 0.2


def test_check_json_holds_the_report(reports, checked, printed):
    """`check --json` embeds exactly the report of `compare --json`."""
    report = reports.make_long_report()
    answer = json.loads(printed(checked(report), "--json"))
    assert answer["schema_version"] == 1
    assert answer["passed"] is False
    assert answer["failures"][0]["rule"] == "verdicts"
    assert answer["report"] == json.loads(report.to_json())


def test_csv_has_one_line_per_site(reports, printed):
    """All columns are there whatever the report holds, and floats read back exactly."""
    report = reports.make_long_report(num_blocks=3, onset=1)
    report.sites[0] = msgspec.structs.replace(report.sites[0], rel_l2=0.1 + 0.2)
    report.sites[1] = msgspec.structs.replace(report.sites[1], rel_l2=float("nan"))
    rows = list(csv.DictReader(io.StringIO(printed(report, "--csv", "-"))))
    assert len(rows) == len(report.sites)
    assert float(rows[0]["rel_l2"]) == 0.1 + 0.2
    assert rows[1]["rel_l2"] == "nan"
    assert rows[0]["shape"] == "1x6x16"
    assert rows[0]["max_abs_index"] == "0 3 7"
    assert rows[0]["logits_kl_mean"] == ""
    assert float(rows[-1]["logits_kl_mean"]) == 1e-3


def test_columns_are_those_of_to_records(reports, printed):
    """The CSV and Report.to_records name the same things; a report without sites is a header, not
    an empty file."""
    header = printed(reports.make_report(sites=[]), "--csv", "-").strip().split(",")
    report = reports.make_long_report(num_blocks=2, onset=1)
    report.sites[0] = msgspec.structs.replace(
        report.sites[0],
        nonfinite=reports.NonfiniteCount(candidate_nan=1),
        truth=TruthDiff(**dict.fromkeys(TruthDiff.__struct_fields__, 1.0)),
        estimated=Estimate(**dict.fromkeys(Estimate.__struct_fields__, 1)),
    )
    assert {key for row in report.to_records() for key in row} == set(header)
    assert printed(report, "--csv", "-").splitlines()[0].split(",") == header
    assert msgspec.json.decode(report.to_json())["schema_version"] == 1


def test_a_path_that_is_no_utf8_is_escaped(reports):
    """As the terminal shows it; a report is never lost for the name of a directory."""
    report = reports.make_nonfinite_report()
    report = msgspec.structs.replace(
        report, reference=msgspec.structs.replace(report.reference, path="n\udcff")
    )
    assert json.loads(report.to_json())["reference"]["path"] == "n\\udcff"
    assert json.loads(strict_json({"path": "n\udcff"})) == {"path": "n\\udcff"}


def test_a_table_for_the_library_that_is_asked_for(reports, monkeypatch):
    """Lazily imported; where it is missing the error says what to do."""
    report = reports.make_report()
    made = []

    def frame(rows, **options):
        made.append((len(rows), options))
        return "frame"

    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(DataFrame=frame))
        assert getattr(report, f"to_{name}")() == "frame"
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=f"{name} is not installed"):
            getattr(report, f"to_{name}")()
    assert [rows for rows, _ in made] == [4, 4]
