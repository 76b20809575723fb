"""The graph of one forward: order, names, and who feeds whom."""

import torch

from divergence.comparison.calls import forwards_of, maker_of, operator_passes

X = torch.arange(12.0).reshape(3, 4)


def nodes_of(run):
    (nodes,) = forwards_of(run, "anchored").values()
    return {node.path.partition("/")[2]: node for node in nodes}


def test_results_feed_what_takes_them(toy):
    """Also through views; in order, each once."""
    run = toy(lambda x: ((x * 2).T @ (x * 2)).exp_() + 1, [X])
    nodes = nodes_of(run)
    assert list(nodes) == ["aten.mul", "aten.mul#2", "aten.mm", "aten.exp_", "aten.add"]
    assert nodes["aten.mm"].feeds == ["./aten.mul", "./aten.mul#2"]
    assert nodes["aten.add"].feeds == ["./aten.exp_"]
    assert operator_passes(run) == {"anchored"}


def test_in_place_and_out_of_place_have_one_name(toy):
    """``exp_`` is ``exp``: the same call on a machine that writes elsewhere."""
    nodes = nodes_of(toy(lambda x: (x * 2).exp_(), [X]))
    assert nodes["aten.exp_"].name == "aten.exp"
    other = nodes_of(toy(lambda x: (x * 2).exp(), [X]))
    assert nodes["aten.exp_"].key() == other["aten.exp"].key()


def test_several_results_are_one_call(toy):
    """topk gives values and indices; what takes the indices is fed by it."""
    nodes = nodes_of(toy(lambda x: x.topk(2).indices + 1, [X]))
    assert [record.dtype for record in nodes["aten.topk"].results] == ["float32", "int64"]
    assert nodes["aten.add"].feeds == ["./aten.topk"]


def test_an_argument_of_the_block_is_made_by_nobody(toy):
    """Its origin is a site of the block, not a call."""
    nodes = nodes_of(toy(lambda x: x[1:] * 2, [X]))
    assert maker_of(nodes["aten.mul"].call.operands[0]) is None
    assert nodes["aten.mul"].feeds == []


def test_each_step_is_a_forward_of_its_own(toy):
    """Numbers begin anew, order goes on."""
    run = toy(lambda x: x * 2, [X], steps=2)
    forwards = forwards_of(run, "anchored")
    assert {key: [n.path for n in nodes] for key, nodes in forwards.items()} == {
        (0, 0): ["./aten.mul"],
        (0, 1): ["./aten.mul"],
    }
    assert forwards_of(run, "free") == {}
