"""Who made what is wrong, and what is there instead, is said only where it is known."""

import datetime
from typing import Any

import pytest
import torch.distributed as dist

from divergence import CaseOptions, Run, capture, compare
from divergence.errors import UsageError
from divergence.recording.processes import Ranks

HERE = "tests.domains.collectives.wrong_collectives"
RANDOM = ("*.float32.odd.random", "reduce_scatter.float32.even.random")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(ranks, sites, all_reduce="average")``: the run of functions of wrong_collectives."""
    folder = tmp_path_factory.mktemp("wrong")
    number = iter(range(100))

    def make(
        ranks: int, sites: tuple[str, ...] = RANDOM, own: tuple[str, ...] = (), **functions: str
    ) -> Run:
        impl = [*own, *(f"{name}={HERE}:{what}" for name, what in functions.items())]
        return capture(
            "suite:collectives",
            out=folder / str(next(number)),
            cases=CaseOptions(ranks=ranks, impl=impl),
            sites=list(sites),
            probe=False,
        )

    return make


class Faults(dict[str, list[Any]]):
    """By collective; ``told``: what the verdict says of them."""

    def __init__(self, run: Run) -> None:
        report = compare(run)
        self.told = [item.text for item in report.verdict.evidence]
        for fault in report.collectives.sides[0].faults:
            self.setdefault(fault.collective, []).append(fault)


@pytest.fixture(scope="module")
def three(made):
    return Faults(
        made(
            3,
            (*RANDOM, "order.all_reduce.float32.odd"),
            all_reduce="own_first",
            reduce="lacks_1",
            reduce_scatter="scattered_at_times",
            all_gather="gathered_wrong_from_1",
            all_to_all="dealt_wrong_from_1",
            broadcast="sent_by_1",
        )
    )


def test_ranks_that_add_in_orders_of_their_own_are_not_blamed(three):
    """Two of three have the same bits, since the first two terms commute; the third is as right."""
    (fault,) = three["all_reduce"]
    assert (fault.check, fault.ranks) == ("same_bits", ())
    assert "adds in its own order: ranks 0, 1, rank 2" in fault.text


def test_the_root_of_a_reduce_is_not_blamed_for_what_it_got(three):
    """The rank that alone holds the result is named as that, and no rank as guilty."""
    (fault,) = three["reduce"]
    assert (fault.ranks, fault.text) == ((), "all 1,037 elements lack what rank 1 put in")
    who = "rank 0, which alone holds the result (any may have made it), reduce of float32"
    assert any(text.startswith(who) for text in three.told)


def test_a_repetition_that_lacks_a_rank_is_no_other_order(three):
    """A call that loses a share is told as that, not as another order of addition."""
    (fault,) = three["reduce_scatter"]
    assert fault.check == "repeatable"
    assert fault.text == "in call 3, all 129 elements lack what rank 1 put in"


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_what_is_wrong_on_every_other_rank_was_sent_so(three, name):
    """Not certainly: the others may each have received it wrong."""
    (fault,) = three[name]
    assert (fault.ranks, fault.assumed) == ((1,), True)
    assert "what this rank sent" in fault.text


def test_a_broadcast_that_all_ranks_have_wrong_names_the_root_with_care(three):
    """The root is assumed to have sent it, and that is said."""
    (fault,) = three["broadcast"]
    assert (fault.ranks, fault.assumed) == ((0,), True)


@pytest.mark.slow
def test_an_average_is_called_one(made):
    """Of a group that is too large, too: 1 / 3 and not the 1 / 2 that would be right."""
    found = Faults(made(3, all_reduce="average", reduce="first_alone", all_gather="too_short"))
    assert found["all_reduce"][0].text == "all 1,037 elements are the sum divided by 3"
    assert found["reduce"][0].text == "all 1,037 elements are what the rank itself put in"
    (fault,) = found["all_gather"]
    assert fault.ranks == (0, 1, 2)
    assert fault.text == "128 elements are there in place of 387"


@pytest.mark.slow
def test_what_is_said_of_all_ranks_is_true_of_each(made):
    """Elements that one rank put in are named by that rank."""
    found = Faults(made(3, all_reduce="first_alone"))
    assert found["all_reduce"][0].text == "all 1,037 elements are what rank 0 put in"


def test_where_every_rank_is_wrong_none_is_named_one_by_one(made):
    """In bfloat16 single elements come out right by chance, others on each rank."""
    found = Faults(made(3, ("all_reduce.bfloat16.odd.random",), all_reduce="nothing"))
    (fault,) = found["all_reduce"]
    assert fault.ranks == ()
    assert "are what the rank itself put in" in fault.text
    assert found.told[0].startswith("ranks 0, 1, 2, all wrong (one rank made it, or each did), ")


def test_terms_that_cancel_are_not_taken_for_one_another(made):
    """Twice rank 1's is nearly without rank 0's."""
    found = Faults(made(2, ("all_reduce.float32.odd.cancelling",), all_reduce="twice_1"))
    assert "hold twice what rank 1 put in" in found["all_reduce"][0].text


@pytest.mark.slow
def test_one_case_that_a_dtype_explains_by_chance_proves_nothing(made):
    """Subnormal numbers have too few digits to tell a narrow sum from what was sent narrow."""
    sites = ("all_reduce.float32.odd.*", "order.all_reduce.float32.odd")
    found = Faults(made(3, sites, all_reduce="sent_in_bfloat16"))["all_reduce"]
    assert not [fault.text for fault in found if "add in" in fault.text]


def test_zeros_beside_subnormal_sums_are_no_setting(made):
    """A tail that never arrived is no flushing to zero."""
    (fault,) = Faults(made(2, ("all_reduce.float32.odd.subnormal",), all_reduce="lost_tail"))[
        "all_reduce"
    ]
    assert "the last 17 of 1,037 elements are 0" in fault.text


@pytest.mark.slow
def test_equal_bits_are_promised_of_equal_partial_sums_alone(made):
    """All-reduce adds in float32, reduce-scatter in bfloat16, in one order: both are right."""
    sites = ("*.bfloat16.even.random", "order.*.bfloat16.even")
    report = compare(made(3, sites, own=("flat",), all_reduce="wide"))
    assert report.verdict.kind == "within_floor", report.verdict.summary
    (row,) = report.collectives.sides[0].identities
    assert row.num_different > 0 and not row.promised


@pytest.mark.slow
def test_orders_and_times_alone_are_no_right_collective(made):
    """Where no result is checked nothing is said to be right."""
    sites = ("order.all_reduce.float32.odd", "bandwidth.all_reduce")
    first, second = made(2, sites), made(2, sites)
    assert compare(first).verdict.kind == "undetermined"
    verdict = compare(first, second).verdict
    assert (verdict.kind, verdict.summary) == ("undetermined", "no case is common to both")


@pytest.mark.parametrize(
    ("impl", "words"),
    [
        (f"all_reduce={HERE}:none", "gave None of a row"),
        (f"all_reduce={HERE}:in_float64", "gave torch.float64"),
        ("all_reduce=no_such_module:f", "cannot import 'no_such_module:f'"),
        ("all_reduce=math:pi", "is not a function"),
        ("all_reduce=", "has nothing behind its '='"),
        ("=ring", "has nothing before its '='"),
    ],
)
def test_an_implementation_that_is_none_is_refused(tmp_path, impl, words):
    """With what is wrong about its name."""
    with pytest.raises(UsageError, match=words):
        capture(
            "suite:collectives",
            out=tmp_path / "x",
            cases=CaseOptions(ranks=2, impl=[impl]),
            probe=False,
            sites=["all_reduce.float32.odd.random"],
        )


@pytest.mark.parametrize("ranks", [0, 1])
def test_too_few_ranks_are_refused(tmp_path, ranks):
    """One rank has nobody to communicate with."""
    with pytest.raises(UsageError, match="nothing to communicate"):
        capture(
            "suite:collectives", out=tmp_path / "x", cases=CaseOptions(ranks=ranks), probe=False
        )


def test_a_rank_that_alone_was_refused_does_not_wait_for_ever(monkeypatch):
    """The others are in the call still, and wait for it."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    ranks = object.__new__(Ranks)
    ranks.rank, ranks.size, ranks._note, ranks._meetings = 1, 2, "note", 0
    with pytest.raises(RuntimeError):
        ranks.meet(datetime.timedelta(seconds=0.1))
