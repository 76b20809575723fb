"""Bytes of collectives, against the formulas by hand."""

import pytest

from divergence.domains.training.plan import RankParameter, gradient_traffic, tensor_traffic
from divergence.errors import UsageError
from divergence.facts import worded
from divergence.options.commands import link_rate

BLOCK = RankParameter(name="block.w", shape=(96, 10), itemsize=4)
HEAD = RankParameter(name="head.w", shape=(16, 10), itemsize=4)
P = BLOCK.bytes + HEAD.bytes


def sent(zero, **axes):
    found = gradient_traffic([BLOCK, HEAD], [HEAD], zero=zero, axes=axes, rate=None)
    return {(one.operation, one.of): one.bytes_per_rank for one in worded(found)}


def test_ddp_sends_the_gradients_twice():
    """2(n-1)/n of them."""
    assert sent(0, dp=4) == {("all-reduce", "gradients"): P * 2 * 3 // 4}


@pytest.mark.parametrize("zero", [1, 2])
def test_stages_1_and_2_send_as_much_in_two_parts(zero):
    """A reduce-scatter and an all-gather."""
    assert sent(zero, dp=4) == {
        ("reduce-scatter", "gradients"): P * 3 // 4,
        ("all-gather", "parameters, updated"): P * 3 // 4,
    }


def test_stage_3_gathers_twice_what_it_lets_go():
    """Parameters that stay between forward and backward are gathered once."""
    assert sent(3, fsdp=4) == {
        ("all-gather", "parameters, forward"): P * 3 // 4,
        ("all-gather", "parameters, backward"): BLOCK.bytes * 3 // 4,
        ("reduce-scatter", "gradients"): P * 3 // 4,
    }


def test_a_mesh_of_both_reduces_its_pieces_too():
    """fsdp divides, dp averages the pieces."""
    assert sent(3, dp=2, fsdp=4)["all-reduce", "gradients"] == P // 4


def test_one_rank_sends_nothing():
    """Nor does an axis of size 1."""
    assert sent(0) == {}
    assert tensor_traffic(100, 100, 100, num_ranks=1, rate=None) == []


def test_time_is_bytes_over_the_rate():
    """Of what each rank sends."""
    (one,) = tensor_traffic(1000, 0, 0, num_ranks=2, rate=100.0)
    assert (one.bytes_per_rank, one.seconds) == (1000, 10.0)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("50GB/s", 50e9),
        ("400 Gbit/s", 50e9),
        ("25GiB/s", 25 * 2**30),
        ("7b/s", 7 / 8),
        ("7B/s", 7),
        ("1.5kB/s", 1500),
        ("900 GB/s", 900e9),
        ("100Mbps", 12.5e6),
    ],
)
def test_rates_are_read(text, rate):
    """Bytes or bits, decimal or binary."""
    assert link_rate(text) == rate


@pytest.mark.parametrize("text", ["50", "50GB", "fast", "0GB/s", "-1GB/s", "1.2.3Gb/s"])
def test_what_is_no_rate_is_refused(text):
    """With an example."""
    with pytest.raises(UsageError, match="is no rate"):
        link_rate(text)
