"""The escalated pass: coarse arithmetic vanishes in it, a wrong formula explodes."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from divergence import RecordOptions, Run, capture, compare
from divergence import truth as make_truth
from divergence.run.reader import without_passes

BLOCK = "model.layers.1"
ESCALATE = RecordOptions(escalate=True)


@pytest.fixture(scope="module")
def run(captured) -> Run:
    """A llama in bfloat16."""
    return captured("llama", dtype="bfloat16")


@pytest.fixture(scope="module")
def escalated(run, tmp_path_factory) -> Callable[..., Run]:
    """``escalated(prepare)`` → the run repeated with a patched model; the same patch, the same."""

    @functools.cache
    def make(prepare: Callable[[nn.Module], None] | None = None) -> Run:
        out = tmp_path_factory.mktemp("escalated-") / "run"
        return capture(like=run, out=out, recording=ESCALATE, prepare=prepare)

    return make


@pytest.fixture(scope="module")
def distances(run, escalated, tmp_path_factory) -> Callable[..., tuple[float, float, float]]:
    """``distances(prepare)`` → of the block's output: ‖b-a‖ over the bfloat16 floor ‖a-R‖, and
    the escalated pass's ‖b-R‖ over that floor and over the healthy model's own ‖b-R‖."""
    truth = make_truth(run, out=tmp_path_factory.mktemp("truth-") / "truth")

    def read(one: Run, pass_: str) -> torch.Tensor:
        return one.read(one.find((pass_, 0, 0, f"{BLOCK}:out"))).double()

    def measure(prepare: Callable[[nn.Module], None] | None = None) -> tuple[float, float, float]:
        right = read(truth, "anchored")
        floor = (read(run, "free") - right).norm()
        fine = (read(escalated(), "escalated") - right).norm()
        other = escalated(prepare)
        apart = (read(other, "anchored") - read(run, "free")).norm()
        away = (read(other, "escalated") - right).norm()
        return float(apart / floor), float(away / floor), float(away / fine)

    return measure


def norms_of(model: nn.Module) -> list[nn.Module]:
    block = model.get_submodule(BLOCK)
    return [block.input_layernorm, block.post_attention_layernorm]


def coarse_norm(model: nn.Module) -> None:
    """RMSNorm all in bfloat16, where the original computes in float32."""
    for norm in norms_of(model):

        def forward(x: torch.Tensor, norm: nn.Module = norm) -> torch.Tensor:
            x = x.to(torch.bfloat16)
            variance = x.pow(2).mean(-1, keepdim=True, dtype=torch.bfloat16)
            return norm.weight * (x * torch.rsqrt(variance + norm.variance_epsilon))

        norm.forward = forward


def wrong_eps(model: nn.Module) -> None:
    """The eps of another model in the norms of one block."""
    for norm in norms_of(model):
        norm.variance_epsilon = 1e-4


def test_the_escalated_pass_is_anchored_and_in_float32(run, escalated):
    """It records what the anchored pass does, in float32, and the other two stay as they were."""
    repeated = escalated()
    assert repeated.manifest.plan.passes == ["free", "anchored", "escalated"]
    assert repeated.manifest.plan.anchored_to == run.manifest.id
    assert repeated.manifest.settings.compute_dtype is None
    assert repeated.manifest.model.dtype == "bfloat16"
    seen = {
        name: {r.coordinates[1:]: r for r in repeated.records if r.pass_ == name}
        for name in ("free", "anchored", "escalated")
    }
    assert set(seen["escalated"]) == set(seen["anchored"]) < set(seen["free"])
    assert {step for _, step, _ in seen["escalated"]} == {0, 1, 2, 3}
    assert {r.dtype for r in seen["escalated"].values()} == {"float32"}
    assert {r.dtype for r in seen["anchored"].values()} == {"bfloat16"}
    mine = {r.coordinates: r.xxh3 for r in run.records}
    assert {r.coordinates: r.xxh3 for r in seen["free"].values()} == mine


def test_a_healthy_model_has_float32s_floor(distances):
    """Nothing but the rounding of float32 is left, 2^16 times less than the run's."""
    apart, over_floor, _ = distances()
    assert apart == 0
    assert 0.5 * 2**-16 < over_floor < 5 * 2**-16


