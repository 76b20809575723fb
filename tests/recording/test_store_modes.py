"""What a capture keeps: every byte, projections, statistics, digests, or what another run lacks."""

import msgspec
import numpy as np
import pytest
import torch

from divergence import RecordOptions, Run, capture
from divergence import truth as make_truth
from divergence.errors import UsageError
from divergence.numerics.formats import format_named
from divergence.numerics.sketches import fold_tensor, sketch_bytes, sketch_tensor
from divergence.recording import keeper as keep_reduced
from divergence.recording.keeper import CopyKeeper, ReducedKeeper
from divergence.run.manifest import digest_tensor
from divergence.run.record import Place
from divergence.run.writer import Reducer, reducer_for

PROMPT = ["A bridge is built twice: once on paper, where every beam is exact, and once in steel."]
MODES = ("full", "sketch", "stats", "hash")


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("llama", hidden=256, num_blocks=2))


@pytest.fixture
def runs(shared_run):
    """One capture in each mode."""
    options = {"prompts": PROMPT, "max_new_tokens": 3, "sites": ["modules"], "probe": False}
    model = {"hidden": 256, "num_blocks": 2}
    return {mode: shared_run(model=model, store=mode, **options) for mode in MODES}


def notes_of(**options):
    said = []
    capture(
        **options,
        probe=False,
        progress=lambda event, done, total, text: said.append(text) if event == "note" else 0,
    )
    return said


def by_site(run):
    return {record.coordinates: record for record in run.records}


@pytest.mark.parametrize("mode", MODES[1:])
def test_records_are_those_of_a_full_run(runs, mode):
    """Sites, shapes, order and digests are the same whatever is kept."""
    full = by_site(runs["full"])
    assert runs[mode].manifest.plan.store == mode
    for key, record in by_site(runs[mode]).items():
        one = full[key]
        assert (record.shape, record.dtype, record.order) == (one.shape, one.dtype, one.order)
        assert record.xxh3 == one.xxh3
        # sums of few numbers are taken together, of which by what else waited: equal to rounding
        assert (record.summary is None) == (mode == "hash")
        if mode != "hash":
            found, wanted = (msgspec.structs.asdict(r.summary) for r in (record, one))
            assert found == pytest.approx(wanted, rel=1e-6)
        assert (record.sketch is not None) <= (mode == "sketch")
    assert len(full) == len(runs[mode].records)
    assert runs[mode].verify() == []


def test_sketches_are_of_the_tensors(runs):
    """Each stored sketch is what the stored bytes of the full run give; what is not sketched is
    there in full."""
    full, sketched = by_site(runs["full"]), runs["sketch"]
    count = 0
    for record in sketched.records:
        tensor = runs["full"].read(full[record.coordinates])
        if record.sketch is None:
            assert torch.equal(sketched.read(record), tensor)
            continue
        count += 1
        found = sketched.read_sketch(record)
        k, pooled = record.sketch.num_projections, record.sketch.num_pooled
        wanted = sketch_tensor(tensor, k, num_pooled=pooled)
        for one, other in zip(found, wanted, strict=True):
            assert np.allclose(one, other, rtol=1e-6, atol=1e-6)
    assert count > 100


def test_bytes(runs):
    """A sketched run takes a small part of the bytes; statistics and digests take none."""
    stored = {mode: run.manifest.sizes.stored_bytes for mode, run in runs.items()}
    assert stored["sketch"] < 0.15 * stored["full"]  # hidden 256: 8 projections of 256 features
    assert stored["stats"] == stored["hash"] == 0


def test_what_is_not_kept_is_not_read(runs):
    """Reading says why there are no bytes, and what to do."""
    record = next(r for r in runs["stats"].records if r.site == "model.layers.1:out")
    with pytest.raises(UsageError, match="captured with --store stats") as error:
        runs["stats"].read(record)
    assert "--store full" in error.value.hint


@pytest.mark.parametrize("mode", MODES[1:])
def test_no_anchor_without_bytes(runs, mode, tmp_path):
    """A run without bytes anchors no pass: that is said, and the free pass is made."""
    said = notes_of(like=runs[mode].path, out=tmp_path / "b")
    assert any("cannot anchor" in text and f"--store {mode}" in text for text in said)
    assert any(text.startswith("no anchored pass") for text in said)
    made = Run.open(tmp_path / "b").manifest
    assert (made.plan.passes, made.plan.store) == (["free"], mode)


