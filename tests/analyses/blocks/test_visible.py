"""What is said not to be seen is true: an error somewhat larger is found, at its block."""

import contextlib

import pytest
import torch

from benchmarks._recorded import without_truth
from divergence import capture, compare
from divergence.comparison.result import Visible
from divergence.report.summary import report_lines
from tests.by_hand import measured

BLOCK = "model.layers.2"
PROMPTS = [[(13 * n + 7 * k) % 300 + 3 for k in range(count)] for n, count in enumerate((12, 20))]


@pytest.fixture
def pair(shared_run):
    """``pair(dtype)``: a run and its healthy partner."""

    def make(dtype):
        options = {"prompts": PROMPTS, "max_new_tokens": 4, "dtype": dtype, "truth": "full"}
        a = shared_run(model={"num_blocks": 5}, probe=False, **options)
        return a, shared_run(like=a, attn_implementation="sdpa", probe=False)

    return make


def off(level, size):
    """A change of the block's output: an error of that size in each row it concerns."""

    def prepare(model):
        draw = torch.Generator().manual_seed(1)

        def changed(module, args, output):
            y = output.double()
            error = torch.randn(y.shape, generator=draw, dtype=torch.float64)
            error *= size * y.norm(dim=-1, keepdim=True) / error.norm(dim=-1, keepdim=True)
            if level == "forward":
                error *= y.shape[-2] == len(PROMPTS[1])
            if level == "token":
                error[..., torch.arange(y.shape[-2]) != 9, :] = 0
            return (y + error).to(output.dtype)

        model.get_submodule(BLOCK).register_forward_hook(changed)

    return prepare


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("level", ["block", "forward", "token"])
def test_what_is_larger_is_found_and_what_is_far_smaller_is_not(
    level, truth, dtype, pair, tmp_path
):
    """An error twice as large as what is said to be visible is found at its block; a fifth is not
    found."""
    a, b = pair(dtype)
    known = contextlib.nullcontext() if truth else without_truth()
    with known:
        seen = compare(a, b).visible
        assert isinstance(seen, Visible)
        assert seen.block < min(seen.forward, seen.token)
        for size, place in ((2 * getattr(seen, level), BLOCK), (seen.block / 5, None)):
            bad = capture(
                like=a,
                out=tmp_path / str(place),
                prepare=off(level, size),
                probe=False,
                attn_implementation="sdpa",
            )
            verdict = compare(a, bad).verdict
            assert (verdict.onset and verdict.onset.block) == place


@pytest.mark.slow
def test_each_level_is_said_where_nothing_is_found(pair):
    """A healthy pair says how small an error of a step, a token and a channel would have shown."""
    a, b = pair("float32")
    report = compare(a, b)
    lines = [line.text for line in report_lines(report)]
    text = " ".join(lines[next(n for n, line in enumerate(lines) if line[:8] == "not seen") :])
    assert "errors below " in text
    assert all(f"{what} " in text for what in ("step", "token", "channel"))
    with without_truth():
        assert compare(a, b).visible.channel is None


def test_a_token_is_seen_as_well_among_many_prompts(judged):
    """The limit of a single token does not depend on how many forwards are looked at."""
    seen = []
    for num_prompts in (2, 8):
        sites = [
            measured(f"h.{block}:out", 0.8, sample=sample, order=block, floor=1e-6, features=8)
            for sample in range(num_prompts)
            for block in range(6)
        ]
        seen.append(judged(sites).visible.token)
    assert seen[0] == seen[1]
