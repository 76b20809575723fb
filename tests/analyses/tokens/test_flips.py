"""Ties and faults: whether rounding may flip a token, and what the distributions say."""

import math
from types import SimpleNamespace

import msgspec
import pytest
import torch

from divergence import Run, capture, compare
from divergence import truth as make_truth
from divergence.analyses.tokens import find as flips
from divergence.analyses.tokens.find import compare_tokens
from divergence.numerics.arrays import as_array, wide
from divergence.numerics.floor import THRESHOLDS
from divergence.numerics.logits import kl_divergence, logit_error

V = 4096
TIE = 3.0
PROMPT = "Why do machines disagree?"


class HandMade:
    """All of a run that compare_tokens looks at: one sample, a row of logits for each step."""

    def __init__(self, rows: list[torch.Tensor], *, fed: list[int] | None = None) -> None:
        chosen = [int(row.argmax()) for row in rows]
        sample = SimpleNamespace(chosen_ids=chosen, generated_ids=fed or chosen)
        self.manifest = SimpleNamespace(
            plan=SimpleNamespace(logits_site=".:out", modules={}),
            tokens=SimpleNamespace(samples=[sample], groups=[[0]], texts={}, forced_by="a"),
            model=SimpleNamespace(dtype="bfloat16"),
            quantizes_activations=False,
        )
        self.rows = rows

    def find(self, coordinates):
        return coordinates[2]

    def has_bytes(self, step):
        return True

    def array(self, step):
        return as_array(self.rows[step].reshape(1, 1, -1))


@pytest.fixture
def drift_in(judged):
    """``drift_in(tokens)``: what is claimed of the tokens alone."""

    def claimed(tokens):
        findings = judged([], ("blocks", "tokens"), tokens=tokens).findings
        return next((finding for finding in findings if finding.claim == "drift"), None)

    return claimed


def noise(seed: int, size: float) -> torch.Tensor:
    return size * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def right_row(gap: float) -> torch.Tensor:
    """The exact logits: token 1 leads token 2 by ``gap``, the others are far below."""
    row = noise(0, 1.0) - 20
    row[1], row[2] = 10.0, 10.0 - gap
    return row


def three(gap: float, *, error: float = 0.01, push: float | None = None, shift: float = 0.0):
    """(a, b, truth) of one step. ``a`` has errors of rms ``error`` and chooses as the truth does;
    ``b`` has others of that size, and prefers token 2 by ``push``."""
    truth = right_row(gap)
    a, b = truth + noise(1, error) + shift, truth + noise(2, error)
    a[1], a[2] = truth[1] + shift, truth[2] + shift
    b[1], b[2] = truth[1], truth[1] + (gap / 2 if push is None else push)
    fed = [1]
    return HandMade([a], fed=fed), HandMade([b], fed=fed), HandMade([truth], fed=fed)


def flip(*runs):
    a, b, truth = runs
    found = compare_tokens(a, b, truth=truth)
    assert found.first_difference is not None
    return found.first_difference


# --- tie or fault ------------------------------------------------------------------------------


def test_a_gap_within_three_deviations_is_a_tie():
    """z is the exact gap over √2 · rms of the logit error of the side nearer to the truth."""
    found = flip(*three(gap=0.03))
    assert found.z == pytest.approx(0.03 / (math.sqrt(2) * 0.01), rel=0.05)
    assert (found.z_of, found.judgement) == ("floor", "tie")
    assert found.truth_margin == pytest.approx(0.03)
    assert found.truth_choice.id == found.reference.id == 1


def test_a_gap_that_no_rounding_bridges_is_a_fault():
    """Far beyond what correct kernels of this dtype err by."""
    found = flip(*three(gap=0.5))
    assert found.z > THRESHOLDS.flip
    assert (found.z_of, found.judgement) == ("floor", "fault")


def test_between_tie_and_fault_nothing_is_claimed():
    """Coarser healthy kernels than the floor's may do that, so it is neither."""
    gap = (TIE + THRESHOLDS.flip) / 2 * math.sqrt(2) * 0.01
    assert flip(*three(gap)).judgement is None


def test_the_faulty_side_does_not_measure_itself():
    """The floor is the side that is nearer to the truth, whichever run is called the reference."""
    a, b, truth = three(gap=0.5)
    b.rows[0] += noise(3, 1.0) * (torch.arange(V) > 2)  # b is all wrong
    forward, backward = flip(a, b, truth), flip(b, a, truth)
    assert forward.judgement == backward.judgement == "fault"
    assert forward.z == backward.z
    assert compare_tokens(a, b, truth=truth).floor_side == "reference"
    assert compare_tokens(b, a, truth=truth).floor_side == "candidate"


