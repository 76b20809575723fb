"""Reading a run: what is damaged is named; nothing in a run leads outside its directory."""

import json
import os
import random
import shutil
import struct
import tarfile

import pytest
import torch

from divergence import Run
from divergence.errors import RunFormatError, UsageError
from divergence.run import record as layout
from divergence.run.manifest import SCHEMA_VERSION


def refused(path, *texts: str) -> RunFormatError:
    """Opening ``path`` gives a RunFormatError that holds all of ``texts``."""
    with pytest.raises(RunFormatError) as caught:
        Run.open(path)
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))
    return caught.value


def edit_manifest(run, change) -> None:
    values = json.loads((run / "manifest.json").read_text())
    change(values)
    (run / "manifest.json").write_text(json.dumps(values))


def edit_records(run, change) -> None:
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    change(records)
    (run / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def the_shard(run):
    return next((run / "tensors").iterdir())


def edit_header(run, change, *, length: int | None = None) -> None:
    """Rewrite the header of the only shard; the bytes behind it stay."""
    data = the_shard(run).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    change(header)
    text = json.dumps(header).encode()
    the_shard(run).write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + data[8 + size :]
    )


def set_incomplete(run) -> None:
    edit_manifest(run, lambda m: m.update(complete=False))


# --- finding things ----------------------------------------------------------------------------


def test_a_run_is_found_by_its_coordinates(small_run):
    """find, at_site and sites agree; an unknown site has near names."""
    run = Run.open(small_run)
    record = run.find(("free", 0, 0, "b:in"))
    assert run.at_site("b:in") == [record]
    assert run.find(("free", 0, 1, "b:in")) is None
    assert run.sites() == ["a:out", "b:in", "b:out"]
    with pytest.raises(UsageError, match="no site 'b:inn'") as caught:
        run.at_site("b:inn")
    assert "b:in" in caught.value.hint
    assert "complete, 3 records" in repr(run)
    run.close()
    assert run.read(record).shape == (1, 3, 4)  # opens what it needs again


def test_sites_come_in_natural_order(write_run):
    """Block 10 after block 9; digits of any script and length are no number to trip over."""
    names = ["b.10:out", "b.9:out", "b.\u00b2:out", "b.1\u00b2:out", "b." + "1" * 5000 + ":out"]
    run = Run.open(write_run({name: torch.ones(1) for name in names}))
    assert run.sites()[:2] != sorted(names)[:2]
    assert run.sites().index("b.9:out") < run.sites().index("b.10:out")


def test_what_is_read_cannot_change_the_file(small_run):
    """A write to a tensor, though forbidden, stays in memory."""
    run = Run.open(small_run)
    before = the_shard(small_run).read_bytes()
    run.read(run.records[0]).fill_(7)
    assert the_shard(small_run).read_bytes() == before
    assert Run.open(small_run).verify() == []


def test_a_link_to_a_run_is_a_run(small_run, tmp_path):
    """The run itself may be reached by a link, and by a path with odd characters."""
    (tmp_path / "a [b] ü 'c").symlink_to(small_run)
    assert len(Run.open(tmp_path / "a [b] ü 'c").records) == 3


# --- no run at all -----------------------------------------------------------------------------


def test_what_is_no_run_is_said_to_be_none(tmp_path):
    """Missing, a file, an empty directory, a name too long, somebody's unknown home."""
    refused(tmp_path / "none", "does not exist", "divergence capture MODEL -o RUN")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is not a directory")
    refused(tmp_path / "file/below", "does not exist")
    refused(tmp_path, "it has no manifest.json")
    refused("x" * 5000)
    refused("~nobody-of-this-name/run", "does not exist")


# --- the manifest ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("null", "is damaged"),
        ("{}", "schema_version"),
        ('{"schema_version": "1"}', "schema_version"),
        (f'{{"schema_version": {SCHEMA_VERSION + 1}, "anything": 1}}', "schema version"),
        ('{"schema_version": 0}', "schema version 0"),
        ('{"schema_version": 1}', "missing required field `id`"),
        ("[" * 100_000, "is damaged"),
        ('{"schema_version": 1, "id": ' + "[" * 100_000, "is damaged"),
        ('{"schema_version": 1, "id": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}", "manifest.json"),
        ("\ufeff{}", "is damaged"),
        ("\0" * 100, "is damaged"),
    ],
)
def test_a_broken_manifest_is_named(small_run, text, said):
    """The file, and what is wrong with it."""
    (small_run / "manifest.json").write_text(text, encoding="utf-8")
    refused(small_run, "manifest.json", said)


