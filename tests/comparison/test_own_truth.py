"""A truth that a run carries judges its comparisons without being asked."""

import json
import shutil

import pytest
from transformers.models.llama import modeling_llama

import divergence
from divergence import RecordOptions
from divergence.errors import IncomparableError, RunFormatError, UsageError
from divergence.run.site import module_of
from tests.digests import without_digests

FAULT = "model.layers.3.mlp:out=scale:1.05"
PROMPTS = ["The quick brown fox jumps over", "hello world this is"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    """By name: a run that carries its truth, runs like it, and a truth made apart."""
    folder = tmp_path_factory.mktemp("runs-")
    model = str(tiny_model("llama", dtype="bfloat16", num_blocks=6))
    a = divergence.capture(
        model, out=folder / "a", prompts=PROMPTS, max_new_tokens=6, truth="full", probe=False
    )
    made = {"a": a}
    for name, options in {
        "healthy": {},
        "faulty": {"plants": [FAULT]},
        "other": {"attn_implementation": "sdpa", "threads": 1},
    }.items():
        made[name] = divergence.capture(like=a, out=folder / name, probe=False, **options)
    made["apart"] = divergence.truth(a, out=folder / "apart")
    return made


def judged(report):
    return {(site.pass_, site.site, site.sample, site.step): site.truth for site in report.sites}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["healthy", "faulty", "other"])
def test_it_judges_as_a_truth_made_apart(runs, name):
    """Where the inputs were equal both truths give one verdict, with the same numbers."""
    own = divergence.compare(runs["a"], runs[name])
    apart = divergence.compare(runs["a"], runs[name], truth=runs["apart"])
    assert (own.verdict.kind, own.verdict.side) == (apart.verdict.kind, apart.verdict.side)
    assert judged(own) == judged(apart)
    if name == "faulty":
        assert (own.verdict.kind, own.verdict.side) == ("localized", "candidate")
        assert module_of(own.verdict.onset.site) == "model.layers.3"


def test_the_side_is_told_the_other_way_round_too(runs):
    """The run whose inputs both sides got carries the truth, whichever is named first."""
    assert divergence.compare(runs["faulty"], runs["a"]).verdict.side == "reference"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"plants": ["model.layers.3.mlp:out=scale:4"]}, {}], ids=str)
def test_the_free_run_is_judged_by_it_too(runs, tmp_path, options):
    """A full truth judges runs that no inputs anchored, as one made apart does."""
    b = divergence.capture(
        like=runs["a"],
        out=tmp_path / "b",
        recording=RecordOptions(anchor=False),
        probe=False,
        attn_implementation=None if options else "sdpa",
        **options,
    )
    own = divergence.compare(runs["a"], b)
    apart = divergence.compare(runs["a"], b, truth=runs["apart"])
    assert judged(own) == judged(apart)
    assert all(s.truth is not None for s in own.sites if s.site == "model.layers.5:out")
    assert own.verdict == apart.verdict
    assert own.verdict.kind == ("localized" if options else "within_floor")


def test_no_command_names_it(runs):
    """What comes next names no truth apart: the runs of a descent carry theirs, too."""
    commands = divergence.compare(runs["a"], runs["faulty"]).verdict.next
    assert commands
    assert not [text for text in commands if "divergence truth" in text]
    assert [text.partition("--truth ")[2][:4] for text in commands if "--truth" in text] == ["full"]


def test_its_records_lack_no_partner(runs):
    """The pass is no gap of the comparison: it is what both sides are held against."""
    report = divergence.compare(runs["a"], runs["healthy"])
    assert {row.pass_ for row in report.coverage.passes} == {"anchored", "free"}
    assert not report.coverage.unmatched


def test_a_golden_leaves_its_tensors_out(runs, bless, tmp_path):
    """A golden is kept small: of the truth the sums of A's own error stay."""
    bless(tmp_path / "golden", runs["a"].path)
    golden = divergence.Run.open(tmp_path / "golden")
    assert golden.manifest.plan.passes == ["free", "floor"]
    assert golden.manifest.plan.truth.mode == "floor"
    assert not golden.verify()


