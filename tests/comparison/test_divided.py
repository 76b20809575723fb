"""Comparing runs of several ranks, written by hand: parts by their digests, and replicas."""

import itertools
import json
import math

import pytest
import torch

from divergence import Run, compare, compare_many
from divergence.errors import IncomparableError
from divergence.fleet.many import fingerprints
from divergence.numerics.sketches import fold_tensor
from divergence.run.manifest import Mesh, MeshAxis
from divergence.run.ranks import unsharded
from divergence.run.writer import RunWriter, reducer_for
from divergence.words import letter
from tests import by_hand
from tests.by_hand import put
from tests.digests import without_digests

WHOLE = torch.randn(1, 4, 256, generator=torch.Generator().manual_seed(7))
LEFT, RIGHT = WHOLE.chunk(2, 2)
TINY = WHOLE * (1 + 2.0**-22)
HALVES, COPIES, ALONE = "shard:2", "replicate", None


def manifest(axes, number, **plan):
    mesh = Mesh(axes=[MeshAxis(name=name, size=size) for name, size in axes.items()])
    return by_hand.manifest(
        id=f"{number:032x}",
        prompts=[[1, 2, 3, 4]] * 4,
        plan={"sites": ["*"], **plan},
        mesh=mesh if axes else None,
    )


@pytest.fixture
def run_of(tmp_path):
    """``run_of({"tp": 2}, [(site, word, tensors by rank), ...])`` → the run; a tensor that is None
    was not recorded by that rank. A site may be ``(sample, site)``."""
    numbers = itertools.count(1)

    def write(axes, sites, store="full") -> Run:
        number = next(numbers)
        out = tmp_path / f"run{number}"
        made = manifest(axes, number, store=store)
        writers = []
        for rank in range(math.prod(axes.values())):
            reducer = reducer_for(store, like=None, only_changed=False)
            own = made if rank == 0 else manifest(axes, number, store=store)
            writers.append(RunWriter(out, own, rank=rank, reducer=reducer))
        for order, (where, word, tensors) in enumerate(sites):
            sample, site = where if isinstance(where, tuple) else (0, where)
            for writer, tensor in zip(writers, tensors, strict=True):
                if tensor is not None:
                    words = word if isinstance(word, tuple) else word and (word,)
                    put(
                        writer,
                        tensor.contiguous(),
                        sample=sample,
                        site=site,
                        order=order,
                        placement=words,
                    )
        for writer in reversed(writers):
            writer.flush()
            if writer is not writers[0]:
                made.sizes.num_records += writer.manifest.sizes.num_records
            writer.close(complete=True)
        return Run.open(out)

    return write


def only_site(report):
    (site,) = report.sites
    return site


@pytest.mark.parametrize("store", ["hash", "stats", "sketch"])
def test_parts_without_bytes_are_compared_by_their_digests(run_of, store):
    """Divided alike, a run equals itself, and another one where any part differs."""
    same = [run_of({"tp": 2}, [("m:out", HALVES, (LEFT, RIGHT))], store) for _ in "ab"]
    other = run_of({"tp": 2}, [("m:out", HALVES, (LEFT, RIGHT.flip(1)))], store)
    assert compare(*same).verdict.kind == "identical"
    assert not only_site(compare(same[0], other)).identical


def test_a_run_with_itself_says_that_its_ranks_agree(run_of):
    """Nothing follows of two machines, but of the replicas of one run something does."""
    one = run_of({"tp": 2}, [("m:out", COPIES, (WHOLE, WHOLE))])
    verdict = compare(one, Run.open(one.path)).verdict
    assert (verdict.kind, verdict.confidence) == ("undetermined", "low")
    assert "proves nothing, but that its ranks agree on the 1 tensors" in verdict.summary
    torn = run_of({"tp": 2}, [("m:out", COPIES, (WHOLE, TINY))])
    assert "agree" not in compare(torn, Run.open(torn.path)).verdict.summary
    torn = run_of({"tp": 2}, [("m:out", COPIES, (WHOLE, WHOLE.flip(1)))])
    assert compare(torn, Run.open(torn.path)).verdict.kind == "localized"


