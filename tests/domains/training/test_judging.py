"""Two curves of losses: noise is no alarm, a drift is found near where it begins."""

import json
import math

import numpy as np
import pytest

from divergence import compare_losses

NUM_STEPS = 1000


def curve(rng, n=NUM_STEPS):
    return 2 + 3 * np.exp(-np.arange(n) / (n / 5)) + 0.1 * rng.normal(size=n)


@pytest.fixture
def report(tmp_path):
    """``report(a, b)``: what is said of two curves, each values or step → value, as files."""

    def compared(*curves, **options):
        for name, values in zip("ab", curves, strict=True):
            steps = values if isinstance(values, dict) else dict(enumerate(map(float, values)))
            rows = (json.dumps({"step": step, "loss": steps[step]}) for step in steps)
            (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
        return compare_losses(tmp_path / "a.jsonl", tmp_path / "b.jsonl", **options)

    return compared


def pair(diffs, seed=0):
    a = curve(np.random.default_rng(seed), len(diffs))
    return a, a * (1 + diffs)


def noise(seed=0, n=NUM_STEPS, size=3e-3):
    return size * np.random.default_rng(1000 + seed).normal(size=n)


def test_equal_curves_are_identical(report):
    """All of them, and no other word."""
    a = curve(np.random.default_rng(0))
    found = report(a, a)
    assert found.verdict.kind == "identical"
    assert found.metrics[0].num_equal == found.metrics[0].num_steps == NUM_STEPS - 100


@pytest.mark.slow
@pytest.mark.parametrize("num_pairs", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["independent", "growing", "spiky"])
def test_rounding_noise_raises_no_alarm(shape, num_pairs, report):
    """Of 1000 pairs at most 0.3% are apart: the limit is that of 0.1%."""
    rng, alarms = np.random.default_rng(5), 0
    for _ in range(num_pairs):
        diffs = {
            "independent": lambda: 1e-3 * rng.normal(size=300),
            "growing": lambda: 1e-5 * rng.normal(size=300) * np.exp(np.linspace(0, 6, 300)),
            "spiky": lambda: 1e-3 * rng.standard_t(3, size=300),
        }[shape]()
        found = report(*pair(diffs))
        alarms += found.metrics[0].trend.state == "parts" or found.verdict.kind != "aligned"
        alarms += found.metrics[0].jump_at is not None
    assert alarms <= 3 * num_pairs // 1000


@pytest.mark.slow
@pytest.mark.parametrize("start", [200, 500, 800])
def test_a_drift_is_found_near_its_step(start, report):
    """A straight line to 3%, in noise of 0.3%."""
    at = []
    for seed in range(10):
        diffs = noise(seed)
        diffs[start:] += np.linspace(0, 0.03, NUM_STEPS - start)
        found = report(*pair(diffs, seed))
        assert found.verdict.kind == ("drift" if start > 200 else found.verdict.kind)
        assert found.metrics[0].trend.state == "parts"
        at.append(found.metrics[0].trend.parts_at)
    assert abs(np.median(at) - start) < 30
    assert max(abs(one - start) for one in at) < 100


def test_an_offset_from_the_start_says_so(report):
    """3% all along is misaligned, by the rule of thumb."""
    verdict = report(*pair(noise() + 0.03)).verdict
    assert verdict.kind == "misaligned"
    assert "from the start" in verdict.summary


def test_a_small_offset_is_a_place_to_look(report):
    """0.3% all along stands out of the noise, and is far below the bands."""
    found = report(*pair(noise() + 0.003))
    assert found.verdict.kind == "aligned"
    assert "a place to look" in found.verdict.summary


@pytest.mark.parametrize("steps", [slice(300, 301), slice(-5, None)])
def test_a_spike_is_a_place_to_look(steps, report):
    """In the middle, or where a run leaves at its very end: too few steps for a trend."""
    diffs = np.zeros(400)
    diffs[steps] = 0.15
    verdict = report(*pair(diffs)).verdict
    assert verdict.kind == "aligned"
    assert "a place to look: step 3" in verdict.summary and "is off by 15.00%" in verdict.summary


@pytest.mark.parametrize(
    ("before", "after", "at", "digits", "kind"),
    [
        pytest.param(8e-8, 1e-3, 150, 17, "drift", id="float32 kernels, then a lost gradient"),
        pytest.param(0.0, 1e-3, 150, 17, "drift", id="bit for bit, then a lost gradient"),
        pytest.param(3e-5, 4e-3, 150, 17, "drift", id="bfloat16 kernels"),
        pytest.param(0.0, 4e-3, 150, 4, "drift", id="logs of four decimals"),
        pytest.param(8e-8, 1e-3, 20, 17, "drift", id="within the warm-up"),
        pytest.param(0.0, 1e-4, 2, 17, "aligned", id="another beta2, from the second update on"),
    ],
)
def test_the_first_step_beyond_the_logs_own_agreement_is_named(
    before, after, at, digits, kind, report
):
    """However small the mean error is; of few steps that agreed it is a place to look."""
    diffs = noise(n=300, size=1.0)
    diffs *= np.where(np.arange(300) < at, before, after)
    diffs[at] = after
    found = report(*(np.round(side, digits) for side in pair(diffs)))
    assert found.verdict.kind == kind, found.verdict
    assert found.metrics[0].jump_at == at
    assert f"step {at} is off by" in found.verdict.summary


@pytest.mark.parametrize(
    "diffs",
    [
        pytest.param(1e-7 * 1.25 ** np.minimum(np.arange(300.0), 40), id="chaos"),
        pytest.param(np.where(np.arange(300) == 150, 0.1, 0.0), id="a spike"),
        pytest.param(np.where(np.arange(300) < 150, 1e-4, 5e-4), id="within ten times"),
        pytest.param(np.where(np.arange(300) < 1, 0.0, 1e-5), id="one step before"),
    ],
)
def test_what_grows_or_passes_is_no_first_step(diffs, report):
    """Two healthy trainings go apart step by step, and a spike ends."""
    sign = np.sign(noise(n=300))
    found = report(*pair(diffs * sign))
    assert found.metrics[0].jump_at is None and found.verdict.kind == "aligned", found.verdict


def test_noise_of_single_steps_is_no_misalignment(report):
    """A mean error of 2.4% about 0: abstains, and says that it is noise."""
    found = report(*pair(noise(size=0.03)))
    assert found.metrics[0].mean_error > 0.02
    assert found.verdict.kind == "undetermined"
    assert "noise of single steps" in found.verdict.summary


def test_few_steps_tell_no_trend(report):
    """Abstains; a gross offset is named all the same."""
    assert report(*pair(noise(n=30))).verdict.kind == "undetermined"
    assert "64 are needed" in report(*pair(noise(n=30))).verdict.summary
    assert report(*pair(noise(n=30) + 0.1)).verdict.kind == "misaligned"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_on_one_side_is_a_verdict(value, report):
    """With its side and step."""
    a, b = pair(noise())
    b[400] = value
    found = report(a, b)
    assert found.verdict.kind == "nonfinite"
    assert "of B is nan or inf at step 400" in found.verdict.summary
    assert found.metrics[0].last_step == 399


def test_a_nan_on_both_sides_is_one_too(report):
    """A training that failed on both machines is not aligned."""
    a, b = pair(noise())
    a[400] = b[400] = math.nan
    assert report(a, b).verdict.kind == "nonfinite"


def test_missing_steps_and_other_lengths_are_counted(report):
    """What is in one file alone is no evidence, and is said."""
    a, b = pair(noise())
    short = {step: float(value) for step, value in enumerate(b[:900]) if step % 7}
    found = report(a, short)
    assert found.verdict.kind == "aligned"
    assert "A has 1,000 steps, B 771, of which 771 are in both" in found.notes
    assert "A goes on to step 999" in found.notes[1]


def test_no_common_step_is_no_answer(report):
    """Nothing was compared."""
    found = report({1: 2.0, 3: 2.0}, {2: 2.0, 4: 2.0})
    assert found.verdict.kind == "undetermined"
    assert found.metrics[0].num_steps == 0


def test_means_over_other_numbers_of_steps_are_not_compared(report):
    """One value in ten steps may be their mean."""
    a, b = pair(noise())
    rare = {step: float(b[step]) for step in range(0, NUM_STEPS, 10)}
    verdict = report(a, rare).verdict
    assert verdict.kind == "undetermined"
    assert "every 10" in verdict.summary


def test_the_warm_up_is_left_out(report):
    """A tenth, at most 100 steps, or as asked."""
    diffs = noise()
    diffs[:100] += 0.5
    assert report(*pair(diffs)).verdict.kind == "aligned"
    assert report(*pair(diffs), warmup_steps=0).verdict.kind != "aligned"
    found = report(*pair(diffs), warmup_steps=250)
    assert (found.warmup_steps, found.metrics[0].first_step) == (250, 250)


def test_a_gradient_norm_is_shown_and_not_judged(tmp_path):
    """The rule of thumb is of the loss."""
    for name, losses, norm in zip("ab", pair(noise()), (1.0, 9.0), strict=True):
        rows = [{"step": step, "loss": float(loss)} for step, loss in enumerate(losses)]
        rows[1]["grad_norm"] = norm
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = compare_losses(tmp_path / "a.jsonl", tmp_path / "b.jsonl", warmup_steps=0)
    assert found.verdict.kind == "aligned"
    assert found.metrics[1].max_error == 8.0
