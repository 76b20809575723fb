"""The commands a report ends with, followed to the letter, lead to what they promise."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from divergence import RecordOptions, capture, compare
from divergence import truth as make_truth
from divergence.cli.main import app
from divergence.comparison.advice import Advice, WithinAdvice, beside
from divergence.run.manifest import EngineNote, Mesh, MeshAxis
from divergence.run.storage import Url

PROMPT = "A bridge is built twice: once on paper, where every beam is exact, and once in steel."
BLOCK = "model.layers.1"


@pytest.fixture(scope="module")
def llama(tiny_model):
    return str(tiny_model("llama", dtype="bfloat16"))


def follow(report, capsys):
    """Run every printed command; what the last one printed."""
    assert report.verdict.next
    for command in report.verdict.next:
        words = shlex.split(command, comments=True)
        assert words[0] == "divergence"
        with pytest.raises(SystemExit) as caught:
            app(words[1:], prog_name="divergence")
        out, err = capsys.readouterr()
        assert caught.value.code == 0, err
        assert "no anchored pass" not in err
    return out


@pytest.mark.slow
def test_what_float32_alone_shows_is_followed_in_float32(llama, tmp_path, capsys, answer):
    """The block's inside gets an escalated pass and a truth too, or all would pass there."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=2)
    plants = [f"{BLOCK}.mlp.down_proj:out=scale:1.004"]
    report = answer(
        a,
        truth=make_truth(a, out=tmp_path / "truth"),
        recording=RecordOptions(escalate=True),
        plants=plants,
    )
    assert report.verdict.onset.pass_ == "escalated"
    said = follow(report, capsys)
    assert said.startswith(f"DIVERGED: the error is made at {BLOCK}.mlp.down_proj:out")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"steps": "decode"}, {"sites": ["lm_head:out"]}, {"sites": [f"{BLOCK}.*"]}],
    ids=["decode", "head", "one block"],
)
def test_a_run_that_anchors_nothing_is_captured_again_first(
    llama, tmp_path, capsys, options, answer
):
    """Another candidate like it would be no more anchored than the first."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=2, **options)
    report = answer(a, attn_implementation="sdpa")
    assert (report.verdict.kind, report.verdict.confidence) == ("within_floor", "low")
    assert len(report.verdict.next) == 3
    assert "only rounding differs" in follow(report, capsys)


def test_a_run_of_some_tokens_needs_its_prompts_again(llama, tmp_path, answer):
    """No run can be repeated with more tokens than it kept."""
    a = capture(
        llama, out=tmp_path / "a", max_new_tokens=1, recording=RecordOptions(positions="last:2")
    )
    first = answer(a, attn_implementation="sdpa").verdict.next[0]
    assert first.startswith(f"divergence capture {llama} -o {a.path}-blocks --prompts FILE")


def test_a_run_that_can_anchor_is_left_as_it_is(llama, tmp_path):
    """Captured apart: only the candidate is made again."""
    a, b = (
        capture(llama, out=tmp_path / name, max_new_tokens=1, attn_implementation=kernel)
        for name, kernel in (("a", "eager"), ("b", "sdpa"))
    )
    assert len(compare(a, b).verdict.next) == 2


def test_no_escalated_pass_is_asked_of_another_dtype(llama, tmp_path, answer):
    """A float32 run has none, and other weights are far beyond float32's floor."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1)
    verdict = answer(a, dtype="float32").verdict
    assert verdict.kind == "within_floor"
    assert not any("--escalate" in command for command in verdict.next)
    assert not any("see next" in fact.text for fact in verdict.evidence)


@pytest.mark.slow
def test_a_truth_of_the_other_run_is_replaced(llama, tmp_path, capsys):
    """It has no pass on these inputs, and would judge no escalated one."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1)
    b = capture(like=a, out=tmp_path / "b", attn_implementation="sdpa")
    report = compare(a, b, truth=make_truth(b, out=tmp_path / "of-b"))
    assert "confidence  high" in follow(report, capsys)


@pytest.mark.slow
def test_a_block_is_gone_into_down_to_its_operators(llama, tmp_path, capsys):
    """The first run is not anchored: the operators of an anchored one would have no partner."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=2)
    b = capture(like=a, out=tmp_path / "b", plants=[f"{BLOCK}.mlp.down_proj:out=scale:1.5"])
    by_hand = compare(a, b, truth=make_truth(a, out=tmp_path / "truth")).verdict.next[1:]
    report = compare(a, b)
    report.verdict.next[:] = by_hand
    said = follow(report, capsys)
    assert said.startswith(f"DIVERGED: the error comes into {BLOCK}/aten.add#2 from operators")
    assert "side        B is wrong" in said


