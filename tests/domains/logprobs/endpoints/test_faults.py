"""Servers with a fault that hides behind a mean, a short list, or a setting that is not obeyed."""

import math
import random

import pytest

from divergence import ServerOptions, capture, compare
from divergence.errors import UsageError
from tests.domains.logprobs.endpoints import speakers
from tests.domains.logprobs.endpoints.conftest import VOCABULARY, serving

PROMPTS = [f"{n:02} is a prompt" + " and a few words more" * (n % 3) for n in range(24)]
GIVEN = {"prompts": PROMPTS, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The run of a server without a fault: A of most pairs."""
    with serving() as stub:
        stub.speaks = "sglang"
        server = ServerOptions(endpoint=stub.url)
        return capture("tiny", server=server, out=tmp_path_factory.mktemp("healthy") / "a", **GIVEN)


@pytest.fixture(autouse=True)
def _speaks(stub):
    """The server tells its dtype, so that confidence is not low for want of it."""
    stub.speaks = "sglang"


def changed(stub, change):
    """From now on the server's log-probabilities are those of ``change(values, ids, random)``."""
    inner = type(stub).logits

    def logits(ids):
        values = change(inner(stub, ids), ids, random.Random(repr(ids)))
        whole = math.log(sum(map(math.exp, values)))
        return [value - whole for value in values]

    stub.logits = logits


def wrong_at(stub, step, prompts, *, size=40.0):
    """The answers to every n-th prompt have a token at this step that is far from the likeliest."""
    inner = type(stub).go_on

    def go_on(ids, count, seed=None):
        tokens, rows = inner(stub, ids, count, seed)
        if sum(ids) % prompts or count <= step:
            return tokens, rows
        row = [value - size if n == tokens[step] else value for n, value in enumerate(rows[step])]
        token = max(range(VOCABULARY), key=lambda n: row[n])
        rest, behind = inner(stub, [*ids, *tokens[:step], token], count - step - 1)
        return [*tokens[:step], token, *rest], [*rows[:step], row, *behind]

    stub.go_on = go_on


def choose_by(stub, changed) -> None:
    """Greedy by ``changed(row, whole)``, other numbers than those that are told."""

    def go_on(ids, count, seed=None):
        tokens, rows, whole = [], [], list(ids)
        for _ in range(count):
            row = stub.logits(whole)
            chosen = changed(row, whole)
            tokens.append(max(range(VOCABULARY), key=chosen.__getitem__))
            rows.append(row)
            whole.append(tokens[-1])
        return tokens, rows

    stub.go_on = go_on


@pytest.mark.slow
def test_a_margin_that_no_list_tells_is_no_tie(stub, serve):
    """Without likeliest tokens nobody knows whether answers parted at ties, and that is said."""
    a = serve("a", top_logprobs=0)
    wrong_at(stub, 4, 2)
    report = compare(a, serve("b", top_logprobs=0))
    assert report.logprobs.num_flips > 4 and report.logprobs.num_ties == 0
    assert (report.verdict.kind, report.verdict.confidence) == ("within_floor", "low")
    assert "parted, and whether at ties is not told" in report.verdict.summary
    assert "parted at ties" not in report.verdict.summary


@pytest.mark.slow
def test_a_token_below_a_whole_list_is_no_tie(stub, serve):
    """Two likeliest tokens, far apart: what is on neither place is no near tie of the first."""

    def peaked(values, ids, noise):
        return [3 * value for value in values]

    changed(stub, peaked)
    a = serve("a", top_logprobs=2)
    wrong_at(stub, 4, 2)
    report = compare(a, serve("b", top_logprobs=2))
    assert report.logprobs.num_faults > 2, report.logprobs
    assert report.verdict.kind == "drift" and "does not flip" in report.verdict.summary


@pytest.mark.slow
def test_answers_that_part_at_their_first_token_are_no_texts_alone(stub, serve):
    """Their first tokens had the same beginning, so they are judged."""
    stub.speaks = "llama.cpp"
    a, stub.weights = serve("a"), 1
    report = compare(a, serve("b"))
    assert report.logprobs.delta is None and report.logprobs.num_faults > 12
    assert report.verdict.kind == "drift" and "does not flip" in report.verdict.summary


@pytest.mark.slow
def test_the_place_named_is_that_of_the_fault_and_not_of_a_tie_before_it(stub, serve, healthy):
    """Among ties that rounding flips the first fault is the onset."""
    stub.noise = 0.05
    wrong_at(stub, 8, 5)
    report = compare(healthy, serve("b"))
    first = report.logprobs.first_difference
    assert report.logprobs.num_ties and report.logprobs.num_faults
    assert first.judgement == "fault"
    onset = report.verdict.onset
    assert (onset.sample, onset.position) == (first.sample, first.position)
    assert sum(healthy.manifest.tokens.samples[onset.sample].prompt_ids) % 5 == 0


@pytest.mark.slow
def test_tokens_chosen_by_other_numbers_are_not_said_to_be_sampled(stub, serve, healthy):
    """A greedy choice in another pass than the one that is told: near ties alone are chosen
    otherwise, which is no sampling, and leaves low confidence."""

    def noisy(row, whole):
        noise = random.Random(repr(whole))
        return [value + noise.gauss(0, 0.1) for value in row]

    choose_by(stub, noisy)
    report = compare(healthy, serve("b"))
    assert 0 < report.logprobs.max_below_likeliest["candidate"] < 0.5
    assert (report.verdict.kind, report.verdict.confidence) == ("within_floor", "low")
    assert "does not choose the likeliest token of its own list" in report.verdict.summary


@pytest.mark.slow
def test_a_penalty_is_not_called_sampling_alone(stub, serve, healthy):
    """A choice that is not the likeliest token may be sampling, a penalty or a bias."""

    def penalised(row, whole):
        return [value * 2.5 if n in whole else value for n, value in enumerate(row)]

    choose_by(stub, penalised)
    report = compare(healthy, serve("b"))
    assert report.verdict.kind == "systematic"
    assert "it samples, or a penalty or a bias moves its choice" in report.verdict.summary


def beginning_with(numbers):
    """Is a text one of these prompts, from its beginning on?"""
    starts = [[ord(char) % VOCABULARY for char in PROMPTS[n][:2]] for n in numbers]
    return lambda ids: list(ids[:2]) in starts


@pytest.mark.slow
@pytest.mark.parametrize("which", ["longer", "later", ""])
def test_all_prompts_alike_is_said_of_all_prompts_alone(stub, serve, healthy, which):
    """Positions scaled wrongly, a server that came back with other weights, one bad replica of two:
    half of the prompts are as ever."""
    chosen = {
        "longer": lambda ids: len(ids) > 24,
        "later": beginning_with(range(12, 24)),
        "": beginning_with(range(0, 24, 2)),
    }[which]

    def fault(values, ids, noise):
        return [value + noise.gauss(0, 0.9 if chosen(ids) else 0.01) for value in values]

    changed(stub, fault)
    report = compare(healthy, serve("b", like=healthy))
    assert report.logprobs.pattern in ("everywhere", "shifted"), report.verdict
    num = 16 if which == "longer" else 12
    assert f"{num} of 24 prompts" in report.verdict.summary
    assert "alike" not in report.verdict.summary
    said = f"all of them {which} than the others"
    assert (said in report.verdict.summary) == bool(which)
    assert which or "than the others" not in report.verdict.summary


@pytest.mark.slow
def test_a_shift_in_one_direction_is_no_rounding(stub, serve, healthy):
    """One token gets 6% of the probability wherever it is: all others lose a little, as many as no
    coin falls one way. What looks the same is named."""

    def fault(values, ids, noise):
        return [math.log(0.94 * math.exp(v) + 0.06 * (n == 5)) for n, v in enumerate(values)]

    changed(stub, fault)
    report = compare(healthy, serve("b", like=healthy))
    assert (report.verdict.kind, report.verdict.confidence) == ("systematic", "medium")
    assert "as where A leaves out the unlikely tokens" in report.verdict.summary
    assert "what it keeps held 94%" in report.verdict.summary


@pytest.mark.slow
def test_a_difference_that_goes_with_the_log_probability_is_no_rounding(stub, serve, healthy):
    """A temperature of 0.97: tokens that are likely are more so, the others less. It is told by the
    lists, however small the difference is."""
    changed(stub, lambda values, ids, noise: [value / 0.97 for value in values])
    report = compare(healthy, serve("b", like=healthy))
    assert (report.verdict.kind, report.verdict.confidence) == ("systematic", "high")
    assert "at temperature 0.97" in report.verdict.summary
    assert report.logprobs.delta.mean_abs < report.logprobs.explained


@pytest.mark.parametrize("temperature", [0.6, 1.3, 2.0])
def test_lists_of_tokens_tell_the_temperature(stub, serve, healthy, temperature):
    """Of two tokens that both sides list at one place the distances are as 1 to its inverse."""
    changed(stub, lambda values, ids, noise: [value / temperature for value in values])
    summary = compare(healthy, serve("b", like=healthy)).verdict.summary
    assert f"B's log-probabilities are A's at temperature {temperature:.3g}" in summary


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "kind"), [(0.4, "localized"), (0.02, "within_floor")])
def test_a_mean_over_healthy_prompts_hides_no_faulty_ones(stub, serve, healthy, noise, kind):
    """A quarter of the prompts beyond rounding, diluted by the others."""
    a, chosen = healthy, beginning_with(range(0, 24, 4))

    def fault(values, ids, r):
        return [value + r.gauss(0, noise if chosen(ids) else 0.01) for value in values]

    changed(stub, fault)
    verdict = compare(a, serve("b", like=a)).verdict
    assert (verdict.kind, verdict.confidence) == (kind, "high"), verdict