@pytest.mark.parametrize("store", ["hash", "stats"])
def test_parts_without_bytes_against_a_run_in_full(run_of, store):
    """The whole tensor is cut as the other run's ranks had it, and the other way round: parts that
    are here make a whole, of which the other side has the digest."""
    full = [("m:out", ALONE, (WHOLE,))]
    parts = [("m:out", HALVES, (LEFT, RIGHT))]
    for a, b in [
        (run_of({}, full), run_of({"tp": 2}, parts, store)),
        (run_of({}, full, store), run_of({"tp": 2}, parts)),
    ]:
        assert compare(a, b).verdict.kind == compare(b, a).verdict.kind == "identical"
    wrong = [("m:out", HALVES, (LEFT, RIGHT.flip(1)))]
    assert not only_site(compare(run_of({}, full), run_of({"tp": 2}, wrong, store))).identical


def test_parts_cut_otherwise_are_no_difference(run_of):
    """Digests of other parts tell nothing: such a tensor is skipped, unless the statistics prove
    that the two are not equal."""
    whole = [("m:out", ALONE, (WHOLE,))]
    parts = [("m:out", HALVES, (LEFT, RIGHT))]
    for store in ("hash", "stats"):
        with pytest.raises(IncomparableError) as error:
            compare(run_of({}, whole, store), run_of({"tp": 2}, parts, store))
        assert "cut otherwise" in str(error.value)
    scaled = [("m:out", HALVES, (LEFT, RIGHT * 2))]
    report = compare(run_of({}, whole, "stats"), run_of({"tp": 2}, scaled, "stats"))
    assert not only_site(report).identical and only_site(report).at_least > 0.5


def test_means_prove_a_difference_that_norms_do_not(run_of):
    """Equal norms, other means: the two are that far apart at least."""
    flat, signs = torch.ones_like(WHOLE), torch.ones_like(WHOLE)
    signs[..., ::2] = -1
    one, two = (run_of({}, [("m:out", ALONE, (tensor,))], "stats") for tensor in (flat, signs))
    assert only_site(compare(one, two)).at_least == pytest.approx(1.0, abs=1e-5)


def test_digests_of_two_kinds_are_no_difference(run_of):
    """Equal statistics beside digests of a host and of an accelerator prove nothing either way."""
    host, device = (run_of({}, [("m:out", ALONE, (WHOLE,))], "stats") for _ in "ab")
    without_digests(device.path)
    lines = device.path / "records.jsonl"
    record = json.loads(lines.read_text())
    record["fold"] = fold_tensor(WHOLE)
    del record["xxh3"]
    lines.write_text(json.dumps(record) + "\n")
    with pytest.raises(IncomparableError) as error:
        compare(host, Run.open(device.path))
    assert "two kinds" in str(error.value)


def test_fingerprints_look_at_every_part(run_of):
    """A tensor in parts counts by the digests of all its parts; in one piece it is another thing,
    and where a part has none, nothing is said of the run."""
    one, two = (
        unsharded(
            run_of({"tp": 2}, [("x:out", COPIES, (WHOLE, WHOLE)), ("m:out", HALVES, (LEFT, right))])
        )
        for right in (RIGHT, RIGHT + 1)
    )
    found = fingerprints([one, one, two])
    assert found[0] == found[1] != found[2]


def test_a_candidate_is_open_as_long_as_it_is_compared(run_of, monkeypatch):
    """Also where candidates are compared among themselves: a fleet may be larger than memory."""
    first, *others = (
        run_of({}, [("m:out", ALONE, (tensor,))]) for tensor in (WHOLE * 2, WHOLE, TINY)
    )
    opened, closed = [], []
    open_run, close_run = Run.open, Run.close
    monkeypatch.setattr(Run, "open", lambda path: opened.append(open_run(path)) or opened[-1])
    monkeypatch.setattr(Run, "close", lambda run: closed.append(run) or close_run(run))
    matrix = compare_many(first, [str(run.path) for run in others])
    assert len(matrix.cross_checks) == 1 and matrix.odd == [str(first.path)]
    theirs = [run for run in opened if run is not first]
    assert len(theirs) == 4 and all(any(run is one for one in closed) for run in theirs)


def test_the_same_bits_have_one_answer(run_of):
    """A candidate that is bit for bit one that was asked is not compared again, and agrees with
    nobody that the other differs from."""
    tensors = (WHOLE * 2, WHOLE, OFF, OFF)
    first, b, c, same = (run_of({}, [("m:out", ALONE, (tensor,))]) for tensor in tensors)
    matrix = compare_many(first, [b, c, same])
    (check,) = matrix.cross_checks
    assert (check.reference, check.candidate) == (str(b.path), str(c.path))
    assert [group.runs for group in matrix.groups] == [[str(first.path)], [str(b.path)]]
    assert matrix.identical == [[str(c.path), str(same.path)]] and matrix.odd == []


