"""Who agrees with whom, and who is odd: asked no more often than needed."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divergence import Run
from divergence.facts import sentence
from divergence.fleet.many import (
    agreement_of,
    agrees,
    find_groups,
    fingerprints,
    only_there,
    outside,
)
from tests import by_hand


def camps_of(kinds: str):
    """find_camps of runs that agree where their letter is the same; also what was asked."""
    asked = []

    def agree(one, two):
        asked.append((one, two))
        return kinds[one] == kinds[two]

    return *find_groups(range(len(kinds)), agree), asked


@pytest.mark.parametrize(
    ("kinds", "odd", "asked_among_others"),
    [
        ("xxxx", [], 0),
        ("xxxy", [3], 0),  # the first run's group is the majority: nothing else is compared
        ("yxxx", [0], 2),  # the others among themselves: it is the first that is odd
        ("xyxyy", [0, 2], 2),
        ("xxyy", [], 0),  # the two that are left can be no majority, whatever they say
        ("xyz", [], 1),
        ("xy", [], 0),
        ("x", [], 0),
    ],
)
def test_the_odd_ones_are_outside_the_majority(kinds, odd, asked_among_others):
    """More than half must agree; candidates are compared with one another only where the answer
    can make a majority."""
    groups, left, asked = camps_of(kinds)
    assert outside(groups, left) == odd
    assert len([pair for pair in asked if pair[0] != 0]) == asked_among_others


@given(st.text("abc", min_size=1, max_size=9))
def test_who_is_odd_does_not_depend_on_the_order(kinds):
    """Where agreeing is an equivalence, the answer is the one of counting letters."""
    groups, left, asked = camps_of(kinds)
    common = max(set(kinds), key=kinds.count)
    majority = 2 * kinds.count(common) > len(kinds)
    expected = [n for n, letter in enumerate(kinds) if letter != common] if majority else []
    assert sorted(outside(groups, left)) == expected
    assert sorted([*itertools.chain(*groups), *left]) == list(range(len(kinds)))
    assert len(set(asked)) == len(asked)


def test_verdicts_that_abstain_are_no_vote():
    """Undetermined and incomparable neither agree nor differ."""
    assert [agrees(kind) for kind in ("identical", "within_floor")] == [True, True]
    assert [agrees(kind) for kind in ("localized", "systematic", "drift", "nonfinite")] == [
        False
    ] * 4
    assert [agrees(kind) for kind in ("undetermined", "incomparable", None)] == [None] * 3


def test_the_sentence_says_what_is_known():
    """All, most, half, none."""

    def say(groups, left=(), silent=0, identical=False):
        return sentence(agreement_of(groups, left, num_silent=silent, identical=identical))

    assert say([["a", "b", "c"]]) == "all 3 runs agree as far as rounding goes"
    assert say([["a", "b"]], silent=1) == (
        "2 of 3 runs agree as far as rounding goes (1 could not tell)"
    )
    assert say([["a", "b", "c"]], ["d"], identical=True) == (
        "3 of 4 runs agree bit for bit; d differs from them"
    )
    assert say([["a"], ["b", "c", "d"]]).endswith("; a differs from them")
    assert say([["v", "w", "x", "y", "z"]], ["a", "b", "c", "d"]).endswith(
        "; a, b, c, 1 more differ from them"
    )
    assert say([["a", "b"]], ["c", "d"]).startswith("no majority among 4 runs: at most 2 agree")
    assert say([["a"], ["b"]], ["c"]) == "no majority among 3 runs: no two agree"
    assert say([["a"]], silent=2) == "no two runs could be told apart (2 could not tell)"


def record(site, digest, *, pass_="free", kind="xxh3", **changes):
    values = {
        "pass_": pass_,
        "sample": 0,
        "step": 0,
        "site": site,
        "rank": 0,
        "dtype": "float32",
        "shape": (2,),
        "positions": None,
        "xxh3": None,
        "fold": None,
        "checksum": None,
    }
    return SimpleNamespace(**values | {kind: digest} | changes)


def run(*records):
    return Run(Path("run"), SimpleNamespace(), records)


def test_fingerprints_are_equal_for_equal_digests_only():
    """Of what the first run recorded: extra sites do not count, absent ones and other dtypes do."""
    a = run(record("x:out", "1"), record("y:out", "2"))
    same = run(record("y:out", "2"), record("x:out", "1"), record("z:out", "3"))
    other = run(record("x:out", "1"), record("y:out", "9"))
    short = run(record("x:out", "1"))
    cast = run(record("x:out", "1", dtype="float16"), record("y:out", "2"))
    anchored = run(record("x:out", "1", pass_="anchored"))
    found = fingerprints([a, same, other, short, cast, anchored, run()])
    assert found[0] == found[1]
    assert len({found[0], *found[2:5]}) == 4
    assert found[5] is found[6] is None


def test_fingerprints_use_the_digests_that_the_first_run_has():
    """A run of an accelerator may hold ``fold`` alone; runs without any are left out."""
    a, b = (run(record("x:out", "7", kind="fold")) for _ in "ab")
    both = run(record("x:out", "7", kind="fold", xxh3="8"))
    found = fingerprints([a, b, both, run(record("x:out", "7"))])
    assert found[0] == found[1] == found[2] is not None
    assert found[3] is None
    assert fingerprints([run(record("x:out", None)), run(record("x:out", None))]) == [None, None]


def test_fingerprints_of_runs_with_digests_of_both_kinds():
    """An accelerator's sketches have ``fold`` and its integers ``xxh3``: all of them count, and a
    run that lacks one of these digests is not said to be equal."""

    def mixed(digest):
        return run(record("x:out", digest, kind="fold"), record("x:in.ids", "1"))

    found = fingerprints([mixed("7"), mixed("7"), mixed("8"), run(*mixed("7").records[1:])])
    assert found[0] == found[1] and len(set(found)) == 3
    unknown = run(record("x:out", None), record("x:in.ids", "1"))
    assert fingerprints([mixed("7"), unknown])[1] is None
    assert fingerprints([unknown, unknown, mixed("7")])[:2] == [None, None]


def machine(**changes):
    values = {"versions": {"torch": "2.13"}, "variables": {}, **changes}
    return SimpleNamespace(
        environment=by_hand.part("environment", **values),
        model=SimpleNamespace(
            dtype="bfloat16", attn_implementation="sdpa", quantization=None, code={}, config={}
        ),
        plan=SimpleNamespace(plants=[], substitutes=[]),
        settings=SimpleNamespace(switches=[]),
    )


def test_what_only_the_odd_machine_has():
    """One trait that all of the group share and the odd one has not; what varies in the group, and
    what is only a name, says nothing."""
    group = [machine(num_threads=2), machine(num_threads=4, label="n")]
    odd = machine(num_threads=8, versions={"torch": "2.12"}, variables={"MKL_CBWR": "AVX2"})
    assert list(map(sentence, only_there([odd], group))) == [
        "torch: 2.12 (the others: 2.13)",
        "MKL_CBWR: AVX2 (the others: -)",
    ]
    assert only_there([group[0]], group[:1]) == []
