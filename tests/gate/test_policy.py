"""Policies, and what `check` makes of a report under one."""

import math
import sys
from types import ModuleType

import msgspec
import pytest

import divergence
from divergence import Report, check
from divergence.comparison.result import Coverage, PassCoverage
from divergence.config import config_names, find_config
from divergence.errors import ConfigError, IncomparableError
from divergence.facts import plain
from divergence.gate.policy import load_policy
from divergence.numerics.floor import Thresholds
from tests import by_hand


@pytest.fixture
def rules(checked):
    """``rules(report, **tables)``: those of a policy of these tables that are not met."""

    def names(report: Report, **tables) -> list[str]:
        return [failure.rule for failure in checked(report, by_hand.policy(**tables)).failures]

    return names


@pytest.fixture
def comparing(monkeypatch):
    """Makes compare() answer with a given report."""

    def answer(report: Report) -> list[tuple]:
        calls = []

        def compare(reference, candidate, **options):
            calls.append((reference, candidate, options))
            return report

        module = ModuleType("divergence.comparison.api")
        module.compare = compare
        monkeypatch.setitem(sys.modules, "divergence.comparison.api", module)
        return calls

    return answer


# --- policies as files -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in config_names() if not name.startswith("sites-")])
def test_shipped_policies_load(name):
    """Every policy in configs/ can be loaded by its name and by its path."""
    if name.startswith("map-"):
        pytest.skip("a name map")
    assert load_policy(name).name == name
    assert load_policy(find_config(name)) == load_policy(name)


def test_a_limit_of_an_earlier_version_is_taken_for_nothing(tmp_path):
    """With a warning that says which, so that nobody's CI stops."""
    path = tmp_path / "mine.toml"
    path.write_text("[thresholds]\nlone = 4.0\ntypical = 7.0\n")
    with pytest.warns(UserWarning, match=r"thresholds.lone: there is no such limit any more"):
        policy = load_policy(path)
    assert policy.thresholds.typical == 7.0


def test_the_default_policy_is_ci():
    """Without --policy the one that accepts rounding and nothing else holds."""
    assert load_policy() == load_policy("ci")
    assert load_policy().verdicts == ("identical", "within_floor")
    assert load_policy().min_coverage == 1.0


@pytest.mark.parametrize(
    ("text", "place", "told"),
    [
        ("verdict = []", "", "verdicts"),
        ("[[tolerance]]\nrel_l3 = 1", "tolerance[0]", "rel_l2"),
        ("[tokens]\nmin_equl = 1", "tokens", "min_equal"),
        ("min_coverage = 1.5", "min_coverage", "<= 1"),
        ('verdicts = ["fine"]', "verdicts[0]", "one of drift, identical"),
        ('verdicts = ["incomparable"]', "verdicts", "cannot be compared"),
        ("verdicts = []", "verdicts", "no verdict"),
        ('[[tolerance]]\nsites = "*"', "tolerance[0]", "rel_l2"),
        ("verdicts = [", "", "TOML"),
        *(
            (f"[[known]]\n{text}\n", "known[0]", told)
            for text, told in {
                "sites = '*'\nmax = { rel_l2 = 1e-2 }": "reason",
                "sites = '*'\nmax = { rel_l2 = 1e-2 }\nreason = ' '": "no reason",
                "sites = '*'\nreason = 'x'": "max",
                "sites = '*'\nreason = 'x'\nmax = {}": "no upper limit",
                "reason = 'x'\nmax = { rel_l2 = 1e-2 }": "sites",
                "sites = []\nreason = 'x'\nmax = { rel_l2 = 1e-2 }": "no site",
                "sites = '*'\nreason = 'x'\nmax = { rel_l2 = 1e-2 }\nuntil = 'soon'": "until",
                "sites = '*'\nreason = 'x'\nmax = { rel_l2 = 1e-2 }\ndtype = 'bf17'": "bf17",
                "sites = 're:('\nreason = 'x'\nmax = { rel_l2 = 1e-2 }": "regular expression",
            }.items()
        ),
    ],
)
def test_wrong_policies_name_file_and_key(tmp_path, text, place, told):
    """A wrong policy is refused with its file, the key path and the right name; a known difference
    needs sites, an upper limit and a reason."""
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(file)
    assert str(file) in str(caught.value)
    assert place in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize("value", ["0", "-1.0", "nan", "inf", "-inf", "1e9", "1e-9"])
