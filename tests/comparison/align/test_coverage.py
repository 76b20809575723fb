"""Coverage: every record of both runs is accounted for, and what is missing fails a check."""

import itertools
import shutil

import msgspec
import pytest
import torch

from divergence import Run, capture, check, compare
from divergence import truth as make_truth
from divergence.comparison.align import UNACCOUNTED, kinds_of, tokens_row
from divergence.comparison.result import TokensResult
from divergence.errors import IncomparableError, UsageError
from divergence.run.manifest import ModuleNote

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Snow fell"]
OPERATORS = ("blocks", "ops@model.layers.1")


@pytest.fixture(scope="module")
def run(shared_run):
    """``run(**options)`` → a run; ``run(like=that, **options)`` repeats it. Equal arguments, one
    run."""

    def make(architecture="llama", *, like=None, dtype="float32", **options):
        if like is not None:
            return shared_run(like=like, **options)
        options = {"prompts": PROMPTS, "max_new_tokens": 3} | options
        return shared_run(architecture, model={"dtype": dtype}, **options)

    return make


def rules(golden, new, **options) -> list[str]:
    return sorted({failure.rule for failure in check(golden, new, **options).failures})


def row(report, pass_, what="tensors"):
    return next(r for r in report.coverage.passes if (r.pass_, r.what) == (pass_, what))


# --- every record has a fate -------------------------------------------------------------------


KINDS = {
    "plain": {},
    "like": {"like": "plain"},
    "escalated": {"like": "plain", "escalate": True},
    "deep": {"sites": ["modules"]},
    "batch": {"batch": True},
    "whole": {"whole": True},
    "short": {"max_new_tokens": 1},
    "positions": {"positions": "last:2"},
    "steps": {"steps": "0,2"},
    "operators": {"sites": OPERATORS, "weights": True},
    "operators-like": {"like": "operators"},
    "fewer-sites": {"sites": ["model.layers.1:out", "lm_head"]},
    "digests": {"store": "hash"},
    "own-text": {"plants": ["lm_head:out=scale:-1"]},
    "base": {"task": "encoder"},
    "truth": {},
}
"""Runs of one model and prompt that hold very different things."""


@pytest.fixture(scope="module")
def zoo(run, tmp_path_factory):
    """``zoo("like")``: one of KINDS."""
    truths = []

    def make(name):
        if name == "truth":
            if not truths:
                out = tmp_path_factory.mktemp("truth") / "run"
                truths.append(make_truth(make("plain"), out=out))
            return truths[0]
        options = dict(KINDS[name])
        if "like" in options:
            options["like"] = make(options["like"])
            return run(dtype="bfloat16", **options)
        return run(dtype="bfloat16", **{"prompts": PROMPTS, "max_new_tokens": 3} | options)

    return make


def accounted(report) -> None:
    """Nothing vanished: each row adds up, and every record of the reference is in one."""
    for item in report.coverage.passes:
        parts = ("compared", "missing", "skipped", "empty", "elsewhere")
        assert item.num_reference == sum(getattr(item, f"num_{name}") for name in parts), item
        assert item.why != UNACCOUNTED
    assert not [item for item in report.coverage.unmatched if item.why == UNACCOUNTED]


QUICK = ("escalated", "whole", "short", "operators-like", "own-text")


@pytest.mark.slow
@pytest.mark.parametrize("names", [QUICK, pytest.param(None, marks=pytest.mark.slow)])
def test_every_record_is_accounted_for(zoo, names):
    """Of any two runs: each record is paired, unmatched, skipped or judged elsewhere."""
    runs = {name: zoo(name) for name in names or KINDS}
    for (one, a), (two, b) in itertools.permutations(runs.items(), 2):
        try:
            report = compare(a, b, force=True)
        except IncomparableError:
            continue
        accounted(report)
        kinds = kinds_of(a)
        for pass_ in a.manifest.plan.passes:
            held = sum(r.pass_ == pass_ and kinds(r) != "operator" for r in a.records)
            rows = [r for r in report.coverage.passes if r.pass_ == pass_ and r.what == "tensors"]
            counted = sum(r.num_reference for r in rows)
            # by sample where batches differ; `anchored` also shows what is free in the reference
            exact = pass_ != "anchored" and a.manifest.tokens.groups == b.manifest.tokens.groups
            assert counted == held if exact else counted >= held, (one, two, pass_)
            operators = sum(r.pass_ == pass_ and kinds(r) == "operator" for r in a.records)
            rows = [r for r in report.coverage.passes if r.pass_ == pass_ and r.what == "operators"]
            assert sum(r.num_reference for r in rows) == operators, (one, two, pass_)