def test_a_newer_run_asks_for_a_newer_tool(small_run):
    """Before anything else is complained about."""
    edit_manifest(small_run, lambda m: m.update(schema_version=SCHEMA_VERSION + 1, later="key"))
    newer, known = f"schema version {SCHEMA_VERSION + 1}", f"reads up to {SCHEMA_VERSION}"
    refused(small_run, newer, known, "read it with divergence 0.0.0, which wrote it")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(extra=1), "unknown field `extra`"),
        (lambda m: m["model"].update(extra=1), "`$.model`"),
        (lambda m: m["tokens"]["samples"][0].update(extra=1), "`$.tokens.samples["),
        (lambda m: m["settings"].update(seed="0"), "`$.settings.seed`"),
        (lambda m: m["environment"].update(variables={"A": 1}), "`$.environment.variables["),
        (lambda m: m["plan"].update(store="sampled"), "`$.plan.store`"),
        (lambda m: m["tokens"]["samples"][0].update(prompt_ids=[-1]), "prompt_ids["),
        (lambda m: m["tokens"]["samples"][0].update(prompt_ids=[2**70]), "prompt_ids["),
        (lambda m: m["sizes"].update(num_records=-1), "`$.sizes.num_records`"),
        (lambda m: m.pop("environment"), "missing required field `environment`"),
        (lambda m: m["tokens"].update(groups=[[0], [1], [2]]), "`$.tokens.groups`"),
        (lambda m: m["tokens"].update(groups=[[1], [1]]), "`$.tokens.groups`"),
        (lambda m: m["tokens"].update(groups=[[0]]), "`$.tokens.groups`"),
        (lambda m: m["tokens"].update(groups=[[0], [1], []]), "a group is empty"),
        (lambda m: m["tokens"].update(groups=[[0, 1]]), "not equally long"),
        (lambda m: m["model"].update(dtype="float33"), "`$.model.dtype`"),
    ],
)
def test_a_wrong_manifest_value_is_named_by_its_path(small_run, change, said):
    """Unknown keys, wrong types and batches that cannot be."""
    edit_manifest(small_run, change)
    refused(small_run, "breaks the format", said, "docs/dump-format.md")


def test_text_that_is_no_utf8_is_damage(small_run):
    """Also in a value that is read only the second time."""
    data = (small_run / "manifest.json").read_bytes()
    (small_run / "manifest.json").write_bytes(data.replace(b"by-hand", b"by-\xff\xfe"))
    refused(small_run, "manifest.json")


# --- records -----------------------------------------------------------------------------------