@pytest.mark.slow
def test_two_sketches_are_captured_again_in_full(llama, tmp_path, capsys):
    """The first anchors nothing before it is there in full itself, nor does a truth judge it; no
    descent begins from it."""
    kept = capture(llama, out=tmp_path / "kept", prompts=[PROMPT], max_new_tokens=2, probe=False)
    plants = [f"{BLOCK}.mlp.down_proj:out=scale:1.5"]
    a = capture(like=kept, out=tmp_path / "a", store="sketch", probe=False)
    b = capture(like=kept, out=tmp_path / "b", store="sketch", plants=plants, probe=False)
    report = compare(a, b)
    assert not any(command.startswith("divergence localize") for command in report.verdict.next)
    said = follow(report, capsys)
    assert said.startswith(f"DIVERGED: the error is made at {BLOCK}:out, by B")
    assert "estimated" not in said


def test_a_sketch_is_held_against_a_truth_in_full(llama, tmp_path):
    """A truth judges nothing that is a sketch."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    plants = [f"{BLOCK}.mlp.down_proj:out=scale:1.5"]
    b = capture(like=a, out=tmp_path / "b", store="sketch", plants=plants, probe=False)
    last = compare(a, b).verdict.next[-1]
    assert last == f"divergence compare {a.path} {b.path}-full --truth {a.path}-truth"


@pytest.mark.slow
def test_a_truth_that_lies_beside_is_named_and_not_taken(llama, tmp_path, invoke):
    """Where the printed commands put it; another run's is passed over."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    b = capture(
        like=a,
        out=tmp_path / "b",
        recording=RecordOptions(escalate=True),
        probe=False,
        attn_implementation="sdpa",
    )
    other = capture(llama, out=tmp_path / "c", prompts=["Other"], max_new_tokens=1, probe=False)
    make_truth(other, out=tmp_path / "a-truth")
    assert Advice(a, b).truth_beside is None
    truth = make_truth(a, out=tmp_path / "truth")
    bare = compare(a, b)
    again = f"divergence compare {a.path} {b.path} --truth {truth.path}"
    assert bare.verdict.confidence == "medium" and bare.verdict.next == [again]
    lacking = [check.detail for check in bare.verdict.checks if check.state != "met"]
    assert lacking == [f"no truth (--truth {truth.path})", "the float32 check takes a truth"]
    judged = compare(a, b, truth=truth).verdict
    lacking = [check.detail for check in judged.checks if check.state != "met"]
    assert lacking == ["A was not seen in float32 (capture --escalate)"]
    # the first screen shows which runs are compared then, and with which truth
    screen = invoke("compare", a.path, b.path, "--truth", truth.path)[1].splitlines()
    then = f"divergence compare {a.path}-escalated {b.path} --truth {truth.path}"
    assert then in [line.strip() for line in screen]
    assert (
        Advice(a, b)
        .into_block(BLOCK)[0]
        .text.partition("   #")[0]
        .endswith(f"--truth {truth.path}")
    )


def as_if(run, **made):
    """The run as if it had been made otherwise."""
    manifest = msgspec.structs.replace(run.manifest, **made)
    return SimpleNamespace(
        path=run.path, manifest=manifest, records=run.records, has_bytes=run.has_bytes
    )


def of_ranks(run, **axes):
    """The run as if several ranks had made it."""
    return as_if(
        run, mesh=Mesh(axes=[MeshAxis(name=name, size=size) for name, size in axes.items()])
    )


