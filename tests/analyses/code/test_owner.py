"""A truth belongs to the reference's code: what tells that it does, and that it does not."""

from types import SimpleNamespace

import pytest

from divergence import BatchOptions, Run, capture, compare
from divergence import truth as make_truth
from divergence.analyses.code.find import explain
from divergence.analyses.operators.find import finding_of
from divergence.comparison.analysis import AnalysisResult
from divergence.comparison.decide import decide, explained
from divergence.comparison.measure.truth import truths_apart
from divergence.comparison.preflight import other_code, replaced_in
from divergence.comparison.result import Finding, Onset, OperatorResult, OperatorsResult
from divergence.errors import IncomparableError
from divergence.facts import fact, plain, worded

BLOCK = "model.layers.1"


def manifest(like=None, **code):
    """As much of a manifest as tells its code."""
    notes = {
        name: SimpleNamespace(
            digest=digest,
            replaced=replaced,
            odd={},
            places=[],
            wrapped=[],
            functions={},
            attributes={},
            compiled=None,
            origin=None,
            changed_after={},
        )
        for name, (digest, *replaced) in code.items()
    }
    kinds = {f"{BLOCK}.{name}": SimpleNamespace(kind=name) for name in code}
    return SimpleNamespace(
        id="b",
        like=like,
        environment=SimpleNamespace(versions={}),
        model=SimpleNamespace(code=notes, parameters={}, config_digest=""),
        plan=SimpleNamespace(modules=kinds),
    )


def verdict(side, kind="localized"):
    return worded(decide([block_finding(side, kind)]).verdict)


def block_finding(side, kind="localized", block=BLOCK):
    """What the blocks say."""
    onset = Onset(
        site=f"{block}:out", block=block, sample=0, step=0, position=None, pass_="anchored"
    )
    return Finding(
        claim="error_made_here",
        kind=kind,
        onset=onset,
        side=side,
        equal_inputs=True,
        headline=[fact("made_at", seems=False, site=f"{block}:out", before=None, by=side)],
        evidence=[plain("W is large")],
    )


def owned(verdict, truth, a, b):
    """The verdict with what the code of the truth and of the two sides says of it."""
    runs = [SimpleNamespace(manifest=one) for one in (a, b)]
    measured = SimpleNamespace(
        reference=runs[0], candidate=runs[1], truth=SimpleNamespace(run=truth)
    )
    return worded(explained(verdict, explain(measured, verdict, AnalysisResult())))


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """A run, and its float64 runs by two kernel paths and by other code."""
    import transformers.models.llama.modeling_llama as modeling

    folder = tmp_path_factory.mktemp("owner")
    a = capture(llama, out=folder / "a", prompts=["one two three"], max_new_tokens=2)
    make_truth(a, out=folder / "truth")
    make_truth(a, out=folder / "sdpa", attn_implementation="sdpa")
    healthy = modeling.LlamaMLP.forward
    modeling.LlamaMLP.forward = lambda self, x: healthy(self, x) * (1 + 1e-9)
    try:
        make_truth(a, out=folder / "other")
        capture(like=a, out=folder / "b")
    finally:
        modeling.LlamaMLP.forward = healthy
    return folder


def opened(runs, *names):
    return [Run.open(runs / name) for name in names]


def test_float64_runs_of_one_code_agree(runs):
    """Other kernels add in another order: some 1e-16 apart, and within the limit."""
    num_compared, first = truths_apart(*opened(runs, "truth", "sdpa"))
    assert first is None
    assert num_compared > 8


@pytest.mark.slow
def test_what_stands_at_pads_is_no_result(tmp_path, shared_run):
    """Fused attention gives rows that see no key other values: pads are left out."""
    a = shared_run(
        prompts=["one two three four", "five"], batching=BatchOptions(batch=True), max_new_tokens=2
    )
    one = make_truth(a, out=tmp_path / "one")
    two = make_truth(a, out=tmp_path / "two", attn_implementation="sdpa")
    num_compared, first = truths_apart(one, two)
    assert first is None
    assert num_compared > 8


def test_float64_runs_of_other_code_do_not(runs):
    """One part in 10⁹, far below what float32 shows, in the first block."""
    _, first = truths_apart(*opened(runs, "truth", "other"))
    assert first["site"] == "model.layers.0:out"
    assert 1e-11 < first["rel_l2"] < 1e-9
    assert first["limit"] < 1e-12
    _, inside = truths_apart(*opened(runs, "truth", "other"), inside=BLOCK)
    assert inside["site"] == f"{BLOCK}:out"


def test_only_classes_that_both_tell_are_held_against_each_other():
    """A run that says nothing of its code is not accused."""
    one, two = manifest(LlamaMLP=["x"], LlamaRMSNorm=["y"]), manifest(LlamaMLP=["z"])
    assert other_code(one, two) == ["LlamaMLP"]
    assert other_code(one, one) == []
    assert other_code(one, manifest()) == []
    plugin = manifest(LlamaMLP=["x"], LlamaRMSNorm=["y"], functional=["f", "plugin.py:3"])
    assert other_code(one, plugin) == ["functional"]


