"""--pad-right: pads behind each prompt, and the logits of each prompt's own last token."""

import pytest

from divergence import BatchOptions, capture, compare, truth
from divergence.errors import UsageError

PROMPTS = ["A bridge is built twice: once on paper", "Hello there", "one"]


@pytest.fixture
def base(shared_run):
    """A run of three prompts of unequal lengths, each by itself."""
    return shared_run(dtype="float32", prompts=PROMPTS, max_new_tokens=3, probe=False)


@pytest.mark.parametrize("batch", [False, True])
def test_each_prompt_is_compared_without_its_pads(base, tmp_path, batch):
    """Tensors and tokens of each prompt agree, by itself and in a batch."""
    b = capture(
        like=base, out=tmp_path / "b", batching=BatchOptions(pad_right=2, batch=batch), probe=False
    )
    report = compare(base, b)

    lengths = [(len(one.prompt_ids), one.num_right_pad) for one in b.manifest.tokens.samples]
    longest = max(length for length, _ in lengths)
    assert all(pads == 2 + batch * (longest - length) for length, pads in lengths)
    assert report.verdict.kind in ("identical", "within_floor")
    assert (report.tokens.num_tokens, report.tokens.num_equal) == (3, 3)
    assert not [one for one in report.coverage.unmatched if one.step == 0]
    assert {one.step for one in report.sites} == {0}
    heads = [one for one in report.sites if one.site == "lm_head:out"]
    assert {(one.sample, one.pass_) for one in heads} == {
        (number, pass_) for number in range(3) for pass_ in ("free", "anchored")
    }


@pytest.mark.slow
def test_a_padded_run_has_a_truth_and_is_repeated(base, tmp_path, answer):
    """With its layout, and alone without."""
    b = capture(
        like=base, out=tmp_path / "b", batching=BatchOptions(pad_right=2, batch=True), probe=False
    )
    again = capture(like=b, out=tmp_path / "again", probe=False)
    right = truth(b, out=tmp_path / "truth")

    assert again.manifest.tokens.layout == b.manifest.tokens.layout
    assert compare(b, again, truth=right).verdict.kind == "identical"
    report = answer(b, batching=BatchOptions(batch=False))
    assert report.verdict.kind in ("identical", "within_floor") and report.tokens.num_equal == 3


def test_a_fault_is_found_behind_pads(base, answer):
    """At its block."""
    assert (
        answer(
            base,
            batching=BatchOptions(pad_right=3, batch=True),
            plants=["model.layers.1:out=scale:1.01"],
        ).verdict.onset.block
        == "model.layers.1"
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pad_left": 2}, "both place the pads"),
        ({"max_new_tokens": 2}, "no token follows the pads"),
        ({"prefill_chunk": 2}, "in chunks"),
        ({"positions": "last:2"}, "count from the pads' end"),
    ],
)
def test_what_does_not_go_with_it(base, tmp_path, options, match):
    """Options that contradict it are refused."""
    with pytest.raises(UsageError, match=match):
        capture(like=base, out=tmp_path / "b", batching=BatchOptions(pad_right=2), **options)


def test_it_repeats_a_run(tmp_path, llama):
    """Pads on the right are for a run that repeats another."""
    with pytest.raises(UsageError, match="--pad-right needs --like"):
        capture(llama, out=tmp_path / "b", batching=BatchOptions(pad_right=2))