WRONG_RECORDS = {
    "unknown key": (lambda r: r.update(extra=1), "unknown field `extra`"),
    "unknown key below": (lambda r: r["summary"].update(extra=1), "`$.summary`"),
    "missing key": (lambda r: r.pop("xxh3"), "`xxh3`"),
    "other pass": (lambda r: r.update({"pass": "fast"}), "`$.pass`"),
    "dtype": (lambda r: r.update(dtype="float33"), "no dtype is called 'float33'"),
    "dtype by another name": (lambda r: r.update(dtype="fp32"), "no dtype is called 'fp32'"),
    "negative size": (lambda r: r.update(shape=[1, -3, 4]), "`$.shape["),
    "size of 70 bits": (lambda r: r.update(shape=[2**70]), "`$.shape["),
    "size without end": (lambda r: r.update(shape=[2**40, 2**40]), "larger than any memory"),
    "empty without end": (lambda r: r.update(shape=[0, 2**62, 2**62]), "larger than any memory"),
    "many axes": (lambda r: r.update(shape=[1] * 65), "`$.shape`"),
    "negative step": (lambda r: r.update(step=-1), "`$.step`"),
    "negative rank": (lambda r: r.update(rank=-1), "`$.rank`"),
    "sample of no group": (lambda r: r.update(sample=7), "sample 7 is not the first of any group"),
    "no site": (lambda r: r.update(site="a"), "`$.site`"),
    "site with a line end": (lambda r: r.update(site="a:out\n"), "`$.site`"),
    "checksum with a line end": (lambda r: r.update(xxh3="0" * 32 + "\n"), "`$.xxh3`"),
    "checksum in capitals": (lambda r: r.update(xxh3="A" * 32), "`$.xxh3`"),
    "checksum with spaces": (lambda r: r.update(xxh3="00 " * 10 + "00"), "`$.xxh3`"),
    "site with escapes": (lambda r: r.update(site="a\x1b[2J:out"), "`$.site`"),
    "checksum": (lambda r: r.update(xxh3="ff"), "`$.xxh3`"),
    "positions": (lambda r: r.update(positions=[0]), "1 positions for shape [1, 3, 4]"),
    "positions back": (lambda r: r.update(positions=[2, 1, 0]), "do not ascend"),
    "wrong type": (lambda r: r.update(order="0"), "`$.order`"),
    "other bytes": (lambda r: r.update(shape=[1, 3, 5]), "needs 60 bytes"),
    "other shape": (lambda r: r.update(shape=[3, 4]), "the shard's header says F32 [1, 3, 4]"),
    "other dtype": (lambda r: r.update(dtype="int32"), "record says int32"),
    "no such key": (lambda r: r["place"].update(key="0" * 32), "record without bytes"),
    "no such shard": (
        lambda r: r["place"].update(shard="tensors/r00000-000009.safetensors"),
        "tensors/r00000-000009.safetensors is missing",
    ),
    "nan": (lambda r: r["summary"].update(mean=float("nan")), "broken record"),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_a_wrong_record_is_named_by_file_and_line(small_run, name):
    """Whether the run is complete or not."""
    change, said = WRONG_RECORDS[name]
    edit_records(small_run, lambda records: change(records[0]))
    error = refused(small_run, said)
    assert "line 1" in error.where or "a:out" in error.where or "missing" in error.message
    set_incomplete(small_run)
    refused(small_run, said)


@pytest.mark.parametrize(
    "shard",
    [
        "/etc/passwd",
        "tensors/../../outside.safetensors",
        "../outside.safetensors",
        "tensors/..safetensors/x.safetensors",
        "tensors\\..\\outside.safetensors",
        "tensors/.hidden.safetensors",
        "tensors/a.safetensors\n",
        "tensors/a\0.safetensors",
        "./tensors/a.safetensors",
        "tensors//a.safetensors",
        "TENSORS/a.safetensors",
        "",
        "file:///etc/passwd",
    ],
)
def test_no_shard_name_leads_outside(small_run, shard):
    """Absolute, upwards, backwards, hidden: all refused by name, before any file is opened."""
    edit_records(small_run, lambda records: records[0]["place"].update(shard=shard))
    refused(small_run, "is not allowed")


def test_a_repeated_record_is_refused(small_run):
    """Two tensors cannot have been seen at one place; both lines are named."""
    edit_records(small_run, lambda records: records.append(records[0]))
    refused(small_run, "line 4 repeats line 1")


def test_a_lost_line_is_noticed(small_run):
    """A complete run says how many records it has."""
    edit_records(small_run, lambda records: records.pop())
    refused(small_run, "2 records in a complete run of 3")
    set_incomplete(small_run)
    assert len(Run.open(small_run).records) == 2


def test_a_torn_last_line_counts_only_where_a_run_was_torn(small_run):
    """In an incomplete run the line never counted; in a complete one it is damage."""
    path = small_run / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    refused(small_run, "line 3", "broken record")
    set_incomplete(small_run)
    run = Run.open(small_run)
    assert (len(run.records), run.torn_tail) == (2, True)
    assert run.verify() == []


def test_a_broken_line_in_the_middle_is_always_damage(small_run):
    """A kill tears the end alone."""
    set_incomplete(small_run)
    path = small_run / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-20] + b"\n" + lines[2])
    refused(small_run, "line 2", "broken record")
    path.write_bytes(lines[0] + b"\n" + lines[1] + lines[2])
    refused(small_run, "line 2")


def test_a_line_without_end_is_not_read_into_memory(small_run):
    """20 MB of one line are refused after the first."""
    with open(small_run / "records.jsonl", "ab") as file:
        file.write(b" " * 20_000_000)
    refused(small_run, "line 4 is longer than")


def test_a_deeply_nested_line_is_damage(small_run):
    """No recursion limit is met."""
    with open(small_run / "records.jsonl", "ab") as file:
        file.write(b"[" * 100_000 + b"\n")
    refused(small_run, "line 4")


def test_an_incomplete_run_may_have_no_records_yet(small_run):
    """Killed before the first shard; a complete run needs the file."""
    (small_run / "records.jsonl").unlink()
    refused(small_run, "records.jsonl is missing")
    set_incomplete(small_run)
    assert Run.open(small_run).records == []


# --- shards ------------------------------------------------------------------------------------


def test_a_truncated_shard_is_named_with_what_is_missing(small_run):
    """At any length."""
    data = the_shard(small_run).read_bytes()
    for length in (len(data) - 1, len(data) - 60, 60, 8, 7, 0):
        the_shard(small_run).write_bytes(data[:length])
        refused(small_run, "shard is damaged", "r00000-000000.safetensors")