def test_no_escalated_pass_without_bytes_is_said(runs, tmp_path):
    """It was asked for, so it is not left out in silence."""
    said = notes_of(like=runs["hash"].path, out=tmp_path / "b", escalate=True)
    assert any(text.startswith("no anchored or escalated pass") for text in said)


def test_sketched_beside_a_full_run(runs, tmp_path):
    """A full run anchors a sketched one."""
    run = capture(like=runs["full"].path, out=tmp_path / "b", store="sketch", probe=False)
    assert run.manifest.plan.passes == ["free", "anchored"]
    assert ("store", "full", "sketch") in [
        (one.name, one.reference, one.used) for one in run.manifest.overrides
    ]


def test_no_whole_pass_without_bytes(model, tmp_path):
    """The whole pass needs this run's own bytes."""
    said = notes_of(
        model=model,
        out=tmp_path / "a",
        prompts=PROMPT,
        max_new_tokens=3,
        store="sketch",
        whole=True,
    )
    assert any("no whole pass" in text and "--store sketch" in text for text in said)


def test_repeatability_without_bytes(model, tmp_path):
    """Whether a machine repeats itself is told by digests."""
    run = capture(
        model,
        out=tmp_path / "a",
        prompts=PROMPT,
        max_new_tokens=2,
        store="hash",
        recording=RecordOptions(repeat=2),
        probe=False,
    )
    found = run.manifest.repeatability
    assert found.num_different == 0 < found.num_compared


@pytest.mark.slow
def test_only_changed(runs, tmp_path):
    """Bytes are stored where digests differ; with the other run at hand everything can be read."""
    plant = ["model.layers.1.mlp:out=scale:1.1"]
    whole = capture(like=runs["full"].path, out=tmp_path / "b", plants=plant, probe=False)
    part = capture(
        like=runs["full"].path,
        out=tmp_path / "c",
        plants=plant,
        recording=RecordOptions(only_changed=True),
        probe=False,
    )
    known = {record.xxh3 for record in runs["full"].records}
    assert part.manifest.plan.only_changed == runs["full"].manifest.id
    assert all((r.place is None) == (r.xxh3 in known) for r in part.records)
    assert part.manifest.sizes.stored_bytes < whole.manifest.sizes.stored_bytes
    unread = next(r for r in part.records if r.place is None)
    with pytest.raises(UsageError, match=runs["full"].manifest.id):
        part.read(unread)
    part.set_fallback(whole)  # another run: nothing changes
    assert not part.has_bytes(unread)
    part.set_fallback(runs["full"])
    other = by_site(whole)
    for record in part.records:
        assert torch.equal(
            part.read(record).view(torch.uint8),
            whole.read(other[record.coordinates]).view(torch.uint8),
        )


def test_only_changed_against_digests(runs, tmp_path):
    """A run of digests alone is enough to tell what differs."""
    run = capture(
        like=runs["hash"].path,
        out=tmp_path / "b",
        recording=RecordOptions(only_changed=True),
        probe=False,
        plants=["model.layers.1.mlp:out=scale:1.1"],
    )
    changed = {record.site for record in run.records if record.place is not None}
    assert "model.layers.1.mlp:out" in changed and "model.layers.0:out" not in changed


@pytest.mark.parametrize(
    "options, message",
    [
        ({"store": "sketches"}, "--store sketches: there are full, sketch, stats, hash"),
        ({"only_changed": True}, "--only-changed needs --like"),
        ({"store": "stats", "sites": ["ops@model.layers.0"]}, "run again from theirs"),
    ],
    ids=["no such mode", "nothing to hold it to", "operators"],
)
def test_bad_wishes(model, options, message, tmp_path):
    """What cannot be is refused before anything runs."""
    with pytest.raises(UsageError, match=message):
        capture(model, out=tmp_path / "a", prompts=PROMPT, probe=False, **options)


def test_only_changed_keeps_bytes(runs, tmp_path):
    """Not changed, and no bytes: two wishes at once."""
    with pytest.raises(UsageError, match="keeps bytes"):
        capture(
            like=runs["full"].path,
            out=tmp_path / "b",
            recording=RecordOptions(only_changed=True),
            store="hash",
        )


def test_a_truth_is_kept_in_full(runs, tmp_path):
    """The float64 run of a sketched one holds every byte."""
    truth = make_truth(runs["sketch"].path, out=tmp_path / "truth")
    assert truth.manifest.plan.store == "full"
    assert all(record.place is not None for record in truth.records)


