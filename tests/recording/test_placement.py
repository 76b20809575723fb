"""What each rank holds of a tensor: stated by rule and shape, or not at all."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divergence.errors import UsageError
from divergence.recording.keeper import CopyKeeper
from divergence.recording.processes import Ranks
from divergence.recording.ranks import (
    Division,
    LocalKeeper,
    TensorPlacement,
    check_request,
    share_of,
)
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import Mesh, MeshAxis, Repeatability, Sizes

PLAN = {
    "b.q": "colwise",
    "b.o": "rowwise",
    "b.packed": "packed_colwise",
    "b.experts": "moe_tp_experts",
    "head": "colwise_gather_output",
    "c.odd": "a style of tomorrow",
}
WHOLE = {
    "b.q:in": (1, 4, 8),
    "b.q:out": (1, 4, 8),
    "b.o:in": (1, 4, 8),
    "b.o:out": (1, 4, 8),
    "b.norm:out": (1, 4, 2, 4),
    "b.act:out": (1, 4, 8),
    "b:out.1": (1, 2, 4, 4),
    "b:in": (1, 4, 8),
    "b.packed:in": (1, 4, 8),
    "b.packed:out": (1, 4, 16),
    "b.experts:out": (4, 8),
    "b.experts.act:out": (8, 6),
    "b.experts.sum:out": (4, 8),
    "head:out": (1, 1, 32),
    "c.act:out": (1, 4, 8),
    "c.odd:out": (1, 4, 8),
}


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


@pytest.mark.slow
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


def division(**values) -> Division:
    """Of rank 0 of two that divide the matrices."""
    made = object.__new__(Division)
    made.ranks = SimpleNamespace(mesh=Mesh(axes=[MeshAxis(name="tp", size=2)]), rank=0, **values)
    made._first, made._tensor = 0, TensorPlacement(PLAN, WHOLE, size=2, place=0)
    return made


@pytest.mark.parametrize(
    ("own", "word"), [(None, ("shard:2",)), ({"tp": "replicate"}, ("replicate",)), ({}, None)]
)
def test_a_dtensor_without_a_word_is_not_guessed_at(own, word):
    """A plain tensor is placed by its shape; a DTensor by what it says alone, since interleaved
    parts (a strided shard) have the shape of a stretch."""
    item = CapturedTensor(torch.zeros(1, 4, 4))
    item.placement = own
    assert division().place("b.act:out", item, sample=0, step=0, pass_="free") == word


def test_what_any_rank_found_is_the_run_s():
    """Sizes are added; what another rank did not repeat, or was warned of, is not lost."""

    def found(**repeated):
        return SimpleNamespace(
            record_digests={},
            sizes=Sizes(num_records=3, seen_bytes=8),
            repeatability=Repeatability(num_runs=2, num_compared=3, **repeated),
            settings=SimpleNamespace(
                nondeterministic_warnings=["a"] + ["b"] * bool(repeated),
                cpu_fallbacks=["c"] * bool(repeated),
            ),
        )

    manifest, other = found(), found(num_different=1, first_difference="m:out (sample 1, step 0)")
    warned = other.settings
    theirs = (
        other.sizes,
        other.repeatability,
        warned.nondeterministic_warnings,
        warned.cpu_fallbacks,
        {"records-r00001.jsonl": "e"},
    )
    division(gather=lambda mine: [mine, theirs]).count(manifest, {"records.jsonl": "d"})
    assert manifest.record_digests == {"records.jsonl": "d", "records-r00001.jsonl": "e"}
    assert (manifest.sizes.num_records, manifest.sizes.seen_bytes) == (6, 16)
    repeated = manifest.repeatability
    assert (repeated.num_runs, repeated.num_compared, repeated.num_different) == (2, 6, 1)
    assert repeated.first_difference == "m:out (sample 1, step 0) on rank 1"
    assert manifest.settings.nondeterministic_warnings == ["a", "b"]
    assert manifest.settings.cpu_fallbacks == ["c"]


@pytest.mark.parametrize("steps", ["decode", "1-4"])
def test_tensor_parallelism_needs_the_prefill(steps):
    """Without it no tensor's place would be known, and nothing could be compared."""
    selection = SimpleNamespace(operators=None)
    request = SimpleNamespace(steps=steps, escalate=False, substitutes={}, train=None)
    with pytest.raises(UsageError, match="needs the prefill") as error:
        check_request(request, selection, {"tp": 2})
    assert error.value.hint == f"--steps 0,{steps}"
    check_request(request, selection, {"dp": 2})
    request.steps = f"0,{steps}"
    check_request(request, selection, {"tp": 2})


@pytest.mark.parametrize(
    ("site", "stage"),
    [
        (".:in.input_ids", 0),
        (".:out", 1),
        ("model:in", 0),
        ("model:out.0", 1),
        ("model.layers.1:in", 1),
        ("model.rotary:out", 0),
    ],
)
def test_which_stage_of_a_pipeline_answers(site, stage):
    """What holds blocks begins on the first stage and ends on the last; what several have is the
    first's; a block is its own stage's."""
    stages = {"model.layers.0": [0], "model.layers.1": [1], "model.rotary": [0, 1]}
    for own in (0, 1):
        made = division(idle=False, owns=lambda sample: True, places={"pp": own}, sizes={"pp": 2})
        made._stages, made._containers, made._owned = stages, {".", "model"}, {}
        assert made.answers(0, site) == (own == stage)
        assert made.order(3) == 3 + own * 10**6
        made.ranks.idle = True
        assert not made.answers(0, site)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_how_batches_are_dealt(monkeypatch, num_groups, together):
    """Where there is one for each rank at least; who has one less runs one more for company where
    ranks must go in step, and does not answer for it."""
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, **_: ranks)
    groups, answered = [[n] for n in range(num_groups)], []
    for rank in (0, 1):
        ranks = object.__new__(Ranks)
        ranks.mesh = Mesh(axes=[MeshAxis(name="dp", size=2)])
        ranks.rank, ranks.size, ranks.sizes = rank, 2, {"dp": 2}
        own = ranks.deal(groups, together=together)
        assert ranks.dealt == (num_groups >= 2)
        if ranks.dealt:
            assert (ranks._alike, ranks._speaker) == ([rank], rank)
        if not ranks.dealt or together:
            assert len(own) == -(-num_groups // (2 if ranks.dealt else 1))
        answered += [group[0] for group in own if ranks.owns(group[0])]
    once = list(range(num_groups))
    assert sorted(answered) == (once if num_groups >= 2 else [0, 0])


@pytest.mark.parametrize(
    ("escalate", "operators", "why"),
    [
        (True, (), "--escalate cannot be combined with --mesh: the float32 pass is made by one"),
        (False, ("ops@m",), "ops@ sites cannot be combined with --mesh: operators are seen whole"),
    ],
)
def test_what_takes_one_process_says_why(escalate, operators, why):
    """A float32 pass records no operators."""
    request = SimpleNamespace(escalate=escalate, substitutes=(), train=None)
    with pytest.raises(UsageError, match=why):
        check_request(request, SimpleNamespace(operators=operators), {"dp": 2})