# --- replicas and shares -------------------------------------------------------------------------

OFF = WHOLE * 1.5


def check_of(a, b):
    (check,) = compare(a, b).replicas
    return check, check.first[0] if check.first else None


def test_copies_that_agree_are_counted(run_of):
    """Each tensor that several ranks hold alike, once; what is divided or held alone is none."""
    sites = [
        ("a:out", COPIES, (WHOLE, WHOLE)),
        ("b:out", HALVES, (LEFT, RIGHT)),
        ("c:out", COPIES, (OFF, OFF)),
    ]
    one = run_of({}, [("a:out", ALONE, (WHOLE,)), ("c:out", ALONE, (OFF,))])
    check, first = check_of(one, run_of({"tp": 2}, sites))
    assert (check.side, check.num_tensors, check.num_different, first) == ("candidate", 2, 0, None)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_copies_the_other_run_tells(run_of, wrong, swapped):
    """Whichever rank is off, on whichever side, at the first place in order."""
    copies = [WHOLE, WHOLE]
    copies[wrong] = OFF
    sites = [
        ("a:out", COPIES, (WHOLE, WHOLE)),
        ("b:out", COPIES, copies),
        ("c:out", COPIES, copies),
    ]
    one = run_of({}, [(f"{name}:out", ALONE, (WHOLE,)) for name in "abc"])
    two = run_of({"dp": 2}, sites)
    pair = (two, one) if swapped else (one, two)
    check, first = check_of(*pair)
    assert check.side == first.side == ("reference" if swapped else "candidate")
    assert (first.site, first.ranks, first.peers) == ("b:out", (wrong,), (1 - wrong,))
    assert first.told_by == "other run" and first.rel_l2 == pytest.approx(0.5)
    verdict = compare(*pair).verdict
    assert verdict.kind == "localized" and verdict.side == first.side
    assert (
        f"rank {wrong} of {letter(first.side)} disagrees with rank {1 - wrong}" in verdict.summary
    )
    assert "at 1 more of 3 tensors" in verdict.evidence[0].text


def test_most_copies_are_believed(run_of):
    """Of three ranks two; the other run is not asked, though it is like the third."""
    two = run_of({"dp": 3}, [("a:out", COPIES, (OFF, WHOLE, OFF))])
    _, first = check_of(run_of({}, [("a:out", ALONE, (WHOLE,))]), two)
    assert (first.ranks, first.peers, first.told_by) == ((1,), (0, 2), "majority")


def test_nobody_tells_where_neither_copy_is_near(run_of):
    """Both are as far from the other run: it is said that they differ, and no more."""
    two = run_of({"dp": 2}, [("a:out", COPIES, (OFF, -OFF))])
    report = compare(run_of({}, [("a:out", ALONE, (torch.zeros_like(WHOLE) + 1,))]), two)
    assert report.replicas[0].first[0].told_by == "nobody"
    assert any("cannot be told" in one.text for one in report.verdict.evidence)


def test_copies_that_round_otherwise_are_no_fault(run_of):
    """Adding in another order on each rank: told, and nothing rests on it."""
    two = run_of({"dp": 2}, [("a:out", COPIES, (WHOLE, TINY))])
    verdict = compare(run_of({}, [("a:out", ALONE, (WHOLE,))]), two).verdict
    assert verdict.kind in ("identical", "within_floor")
    assert any("adding in another order" in one.text for one in verdict.evidence)


def test_copies_that_round_otherwise_beside_a_nan_are_no_fault(run_of):
    """The other run has no number there to tell the floor by: the rounding model does."""
    nan = torch.full_like(WHOLE, torch.nan)
    two = run_of({"dp": 2}, [("a:out", COPIES, (WHOLE, TINY))])
    report = compare(run_of({}, [("a:out", ALONE, (nan,))]), two)
    assert report.verdict.kind == "nonfinite"
    (replicas,) = [each for each in report.findings if each.claim == "replicas_disagree"]
    assert "adding in another order" in replicas.evidence[0].text


def test_the_share_is_that_of_the_onset_s_own_sample(run_of):
    """Another sample, of which rounding alone differs, in the other rank's share, is not asked."""
    rounded = LEFT * (1 + 2.0**-22)
    one = run_of({}, [((n, "m:out"), ALONE, (WHOLE,)) for n in (0, 1)])
    two = run_of(
        {"tp": 2},
        [((0, "m:out"), HALVES, (rounded, RIGHT)), ((1, "m:out"), HALVES, (LEFT, RIGHT * 4))],
    )
    for pair, side in (((one, two), "candidate"), ((two, one), "reference")):
        verdict = compare(*pair).verdict
        assert verdict.onset.sample == 1
        assert verdict.summary.endswith("in the share of rank 1")
        assert f"{letter(side)}'s rank 1" in verdict.evidence[-1].text