@pytest.mark.slow
def test_every_record_of_the_candidate_is_accounted_for(zoo):
    """Its records are in pairs, listed as alone or skipped, or of a kind that is judged apart."""
    for a, b in itertools.permutations((zoo(n) for n in ("plain", "escalated", "operators")), 2):
        report = compare(a, b)
        kinds = kinds_of(b)
        known = {(s.pass_, s.sample, s.step, s.candidate_site or s.site) for s in report.sites}
        known |= {(s.pass_, s.sample, s.step, s.site) for s in report.coverage.unmatched}
        paired = {
            (
                "free"
                if found == "anchored" and a.manifest.plan.anchored_to == b.manifest.id
                else found,
                *rest,
            )
            for found, *rest in known
        }
        for record in b.records:
            assert kinds(record) != "tensor" or record.coordinates in known | paired, record


# --- what the golden has and the new run lacks -------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("golden", "new", "pass_", "what", "told"),
    [
        ({"sites": OPERATORS}, {"sites": ["blocks"]}, "free", "operators", "no operator of"),
        ({"sites": OPERATORS}, {"anchor": False}, "free", "operators", "no such pass"),
        ({"whole": True}, {}, "whole", "tensors", "no whole pass"),
        ({}, {"sites": ["model.layers.*"]}, "free", "tensors", "no partner"),
        ({}, {"steps": "0"}, "free", "tensors", "no partner"),
    ],
)
def test_what_the_new_run_lacks_fails(run, golden, new, pass_, what, told):
    """Operators, a whole pass, sites, steps: absent is not passed, and not identical, high."""
    a = run(**golden)
    b = run(like=a, **new)
    result = check(a, b)
    assert {failure.rule for failure in result.failures} == {"min_coverage"}
    found = row(result.report, pass_, what)
    assert found.num_missing > 0 and told in found.reason
    assert told in "".join(failure.text for failure in result.failures)
    assert result.report.verdict.confidence != "high"
    accounted(result.report)


@pytest.mark.slow
def test_passes_that_the_golden_has_must_be_there(run):
    """A golden that was anchored and escalated asks for both of a new run."""
    base = run(dtype="bfloat16")
    golden = run(like=base, escalate=True)
    assert rules(golden, run(like=base, anchor=False)) == ["min_coverage"]
    lacking = check(golden, run(like=base))
    assert [f.rule for f in lacking.failures] == ["min_coverage"]
    assert row(lacking.report, "escalated").num_missing > 0
    again = check(golden, run(like=base, escalate=True, label="again"))
    assert again.passed
    assert row(again.report, "escalated").num_compared > 0
    # anchored to the golden itself is closer than anchored to what the golden was
    assert check(run(like=base), run(like=run(like=base))).passed


@pytest.mark.parametrize("num", [1, 2])
def test_truncated_generation_fails(run, num):
    """2 of 2 equal is 2 of 3, if the golden generated 3; also where only the prefill is stored."""
    golden = run(steps="0")
    result = check(golden, run(like=golden, max_new_tokens=num))
    found = {failure.rule for failure in result.failures}
    assert found == {"min_coverage", "tokens.min_equal"}
    tokens = result.report.tokens
    assert (tokens.num_reference, tokens.num_tokens) == (6, 2 * num)
    assert tokens.num_missing == 6 - 2 * num
    assert "were not generated" in "".join(f.text for f in result.failures)
    assert result.report.verdict.confidence != "high"


def test_no_tokens_where_the_golden_has_some_fails(run, tmp_path):
    """Zero of zero equal is none of six."""
    golden = run(steps="0")
    new = run(like=golden, max_new_tokens=1)
    manifest = msgspec.json.decode(msgspec.json.encode(new.manifest), type=type(new.manifest))
    for sample in manifest.tokens.samples:
        sample.chosen_ids = []
    result = check(golden, Run(new.path, manifest, new.records))
    assert {failure.rule for failure in result.failures} == {"min_coverage", "tokens.min_equal"}
    assert row(result.report, "free", "tokens").num_compared == 0


def test_a_site_that_the_anchored_pass_lost_is_missing(run):
    """The verdict rests on the anchored pass: what it should have shown again must be there."""
    golden = run()
    new = run(like=golden)
    lost = [
        r for r in new.records if not (r.pass_ == "anchored" and r.site == "model.layers.1:out")
    ]
    report = compare(golden, Run(new.path, new.manifest, lost))
    found = row(report, "anchored")
    assert found.num_missing == 2 * 3
    assert "not in B's anchored pass" in found.reason
    assert report.verdict.confidence == "medium"


def test_equality_of_the_smaller_part_says_that_most_is_missing(run):
    """Of all modules' tensors the other run holds the blocks' alone."""
    verdict = compare(run(sites=["modules"]), run()).verdict
    assert verdict.kind == "identical"
    assert "most had no partner" in verdict.summary
    assert verdict.confidence != "high"


def test_tensors_without_elements_are_no_comparison(run):
    """Nothing can differ in them; where there is nothing else, nothing was compared."""
    one, two = run(), run(label="again")

    def emptied(source, sites):
        records = [
            msgspec.structs.replace(r, shape=(0, 64), place=None, xxh3="0" * 32, summary=None)
            if r.site in sites
            else r
            for r in source.records
        ]
        return Run(source.path, source.manifest, records)

    every = {record.site for record in one.records}
    with pytest.raises(IncomparableError, match="nothing was compared: none of the"):
        compare(emptied(one, every), emptied(two, every))
    some = {"model.layers.1:out"}
    report = compare(emptied(one, some), emptied(two, some))
    assert row(report, "free").num_empty == 2 * 3
    accounted(report)
    assert rules(one, emptied(two, some)) == ["min_coverage"]


