"""Many records: read in portions of lines, of several ranks, of shards that others wrote."""

import random

import pytest
import torch
import xxhash

from divergence import Run
from divergence.run import contents as parsing
from divergence.run import storage as shard
from divergence.run.reader import open_store
from divergence.run.record import Call
from divergence.run.writer import RunWriter, reducer_for
from tests.by_hand import put
from tests.digests import without_digests

PASSES = ("free", "anchored", "whole")


def write_many(
    path, manifest, *, seed=0, store="full", rank=0, placement=None, force=False
) -> None:
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
                put(
                    writer,
                    tensor,
                    pass_=draw.choice(PASSES),
                    step=step,
                    site=f"model.layers.{order}{'/aten.mm' if call else ''}:out",
                    order=order,
                    positions=positions,
                    call=call,
                    placement=placement,
                )
            if step == 1 or draw.random() < 0.3:
                writer.flush()


@pytest.mark.parametrize("portion", [64, 700, 2000])
def test_portions_hold_every_line_once(tmp_path, manifest, monkeypatch, portion):
    """Also lines that are longer than a portion."""
    write_many(tmp_path / "a", manifest(), seed=0, store="stats")
    store = open_store(tmp_path / "a")
    monkeypatch.setattr(parsing, "_PORTION_BYTES", portion)
    found = [bytes(lines) for lines in parsing.portions(store, "records.jsonl", xxhash.xxh3_128())]
    whole = (tmp_path / "a" / "records.jsonl").read_bytes()
    assert b"\n".join(found) + b"\n" == whole
    assert max(map(len, whole.split(b"\n"))) > 64


def test_a_shard_of_another_writer_is_checked_all_the_same(tmp_path, manifest):
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
    run = Run.open(tmp_path / "a")
    assert any(record.place is not None and record.place.key[:2] == "t." for record in run.records)
    assert run.verify() == []


def test_headers_of_many_tensors_are_read_again(tmp_path, manifest, monkeypatch):
    """Only the last shard's entries stay in memory; what is gone by then is said to be."""
    monkeypatch.setattr(shard.Headers.__init__, "__defaults__", (1,))
    write_many(tmp_path / "a", manifest(), seed=1)
    run = Run.open(tmp_path / "a")
    assert sum(one._entries is not None for one in run._shards.values()) == 1
    assert len(run._shards) > 1
    for record in run.records:
        run.read(record)
    assert run.verify() == []


def test_equal_names_are_one_object(tmp_path, manifest):
    """Of the many records of a site, which keeps large runs in memory."""
    write_many(tmp_path / "a", manifest(), seed=2)
    by_site = {}
    for record in Run.open(tmp_path / "a").records:
        assert by_site.setdefault(record.site, record.site) is record.site
        if record.place is not None and record.place.key == record.xxh3:
            assert record.place.key is record.xxh3
    assert len(by_site) > 5