def test_an_offset_of_all_logits_moves_nothing():
    """A constant on the whole row changes no probability: it is no error, in z and in KL."""
    plain, offset = three(gap=0.5), three(gap=0.5, shift=3.0)
    assert flip(*offset).z == pytest.approx(flip(*plain).z, rel=1e-9)
    assert flip(*offset[:2], None).z == pytest.approx(flip(*plain[:2], None).z, rel=1e-9)
    kl = [compare_tokens(a, b, truth=t).floor_kl_mean for a, b, t in (plain, offset)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-6)
    row = right_row(1.0)
    assert logit_error(row + 3.0, row) == pytest.approx(0.0, abs=1e-12)
    assert kl_divergence(row + 3.0, row) == pytest.approx(0.0, abs=1e-15)


def test_without_a_truth_there_is_no_judgement():
    """In units of the two sides' own difference a fault looks as small as rounding."""
    found = flip(*three(gap=0.5)[:2], None)
    assert (found.z_of, found.judgement, found.truth_choice) == ("difference", None, None)
    assert found.z > 0


@pytest.mark.parametrize(("error", "judgement"), [(0.01, "tie"), (5.0, None)])
def test_the_rounding_model_is_a_scale_that_no_fault_moves(error, judgement):
    """The same allowance, whatever the two sides' difference: a fault's flip is no tie for it."""
    a, b, _ = three(gap=0.02, error=error, push=2.0 if error > 1 else 0.01)
    allowed = {(0, 0): 0.01}
    found = compare_tokens(a, b, allowed=allowed).first_difference
    assert (found.z_of, found.judgement) == ("model", judgement)
    assert compare_tokens(a, b).first_difference.z_of == "difference"


def test_who_chose_as_the_truth_is_recorded():
    """The exact model's own choice, which may be neither side's."""
    a, b, truth = three(gap=0.02)
    truth.rows[0][3] = 11.0
    truth.manifest.tokens.samples[0].chosen_ids = [3]
    assert flip(a, b, truth).truth_choice.id == 3


# --- distributions -----------------------------------------------------------------------------


def by_hand(p_row, q_row) -> float:
    """Σ p log(p / q), term by term."""
    p, q = (row.double().softmax(0).tolist() for row in (p_row, q_row))
    return math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


def test_kl_numbers_are_those_by_hand():
    """Mean and 99th percentile over the steps; the floor is the nearer side's from the truth."""
    truth = [right_row(1.0), right_row(2.0), right_row(3.0)]
    a = [row + noise(4 + n, 0.1 * (n + 1)) for n, row in enumerate(truth)]
    b = [row + noise(14 + n, 0.3 * (n + 1)) for n, row in enumerate(truth)]
    fed = [1, 1, 1]
    found = compare_tokens(
        *(HandMade(rows, fed=fed) for rows in (a, b)), truth=HandMade(truth, fed=fed)
    )
    between = [by_hand(x, y) for x, y in zip(a, b, strict=True)]
    floor = [by_hand(x, y) for x, y in zip(truth, a, strict=True)]
    assert found.floor_side == "reference"
    assert found.kl_mean == pytest.approx(sum(between) / 3, rel=1e-6)
    assert found.kl_p99 == pytest.approx(max(between), rel=1e-6)
    assert found.floor_kl_mean == pytest.approx(sum(floor) / 3, rel=1e-6)
    assert found.floor_kl_p99 == pytest.approx(max(floor), rel=1e-6)
    ratios = [found.kl_mean / found.floor_kl_mean, found.kl_p99 / found.floor_kl_p99]
    assert any(found.kl_ratio == pytest.approx(ratio) for ratio in ratios)


@pytest.mark.parametrize(("w", "beyond"), [(1.0, False), (2.2, False), (6.0, True)])
def test_kl_goes_with_the_square_of_the_error(drift_in, w, beyond):
    """Two independent errors give 1 + W²: the limit passes the largest healthy W."""
    num = 40
    truth = [noise(100 + n, 3.0) for n in range(num)]
    a = [row + noise(300 + n, 0.01) for n, row in enumerate(truth)]
    b = [row + noise(500 + n, 0.01 * w) for n, row in enumerate(truth)]
    fed = [0] * num
    found = compare_tokens(
        *(HandMade(rows, fed=fed) for rows in (a, b)), truth=HandMade(truth, fed=fed)
    )
    assert found.kl_mean / found.floor_kl_mean == pytest.approx(1 + w * w, rel=0.3)
    assert (found.kl_ratio > found.kl_limit) is beyond
    drift = drift_in(found)
    assert (drift is not None) is beyond
    if drift is not None:
        assert drift.side == "candidate"
    found = msgspec.structs.replace(found, differences=[])
    drift = drift_in(found)
    assert (drift is not None and "as far apart" in drift.summary) is beyond