def test_no_rank_is_named_where_all_shares_are_off(run_of):
    """A fault of all ranks alike is nobody's own."""
    one = run_of({}, [("m:out", ALONE, (WHOLE,))])
    two = run_of({"tp": 2}, [("m:out", HALVES, (LEFT * 1.4, RIGHT * 1.5))])
    assert "in the share of" not in compare(one, two).verdict.summary


def dealt(run_of, *wrong):
    """A run of two ranks that ran prompts 0, 2 and 1, 3; ``wrong``: prompts that are off."""
    sites = []
    for sample in range(4):
        tensor = WHOLE * 1.4 if sample in wrong else WHOLE
        held = (tensor, None) if sample % 2 == 0 else (None, tensor)
        sites.append(((sample, "m:out"), "single", held))
    return run_of({"dp": 2}, sites)


@pytest.mark.parametrize(
    ("wrong", "rank"), [((1, 3), 1), ((0, 2), 0), ((1,), None), ((1, 2, 3), None), ((0, 3), None)]
)
def test_the_rank_that_ran_the_prompts_at_fault_is_named(wrong, rank, run_of):
    """Where most of its prompts are off, and no other's: one prompt of two may be off by itself."""
    one = run_of({}, [((n, "m:out"), ALONE, (WHOLE,)) for n in range(4)])
    two = dealt(run_of, *wrong)
    for pair, side in (((one, two), "B"), ((two, one), "A")):
        verdict = compare(*pair).verdict
        assert verdict.onset.sample == wrong[0]
        told = "ran" in verdict.summary.split()
        assert told == (rank is not None)
        if told:
            assert verdict.summary.endswith(f"which rank {rank} of {side} ran")
            assert "none of the 2 that other ranks ran" in verdict.evidence[-1].text
    if rank is not None:  # no truth tells which of two sides it is
        summary = compare(dealt(run_of), two).verdict.summary
        assert summary.endswith(f"which rank {rank} of A and rank {rank} of B ran")


def test_a_fault_before_the_ranks_part_comes_first(run_of):
    """Where all ranks are wrong at an earlier site, that is the onset; that ranks disagree later
    is told beside it."""
    one = run_of({}, [(f"{name}:out", ALONE, (WHOLE,)) for name in "ab"])
    two = run_of({"dp": 2}, [("a:out", COPIES, (OFF, OFF)), ("b:out", COPIES, (OFF, -OFF))])
    verdict = compare(one, two).verdict
    assert verdict.onset.site == "a:out" and "disagree" not in verdict.summary
    assert any("disagree at b:out" in text.text for text in verdict.evidence)


def test_neither_of_two_copies_is_named_where_nobody_tells_which_is_wrong(run_of):
    """Both are as far from the other run: gradients that were not reduced, on either rank."""
    one = run_of({}, [("a:out", ALONE, (WHOLE,))])
    two = run_of({"dp": 2}, [("a:out", COPIES, (OFF, -OFF))])
    verdict = compare(one, two).verdict
    assert verdict.summary.startswith("rank 0 and rank 1 of B disagree at a:out")
    assert "which of them is wrong cannot be told" in verdict.evidence[0].text


def test_what_copies_may_differ_by_is_the_site_s_floor(run_of):
    """Where there is one: within it they are told of, beyond it a rank is at fault."""
    one = run_of({}, [("a:out", ALONE, (WHOLE * (1 + 2.0**-21),))])
    for copy, fault in ((TINY, False), (WHOLE * 1.001, True)):
        report = compare(one, run_of({"dp": 2}, [("a:out", COPIES, (WHOLE, copy))]))
        assert only_site(report).floor
        assert (report.verdict.kind == "localized") == fault
        assert report.replicas[0].num_different == 1


def test_a_copy_with_nan_is_the_wrong_one(run_of):
    """It is infinitely far from the other run, whichever rank has it."""
    broken = WHOLE.clone()
    broken[0, 0, 0] = math.nan
    two = run_of({"dp": 2}, [("a:out", COPIES, (broken, WHOLE))])
    _, first = check_of(run_of({}, [("a:out", ALONE, (WHOLE,))]), two)
    assert (first.ranks, first.told_by, first.rel_l2) == ((0,), "other run", math.inf)
