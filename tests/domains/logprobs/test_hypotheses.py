"""One setting, or one mistake, that makes one side's log-probabilities the other's is named with
its value and what remains after it; rounding and other weights are none."""

import json
import math

import pytest
import torch

from divergence import compare

VOCABULARY, NUM_PROMPTS, LENGTH = 200, 12, 24


def model(num_prompts=NUM_PROMPTS):
    """Logits (P, T, V) of a made-up model, and tokens (P, T) that are drawn from them."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(num_prompts, LENGTH, VOCABULARY, generator=generator).double()
    chances = logits.softmax(-1).reshape(-1, VOCABULARY)
    tokens = torch.multinomial(chances, 1, generator=generator).reshape(num_prompts, LENGTH)
    return logits, tokens


def chosen(log_p, tokens):
    return log_p.gather(-1, tokens[..., None])[..., 0]


@pytest.fixture
def sides(tmp_path):
    """``sides(tokens, a, b, top_a, top_b)``: the report on two files of chosen tokens' log p, with
    the likeliest of each distribution where one is given."""
    import_dump = pytest.importorskip("divergence.domains.importing.importing").import_dump

    def make(tokens, a, b, top_a=None, top_b=None, **options):
        runs, both = [], tokens if isinstance(tokens, tuple) else (tokens, tokens)
        for name, values, whole, tokens in (("a", a, top_a, both[0]), ("b", b, top_b, both[1])):
            path = tmp_path / f"{name}.jsonl"
            with open(path, "w") as file:
                for prompt, (row, answer) in enumerate(zip(values, tokens, strict=True)):
                    line = {
                        "prompt_ids": [prompt, 1],
                        "completion_ids": answer.tolist(),
                        "logprobs": row.tolist(),
                    }
                    if whole is not None:
                        top = whole[prompt].sort(descending=True, stable=True)
                        line["top_logprobs"] = [
                            [
                                [i, v]
                                for i, v in zip(ids.tolist(), logs.tolist(), strict=True)
                                if v > -1e9
                            ]
                            for ids, logs in zip(top.indices, top.values, strict=True)
                        ]
                    file.write(json.dumps(line) + "\n")
            runs.append(import_dump(path, out=tmp_path / name, force=True))
        return compare(*runs, **options)

    return make


def kept(log_p, rule, value):
    """log p renormalised over what a rule keeps, -inf elsewhere."""
    p, order = log_p.exp().sort(-1, descending=True)
    number = torch.arange(p.shape[-1])
    stays = {
        "top-k": number < value,
        "top-p": p.cumsum(-1) - p < value,
        "min-p": p >= value * p[..., :1],
    }[rule].expand(p.shape)
    out = ~torch.zeros_like(stays).scatter(-1, order, stays)
    return log_p.masked_fill(out, -torch.inf).log_softmax(-1)


def noisy(values, size):
    return (
        values
        + size * torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).double()
    ).clamp(max=0)


SETTINGS = {
    "temperature 0.7": (lambda log_p: (log_p / 0.7).log_softmax(-1), "at temperature 0.7 (fitted"),
    "temperature 1.4": (lambda log_p: (log_p / 1.4).log_softmax(-1), "at temperature 1.4 (fitted"),
    "top-k 20": (lambda log_p: kept(log_p, "top-k", 20), "renormalised over top-k 20"),
    "top-p 0.9": (lambda log_p: kept(log_p, "top-p", 0.9), "renormalised over top-p 0.9"),
    "min-p 0.05": (lambda log_p: kept(log_p, "min-p", 0.05), "renormalised over min-p 0.0"),
    "both": (
        lambda log_p: kept((log_p / 0.6).log_softmax(-1), "top-p", 0.9),
        "at temperature 0.6, renormalised over top-p 0.9",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "lists", "noise"),
    [
        (setting, lists, noise)
        for setting in SETTINGS
        for lists, noise in (("a", 1e-7), ("a", 0.005), ("both", 0.005))
        if (setting, lists) != ("both", "a")  # chosen tokens of one side do not tell two values
    ],
)
def test_a_setting_is_fitted_where_one_side_tells_its_distribution(sides, setting, noise, lists):
    """The side before the setting lists its tokens: the value is told, and what remains."""
    logits, _ = model()
    change, words = SETTINGS[setting]
    before, after = logits.log_softmax(-1), change(logits.log_softmax(-1))
    tokens = torch.multinomial(
        after.exp().reshape(-1, VOCABULARY), 1, generator=torch.Generator().manual_seed(2)
    )
    tokens = tokens.reshape(NUM_PROMPTS, LENGTH)
    report = sides(
        tokens,
        chosen(before, tokens),
        noisy(chosen(after, tokens), noise),
        before,
        after if lists == "both" else None,
    )
    assert words in report.verdict.summary
    assert (report.verdict.kind, report.verdict.confidence) == ("systematic", "high")
    assert "within rounding" in report.verdict.summary
    assert report.logprobs.hypothesis.rest <= 2 * noise + 1e-6


PLACES = {
    "base 10": (lambda x, p, ids: x / math.log(10), "B's log-probabilities are logarithms of base"),
    "base 2": (lambda x, p, ids: x / math.log(2), "B's log-probabilities are logarithms of base 2"),
    "length": (lambda x, p, ids: x / LENGTH, "B's log-probabilities are divided by the length"),
    "sums": (lambda x, p, ids: x.cumsum(-1), "each of B's log-probabilities is the sum of all up"),
    "repeated": (
        lambda x, p, ids: x[[0, 0, 0, *range(3, NUM_PROMPTS)]],
        "B's rows stand at other prompts, 2 of 12 prompts: prompt 1 has the log-probabilities of",
    ),
    "late": (lambda x, p, ids: x.roll(1, -1), "token too late: each is A's of the token before"),
    "early": (lambda x, p, ids: x.roll(-1, -1), "too early: each is A's of the token behind"),
    "two rows": (
        lambda x, p, ids: x[[1, 0, *range(2, NUM_PROMPTS)]],
        "2 of 12 prompts: prompt 0 has the log-probabilities of A's prompt 1",
    ),
    "all rows": (
        lambda x, p, ids: x.flip(0),
        "12 of 12 prompts: prompt 0 has the log-probabilities of A's prompt 11",
    ),
    "likeliest": (lambda x, p, ids: p.amax(-1), "of another token, the likeliest one"),
    "next id": (lambda x, p, ids: chosen(p, ids + 1), "of another token, that of the next id"),
    "label": (
        lambda x, p, ids: chosen(p, torch.cat([torch.ones_like(ids[:, :1]), ids[:, :-1]], -1)),
        "of another token, the one before it",
    ),
    "unknown": (
        lambda x, p, ids: chosen(p, (ids + 7) % VOCABULARY),
        "of other tokens: its own 256 lists tell those of its tokens",
    ),
}


@pytest.mark.parametrize("noise", [1e-7, 0.02])
@pytest.mark.parametrize("place", PLACES)
def test_numbers_at_another_place_are_named(sides, place, noise):
    """Right numbers that stand elsewhere, or are written otherwise, are no numerics."""
    logits, tokens = model()
    tokens = tokens.clamp(max=VOCABULARY - 2)
    log_p = logits.log_softmax(-1)
    change, words = PLACES[place]
    x = chosen(log_p, tokens)
    lists = log_p if place in ("likeliest", "next id", "label", "unknown") else None
    own = noisy(log_p, noise) if place == "unknown" else None
    report = sides(tokens, x, noisy(change(x, log_p, tokens), noise), lists, own)
    assert words in report.verdict.summary, report.verdict.summary
    assert (report.verdict.kind, report.verdict.confidence) == ("systematic", "high")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.5, "B's log-probabilities are 0.5 times"),
        (1 / math.log(2), "B's log-probabilities are logarithms of base 2"),
    ],
)
def test_a_factor_is_no_temperature_where_lists_tell_it(sides, factor, words):
    """Lists that are scaled too are no distributions: nothing was normalised anew."""
    logits, tokens = model()
    log_p = logits.log_softmax(-1)
    x = chosen(log_p, tokens)
    report = sides(tokens, x, noisy(factor * x, 0.005), log_p, factor * log_p)
    assert report.verdict.summary.startswith(words), report.verdict.summary


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.roll(1, -1), "B's log-probabilities stand one token too late"),
        (lambda x: x / math.log(10), "B's log-probabilities are logarithms of base 10"),
    ],
)
def test_answers_alone_may_be_told_otherwise(tmp_path, change, words):
    """Saved answers with ``prompt_logprobs``, which are scored in another way and are equal."""
    import_dump = pytest.importorskip("divergence.domains.importing.importing").import_dump
    logits, tokens = model()
    x, runs = chosen(logits.log_softmax(-1), tokens), []
    for name, values in (("a", x), ("b", noisy(change(x), 1e-3))):
        answers = [
            {
                "object": "text_completion",
                "choices": [
                    {
                        "text": "",
                        "logprobs": {
                            "tokens": [f"token_id:{token}" for token in ids],
                            "token_logprobs": row,
                        },
                        "token_ids": ids,
                        "prompt_token_ids": [prompt, 1],
                        "prompt_logprobs": [None, {"1": {"logprob": -1.0}}],
                    }
                ],
            }
            for prompt, (row, ids) in enumerate(zip(values.tolist(), tokens.tolist(), strict=True))
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, answers)))
        runs.append(import_dump(path, out=tmp_path / name))
    assert compare(*runs).verdict.summary.startswith(words)


def one_place(logits):
    """Twice as large at one token of one prompt."""
    changed = logits.clone()
    changed[2, 3] *= 2
    return changed.log_softmax(-1)


def drawn(seed, size):
    return size * torch.randn(
        NUM_PROMPTS, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(seed)
    )


HEALTHY = {
    "float32": lambda logits: logits.float().log_softmax(-1).double(),
    "bfloat16": lambda logits: logits.bfloat16().double().log_softmax(-1),
    "float16": lambda logits: logits.half().double().log_softmax(-1),
    "other weights": lambda logits: (logits + drawn(5, 0.4)).log_softmax(-1),
    "another model": lambda logits: drawn(6, 2.5).double().log_softmax(-1),
    "one place": one_place,
}


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("cause", HEALTHY)
def test_rounding_and_other_weights_are_no_setting(sides, cause, lists):
    """What no hypothesis makes is named after none."""
    logits, tokens = model()
    before, after = logits.log_softmax(-1), HEALTHY[cause](logits)
    tops = (before, after) if lists else ()
    report = sides(tokens, chosen(before, tokens), chosen(after, tokens), *tops)
    assert report.logprobs.hypothesis is None


@pytest.mark.parametrize(("length", "all_but"), [(LENGTH, True), (LENGTH + 5, False)])
def test_a_token_that_is_counted_once_too_often_is_named(sides, length, all_but):
    """The first pad behind each answer that is shorter than the longest one of its batch."""
    logits, tokens = model()
    x = chosen(logits.log_softmax(-1), tokens)
    answers, a, b = [], [], []
    for number, (ids, row) in enumerate(zip(tokens, x, strict=True)):
        num = LENGTH - number % 4
        answers.append(([*ids[:num]], [*ids[:num], torch.tensor(0)] if num < length else [*ids]))
        a.append(row[:num])
        b.append(torch.cat([row[:num], torch.tensor([-7.5])]) if num < length else row)
    if not all_but:
        answers[0] = answers[0][0], answers[0][0]
        b[0] = a[0]
    ids_a, ids_b = ([torch.stack(ids) for ids in side] for side in zip(*answers, strict=True))
    report = sides((ids_a, ids_b), a, b)
    assert report.verdict.kind == "systematic"
    num = "9 of 12 answers, all but the longest" if all_but else "11 of 12 answers:"
    assert f"B counts one token more in {num}" in report.verdict.summary
    assert "id 0 each, a pad or the token that ends" in report.verdict.summary


@pytest.mark.slow
def test_a_small_difference_that_goes_with_log_p_is_no_rounding(sides):
    """Of chosen tokens alone: a temperature near 1 makes no more than rounding may, but rounding
    does not go with log p."""
    logits, tokens = model(num_prompts=40)
    before = chosen(logits.log_softmax(-1), tokens)
    after = chosen((logits / 0.97).log_softmax(-1), tokens)
    verdict = sides(tokens, noisy(before, 1e-3), after).verdict
    assert verdict.kind == "undetermined"
    assert "as another temperature makes it" in verdict.summary
    assert sides(tokens, noisy(before, 1e-3), before).verdict.kind == "within_floor"


def test_hardly_anything_of_log_p_is_no_temperature(sides):
    """One that nobody sets: the likeliest token's number in the place of each, without lists."""
    logits, tokens = model()
    log_p = logits.log_softmax(-1)
    verdict = sides(tokens, chosen(log_p, tokens), log_p.amax(-1)).verdict
    assert verdict.kind == "systematic"
    assert "as another temperature" not in verdict.summary