@pytest.mark.slow
def test_prompts_that_stand_out_are_not_said_to_be_all(stub, serve, healthy):
    """Of six faulty prompts not all lie beyond the bound: that others are beyond rounding is said.
    Which do, the order of the answers tells, which come several at a time."""
    a, chosen = healthy, beginning_with(range(0, 24, 4))

    def fault(values, ids, r):
        return [value + r.gauss(0, 0.3 if chosen(ids) else 0.01) for value in values]

    changed(stub, fault)
    verdict = compare(a, serve("b", like=a)).verdict
    assert verdict.kind == "localized" and "of 24 stand" in verdict.summary
    numbers = verdict.headline[0].values
    assert numbers["num_odd"] + (numbers["num_beyond"] or 0) == 6
    said = f"{numbers['num_beyond']} of them beyond rounding by themselves" in verdict.summary
    assert said == bool(numbers["num_beyond"])


@pytest.mark.slow
def test_a_mean_over_long_prompts_hides_no_wrong_answers(stub, serve):
    """The prompt is computed at once, and right; what follows step by step is not."""
    prompts = [f"{n:02} {'a long prompt of many words ' * 8}" for n in range(12)]
    a = serve("a", prompts=prompts)

    def fault(values, ids, noise):
        return [
            value + noise.gauss(0, 0.5 if len(ids) > len(prompts[0]) else 0) for value in values
        ]

    changed(stub, fault)
    verdict = compare(a, serve("b", like=a)).verdict
    assert (verdict.kind, verdict.confidence) == ("within_floor", "low")
    assert any("the answers by themselves" in check.detail for check in verdict.checks)


