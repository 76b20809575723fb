"""Runs in a tar or zip: read in place, as strictly as a directory."""

import gzip
import io
import os
import random
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from divergence import Run, pack
from divergence.errors import RunFormatError
from divergence.run.storage import MAX_MEMBERS

KINDS = ("tar", "zip")


def files_of(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def tarred(path: Path, files: dict[str, bytes], **changes) -> Path:
    """A tar by Python's own library. ``changes``: of the TarInfo of the last file."""
    with tarfile.open(path, "w") as tar:
        for number, (name, data) in enumerate(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            if number == len(files) - 1:
                for key, value in changes.items():
                    setattr(entry, key, value)
            tar.addfile(entry, io.BytesIO(data))
    return path


def zipped(path: Path, files: dict[str, bytes], *, deflate: tuple[str, ...] = ()) -> Path:
    with zipfile.ZipFile(path, "w") as folder:
        for name, data in files.items():
            method = zipfile.ZIP_DEFLATED if name in deflate else zipfile.ZIP_STORED
            folder.writestr(name, data, compress_type=method)
    return path


def same_tensors(one: Run, two: Run) -> bool:
    assert one.records == two.records and one.verify() == two.verify() == []
    return all(
        torch.equal(
            one.read(r).reshape(-1).view(torch.uint8), two.read(r).reshape(-1).view(torch.uint8)
        )
        for r in one.records
    )


def refused(path: Path, *said: str) -> None:
    with pytest.raises(RunFormatError) as caught:
        Run.open(path)
    for text in said:
        assert text in str(caught.value)


# --- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "./", "some-run/"])
@pytest.mark.parametrize("make", [tarred, zipped])
def test_archives_by_any_tool_are_runs(small_run, tmp_path, make, prefix):
    """``tar cf a.tar -C run .`` and ``tar cf a.tar run`` alike; other files are ignored."""
    files = {prefix + name: data for name, data in files_of(small_run).items()}
    run = Run.open(make(tmp_path / "a", {**files, prefix + "notes.txt": b"x"}))
    assert same_tensors(run, Run.open(small_run))
    assert str(run.path) == str(tmp_path / "a")


def test_the_tools_of_the_system_make_runs_too(small_run, tmp_path):
    """GNU tar, where there is one, with its directories, owners and times."""
    if shutil.which("tar") is None:
        pytest.skip("no tar here")
    os.system(f"tar -cf {tmp_path}/a.tar -C {small_run.parent} {small_run.name}")
    assert same_tensors(Run.open(tmp_path / "a.tar"), Run.open(small_run))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_views_of_the_archive(small_run, tmp_path, kind):
    """Nothing is copied, also not to align it: ``pack`` laid it out so."""
    run = pack(small_run, out=tmp_path / f"a.{kind}")
    record = run.records[0]
    one, two = run.read(record), run.read(record)
    assert one.data_ptr() == two.data_ptr()
    assert one.data_ptr() % one.element_size() == 0


def test_an_unaligned_member_is_still_right(small_run, tmp_path):
    """A zip by another tool begins its members anywhere."""
    for padding in range(1, 6):
        path = tmp_path / f"{padding}.zip"
        run = Run.open(zipped(path, {"x" * padding: b"", **files_of(small_run)}))
        assert same_tensors(run, Run.open(small_run))


def test_deflated_members_are_inflated_and_a_large_shard_refused(small_run, tmp_path, monkeypatch):
    """Lines are read from end to end anyway; of shards those that memory has room for."""
    files = files_of(small_run)
    for deflate in (("manifest.json", "records.jsonl"), tuple(files)):
        run = Run.open(zipped(tmp_path / "a.zip", files, deflate=deflate))
        assert same_tensors(run, Run.open(small_run)) and run.verify() == []
    monkeypatch.setattr("divergence.run.storage.MAX_DEFLATED_BYTES", 10)
    refused(zipped(tmp_path / "b.zip", files, deflate=tuple(files)), "compressed", "zip -0")


def test_an_incomplete_run_in_an_archive_may_end_in_half_a_line(small_run, tmp_path):
    """The same rule as for directories."""
    files = files_of(small_run)
    files["manifest.json"] = files["manifest.json"].replace(
        b'"complete": true', b'"complete": false'
    )
    files["records.jsonl"] = files["records.jsonl"][:-20]
    run = Run.open(tarred(tmp_path / "a.tar", files))
    assert run.torn_tail and len(run.records) == 2


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../manifest.json", "/manifest.json", "a//b", "a/../../b", "a\\b"]
)
@pytest.mark.parametrize("make", [tarred, zipped])
def test_names_that_lead_out_are_refused(small_run, tmp_path, make, name):
    """Nothing is ever written by reading, but such an archive is no run."""
    refused(make(tmp_path / "a", {**files_of(small_run), name: b"x"}), "a name that no run has")


@pytest.mark.parametrize("make", [tarred, zipped])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_given_twice_is_refused(small_run, tmp_path, make):
    """Which of both is meant, nobody knows."""
    refused(make(tmp_path / "a", {"./records.jsonl": b"", **files_of(small_run)}), "twice")


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(small_run, tmp_path, kind):
    """A tar may hold what a run may not."""
    files = {**files_of(small_run), "extra": b""}
    path = tarred(tmp_path / "a.tar", files, type=kind, linkname="manifest.json")
    refused(path, "extra", "link" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else "regular")


def test_links_and_encryption_in_a_zip_are_refused(small_run, tmp_path):
    """A link is a file with a mode, in a zip."""
    path = zipped(tmp_path / "a.zip", files_of(small_run))
    with zipfile.ZipFile(path, "a") as folder:
        entry = zipfile.ZipInfo("extra")
        entry.create_system, entry.external_attr = 3, 0o120777 << 16
        folder.writestr(entry, "manifest.json")
    refused(path, "extra", "link")
    path = zipped(tmp_path / "b.zip", files_of(small_run))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    refused(path, "encrypted")


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_that_is_cut_off_is_never_whole(small_run, tmp_path, kind):
    """At every length; a partial download says so."""
    path = pack(small_run, out=tmp_path / f"a.{kind}").path
    data = path.read_bytes()
    # a tar ends with two empty blocks and is padded: only the first of them must be there
    last = len(data) if kind == "zip" else len(data.rstrip(b"\0")) // 512 * 512 + 512
    for length in {*range(0, last, 97), *range(last - 40, last)}:
        path.write_bytes(data[:length])
        with pytest.raises(RunFormatError):
            Run.open(path)


def test_a_tar_that_ends_without_an_end_is_cut_off(small_run, tmp_path):
    """All files may be there, or seem to: a tar says itself where it ends; and behind a header that
    is broken tarfile sees an end where there is none."""
    files = files_of(small_run) | {"zzz": bytes(600)}
    path = tarred(tmp_path / "a.tar", files)
    data = path.read_bytes()
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512 + 1024  # behind the last file's own zeros
    path.write_bytes(data[:end])
    refused(path, f"cut off at byte {end}")
    header = data.rindex(b"zzz")
    path.write_bytes(data[:header] + b"abc" + data[header + 3 :])
    refused(path, f"damaged at byte {header}")


def test_a_deflated_file_that_is_shorter_than_it_says(small_run, tmp_path):
    """Its end is not taken for the end of the run's lines."""
    path = zipped(tmp_path / "a.zip", files_of(small_run), deflate=("records.jsonl",))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"records.jsonl") - 46 + 24  # its length, in the archive's directory
    (size,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at, size + 1)
    path.write_bytes(data)
    refused(path, "not the size")


