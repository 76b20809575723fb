"""Records that keep sketches or digests in place of bytes: read, checked, and refused."""

import json

import numpy as np
import pytest
import torch

from divergence import Run
from divergence.errors import RunFormatError, UsageError
from divergence.numerics.sketches import sketch_tensor
from divergence.run.contents import sizes_of
from divergence.run.record import RECORDS
from divergence.run.writer import Reducer, RunWriter
from tests.by_hand import put
from tests.digests import without_digests


@pytest.fixture
def sketched(tmp_path, manifest):
    """A run of two sites, sketched; and the tensors."""
    tensors = [torch.randn(1, 6, 256), torch.randn(1, 6, 512).bfloat16()]
    with RunWriter(tmp_path / "run", manifest(), reducer=Reducer("sketch")) as writer:
        for number, tensor in enumerate(tensors):
            put(writer, tensor.clone(), site=f"model.layers.{number}:out", order=number)
    return tmp_path / "run", tensors


def changed(path, change):
    """The run with its first line rewritten."""
    lines = (without_digests(path) / RECORDS).read_text().splitlines()
    first = json.loads(lines[0])
    change(first)
    (path / RECORDS).write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    return path


def test_sketches_are_read_back(sketched):
    """Bit for bit, and checked against their own checksum."""
    path, tensors = sketched
    run = Run.open(path)
    for record, tensor in zip(run.records, tensors, strict=True):
        assert record.place is None and not run.has_bytes(record)
        assert np.array_equal(run.read_sketch(record).rows, sketch_tensor(tensor, 8).rows)
    assert run.verify() == []


def test_a_changed_sketch_is_found(sketched):
    """Reading says which, and so does verify."""
    path, _ = sketched
    shard = next((path / "tensors").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    run = Run.open(path)
    assert len(run.verify()) == 1
    with pytest.raises(RunFormatError, match="wrong checksum"):
        [run.read_sketch(record) for record in run.records]


def test_a_sketch_of_another_size_is_refused(sketched):
    """The header must hold what the record promises: (rows, k + 2)."""
    path = changed(sketched[0], lambda line: line["sketch"].update(num_projections=16))
    with pytest.raises(RunFormatError, match=r"needs 432 bytes, its tensor holds 240"):
        Run.open(path)


def test_a_sketch_without_its_tensor_is_refused(sketched):
    """A place that is not there names file and record."""
    path = changed(sketched[0], lambda line: line["sketch"]["place"].update(key="none"))
    with pytest.raises(RunFormatError, match="no tensor none") as error:
        Run.open(path)
    assert "model.layers.0:out" in error.value.where


def test_reading_what_was_never_kept(sketched):
    """A usage error, with the command that would keep it."""
    run = Run.open(sketched[0])
    with pytest.raises(UsageError, match="no bytes of this tensor") as error:
        run.read(run.records[0])
    assert "--sites model.layers.0:out" in error.value.hint


def test_only_the_named_run_lends(sketched, tmp_path, manifest):
    """Bytes come from the run that the plan names, by digest, dtype and shape."""
    path, tensors = sketched
    with RunWriter(tmp_path / "full", manifest()) as writer:
        put(writer, tensors[0].clone(), site="elsewhere:out")
    full, run = Run.open(tmp_path / "full"), Run.open(path)
    run.set_fallback(full)
    assert not run.has_bytes(run.records[0])
    run.manifest.plan.only_changed = full.manifest.id
    run.set_fallback(None)
    run.set_fallback(full)
    assert torch.equal(run.read(run.records[0]), tensors[0])
    assert not run.has_bytes(run.records[1])


@pytest.mark.parametrize("mode", ["full", "sketch", "hash"])
def test_sizes_by_the_records_are_those_that_the_writer_counted(tmp_path, manifest, mode):
    """So that a run whose manifest was never finished is described as well."""
    reducer = None if mode == "full" else Reducer(mode)
    with RunWriter(tmp_path / "run", manifest(), reducer=reducer) as writer:
        for step in range(6):
            tensor = torch.full((8, 256), float(step // 2))
            put(writer, tensor, step=step, site="m:out", order=step)
            if step == 3:
                writer.flush()  # so that there are two shards
    run = Run.open(tmp_path / "run")
    assert run.manifest.sizes.num_shards == (0 if mode == "hash" else 2)
    assert sizes_of(run.records) == run.manifest.sizes