def test_a_missing_shard_is_named(small_run):
    """And so is a missing directory of shards."""
    the_shard(small_run).unlink()
    refused(small_run, "tensors/r00000-000000.safetensors is missing")
    (small_run / "tensors").rmdir()
    refused(small_run, "is missing")


WRONG_HEADERS = {
    "huge offset": lambda e: e.update(data_offsets=[0, 2**62]),
    "offset of 70 bits": lambda e: e.update(data_offsets=[2**70, 2**70 + 48]),
    "negative": lambda e: e.update(data_offsets=[-48, 0]),
    "backwards": lambda e: e.update(data_offsets=[48, 0]),
    "text": lambda e: e.update(data_offsets=["0", "48"]),
    "one offset": lambda e: e.update(data_offsets=[0]),
    "no offsets": lambda e: e.pop("data_offsets"),
    "infinite": lambda e: e.update(data_offsets=[float("inf"), 48]),
    "nan": lambda e: e.update(data_offsets=[0, float("nan")]),
    "shape of text": lambda e: e.update(shape="134"),
    "no dtype": lambda e: e.update(dtype=None),
    "half of a character": lambda e: e.update(dtype="\ud800"),
    "other dtype": lambda e: e.update(dtype="I32"),
    "other shape": lambda e: e.update(shape=[12]),
    "fewer bytes": lambda e: e.update(data_offsets=[0, 44]),
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_a_header_that_lies_is_refused(small_run, name):
    """Offsets, dtypes and shapes must be those of the records."""
    key = Run.open(small_run).records[0].place.key
    edit_header(small_run, lambda header: WRONG_HEADERS[name](header[key]))
    refused(small_run, "r00000-000000.safetensors")


def test_a_header_entry_must_be_an_object(small_run):
    """And the header too."""
    key = Run.open(small_run).records[0].place.key
    data = the_shard(small_run).read_bytes()
    for value in ([], 1, None, "x"):
        the_shard(small_run).write_bytes(data)
        edit_header(small_run, lambda header, value=value: header.update({key: value}))
        refused(small_run, "malformed")
    for text in (b"[]", b"1", b"null", b"{", b"\xff", b"[" * 50_000, b'{"__metadata__": 1}'):
        the_shard(small_run).write_bytes(struct.pack("<Q", len(text)) + text + data)
        refused(small_run, "r00000-000000.safetensors")


def test_tensors_that_overlap_are_refused(small_run):
    """Two keys may not claim the same bytes."""
    one, _, other = (record.place.key for record in Run.open(small_run).records)

    def overlap(header):
        begin = header[one]["data_offsets"][0]
        header[other]["data_offsets"] = [begin, begin + 24]

    edit_header(small_run, overlap)
    refused(small_run, "overlap")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**8 + 1, 10**6, 3, 0])
def test_a_header_length_that_lies_is_refused(small_run, length):
    """Nothing is allocated for it."""
    edit_header(small_run, lambda header: None, length=length)
    refused(small_run, "shard is damaged")


def test_a_changed_byte_is_found_when_read_and_by_verify(small_run):
    """File and record are named; other tensors of the shard are still read."""
    data = bytearray(the_shard(small_run).read_bytes())
    run = Run.open(small_run)
    place = run.records[0].place
    begin, _ = run._shard(run.records[0], place.shard).span(place.key)
    data[begin + 5] ^= 1
    the_shard(small_run).write_bytes(data)
    run = Run.open(small_run)
    with pytest.raises(RunFormatError, match="wrong checksum") as caught:
        run.read(run.records[0])
    assert "r00000-000000.safetensors" in caught.value.where
    assert "a:out (pass free, sample 0, step 0, rank 0)" in caught.value.where
    assert len(run.verify()) == 1
    assert run.read(run.records[2]).dtype == torch.bfloat16


def test_every_record_of_a_shared_tensor_is_checked(small_run):
    """The second record of one place may not claim another checksum."""
    edit_records(small_run, lambda records: records[1].update(xxh3="0" * 32))
    run = Run.open(small_run)
    run.read(run.records[0])
    with pytest.raises(RunFormatError, match="wrong checksum"):
        run.read(run.records[1])
    assert len(run.verify()) == 1
    assert "b:in" in run.verify()[0]


def test_a_shard_that_shrinks_while_it_is_open_is_an_error(small_run):
    """Not a crash of the process."""
    run = Run.open(small_run)
    the_shard(small_run).write_bytes(b"")
    with pytest.raises(RunFormatError):
        run.read(run.records[0])
    the_shard(small_run).unlink()
    with pytest.raises(RunFormatError):
        run.read(run.records[0])


