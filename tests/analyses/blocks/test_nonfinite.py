"""Nan and inf in the verdict: which place, which side, and equal bits that are no result."""

import math

import pytest
import torch

import divergence.recording.engines.sessions as api
from divergence import BatchOptions, capture, compare
from divergence.comparison.result import NonfiniteCount
from tests.by_hand import measured

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Snow fell"]


@pytest.fixture
def healthy(shared_run):
    return shared_run(model={"dtype": "float32"}, prompts=PROMPTS, max_new_tokens=2)


@pytest.fixture
def faulty(healthy, tmp_path, monkeypatch):
    """``faulty(path, at, value)`` → the run again, where the module's output is ``value`` at
    ``at``."""
    count = 0

    def make(path, at, value, *, like=None):
        nonlocal count
        count += 1
        load = api.load_model

        def changed(*args, **options):
            loaded = load(*args, **options)

            def hook(module, inputs, output):
                if not isinstance(at[1], int) or at[1] < output.shape[1]:
                    output[at] = value

            loaded.module.get_submodule(path).register_forward_hook(hook)
            return loaded

        with monkeypatch.context() as patch:
            patch.setattr(api, "load_model", changed)
            return capture(like=like or healthy, out=tmp_path / f"run-{count}")

    return make


def test_nan_at_other_places(healthy, faulty):
    """Two sides with one nan each, at different tokens: both are wrong where the other is not."""
    one = faulty("model.layers.1", (0, 1, 5), math.nan)
    two = faulty("model.layers.1", (0, 1, 6), math.nan)
    verdict = compare(one, two).verdict
    assert (verdict.kind, verdict.side) == ("nonfinite", "both")
    assert verdict.onset.site == "model.layers.1:out"
    assert "each where the other has a number" in verdict.summary


def test_inf_of_the_other_sign(healthy, faulty):
    """+inf against -inf at one place: counts are equal, and no side is named."""
    one = faulty("model.layers.2", (0, 1, 5), math.inf)
    two = faulty("model.layers.2", (0, 1, 5), -math.inf)
    verdict = compare(one, two).verdict
    assert (verdict.kind, verdict.side) == ("nonfinite", None)
    assert verdict.onset.site == "model.layers.2:out"
    assert "sign" in verdict.summary


@pytest.mark.slow
def test_more_nan_on_one_side(healthy, faulty):
    """Both have some, one has more: the one with nan where the other has a number is named."""
    one = faulty("model.layers.1", (0, slice(0, 1), 5), math.nan)
    two = faulty("model.layers.1", (0, slice(0, 2), 5), math.nan)
    verdict = compare(one, two).verdict
    assert (verdict.kind, verdict.side) == ("nonfinite", "candidate")
    assert "fewer" in verdict.summary
    looks = [item.operands[0] for item in verdict.commands if item.name == "inspect"]
    assert looks == [str(two.path), str(one.path)]  # the wrong side's tensor first
    assert compare(two, one).verdict.side == "reference"


@pytest.mark.slow
def test_a_run_of_nan_is_identical_to_nothing(healthy, faulty, bless, tmp_path):
    """Equal bits that are nan: nonfinite on both sides, said by capture, refused as a golden."""
    everything = (slice(None), slice(None), slice(None))
    one = faulty("model.embed_tokens", everything, math.nan)
    again = faulty("model.embed_tokens", everything, math.nan, like=one)
    verdict = compare(one, again).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("nonfinite", "both", "high")
    assert verdict.onset.site == "model.embed_tokens:out"
    assert "nan and 0 inf" in bless(tmp_path / "golden", one.path)
    assert bless(tmp_path / "golden", one.path, "--allow-nonfinite")["golden"]


@pytest.mark.slow
def test_nan_in_the_logits_of_both(healthy, faulty):
    """The last place counts like any other."""
    one = faulty("lm_head", (0, -1, 7), math.nan)
    verdict = compare(one, faulty("lm_head", (0, -1, 7), math.nan)).verdict
    assert (verdict.kind, verdict.side) == ("nonfinite", "both")
    assert verdict.onset.site == "lm_head:out"


