"""Runs of several ranks, written by hand, seen as runs of one."""

import json
import math
import pickle

import msgspec
import pytest
import torch

from divergence import Run
from divergence.errors import RunFormatError
from divergence.numerics.summary import summarize
from divergence.run.manifest import Mesh, MeshAxis
from divergence.run.ranks import unsharded
from divergence.run.writer import RunWriter
from tests.by_hand import put

WHOLE = torch.arange(24, dtype=torch.float32).reshape(1, 4, 6) - 7.5


@pytest.fixture
def ranks(tmp_path, manifest):
    """``ranks({"tp": 2}, {0: (tensor, ("shard:2",)), ...})`` → the run, unsharded. Ranks in order;
    ``complete``: do all ranks close?"""

    def write(axes: dict[str, int], parts: dict[int, tuple], *, complete: bool = True) -> Run:
        mesh = Mesh(axes=[MeshAxis(name=name, size=size) for name, size in axes.items()])
        count = 1
        for size in axes.values():
            count *= size
        first = RunWriter(tmp_path / "run", manifest(mesh=mesh))
        others = [RunWriter(tmp_path / "run", manifest(mesh=mesh), rank=r) for r in range(1, count)]
        for rank, writer in enumerate([first, *others]):
            if rank in parts:
                tensor, placement = parts[rank]
                put(writer, tensor.contiguous(), site="m:out", order=rank, placement=placement)
            writer.flush()
        for writer in others:
            first.manifest.sizes.num_records += writer.manifest.sizes.num_records
            writer.close(complete=True)
        first.close(complete=complete)
        return unsharded(Run.open(tmp_path / "run"))

    return write


@pytest.fixture
def halves(ranks):
    """WHOLE on two ranks, each with half of its columns."""
    return ranks({"tp": 2}, {r: (part, ("shard:2",)) for r, part in enumerate(WHOLE.chunk(2, 2))})


def only(run: Run) -> torch.Tensor:
    (record,) = run.records
    tensor = run.read(record)
    assert tuple(tensor.shape) == record.shape
    return tensor


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_laid_side_by_side(ranks, dim):
    """Along any dimension, in the order of the axis; the summary is that of the whole."""
    whole = WHOLE.repeat(2, 1, 1)
    cut = whole.chunk(2, dim)
    run = ranks({"tp": 2}, {r: (cut[r], (f"shard:{dim}",)) for r in (0, 1)})
    assert torch.equal(only(run), whole)
    found, right = run.records[0].summary, summarize(whole)
    for name in ("min", "max", "absmax", "num_zero"):
        assert getattr(found, name) == getattr(right, name)
    assert (found.mean, found.rms) == pytest.approx((right.mean, right.rms), rel=1e-12)


def test_parts_of_unequal_length(ranks):
    """The last rank's part is shorter where the length does not divide; one may hold nothing."""
    cut = (WHOLE[..., :3], WHOLE[..., 3:], WHOLE[..., 6:])
    run = ranks({"tp": 3}, {r: (cut[r], ("shard:2",)) for r in range(3)})
    assert torch.equal(only(run), WHOLE)


def test_one_dimension_divided_by_two_axes(ranks):
    """The first axis is the outer one, as DTensor lays it out."""
    whole = torch.cat([WHOLE, WHOLE + 100], 1)
    cut = whole.chunk(4, 1)
    placement = ("shard:1", "shard:1")
    run = ranks({"fsdp": 2, "tp": 2}, {r: (cut[r], placement) for r in range(4)})
    assert torch.equal(only(run), whole)
    parts = run.shares(run.records[0])
    assert [part.rank for part in parts] == [0, 1, 2, 3]
    assert all(torch.equal(whole[p.index], cut[p.rank]) for p in parts)


def test_terms_are_added(ranks):
    """In float64, and rounded once: 1 + 2^-8 · 3 terms in bfloat16 is not what adding one by one
    in bfloat16 gives."""
    terms = [torch.tensor([[1.0]]), *[torch.tensor([[2.0**-8]])] * 3]
    terms = [term.to(torch.bfloat16) for term in terms]
    run = ranks({"tp": 4}, {r: (term, ("partial:sum",)) for r, term in enumerate(terms)})
    assert only(run).item() == 1 + 2.0**-6  # 1.01171875 lies between 1.0078 and 1.0156: to even
    assert run.records[0].summary.max == 1 + 2.0**-6


@pytest.mark.parametrize(("how", "right"), [("max", 5.0), ("min", -2.0), ("mean", 1.5)])
def test_other_ways_to_put_terms_together(ranks, how, right):
    """A maximum or mean over ranks is taken as the record says."""
    run = ranks(
        {"tp": 2}, {r: (torch.tensor([v]), (f"partial:{how}",)) for r, v in enumerate((5.0, -2.0))}
    )
    assert only(run).item() == right


def test_replicas_that_agree(ranks):
    """One tensor, whatever number of ranks hold it."""
    run = ranks({"dp": 3}, dict.fromkeys(range(3), (WHOLE, ("replicate",))))
    assert torch.equal(only(run), WHOLE) and run.disagreements == []


