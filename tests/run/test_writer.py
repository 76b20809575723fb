"""Writing a run: every dtype and layout bit for bit, nothing twice, nothing half."""

import errno
import json
import os

import pytest
import torch

from divergence import Run
from divergence.errors import RunExistsError, RunFormatError, RunWriteError
from divergence.numerics.formats import FORMATS
from divergence.run import target as target_of_runs
from divergence.run import writer as writing
from divergence.run.captured import CapturedTensor
from divergence.run.writer import RunWriter
from tests.by_hand import put

HAVE = [name for name in FORMATS if hasattr(torch, name)]
SOME_BYTES = torch.randint(
    0, 256, (16 * 24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


def filled(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Arbitrary bit patterns, nan and subnormals among them, in this dtype."""
    form = FORMATS[name]
    count = torch.Size(shape).numel() * form.itemsize
    raw = SOME_BYTES.repeat(count // len(SOME_BYTES) + 1)[:count]
    if form.kind == "bool":
        raw = raw & 1
    return raw.clone().view(form.torch_dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.numel() == 0 or torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


# --- what comes back ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", HAVE)
def test_every_dtype_comes_back_bit_for_bit(write_run, name):
    """Whatever the bits mean, and in every shape: many axes, none, none left."""
    tensors = {
        "many:out": filled(name, (2, 3, 4)),
        "scalar:out": filled(name, ()),
        "one:out": filled(name, (1,)),
        "empty:out": filled(name, (0, 5)),
    }
    run = Run.open(write_run(tensors))
    assert run.verify() == []
    for record in run.records:
        assert record.dtype == name
        assert same_bits(run.read(record), tensors[record.site]), record.site


def test_dtypes_of_all_widths_share_a_shard(write_run):
    """An odd number of bytes before a wide tensor does not disturb it."""
    tensors = {f"{name}:out": filled(name, (3,)) for name in HAVE}
    run = Run.open(write_run(tensors))
    assert len({record.place.shard for record in run.records}) == 1
    for record in run.records:
        assert same_bits(run.read(record), tensors[record.site]), record.site


def test_the_shards_are_plain_safetensors(write_run):
    """The library reads what is written, under the same names."""
    from safetensors.torch import load_file

    tensor = filled("bfloat16", (2, 3))
    path = write_run({"a:out": tensor, "b:out": filled("float64", (3,))})
    record = Run.open(path).records[0]
    assert same_bits(load_file(path / record.place.shard)[record.place.key], tensor)


LAYOUTS = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "sliced": lambda: torch.arange(12.0)[::3],
    "expanded": lambda: torch.tensor([1.0]).expand(4, 3),
    "offset": lambda: torch.arange(12.0)[5:],
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "with a gradient": lambda: torch.ones(2, requires_grad=True) * 2,
    "channels last": lambda: (
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_stored_by_its_values(write_run, layout):
    """Strides, pending conjugation and sparsity are how a tensor lies in memory, not what it is."""
    tensor = LAYOUTS[layout]()
    run = Run.open(write_run({"a:out": tensor}))
    expected = tensor.to_dense() if tensor.is_sparse else tensor
    found = run.read(run.records[0])
    assert torch.equal(found, expected.detach().resolve_conj().resolve_neg())
    assert run.verify() == []


def test_views_of_one_storage_are_stored_each(write_run):
    """Overlapping views are no reason to refuse, as safetensors' own writer does."""
    base = torch.arange(10.0)
    run = Run.open(write_run({"a:out": base, "b:out": base[2:6], "c:out": base[4:]}))
    assert [run.read(record).tolist() for record in run.records] == [
        base.tolist(),
        base[2:6].tolist(),
        base[4:].tolist(),
    ]


def test_a_huge_shape_of_few_bytes_is_kept(write_run):
    """Empty tensors may be wide in their other axes; thin ones may have many."""
    tensors = {
        "empty:out": torch.empty(0, 1 << 40),
        "thin:out": torch.ones((1,) * 20),
        "long:out": torch.zeros(1, 100_000, dtype=torch.bool),
    }
    run = Run.open(write_run(tensors))
    assert [tuple(run.read(r).shape) for r in run.records] == [
        tuple(t.shape) for t in tensors.values()
    ]


def test_a_tensor_of_nan_alone_has_no_extremes(write_run):
    """Its summary counts, and says nothing else; JSON has no nan."""
    run = Run.open(write_run({"a:out": torch.full((5,), float("nan"))}))
    summary = run.records[0].summary
    assert (summary.num_nan, summary.min, summary.rms) == (5, None, None)
    assert run.read(run.records[0]).isnan().all()


def test_coordinates_and_positions_come_back(tmp_path, manifest):
    """What is written beside the bytes is read again."""
    with RunWriter(tmp_path / "r", manifest()) as writer:
        put(writer, torch.ones(1, 2, 3), "m#2:out.cos", sample=1, step=3, positions=(0, 7))
    record = Run.open(tmp_path / "r").records[0]
    assert record.coordinates == ("free", 1, 3, "m#2:out.cos")
    assert record.positions == (0, 7)


# --- once --------------------------------------------------------------------------------------


def test_equal_tensors_are_stored_once(small_run):
    """Recording inputs as well as outputs costs a line, not the bytes."""
    run = Run.open(small_run)
    first, second, third = run.records
    assert first.place == second.place != third.place
    sizes = run.manifest.sizes
    assert (sizes.num_records, sizes.num_tensors, sizes.num_shards) == (3, 2, 1)
    assert (sizes.seen_bytes, sizes.stored_bytes) == (2 * 48 + 24, 48 + 24)


def test_equal_tensors_are_stored_once_across_shards(tmp_path, manifest, monkeypatch):
    """A later shard does not repeat what an earlier one holds."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 64)
    with RunWriter(tmp_path / "r", manifest()) as writer:
        for step in range(4):
            put(writer, torch.arange(32.0), step=step)
            writer.drain()
    run = Run.open(tmp_path / "r")
    assert len({record.place for record in run.records}) == 1
    assert len(list((tmp_path / "r/tensors").iterdir())) == 1


def test_equal_bytes_of_other_meaning_are_kept_apart(write_run):
    """Zeros are zeros in every dtype and shape, and still not the same tensor."""
    tensors = {
        "a:out": torch.zeros(4),
        "b:out": torch.zeros(4, dtype=torch.int32),
        "c:out": torch.zeros(2, 2),
        "d:out": torch.zeros(16, dtype=torch.uint8),
        "e:out": torch.zeros(2, dtype=torch.complex64),
    }
    run = Run.open(write_run(tensors))
    assert len({record.xxh3 for record in run.records}) == 1
    assert len({record.place for record in run.records}) == 5
    for record in run.records:
        assert same_bits(run.read(record), tensors[record.site])


# --- shards ------------------------------------------------------------------------------------


def test_shards_are_split_at_the_limit(tmp_path, manifest, monkeypatch):
    """Many shards, one run; a tensor larger than the limit has a shard of its own."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 1000)
    monkeypatch.setattr(writing, "SHARD_SECONDS", 1e9)
    tensors = [torch.full((100,), float(n)) for n in range(10)] + [torch.arange(5000.0)]
    with RunWriter(tmp_path / "r", manifest()) as writer:
        for step, tensor in enumerate(tensors):
            put(writer, tensor, step=step)
    run = Run.open(tmp_path / "r")
    assert run.verify() == []
    shards = sorted(path.name for path in (tmp_path / "r/tensors").iterdir())
    assert len(shards) == run.manifest.sizes.num_shards >= 4
    assert shards[0] == "r00000-000000.safetensors"
    for record, tensor in zip(run.records, tensors, strict=True):
        assert same_bits(run.read(record), tensor)


def test_records_come_only_after_their_shard(tmp_path, manifest, monkeypatch):
    """At every moment each record line on disk points at bytes on disk."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 400)
    seen = []
    replace = os.replace

    def watched(source, target):
        if str(target).endswith(".safetensors"):
            lines = (tmp_path / "r/records.jsonl").read_text().splitlines()
            named = {json.loads(line)["place"]["shard"] for line in lines}
            there = {f"tensors/{p.name}" for p in (tmp_path / "r/tensors").glob("*.safetensors")}
            seen.append(named <= there and f"tensors/{os.path.basename(target)}" not in named)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    with RunWriter(tmp_path / "r", manifest()) as writer:
        for step in range(12):
            put(writer, torch.full((50,), float(step)), step=step)
            writer.drain()
    assert len(seen) > 2
    assert all(seen)


@pytest.mark.slow
def test_an_old_shard_does_not_wait_for_more(tmp_path, manifest, monkeypatch):
    """What was seen some seconds ago is on disk, however little it is."""
    monkeypatch.setattr(writing, "SHARD_SECONDS", 0.0)
    writer = RunWriter(tmp_path / "r", manifest())
    put(writer, torch.ones(3))
    for _ in range(6000):
        if list((tmp_path / "r/tensors").glob("*.safetensors")):
            break
        writer._thread.join(0.05)
    run = Run.open(tmp_path / "r")
    assert (len(run.records), run.manifest.complete) == (1, False)
    writer.close(complete=True)


# --- existing directories ----------------------------------------------------------------------


def test_an_existing_run_is_never_overwritten(small_run, manifest):
    """Not without force; and its files are untouched."""
    before = {p: p.read_bytes() for p in small_run.rglob("*") if p.is_file()}
    with pytest.raises(RunExistsError, match="exists already"):
        RunWriter(small_run, manifest())
    assert {p: p.read_bytes() for p in small_run.rglob("*") if p.is_file()} == before


def test_force_replaces_a_run(small_run, manifest):
    """Nothing of the old run is left."""
    with RunWriter(small_run, manifest(), force=True) as writer:
        put(writer, torch.ones(3), "new:out")
    assert Run.open(small_run).sites() == ["new:out"]


def test_force_replaces_a_torn_run(small_run, manifest):
    """A run that cannot be read any more is still a run's directory."""
    (small_run / "manifest.json").write_text("")
    with RunWriter(small_run, manifest(), force=True):
        pass
    assert Run.open(small_run).records == []


@pytest.mark.parametrize("names", [["notes.txt"], ["manifest.json", "popup.html"], ["tensors"]])
def test_force_does_not_remove_what_is_no_run(tmp_path, manifest, names):
    """A manifest.json alone proves little: browsers and bundlers have files of that name."""
    place = tmp_path / "precious"
    place.mkdir()
    for name in names:
        (place / name).write_text("{}")
    with pytest.raises(RunExistsError, match="--force does not remove it"):
        RunWriter(place, manifest(), force=True)
    assert sorted(path.name for path in place.iterdir()) == sorted(names)


def test_a_file_or_a_link_is_no_place_for_a_run(tmp_path, manifest):
    """Also with force."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("file", "link"):
        with pytest.raises(RunExistsError, match="not a directory"):
            RunWriter(tmp_path / name, manifest(), force=True)
    assert (tmp_path / "file").read_text() == "x"


def test_an_empty_directory_is_used(tmp_path, manifest):
    """`mkdir` beforehand does no harm, and parents are made."""
    (tmp_path / "r").mkdir()
    with RunWriter(tmp_path / "r", manifest()):
        pass
    with RunWriter(tmp_path / "x/y/z", manifest()):
        pass
    assert Run.open(tmp_path / "x/y/z").manifest.complete


# --- the manifest ------------------------------------------------------------------------------


def test_the_manifest_is_replaced_at_once(small_run, tmp_path, manifest, monkeypatch):
    """A reader sees the old or the new one, never a part; nothing temporary stays."""
    states = []
    replace = os.replace

    def watched(source, target):
        if os.path.basename(target) == "manifest.json" and (tmp_path / "r/manifest.json").exists():
            states.append(json.loads((tmp_path / "r/manifest.json").read_text())["complete"])
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    with RunWriter(tmp_path / "r", manifest()) as writer:
        writer.update_manifest()
    assert states == [False, False]
    assert not list((tmp_path / "r").glob("*.tmp"))
    assert Run.open(tmp_path / "r").manifest.complete


def test_an_error_in_the_block_makes_an_incomplete_run(tmp_path, manifest):
    """What was put before is kept, and the manifest says what happened."""
    with pytest.raises(ValueError), RunWriter(tmp_path / "r", manifest()) as writer:
        put(writer, torch.ones(3))
        raise ValueError("the model\nfell over")
    run = Run.open(tmp_path / "r")
    assert (run.manifest.complete, run.manifest.stopped_by) == (False, "the model")
    assert len(run.records) == 1
    assert run.verify() == []


def test_an_interrupt_makes_an_incomplete_run(tmp_path, manifest):
    """Ctrl-C is named as such."""
    with pytest.raises(KeyboardInterrupt), RunWriter(tmp_path / "r", manifest()) as writer:
        put(writer, torch.ones(3))
        raise KeyboardInterrupt
    run = Run.open(tmp_path / "r")
    assert (run.manifest.stopped_by, len(run.records)) == ("interrupted", 1)


def test_text_that_is_no_utf8_does_not_stop_a_run(tmp_path, manifest):
    """An argument in another encoding reaches the manifest as replacement characters."""
    with RunWriter(tmp_path / "r", manifest(command="capture m -o caf\udce9")):
        pass
    command = Run.open(tmp_path / "r").manifest.command
    assert command.startswith("capture m -o caf\ufffd")


# --- a disk that refuses -----------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_clear_error(tmp_path, manifest, monkeypatch):
    """Earlier shards stay readable, no temporary file is left, and nothing is tried again."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 100)
    writer = RunWriter(tmp_path / "r", manifest())
    put(writer, torch.arange(50.0))
    writer.drain()
    monkeypatch.setattr(target_of_runs, "write_shard", full)
    with pytest.raises(RunWriteError, match="No space left"), writer:
        for step in range(1, 50):
            put(writer, torch.full((50,), float(step)), step=step)
            writer.drain()
    monkeypatch.undo()
    run = Run.open(tmp_path / "r")
    assert (run.manifest.complete, len(run.records)) == (False, 1)
    assert (run.manifest.sizes.num_records, run.manifest.sizes.stored_bytes) == (1, 200)
    assert "No space left" in run.manifest.stopped_by
    assert run.verify() == []
    assert not [path for path in run.path.rglob("*") if path.suffix == ".tmp"]


@pytest.mark.parametrize("name", ["r", "r.tar"])
def test_a_full_disk_names_what_is_readable(name, tmp_path, manifest, monkeypatch):
    """Of an archive, the directory in which it is gathered."""
    writer = RunWriter(tmp_path / name, manifest())
    put(writer, torch.ones(3))
    writer.flush()
    put(writer, torch.zeros(3), step=1)
    monkeypatch.setattr(target_of_runs, "write_shard", full)
    with pytest.raises(RunWriteError) as caught:
        writer.close(complete=True)
    monkeypatch.undo()
    assert caught.value.hint.startswith("free some space or ")
    named = caught.value.hint.rpartition("divergence inspect ")[2]
    assert len(Run.open(named).records) == 1


def test_a_record_line_cut_by_a_full_disk_is_taken_back(tmp_path, manifest):
    """Half a line in the middle of the file would make the whole run unreadable."""
    writer = RunWriter(tmp_path / "r", manifest())
    put(writer, torch.ones(3))
    file = writer._target._records

    class Filling:
        def write(self, data):
            if len(data) < 40:
                full()
            return file.write(data[: len(data) // 2])

        def __getattr__(self, name):
            return getattr(file, name)

    writer._target._records = Filling()
    with pytest.raises(RunWriteError, match="No space left"):
        writer.close(complete=True)
    assert (tmp_path / "r/records.jsonl").read_bytes() == b""
    assert Run.open(tmp_path / "r").records == []


def test_a_manifest_that_cannot_be_written_leaves_no_rest(tmp_path, manifest, monkeypatch):
    """The old manifest stays, the temporary file goes."""
    writer = RunWriter(tmp_path / "r", manifest())
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunWriteError, match="No space left"):
        writer.close(complete=True)
    monkeypatch.undo()
    assert not Run.open(tmp_path / "r").manifest.complete
    assert not list((tmp_path / "r").glob("*.tmp"))


def test_a_directory_that_cannot_be_made_is_a_write_error(tmp_path, manifest):
    """Not a traceback."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunWriteError, match="Not a directory") as caught:
        RunWriter(tmp_path / "file/run", manifest())
    assert caught.value.hint == "choose another place with -o"  # there is space enough


def test_what_cannot_be_stored_stops_the_capture(tmp_path, manifest):
    """An unknown failure of the background thread reaches the caller; the run stays readable."""
    with pytest.raises(RuntimeError, match="meta"), RunWriter(tmp_path / "r", manifest()) as writer:
        put(writer, torch.ones(3))
        writer.drain()
        writer.put(_OnMeta(), pass_="free", sample=0, step=1, site="a:out", order=0)
        writer.drain()
    try:
        run = Run.open(tmp_path / "r")
    except RunFormatError as error:  # pragma: no cover - shown by the failing test
        pytest.fail(str(error))
    assert not run.manifest.complete
    assert "meta" in run.manifest.stopped_by


class _OnMeta(CapturedTensor):
    """An item whose tensor has no bytes."""

    def __init__(self):
        super().__init__(torch.ones(2, device="meta"))
