"""A float64 truth tells which side is wrong, what is legitimate, and what 16 bits hide."""

import functools
import shutil
import sys
from pathlib import Path

import pytest
import torch

from divergence import capture, compare
from divergence import truth as make_truth
from divergence.errors import IncomparableError, UsageError
from tests.digests import without_digests

# benchmarks/ is beside the package, not in it.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks._faults import plant

PROMPT = "A bridge is built twice: once on paper, where every beam is exact, and once in steel."
BLOCK = "model.layers.1"


class Case:
    """Runs of one model: ``a`` (eager), its truth, and candidates like it (sdpa)."""

    def __init__(self, root, model, **options):
        self.root, self.model = root, str(model)
        options = {"prompts": [PROMPT], "max_new_tokens": 3} | options
        self.a = capture(self.model, out=root / "a", device="cpu", **options)
        self.truth = make_truth(self.a, out=root / "truth")
        self._number = 0

    def like(self, run=None, *, fault=None, **options):
        self._number += 1
        if fault is not None:
            options["prepare"] = lambda model: [plant(model, fault[0], b) for b in fault[1]]
        options.setdefault("attn_implementation", "sdpa")
        out = self.root / f"run{self._number}"
        return capture(like=run or self.a, out=out, device="cpu", **options)


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    """``case(dtype, sites)``"""

    @functools.cache
    def make(dtype="bfloat16", sites=("blocks",)):
        model = tiny_model("llama", dtype=dtype)
        return Case(tmp_path_factory.mktemp("truth"), model, sites=list(sites))

    return make


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_kernels_are_a_legitimate_difference(case, dtype):
    """Neither side is wrong, and with an escalated pass of each that is certain."""
    one, narrow = case(dtype), dtype != "float32"
    b = one.like(escalate=narrow)
    again = one.like(escalate=narrow, attn_implementation="eager")
    for a, confidence in ((one.a, "medium" if narrow else "high"), (again, "high")):
        report = compare(a, b, truth=one.truth)
        assert (report.verdict.kind, report.verdict.side) == ("within_floor", "neither")
        assert report.verdict.confidence == confidence
    assert any("against the truth" in fact.text for fact in report.verdict.evidence)
    block = next(s for s in report.sites if s.site == f"{BLOCK}:out" and s.pass_ == "anchored")
    assert 0.3 < block.truth.w_median < 3
    assert 0 < block.truth.r_median < 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_faulty_candidate_is_named(case, dtype):
    """The block and the side, by W."""
    one = case(dtype)
    report = compare(one.a, one.like(fault=("gate-up", [1])), truth=one.truth)
    verdict = report.verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")
    assert verdict.confidence == "high"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_faulty_reference_is_named(case, dtype, tmp_path):
    """The fault was on the first machine; the second is right, and so it is said."""
    one = case(dtype)
    bad = capture(
        one.model,
        out=tmp_path / "bad",
        prompts=[PROMPT],
        max_new_tokens=3,
        device="cpu",
        prepare=lambda model: plant(model, "gate-up", 1),
    )
    truth = make_truth(bad, out=tmp_path / "truth")
    verdict = compare(bad, one.like(bad), truth=truth).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "reference")


@pytest.mark.slow
def test_two_runs_with_one_fault_are_both_wrong(case, tmp_path):
    """Equal bit for bit, and far from the truth."""
    one = case()
    bad = [one.like(fault=("rope-base", [1])) for _ in range(2)]
    verdict = compare(*bad, truth=one.truth).verdict
    assert (verdict.kind, verdict.side) == ("identical", "both")


@pytest.mark.slow
def test_a_shared_fault_is_not_the_candidates_alone(case):
    """Its escalated pass shows it too, and clears nobody."""
    one = case()
    bad = [one.like(fault=("rope-base", [1]), escalate=escalate) for escalate in (False, True)]
    verdict = compare(*bad, truth=one.truth).verdict
    assert (verdict.kind, verdict.side) == ("identical", "both")


@pytest.mark.slow
def test_weights_rounded_for_one_side_are_no_fault_of_the_other(tmp_path, tiny_model):
    """A float32 checkpoint run in 16 bits: its truth has rounded weights, a wider run has not."""
    one = Case(tmp_path, tiny_model("llama", dtype="float32"), dtype="bfloat16")
    for dtype in ("float32", "float16"):
        other = one.like(dtype=dtype, escalate=True)
        for pair in ((one.a, other), (other, one.a)):
            verdict = compare(*pair, truth=one.truth).verdict
            assert (verdict.kind, verdict.side) == ("within_floor", "neither")
    bad = one.like(dtype="float32", fault=("gate-up", [1]))
    verdict = compare(one.a, bad, truth=one.truth).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")