@pytest.mark.parametrize("choice", ["experts", "codes"])
def test_where_experts_or_codes_are_chosen_neither_flip_nor_kl_is_a_fault(drift_in, choice):
    """Rounding sends a token to another expert or flips a code on one side, and its logits are
    elsewhere, by far more than the floor's KL. The numbers are given, no limit is."""
    num = 40
    truth = [noise(100 + n, 3.0) for n in range(num)]
    a = [row + noise(300 + n, 0.01) for n, row in enumerate(truth)]
    b = [row + noise(500 + n, 0.5) for n, row in enumerate(truth)]
    runs = [HandMade(rows, fed=[0] * num) for rows in (a, b, truth)]
    assert drift_in(compare_tokens(*runs[:2], truth=runs[2])) is not None
    runs[0].manifest.plan.modules["layers.0"] = SimpleNamespace(routed=choice == "experts")
    runs[0].manifest.quantizes_activations = choice == "codes"
    found = compare_tokens(*runs[:2], truth=runs[2])
    assert found.kl_ratio > 100
    assert found.kl_limit is None
    assert all(flip.judgement in ("tie", None) for flip in found.differences)
    assert drift_in(found) is None


def test_few_positions_have_a_wider_limit():
    """One position's KL is a handful of numbers: chance alone makes a large ratio of it."""
    runs = three(gap=0.03)
    one = compare_tokens(*runs[:2], truth=runs[2])
    assert one.kl_limit > 3 * THRESHOLDS.kl


def test_steps_after_other_tokens_are_not_compared():
    """A flip of unforced runs ends what can be compared, in the distributions as well."""
    rows = [right_row(1.0) for _ in range(3)]
    other = [row.clone() for row in rows]
    other[1][2] = 12.0
    found = compare_tokens(HandMade(rows), HandMade(other))
    assert (found.num_tokens, found.num_equal, len(found.differences)) == (3, 1, 1)
    assert found.kl_mean == pytest.approx(by_hand(rows[1], other[1]) / 2)


# --- real runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory, llama):
    """(reference, another kernel, truth) of a bfloat16 model with ties among its tokens."""
    folder = tmp_path_factory.mktemp("flips")
    a = capture(str(llama), out=folder / "a", prompts=[PROMPT], max_new_tokens=7)
    b = capture(like=a, out=folder / "b", attn_implementation="sdpa")
    return a, b, make_truth(a, out=folder / "truth")


def test_flips_of_healthy_kernels_are_ties(runs):
    """Another attention kernel flips tokens whose logits are as near as rounding."""
    a, b, truth = runs
    report = compare(a, b, truth=truth)
    assert report.verdict.kind == "within_floor", report.verdict
    assert report.tokens.differences
    assert all(flip.judgement != "fault" for flip in report.tokens.differences)
    assert report.tokens.first_difference.judgement == "tie"
    assert report.tokens.kl_ratio < report.tokens.kl_limit
    assert any("a tie" in fact.text for fact in report.verdict.evidence)


def test_check_takes_the_floors_z(runs, checked):
    """A tie over the floor, or over the rounding model, counts as equal whatever the verdict; one
    over the two sides' own difference never does."""
    a, b, truth = runs
    report = compare(a, b, truth=truth)
    policy = {
        "verdicts": ["within_floor", "drift"],
        "preflight": {"allow": ["*"]},
        "tokens": {"min_equal": 1.0, "tie_z": TIE},
    }
    report = msgspec.structs.replace(
        report, verdict=msgspec.structs.replace(report.verdict, kind="drift")
    )
    assert checked(report, **policy).passed
    without = compare(a, b)
    without = msgspec.structs.replace(
        without, verdict=msgspec.structs.replace(without.verdict, kind="drift")
    )
    assert {flip.z_of for flip in without.tokens.differences} == {"model"}
    assert {flip.judgement for flip in without.tokens.differences} == {"tie"}
    assert checked(without, **policy).passed
    unjudged = [
        msgspec.structs.replace(flip, z=0.1, z_of="difference", judgement=None)
        for flip in without.tokens.differences
    ]
    without = msgspec.structs.replace(
        without, verdict=msgspec.structs.replace(without.verdict, kind="within_floor")
    )
    without = msgspec.structs.replace(
        without, tokens=msgspec.structs.replace(without.tokens, differences=unjudged)
    )
    assert [failure.rule for failure in checked(without, **policy).failures] == ["tokens.min_equal"]


def test_a_fault_that_no_site_shows_is_no_pass(runs, monkeypatch):
    """What happens to the logits after the last recorded site shows in the token alone."""
    a, b, truth = runs
    other = Run.open(b.path)
    first = other.manifest.tokens.samples[0].chosen_ids[0]
    wrong = (first + 1) % 512
    other.manifest.tokens.samples[0].chosen_ids[0] = wrong
    read = flips.logits_row

    def pushed(run, sample, step):
        row = read(run, sample, step)
        if run is other and (sample, step) == (0, 0):
            row = wide(row).copy()
            row[wrong] = row.max() + 1
        return row

    for module in ("tokens.find", "ends.find"):
        monkeypatch.setattr(f"divergence.analyses.{module}.logits_row", pushed)
    verdict = compare(a, other, truth=truth).verdict
    assert (verdict.kind, verdict.side) == ("drift", "candidate")
    assert "flips over a gap" in verdict.summary
