"""A floor: the sums of a run's own float64 error, which judge its comparisons without a truth."""

import pytest
import torch
from typer.testing import CliRunner

import divergence
from divergence.cli.main import app
from divergence.run.reader import COLUMNS, floor_of
from divergence.run.site import module_of

PROMPTS = ["The quick brown fox jumps over", "hello world this is"]
FAULT = "model.layers.3.mlp:out=scale:1.05"
FAR = "model.layers.3.mlp:out=scale:1.5"
TOKEN = "model.layers.2.mlp:out=scale:1.5@sample=1,step=0"
CHANNEL = "model.layers.1:out=channel:3:4"
EVERYWHERE = [f"model.layers.{n}.mlp:out=scale:1.3" for n in range(6)]


@pytest.fixture
def captured(shared_run):
    """``captured(dtype, plants, **options)`` → a run with a floor, made once."""

    def capture(dtype, plants=(), **options):
        options = {"prompts": PROMPTS, "max_new_tokens": 4, "truth": "floor"} | options
        model = {"dtype": dtype, "num_blocks": 6}
        return shared_run(model=model, plants=list(plants), probe=False, **options)

    return capture


@pytest.mark.parametrize("options", [{}, {"store": "sketch"}, {"store": "hash"}, {"batch": True}])
def test_it_holds_the_sums_of_the_error(captured, options):
    """Whatever else is kept, each row's sums are those of what float64 differs by."""
    run = captured("bfloat16", **options)
    full = captured("bfloat16", **options | {"truth": "full", "store": "full"})
    assert run.manifest.plan.passes == ["free", "floor"]
    assert run.manifest.plan.truth.mode == "floor"
    assert not run.verify()
    floor, num_records = floor_of(run), 0
    for record in full.records:
        own = full.find(("free", record.sample, record.step, record.site))
        if record.pass_ != "truth" or own is None or ":out" not in record.site:
            continue
        a, true = full.read(own), full.read(record)
        if not a.is_floating_point() or a.ndim < 2:
            continue
        error = (a.double() - true).reshape(-1, a.shape[-1])
        columns = dict(zip(COLUMNS, torch.from_numpy(floor.rows(own)).T, strict=True))
        assert torch.allclose(columns["error"], error.norm(dim=1), rtol=0.01)
        assert torch.allclose(columns["fourth"], error.pow(4).sum(1) ** 0.25, rtol=0.01)
        assert torch.allclose(
            columns["size"], a.double().reshape(error.shape).norm(dim=1), rtol=0.01
        )
        num_records += 1
    assert num_records >= 9 * len(run.manifest.tokens.groups) * 4
    assert {module_of(site) for site in floor.channels} == {f"model.layers.{n}" for n in range(6)}


HEALTHY = {"attn_implementation": "sdpa", "threads": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "on_a", "on_b", "kind", "side", "block"),
    [
        ("float32", [], None, "within_floor", None, None),
        ("bfloat16", [], None, "within_floor", None, None),
        ("float16", [], None, "within_floor", None, None),
        ("float32", [], [FAULT], "localized", "candidate", 3),
        ("bfloat16", [], [FAULT], "localized", "candidate", 3),
        ("float16", [], [FAR], "localized", "candidate", 3),
        ("bfloat16", [], [TOKEN], "localized", "candidate", 2),
        ("bfloat16", [], [CHANNEL], "localized", "candidate", 1),
        ("bfloat16", [], EVERYWHERE, "systematic", "candidate", 0),
        ("float32", [FAULT], [], "localized", "reference", 3),
        ("bfloat16", [FAR], [], "localized", "reference", 3),
        ("bfloat16", [FAR], None, "localized", "reference", 3),
        ("float32", EVERYWHERE, [], "systematic", "reference", 0),
        ("bfloat16", [FAULT], [], "localized", None, 3),  # within what rounding may make
        ("bfloat16", [FAULT], None, "localized", None, 3),
        ("float32", [FAULT], [FAULT], "identical", "both", 3),
        ("bfloat16", [FAR], ["model.layers.1.mlp:out=scale:1.5"], "localized", "candidate", 1),
    ],
)
def test_it_names_the_side(captured, tmp_path, dtype, on_a, on_b, kind, side, block):
    """What is far beyond A's own error is B's; what A's own error is far beyond rounding in is A's;
    and where neither is certain no side is named."""
    a = captured(dtype, on_a)
    options = HEALTHY if on_b is None else {"plants": on_b}
    b = divergence.capture(like=a, out=tmp_path / "b", probe=False, **options)
    report = divergence.compare(a, b)
    assert (report.verdict.kind, report.verdict.side) == (kind, side)
    if report.verdict.onset is not None:
        assert module_of(report.verdict.onset.site) == f"model.layers.{block}"
    other = {"candidate": "reference", "reference": "candidate"}.get(side, side)
    swapped = divergence.compare(b, a)
    assert (swapped.verdict.kind, swapped.verdict.side) == (kind, other)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"truth": "full"}, {"store": "sketch"}, {"truth": "floor"}])
def test_check_names_the_side(captured, bless, tmp_path, options, answer):
    """A golden carries its floor, whatever else it keeps, and `check` says which side is wrong."""
    golden = tmp_path / "golden.zip"
    bless(golden, captured("bfloat16", **options).path)
    kept = divergence.Run.open(golden)
    assert kept.manifest.plan.passes == ["free", "floor"]
    assert not kept.verify()
    new = divergence.capture(like=golden, out=tmp_path / "new", plants=[FAR], probe=False)
    done = CliRunner().invoke(app, ["check", str(golden), str(new.path)])
    assert done.exit_code == 1
    assert "by B" in done.stdout
    assert answer(divergence.Run.open(golden), **HEALTHY).verdict.kind == "within_floor"


@pytest.mark.slow
def test_it_is_small(shared_run):
    """It takes at most a hundredth of what blocks as wide as models' take."""
    run = shared_run(
        model={"dtype": "bfloat16", "num_blocks": 3, "hidden": 1024},
        prompts=[" ".join(map(str, range(n, n + 120))) for n in (100, 500)],
        max_new_tokens=1,
        truth="floor",
        sites=["blocks"],
        probe=False,
    )
    sums = [record for record in run.records if record.pass_ == "floor"]
    assert 0 < sum(record.num_bytes for record in sums) <= run.manifest.sizes.stored_bytes / 100


def test_what_does_not_fit_is_said(llama, tmp_path, monkeypatch):
    """Where the inputs find no room for the time of the capture there is no floor, and why."""
    notes = []
    monkeypatch.setattr(
        "divergence.recording.passes.shutil.disk_usage",
        lambda place: type("Usage", (), {"free": 100}),
    )
    run = divergence.capture(
        str(llama),
        out=tmp_path / "a",
        prompts=PROMPTS,
        store="sketch",
        truth="floor",
        progress=lambda kind, done, total, text: notes.append(text) if kind == "note" else None,
        probe=False,
    )
    assert run.manifest.complete
    assert run.manifest.plan.passes == ["free"]
    assert [note for note in notes if note.startswith("no truth: ") and "TMPDIR" in note]
