"""A truth that a run carries judges its comparisons without being asked."""

from __future__ import annotations

import pytest

import divergence
from divergence.gate.golden import bless
from divergence.run.schema.site import module_of

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
        "healthy": {}, "faulty": {"plants": [FAULT]},
        "other": {"attn_implementation": "sdpa", "threads": 1},
    }.items():  # fmt: skip
        made[name] = divergence.capture(like=a, out=folder / name, probe=False, **options)
    made["apart"] = divergence.truth(a, out=folder / "apart")
    return made


def anchored(report):
    return {
        (site.site, site.sample, site.step): site.truth
        for site in report.sites
        if site.pass_ == "anchored"
    }


@pytest.mark.parametrize("name", ["healthy", "faulty", "other"])
def test_it_judges_as_a_truth_made_apart(runs, name):
    """Where the inputs were equal both truths give one verdict, with the same numbers."""
    own = divergence.compare(runs["a"], runs[name])
    apart = divergence.compare(runs["a"], runs[name], truth=runs["apart"])
    assert (own.verdict.kind, own.verdict.side) == (apart.verdict.kind, apart.verdict.side)
    assert anchored(own) == anchored(apart)
    if name == "faulty":
        assert (own.verdict.kind, own.verdict.side) == ("localized", "candidate")
        assert module_of(own.verdict.onset.site) == "model.layers.3"


def test_the_side_is_told_the_other_way_round_too(runs):
    """The run whose inputs both sides got carries the truth, whichever is named first."""
    assert divergence.compare(runs["faulty"], runs["a"]).verdict.side == "reference"


def test_no_command_names_it(runs):
    """What comes next names no truth that has to be made, and none that nobody made."""
    commands = divergence.compare(runs["a"], runs["faulty"]).verdict.next
    assert commands
    assert not [text for text in commands if "--truth" in text or "divergence truth" in text]


def test_its_records_lack_no_partner(runs):
    """The pass is no gap of the comparison: it is what both sides are held against."""
    report = divergence.compare(runs["a"], runs["healthy"])
    assert {row.pass_ for row in report.coverage.passes} == {"anchored", "free"}
    assert not report.coverage.unmatched


def test_a_golden_leaves_it_out(runs, tmp_path):
    """A golden is kept small: of its passes the free one."""
    bless(tmp_path / "golden", runs["a"].path)
    golden = divergence.Run.open(tmp_path / "golden")
    assert golden.manifest.plan.passes == ["free"]
    assert golden.manifest.plan.truth is None
    assert not golden.verify()