@pytest.mark.slow
def test_answers_that_nobody_drew_are_of_no_distribution(stub, serve):
    """Both servers take the temperature and do not obey it: one answer, six times."""
    inner = type(stub).go_on
    stub.go_on = lambda ids, count, seed=None: inner(stub, ids, count)
    a = serve("a", prompts=PROMPTS[:8], answers=6)
    stub.noise = 0.1
    report = compare(a, serve("b", prompts=PROMPTS[:8], answers=6))
    assert (report.verdict.kind, report.verdict.confidence) == ("undetermined", "low")
    assert "both sides give one answer to each prompt" in report.verdict.summary


@pytest.mark.slow
def test_what_stands_for_no_number_is_none(stub, serve, healthy):
    """-9999 is written where a token has no log-probability; it is no difference of 9999 nats."""
    inner = type(stub).go_on

    def go_on(ids, count, seed=None):
        tokens, rows = inner(stub, ids, count, seed)
        if count > 3 and sum(ids) % 4 == 0:
            rows[3] = [-9999.0 if n == tokens[3] else value for n, value in enumerate(rows[3])]
        return tokens, rows

    stub.go_on = go_on
    report = compare(healthy, serve("b"))
    assert report.logprobs.delta.max_abs < 1 and report.logprobs.num_other > 0
    assert report.verdict.confidence == "low"
    assert any("not told on both sides" in check.detail for check in report.verdict.checks)


@pytest.mark.slow
def test_an_integer_beyond_all_floats_is_no_number(stub, serve, healthy):
    """A log-probability of 400 digits is nonfinite, not a crash."""
    inner = type(stub).go_on

    def go_on(ids, count, seed=None):
        tokens, rows = inner(stub, ids, count, seed)
        return tokens, [[-(10**400)] * VOCABULARY if count > 1 else row for row in rows]

    stub.go_on = go_on
    assert compare(healthy, serve("b")).verdict.kind == "nonfinite"