def test_compressed_archives_are_named_as_such(small_run, tmp_path):
    """With what to do about it."""
    path = tarred(tmp_path / "a.tar", files_of(small_run))
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    refused(packed, "gzip", "unpack it first")


def test_an_archive_without_a_manifest_is_no_run(small_run, tmp_path):
    """Nor is one that holds several runs, or an empty one."""
    files = files_of(small_run)
    several = {f"{name}/{file}": data for name in "ab" for file, data in files.items()}
    for content in (several, {"x": b"y"}, {}):
        for make in (tarred, zipped):
            with pytest.raises(RunFormatError):
                Run.open(make(tmp_path / "x", content))


def test_a_bomb_is_not_unpacked(small_run, tmp_path):
    """A deflated manifest that is endless, or not as long as it says."""
    endless = {**files_of(small_run), "manifest.json": b" " * (64 << 20)}
    path = zipped(tmp_path / "endless.zip", endless, deflate=("manifest.json",))
    assert path.stat().st_size < 100_000
    refused(path, "would unpack to")
    files = {**files_of(small_run), "manifest.json": b" " * (5 << 20)}
    path = zipped(tmp_path / "a.zip", files, deflate=("manifest.json",))
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\x01\x02", 0, data.rindex(b"manifest.json"))
    for declared in (10, 100 << 20):
        data[place + 24 : place + 28] = struct.pack("<I", declared)
        path.write_bytes(data)
        refused(path)


def test_a_tar_that_states_an_endless_header_is_refused(small_run, tmp_path):
    """A pax header is read at once by whoever trusts its length."""
    path = tmp_path / "a.tar"
    entry = tarfile.TarInfo("././@PaxHeader")
    entry.type, entry.size = tarfile.XHDTYPE, 4 << 30
    with open(path, "wb") as file:
        file.write(entry.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(5 << 30)  # sparse: no bytes on disk
    refused(path, "a header of")


def test_overlapping_members_are_refused(small_run, tmp_path):
    """Two names for the same bytes make a small file look large."""
    path = zipped(tmp_path / "a.zip", files_of(small_run))
    data = bytearray(path.read_bytes())
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    path.write_bytes(data)
    refused(path, "overlaps")


# --- whatever else -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_never_crashes_and_never_passes_unseen(
    small_run, tmp_path, kind, mutated: Callable[[bytes, random.Random], bytes]
):
    """300 mutations: RunFormatError, a problem found by verify, or the same tensors."""
    random_ = random.Random(20260102)
    original = Run.open(small_run)
    known = {(r.site, r.xxh3) for r in original.records}
    data = pack(small_run, out=tmp_path / f"a.{kind}").path.read_bytes()
    path = tmp_path / f"b.{kind}"
    outcomes = {"refused": 0, "unaffected": 0}
    for _ in range(300):
        path.write_bytes(mutated(data, random_))
        try:
            run = Run.open(path)
            if run.verify():
                outcomes["refused"] += 1
                continue
            assert {(r.site, r.xxh3) for r in run.records} == known
            outcomes["unaffected"] += 1
        except RunFormatError as error:
            assert error.message
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100


def test_an_archive_of_very_many_files_is_refused_in_time(tmp_path):
    """A header each: no run has as many."""
    assert MAX_MEMBERS <= 200_000  # some 25 microseconds each
    for kind in (tarfile.REGTYPE, tarfile.DIRTYPE):
        path, blocks = tmp_path / "many.tar", b""
        for number in range(300):
            member = tarfile.TarInfo(f"f{number}")
            member.type = kind
            blocks += member.tobuf()
        path.write_bytes(blocks + bytes(10240))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("divergence.run.storage.MAX_MEMBERS", 200)
            with pytest.raises(RunFormatError, match="more than 200 files"):
                Run.open(path)
