"""The table of a suite's operators."""

from divergence.domains.suite.result import SuiteCase, SuiteOperator, SuiteResult, SuiteSide
from divergence.report.summary import report_lines


def make_case(site: str = "silu.float32.odd.normal/suite.silu:out", **changes) -> SuiteCase:
    values = {
        "site": site,
        "operator": "suite.silu",
        "dtype": "float32",
        "kind": "values",
        "status": "healthy",
        "same": False,
        "rel_l2": 1e-7,
        "w": 1.25,
        "ideal_error": 2e-8,
        "reference": SuiteSide(error=4e-8, ulp_p99=1.0, ulp_max=2.0, score=0.9, gain=0.5),
        "candidate": SuiteSide(error=5e-8, ulp_p99=2.0, ulp_max=3e6, score=1.1, gain=0.4),
    }
    return SuiteCase(**{**values, **changes})


def make_operator(case: SuiteCase, **changes) -> SuiteOperator:
    values = {
        "operator": case.operator,
        "reference_implementation": "torch",
        "candidate_implementation": "torch",
        "status": case.status,
        "side": case.side,
        "num_cases": 4,
        "num_same": 1,
        "num_by_status": {case.status: 3},
        "worst": case,
    }
    return SuiteOperator(**{**values, **changes})


def text(reports, operators, *, judged: bool = True, every: bool = False) -> list[str]:
    suite = SuiteResult(
        judged=judged,
        score_limit=4.0,
        gain_limit=6.0,
        operators=operators,
        cases=[one.worst for one in operators],
    )
    report = reports.make_report(sites=[], parts={"suite": suite})
    lines = [line.text.rstrip() for line in report_lines(report, all_sites=every)]
    return lines[next(n for n, line in enumerate(lines) if line.startswith("operators  ")) :]


def test_no_suite_no_table(reports):
    """A report on models has no such section."""
    lines = [line.text for line in report_lines(reports.make_report())]
    assert not [line for line in lines if line.startswith("operators")]


def test_one_line_an_operator(reports):
    """Side, number of results that differ, W, both scores and ulp, and the case that is worst."""
    wrong = make_case(status="wrong", side="candidate", w=1e9)
    lines = text(reports, [make_operator(wrong, candidate_implementation="flash_attn")])
    assert lines[0].startswith("operators  1 operator, 1 result, against the truth")
    assert lines[2].split() == [
        "!",
        "silu",
        "B",
        "3/4",
        "1.0e+09",
        "×",
        "0.9/1.1",
        "1/2",
        "2/3.0e+06",
        "float32.odd.normal",
    ]
    assert lines[3].split() == ["ran", "by", "torch", "/", "flash_attn"]


def test_codes_and_indices_are_shares(reports):
    """Codes by how far they are off, indices by what kind of choice they are."""
    codes = make_case(
        kind="codes",
        status="wrong",
        side="reference",
        w=None,
        operator="suite.quantize",
        reference=SuiteSide(off_by_one=0.25, off_by_more=0.0),
        candidate=SuiteSide(off_by_one=0.0, off_by_more=0.0),
    )
    ties = make_case(
        site="topk.float32.odd.ties/suite.topk:out.1",
        kind="indices",
        status="ties",
        side="both",
        w=None,
        operator="suite.topk",
        reference=SuiteSide(rows_tied=0.5, rows_near=0.0, rows_wrong=0.0),
        candidate=SuiteSide(rows_tied=1.0, rows_near=0.0, rows_wrong=0.0),
    )
    joined = "\n".join(text(reports, [make_operator(codes), make_operator(ties)]))
    assert "off by one 25% / 0, more 0 / 0" in joined
    assert "ties: both" in joined
    assert "odd.ties :out.1: rows wrong 0 / 0, tied 50% / 100%" in joined


def test_equal_operators_are_one_line(reports):
    """What has the same bits is listed by name, and in full with --all."""
    same = make_case(status="identical", same=True, rel_l2=0.0)
    brief = text(reports, [make_operator(same)])
    assert brief[1].strip() == "bit-identical: silu"
    assert any("identical" in line for line in text(reports, [make_operator(same)], every=True))


def test_without_a_truth(reports):
    """Distances between the sides; no side, no W."""
    apart = make_case(
        status="differs", w=None, reference=None, candidate=None, ulp_p99=3.0, ulp_max=9.0
    )
    lines = text(reports, [make_operator(apart)], judged=False)
    assert "no truth was given" in lines[0]
    assert lines[2].split() == ["silu", "3/4", "1.0e-07", "3", "9", "float32.odd.normal"]