def test_several_ranks_and_engines_of_ours_are_started_again(llama, tmp_path):
    """One process would not ask the same, nor another engine; several ranks make neither operators
    nor float32. No command names somebody's engine."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    b = capture(like=a, out=tmp_path / "b", plants=["lm_head:out=nan"], probe=False)
    advice = Advice(a, of_ranks(b, dp=2, tp=4))
    start = "torchrun --nproc-per-node 8 -m divergence capture --like "
    assert advice.certainty()[0].text == (
        f"{start}{a.path} -o {b.path}-anchored --mesh dp=2,tp=4 --plant lm_head:out=nan"
        "   # on B's machine"
    )
    by_hand = [item.text for item in advice.into_block(BLOCK)]
    assert by_hand[0].startswith("divergence capture")
    assert by_hand[1].startswith(f"{start}{a.path}-deep -o {b.path}-deep --mesh dp=2,tp=4")
    assert not any("ops@" in command or " localize " in command for command in by_hand)
    assert (advice.escalate(), advice.divided) == ([], True)
    within = WithinAdvice(of_ranks(b, tp=2))
    assert within.into_block(BLOCK)[0].text.startswith("torchrun")
    assert within.whole()[0].text.endswith(f"--like {b.path} -o {b.path}-whole --whole --mesh tp=2")
    other_way = Advice(of_ranks(b, tp=2), a)
    assert other_way.escalate()[0].text.startswith("divergence capture")
    note = EngineNote(name="compile", version="1", options={"backend": "eager", "mode": None})
    again = Advice(a, as_if(b, engine=note)).certainty()[0].text
    assert " --engine compile --engine-option backend=eager --plant" in again
    foreign = as_if(b, engine=EngineNote(name="evil", version="1"))
    assert "--engine" not in Advice(a, foreign).certainty()[0].text
    assert "--engine transformers" in Advice(as_if(a, engine=note), b).certainty()[0].text


def test_places_beside_archives_and_urls(llama, tmp_path):
    """An archive stays one; what is a directory of this machine is none at a URL."""
    assert beside("a", "-deep") == "a-deep"
    assert beside("of me/a.zip", "-deep") == "of me/a-deep.zip"
    assert beside("s3://bucket/A.TAR", "-truth") == "s3://bucket/A-truth.TAR"
    run = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    for place, folder in ((Path("runs/b.zip"), "runs/b"), (Url("s3://bucket/runs/b.tar"), "b")):
        there = SimpleNamespace(
            path=place, manifest=run.manifest, records=run.records, has_bytes=run.has_bytes
        )
        advice = Advice(run, there)
        assert f" {place} -o {folder}-localized " in advice.into_block(BLOCK)[0].text
        assert f" -o {folder}-repro " in advice.operator("x", "x", "candidate")[0].text


@pytest.mark.slow
@pytest.mark.whole
def test_two_other_experiments_are_made_one(tiny_model, llama, tmp_path, capsys):
    """A's tokens and model again on B's machine; a comparison that means nothing stands last."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    other = str(tiny_model("llama", seed=1, dtype="bfloat16"))
    b = capture(other, out=tmp_path / "b", prompts=[PROMPT[:9]], max_new_tokens=1, probe=False)
    report = compare(a, b)
    assert report.verdict.kind == "incomparable"
    relate, *steps, force = report.verdict.next
    assert relate == f"divergence weights {llama} {other}"
    assert "with A's model" in steps[0] and " --force " in force
    alike = msgspec.structs.replace(report.verdict, next=steps)
    assert follow(msgspec.structs.replace(report, verdict=alike), capsys).startswith("IDENTICAL")
    third = str(tiny_model("gpt2"))  # of another architecture: nothing relates its weights
    c = capture(third, out=tmp_path / "c", prompts=[PROMPT], max_new_tokens=1, probe=False)
    assert compare(a, c).verdict.next[0].startswith(f"divergence capture --like {a.path}")


@pytest.mark.slow
def test_a_truth_given_for_a_run_is_told_what_it_is_for(llama, tmp_path):
    """Nothing is captured like a truth, and none is made of one: such commands end in an error."""
    a = capture(llama, out=tmp_path / "a", prompts=[PROMPT], max_new_tokens=1, probe=False)
    faulty = capture(like=a, out=tmp_path / "b", plants=[f"{BLOCK}.mlp:out=scale:1.5"], probe=False)
    truth = make_truth(a, out=tmp_path / "truth")
    (command,) = compare(a, truth).verdict.next
    assert command == f"divergence compare {a.path} OTHER --truth {truth.path}"
    (command,) = compare(truth, faulty).verdict.next
    assert command.startswith(f"divergence compare RUN {faulty.path} --truth {truth.path}   # ")