def test_the_odd_replica_is_named(ranks):
    """One element of one rank of four differs by one unit: that rank is named, and the others'
    version stands for the tensor, also where it is the first rank that is odd."""
    odd = WHOLE.clone()
    odd[0, 0, 0] = torch.nextafter(odd[0, 0, 0], torch.tensor(9.0))
    run = ranks({"tp": 4}, {r: (odd if r == 0 else WHOLE, ("replicate",)) for r in range(4)})
    (found,) = run.disagreements
    assert (found.ranks, found.peers, found.records[0].site) == ((0,), (1, 2, 3), "m:out")
    assert torch.equal(only(run), WHOLE)
    assert torch.equal(run.read(found.records[1]), odd)


def test_replicas_of_parts(ranks):
    """Two replicas, each divided in two: the odd part of one replica is found, and the tensor is
    put together of what the most, or the lowest, ranks have of each part."""
    cut = WHOLE.chunk(2, 2)
    placement = ("replicate", "shard:2")
    parts = {0: cut[0], 1: cut[1] * 2, 2: cut[0], 3: cut[1], 4: cut[0], 5: cut[1]}
    run = ranks({"dp": 3, "tp": 2}, {r: (part, placement) for r, part in parts.items()})
    (found,) = run.disagreements
    assert (found.ranks, found.peers) == ((1,), (3, 5))
    assert torch.equal(only(run), WHOLE)


def test_what_one_place_holds_alone(ranks):
    """Prompts that one rank ran, and stages that have their own blocks."""
    run = ranks(
        {"pp": 2, "tp": 2},
        {2: (WHOLE[..., :3], ("single", "shard:2")), 3: (WHOLE[..., 3:], ("single", "shard:2"))},
    )
    assert torch.equal(only(run), WHOLE)


@pytest.mark.parametrize(
    ("axes", "parts", "reason"),
    [
        ({"tp": 2}, {0: (WHOLE, None), 1: (WHOLE, None)}, "is not known"),
        ({"tp": 2}, {0: (WHOLE, ("shard:1",))}, "place 1 of tp was not recorded"),
        ({"tp": 2}, {0: (WHOLE, ("single",)), 1: (WHOLE, ("single",))}, "alone"),
        ({"tp": 2}, {0: (WHOLE, ("replicate",)), 1: (WHOLE, ("shard:0",))}, "different placem"),
        ({"tp": 2}, {0: (WHOLE, ("shard:1",)), 1: (WHOLE[..., :2], ("shard:1",))}, "do not fit"),
        ({"tp": 2}, {0: (WHOLE, ("shard:5",)), 1: (WHOLE, ("shard:5",))}, "do not fit"),
        ({"tp": 2}, {0: (WHOLE, ("shard:1",)), 1: (WHOLE.double(), ("shard:1",))}, "dtypes"),
        ({"tp": 2}, {0: (WHOLE, ("partial:sum",)), 1: (WHOLE[:, :2], ("partial:sum",))}, "shapes"),
    ],
)
def test_parts_that_make_no_tensor(ranks, axes, parts, reason):
    """Nothing is guessed: the tensor is kept apart, with the reason."""
    run = ranks(axes, parts)
    assert run.records == []
    (said,) = run.unmade.values()
    assert reason in said


def test_the_summary_of_parts_with_what_is_no_number(ranks):
    """Means and norms are of the finite elements of all parts, however these are spread."""
    whole = WHOLE.clone()
    whole[0, :3, 4], whole[0, 0, 0], whole[0, 1, 5] = math.inf, math.nan, -math.inf
    cut = whole.chunk(2, 2)
    run = ranks({"tp": 2}, {r: (cut[r], ("shard:2",)) for r in (0, 1)})
    found, right = run.records[0].summary, summarize(whole)
    assert (found.num_posinf, found.num_nan, found.num_neginf) == (3, 1, 1)
    assert (found.mean, found.rms) == pytest.approx((right.mean, right.rms), rel=1e-12)


def test_records_come_forward_by_forward(ranks):
    """In each pass by sample, step and order, however the ranks' lines lie."""
    run = ranks({"tp": 2}, {r: (WHOLE, ("replicate",)) for r in (0, 1)}).run
    places = [("anchored", 0, 0, 1), ("free", 1, 0, 0), ("free", 0, 1, 1), ("free", 0, 0, 2)]
    run.records = [
        msgspec.structs.replace(one, pass_=pass_, sample=sample, step=step, order=order)
        for pass_, sample, step, order in places
        for one in run.records
    ]
    found = [(r.pass_, r.sample, r.step, r.order) for r in unsharded(run).records]
    assert found == [*reversed(places[1:]), places[0]]


def test_copies_of_other_token_positions(ranks):
    """What ranks hold of other tokens is not the same tensor."""
    run = ranks({"dp": 2}, {r: (WHOLE, ("replicate",)) for r in (0, 1)}).run
    run.records[1] = msgspec.structs.replace(run.records[1], positions=(0, 1, 2, 3))
    assert "token positions" in next(iter(unsharded(run).unmade.values()))


