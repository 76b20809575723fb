"""Two evaluations: the verdict, what it rests on, and what is refused."""

import json
import re

import numpy as np
import pytest
from scipy import stats

import divergence
from divergence import scores
from divergence.domains.scores.rows import Band, ScoresPolicy, parse_band
from divergence.errors import ConfigError, DumpError, UsageError
from divergence.gate.policy import load_policy
from tests.counting import lines_of_python
from tests.domains.scores.conftest import sample


def flipped(num, lost, gained, *, right=0.5):
    """Scores of both sides: so many of the right ones lost, of the wrong ones gained."""
    a = [1.0] * round(num * right) + [0.0] * (num - round(num * right))
    b = [0.0] * lost + a[lost:]
    return a, b[: len(b) - gained] + [1.0] * gained


CASES = {
    "equal": (2000, 4, 4),
    "worse": (2000, 120, 20),
    "better": (2000, 20, 120),
    "undecided": (150, 4, 2),
}


@pytest.mark.parametrize("verdict", CASES)
def test_the_four_verdicts(verdict, table):
    """At a 3% band of a score of 50%, ±1.5 points."""
    a, b = flipped(*CASES[verdict])
    report = scores(table("a", a), table("b", b))
    (task,) = report.candidates[0].tasks
    assert report.verdict == task.verdict == verdict and report.passed is None
    assert task.bands[0].width == pytest.approx(0.015) and task.bands[1].limit == 0.05
    assert (task.num_lost, task.num_gained) == CASES[verdict][1:]
    assert task.test == "mcnemar" and task.low < task.difference < task.high
    assert (task.bands[0].needed is None) == (verdict != "undecided")


def test_no_difference_is_never_said_of_chance(table):
    """Nothing flipped among 40 documents: undecided, with how many would settle it."""
    a = [1.0, 0.0] * 20
    (task,) = scores(table("a", a), table("b", a)).candidates[0].tasks
    assert task.p_value == 1.0 and task.verdict == "undecided"
    assert "documents would be needed" in task.summary and task.bands[0].needed > 40
    assert "every answer is the same" in task.notes[0]


@pytest.mark.slow
def test_a_real_difference_within_the_band_is_equal(table):
    """Small and beyond chance: said, and no reason to fail."""
    a, b = flipped(20_000, 90, 10)
    (task,) = scores(table("a", a), table("b", b), band="3%").candidates[0].tasks
    assert task.verdict == "equal" and "a difference beyond chance" in task.summary


def test_the_issues_case(table):
    """41.4 against 39.9 of 1,319: with many flips undecided, with few of them worse."""
    a, b = flipped(1319, 110, 90, right=0.414)
    assert scores(table("a", a), table("b", b)).verdict == "undecided"
    a, b = flipped(1319, 21, 1, right=0.414)
    assert scores(table("c", a), table("d", b)).verdict == "worse"