@pytest.mark.slow
def test_coarse_arithmetic_vanishes(distances):
    """A norm in bfloat16 is seen in the anchored pass; widened, it is the right formula."""
    apart, _, over_healthy = distances(coarse_norm)
    assert apart > 1
    assert 0.7 < over_healthy < 1.5


def test_a_wrong_formula_explodes(distances):
    """A wrong eps is below the bfloat16 floor, and more than 50 times float32's."""
    apart, over_floor, over_healthy = distances(wrong_eps)
    assert 0 < apart < 1
    assert over_floor * 2**16 > 50
    assert over_healthy > 50


def test_only_the_patched_block_differs(escalated, run):
    """Every other block starts from the recorded input, so its output is the healthy one's."""
    healthy, other = escalated(), escalated(wrong_eps)
    for pass_ in ("anchored", "escalated"):
        for block in ("model.layers.0", BLOCK, "model.layers.2"):
            records = [r.find((pass_, 0, 0, f"{block}:out")) for r in (healthy, other)]
            assert (records[0].xxh3 == records[1].xxh3) == (block != BLOCK)


def told(make: Callable[..., Run], *args, **options) -> tuple[list[str], Run]:
    """What is noted while that makes a run, and the run."""
    notes: list[str] = []

    def progress(event, done, total, detail):
        if event == "note":
            notes.append(detail)

    return notes, make(*args, progress=progress, **options)


def test_float32_needs_no_third_pass(captured, like):
    """For a float32 model the anchored pass is the escalated one; it is said."""
    notes, repeated = told(like, captured("llama"))
    assert repeated.manifest.plan.passes == ["free", "anchored"]
    assert len(notes) == 1
    assert "no escalated pass: the model is in float32" in notes[0]


@pytest.mark.slow
def test_half_precision_is_escalated_without_the_anchored_pass(captured, like):
    """float16 too, and --no-anchor leaves out the anchored pass only."""
    run = captured("gpt2", dtype="float16")
    notes, repeated = told(like, run, anchor=False)
    assert repeated.manifest.plan.passes == ["free", "escalated"]
    assert notes == []


def test_a_run_that_cannot_anchor_is_not_escalated(captured, like):
    """Without the blocks' inputs there is nothing to start from; it is said."""
    run = captured("llama", dtype="bfloat16", capture_options={"sites": ["lm_head:out"]})
    notes, repeated = told(like, run)
    assert repeated.manifest.plan.passes == ["free"]
    assert "it holds no input of model.layers.0" in notes[0]


def test_what_had_to_be_rounded_is_said(run, like):
    """A model that writes into a bfloat16 tensor of its own is not wide there; it is counted."""

    def prepare(model: nn.Module) -> None:
        scratch = torch.zeros(1, dtype=torch.bfloat16)
        block = model.get_submodule(BLOCK)
        block.register_forward_pre_hook(lambda module, args: scratch.copy_(args[0].sum()) and None)

    notes, _ = told(like, run, prepare=prepare)
    assert len(notes) == 1
    assert "in 4 places: there the escalated pass is rounded" in notes[0]


@pytest.fixture
def wide(tiny_model, tmp_path):
    """``wide(**options)``: a bfloat16 run with an escalated pass of its own, and its own truth."""

    def make(**options) -> Run:
        options = {"truth": "full", "max_new_tokens": 3, "dtype": "bfloat16"} | options
        model, out = str(tiny_model("llama")), tmp_path / "a"
        return capture(model, out=out, recording=ESCALATE, **options)

    return make