@pytest.fixture(scope="module")
def prefill_alone(tmp_path_factory, tiny_model):
    """A run whose truth holds the first prompt's prefill, and nothing else, for want of time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("divergence.recording.api.SHARE", 0.0)
        patch.setattr("divergence.recording.api.LEAST_SECONDS", 0.0)
        return divergence.capture(
            str(tiny_model("llama", dtype="bfloat16", num_blocks=6)),
            out=tmp_path_factory.mktemp("part-") / "a",
            prompts=PROMPTS,
            max_new_tokens=6,
            truth="auto",
            probe=False,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plants", "kind", "side", "block"),
    [
        ([], "within_floor", None, None),
        ([FAULT], "localized", "candidate", 3),
        (["model.layers.2.mlp:out=scale:1.2@sample=1,step=0"], "localized", None, 2),
        (["model.layers.4.mlp:out=scale:1.2@sample=1,step=3"], "localized", None, 4),
        (["model.layers.4.mlp:out=scale:1.2@sample=0,step=3"], "localized", None, 4),
        (["model.layers.1:out=channel:3:4@sample=1,step=0"], "localized", None, 1),
        ([f"model.layers.{n}.mlp:out=scale:1.3" for n in range(6)], "systematic", "candidate", 0),
    ],
    ids=["healthy", "everywhere", "other-prompt", "other-step", "later", "channel", "systematic"],
)
def test_what_it_does_not_hold_is_judged_without_it(
    prefill_alone, plants, kind, side, block, answer
):
    """A truth of few forwards excuses nothing in the others, and names no side there."""
    report = answer(prefill_alone, plants=plants, attn_implementation=None if plants else "sdpa")
    assert (report.verdict.kind, report.verdict.side) == (kind, side)
    if block is not None:
        assert module_of(report.verdict.onset.site) == f"model.layers.{block}"
    assert any("the truth is incomplete (the time it was given)" in note for note in report.notes)


@pytest.mark.slow
def test_localize_makes_no_truth_where_one_is_carried(runs, tmp_path):
    """The descent begins with the truth that the reference carries."""
    found = divergence.localize(runs["a"], runs["faulty"], out=tmp_path / "out", device="cpu")
    assert found.operator is not None
    assert found.side == "candidate"
    assert not (tmp_path / "out" / "truth").exists()


def edited(run, folder, change):
    """A copy of the run whose manifest was changed."""
    shutil.copytree(run.path, folder)
    manifest = without_digests(folder) / "manifest.json"
    values = json.loads(manifest.read_text())
    change(values)
    manifest.write_text(json.dumps(values))
    return divergence.Run.open(folder)


@pytest.mark.slow
def test_it_names_no_side_where_the_code_differs(runs, tmp_path):
    """At the onset B has another release of A's code: the truth has A's, right or wrong."""

    def release(values):
        values["model"]["code"]["LlamaMLP"]["digest"] = "0" * 32

    b = edited(runs["faulty"], tmp_path / "b", release)
    report = divergence.compare(runs["a"], b)
    assert (report.verdict.kind, report.verdict.side) == ("localized", None)
    assert module_of(report.verdict.onset.site) == "model.layers.3"


@pytest.mark.slow
def test_code_that_was_replaced_on_its_own_side_blames_nobody(
    tiny_model, tmp_path, monkeypatch, answer
):
    """A's code is wrong in one block, and so is A's truth: B, which is healthy, is not blamed."""
    healthy = modeling_llama.LlamaMLP.forward

    def wrong(module, x):
        return healthy(module, x) * (1.3 if module is places[3] else 1)

    places = []

    def prepare(model):
        places.extend(layer.mlp for layer in model.model.layers)

    model = str(tiny_model("llama", dtype="bfloat16", num_blocks=6))
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", wrong)
        a = divergence.capture(
            model,
            out=tmp_path / "a",
            prompts=PROMPTS,
            max_new_tokens=4,
            truth="full",
            probe=False,
            prepare=prepare,
        )
    verdict = answer(a).verdict
    assert (verdict.kind, verdict.side) == ("localized", None)
    assert module_of(verdict.onset.site) == "model.layers.3"


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [("digest", "0" * 32, IncomparableError), ("like", "another", UsageError)],
    ids=["weights", "run"],
)
def test_a_truth_of_something_else_is_refused(runs, tmp_path, key, value, error):
    """Made apart it says whose it is; what a run carries is its own."""

    def change(values):
        if key == "like":
            values["like"] = value
            return
        values["model"]["digest"] = value
        for name in values["model"]["digests"]:
            values["model"]["digests"][name] = value

    truth = edited(runs["apart"], tmp_path / "truth", change)
    with pytest.raises(error):
        divergence.compare(runs["a"], runs["faulty"], truth=truth)


def test_a_damaged_truth_is_named(runs, tmp_path):
    """A changed line is met when the run is opened, changed bytes when they are read."""
    true = [record for record in runs["a"].records if record.pass_ == "truth"]
    place = next(r.place for r in true if r.site == "model.layers.3:out")
    shutil.copytree(runs["a"].path, tmp_path / "bytes")
    shard = tmp_path / "bytes" / place.shard
    data = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    data[start + header[place.key]["data_offsets"][0] + 7] ^= 1
    shard.write_bytes(data)
    damaged = divergence.Run.open(tmp_path / "bytes")
    assert [line for line in damaged.verify() if "model.layers.3:out" in str(line)]
    shutil.copytree(runs["a"].path, tmp_path / "line")
    lines = tmp_path / "line" / "records.jsonl"
    text = lines.read_text()
    assert '"pass":"truth"' in text
    lines.write_text(text.replace('"pass":"truth"', '"pass":"whole"', 1))
    with pytest.raises(RunFormatError, match=r"records\.jsonl"):
        divergence.Run.open(tmp_path / "line")
