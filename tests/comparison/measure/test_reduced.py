"""Comparing runs that do not keep every byte: estimated, by digests, or by statistics alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from divergence import BatchOptions, MachineOptions, RecordOptions, Run, capture, check, compare
from divergence import truth as make_truth
from divergence.errors import IncomparableError
from divergence.numerics.sketches import fold_tensor
from divergence.run.record import RECORDS
from tests.digests import without_digests

PROMPT = "A bridge is built twice: once on paper, where every beam is exact, and once in steel."
FEW = ("gpt2", "llama", "mamba", "qwen3-moe")
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in FEW[1:]]
OTHER_KERNELS = {"llama", "gpt2", "qwen3-moe"}
HIDDEN = 256


@pytest.fixture
def recorded(shared_run):
    """``recorded(architecture, dtype, store)`` → a run; another ``number``, another run."""

    def make(architecture="llama", dtype="bfloat16", store="full", sites="blocks", number=0):
        model = {"dtype": dtype, "hidden": HIDDEN}
        options = {"prompts": [PROMPT], "max_new_tokens": 3, "store": store, "probe": False}
        machine = MachineOptions(label=str(number)) if number else None
        return shared_run(architecture, model=model, sites=[sites], machine=machine, **options)

    return make


def repeated(run, out, architecture="llama", **options):
    """The run again, on other kernels where the architecture has some."""
    attention = "sdpa" if architecture in OTHER_KERNELS else None
    return capture(like=run.path, out=out, attn_implementation=attention, probe=False, **options)


def blocks_of(run):
    return [path for path, note in run.manifest.plan.modules.items() if note.role == "block"]


def sites_of(report):
    return {(s.pass_, s.sample, s.step, s.site): s for s in report.sites}


def rewritten(run, out, change):
    """A copy of the run with other records."""
    shutil.copytree(run.path, out)
    without_digests(out)
    lines = [json.loads(line) for line in (out / RECORDS).read_text().splitlines()]
    changed = [change(line, record) for line, record in zip(lines, run.records, strict=True)]
    (out / RECORDS).write_text("".join(json.dumps(line) + "\n" for line in changed))
    return Run.open(out)


@pytest.mark.parametrize("mixed", [True, False], ids=["full and sketch", "two sketches"])
def test_estimates_hold(recorded, tmp_path, mixed):
    """Other kernels: nearly every exact difference lies in the interval that is stated for it, and
    what a sketch cannot tell is left out."""
    full = recorded(sites="modules")
    exact = sites_of(compare(full, repeated(full, tmp_path / "full")))
    first = full if mixed else recorded(store="sketch", sites="modules")
    report = compare(first, repeated(first, tmp_path / "sketch", store="sketch"))
    found = [(exact[key], site) for key, site in sites_of(report).items() if site.estimated]
    assert len(found) > 100
    held = [s.estimated.low * 0.999 <= x.rel_l2 <= s.estimated.high * 1.001 for x, s in found]
    assert sum(held) / len(held) > 0.9
    for one, site in found:
        assert not site.identical and not one.identical
        assert site.max_abs is site.ulp_max is site.channel_rel_l2_max is None
        assert site.reference_norm == pytest.approx(one.reference_norm, rel=1e-5)
    text = report.to_json()
    assert json.loads(text)["sites"][-1]["estimated"] is not None
    assert any("estimated from sketches" in one.text for one in report.verdict.evidence)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", [FEW[0], *SLOWLY])
def test_other_kernels_raise_no_alarm(recorded, tmp_path, architecture, dtype):
    """Healthy runs stay within the floor, full against sketch and sketch against sketch."""
    for number, store in enumerate(("full", "sketch")):
        first = recorded(architecture, dtype, store)
        second = repeated(first, tmp_path / str(number), architecture, store="sketch")
        assert compare(first, second).verdict.kind in ("identical", "within_floor")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [FEW[0], *SLOWLY])
def test_another_machine_raises_no_alarm(recorded, tmp_path, architecture):
    """The oldest kernels of this CPU, in a process of their own."""
    switches = {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    }
    script = (
        "import sys; from divergence.recording.api import capture\n"
        "for like, out in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    capture(like=like, out=out, store='sketch', probe=False)"
    )
    firsts = [recorded(architecture, store=store) for store in ("full", "sketch")]
    names = [str(one) for n, run in enumerate(firsts) for one in (run.path, tmp_path / str(n))]
    subprocess.run(
        [sys.executable, "-c", script, *names],
        env={**os.environ, **switches},
        cwd=Path(__file__).parents[3],
        check=True,
    )
    for number, first in enumerate(firsts):
        report = compare(first, tmp_path / str(number))
        assert report.verdict.kind in ("identical", "within_floor"), report.verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["scale:1.3", "noise:0.3", "zero:0-127"])
@pytest.mark.parametrize("architecture", FEW)
def test_faults_are_found(recorded, tmp_path, architecture, fault):
    """A gross fault is named at its block, by the anchored pass and from two sketches alone."""
    for number, store in enumerate(("full", "sketch")):
        first = recorded(architecture, "bfloat16", store)
        block = blocks_of(first)[1]
        second = repeated(
            first,
            tmp_path / str(number),
            architecture,
            store="sketch",
            plants=[f"{block}:out={fault}"],
        )
        verdict = compare(first, second).verdict
        assert verdict.kind == "localized", (store, verdict.summary)
        assert verdict.onset.block == block


@pytest.mark.slow
def test_what_to_do_next(recorded, tmp_path):
    """Two sketches that differ end in commands that capture the blocks, and what was flagged, in
    full."""
    first = recorded(store="sketch", sites="modules")
    second = capture(
        like=first.path,
        out=tmp_path / "b",
        probe=False,
        plants=["model.layers.1.mlp:out=scale:1.3"],
    )
    commands = compare(first, second).verdict.next
    assert "--store full" in commands[0] and "--sites blocks" in commands[0]
    assert "--sites model.layers.1.mlp:out" in commands[0]


@pytest.mark.parametrize("store", ["sketch", "stats", "hash"])
def test_what_a_full_reference_can_anchor_is_captured_in_full(recorded, tmp_path, store):
    """Where the candidate alone kept no bytes, the first command captures it with them, and with
    its fault; nothing is advised of digests that digests cannot tell."""
    first = recorded()
    second = capture(
        like=first.path,
        out=tmp_path / "b",
        store=store,
        probe=False,
        plants=["model.layers.1:out=scale:1.3"],
    )
    commands = compare(first, second).verdict.next
    assert "--store full --sites blocks" in commands[0]
    assert "--plant model.layers.1:out=scale:1.3" in commands[0]
    assert commands[1].endswith("b-full")
    assert (len(commands) == 2) == (store != "sketch")


@pytest.mark.parametrize(
    "pair",
    [
        ("sketch", "sketch"),
        ("hash", "hash"),
        ("full", "hash"),
        ("stats", "sketch"),
        ("hash", "stats"),
    ],
    ids="-".join,
)
def test_equal_digests_are_identical(recorded, tmp_path, pair):
    """The same machine again: every bit is equal, whatever is kept."""
    first, second = (recorded(store=store, number=n) for n, store in enumerate(pair))
    report = compare(first, second)
    assert report.verdict.kind == "identical"
    assert report.coverage.num_compared == len(first.records)


@pytest.mark.slow
def test_sketches_without_pooled_sums(recorded, tmp_path, monkeypatch):
    """As versions before wrote them: they are compared by what both have, their rows."""
    full, new = recorded(), recorded(store="sketch")
    assert any(record.sketch.num_pooled for record in new.records if record.sketch)
    monkeypatch.setattr("divergence.run.writer.num_pooled", lambda shape, k: 0)
    old = repeated(full, tmp_path / "old", store="sketch")
    assert not any(record.sketch.num_pooled for record in old.records if record.sketch)
    known = sites_of(compare(full, repeated(full, tmp_path / "other")))
    by_rows, again = sites_of(compare(new, old)), sites_of(compare(full, old))
    both = [site for site in by_rows.values() if site.estimated is not None]
    assert len(both) > 4
    for site in both:
        key = (site.pass_, site.sample, site.step, site.site)
        assert site.rel_l2 == pytest.approx(again[key].rel_l2, rel=1e-4)
        assert site.estimated.low / 1.3 < known[key].rel_l2 < site.estimated.high * 1.3


def test_never_identical_without_equal_digests(recorded, tmp_path):
    """Equal sketches of other digests are a difference below the resolution, not identity."""
    run = recorded(store="sketch")

    def other_digest(line, record):
        if record.site == "model.layers.1:out":
            line["xxh3"] = "0" * 32
        return line

    report = compare(run, rewritten(run, tmp_path / "b", other_digest))
    site = next(s for s in report.sites if s.site == "model.layers.1:out")
    assert not site.identical and site.rel_l2 == 0.0
    assert site.estimated.high == site.estimated.resolution > 0
    assert report.verdict.kind == "within_floor"


@pytest.mark.parametrize("store", ["stats", "hash"])
def test_digests_tell_where_not_how_much(recorded, tmp_path, store):
    """Without bytes and sketches a fault is shown where statistics prove more than rounding; of
    digests alone the first difference is named."""
    first = recorded(store=store)
    second = capture(
        like=first.path, out=tmp_path / "b", probe=False, plants=["model.layers.1:out=scale:1.3"]
    )
    report = compare(first, second)
    assert report.verdict.kind == ("drift" if store == "stats" else "undetermined")
    assert report.verdict.confidence == ("medium" if store == "stats" else "low")
    assert "model.layers.1:out" in report.verdict.summary
    site = next(s for s in report.sites if s.site == "model.layers.1:out" and s.step == 0)
    assert site.rel_l2 is site.ratio is None
    if store == "stats":
        assert site.at_least == pytest.approx(0.3, abs=0.01)
        assert any("at least" in one.text for one in report.verdict.evidence)
    else:
        assert site.at_least is None
    assert not check(first, second).passed


def test_nan_is_seen_in_statistics(recorded, tmp_path):
    """Counts of what is no finite number are enough for that verdict."""
    first = recorded(store="stats")
    second = capture(
        like=first.path, out=tmp_path / "b", probe=False, plants=["model.layers.1:out=nan"]
    )
    verdict = compare(first, second).verdict
    assert verdict.kind == "nonfinite" and verdict.onset.site == "model.layers.1:out"


def test_digests_of_two_kinds(recorded, tmp_path):
    """A device's digest is held against a host's bytes; against a host's digest alone nothing can
    be said, and nothing is a pass."""
    full, hashes = recorded(), recorded(store="hash")
    by_site = {record.coordinates: record for record in full.records}

    def on_device(line, record):
        line["fold"] = fold_tensor(full.read(by_site[record.coordinates]))
        del line["xxh3"]
        return line

    device = rewritten(hashes, tmp_path / "device", on_device)
    assert compare(full, device).verdict.kind == "identical"
    with pytest.raises(IncomparableError, match="nothing was compared") as error:
        compare(hashes, device)
    assert "two kinds" in str(error.value)


@pytest.mark.slow
def test_only_changed_gives_the_same_report(recorded, tmp_path):
    """A run that holds only what differs is compared like the whole one."""
    first = recorded(sites="modules")
    plant = ["model.layers.1.mlp:out=scale:1.1"]
    reports = []
    for name, only in (("whole", False), ("part", True)):
        run = repeated(first, tmp_path / name, plants=plant, only_changed=only)
        report = compare(first, run)
        text = report.to_json()
        for word in (str(run.path), run.manifest.id):
            text = text.replace(word, "RUN")
        reports.append(json.loads(text))
    assert reports[0] == reports[1]
    assert compare(tmp_path / "part", tmp_path / "whole").sites  # without the first: by digest


@pytest.mark.slow
def test_another_batch(tiny_model, tmp_path):
    """Rows of a sketched batch are estimated against single prompts in full; two sketches of other
    batches have other signs, and are skipped with the reason."""
    model = str(tiny_model("llama", hidden=HIDDEN))
    prompts = [PROMPT, "Two."]
    options = {"prompts": prompts, "max_new_tokens": 2, "probe": False}
    single = capture(model, out=tmp_path / "single", **options)
    batch = capture(
        model, out=tmp_path / "batch", batching=BatchOptions(batch=True), store="sketch", **options
    )
    report = compare(single, batch)
    assert report.coverage.num_compared and report.verdict.kind == "within_floor"
    estimated = [s for s in report.sites if s.estimated and s.site == "model.layers.0:out"]
    assert {site.sample for site in estimated} == {0, 1}
    assert all(site.rel_l2 < 0.05 for site in estimated)
    alone = capture(model, out=tmp_path / "alone", store="sketch", **options)
    reasons = {one.reason for one in compare(alone, batch).coverage.unmatched}
    assert any("same rows" in reason for reason in reasons)


@pytest.mark.slow
def test_chosen_positions(tiny_model, tmp_path):
    """Some token positions sketched, all in full: the same rows are held against each other."""
    model = str(tiny_model("llama", hidden=HIDDEN))
    options = {"prompts": [PROMPT], "max_new_tokens": 1, "probe": False}
    full = capture(model, out=tmp_path / "full", **options)
    some = capture(
        model,
        out=tmp_path / "some",
        store="sketch",
        recording=RecordOptions(positions="2-9"),
        attn_implementation="sdpa",
        **options,
    )
    exact = capture(
        model,
        out=tmp_path / "exact",
        attn_implementation="sdpa",
        recording=RecordOptions(positions="2-9"),
        **options,
    )
    for one, two in ((full, some), (some, full)):
        report, right = compare(one, two), sites_of(compare(full, exact))
        found = [s for s in report.sites if s.estimated and s.site.endswith("layers.2:out")]
        assert found
        for site in found:
            wanted = right[site.pass_, site.sample, site.step, site.site].rel_l2
            assert site.rel_l2 == pytest.approx(wanted, rel=0.6)


@pytest.mark.slow
def test_two_dtypes(tiny_model, tmp_path):
    """Sketches of a float32 and a bfloat16 run have the same projections, and are compared."""
    options = {"prompts": [PROMPT], "max_new_tokens": 2, "probe": False, "store": "sketch"}
    model = str(tiny_model("llama", dtype="float32", hidden=HIDDEN))
    one, two = (
        capture(model, out=tmp_path / dtype, dtype=dtype, **options)
        for dtype in ("float32", "bfloat16")
    )
    report = compare(one, two)
    found = [site for site in report.sites if site.estimated]
    assert len(found) > 10 and all(1e-4 < site.rel_l2 < 0.1 for site in found)
    assert report.verdict.kind == "within_floor"


@pytest.mark.slow
def test_a_truth_clears_nobody_by_sketches(tiny_model, tmp_path):
    """It judged what was kept in full alone, rotary tables, and blocks were not."""
    a = capture(
        str(tiny_model("llama", dtype="bfloat16", hidden=128)),
        out=tmp_path / "a",
        prompts=[PROMPT],
        max_new_tokens=3,
        probe=False,
    )
    b = repeated(a, tmp_path / "b", store="sketch")
    verdict = compare(a, b, truth=make_truth(a.path, out=tmp_path / "truth")).verdict
    assert any("against the truth" in fact.text for fact in verdict.evidence)
    assert (verdict.kind, verdict.side, verdict.confidence) == ("within_floor", None, "medium")


@pytest.mark.slow
def test_where_the_bytes_are_that_did_not_change(recorded, tmp_path):
    """Without the run that has them digests are compared, and the report says so."""
    a = recorded()
    b = repeated(a, tmp_path / "b", only_changed=True)
    c = repeated(a, tmp_path / "c", plants=["model.layers.1.mlp:out=scale:1.3"])
    assert not any("not at hand" in note for note in compare(a, b).notes)
    (note,) = [note for note in compare(c.path, b.path).notes if "not at hand" in note]
    assert note.startswith(f"B stores what differs from run {a.manifest.id} alone")