@pytest.mark.parametrize(
    ("text", "key"),
    [("[thresholds]\ntypical = {}", "thresholds.typical"), ("[thresholds]\nflip = {}", "flip")],
)
def test_thresholds_are_positive_finite_and_bounded(tmp_path, value, text, key):
    """A multiple of the floor that would flag everything, or nothing, is refused with the range."""
    file = tmp_path / "mine.toml"
    file.write_text(text.format(value))
    with pytest.raises(ConfigError, match=r"allowed is 0\.01 to 1000") as caught:
        load_policy(file)
    assert str(file) in str(caught.value) and key in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[tolerance]]\nrel_l2 = {}", "allowed is 0 to 2"),
        ("[[tolerance]]\nmax_abs = {}", "allowed is 0 to 65504"),
        ("[[tolerance]]\nratio = {}", "allowed is 0 to 1000"),
        ("[tokens]\ntie_z = {}", "allowed is 0 to 6.6"),
        ("[tokens]\ntie_margin = {}", "allowed is 0 to 4"),
        ("[tokens]\ntie_margin = {{ bfloat16 = {} }}", "allowed is 0 to 4"),
        ("[[known]]\nsites = '*'\nreason = 'x'\nmax = {{ rel_l2 = {} }}", "allowed is 0 to 2"),
        ("min_coverage = {}", "min_coverage"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-1.0", "1e9"])
def test_limits_are_finite_and_bounded(tmp_path, text, told, value):
    """nan is below no limit and above none; 1e9 excuses everything."""
    file = tmp_path / "mine.toml"
    file.write_text(text.format(value))
    with pytest.raises(ConfigError, match=told):
        load_policy(file)


def test_a_policy_made_in_python_is_checked_too():
    """What no file holds is held against the same bounds, also in compare()."""
    with pytest.raises(ConfigError, match="typical"):
        load_policy(by_hand.policy(thresholds={"typical": math.nan}))
    with pytest.raises(ConfigError, match="typical"):
        divergence.compare("a", "b", thresholds=Thresholds(typical=0.0))


@pytest.mark.parametrize("name", ["ci", "strict"])
def test_a_file_of_that_name_is_not_the_policy(tmp_path, monkeypatch, name):
    """Names of shipped policies win; a path has a suffix or a slash."""
    (tmp_path / name).write_text('verdicts = ["localized", "nonfinite"]\nmin_coverage = 0.0\n')
    shipped = load_policy(name)
    monkeypatch.chdir(tmp_path)
    assert load_policy(name) == shipped
    assert load_policy(f"./{name}").verdicts == ("localized", "nonfinite")
    (tmp_path / "mine").write_text("min_coverage = 0.5\n")
    with pytest.raises(ConfigError, match=r"write \./mine"):
        load_policy("mine")


def test_an_unknown_policy_names_its_neighbours():
    """A misspelt name is answered with the right one."""
    with pytest.raises(ConfigError, match="did you mean strict"):
        load_policy("stritc")


# --- rules -------------------------------------------------------------------------------------


def test_healthy_report_passes_ci(reports, checked):
    """Rounding differences between two machines pass the default policy."""
    result = checked(reports.make_report(), load_policy())
    assert result.passed
    assert result.failures == []


@pytest.mark.parametrize("kind", ["systematic", "localized", "drift", "nonfinite", "undetermined"])
def test_other_verdicts_fail_ci(reports, kind, checked):
    """A verdict that the policy does not name fails, an abstention too."""
    report = reports.make_report(verdict=reports.make_verdict(kind))
    assert [failure.rule for failure in checked(report, load_policy()).failures] == ["verdicts"]


def test_strict_fails_within_floor(reports, checked):
    """Bit-identical means that rounding is no excuse; each site is named."""
    found = checked(reports.make_report(), load_policy("strict")).failures
    assert found[0].rule == "verdicts"
    assert {failure.site for failure in found[1:]} == {
        "model.layers.0:out",
        "model.layers.1:out",
        "lm_head:out",
    }


def test_planted_fault_fails_ci(reports, checked):
    """The report of a planted fault fails by its verdict, its coverage and its preflight."""
    found = [item.rule for item in checked(reports.make_long_report(), load_policy()).failures]
    assert found == ["verdicts", "min_coverage", "preflight"]


@pytest.mark.parametrize(("wanted", "passed"), [(0.8, True), (0.81, False)])
def test_coverage_counts_what_was_left_out(reports, wanted, passed, rules):
    """The share is of all that the golden offered; extra sites of the new run do not count."""
    coverage = Coverage(num_compared=8, num_only_reference=1, num_only_candidate=90, num_skipped=1)
    report = reports.make_report(coverage=coverage, preflight=[])
    assert (rules(report, min_coverage=wanted) == []) is passed


def test_preflight_differences_need_leave(reports, rules):
    """A difference passes if a glob allows its check; a blocking one never does."""
    report = reports.make_report()
    assert rules(report) == ["preflight"]
    assert rules(report, preflight={"allow": ["mach*"]}) == []
    assert rules(report, preflight={"allow": ["*"], "refuse": ["mach*"]}) == ["preflight"]
    blocked = reports.make_long_report()
    assert "preflight" in rules(blocked, preflight={"allow": ["*"]})


def ok(**tables):
    return {
        "verdicts": ["localized", "within_floor"],
        "min_coverage": 0.5,
        "preflight": {"allow": ["*"]},
        **tables,
    }


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({}, []),
        ({"min_equal": 0.6}, []),
        ({"min_equal": 1.0}, ["tokens.min_equal"]),
        ({"min_equal_count": 2}, []),
        ({"min_equal_count": 3}, ["tokens.min_equal_count"]),
        ({"min_equal": 1.0, "tie_margin": 0.1}, []),
        ({"min_equal": 1.0, "tie_margin": 0.0625}, []),
        ({"min_equal": 1.0, "tie_margin": 0.05}, ["tokens.min_equal"]),
        ({"min_equal": 1.0, "tie_margin": {"bfloat16": 0.1}}, []),
        ({"min_equal": 1.0, "tie_margin": {"float32": 0.1}}, ["tokens.min_equal"]),
    ],
)
def test_tokens_and_ties(reports, tokens, expected, rules):
    """2 of 3 tokens are equal; the flip's margins are 0.0625 and 0.03 logits."""
    report = reports.make_long_report()
    report = msgspec.structs.replace(report, preflight=[])
    assert rules(report, **ok(tokens=tokens)) == expected


