"""Measuring many pairs: what is found may come from anywhere, as long as it comes in order."""

import math
import pickle
import shutil
import threading

import msgspec
import pytest
import torch

from divergence import Run, capture, compare, compare_many
from divergence.comparison.align import align
from divergence.comparison.measure import pairs as measuring
from divergence.comparison.measure.pairs import (
    Measurer,
    measure_all,
    measure_pairs,
    results_of_pairs,
)
from divergence.errors import RunFormatError, UsageError
from divergence.numerics.sums import has_compiled
from divergence.run.manifest import ModuleNote, Sizes
from divergence.run.writer import RunWriter
from tests.by_hand import put
from tests.digests import without_digests

NUM_BLOCKS = 7


@pytest.fixture(scope="module")
def dumps(tmp_path_factory, tiny_model):
    """Two runs of seven blocks, each block's input the output of the one before; the fourth
    block's output is equal on both sides."""
    folder = tmp_path_factory.mktemp("dumps")
    small = capture(
        str(tiny_model("llama", dtype="float32")),
        out=folder / "small",
        prompts=["Snow fell"],
        max_new_tokens=1,
    )
    generator = torch.Generator().manual_seed(1)
    writers = []
    for name in ("a", "b"):
        manifest = Run.open(small.path).manifest
        manifest.sizes = Sizes()
        manifest.plan.modules = {
            f"model.layers.{n}": ModuleNote(kind="Block", role="block") for n in range(NUM_BLOCKS)
        }
        writers.append(RunWriter(folder / name, manifest))
    before = None
    for number in range(NUM_BLOCKS):
        values = torch.randn(1, 40, 96, generator=generator)
        noise = 1 + 1e-3 * torch.randn(values.shape, generator=generator)
        after = (values, values if number == 3 else values * noise)
        for port, tensors in (("in", before), ("out", after)):
            for writer, tensor in zip(writers, tensors or (), strict=False):
                put(
                    writer,
                    tensor.bfloat16(),
                    site=f"model.layers.{number}:{port}",
                    order=2 * number + (port == "out"),
                )
        before = after
    for writer in writers:
        writer.close(complete=True)
    return folder / "a", folder / "b"


@pytest.fixture
def case(dumps):
    """(measurer, pairs) of the two runs, opened anew; ``case()`` opens them once more."""

    def make():
        a, b = (Run.open(path) for path in dumps)
        return Measurer(a, b), align(a, b).pairs

    return make


def plain(results):
    return [msgspec.to_builtins(result) for result in results]


def test_found_apart_and_judged_together_is_the_same(case):
    """Halves measured by different measurers, sent as bytes and judged in order give the same."""
    measurer, pairs = case()
    whole = measure_all(measurer, pairs)
    assert len(whole) == 2 * NUM_BLOCKS - 1
    found = {}
    for first in range(2):
        other, own = case()
        mine = range(first, len(own), 2)
        for number, one in zip(mine, measure_pairs(other, own[first::2]), strict=True):
            found[number] = pickle.loads(pickle.dumps(one))
    fresh, pairs = case()
    parts = results_of_pairs(fresh, pairs, [found[number] for number in range(len(pairs))])
    assert plain(parts) == plain(whole)
    assert [result.site for result in whole if result.identical] == [
        "model.layers.3:out",
        "model.layers.4:in",
    ]


def test_logits_of_which_most_rows_are_no_numbers_are_measured_in_the_others(dumps, tmp_path):
    """Ten of forty rows are finite: the figures are theirs. Of none there are none."""
    values = torch.randn(1, 40, 96, generator=torch.Generator().manual_seed(2))
    for finite in (10, 0):
        runs = []
        for number in range(2):
            manifest = Run.open(dumps[number]).manifest
            manifest.sizes = Sizes()
            logits = values * (1 + 0.01 * number)
            logits[:, finite:] = math.nan
            writer = RunWriter(tmp_path / f"{finite}-{number}", manifest)
            put(writer, logits, site=manifest.plan.logits_site)
            writer.close(complete=True)
            runs.append(Run.open(tmp_path / f"{finite}-{number}"))
        (site,) = measure_all(Measurer(*runs), align(*runs).pairs)
        assert (site.logits is not None) == (finite > 0)
        assert site.logits is None or 0 < site.logits.kl_mean < 1


def test_an_accelerator_finds_the_same(dumps):
    """Added up by the operators of a device (the CPU's, here), every figure agrees to 1e-6."""
    own, there = (compare(*dumps, device=device) for device in ("cpu", "cpu:0"))
    assert there.verdict.kind == own.verdict.kind
    for one, two in zip(own.sites, there.sites, strict=True):
        for name in """
            rel_l2 one_minus_cosine token_rel_l2_p99 channel_rel_l2_max ulp_p99 ulp_max max_abs
            ratio
        """.split():
            assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-6), name