def test_a_record_is_known_by_its_value(halves):
    """One that another process was sent is read like the view's own."""
    assert torch.equal(halves.read(pickle.loads(pickle.dumps(halves.records[0]))), WHOLE)


def test_terms_have_no_digest(ranks):
    """Other terms may have the same sum, so that their digests tell nothing of it."""
    run = ranks({"tp": 2}, {r: (WHOLE, ("partial:sum",)) for r in (0, 1)})
    found = run.digests(run.records[0])
    assert found.xxh3 is found.fold is None
    assert run.run.digests(run.run.records[0]).xxh3 == (run.run.records[0].xxh3,)


def test_copies_with_digests_of_two_kinds(ranks):
    """A host's digest and an accelerator's cannot be held against each other: the copies are not
    said to disagree, nor to agree."""
    run = ranks({"dp": 2}, {r: (WHOLE, ("replicate",)) for r in (0, 1)}).run
    one, two = run.records
    run.records = [one, msgspec.structs.replace(two, xxh3=None, fold=two.xxh3)]
    view = unsharded(run)
    assert view.records == [] and view.disagreements == []
    assert "two kinds" in next(iter(view.unmade.values()))
    run.records[0] = msgspec.structs.replace(one, fold=one.xxh3)  # as `--like` of such a run
    assert unsharded(run).disagreements == [] and len(unsharded(run).records) == 1


def test_a_view_has_the_files_of_its_run(halves):
    """What is packed of it are the parts as they lie on disk."""
    files = {name: size for name, size, _ in halves.whole_files()}
    assert files == halves.run.files() == halves.files()


def test_a_joined_tensor_has_no_digest(halves):
    """Its bytes lie nowhere in one piece, so that nothing can be taken for equal to it unread."""
    record = halves.records[0]
    assert record.xxh3 is None and record.fold is None
    assert halves.has_bytes(record) and halves.find(record.coordinates) is record


def test_a_broken_part_is_found(halves):
    """The bytes of each part are held against their checksum."""
    shard = halves.path / "tensors" / "r00001-000000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RunFormatError, match="wrong checksum"):
        halves.read(halves.records[0])


def test_an_incomplete_run_of_ranks(ranks):
    """A rank that died early leaves what the others hold whole."""
    run = ranks({"tp": 2}, {0: (WHOLE, ("replicate",))}, complete=False)
    assert not run.manifest.complete
    assert torch.equal(only(run), WHOLE)


def test_a_run_of_one_process_is_itself(tmp_path, manifest):
    """Nothing is put between a reader and a run that one process made."""
    with RunWriter(tmp_path / "run", manifest()):
        pass
    run = Run.open(tmp_path / "run")
    assert unsharded(run) is run


@pytest.fixture
def two_ranks(ranks):
    """A run of two ranks with a record each."""
    return ranks({"tp": 2}, dict.fromkeys((0, 1), (torch.ones(3), ("replicate",)))).path


def test_a_run_of_ranks_needs_the_lines_of_all(two_ranks):
    """A complete run without the records of one rank is damaged, and the file is named."""
    assert [record.rank for record in Run.open(two_ranks).records] == [0, 1]
    (two_ranks / "records-r00001.jsonl").unlink()
    with pytest.raises(RunFormatError, match=r"records-r00001\.jsonl is missing"):
        Run.open(two_ranks)


def test_lost_lines_are_looked_for_in_the_right_file(two_ranks):
    """In that of a rank that has none; where all have some, in all."""
    lines = (two_ranks / "records-r00001.jsonl").read_text()
    (two_ranks / "records-r00001.jsonl").write_text("")
    with pytest.raises(RunFormatError, match="1 records in a complete run of 2") as caught:
        Run.open(two_ranks)
    assert caught.value.where.endswith("records-r00001.jsonl")
    assert "copy records-r00001.jsonl again" in caught.value.hint
    more = json.dumps(json.loads(lines) | {"step": 1})
    (two_ranks / "records-r00001.jsonl").write_text(f"{lines}{more}\n")
    with pytest.raises(RunFormatError, match="3 records in a complete run of 2") as caught:
        Run.open(two_ranks)
    assert "the records of all 2 ranks" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank": 0}, "a record of rank 0 in records-r00001"),
        ({"placement": ["replicate", "replicate"]}, "a placement on 2 axes; the mesh has 1"),
        ({"placement": ["shard:x"]}, "broken record"),
    ],
)
def test_a_record_that_does_not_fit_the_mesh(two_ranks, changes, reason):
    """Each rank's file holds that rank's records, placed on the axes that there are."""
    lines = two_ranks / "records-r00001.jsonl"
    lines.write_text(json.dumps(json.loads(lines.read_text()) | changes) + "\n")
    with pytest.raises(RunFormatError, match=reason):
        Run.open(two_ranks)


def test_a_placement_without_a_mesh(tmp_path, manifest):
    """Only a run of several ranks has tensors in parts."""
    with RunWriter(tmp_path / "run", manifest()) as writer:
        put(writer, torch.ones(3), placement=("replicate",))
    with pytest.raises(RunFormatError, match="without a mesh"):
        Run.open(tmp_path / "run")
