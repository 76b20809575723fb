"""Nan and inf in a batch: the prompt and the token that hold them, and no other."""

import math

import pytest

from divergence import BatchOptions, capture

PROMPTS = [[7, 9, 11, 13, 15, 17, 19], [21, 23, 25], [31, 33, 35, 37, 39]]


@pytest.fixture
def batch(shared_run):
    options = {"prompts": PROMPTS, "max_new_tokens": 2, "probe": False}
    return shared_run(model={"dtype": "float32"}, batching=BatchOptions(batch=True), **options)


def spoilt(path, rows, token, value):
    """A ``prepare`` under which a module's output is ``value`` in these rows of the prefill."""

    def prepare(model):
        def hook(module, inputs, output):
            if output.shape[1] > 1:
                output[rows, token] = value

        model.get_submodule(path).register_forward_hook(hook)

    return prepare


CASES = {
    "nan in one block": ("model.layers.1", [2], -1, math.nan, 2, 4),
    "inf in two prompts": ("model.layers.0", [1, 2], -2, math.inf, 1, 1),
    "-inf in one channel's row": ("model.norm", [1], -1, -math.inf, 1, 2),
    "nan in an embedding": ("model.embed_tokens", [2], -5, math.nan, 2, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_prompt_that_holds_it_is_named(batch, case, answer):
    """The onset's prompt and token are those of the first element that is no number."""
    path, rows, token, value, prompt, position = CASES[case]
    prepare = spoilt(path, rows, token, value)
    verdict = answer(batch, prepare).verdict
    assert (verdict.kind, verdict.side) == ("nonfinite", "candidate")
    assert (verdict.onset.sample, verdict.onset.position) == (prompt, position)
    named = ", ".join(map(str, rows))
    assert f"in prompt{'s' * (len(rows) > 1)} {named} (of 3)" in verdict.summary


def test_equal_nan_on_both_sides_is_placed_alike(tmp_path, tiny_model, answer):
    """Equal bits tell no row by their statistics, so that the tensor itself is looked at."""
    prepare = spoilt("model.layers.0", [1], -1, math.nan)
    model = str(tiny_model("llama", dtype="float32"))
    a = capture(
        model,
        out=tmp_path / "a",
        prompts=PROMPTS,
        batching=BatchOptions(batch=True),
        max_new_tokens=1,
        probe=False,
        prepare=prepare,
    )
    verdict = answer(a, prepare).verdict
    assert (verdict.kind, verdict.side, verdict.onset.sample) == ("nonfinite", "both", 1)
    assert "in prompt 1 (of 3)" in verdict.summary


def test_an_infinity_that_both_sides_have_is_not_where_they_part(
    batch, tmp_path, tiny_model, answer
):
    """Prompt 0 is inf on both sides, prompt 2 on one: prompt 2 is named."""
    model = str(tiny_model("llama", dtype="float32"))
    both, more = (spoilt("model.layers.1", rows, -1, math.inf) for rows in ([0], [0, 2]))
    a = capture(
        model,
        out=tmp_path / "a",
        prompts=PROMPTS,
        batching=BatchOptions(batch=True),
        max_new_tokens=1,
        probe=False,
        prepare=both,
    )
    verdict = answer(a, more).verdict
    assert (verdict.kind, verdict.onset.sample) == ("nonfinite", 2)
