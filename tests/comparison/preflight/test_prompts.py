"""Prompts that differ by a few tokens: which side has them, and where."""

import pytest

from divergence import compare

TEXT = [17, 101, 23, 44, 61, 8]


@pytest.fixture
def recorded(shared_run):
    """``recorded(ids)`` → a run of the tiny Llama with this prompt."""
    return lambda ids: shared_run(prompts=[list(ids)], max_new_tokens=1, probe=False)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([1, *TEXT], [1, 1, *TEXT], "B begins with token 1 twice, A once"),
        ([1, 1, *TEXT], [1, *TEXT], "A begins with token 1 twice, B once"),
        ([1, *TEXT], TEXT, "A begins with token 1, which B lacks"),
        (TEXT, [5, 9, *TEXT], "B begins with 2 tokens, [5, 9], which A lacks"),
        ([*TEXT, 5, 9], TEXT, "A ends with 2 tokens, [5, 9], which B lacks"),
        (TEXT, [*TEXT[:3], 2, *TEXT[3:]], "from token 3 on B has more: token 2"),
        (TEXT, [*TEXT[:3], 2, *TEXT[4:]], "prompt 0 parts at token 3: [44, 61, 8] / [2, 61, 8]"),
    ],
)
def test_tokens_that_one_side_has_besides_are_told(recorded, a, b, words):
    """A first token written twice or not at all, a template that lost its beginning or its end."""
    verdict = compare(recorded(a), recorded(b)).verdict
    assert verdict.kind == "incomparable"
    assert words in verdict.summary
