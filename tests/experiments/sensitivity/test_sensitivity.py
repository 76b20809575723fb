"""sensitivity(): the size that is found is the size from which a real fault is found."""

import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from divergence import RecordOptions, capture, compare, sensitivity
from divergence import truth as make_truth
from divergence.comparison.api import measure_runs
from divergence.comparison.preflight import preflight
from divergence.errors import IncomparableError, UsageError
from divergence.experiments.sensitivity import (
    FAULTS,
    Overlay,
    SensitivityTrials,
    faults_named,
    sees,
    smallest_seen,
)

PROMPT = "A bridge is built twice: once on paper, where every beam is exact, and once in steel."
MIDDLE = "model.layers.2"
GRID = 1.1
"""Sizes are found to 9 %."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    """``runs(dtype)`` → (a run, a healthy candidate on other kernels, the truth)."""

    @functools.cache
    def make(dtype):
        folder = tmp_path_factory.mktemp(dtype)
        model = str(tiny_model("llama", dtype=dtype, num_blocks=4))
        a = capture(model, out=folder / "a", prompts=[PROMPT], max_new_tokens=2)
        b = capture(
            like=a,
            out=folder / "b",
            attn_implementation="sdpa",
            recording=RecordOptions(escalate=dtype != "float32"),
        )
        return a, b, make_truth(a, out=folder / "truth")

    return make


@pytest.fixture(scope="module")
def found(runs):
    """``found(dtype, truth)`` → the sensitivity to two faults in two blocks."""

    @functools.cache
    def ask(dtype, with_truth=False):
        a, b, truth = runs(dtype)
        return sensitivity(
            a,
            candidate=b,
            truth=truth if with_truth else None,
            blocks=["first", "middle"],
            faults=["scale", "noise"],
        )

    return ask


@pytest.mark.slow
def test_bfloat16_hides_what_float32_shows(found):
    """Every fault has a size in either, and the 16-bit one is a thousand times larger."""
    narrow, wide = found("bfloat16"), found("float32")
    assert len(narrow.sizes) == len(wide.sizes) == 4
    for one, other in zip(narrow.sizes, wide.sizes, strict=True):
        assert (one.block, one.fault) == (other.block, other.fault)
        assert 1e-4 < one.size < 0.1
        assert 1e-8 < other.size < 1e-5
        assert one.size > 1000 * other.size
        assert one.by and one.escalated_size is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_truth_sees_no_less(found, dtype):
    """The difference of differences is at least as sharp as the rounding model."""
    without, having = found(dtype), found(dtype, True)
    for one, other in zip(having.sizes, without.sizes, strict=True):
        assert one.size <= GRID * other.size
    assert sum(one.size for one in having.sizes) < sum(one.size for one in without.sizes)


@pytest.mark.slow
def test_the_escalated_pass_sees_deeper(found):
    """In float32 the same fault of formula is seen three orders below the floor of bfloat16."""
    result = found("bfloat16", True)
    assert result.escalated
    assert all(one.escalated_size < 1e-3 * one.size for one in result.sizes)
    assert not found("float32", True).escalated


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["scale", "noise"])
def test_a_real_plant_agrees(runs, found, dtype, fault, answer):
    """Half as large again is localized by the ordinary compare; a third is rounding to it."""
    a, b, _ = runs(dtype)
    size = next(s.size for s in found(dtype).of(fault) if s.block == MIDDLE)
    for factor, expected in ((1.5, True), (0.3, False)):
        planted = FAULTS[fault].spelled(factor * size, 0, 64)
        verdict = answer(
            a,
            force=True,
            plants=[f"{MIDDLE}:out={planted}"],
            attn_implementation=b.manifest.model.attn_implementation,
        ).verdict
        assert sees(verdict, MIDDLE) is expected, verdict.summary
        if not expected:
            assert verdict.kind == "within_floor"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trial_is_what_compare_says_of_a_real_plant(runs, tmp_path, dtype):
    """Same summary, same onset, same numbers, though no model ran for the trial."""
    a, b, truth = runs(dtype)
    faulty = capture(
        like=a,
        out=tmp_path / "planted",
        plants=[f"{MIDDLE}:out=noise:0.02"],
        attn_implementation=b.manifest.model.attn_implementation,
    )
    for right in (None, truth):
        trials = SensitivityTrials(measure_runs(a, b, preflight(a, b), truth=right))
        tried = trials.verdict_with(MIDDLE, FAULTS["noise"], 0.02)
        real = compare(a, faulty, truth=right).verdict
        assert (tried.kind, tried.summary, tried.onset) == (real.kind, real.summary, real.onset)
        assert tried.evidence[0] == real.evidence[0]


@pytest.mark.slow
def test_without_a_candidate_one_is_made_and_removed(runs, monkeypatch, tmp_path):
    """By other attention kernels, in a folder that is gone afterwards; real plants agree."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    a, *_ = runs("float32")
    seen = []
    result = sensitivity(
        a,
        blocks=["middle"],
        faults=["scale", "update-scale"],
        confirm=True,
        progress=lambda event, *_: seen.append(event),
    )
    assert result.made_here
    assert any("other attention kernels: sdpa" in note for note in result.notes)
    assert "not planted for real: update-scale" in result.notes
    assert [(one.fault, one.expected, one.seen) for one in result.confirmations] == [
        ("scale", True, True),
        ("scale", False, False),
    ]
    assert list(tmp_path.iterdir()) == []
    assert {"anchored", "plant"} <= set(seen)
    assert result.next[1] == f"divergence sensitivity {a.path} --truth {a.path}-truth"