def test_a_tie_ends_the_count_where_tokens_are_not_forced(reports, rules):
    """After a tie each run continues its own text, and that is no fault of either."""
    report = reports.make_long_report()
    report = msgspec.structs.replace(report, preflight=[])
    report = msgspec.structs.replace(
        report, tokens=msgspec.structs.replace(report.tokens, num_tokens=9, num_equal=2)
    )
    wanted = ok(tokens={"min_equal": 1.0, "tie_margin": 0.1})
    assert rules(report, **wanted) == ["tokens.min_equal"]
    report = msgspec.structs.replace(
        report, tokens=msgspec.structs.replace(report.tokens, forced=False)
    )
    assert rules(report, **wanted) == []


@pytest.mark.parametrize(
    ("tolerance", "num"),
    [
        ({"rel_l2": 1e-2}, 0),
        ({"rel_l2": 1e-3}, 3),
        ({"rel_l2": 1e-3, "sites": "lm_head"}, 1),
        ({"rel_l2": 1e-3, "sites": ["lm_head:*", "re:model\\.layers\\.0:out"]}, 2),
        ({"rel_l2": 1e-3, "dtype": "float32"}, 0),
        ({"rel_l2": 1e-3, "pass": "anchored", "optional": True}, 0),
        ({"max_abs": 0.01, "one_minus_cosine": 1.0}, 3),
        ({"ratio": 1.1}, 3),
    ],
)
def test_tolerances(reports, tolerance, num, rules):
    """A limit holds at the sites that its table names, and nowhere else."""
    tables = ok(tolerance=[tolerance])
    assert len(rules(reports.make_report(), **tables)) == num


def test_a_tolerance_that_means_no_site_fails(reports, rules):
    """A misspelt glob, or a pass that was not compared, would hold nothing against its limits."""
    report = reports.make_report()
    for meant in ({"sites": "model.layer.*"}, {"pass": "escalated"}):
        tables = ok(tolerance=[meant | {"rel_l2": 1.0}])
        assert rules(report, **tables) == ["tolerance[0]"]
        tables["tolerance"][0]["optional"] = True
        assert rules(report, **tables) == []
    # another dtype is another policy's business, and an entry behind another one still means sites
    assert rules(report, **ok(tolerance=[{"dtype": "float32", "rel_l2": 1.0}])) == []
    assert rules(report, **ok(tolerance=[{"rel_l2": 1.0}, {"sites": "lm_head", "rel_l2": 1}])) == []


def test_a_preflight_name_that_is_none_is_noted(reports, checked):
    """A misspelt check refuses nothing, and the answer says that there is none of that name."""
    policy = by_hand.policy(preflight={"allow": ["*"], "refuse": ["machin"]})
    (note,) = checked(reports.make_report(), policy).notes
    assert "machin" in note and "did you mean machine" in note


