"""What is captured again must repeat the run it stands for; else nothing is concluded from it."""

import json
import shlex
import shutil

import msgspec
import pytest

from divergence import RecordOptions, Run, capture, compare, localize, sensitivity
from divergence import truth as make_truth
from divergence.errors import UsageError
from divergence.experiments.explain import explain_token
from divergence.experiments.localization.repetition import check_repetition, check_substituted
from divergence.facts import worded
from divergence.numerics.sketches import fold_tensor
from tests.digests import without_digests

BLOCK = "model.layers.1"
PROMPT = "one two three four"


def faulty_mlp(model):
    """A machine whose kernel is off in one place, which no field of a run tells."""
    mlp = model.get_submodule(f"{BLOCK}.mlp")
    healthy = mlp.forward
    mlp.forward = lambda x: healthy(x) * 1.03


def other_rounding(model):
    """A healthy machine with other kernels."""
    for block in model.model.layers:
        block.mlp.register_forward_hook(lambda _, __, out: out * (1 + 3e-7))


def other_head(model):
    """Another model's head: it chooses other tokens."""
    model.lm_head.weight.data.neg_()


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """a, its repeat, what a faulty machine makes of it, and the truth."""
    folder = tmp_path_factory.mktemp("repetition")
    a = capture(llama, out=folder / "a", prompts=[PROMPT], dtype="float32", max_new_tokens=2)
    capture(like=a, out=folder / "again")
    capture(like=a, out=folder / "b", prepare=faulty_mlp)
    make_truth(a, out=folder / "truth")
    return folder


def rewritten(run: Run, out, **repeatability):
    """A copy of the run that tells something else of its repeats."""
    shutil.copytree(run.path, out)
    without_digests(out)
    text = json.loads((out / "manifest.json").read_text())
    text["repeatability"] = repeatability
    (out / "manifest.json").write_text(json.dumps(text))
    return Run.open(out)


def test_the_same_machine_repeats_every_bit(runs):
    """All shared tensors of both passes are held against each other, also of a shorter run."""
    again = Run.open(runs / "again")
    short = capture(like=runs / "a", out=runs / "short", max_new_tokens=1)
    for made in (again, short):
        found = check_repetition(made, Run.open(runs / "a"), name="again", side="reference")
        assert (found.how, found.num_different) == ("bits", 0)
        assert found.met
    assert check_repetition(again, short, name="again", side="candidate").num_compared > 8


def test_another_machine_does_not_and_the_block_is_named(runs):
    """The anchored pass comes first: there only the faulty block's output differs."""
    b = Run.open(runs / "b")
    found = check_repetition(Run.open(runs / "again"), b, name="again", side="candidate")
    assert (found.how, found.site, found.pass_) == ("differs", f"{BLOCK}:out", "anchored")
    assert 1e-4 < found.rel_l2 < 0.1
    assert not found.met


def test_runs_that_were_fed_other_tokens_share_only_what_comes_before(runs, llama, tmp_path):
    """A capture of its own chose another token: its prefill is shared, its decode step is not."""
    b = capture(
        llama,
        out=tmp_path / "b",
        prompts=[PROMPT],
        dtype="float32",
        max_new_tokens=2,
        prepare=other_head,
    )
    a = Run.open(runs / "a")
    assert b.manifest.tokens.samples[0].generated_ids != a.manifest.tokens.samples[0].generated_ids
    found = check_repetition(a, b, name="a", side="candidate")
    assert {found.step, found.site} == {0, "lm_head:out"}
    other = capture(llama, out=tmp_path / "c", prompts=["five six"], max_new_tokens=1)
    assert check_repetition(a, other, name="a", side="candidate").how == "unknown"


def test_a_machine_that_is_known_not_to_repeat_is_held_to_its_error(runs, tmp_path):
    """Its recorded repeats differed: the same error against the truth is enough, another is not."""
    truth = Run.open(runs / "truth")
    noisy = capture(like=runs / "a", out=tmp_path / "n", plants=[f"{BLOCK}:out=noise:0.01:1"])
    same = capture(like=runs / "a", out=tmp_path / "s", plants=[f"{BLOCK}:out=noise:0.01:2"])
    own = rewritten(noisy, tmp_path / "own", num_runs=2, num_compared=30, num_different=5)
    options = {"name": "made", "side": "candidate", "truth": truth, "block": BLOCK}
    assert check_repetition(same, noisy, **options).how == "differs"
    found = worded(check_repetition(same, own, **options))
    assert (found.how, found.met) == ("error", True)
    assert "its own repeats differed in 5 of 30" in found.reason
    healthy = Run.open(runs / "again")
    assert check_repetition(healthy, own, **options).how == "differs"