@pytest.mark.slow
def test_a_compared_run_or_one_of_other_prompts_is_no_floor(stub, serve, healthy):
    """A floor is another run of the same prompts."""
    stub.noise = 0.6
    b, other = serve("b", like=healthy), serve("c", prompts=PROMPTS[::-1])
    for floor, said in ((b, "is B itself"), (healthy, "is A itself"), (other, "other prompts")):
        with pytest.raises(UsageError, match=said):
            compare(healthy, b, floor=floor.path)


@pytest.mark.slow
def test_a_floor_farther_off_than_any_precision_is_not_believed(stub, serve, healthy):
    """A floor of other weights widens no limit unnoticed."""
    stub.weights = 1
    floor = serve("floor", like=healthy)
    stub.weights, stub.noise = 0, 0.6
    verdict = compare(healthy, serve("b", like=healthy), floor=floor.path).verdict
    assert (verdict.kind, verdict.confidence) == ("within_floor", "low")
    assert "farther off than any precision in use" in verdict.summary


@pytest.mark.slow
def test_answers_that_end_earlier_leave_low_confidence(stub, serve, healthy):
    """Another stop token, where both dtypes are known."""
    a, stub.shorter = healthy, 2
    verdict = compare(a, serve("b")).verdict
    assert (verdict.kind, verdict.confidence) == ("within_floor", "low")
    assert "end earlier on B, by 2 tokens each" in verdict.summary


@pytest.mark.slow
def test_rounding_that_a_mean_allows_is_no_fault_by_one_flip(stub, serve):
    """Noise whose mean is just what bfloat16 explains flips some token at more than a tie spans."""
    stub.noise = 0.14
    a = serve("a")
    changed(stub, lambda values, ids, noise: [value + noise.gauss(0, 0.14) for value in values])
    report = compare(a, serve("b"))
    assert report.logprobs.delta.mean_abs < report.logprobs.explained
    assert report.logprobs.num_flips > 4 and report.logprobs.num_faults == 0
    assert report.verdict.kind == "within_floor", report.verdict


def test_pieces_of_characters_are_not_held_to_be_one_token(stub, serve, monkeypatch):
    """By text all of them read as U+FFFD: what follows the first is not compared, and that is
    said; that answers part there is not."""
    monkeypatch.setattr(speakers, "_text", lambda n: "\ufffd" if n % 4 == 1 else f"<{n}>")
    stub.speaks, stub.noise = "openai", 0.1
    a = serve("a")
    changed(stub, lambda values, ids, noise: [value + noise.gauss(0, 0.1) for value in values])
    report = compare(a, serve("b"))
    assert report.logprobs.num_faults == 0
    assert (report.verdict.kind, report.verdict.confidence) == ("within_floor", "low")
    assert any("not told on both sides" in check.detail for check in report.verdict.checks)


@pytest.mark.slow
def test_what_prompts_begin_with_alike_counts_once(stub, serve):
    """A system prompt of which the rounding is one-sided is one observation, not one a prompt."""
    system = "all of them begin with this long text, "
    prompts = [f"{system}{n:02} is its number" for n in range(12)]

    def fault(values, ids, noise):
        odd = 0.4 if len(ids) < len(system) else 0.02
        return [value + noise.gauss(0, odd) for value in values]

    a = serve("a", prompts=prompts)
    changed(stub, fault)
    report = compare(a, serve("b", like=a))
    assert report.logprobs.delta.num_tokens < len(prompts) * 40
    sequences = report.logprobs.sequences
    assert [one.num_tokens for one in sequences] == [len(prompts[0]) + 12 - 1] * 12
    assert report.logprobs.delta.mean_abs < 0.1
    assert report.verdict.kind == "within_floor", report.verdict


@pytest.mark.slow
def test_other_numbers_behind_the_same_beginning_all_count(stub, serve):
    """A cache of prefixes that gives wrong numbers from the second request on."""
    system = "all of them begin with this long text, "
    prompts = [f"{system}{n:02} is its number" for n in range(12)]
    a = serve("a", prompts=prompts, concurrency=1)
    seen = []

    def fault(values, ids, noise):
        seen.append(tuple(ids))
        again = seen.count(tuple(ids))
        odd = random.Random(repr((ids, again)))
        return [value + odd.gauss(0, 1.0 if again > 2 else 0.01) for value in values]

    changed(stub, fault)
    report = compare(a, serve("b", like=a, concurrency=1))
    assert report.verdict.kind in ("drift", "systematic", "localized"), report.verdict
    assert report.verdict.confidence != "low"
