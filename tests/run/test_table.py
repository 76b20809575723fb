"""Records of large runs, by columns: the answers are those of a list."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch
import xxhash

from divergence.errors import RunFormatError
from divergence.run import contents as parsing
from divergence.run.captured import CapturedTensor
from divergence.run.contents import (
    RecordTable,
    call_passes,
    count_passes,
    count_sites,
    first_nonfinite,
    num_kept,
    records_at,
    site_names,
    sizes_of,
)
from divergence.run.manifest import Mesh, MeshAxis
from divergence.run.ranks import unsharded
from divergence.run.reader import Run
from divergence.run.record import Call
from divergence.run.shards import open_store
from divergence.run.target import pack
from divergence.run.writer import RunWriter, reducer_for
from tests.digests import without_digests

PASSES = ("free", "anchored", "whole")


def write_many(
    path, manifest, *, seed=0, store="full", rank=0, placement=None, force=False
) -> None:  # fmt: skip
    """Some hundred records of every kind: shared bytes, nan, calls, positions, several dtypes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    reducer = reducer_for(store, like=None, only_changed=False)
    with RunWriter(path, manifest, rank=rank, reducer=reducer, force=force) as writer:
        for step in range(draw.randint(3, 9)):
            for order in range(draw.randint(1, 30)):
                tensor = torch.randn(1, draw.randint(1, 3), 4)
                if draw.random() < 0.2:
                    tensor = torch.zeros(1, 2, 4)
                if draw.random() < 0.1:
                    tensor[0, 0, :2] = float(draw.choice(["nan", "inf", "-inf"]))
                tensor = tensor.to(draw.choice([torch.float32, torch.bfloat16, torch.float64]))
                positions = tuple(range(2, 2 + tensor.shape[1])) if draw.random() < 0.1 else None
                call = (
                    Call(operator="aten.mm.default", arguments={}) if draw.random() < 0.1 else None
                )
                if draw.random() < 0.1:  # of the same bytes as the zeros, but another tensor
                    tensor, positions = tensor.new_zeros(2, 4, dtype=torch.float32), None
                writer.put(
                    CapturedTensor(tensor), pass_=draw.choice(PASSES), sample=0, step=step,
                    site=f"model.layers.{order}{'/aten.mm' if call else ''}:out", order=order,
                    positions=positions, call=call, placement=placement,
                )  # fmt: skip
            if step == 1 or draw.random() < 0.3:
                writer.flush()


def both(path, monkeypatch) -> tuple[Run, Run]:
    """The run, opened as a small one and as a large one."""
    one = Run.open(path)
    with monkeypatch.context() as patch:
        patch.setattr(parsing, "LARGE_BYTES", 0)
        patch.setattr(parsing, "_PORTION_BYTES", 2000)
        other = Run.open(path)
    assert isinstance(one.records, list)
    assert isinstance(other.records, RecordTable)
    return one, other


@pytest.mark.parametrize("portion", [64, 700, 2000])
def test_portions_hold_every_line_once(tmp_path, manifest, monkeypatch, portion):
    """Also lines that are longer than a portion."""
    write_many(tmp_path / "a", manifest(), seed=0, store="stats")
    store = open_store(tmp_path / "a")
    monkeypatch.setattr(parsing, "_PORTION_BYTES", portion)
    found = [
        bytes(lines) for lines, _ in parsing.portions(store, "records.jsonl", xxhash.xxh3_128())
    ]
    whole = (tmp_path / "a" / "records.jsonl").read_bytes()
    assert b"\n".join(found) + b"\n" == whole
    assert max(map(len, whole.split(b"\n"))) > 64


@pytest.mark.parametrize("store", ["full", "stats", "sketch"])
@pytest.mark.parametrize("seed", range(4))
def test_columns_answer_as_a_list(tmp_path, manifest, monkeypatch, seed, store):
    """Every question, before and after the records themselves were asked for."""
    write_many(tmp_path / "a", manifest(), seed=seed, store=store)
    one, other = both(tmp_path / "a", monkeypatch)
    right, stored = one.records, other.records
    for _ in range(2):
        assert len(stored) == len(right)
        assert count_passes(stored) == count_passes(right)
        assert list(count_passes(stored)) == list(count_passes(right))
        assert count_sites(stored) == count_sites(right)
        assert [list(c.passes) for c in count_sites(stored)] == [
            list(c.passes) for c in count_sites(right)
        ]
        assert call_passes(stored) == call_passes(right)
        assert site_names(stored) == site_names(right)
        assert num_kept(stored) == num_kept(right)
        assert sizes_of(stored) == sizes_of(right)
        assert first_nonfinite(one.manifest, stored) == first_nonfinite(one.manifest, right)
        assert other.sites() == one.sites()
        assert other.files() == one.files()
        for site in [*one.sites(), "no:out"]:
            assert records_at(stored, [site]) == records_at(right, [site])
        for record in right[::7]:
            assert other.find(record.coordinates) == record
        assert other.find(("free", 0, 99, "no:out")) is None
        assert list(stored.each()) == right
        assert [stored[0], stored[-1], *stored[3:9:2]] == [right[0], right[-1], *right[3:9:2]]
        with pytest.raises(IndexError):
            stored[len(right)]
        assert stored == right
    assert stored[5] is list(stored)[5]
    assert other.verify() == one.verify() == []
    if store == "full":
        assert all(torch.equal(other.read(r), one.read(r)) for r in stored if "nan" not in r.site
                   and not r.summary.num_nan)  # fmt: skip


