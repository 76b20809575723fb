"""What each rank holds of a tensor: stated by rule and shape, or not at all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divergence.capture.divided import LocalKeeper, check_request
from divergence.capture.keep import CopyKeeper
from divergence.capture.placement import TensorPlacement, share_of
from divergence.errors import UsageError

PLAN = {
    "b.q": "colwise",
    "b.o": "rowwise",
    "b.packed": "packed_colwise",
    "b.experts": "moe_tp_experts",
    "head": "colwise_gather_output",
    "c.odd": "a style of tomorrow",
}
WHOLE = {
    "b.q:in": (1, 4, 8), "b.q:out": (1, 4, 8), "b.o:in": (1, 4, 8), "b.o:out": (1, 4, 8),
    "b.norm:out": (1, 4, 2, 4), "b.act:out": (1, 4, 8), "b:out.1": (1, 2, 4, 4), "b:in": (1, 4, 8),
    "b.packed:in": (1, 4, 8), "b.packed:out": (1, 4, 16), "b.experts:out": (4, 8),
    "b.experts.act:out": (8, 6), "b.experts.sum:out": (4, 8), "head:out": (1, 1, 32),
    "c.act:out": (1, 4, 8), "c.odd:out": (1, 4, 8),
}  # fmt: skip


def placed(site: str, *shape: int, whole=WHOLE) -> str | None:
    rule = TensorPlacement(PLAN, whole, size=2, place=0, containers={"."})
    return rule(site, shape, settled=True)


@pytest.mark.parametrize(
    ("site", "shape", "word"),
    [
        ("b.q:in", (1, 4, 8), "replicate"),
        ("b.q:out", (1, 4, 4), "shard:2"),
        ("b.o:in", (1, 4, 4), "shard:2"),
        ("b.o:out", (1, 4, 8), "replicate"),
        ("b.norm:out", (1, 4, 1, 4), "shard:2"),  # heads
        ("b.act:out", (1, 4, 4), "shard:2"),
        ("b:out.1", (1, 1, 4, 4), "shard:1"),  # attention weights
        ("b:in", (1, 4, 8), "replicate"),
        ("head:out", (1, 1, 32), "replicate"),  # gathered
        (".:in.position_ids", (1, 4), "replicate"),  # given to all, and unknown to the shapes
        ("b.experts:out", (4, 8), "replicate"),  # summed
        ("b.experts.act:out", (8, 3), "shard:1"),
    ],
)
def test_what_is_known(site, shape, word):
    """A plan's style and the shape of the whole model's tensor agree on one word."""
    assert placed(site, *shape) == word


@pytest.mark.parametrize(
    ("site", "shape", "why"),
    [
        ("b.experts.sum:out", (4, 8), "inside experts it may be a term of their sum"),
        ("b.packed:out", (1, 4, 8), "two matrices in one, each divided"),
        ("c.act:out", (1, 4, 4), "a style that is not known"),
        ("c.odd:out", (1, 4, 8), "the same, itself"),
        ("b.act:out", (1, 4, 3), "no rank's share"),
        ("b.act:out", (1, 2, 4), "two dimensions differ"),
        ("b.q:out", (1, 4, 8), "the style says divided, the shape says whole"),
        ("b.new:out", (1, 4, 8), "the whole model's shape is not known"),
    ],
)
def test_what_is_not_known_is_not_said(site, shape, why):
    """Where rule and shape leave it open, or contradict one another, the record says nothing."""
    assert placed(site, *shape) is None, why


def test_a_site_is_decided_once():
    """A decode step has other shapes; what it holds is what the prefill showed."""
    rule = TensorPlacement(PLAN, WHOLE, size=2, place=0)
    assert rule("b.act:out", (1, 1, 4), settled=False) is None
    assert rule("b.act:out", (1, 4, 4), settled=True) == "shard:2"
    assert rule("b.act:out", (1, 1, 4), settled=False) == "shard:2"
    assert rule("b.act:out", (4,), settled=False) is None


@given(length=st.integers(0, 70), size=st.integers(1, 9))
def test_shares_are_those_of_chunk(length, size):
    """Shares add up to the whole and are torch.chunk's, where that gives a rank something."""
    shares = [share_of(length, size, place) for place in range(size)]
    assert sum(shares) == length
    chunks = [len(chunk) for chunk in torch.arange(length).chunk(size)] if length else []
    assert [share for share in shares if share] == chunks


def test_a_dtensor_brings_its_own_placement():
    """The local part is kept, and the words are DTensor's where the format has one."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    local = torch.arange(6.0).reshape(2, 3)
    tensor = SimpleNamespace(
        to_local=lambda: local,
        device_mesh=SimpleNamespace(mesh_dim_names=("dp", "tp", "x", "y")),
        placements=(Replicate(), Shard(-1), Partial("avg"), Partial("product")),
        ndim=2,
    )
    item = LocalKeeper(CopyKeeper()).keep(tensor)
    assert torch.equal(item.tensor, local)
    assert item.placement == {"dp": "replicate", "tp": "shard:1", "x": "partial:mean"}
    assert LocalKeeper(CopyKeeper()).keep(local).placement is None


@pytest.mark.parametrize(
    ("escalate", "operators", "why"),
    [
        (True, (), "--escalate cannot be combined with --mesh: the float32 pass is made by one"),
        (False, ("ops@m",), "ops@ sites cannot be combined with --mesh: operators are seen whole"),
    ],
)
def test_what_takes_one_process_says_why(escalate, operators, why):
    """A float32 pass records no operators."""
    request = SimpleNamespace(escalate=escalate, substitutes=())
    with pytest.raises(UsageError, match=why):
        check_request(request, SimpleNamespace(operators=operators))