# --- what may not be checked -------------------------------------------------------------------


def test_a_run_is_not_checked_against_itself(run, tmp_path):
    """Nor against a copy: exit code 2, with what to do instead."""
    golden = run()
    shutil.copytree(golden.path, tmp_path / "copy")
    for new in (golden.path, tmp_path / "copy"):
        with pytest.raises(UsageError, match="proves nothing") as caught:
            check(golden.path, new)
        assert caught.value.exit_code == 2
        assert "capture --like" in caught.value.hint


@pytest.mark.slow
def test_what_is_no_golden_is_refused(run, tmp_path):
    """A truth and a planted run are not what another run's results are asked to be."""
    golden = run()
    truth = make_truth(golden, out=tmp_path / "truth")
    planted = run(plants=["model.layers.1:out=scale:1.5"])
    for one in (truth, planted):
        with pytest.raises(UsageError, match="is no golden"):
            check(one, golden)
    with pytest.raises(UsageError, match="is a truth"):
        check(golden, truth)
    report = check(golden, run(like=golden), truth=truth).report
    assert report.reference.compute_dtype is None


@pytest.mark.slow
def test_the_whole_pass_is_judged_in_check(run, tmp_path):
    """A golden with a whole pass asks for a new run whose decode steps agree with its own."""
    golden = run(whole=True)
    assert check(golden, run(like=golden, whole=True)).passed

    # a step's cache is what two runs cannot see where both make the same mistake
    def broken(model):
        def rotated(module, args, output):
            cos, sin = output
            return (cos, -sin) if cos.shape[1] == 1 else output

        model.model.rotary_emb.register_forward_hook(rotated)

    model = golden.manifest.model.source
    options = {"prompts": PROMPTS, "max_new_tokens": 3, "whole": True, "prepare": broken}
    first = capture(model, out=tmp_path / "a", **options)
    second = capture(model, out=tmp_path / "b", **options)
    assert compare(first, second).verdict.kind == "identical"
    (failure,) = check(first, second).failures
    assert failure.rule == "whole"


# --- sites of the candidate alone --------------------------------------------------------------


def with_module(source: Run, path: str, kind: str, role: str) -> Run:
    """The run as if it had one more module, whose output is that of block 1."""
    modules = source.manifest.plan.modules | {path: ModuleNote(kind=kind, role=role)}
    plan = msgspec.structs.replace(source.manifest.plan, modules=modules)
    extra = [
        msgspec.structs.replace(r, site=f"{path}:out")
        for r in source.records
        if r.site == "model.layers.1:out"
    ]
    return Run(
        source.path, msgspec.structs.replace(source.manifest, plan=plan), [*source.records, *extra]
    )


def test_a_module_that_only_the_new_run_has_counts(run):
    """A site that the golden would have recorded, had it such a module, is a lack of coverage."""
    golden = run()
    extra = with_module(run(label="again"), "model.extra_norm", "LlamaRMSNorm", "trunk")
    result = check(golden, extra)
    assert [failure.rule for failure in result.failures] == ["min_coverage"]
    assert "A has no module model.extra_norm" in result.failures[0].text
    assert row(result.report, "free").num_extra == 2 * 3


@pytest.mark.slow
def test_more_sites_are_no_lack(run):
    """A new run that was asked for more than the golden stays usable."""
    golden = run(sites=["model.layers.1:out", "lm_head:out"])
    for sites in (["blocks"], ["modules"], [*OPERATORS]):
        assert check(golden, run(sites=sites)).passed, sites
    assert check(run(), run(sites=["modules"])).passed


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3-moe", "gpt2", "gemma3", "mamba", "bert", "t5"])
def test_healthy_pairs_are_covered(run, architecture):
    """Repeated with another attention, every pass of other architectures is covered."""
    golden = run(architecture)
    other = {} if architecture in ("mamba", "t5") else {"attn_implementation": "sdpa"}
    result = check(golden, run(like=golden, **other))
    assert result.passed, result.failures
    assert {item.share for item in result.report.coverage.passes} == {1.0}
    accounted(result.report)
    assert torch.isfinite(torch.tensor([s.rel_l2 for s in result.report.sites])).all()


def test_tokens_behind_another_text_were_compared_elsewhere():
    """Of ten tokens the candidate has eight, of which three come after the texts parted."""
    tokens = TokensResult(
        num_tokens=8, num_equal=4, forced=False, num_reference=10, num_missing=2, num_other_text=3
    )
    (row,) = tokens_row(tokens)
    assert (row.num_compared, row.num_missing, row.num_elsewhere) == (5, 2, 3)