def test_numbers_that_are_nearly_nothing_are_no_mean(sides):
    """A thousandth of what they are to be is explained by no length."""
    logits, tokens = model()
    values = chosen(logits.log_softmax(-1), tokens)
    noise = torch.rand(values.shape, generator=torch.Generator().manual_seed(4)).double()
    report = sides(tokens, values, -0.002 * noise)
    assert "length" not in report.verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "sharp"), [(0.25, 1), (2.0, 2)])
def test_a_temperature_is_no_rule_of_sampling_as_well(sides, temperature, sharp):
    """Lists that hold nearly all, of sharp distributions, whose tails are rounding alone."""
    logits, _ = model()
    before = (sharp * logits).log_softmax(-1)
    after = (before / temperature).log_softmax(-1)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.multinomial(after.exp().reshape(-1, VOCABULARY), 1, generator=generator)
    tokens = tokens.reshape(NUM_PROMPTS, LENGTH)
    top = [before, after] if temperature < 1 else [before, None]
    report = sides(tokens, chosen(before, tokens), noisy(chosen(after, tokens), 0.001), *top)
    assert f"at temperature {temperature:g} (fitted" in report.verdict.summary


@pytest.mark.slow
def test_a_temperature_is_not_named_where_the_tokens_have_other_rows_as_well(sides):
    """The lists are A's at 0.7, and B's own numbers are of the token before: one value explains the
    lists alone, so none is told."""
    logits, tokens = model()
    before = logits.log_softmax(-1)
    after = (before / 0.7).log_softmax(-1)
    own = chosen(after.roll(1, dims=1), tokens)
    summary = sides(tokens, chosen(before, tokens), own, before, after).verdict.summary
    assert "temperature 0.7" not in summary, summary
