"""What each point and each rung says of real runs, and that it is never more than compare says."""

import functools

import msgspec
import pytest

import divergence
from divergence import Checkup
from divergence.errors import IncomparableError, RunFormatError, UsageError

LETTERS = {"pass": "p", "fail": "F", "unknown": "?", "not_reached": "-"}

EXPECTED = {
    # pair: points 1 to 8, rungs (tokens weights code prefill decode sampling ranks)
    "same": ("pppppppp", "ppppppp"),
    "rounding": ("pppppppp", "ppppppp"),
    "tie": ("pppppppp", "ppppppp"),
    "seed": ("pppppppp", "ppppppp"),
    "other_template": ("pppppppp", "ppppppp"),
    "code_harmless": ("pppppppp", "ppppppp"),
    "incomplete": ("pppppppp", "ppppppp"),
    "ranks": ("pppppppp", "ppppppp"),
    "dtype": ("Fppppppp", "pF-----"),
    "weights": ("Fpppppp?", "pF-----"),
    "no_digests": ("?ppppppp", "p??pppp"),
    "some_weights": ("?ppppppp", "p?ppppp"),
    "other_weights": ("Fpppppp?", "pF-----"),
    "imported": ("?????ppp", "p??ppp?"),
    "engine_off": ("pppppppp", "ppppppp"),
    "engine_on": ("pppFpppp", "ppppppp"),
    "engine_silent": ("ppp?pppp", "ppppppp"),
    "ids": ("pppppFp?", "F------"),
    "template": ("pppppFp?", "F------"),
    "code": ("pppppppF", "ppF----"),
    "code_once": ("pppppppF", "ppF----"),
    "code_elsewhere": ("pppppppF", "ppFF---"),
    "code_beside": ("pppppppF", "ppFF---"),
    "config": ("pppppppF", "ppFF---"),
    "as_truth": ("Fppppppp", "pF-----"),
    "dtype_sampled": ("FFpppppp", "pFpppF-"),
    "no_code": ("pppppppp", "pp?pppp"),
    "prefill": ("pppppppF", "pppF---"),
    "decode": ("pppppppF", "ppppF--"),
    "drift": ("pppppppF", "ppp?F--"),
    "second_prefill": ("pppppppF", "pppFF--"),
    "nonfinite": ("pppppppF", "ppppF--"),
    "sampled": ("pFpppppp", "pppppF-"),
    "hash": ("ppppppF?", "pp????p"),
    "stats": ("ppppppFp", "ppppppp"),
    "apart": ("ppppppF?", "ppp???p"),
    "no_tokens": ("pppppppp", "pppp??p"),
    "itself": ("ppppppp?", "ppp???p"),
    "not_deterministic": ("ppppFppp", "ppppppp"),
    "refused": ("pppp?ppp", "ppppppp"),
    "refused_repeats": ("pppppppp", "ppppppp"),
    "ranks_apart": ("pppppppp", "ppppppF"),
    "ranks_share": ("pppppppp", "pppFppF"),
    "ranks_alone": ("pppppppp", "pppppp?"),
}


@pytest.fixture(scope="module")
def checkups(pairs):
    """``checkups(name)`` → the checkup of that pair, made once."""
    return functools.cache(lambda name: divergence.doctor(*pairs(name)))


def test_every_pair_is_expected(every):
    """No pair of the fixtures is left out."""
    assert every in EXPECTED


def test_points_and_rungs(every, checkups):
    """One thing differs, and the point and the rung that are about it say so."""
    checkup = checkups(every)
    said = tuple(
        "".join(LETTERS[one.state] for one in rows) for rows in (checkup.points, checkup.ladder)
    )
    assert said == EXPECTED[every], checkup


def test_doctor_and_compare_agree(every, pairs, checkups):
    """The verdict is compare's. No rung of numbers fails where compare finds rounding, none passes
    where it abstains, and one fails where it finds more."""
    checkup = checkups(every)
    try:
        verdict = divergence.compare(*pairs(every)).verdict
    except IncomparableError as error:
        assert (checkup.verdict, checkup.reason) == (None, error.message)
        return
    assert checkup.verdict == verdict
    rungs = {rung.name: rung.state for rung in checkup.ladder}
    numbers = [rungs[name] for name in ("prefill", "decode", "sampling")]
    if verdict.kind in ("identical", "within_floor"):
        assert "fail" not in (*numbers, rungs["ranks"], rungs["tokens"], rungs["code"])
    elif verdict.kind == "undetermined":
        assert set(numbers) == {"unknown"}
    elif verdict.kind == "incomparable":
        assert "pass" not in numbers
        assert {"fail", "unknown"} & {rungs["tokens"], rungs["weights"]}
        commands = [command.alone for command in verdict.commands[:1]]
        assert not commands or {rung.next for rung in checkup.failed} == set(commands)
    else:
        assert checkup.failed
    stop = [rung for rung in checkup.ladder if rung.explains]
    assert [rung.name for rung in stop] == [checkup.explained_by] * len(stop)
    assert all(rung.state == "fail" and rung.next for rung in stop)


def test_what_is_not_reached_is_below_the_rung_that_explains(every, checkups):
    """And nothing else is."""
    checkup = checkups(every)
    states = [rung.state == "not_reached" for rung in checkup.ladder]
    assert states == sorted(states)
    below = [rung.evidence for rung in checkup.ladder if rung.state == "not_reached"]
    by = checkup.explained_by
    assert set(below) <= {f"explained by {by}" if by != "code" else "code may explain it"}