@pytest.mark.parametrize("device", ["meta", "nonsense"])
def test_a_device_that_cannot_add_up_is_refused(dumps, device):
    """It is said before anything is measured, by both ways to compare."""
    for run in (
        lambda: compare(*dumps, device=device),
        lambda: compare_many(dumps[0], dumps[1:], device=device),
    ):
        with pytest.raises(UsageError, match=f"cannot measure on {device}"):
            run()


@pytest.mark.skipif(not has_compiled(), reason="numba is not installed")
def test_large_runs_are_measured_by_compiled_loops(case, monkeypatch):
    """From a number of bytes on the kernel changes, and nothing else does."""
    measurer, pairs = case()
    slow = measure_all(measurer, pairs)
    assert measurer.kernel == "numpy"
    monkeypatch.setattr("divergence.numerics.sums.WORTH_BYTES", 1)
    measurer, pairs = case()
    fast = measure_all(measurer, pairs)
    assert measurer.kernel == "compiled"
    for one, two in zip(slow, fast, strict=True):
        assert two.rel_l2 == pytest.approx(one.rel_l2, rel=1e-6)
        assert (two.ulp_p99, two.ulp_max, two.worst_channel) == (
            one.ulp_p99,
            one.ulp_max,
            one.worst_channel,
        )


def test_large_pairs_are_shared_by_threads(case, monkeypatch):
    """However many bytes may be under way, every pair is measured, in order."""
    measurer, pairs = case()
    whole = measure_all(measurer, pairs)
    for name in ("_AHEAD_BYTES", "_LARGE_BYTES"):
        monkeypatch.setattr(f"divergence.comparison.measure.pairs.{name}", 1)
    fresh, pairs = case()
    assert [r.site for r in measure_all(fresh, pairs)] == [r.site for r in whole]


def test_too_few_found_are_no_answer(case):
    """Judging refuses a list that is not one found for each pair."""
    measurer, pairs = case()
    found = list(measure_pairs(measurer, pairs))
    with pytest.raises(ValueError):
        results_of_pairs(measurer, pairs, found[:-1])


def test_damage_is_named_by_the_pair_that_has_it(case, dumps, tmp_path):
    """Bytes that do not have their checksum stop the measuring with the record's name."""
    for path in dumps:
        shutil.copytree(path, tmp_path / path.name)
    shard = next((tmp_path / "b" / "tensors").iterdir())
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    a, b = Run.open(tmp_path / "a"), Run.open(tmp_path / "b")
    with pytest.raises(RunFormatError, match="wrong checksum") as error:
        list(measure_pairs(Measurer(a, b), align(a, b).pairs))
    assert "model.layers." in error.value.where


def test_threads_that_measure_set_the_device(dumps, monkeypatch):
    """Each of them: a new thread has none on Ascend, and the first one on CUDA."""
    asked = []
    monkeypatch.setattr(
        measuring,
        "set_device",
        lambda device: asked.append((threading.current_thread().name, device)),
    )
    compare(*dumps, device="cpu:0")
    assert {name.rpartition("_")[0] for name, _ in asked} == {"divergence-measure"}
    assert {device for _, device in asked} == {torch.device("cpu:0")}


def test_small_pairs_together_give_what_each_gives_alone(case):
    """Laid side by side or one after the other, the results are the same to 1e-12."""
    measurer, pairs = case()
    together = measurer.rater.results(pairs, measurer.measure_small(pairs))
    other, pairs = case()
    alone = other.rater.results(pairs, [other.measure(pair) for pair in pairs])
    assert any(result.ratio for result in together)
    for one, two in zip(plain(together), plain(alone), strict=True):
        for name, value in one.items():
            wanted = pytest.approx(two[name], rel=1e-12) if isinstance(value, float) else two[name]
            assert value == wanted, name


def test_equal_contents_are_checked_at_each_place(dumps, tmp_path):
    """Where one of them lies elsewhere and is damaged, it is said."""
    for path in dumps:
        shutil.copytree(path, tmp_path / path.name)
    b = tmp_path / "b"
    entering = Run.open(b).find(("free", 0, 0, "model.layers.1:in"))
    elsewhere = entering.place.shard.replace("000000", "000009")
    data = bytearray((b / entering.place.shard).read_bytes())
    begin, _ = Run.open(b)._shard(entering, entering.place.shard).span(entering.place.key)
    data[begin] ^= 1
    (b / elsewhere).write_bytes(data)
    without_digests(b)
    lines = (b / "records.jsonl").read_text().splitlines(keepends=True)
    moved = [
        line.replace(entering.place.shard, elsewhere) if '"model.layers.1:in"' in line else line
        for line in lines
    ]
    assert moved != lines
    (b / "records.jsonl").write_text("".join(moved))
    runs = Run.open(tmp_path / "a"), Run.open(b)
    with pytest.raises(RunFormatError, match="wrong checksum") as error:
        Measurer(*runs).measure_small(align(*runs).pairs)
    assert "model.layers.1:in" in error.value.where