def test_capture_says_that_a_run_is_nan(healthy, faulty, monkeypatch, tmp_path):
    """A note names the first place, so that nobody stores such a run unknowingly."""
    notes = []
    capture(
        like=healthy,
        out=tmp_path / "noted",
        plants=["model.layers.1:out=nan"],
        progress=lambda event, done, total, text: notes.append(text) if event == "note" else None,
    )
    (note,) = [text for text in notes if "no usable run" in text]
    assert "model.layers.1:out (sample 0, step 0)" in note


@pytest.mark.slow
def test_nan_that_enters_between_blocks_is_the_sides_that_has_it(healthy, faulty, tmp_path, answer):
    """Anchored inputs would show it on both sides from the next block on: the free pass tells."""
    bad = capture(like=healthy, out=tmp_path / "bad", plants=["model.layers.2:in=nan:1"])
    verdict = answer(bad).verdict
    assert (verdict.kind, verdict.side) == ("nonfinite", "reference")
    assert verdict.onset.site == "model.layers.2:in"


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_infinities_of_a_mask_are_no_fault(padded, healthy, answer, shared_run):
    """-inf in a mask is equal on both sides, and it is no result of a block."""
    run = shared_run(
        "gpt2",
        model={"dtype": "float32"},
        prompts=PROMPTS,
        max_new_tokens=2,
        batching=BatchOptions(batch=padded),
        sites=["modules"],
    )
    assert answer(run).verdict.kind == "identical"


ALONE = {"reference_inf": 5, "reference_neginf": 5, "differ": 5, "reference_alone": 5}
NEVER = ALONE | {"mask_alike": 5}
EQUAL = {f"{side}_{what}": 2 for side in ("reference", "candidate") for what in ("inf", "neginf")}
INFINITIES = {
    "a mask that means never otherwise": ("h.0:in.attention_mask", NEVER, None),
    "a mask that is another": ("h.0:in.attention_mask", ALONE, "reference"),
    "an overflow": ("h.0:in", NEVER, "reference"),
    "equal ones of a mask": ("h.0:in.attention_mask", EQUAL, None),
    "equal ones that a block hands on": ("h.0:in", EQUAL, "both"),
}


@pytest.mark.parametrize("case", INFINITIES)
def test_masks_are_told_from_results(judged, case):
    """-inf is a mask's right, equal or against a number that means never; elsewhere it is an
    overflow."""
    name, counts, side = INFINITIES[case]
    site = measured(name, 0.5, nonfinite=NonfiniteCount(**counts), role="block")
    verdict = judged([site]).verdict
    assert (verdict.kind == "nonfinite") == (side is not None)
    assert verdict.side == side or side is None


@pytest.mark.slow
def test_padding_may_be_nan(healthy, faulty, tmp_path, shared_run):
    """Rows that a batch added hold anything, equal on both sides or not."""
    run = shared_run(
        model={"dtype": "float32"},
        prompts=PROMPTS,
        max_new_tokens=2,
        batching=BatchOptions(batch=True),
    )
    short = min(range(2), key=lambda n: len(run.manifest.tokens.samples[n].prompt_ids))
    assert run.manifest.tokens.samples[short].num_left_pad > 0

    def noted(text):
        assert "no usable run" not in text

    load = api.load_model

    def changed(*args, **options):
        loaded = load(*args, **options)

        def hook(module, inputs, output):
            if output.shape[1] > 1:
                output[short, 0] = math.nan

        loaded.module.model.norm.register_forward_hook(hook)
        return loaded

    api.load_model = changed
    try:
        one, two = (
            capture(
                like=run,
                out=tmp_path / name,
                progress=lambda event, done, total, text: noted(text) if event == "note" else None,
            )
            for name in ("b", "c")
        )
    finally:
        api.load_model = load
    assert torch.isnan(one.read(one.find(("free", 0, 0, "model.norm:out")))).any()
    assert compare(one, two).verdict.kind == "identical"
    assert compare(run, two).verdict.kind == "within_floor"
