"""Stand-outs are pointed at, never convicted; trusted runs and other settings are said as such."""

from functools import partial

import pytest

from divergence import capture, compare
from divergence import truth as make_truth
from divergence.errors import UsageError
from divergence.recording import api as storage
from divergence.recording.keeper import ReducedKeeper
from divergence.report.summary import report_lines
from tests.models.tiny import build

PROMPTS = ["The quick brown fox jumps over the lazy dog."]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A bfloat16 model of six blocks, and a healthy candidate with another attention kernel."""
    root = tmp_path_factory.mktemp("standouts")
    model = build("llama", root / "model", dtype="bfloat16", num_blocks=6)
    a = capture(str(model), out=root / "a", prompts=PROMPTS, max_new_tokens=2, device="cpu")
    b = capture(like=a, out=root / "b", device="cpu", attn_implementation="sdpa")
    return root, a, b


def scaled(root, a, size, name="planted", **options):
    plant = f"model.layers.3.mlp.down_proj:out=noise:{size}"
    return capture(
        like=a,
        out=root / name,
        force=True,
        device="cpu",
        plants=[plant],
        attn_implementation="sdpa",
        **options,
    )


def test_a_block_that_differs_more_than_its_siblings_is_noted_within_the_floor(pair):
    """Below every limit, and the only block that differs: within_floor, a note, the way inside."""
    root, a, _ = pair
    plant = "model.layers.3.mlp.down_proj:out=noise:0.01"
    b = capture(like=a, out=root / "coarse", device="cpu", plants=[plant])
    verdict = compare(a, b).verdict
    assert verdict.kind == "within_floor"
    told = [e.text for e in verdict.evidence if "than others of its kind" in e.text]
    assert told[0].startswith("model.layers.3:out")
    assert "first place to look" in told[0]
    assert verdict.confidence == "medium"
    assert "all of it in model.layers.3: the other blocks are equal" in verdict.summary
    assert any("--block model.layers.3" in command for command in verdict.next)


def test_a_fault_in_the_one_block_that_differs_is_sure_and_in_all_of_its_forwards(pair):
    """The other blocks are equal bit for bit: no other kernel excuses it, though it is near its
    limit; and no prompt or step is named where all rows together tell."""
    root, a, _ = pair
    plant = "model.layers.3.mlp.down_proj:out=noise:0.08"
    b = capture(like=a, out=root / "near", device="cpu", plants=[plant])
    verdict = compare(a, b).verdict
    assert verdict.onset is not None and verdict.onset.block == "model.layers.3", verdict
    (margin,) = [finding for finding in verdict.checks if finding.name == "clear"]
    assert margin.state == "met"
    assert "seen in" not in verdict.summary and " in step" not in verdict.summary


def test_a_healthy_pair_has_no_stand_out(pair):
    """Nothing to look at first."""
    _, a, b = pair
    verdict = compare(a, b).verdict
    assert verdict.kind == "within_floor"
    assert not [e for e in verdict.evidence if "siblings" in e.text]


def test_within_the_floor_says_what_would_raise_its_confidence(pair):
    """No truth, no escalated pass: both are named, and the commands for them printed."""
    _, a, b = pair
    report = compare(a, b)
    text = "\n".join(line.text for line in report_lines(report))
    assert "confidence  medium: no truth (divergence truth); no float32 check" in text
    assert any("--escalate" in command for command in report.verdict.next)
    assert any("divergence truth" in command for command in report.verdict.next)


@pytest.mark.slow
def test_other_settings_are_said_first(pair):
    """A float16 run against a bfloat16 one is no plain "no more than rounding"."""
    root, a, b = pair
    assert compare(a, b).verdict.summary.startswith("attention eager / sdpa: only rounding differs")
    c = capture(like=a, out=root / "c", device="cpu", dtype="float16")
    summary = compare(a, c).verdict.summary
    assert summary.startswith("dtype bfloat16 / float16; beyond that, ")


@pytest.mark.slow
def test_the_candidate_is_no_floor_for_itself(pair, monkeypatch):
    """Neither as that run, nor as another one with its very bits."""
    root, a, b = pair
    bad = scaled(root, a, 0.5, name="bad")
    again = scaled(root, a, 0.5, name="again")
    assert compare(a, bad).verdict.kind == "localized"
    with pytest.raises(UsageError, match="is B itself"):
        compare(a, bad, floor=[bad])
    with pytest.raises(UsageError, match="has the bits of B"):
        compare(a, bad, floor=[again])
    with pytest.raises(UsageError, match="is A itself"):
        compare(a, bad, floor=[a])
    descent, *others = compare(a, bad, floor=[b]).verdict.next
    assert "divergence localize" in descent and descent.endswith("it takes no --floor; or by hand:")
    comparisons = [command for command in others if command.startswith("divergence compare ")]
    assert comparisons and all(f"--floor {root / 'b'}" in command for command in comparisons)
    # digests of a device's kind alone, held against the candidate's bytes
    monkeypatch.setattr(storage, "ReducedKeeper", partial(ReducedKeeper, hosts=True))
    folded = scaled(root, a, 0.5, name="folded", store="sketch")
    with pytest.raises(UsageError, match="has the bits of B"):
        compare(a, bad, floor=[folded])


@pytest.mark.slow
def test_what_a_trusted_run_widened_is_said_with_numbers(pair):
    """From which limit to which, where most, and that the trusted run is beyond it itself."""
    root, a, b = pair
    loud = scaled(root, a, 0.5, name="loud")
    report = compare(a, b, floor=[loud])
    (note,) = [note for note in report.notes if "widened" in note]
    assert "model.layers.3:out" in note
    assert "beyond its limit" in note
    assert " to " in note
    quiet = compare(a, b, floor=[capture(like=a, out=root / "quiet", device="cpu")])
    assert any("none was widened" in note for note in quiet.notes)


@pytest.mark.slow
def test_all_blocks_farther_from_the_truth_stand_out_together(pair):
    """A kernel that is wrong everywhere has no healthy siblings: no side is called right."""
    root, a, b = pair
    plants = [f"model.layers.{n}:out=noise:0.0024" for n in range(5)]
    bad = capture(like=a, out=root / "everywhere", device="cpu", plants=plants)
    truth = make_truth(a, out=root / "truth")
    report = compare(a, bad, truth=truth)
    verdict = report.verdict
    assert verdict.kind in ("within_floor", "drift"), verdict  # what the blocks add up to shows too
    assert verdict.side != "neither"
    told = next(one for one in verdict.evidence if one.block is not None)
    assert "in 5 of 6 blocks" in told.text and "B is" in told.text
    assert 2.2 < told.values["times"] < 4
    assert verdict.confidence != "high"
    assert told.block == "model.layers.0"
    back = compare(bad, a, truth=truth).verdict
    assert "A is" in next(e.text for e in back.evidence if e.block is not None)
    assert [e for e in compare(a, b, truth=truth).verdict.evidence if e.block is not None] == []