@pytest.mark.parametrize("architecture", ["mixtral", "mamba"])
@pytest.mark.slow
def test_a_coarser_dtype_alone_is_no_fault(architecture, tmp_path, tiny_model):
    """Experts that change in a decode step, and a float32 stream between bfloat16 operators."""
    model = tiny_model(architecture, dtype="float32", num_blocks=6)
    prompts = [
        "The capital of France is a city whose name has been written here and there many times "
        "over",
        "two",
        "A somewhat longer story about numbers: one, two, three, four, five, six.",
    ]
    one = Case(tmp_path, model, prompts=prompts, max_new_tokens=4)
    kernels = None if architecture == "mamba" else "sdpa"
    other = one.like(dtype="bfloat16", attn_implementation=kernels)
    for pair in ((one.a, other), (other, one.a)):
        verdict = compare(*pair, truth=one.truth).verdict
        assert (verdict.kind, verdict.side) == ("within_floor", "neither")


@pytest.mark.slow
def test_a_truth_that_was_cut_off_clears_nobody(case, tmp_path):
    """What it holds is judged, and the report says that it is not whole."""
    one = case()
    shutil.copytree(one.truth.path, tmp_path / "cut")
    without_digests(tmp_path / "cut")
    records = tmp_path / "cut" / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-20]))
    manifest = tmp_path / "cut" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    report = compare(one.a, one.like(escalate=True), truth=tmp_path / "cut")
    assert (report.verdict.kind, report.verdict.side) == ("within_floor", None)
    assert report.verdict.confidence == "medium"
    assert any("the truth is incomplete" in note for note in report.notes)
    # what the escalated pass recorded there was compared with nothing, and is not passed over
    assert any(item.pass_ == "escalated" for item in report.coverage.unmatched)


@pytest.mark.slow
def test_a_fault_below_the_floor_shows_in_the_escalated_pass(case):
    """A wrong epsilon moves less than bfloat16 rounds, and 1,000 float32 floors."""
    one = case()
    bad = one.like(fault=("norm-eps", [1]))
    assert compare(one.a, bad, truth=one.truth).verdict.kind == "within_floor"
    bad = one.like(fault=("norm-eps", [1]), escalate=True)
    verdict = compare(one.a, bad, truth=one.truth).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")
    assert verdict.onset.pass_ == "escalated"
    assert "within the limits of the runs' own dtype" in verdict.summary


@pytest.mark.slow
def test_an_escalated_pass_tells_a_formula_from_coarse_kernels(case):
    """A fault of more than the floor that vanishes in float32 is the 16-bit kernels' own."""
    one = case()
    coarse = one.like(fault=("mantissa", [1]), escalate=True)
    formula = one.like(fault=("gate-up", [1]), escalate=True)
    said = {
        name: " ".join(fact.text for fact in compare(one.a, run, truth=one.truth).verdict.evidence)
        for name, run in (("coarse", coarse), ("formula", formula))
    }
    assert "it vanishes in float32" in said["coarse"]
    assert "a wrong formula or wrong data" in said["formula"]


@pytest.mark.slow
def test_escalated_passes_of_both_sides_need_no_truth(case):
    """Two float32 passes over the same inputs are compared with each other."""
    one = case()
    good = one.like(attn_implementation="eager", escalate=True)
    verdict = compare(good, one.like(fault=("norm-eps", [1]), escalate=True)).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, None)
    verdict = compare(
        good, one.like(fault=("norm-eps", [1]), escalate=True), truth=one.truth
    ).verdict
    assert verdict.side == "candidate"


@pytest.mark.slow
def test_what_is_wrong_everywhere_is_named_by_its_class(case):
    """Every RMSNorm with a wrong epsilon is one cause, not the first block's."""
    one = case("float32", ("modules",))

    def every_norm(model):
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.variance_epsilon = 1e-2

    verdict = compare(one.a, one.like(prepare=every_norm), truth=one.truth).verdict
    assert (verdict.kind, verdict.side) == ("systematic", "candidate")
    assert "every LlamaRMSNorm differs" in verdict.summary


@pytest.mark.slow
def test_inside_a_block_the_source_is_named_not_what_it_feeds(case):
    """What a wrong activation hands on is off too; the first that fails is the source."""
    one = case("float32", ("modules",))
    verdict = compare(one.a, one.like(fault=("activation", [1])), truth=one.truth).verdict
    assert verdict.onset.site == f"{BLOCK}.mlp.act_fn:out"
    assert any("act_fn:in" in fact.text and "passes" in fact.text for fact in verdict.evidence)


def test_a_stale_cache_entry_is_a_matter_of_decode_steps(case):
    """The prefill passes at the same site, and that is said."""
    one = case()
    verdict = compare(one.a, one.like(fault=("kv-stale", [1])), truth=one.truth).verdict
    assert (verdict.kind, verdict.onset.block) == ("localized", BLOCK)
    assert verdict.onset.step >= 1
    assert any("KV cache" in fact.text for fact in verdict.evidence)