@pytest.mark.parametrize(
    ("pair", "place", "texts"),
    [
        ("dtype", "weights", ("A: float32, B: bfloat16", "rounded from float32 to bfloat16")),
        ("weights", "weights", ("model.layers.1.mlp.down_proj.weight",)),
        ("ids", "tokens", ("prompt 0 differs from token", "twice")),
        ("template", "tokens", ("A: 1 prompt,", "chat template: rendered text differs")),
        ("other_template", "tokens", ("28 of 28", "another chat template")),
        ("code", "code", ("LlamaMLP.forward was replaced", "model.layers.0:out")),
        ("code_elsewhere", "code", ("in model.layers.2.mlp",)),
        ("rounding", "code", ("attention eager / sdpa", "no more than rounding")),
        ("tie", "sampling", ("A's tokens were fed to B", "(tie); each is the largest")),
        ("same", "sampling", ("A's tokens were fed to B; 6 of 6",)),
        ("seed", "seed", ("A: 0, B: 7", "greedy")),
        ("engine_on", "engine", ("A: transformers", "B: vllm: prefix caching on")),
        ("engine_silent", "engine", ("prefix caching not told", "speculation not told")),
        ("hash", "logprobs", ("A: logits of 6 of 6", "B: logits of 0 of 6")),
        ("refused", "deterministic", ("A: deterministic; B: refused", "--repeat")),
        ("refused_repeats", "deterministic", ("repeats itself bit for bit",)),
        ("ranks_apart", "ranks", ("rank 1 of B disagrees with rank 0",)),
        ("ranks_share", "ranks", ("rank 1 holds the share that is off",)),
        ("ranks", "ranks", ("A: 1 process, B: 2 ranks (tp 2)", "agree")),
        ("decode", "decode", ("decode step 2 alone",)),
        ("config", "code", ("rms_norm_eps 1e-06 / 0.001",)),
        ("as_truth", "weights", ("B: float32 (computed in float64)",)),
        ("imported", "seed", ("B: a seed is not recorded",)),
    ],
)
def test_evidence_is_of_both_runs(pair, place, texts, checkups):
    """One line, with the names and numbers of A and B."""
    checkup = checkups(pair)
    found = [one.evidence for one in (*checkup.ladder, *checkup.points) if one.name == place]
    for text in texts:
        assert text in found[0]


@pytest.mark.parametrize(
    ("pair", "command"),
    [("ids", "capture --like"), ("dtype", "capture --like"), ("prefill", "localize")],
)
def test_a_rung_that_fails_has_one_command(pair, command, checkups):
    """To be copied, without a note about commands that follow."""
    (rung,) = checkups(pair).failed
    assert rung.next.startswith(f"divergence {command}")
    assert "by hand" not in rung.next


def test_the_command_for_another_dtype_takes_the_references(checkups):
    """It is the setting that is to be the same."""
    assert "--dtype" not in checkups("dtype").failed[0].next


def test_what_cannot_be_repeated_is_not_to_be(pairs):
    """Of imported runs the prompts' tokens are not told: nothing can be captured like them."""

    def change(manifest):
        for sample in manifest["tokens"]["samples"]:
            sample["prompt_ids"] = []

    both = pairs("config")
    runs = [pairs.altered(f"untold-{number}", run, change) for number, run in enumerate(both)]
    commands = [rung.next for rung in divergence.doctor(*runs).ladder if rung.next]
    assert commands and not any("--like" in text for text in commands)


@pytest.mark.slow
def test_a_truth_names_the_side(pairs, tmp_path):
    """As compare does."""
    a, b = pairs("prefill")
    divergence.truth(a, out=tmp_path / "truth")
    checkup = divergence.doctor(a, b, truth=tmp_path / "truth")
    assert checkup.verdict == divergence.compare(a, b, truth=tmp_path / "truth").verdict
    assert checkup.verdict.side == "candidate"
    assert "by B" in checkup.failed[0].evidence


def test_notes_tell_what_no_rung_does(checkups):
    """Planted faults and incomplete runs."""
    assert checkups("decode").notes == [
        "B has planted faults: model.layers.1.mlp:out=scale:1.2@step=2"
    ]
    assert checkups("incomplete").notes[0].startswith("B is incomplete (signal 15)")


def test_a_name_of_a_run_adds_no_line(pairs):
    """Nor an escape code, in the text of any point, rung or note."""

    def change(manifest):
        manifest["settings"]["nondeterministic_warnings"] = ["x\n  pass  9 all is well"]
        manifest["plan"]["plants"] = ["\x1b]0;x\x07"]

    other = pairs.altered("hostile", pairs("same")[1], change)
    checkup = divergence.doctor(pairs.a(), other)
    rows = [one.evidence for one in (*checkup.points, *checkup.ladder)]
    assert all(text.isprintable() for text in (*rows, *checkup.notes))


def test_a_suite_is_refused(pairs):
    """Operators alone have no tokens and no prefill."""
    run = pairs.altered("suite", pairs.a(), lambda one: one["model"].update(task="operators"))
    with pytest.raises(UsageError, match="doctor is for runs of models"):
        divergence.doctor(run, run)


def test_what_cannot_be_read_is_an_error(pairs, tmp_path):
    """As in compare."""
    with pytest.raises(RunFormatError):
        divergence.doctor(pairs.a(), tmp_path)


def test_a_checkup_is_stable_data(every, checkups):
    """It is JSON that decodes to itself."""
    checkup = checkups(every)
    again = msgspec.json.decode(checkup.to_json(), type=Checkup)
    assert again == checkup
    assert again.schema_version == 1