def test_coverage_is_the_least_of_all_passes(reports, rules, checked):
    """What one pass lacks is not made up for by another; each lack is a failure of its own."""
    passes = [
        PassCoverage(pass_="free", what="tensors", num_reference=90, num_compared=90),
        PassCoverage(
            pass_="free",
            what="operators",
            num_reference=4,
            num_compared=1,
            num_missing=3,
            why=plain("none recorded"),
            reason="none recorded",
        ),
        PassCoverage(pass_="free", what="tensors", num_reference=2, num_compared=2, num_extra=2),
        PassCoverage(pass_="free", what="tokens", num_reference=0, num_compared=0),
    ]
    coverage = Coverage(
        num_compared=90, num_only_reference=0, num_only_candidate=0, num_skipped=0, passes=passes
    )
    report = reports.make_report(coverage=coverage, preflight=[])
    found = checked(report, by_hand.policy()).failures
    assert [failure.found for failure in found] == ["0.25", "0.5"]
    assert "3 were not (none recorded)" in found[0].text
    assert rules(report, min_coverage=0.5) == ["min_coverage"]


def test_the_first_matching_tolerance_applies(reports, rules):
    """An exception is written above the rule."""
    tolerances = [{"sites": "lm_head", "rel_l2": 1.0}, {"rel_l2": 1e-3}]
    assert len(rules(reports.make_report(), **ok(tolerance=tolerances))) == 2


def test_nan_is_above_every_limit(reports, rules):
    """A number that is none never meets a tolerance."""
    report = reports.make_nonfinite_report()
    tables = ok(verdicts=["nonfinite"], tolerance=[{"rel_l2": 2.0}])
    assert rules(report, **tables) == ["tolerance.rel_l2"] * 2


def test_a_ratio_needs_a_floor(reports, rules):
    """A limit in floors fails where there is no floor, since nothing was checked there."""
    report = reports.make_report()
    report.sites[1] = msgspec.structs.replace(report.sites[1], ratio=None)
    assert rules(report, **ok(tolerance=[{"ratio": 10.0}])) == ["tolerance.ratio"]


def test_tolerance_dtype_must_be_that_of_both_sides(reports, rules):
    """A float32 candidate of a bfloat16 golden is no bfloat16 pair."""
    report = reports.make_report(sites=[reports.make_site("a:out", candidate_dtype="float32")])
    limit = {"rel_l2": 0.0}
    assert rules(report, **ok(tolerance=[limit | {"dtype": "bfloat16"}])) == []
    assert rules(report, **ok(tolerance=[limit])) == ["tolerance.rel_l2"]


# --- check -------------------------------------------------------------------------------------


def test_check_compares_and_judges(reports, comparing):
    """check() hands golden and new to compare() in that order and evaluates its report."""
    calls = comparing(reports.make_report())
    result = check("golden", "new", name_map="map.toml")
    assert result.passed
    [(golden, new, options)] = calls
    assert (golden, new, options["name_map"]) == ("golden", "new", "map.toml")
    assert options["thresholds"] == load_policy().thresholds


def test_a_policy_moves_a_threshold(reports, comparing, tmp_path):
    """[thresholds] of a policy reach the comparison; what it does not name keeps its value, and a
    name that is none is refused."""
    calls = comparing(reports.make_report())
    file = tmp_path / "loose.toml"
    file.write_text("[thresholds]\ntypical = 9.0\n")
    check("golden", "new", policy=str(file), truth="t", floor=("f",))
    [(_, _, options)] = calls
    assert options["thresholds"] == Thresholds(typical=9.0)
    assert (options["truth"], options["floor"]) == ("t", ("f",))
    file.write_text("[thresholds]\ntypcal = 9.0\n")
    with pytest.raises(ConfigError, match="typcal"):
        load_policy(str(file))


def test_nothing_compared_is_an_error(reports, comparing):
    """No record in common is neither a pass nor a divergence."""
    empty = Coverage(num_compared=0, num_only_reference=9, num_only_candidate=9, num_skipped=0)
    comparing(reports.make_report(coverage=empty, sites=[]))
    with pytest.raises(IncomparableError, match="nothing was compared") as caught:
        check("golden", "new")
    assert caught.value.exit_code == 2


def test_incomparable_is_an_error(reports, comparing):
    """The error names what blocks, and carries the report for whoever shows it."""
    report = reports.make_long_report()
    report = msgspec.structs.replace(
        report, verdict=reports.make_verdict("incomparable", summary="other weights")
    )
    comparing(report)
    with pytest.raises(IncomparableError, match="weights: 1111 in the golden") as caught:
        check("golden", "new")
    assert caught.value.report is report


def test_the_package_is_the_api(reports, comparing):
    """divergence.check is this check, and divergence.compare can be called."""
    report = reports.make_report()
    comparing(report)
    assert divergence.check is check
    assert divergence.compare("a", "b") is report
    assert divergence.Report is Report