@pytest.mark.slow
def test_a_trusted_run_widens_the_limits(case):
    """A machine that is known to be coarse there makes another one like it pass."""
    one = case()
    bad = one.like(plants=[f"{BLOCK}.mlp:out=noise:0.05:1"])
    assert compare(one.a, bad, truth=one.truth).verdict.kind == "localized"
    trusted = one.like(plants=[f"{BLOCK}.mlp:out=noise:0.05:2"])
    report = compare(one.a, bad, truth=one.truth, floor=[trusted])
    assert report.verdict.kind == "within_floor"
    assert any("widened" in note for note in report.notes)


def test_a_floor_of_another_experiment_is_refused(case, tmp_path):
    """Other prompts show nothing about this run."""
    one = case()
    other = capture(one.model, out=tmp_path / "o", prompts=["Hello"], max_new_tokens=3)
    with pytest.raises(UsageError, match="shows no floor"):
        compare(one.a, one.like(), floor=[other])


@pytest.mark.slow
def test_no_truth_another_truth_and_other_weights_are_refused(case, tmp_path, tiny_model):
    """Each with what to do."""
    one = case()
    b = one.like()
    with pytest.raises(UsageError, match="is no truth"):
        compare(one.a, b, truth=b)
    with pytest.raises(UsageError, match="cannot judge itself"):
        compare(one.a, one.truth, truth=one.truth)
    other = capture(one.model, out=tmp_path / "o", prompts=["Hello"], max_new_tokens=2)
    truth = make_truth(other, out=tmp_path / "ot")
    with pytest.raises(UsageError, match="truth of another run"):
        compare(one.a, b, truth=truth)
    wrong = make_truth(
        one.a, out=tmp_path / "w", model=str(tiny_model("llama", dtype="bfloat16", seed=5))
    )
    with pytest.raises(IncomparableError, match="other weights"):
        compare(one.a, b, truth=wrong)


def test_free_runs_alone_have_a_side_too(case):
    """Without an anchored pass the truth judges where the free runs end."""
    one = case("float32")
    bad = one.like(fault=("gate-up", [1]), anchor=False)
    report = compare(one.a, bad, truth=one.truth)
    assert report.verdict.kind in ("localized", "drift")
    last = [s for s in report.sites if s.site == "model.layers.2:out" and s.step == 0][-1]
    assert last.truth.w_median > 100
    healthy = compare(one.a, one.like(anchor=False), truth=one.truth).verdict
    lacking = " ".join(check.detail or "" for check in healthy.checks)
    assert "the truth judges runs on their own values" in lacking and "no truth" not in lacking


@pytest.mark.slow
def test_a_truth_of_many_prompts_in_one_batch(case, tmp_path, tiny_model):
    """Pads are apart, and the fault is found all the same."""
    root = tmp_path
    one = Case(
        root,
        tiny_model("llama", dtype="bfloat16"),
        prompts=[PROMPT, "Short.", "A little longer than that."],
        batch=True,
    )
    assert compare(one.a, one.like(), truth=one.truth).verdict.kind == "within_floor"
    verdict = compare(one.a, one.like(fault=("gate-up", [1])), truth=one.truth).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")


@pytest.mark.slow
def test_attention_weights_have_as_many_columns_as_tokens(case):
    """A last axis that grows from step to step is judged without channels."""
    one = case("float32", ("modules",))
    bad = one.like(attn_implementation="eager", plants=[f"{BLOCK}.self_attn:out.1=scale:1.1"])
    verdict = compare(one.a, bad, truth=one.truth).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", f"{BLOCK}.self_attn:out.1")


@pytest.mark.slow
def test_another_dtype_is_held_to_its_own_floor(case):
    """A bfloat16 candidate of a float32 run is farther off by 2^16 and not wrong for it; a fault
    in it is found all the same."""
    one = case("float32")
    healthy = one.like(dtype="bfloat16")
    assert compare(one.a, healthy, truth=one.truth).verdict.kind == "within_floor"
    bad = one.like(dtype="bfloat16", fault=("gate-up", [1]))
    verdict = compare(one.a, bad, truth=one.truth).verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, "candidate")


def test_torch_stays_out_of_the_widened_state(case):
    """After a truth, operators compute in their own dtype again."""
    case()
    assert (torch.ones(2, dtype=torch.bfloat16) * 1.5).dtype is torch.bfloat16


@pytest.mark.slow
def test_a_module_that_hands_its_input_on_is_not_far_from_the_truth(tmp_path, answer, shared_run):
    """BERT's dropouts inherit the error of what is before them; equal runs are wrong nowhere."""
    a = shared_run(
        "bert",
        prompts=["one two three four five six"],
        sites=["blocks", "modules"],
        dtype="float32",
    )
    report = answer(a, truth=make_truth(a, out=tmp_path / "t"))
    assert (report.verdict.kind, report.verdict.side) == ("identical", "neither")