def test_clusters_make_it_less_sure(table):
    """Documents that flip together are fewer facts than documents."""
    a, b = flipped(2000, 30, 12)
    groups = [str(n // 10) for n in range(2000)]
    (alone,) = scores(table("a", a), table("b", b)).candidates[0].tasks
    (together,) = (
        scores(table("c", a, group=groups), table("d", b, group=groups)).candidates[0].tasks
    )
    assert together.pairing.num_clusters == 200 and together.test == "permutation"
    assert together.standard_error > 1.5 * alone.standard_error


def test_few_clusters_that_flip_one_way_are_named(table):
    """One more of them would change mean and error alike; in both directions it is no matter."""
    groups = [str(n // 5) for n in range(1000)]
    for name, gained, noted in (("one", 0, True), ("two", 20, False)):
        a, b = flipped(1000, 20, gained)
        report = scores(table("a", a, group=groups), table(name, b, group=groups))
        (task,) = report.candidates[0].tasks
        assert any("clusters differ, nearly all in one" in note for note in task.notes) is noted


@pytest.mark.parametrize(("num", "share"), [(40, 1.0), (300, 1.0), (300, 0.9), (300, 0.5)])
def test_graded_scores_have_the_interval_of_the_paired_t_test(num, share, table, invoke, tmp_path):
    """Ungrouped, and where more than a third differ nothing is made up beside them."""
    rng = np.random.default_rng(0)
    a = rng.random(num) / 2
    diff = np.where(rng.random(num) < share, 0.1063 + 0.004 * rng.normal(size=num), 0.0)
    task = scores(table("a", a.tolist()), table("b", (a + diff).tolist())).candidates[0].tasks[0]
    reach = stats.t.ppf(0.975, num - 1) * diff.std(ddof=1) / num**0.5
    assert task.high - task.low == pytest.approx(2 * reach, rel=0.02)
    assert task.low == pytest.approx(diff.mean() - reach, rel=0.01)
    _, shown, _ = invoke("scores", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert re.search(r"(?m)^changes +0 scores fell", shown)
    assert not re.search(r"(?m)^flips ", shown)


@pytest.mark.parametrize("num", [40, 150])
def test_as_many_documents_are_needed_wherever_it_is_said(num, table, invoke, tmp_path):
    """The first line and the bands below it give one number."""
    a, b = flipped(num, 4, 3)
    task = scores(table("a", a), table("b", b)).candidates[0].tasks[0]
    needed = f"some {task.bands[0].needed:,} documents would"
    _, shown, _ = invoke("scores", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "-v")
    first = re.search(r"(?m)^ *band +(.*(?:\n {8}.*)*)", shown)[1]
    assert needed in task.summary and needed in " ".join(first.split())


@pytest.mark.slow
def test_graded_scores_and_metrics_that_are_lower(table):
    """A permutation of signs; of a loss the lower is better, however it is written."""
    generator = np.random.default_rng(0)
    a = generator.random(400)
    b = a + generator.normal(0.02, 0.05, 400)
    metric = ["PPL"] * 400
    (task,) = scores(table("a", a, metric=metric), table("b", b, metric=metric)).candidates[0].tasks
    assert task.test == "permutation" and task.verdict == "worse" and not task.higher_is_better
    assert task.num_lost == int((b > a).sum())


def test_several_tasks_and_candidates_are_one_family(table):
    """Holm over all of them: a p of 0.03 among four is no longer beyond chance."""
    a, b = flipped(400, 15, 5)
    four = [f"t{n % 4}" for n in range(1600)]
    a4 = [one for one in a for _ in range(4)]
    b4 = [y if n % 4 == 0 else x for x, y in zip(a, b, strict=True) for n in range(4)]
    ids = [str(n // 4) for n in range(1600)]
    report = scores(table("a", a4, task=four, id=ids), table("b", b4, task=four, id=ids))
    worst = min(report.candidates[0].tasks, key=lambda task: task.p_value)
    assert worst.p_value < 0.05 < worst.p_adjusted and worst.verdict == "undecided"
    assert report.candidates[0].summary.startswith("4 scores: ")
    report = scores(table("c", a), table("d", b), table("e", a))
    assert [one.verdict for one in report.candidates][1] != "worse"
    assert report.candidates[0].tasks[0].p_adjusted == pytest.approx(2 * worst.p_value, rel=1e-6)


@pytest.mark.slow
def test_the_gate(table):
    """--band and --policy say which verdicts pass; a remainder is not a pass."""
    a, b = flipped(2000, 4, 4)
    one, other = table("a", a), table("b", b)
    assert scores(one, other, band="3%").passed is True
    assert scores(one, other, band="0.1%").passed is False
    assert scores(one, other, policy="strict").passed is True
    told = scores(one, table("short", b[:-100]), band="3%").candidates[0]
    assert told.verdict == "equal" and told.passed is False
    assert "1,900 of 2,000 documents were paired" in told.reasons[0]
    loose = ScoresPolicy(min_paired=0.9, verdicts=("equal", "undecided"))
    assert scores(one, table("short", b[:-100]), policy=loose).passed is True
    assert load_policy("ci").scores.verdicts == ("equal", "better")
    with pytest.raises(ConfigError, match="is no band"):
        scores(one, other, policy=ScoresPolicy(band="much"))


@pytest.mark.parametrize(
    ("text", "band"),
    [
        ("3%", Band(0.03, True)),
        ("±2.5 %", Band(0.025, True)),
        ("1.5pp", Band(0.015, False)),
        ("0.015", Band(0.015, False)),
        (2.0, Band(2.0, False)),
    ],
)
def test_bands(text, band):
    """A band is a share, or a difference, as written."""
    assert parse_band(text) == band


@pytest.mark.parametrize("text", ["", "-3%", "0%", "100%", "three", "nan", "inf", "1.2.3%"])
def test_what_is_no_band(text):
    """Anything else is refused."""
    with pytest.raises(UsageError, match="is no band"):
        parse_band(text)


def test_other_tasks_and_other_few_shot(lm_eval):
    """Stopped, with what differs; --force compares all the same."""

    def lines(words):
        return [
            sample(n, score=float(n % 2), right=0, likelihoods=[-1.0, -2.0], prompt=f"{words} {n}")
            for n in range(8)
        ]

    def results(shots):
        return {"n-shot": {"quiz": shots}, "versions": {"quiz": 1}, "configs": {"quiz": {}}}

    a = lm_eval("a", lines("Q"), results=results(0))
    report = scores(a, lm_eval("b", lines("Q"), task="other"))
    assert report.verdict == "incomparable" and "has no" in report.candidates[0].summary
    b = lm_eval("c", lines("Example. Q"), results=results(5))
    report = scores(a, b)
    assert report.verdict == "incomparable"
    assert "few-shot: 0 / 5" in report.candidates[0].summary
    assert "8 asked in other words" in report.candidates[0].summary
    assert scores(a, b, force=True).verdict == "undecided"


def test_documents_that_are_missing_by_lm_evals_own_count(lm_eval):
    """A samples file that was cut at the end of a line is not the whole evaluation."""
    lines = [sample(n, score=1.0, right=0, likelihoods=[-1.0, -2.0]) for n in range(6)]
    results = {"n-samples": {"quiz": {"original": 9, "effective": 9}}}
    report = scores(lm_eval("a", lines), lm_eval("b", lines, results=results), band="50%")
    assert "quiz has 6 documents, and its results say 9" in report.candidates[0].notes[0]
    assert report.passed is False


def test_the_same_results_twice(table, lm_eval):
    """One folder twice is refused; equal bits are named as such."""
    path = table("a", [1.0, 0.0])
    with pytest.raises(UsageError, match="the same results"):
        scores(path, path)
    lines = [sample(n, score=1.0, right=0, likelihoods=[-1.0, -2.0]) for n in range(4)]
    with pytest.raises(UsageError, match="the same results"):
        scores(lm_eval("a", lines), lm_eval("a", lines) / "model")
    (task,) = scores(lm_eval("a", lines), lm_eval("b", lines)).candidates[0].tasks
    assert "log-likelihoods to the last digit" in task.notes[0]


def test_nan_scores_are_left_out(tmp_path, table):
    """Counted, with why; never a 0."""
    path = tmp_path / "a.jsonl"
    rows = [{"id": f"q{n}", "score": float("nan") if n < 3 else 1.0} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = scores(path, table("b", [1.0] * 20)).candidates[0].tasks
    assert (task.reference, task.pairing.num_unscored) == (1.0, 3)
    assert task.pairing.whys == {"the score is nan": 3}


def test_a_relative_band_of_a_score_of_zero(table):
    """Has no width, so nothing is shown; an absolute one is."""
    a, b = table("a", [0.0] * 500), table("b", [0.0] * 500)
    assert "no width" in scores(a, b).candidates[0].summary
    assert scores(a, b, band="3pp").verdict == "equal"


@pytest.mark.slow
def test_clusters_that_flip_whole_and_seldom_show_no_equality(table):
    """One of 400 clusters of ten is lost: the next set may have none, or three. As documents alone
    they would be equal."""
    a, b = flipped(4000, 10, 0)
    groups = [str(n // 10) for n in range(4000)]
    (alone,) = scores(table("a", a), table("b", b)).candidates[0].tasks
    (task,) = scores(table("c", a, group=groups), table("d", b, group=groups)).candidates[0].tasks
    assert alone.verdict == "equal"
    assert task.verdict == "undecided"
    assert task.bands[0].few_clusters and "shows no equality" in task.summary


def test_one_cluster_and_one_document_tell_nothing(table):
    """Undecided, within what a score of 0 or 1 can differ by."""
    groups = ["all"] * 300
    a, b = flipped(300, 0, 30)
    for one, other in (
        (table("a", a, group=groups), table("b", b, group=groups)),
        (table("c", [1.0]), table("d", [0.0])),
    ):
        (task,) = scores(one, other).candidates[0].tasks
        assert (task.verdict, task.p_value) == ("undecided", 1.0)
        assert -1 <= task.low < task.high <= 1 and task.shown_band <= 1


def test_percent_and_shares_are_not_compared(table):
    """100 and 1 are both "right": no fall from 50 to 0.5."""
    a = [1.0, 0.0] * 50
    report = scores(table("a", [100 * one for one in a]), table("b", a))
    assert report.verdict == "incomparable"
    assert "units: scores up to 100 / scores up to 1" in report.candidates[0].summary
    assert scores(table("c", [2 * one for one in a]), table("d", a)).verdict != "incomparable"


def test_documents_in_no_pair_stand_beside_the_verdict(table):
    """The half that is there may be the better one."""
    a, b = flipped(2000, 0, 0)
    report = scores(table("a", a), table("b", b[:1000]))
    assert report.verdict == "equal"
    assert "; 1,000 documents are in no pair" in report.candidates[0].summary


@pytest.mark.slow
def test_a_score_below_zero(table):
    """The band is a share of its size."""
    a = [-float(n % 5) for n in range(400)]
    near, far = [one - 0.01 for one in a], [one - 0.5 for one in a]
    assert scores(table("a", a), table("b", near)).verdict == "equal"
    assert scores(table("c", a), table("d", far)).verdict == "worse"


def test_counts_of_one_and_documents_in_no_pair_are_said_of_every_verdict(table):
    """In the singular, with too few clusters noted."""
    a = [1.0, 0.0] * 20
    one = ["all"] * 40
    (task,) = (
        scores(table("a", a, group=one), table("b", a[:39], group=one[:39])).candidates[0].tasks
    )
    assert task.verdict == "undecided" and "; 1 document is in no pair" in task.summary
    assert any("no more than 1 cluster:" in note for note in task.notes)
    groups = [f"g{n // 4}" for n in range(40)]
    (task,) = (
        scores(table("c", a, group=groups), table("d", [0.0] * 4 + a[4:], group=groups))
        .candidates[0]
        .tasks
    )
    assert any(note.startswith("only 1 cluster differs") for note in task.notes)


def test_absurd_scores_are_no_scores(table):
    """Squares of them would be out of range; very small ones are no matter."""
    a = table("a", [1e200, 1.0, 0.0])
    (task,) = scores(a, table("b", [1.0, 1.0, 0.0])).candidates[0].tasks
    assert task.pairing.whys == {"the score is 1e+200": 1}
    small = [1e-90 * (n % 3) for n in range(300)]
    report = scores(table("c", small), table("d", [*small[:-1], 0.0]))
    assert report.candidates[0].tasks[0].low < 0


def test_what_is_not_there_by_the_names_asked_for(table, tmp_path):
    """The names that are there; a compressed file is named as such."""
    a, b = table("a", [1.0]), table("b", [1.0])
    with pytest.raises(UsageError, match="nothing has the task") as failed:
        scores(a, b, metrics="nope")
    assert "there are: scores score" in str(failed.value)
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "samples.jsonl.gz").write_bytes(b"x")
    with pytest.raises(DumpError, match="recognised") as failed:
        scores(a, tmp_path / "gz")
    assert "unpack the .gz files" in str(failed.value)


def test_what_is_asked_wrongly(table):
    """Clear errors, before anything is read."""
    with pytest.raises(UsageError, match="belong together"):
        scores("a", "b", capture="model")
    with pytest.raises(UsageError, match="no score flipped"):
        a = table("a", [1.0])
        scores(a, table("b", [1.0]), capture="model", out="run")


def test_without_scipy(monkeypatch):
    """The pip command."""
    import builtins

    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="scipy") as failed:
        scores("a", "b")
    assert "divergence-debug[scores]" in str(failed.value)


@pytest.mark.slow
def test_two_hundred_thousand_documents(tmp_path, lm_eval):
    """Two evaluations of so many are paired in whole."""
    lines = [
        sample(n, score=float(n % 3 > 0), right=0, likelihoods=[-1.0, -2.0]) for n in range(200_000)
    ]
    a = lm_eval("a", lines)
    for n in range(0, 2000, 2):
        lines[n]["acc"] = 1.0 - lines[n]["acc"]
    b = lm_eval("b", lines)
    assert scores(a, b).candidates[0].tasks[0].pairing.num_paired == 200_000


@pytest.mark.slow
def test_more_documents_are_as_much_work_a_document(lm_eval):
    """Reading, pairing, statistics."""
    counts = []
    for size in (300, 1200):
        lines = [
            sample(n, score=float(n % 3 > 0), right=0, likelihoods=[-1.0, -2.0])
            for n in range(size)
        ]
        a = lm_eval(f"a{size}", lines)
        lines[0]["acc"] = 1.0 - lines[0]["acc"]
        b = lm_eval(f"b{size}", lines)
        with lines_of_python() as work:
            scores(a, b)
        counts.append(work.count)
    assert counts[1] < 5 * counts[0]


@pytest.mark.slow
def test_from_a_score_to_a_run(lm_eval, llama, tmp_path):
    """--capture records the flipped prompts; the run is compared as any other."""

    def lines(score):
        return [
            sample(
                n, score=score(n), right=0, likelihoods=[-1.0, -2.0 + n], prompt=f"{n} snow fell on"
            )
            for n in range(6)
        ]

    a = lm_eval("a", lines(lambda n: 1.0))
    b = lm_eval("b", lines(lambda n: float(n % 3 > 0)))
    out = tmp_path / "flips"
    report = scores(a, b, capture=llama, out=out, num_prompts=5)
    assert report.captured.num_prompts == 2
    for word, line in zip(("--like", "compare", "--runs"), report.next, strict=True):
        assert word in line
    run = divergence.Run.open(out)
    assert len(run.manifest.tokens.samples) == 2
    assert [len(one.generated_ids) for one in run.manifest.tokens.samples] == [1, 1]
    divergence.capture(like=run, out=tmp_path / "other", probe=False)
    assert divergence.compare(out, tmp_path / "other").verdict.kind == "identical"