@pytest.fixture
def own(shared_run) -> Run:
    """Such a run of two prompts, which nobody writes into."""
    options = {"truth": "full", "max_new_tokens": 3, "dtype": "bfloat16"}
    return shared_run(prompts=["Kernels differ.", "So do machines."], recording=ESCALATE, **options)


@pytest.fixture
def like(tmp_path):
    """``like(run, name, **options)``: a run like it, with an escalated pass of its own."""

    def make(run: Run, name: str = "b", **options) -> Run:
        return capture(like=run, out=tmp_path / name, recording=ESCALATE, **options)

    return make


def test_a_run_is_escalated_from_its_own_free_pass(own):
    """Without a run to repeat, blocks get the run's own inputs; its tokens are forced."""
    passes = own.manifest.plan.passes
    assert passes[:2] == ["free", "escalated"]
    assert own.manifest.plan.anchored_to is None
    assert own.manifest.escalated_to == own.manifest.id
    read = {p: {r.coordinates[1:]: r for r in own.records if r.pass_ == p} for p in passes}
    outputs = [place for place in read["free"] if place[2] == f"{BLOCK}:out"]
    assert len(outputs) == 6  # two prompts of three forwards
    for place in outputs:
        free, wide = (own.read(read[name][place]).double() for name in ("free", "escalated"))
        right = own.read(read["truth"][place]).double()
        assert (wide - right).norm() < 2**-10 * (free - right).norm()


@pytest.mark.slow
def test_both_sides_escalated_are_sure(own, like):
    """A without such a pass leaves A's own float32 unseen: said, with what to run."""
    b = like(own, attn_implementation="sdpa")
    verdict = compare(own, b).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("within_floor", "neither", "high")
    unseen = without_passes(own, ["escalated"])
    verdict = compare(unseen, b).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("within_floor", "neither", "medium")
    lacking = [check.lacking for check in verdict.checks if check.state == "not_made"]
    assert [item.code for item in lacking] == ["blocks.not_in_float32"]
    assert lacking[0]["side"] == "reference"
    assert "--escalate" in verdict.next[0]
    assert f"--like {own.path}" in verdict.next[0]
    seen, hidden = (compare(a, b).visible.block for a in (own, unseen))
    assert seen < 2**-16 < 2**-8 < hidden


@pytest.mark.slow
def test_a_fault_of_a_below_its_floor_is_as_s(wide, like):
    """A's own escalated pass is held against the truth that A carries."""
    bad = wide(prompts=["Kernels differ."], plants=[f"{BLOCK}.mlp.down_proj:out=scale:1.001"])
    verdict = compare(bad, like(bad)).verdict
    assert (verdict.kind, verdict.side, verdict.onset.block) == ("localized", "reference", BLOCK)


@pytest.mark.slow
def test_one_truth_judges_two_repetitions(own, tmp_path):
    """``compare B C --truth A``: the truth that A carries."""
    b = capture(like=own, out=tmp_path / "b")
    c = capture(like=own, out=tmp_path / "c", attn_implementation="sdpa")
    verdict = compare(b, c, truth=own).verdict
    assert (verdict.kind, verdict.side) == ("within_floor", "neither")


def test_what_keeps_no_bytes_is_not_escalated(wide):
    """Its own free pass has no inputs to start from: said, and the run is whole without it."""
    notes, run = told(wide, prompts=["x"], store="hash", truth="no")
    assert run.manifest.plan.passes == ["free"]
    assert "no escalated pass: without --like it repeats this run's own free pass" in notes[0]


