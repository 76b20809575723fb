"""Tensors in another shape on the two sides: copies are held together, and the rest is said."""

import pytest

from divergence import BatchOptions

PROMPTS = [[7, 9, 11, 13, 15, 17, 19, 21], [23, 25, 27, 29], [31, 33, 35, 37, 39]]


@pytest.fixture
def batch(shared_run, shared_truth):
    """``batch("gpt2")`` → (a run of three prompts in one batch, its truth)."""

    def make(architecture):
        options = {"prompts": PROMPTS, "max_new_tokens": 3, "probe": False}
        batching = BatchOptions(batch=True)
        a = shared_run(architecture, model={"dtype": "float32"}, batching=batching, **options)
        return a, shared_truth(a)

    return make


def one_row(path, change=lambda table: table, *, decode=False):
    """A ``prepare`` under which a module gives the last prompt's row for all, changed."""

    def prepare(model):
        def hook(module, inputs, output):
            tensors = output if isinstance(output, tuple) else (output,)
            if decode and tensors[0].shape[1] > 1:
                return None
            rows = tuple(change(tensor[:1]) for tensor in tensors)
            return rows if isinstance(output, tuple) else rows[0]

        model.get_submodule(path).register_forward_hook(hook)

    return prepare


CASES = {
    "positions of a padded batch": ("gpt2", "transformer.wpe", one_row("transformer.wpe")),
    "a rotary table in decode steps": (
        "llama",
        "model.rotary_emb",
        one_row("model.rotary_emb", decode=True),
    ),
    "a table of other values": (
        "gpt2",
        "transformer.wpe",
        one_row("transformer.wpe", lambda table: table * 1.1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("with_truth", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_is_held_once_is_compared_with_each_copy(batch, case, with_truth, answer):
    """A table of one row for all prompts is wrong where their own rows are other ones."""
    architecture, path, prepare = CASES[case]
    a, true = batch(architecture)
    verdict = answer(a, prepare, truth=true if with_truth else None).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", f"{path}:out")
    assert verdict.side == ("candidate" if with_truth else None)


def test_equal_rows_in_one_are_no_difference(answer, shared_run):
    """A table that is the same for every prompt may be held once or for each."""
    prompts = [[7, 9, 11, 13], [15, 17, 19, 21]]
    a = shared_run(
        "gpt2",
        model={"dtype": "float32"},
        prompts=prompts,
        batching=BatchOptions(batch=True),
        max_new_tokens=2,
        probe=False,
    )
    report = answer(a, one_row("transformer.wpe"))
    assert report.verdict.kind == "identical"
    assert report.coverage.num_skipped == 0


POOLED = {
    "the mean of all tokens": lambda rows: rows.mean(1, keepdim=True),
    "the first token's": lambda rows: rows[:, :1],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", POOLED)
def test_what_cannot_be_compared_is_said(batch, case, answer):
    """One row for all tokens is no copy of theirs; what uses it is not blamed as if it passed."""

    def prepare(model):
        own = model.transformer.wpe.forward
        model.transformer.wpe.forward = lambda ids: POOLED[case](own(ids))

    a, true = batch("gpt2")
    verdict = answer(a, prepare, truth=true).verdict
    assert "transformer.wpe was not compared: 3x8x64 against 3x1x64" in verdict.summary
    assert "which pass" not in verdict.summary
    assert verdict.confidence != "high"