def test_an_interrupted_capture_leaves_nothing_behind(runs, monkeypatch, tmp_path):
    """Ctrl-C while the candidate is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt(event, *_):
        if event == "anchored":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sensitivity(runs("float32")[0], progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_json_is_versioned_and_complete(found):
    """All that is printed is in it, in plain numbers."""
    answer = json.loads(found("bfloat16", True).to_json())
    assert answer["schema_version"] == 1
    assert (answer["blocks"], answer["num_blocks"]) == (["model.layers.0", MIDDLE], 4)
    assert set(answer["sizes"][0]) == {
        "block",
        "fault",
        "size",
        "tried",
        "evidence",
        "by",
        "escalated_size",
        "escalated_evidence",
        "escalated_by",
        "why",
        "reason",
    }
    assert {"verdict", "truth", "units", "phrases", "next", "num_trials", "dtype"} <= set(answer)


@pytest.mark.slow
def test_what_would_see_more_is_a_command(runs, found):
    """bfloat16 without an escalated pass: that and the truth; with both, nothing of the kind."""
    a, b, _ = runs("bfloat16")
    escalate, truth, again = found("bfloat16").next[:3]
    assert f"capture --like {a.path} -o {b.path}-escalated --escalate" in escalate
    assert f"truth {a.path} -o {a.path}-truth" in truth
    assert again == (
        f"divergence sensitivity {a.path} --candidate {b.path}-escalated --truth {a.path}-truth"
    )
    assert not any("--escalate" in line for line in found("bfloat16", True).next)


# --- what is refused ---------------------------------------------------------------------------


def test_a_faulty_pair_is_refused_with_its_verdict(runs, tmp_path):
    """Sizes on top of a fault would mean nothing."""
    a, *_ = runs("float32")
    faulty = capture(like=a, out=tmp_path / "faulty", plants=[f"{MIDDLE}:out=scale:1.1"])
    with pytest.raises(UsageError, match=f"localized: the error is made at {MIDDLE}:out") as caught:
        sensitivity(a, candidate=faulty)
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="carries planted faults"):
        sensitivity(faulty, candidate=a)


def test_a_candidate_needs_an_anchored_pass(runs, tmp_path):
    """In a free run a fault would spread to what follows."""
    a, *_ = runs("float32")
    free = capture(like=a, out=tmp_path / "free", recording=RecordOptions(anchor=False))
    with pytest.raises(UsageError, match="no anchored pass"):
        sensitivity(a, candidate=free)


def test_other_weights_are_incomparable(runs, tiny_model, tmp_path):
    """Nothing is planted in a pair of two models."""
    a, *_ = runs("float32")
    other = str(tiny_model("llama", dtype="float32", num_blocks=4, seed=1))
    candidate = capture(other, like=a, out=tmp_path / "other")
    with pytest.raises(IncomparableError, match="not the same experiment: other weights"):
        sensitivity(a, candidate=candidate)


def test_block_outputs_are_needed(llama, tmp_path):
    """A run without them is refused."""
    head = capture(str(llama), out=tmp_path / "a", sites=["lm_head:*"], max_new_tokens=1)
    with pytest.raises(UsageError, match="holds no block outputs"):
        sensitivity(head)


def test_unknown_words_are_named_before_anything_is_captured(runs):
    """With the nearest block or fault."""
    a, *_ = runs("float32")
    with pytest.raises(UsageError, match="no block 'lst'") as caught:
        sensitivity(a, blocks=["lst"])
    assert "did you mean last?" in caught.value.hint
    with pytest.raises(UsageError, match="no block '99'"):
        sensitivity(a, blocks=["99"])
    with pytest.raises(UsageError, match="'scales'") as caught:
        sensitivity(a, faults=["scales"])
    assert "did you mean scale?" in caught.value.hint
    with pytest.raises(UsageError, match="no fault to plant"):
        faults_named([])


# --- the parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [None, 1e-8, 3e-6, 0.02, 1.0])
def test_search_finds_the_size_to_nine_per_cent(guess):
    """Wherever it begins; a good guess costs few trials."""
    tried = []
    found = smallest_seen(lambda s: tried.append(s) or s >= 0.0123, high=1.0, guess=guess)
    assert 0.0123 <= found <= 0.0123 * GRID
    assert len(tried) == len(set(tried)) <= 20


def test_search_says_when_nothing_is_seen():
    """None, or the bound that was reached."""
    assert smallest_seen(lambda s: False, high=1.0) is None
    assert smallest_seen(lambda s: True, high=1.0) == 1e-8
    assert smallest_seen(lambda s: s >= 1, high=1.0, guess=1e-3) == 1.0


def test_search_goes_above_a_hole():
    """Seen at 1e-5, but not at twice to four times that: the larger size is the answer."""
    found = smallest_seen(lambda s: s >= 1e-5 and not 1.5e-5 < s < 4.5e-5, high=1.0, guess=1e-5)
    assert 4.5e-5 <= found <= 4.5e-5 * GRID


def test_update_scale_scales_what_is_added():
    """out = in + (1 + s)(out - in), rounded once."""
    entering, out = torch.tensor([[1.0, -2.0, 100.0]]), torch.tensor([[2.0, -2.0, 90.0]])
    faulty = FAULTS["update-scale"].apply(
        out, 0.5, site="block:out", entering=entering, channel=0, forward=0
    )
    assert faulty.tolist() == [[2.5, -2.0, 85.0]]


def test_overlay_reads_changed_and_unchanged_tensors(runs):
    """Only what is changed is other, and its checksum with it."""
    a, *_ = runs("float32")
    first, second = a.records[:2]
    overlay = Overlay(a, [(first, a.read(first) * 2)])
    changed = overlay.find(first.coordinates)
    assert changed.xxh3 != first.xxh3
    assert torch.equal(overlay.read(changed), a.read(first) * 2)
    assert overlay.find(second.coordinates) is second
    assert torch.equal(overlay.read(second), a.read(second))
    assert Path(overlay.path) == a.path