@pytest.mark.parametrize(
    ("fault", "side"), [("scale:1.002@step=2", None), ("scale:1.002", "candidate")]
)
def test_what_the_truth_does_not_reach_is_held_against_the_other(
    wide, like, monkeypatch, fault, side
):
    """Of forwards that the time did not allow: their float32 passes are compared with each other,
    and where the truth tells the side of the same site elsewhere, it is theirs too."""
    for name in ("LEAST_SECONDS", "SHARE"):
        monkeypatch.setattr(f"divergence.recording.api.{name}", 0.0)
    a = wide(prompts=["Kernels differ.", "Machines too."], truth="auto")
    assert a.manifest.plan.truth.num_steps == [1, 0]
    report = compare(a, like(a, plants=[f"{BLOCK}.mlp.down_proj:out={fault}"]))
    assert not report.coverage.unmatched
    verdict = report.verdict
    assert (verdict.kind, verdict.onset.block, verdict.side) == ("localized", BLOCK, side)


@pytest.mark.slow
def test_an_input_s_fault_is_planted_once(wide, like):
    """The free pass has the planted input already, and its block is not blamed for it."""
    bad = wide(prompts=["Kernels differ."], plants=[f"{BLOCK}:in=scale:1.05"])
    verdict = compare(bad, like(bad)).verdict
    assert (verdict.kind, verdict.side) == ("localized", "reference")
    assert verdict.onset.site == f"{BLOCK}:in"


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
def test_the_unseen_side_repeats_what_both_got_the_inputs_of(own, swapped, like, tmp_path):
    """Of two repetitions the command names the run that both repeat, and not one of them: their
    passes then belong together."""
    seen = like(own, attn_implementation="sdpa")
    unseen = capture(like=own, out=tmp_path / "c")
    pair = (seen, unseen) if swapped else (unseen, seen)
    verdict = compare(*pair, truth=own).verdict
    assert (verdict.kind, verdict.confidence) == ("within_floor", "medium")
    made, compared = verdict.next
    assert f"--like {own.path} -o {unseen.path}-escalated --escalate" in made
    assert "--attn-implementation" not in made
    assert compared.endswith(f"--truth {own.path}")


@pytest.mark.slow
def test_the_run_that_was_repeated_is_asked_too(own, like):
    """As B, where A is its repetition: its own inputs are what it is anchored to."""
    plain = without_passes(own, ["escalated"])
    a = like(own, attn_implementation="sdpa")
    verdict = compare(a, plain).verdict
    assert verdict.confidence == "medium"
    made, compared = verdict.next
    assert f"--like {own.path} -o {own.path}-escalated --escalate" in made
    assert compared.endswith(f"{a.path} {own.path}-escalated --truth {own.path}")


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"batch": True}, ["free", "escalated"]),
        ({"repeat": 2}, ["free", "escalated"]),
        ({"whole": True}, ["free", "escalated", "whole"]),
        ({"steps": "0,2"}, ["free", "escalated"]),
        ({"use_cache": False}, ["free", "escalated"]),
        ({"sites": ["blocks", f"ops@{BLOCK}"]}, ["free", "escalated"]),
        ({"train": True, "max_new_tokens": None}, ["free", "escalated"]),
        ({"steps": "1-2"}, ["free"]),
        ({"sites": ["lm_head:out"]}, ["free"]),
        ({"dtype": "float32"}, ["free"]),
    ],
)
def test_an_own_pass_repeats_what_the_free_pass_made(wide, options, passes):
    """In the ways a capture can run: the same places, each within float32's rounding where the
    free pass is within the model's own."""
    prompts = ["Kernels differ.", "So do machines here."]
    notes, run = told(wide, **{"prompts": prompts, "truth": "no"} | options)
    assert run.manifest.plan.passes == passes
    assert (passes == ["free"]) == any("no escalated pass: " in note for note in notes)
    free = {r.coordinates[1:]: r for r in run.records if r.pass_ == "free" and r.call is None}
    blocks = 0
    for record in run.records:
        if record.pass_ == "escalated" and record.site == f"{BLOCK}:out":
            wide, own = run.read(record).double(), run.read(free[record.coordinates[1:]]).double()
            assert 0 < (wide - own).norm() < 2**-6 * own.norm()
            blocks += 1
    assert bool(blocks) == ("escalated" in passes)