def test_code_of_another_block_does_not_count():
    """One module of a class was given other code: it matters where it is."""
    stock, odd = manifest(LlamaMLP=["x"]), manifest(LlamaMLP=["x", "plugin.py:3"])
    odd.model.code["LlamaMLP"].odd = {"model.layers.2.mlp": "z"}
    assert other_code(stock, odd) == ["LlamaMLP"]
    assert other_code(stock, odd, "model.layers.2") == ["LlamaMLP"]
    assert other_code(stock, odd, BLOCK) == replaced_in(odd, BLOCK) == []
    assert replaced_in(odd, "model.layers.2") == ["plugin.py:3"]
    for one in (stock, odd):
        one.model.code["LlamaMLP"].places = ["model.layers.*.mlp"]
        one.model.code["LlamaMLP"].odd = {}
    odd.model.code["LlamaMLP"].digest = "other"
    assert other_code(stock, odd, "model.layers.7") == ["LlamaMLP"]
    assert other_code(stock, odd, "model.norm") == []


def test_a_truth_of_other_code_is_refused(runs, monkeypatch):
    """Where both manifests tell the code, before anything is measured."""
    monkeypatch.setattr(
        "divergence.comparison.measure.truth.other_code", lambda own, truth: ["LlamaMLP"]
    )
    with pytest.raises(IncomparableError, match="made by other code than the run it repeats: Ll"):
        compare(runs / "a", runs / "b", truth=runs / "truth")


def test_the_reference_is_not_blamed_where_nothing_is_known_of_the_code():
    """So it looks where the candidate's code made the truth, too."""
    truth = SimpleNamespace(manifest=manifest(like="a"))
    found = owned(verdict("reference"), truth, manifest(), manifest())
    assert (found.side, found.confidence) == (None, "medium")
    assert "so does a truth that B's code made" in found.evidence[-1].text
    assert ", by " not in found.summary
    told = manifest(like="a", LlamaMLP=["x"])
    truth = SimpleNamespace(manifest=told)
    assert owned(verdict("reference"), truth, told, told).side == "reference"


def test_code_that_differs_leaves_no_side_unless_the_candidates_was_replaced():
    """The truth has the reference's code, right or wrong."""
    stock, patched = manifest(LlamaMLP=["x"]), manifest(LlamaMLP=["z", "plugin.py:88"])
    truth = SimpleNamespace(manifest=stock)
    assert owned(verdict("candidate"), truth, stock, patched).side == "candidate"
    assert owned(verdict("candidate"), truth, stock, stock).side == "candidate"
    found = owned(verdict("candidate"), truth, patched, stock)
    assert found.side is None
    assert "A's was replaced: plugin.py:88" in found.evidence[-1].text
    release = manifest(LlamaMLP=["other release"])
    assert owned(verdict("candidate"), truth, stock, release).side is None


def operators(side):
    first = OperatorResult(
        site=f"{BLOCK}.mlp/aten.mul",
        candidate_site=f"{BLOCK}.mlp/aten.mul",
        match="exact",
        operator="aten.mul",
        candidate_operator="aten.mul",
        block=BLOCK,
        phase="prefill",
        order=3,
        shape=(2, 4),
        reference_dtype="float32",
        candidate_dtype="float32",
        limit_usage=9.0,
        w=0.01,
        reference_error=1e-2,
        candidate_error=1e-4,
        floor=1e-7,
        verdict=side,
    )
    return OperatorsResult(
        frame="block", judged="truth", num_matched=1, onset=first.site, side=side, results=[first]
    )


def operator_finding(side):
    return finding_of(operators(side), SimpleNamespace(operator=lambda *args: []))


def test_levels_that_blame_different_sides_are_told_as_a_contradiction():
    """No side, low confidence, and both levels by name."""
    found = worded(decide([block_finding("candidate"), operator_finding("reference")]).verdict)
    assert (found.side, found.confidence, found.kind) == (None, "low", "localized")
    assert found.summary == (
        f"the evidence contradicts itself: {BLOCK}:out by B, {BLOCK}.mlp/aten.mul:out by A"
    )
    assert "two faults do" in found.evidence[0].text


def test_levels_that_agree_or_say_nothing_do_not_contradict():
    """Nor does an operator in another block."""
    for block, operator, place in (
        ("candidate", "candidate", BLOCK),
        ("both", "reference", BLOCK),
        ("candidate", None, BLOCK),
        ("candidate", "reference", "model.layers.2"),
    ):
        blocks = block_finding(block, block=place)
        found = worded(decide([blocks, operator_finding(operator)]).verdict)
        assert "contradicts" not in found.summary
        assert found.side is not None