@pytest.mark.parametrize("kind", ["directory", "tar"])
def test_a_shard_that_shrinks_while_it_is_mapped_is_an_error(small_run, tmp_path, kind):
    """What is mapped beyond a file's end ends the process (SIGBUS) when it is touched."""
    if kind == "tar":
        file = tmp_path / "run.tar"
        with tarfile.open(file, "w") as tar:
            tar.add(small_run, ".")
        run = Run.open(file)
    else:
        file, run = the_shard(small_run), Run.open(small_run)
    run.read(run.records[0])
    os.truncate(file, file.stat().st_size // 2 if kind == "tar" else 8)
    with pytest.raises(RunFormatError, match="shorter while it was read"):
        run.read(run.records[2], verify=False)


# --- links, directories, permissions -----------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "records.jsonl", "tensors", "shard"])
@pytest.mark.parametrize("dangling", [False, True])
def test_symbolic_links_are_refused(small_run, tmp_path, name, dangling):
    """Wherever they stand and wherever they lead."""
    path = the_shard(small_run) if name == "shard" else small_run / name
    real = tmp_path / "elsewhere"
    path.rename(real)
    path.symlink_to(tmp_path / "nowhere" if dangling else real)
    refused(small_run, "is a symbolic link", "cp -rL")


@pytest.mark.parametrize("name", ["manifest.json", "records.jsonl", "shard"])
def test_a_directory_or_a_pipe_is_no_file(small_run, name):
    """Reading it would fail or wait for ever."""
    path = the_shard(small_run) if name == "shard" else small_run / name
    path.unlink()
    path.mkdir()
    refused(small_run, "not a regular file")
    path.rmdir()
    os.mkfifo(path)
    refused(small_run, "not a regular file")


def test_a_file_in_place_of_the_tensors_is_refused(small_run):
    """A path through a file is no path."""
    shutil.rmtree(small_run / "tensors")
    (small_run / "tensors").write_text("x")
    refused(small_run, "tensors")


@pytest.mark.parametrize("name", ["manifest.json", "records.jsonl", "shard"])
def test_an_unreadable_file_is_named(small_run, name, monkeypatch):
    """Whoever forbids it (root reads everything, so the refusal is a stand-in)."""
    path = the_shard(small_run) if name == "shard" else small_run / name
    forbidden = str(path)
    opener = open

    def guarded(file, *args, **kwargs):
        if str(file) == forbidden:
            raise PermissionError(13, "Permission denied", forbidden)
        return opener(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", guarded)
    monkeypatch.setattr("io.open", guarded)
    refused(small_run, path.name, "Permission denied")


def test_other_files_in_a_run_are_left_alone(small_run):
    """A report or a .DS_Store beside the run's own files does not stop a reader."""
    (small_run / "report.html").write_text("x")
    (small_run / "tensors/r00000-000001.tmp").write_text("half")
    assert len(Run.open(small_run).records) == 3


# --- whatever else -----------------------------------------------------------------------------


@pytest.mark.slow
def test_random_damage_never_crashes_and_never_passes_unseen(small_run, tmp_path, mutated):
    """300 mutations of each kind of file: RunFormatError, a problem found by verify, or the same
    tensors."""
    random_ = random.Random(20260101)
    original = Run.open(small_run)
    true_bytes = {r.xxh3: r for r in original.records}
    files = ["manifest.json", "records.jsonl", str(the_shard(small_run).relative_to(small_run))]
    copy = tmp_path / "copy"
    outcomes = {"refused": 0, "reported": 0, "unaffected": 0}
    for number in range(300):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(small_run, copy)
        path = copy / files[number % 3]
        path.write_bytes(mutated(path.read_bytes(), random_))
        try:
            run = Run.open(copy)
            problems = run.verify()
            if problems:
                outcomes["reported"] += 1
                continue
            for record in run.records:
                assert record.xxh3 in true_bytes
                tensor = run.read(record)
                known = original.read(true_bytes[record.xxh3])
                assert torch.equal(
                    tensor.reshape(-1).view(torch.uint8), known.reshape(-1).view(torch.uint8)
                )
            outcomes["unaffected"] += 1
        except RunFormatError as error:
            assert error.message
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100
    assert outcomes["reported"] > 5


def test_limits_are_far_from_real_runs(small_run):
    """A real line is a thousandth of the limit."""
    longest = max(map(len, (small_run / "records.jsonl").read_bytes().splitlines()))
    assert longest * 1000 < layout.MAX_LINE_BYTES