@pytest.mark.parametrize("mode", MODES)
def test_dry_run(model, runs, dry_run, mode):
    """A dry run's sizes are those of the mode: at most what the capture then stores, less what
    equal tensors share."""
    words = "--prompt", *PROMPT, "--max-new-tokens", 3, "--sites", "modules", "--truth", "no"
    plan = dry_run(model, *words, "--store", mode)
    form = format_named("bfloat16")
    row = next(row for row in plan["rows"] if row["site"] == "model.layers.0.mlp.up_proj:out")
    shape = next(r.shape for r in runs["full"].records if r.site == row["site"])
    per_mode = {"full": shape[1] * shape[2] * 2, "sketch": sketch_bytes(shape, form)}
    assert row["bytes_prefill"] == per_mode.get(mode, 0)
    stored = runs[mode].manifest.sizes.stored_bytes
    assert plan["total_bytes"] >= stored if stored else plan["total_bytes"] == 0


@pytest.mark.parametrize("mode", MODES[1:])
def test_as_on_an_accelerator(runs, mode):
    """What a device computes where the tensor lies is what a host makes of its bytes."""
    keeper = ReducedKeeper(mode, CopyKeeper(), hosts=True)
    tensors = [
        torch.randn(1, 9, 256).bfloat16(),
        torch.arange(5),
        torch.randn(1, 3, 1024),
        torch.randn(2, 40, 256).bfloat16(),
    ]
    items = [keeper.keep(tensor) for tensor in tensors]
    stored = {}

    def store(digest, piece):
        stored[digest] = piece.holder
        return Place(shard="tensors/r00000-000000.safetensors", key=digest)

    whole = Reducer(mode).take(items, store)
    assert [item.shape for item in whole] == ([(5,)] if mode == "sketch" else [])
    for item, tensor in zip(items, tensors, strict=True):
        if item in whole:
            continue
        assert item.fold == fold_tensor(tensor) and item.digest is None and item.tensor is None
        assert (item.summary is None) == (mode == "hash")
        if mode == "sketch":
            k, pooled = item.sketch.num_projections, item.sketch.num_pooled
            wanted = sketch_tensor(tensor, k, num_pooled=pooled)
            assert torch.equal(stored[item.sketch.xxh3], wanted.joined())


def test_fold_beside_xxh3():
    """Where the run to be repeated has device digests, a host notes that kind as well."""
    item = CopyKeeper().keep(torch.randn(3, 300))
    tensor = item.tensor
    left = Reducer("full", fold=True).take([item], store=None)
    assert left == [item] and item.fold == fold_tensor(tensor)


@pytest.mark.parametrize("mode", ["sketch", "stats", "hash"])
def test_a_device_that_cannot_reduce(mode, monkeypatch):
    """Its tensors go to the host whole, which is said once; running out of memory is no such
    thing."""
    said = []
    keeper = ReducedKeeper(mode, CopyKeeper(), hosts=True, note=said.append)
    tensor = torch.randn(4, 256)

    def lacking(tensor):
        raise NotImplementedError("Could not run 'aten::bitwise_xor'")

    monkeypatch.setattr(keep_reduced, "fold_sums", lacking)
    for _ in range(2):
        item = keeper.keep(tensor)
        assert item.reduced is None
        assert torch.equal(item.tensor, tensor)
    assert len(said) == 1
    assert f"cpu cannot compute what --store {mode} keeps" in said[0]

    def full(tensor):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(keep_reduced, "fold_sums", full)
    with pytest.raises(torch.OutOfMemoryError):
        ReducedKeeper(mode, CopyKeeper(), hosts=True).keep(tensor)


@pytest.mark.parametrize("mode", ["sketch", "stats", "hash"])
def test_a_device_whose_digests_are_wrong(mode, monkeypatch):
    """It does not give the digest that is known: its tensors are digested on the host."""
    said = []
    monkeypatch.setattr(keep_reduced, "is_exact_on", lambda device: False)
    keeper = ReducedKeeper(mode, CopyKeeper(), hosts=True, note=said.append)
    item = keeper.keep(torch.randn(4, 256))
    assert item.reduced is None and item.tensor is not None
    assert "its 64-bit integer arithmetic is wrong" in said[0]


def test_a_host_that_sketches_notes_the_device_digest():
    """Two sketches of equal tensors differ where they were added up in another order."""
    item = CopyKeeper().keep(torch.randn(3, 300))
    tensor = item.tensor
    reducer = reducer_for("sketch", like=None, only_changed=False)
    reducer.take([item], lambda digest, piece: Place(shard="s", key="k"))
    assert item.fold == fold_tensor(tensor) and item.digest == digest_tensor(tensor)