@pytest.mark.slow
def test_what_comes_before_a_substitute_must_repeat(runs, tmp_path):
    """And the other blocks, whose inputs were given; what comes after it may differ."""
    sites = ["blocks", f"ops@{BLOCK}"]
    made = capture(like=runs / "a", out=tmp_path / "made", sites=sites)
    b = capture(like=runs / "a", out=tmp_path / "b", sites=sites, prepare=faulty_mlp)
    site = f"{BLOCK}.mlp.act_fn/aten.silu:out"
    run = capture(
        like=runs / "a",
        out=tmp_path / "sub",
        sites=sites,
        prepare=faulty_mlp,
        recording=RecordOptions(substitutes={site: made}),
    )
    check = {"site": site, "block": BLOCK, "name": "sub"}
    assert check_substituted(run, b, **check).how == "bits"
    early = capture(
        like=runs / "a",
        out=tmp_path / "early",
        sites=sites,
        plants=["model.layers.0:out=scale:1.01"],
    )
    assert check_substituted(early, b, **check).site == "model.layers.0:out"


@pytest.mark.slow
def test_localize_stops_on_a_machine_that_is_not_the_candidates(runs, tmp_path, lines_of):
    """Nothing is named or proven, what was captured is gone, and the command for there is given."""
    work = tmp_path / "work"
    result = localize(runs / "a", runs / "b", truth=runs / "truth", out=work)
    assert (result.operator, result.causal, result.refused) == (None, None, True)
    assert "this is not B's machine" in result.stopped
    assert f"{BLOCK}:out differs, rel L2" in result.stopped
    assert not (work / "candidate-operators").exists()
    lines = lines_of(result, "-q")
    assert lines[0].startswith("STOPPED: this is not B's machine")
    assert lines[1].strip() == "run there:"
    assert lines[2].startswith("  divergence capture --like")
    there = localize(
        runs / "a", runs / "b", truth=runs / "truth", out=work, prepare_candidate=faulty_mlp
    )
    assert there.operator is not None
    assert {one.run: one.how for one in there.repetitions} == dict.fromkeys(
        ("reference-operators", "candidate-operators", "candidate-substituted"), "bits"
    )


@pytest.mark.slow
def test_what_lies_there_is_held_against_the_run_as_well(runs, tmp_path):
    """The printed command was run on the wrong machine."""
    work, options = tmp_path / "work", {"truth": runs / "truth", "here": "reference"}
    first = localize(runs / "a", runs / "b", out=work, **options)
    words = shlex.split(first.commands[0].partition("   #")[0])
    sites = [words[n + 1] for n, word in enumerate(words) if word == "--sites"]
    made = capture(
        like=runs / "a",
        out=work / "candidate-operators",
        sites=sites,
        recording=RecordOptions(weights=True),
    )
    result = localize(runs / "a", runs / "b", out=work, **options)
    assert (result.operator, result.refused) == (None, True)
    assert f"{made.path} was not made on B's machine" in result.stopped
    assert "--force" in result.commands[0]


@pytest.mark.slow
def test_a_substitute_is_only_tried_on_the_machine_itself(runs, tmp_path, lines_of):
    """Both sides' operators lie there, made where they belong; this machine is not the candidate's:
    its block would be fine without any substitute, so nothing is said to be proven."""
    work, truth = tmp_path / "work", runs / "truth"
    localize(runs / "a", runs / "b", truth=truth, out=work, prepare_candidate=faulty_mlp)
    shutil.rmtree(work / "candidate-substituted")
    result = localize(runs / "a", runs / "b", truth=truth, out=work)
    assert result.operator is not None
    assert result.causal is None
    lines = lines_of(result)
    assert not any("yes: with the other side's" in line for line in lines)
    assert any("on B's machine" in command for command in result.commands)


@pytest.mark.slow
def test_a_token_is_not_explained_by_another_machine(runs, tmp_path):
    """The run that is repeated has other logits here: the share would be this machine's."""
    a = capture(like=runs / "a", out=tmp_path / "a", prepare=faulty_mlp)
    b = capture(like=a, out=tmp_path / "b", plants=["model.layers.2:out=scale:1.0005"])
    report = explain_token(compare(a, b), a, b)
    assert report.tokens.explanation is None
    assert any("this machine does not repeat" in note for note in report.notes)


@pytest.mark.slow
def test_a_size_is_not_confirmed_by_another_machine(runs, tmp_path):
    """The candidate was captured elsewhere: a plant here says what this machine sees."""
    other = capture(like=runs / "a", out=tmp_path / "b", prepare=other_rounding)
    with pytest.raises(UsageError, match="this is not the machine of"):
        sensitivity(runs / "a", candidate=other, blocks=["middle"], faults=["scale"], confirm=True)


def test_a_devices_digests_are_held_against_bytes(runs):
    """What a device captured again, in digests of its own kind alone, repeats a run that has
    bytes, and is told from one that differs."""
    a, b = Run.open(runs / "a"), Run.open(runs / "b")

    def reduced(run: Run) -> Run:
        made = Run.open(run.path)
        made.records = [
            msgspec.structs.replace(
                record, fold=fold_tensor(run.read(record)), xxh3=None, place=None, summary=None
            )
            for record in run.records
        ]
        return made

    found = check_repetition(reduced(Run.open(runs / "again")), a, name="again", side="reference")
    assert (found.how, found.num_different) == ("bits", 0)
    assert found.num_compared > 0
    assert check_repetition(reduced(b), a, name="b", side="reference").how == "differs"
