"""Comparing replays: each operator had the same inputs on both sides."""

import pytest

from divergence import RecordOptions, Run, capture, compare, replay
from divergence import truth as make_truth
from divergence.comparison.align import align
from divergence.errors import IncomparableError, UsageError
from tests import by_hand

BLOCK = "model.layers.1"
FAULTY = f"{BLOCK}.mlp.down_proj/aten.mm:out"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model) -> dict[str, Run]:
    """A run with one block's operators, two replays of it and its truth."""
    folder = tmp_path_factory.mktemp("replayed")
    options = {"prompts": ["A bridge is built twice."], "max_new_tokens": 2}
    model = str(tiny_model("llama", dtype="bfloat16"))
    source = capture(
        model,
        out=folder / "a",
        sites=["blocks", f"ops@{BLOCK}"],
        recording=RecordOptions(weights=True),
        **options,
    )
    return {
        "source": source,
        "other": capture(
            model,
            out=folder / "b",
            sites=[f"ops@{BLOCK}"],
            recording=RecordOptions(weights=True),
            **options,
        ),
        "replay": replay(source, out=folder / "a2", device="cpu"),
        "again": replay(source, out=folder / "a3", device="cpu"),
        "truth": replay(source, out=folder / "truth", truth=True),
        "part": replay(source, out=folder / "part", device="cpu", sites=[FAULTY]),
    }


def changed(run: Run, path, site: str, factor: float) -> Run:
    """The run with one site's tensors scaled."""

    def scaled(record, tensor):
        return tensor * factor if record.site == site else tensor

    return by_hand.rewritten(run, path, scaled, id="f" * 32)


@pytest.mark.parametrize(
    "order", [("source", "replay"), ("replay", "source"), ("replay", "again")], ids=str
)
def test_operators_of_a_replay_are_compared_alone(runs, order):
    """With its source either way round, and with another replay of it; modules are left alone."""
    one, two = (runs[name] for name in order)
    found = align(one, two)
    assert found.anchored
    assert not (found.pairs or found.only_reference or found.only_candidate or found.notes)
    report = compare(one, two)
    assert report.operators.num_matched > 10
    assert report.verdict.kind == "identical"
    assert report.tokens is None  # a replay chose none


@pytest.mark.parametrize("order", [("other", "replay"), ("replay", "other")], ids=str)
def test_a_replay_of_another_run_is_not_compared(runs, order):
    """Its operators had other inputs; the error says what it can be compared with."""
    one, two = (runs[name] for name in order)
    with pytest.raises(IncomparableError, match="with the run whose operators it ran again"):
        compare(one, two)


def test_the_same_machine_is_identical(runs):
    """A healthy replay has the source's bits, and no tokens to speak of."""
    report = compare(runs["source"], runs["replay"], truth=runs["truth"])
    assert report.verdict.kind == "identical"
    assert report.tokens is None


def test_the_truth_names_the_operator_and_the_side(runs, tmp_path):
    """Each operator by itself: the changed one stands out, and nothing inherits its error."""
    wrong = changed(runs["replay"], tmp_path / "wrong", FAULTY, 1.05)
    report = compare(runs["source"], wrong, truth=runs["truth"])
    found = report.operators
    assert (found.frame, found.judged) == ("operator", "truth")
    assert (found.onset, found.side) == (FAULTY.removesuffix(":out"), "candidate")
    bad = [row for row in found.results if not row.identical]
    assert {row.site for row in bad} == {found.onset}
    assert all(row.w > 5 for row in bad)
    assert all(row.verdict == "fine" for row in found.results if row not in bad)


def test_a_truth_of_the_model_does_not_judge_replays(runs, tmp_path):
    """Its operators inherit what those before them made; the error gives the right command."""
    right = make_truth(runs["source"], out=tmp_path / "right")
    with pytest.raises(UsageError, match=r"divergence replay .* --truth"):
        compare(runs["source"], runs["replay"], truth=right)


def test_a_replayed_truth_judges_no_other_pair(runs):
    """Two captures are not judged by it: their operators had other inputs."""
    report = compare(runs["source"], runs["other"], truth=runs["truth"])
    assert all(site.truth is None for site in report.sites)