def test_a_record_asked_for_alone_stays_the_same_object(tmp_path, manifest, monkeypatch):
    """Also when all the others of its lines are decoded later."""
    write_many(tmp_path / "a", manifest())
    _, run = both(tmp_path / "a", monkeypatch)
    alone = run.records[7]
    assert run.find(alone.coordinates) is alone
    assert list(run.records)[7] is alone


def test_many_finds_index_all_records(tmp_path, manifest, monkeypatch):
    """Looking for every record one by one is as quick as in a list."""
    from divergence.run import reader

    write_many(tmp_path / "a", manifest())
    one, run = both(tmp_path / "a", monkeypatch)
    monkeypatch.setattr(reader, "_FEW", 5)
    assert all(run.find(record.coordinates) == record for record in one.records)
    assert run._by_coordinates


def test_an_incomplete_run_is_counted_and_its_torn_line_left_out(tmp_path, manifest, monkeypatch):
    """As of a small run: the last line never counted."""
    write_many(tmp_path / "a", manifest())
    lines = without_digests(tmp_path / "a") / "records.jsonl"
    lines.write_bytes(lines.read_bytes()[:-30])
    text = json.loads((tmp_path / "a" / "manifest.json").read_text())
    text.update(complete=False)
    text["sizes"] = {}
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(text))
    one, other = both(tmp_path / "a", monkeypatch)
    assert one.torn_tail
    assert other.torn_tail
    assert other.records == one.records
    assert other.manifest.sizes == one.manifest.sizes
    assert one.manifest.sizes.num_tensors > 0


def test_records_of_several_ranks(tmp_path, manifest, monkeypatch):
    """Each rank's file is read again in parts of its own."""
    mesh = Mesh(axes=[MeshAxis(name="tp", size=2)])
    for rank in range(2):
        write_many(tmp_path / "a", manifest(mesh=mesh), seed=3, rank=rank,
                   placement=("replicate",))  # fmt: skip
    without_digests(tmp_path / "a")
    text = json.loads((tmp_path / "a" / "manifest.json").read_text())
    text["sizes"]["num_records"] *= 2
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(text))
    one, other = both(tmp_path / "a", monkeypatch)
    assert other.records == one.records
    assert {record.rank for record in other.records} == {0, 1}
    assert unsharded(other).records == unsharded(one).records


@pytest.mark.parametrize("kind", [".tar", ".zip"])
def test_an_archive_is_read_by_columns_too(tmp_path, manifest, monkeypatch, kind):
    """Its members lie in it as they are."""
    write_many(tmp_path / "a", manifest())
    pack(tmp_path / "a", out=tmp_path / f"a{kind}")
    one, other = both(tmp_path / f"a{kind}", monkeypatch)
    assert other.records == one.records
    assert other.read(other.records[3]).dtype == one.read(one.records[3]).dtype


@pytest.mark.parametrize("ask", ["all", "one", "each"])
def test_lines_that_change_after_opening_are_an_error(tmp_path, manifest, monkeypatch, ask):
    """What is decoded later must be what was checked."""
    write_many(tmp_path / "a", manifest())
    _, run = both(tmp_path / "a", monkeypatch)
    run.records._last = (-1, b"")
    lines = tmp_path / "a" / "records.jsonl"
    data = lines.read_bytes()
    lines.write_bytes(data.replace(b'"order":2,', b'"order":3,'))
    with pytest.raises(RunFormatError, match="changed while it was read"):
        {
            "all": list,
            "one": lambda r: [r[n] for n in range(len(r))],
            "each": lambda r: [*r.each()],
        }[ask](run.records)
    os.truncate(lines, 10)
    with pytest.raises(RunFormatError, match="changed while it was read"):
        list(run.records)


def test_a_shard_of_another_writer_is_checked_all_the_same(tmp_path, manifest, monkeypatch):
    """Its header may be written otherwise; keys may be anything."""
    from safetensors.torch import load_file, save_file

    write_many(tmp_path / "a", manifest())
    without_digests(tmp_path / "a")
    shard = next((tmp_path / "a" / "tensors").iterdir())
    tensors = load_file(shard)
    save_file({f"t.{key}": tensor for key, tensor in tensors.items()}, shard)
    lines = tmp_path / "a" / "records.jsonl"
    data = lines.read_text().replace(f'{shard.name}","key":"', f'{shard.name}","key":"t.')
    lines.write_text(data)
    one, other = both(tmp_path / "a", monkeypatch)
    assert other.records == one.records
    assert other.verify() == []


def test_headers_of_many_tensors_are_read_again(tmp_path, manifest, monkeypatch):
    """Only the last shard's entries stay in memory; what is gone by then is said to be."""
    from divergence.run import shards as shard

    monkeypatch.setattr(shard.Headers.__init__, "__defaults__", (1,))
    write_many(tmp_path / "a", manifest(), seed=1)
    run = Run.open(tmp_path / "a")
    assert sum(one._entries is not None for one in run._shards.values()) == 1
    assert len(run._shards) > 1
    for record in run.records:
        run.read(record)
    assert run.verify() == []
