"""Rows of a forward, divided into the prompts and the steps that they belong to."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from divergence.domains.vllm.engine import Gathered, PromptTokens, alone, forward_of
from divergence.errors import ModelError
from divergence.recording.prompts import group_samples
from divergence.run.manifest import SampleTokens
from tests.by_hand import put


def prompts(*lengths):
    """A batch with pads before the shorter prompts."""
    samples = [SampleTokens(prompt_ids=[7] * length) for length in lengths]
    group_samples(samples, batch=True, pad_left=True)
    return samples


def runner(*requests):
    """(place, tokens before, tokens now) of each, in the order of rows, as vLLM's worker tells."""
    ends = np.cumsum([0, *(count for _, _, count in requests), 0, 0])
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=[f"{place}-1a2b3c4d" for place, _, _ in requests],
            num_computed_tokens_cpu=np.array([before for _, before, _ in requests] + [0] * 3),
        ),
        query_start_loc=SimpleNamespace(np=ends),
    )


def rows(count):
    return torch.arange(1.0, count + 1)[:, None].expand(count, 2)


def test_a_prefill_has_pads():
    """Rows of the shorter prompt stand behind its pads, wherever the scheduler put them."""
    forward = forward_of(runner((1, 0, 2), (0, 0, 3)), prompts(3, 2))
    (part,) = forward.parts
    assert part.step == 0 and forward.num_rows == 5 and forward.requests == (1, 0)
    batch = part.spread(rows(5))
    assert batch.shape == (2, 3, 2)
    assert batch[..., 0].tolist() == [[3, 4, 5], [0, 1, 2]]
    assert part.spread(rows(5), fill=9)[1, 0].tolist() == [9, 9]
    assert torch.equal(part.put(batch, torch.zeros(5, 2)), rows(5))


def test_last_rows_are_by_prompt():
    """Of which vLLM makes logits, in the order of its requests."""
    forward = forward_of(runner((1, 0, 2), (0, 0, 3)), prompts(3, 2))
    assert forward.last[0].spread(rows(2))[..., 0].tolist() == [[2], [1]]


def test_a_decode_step_in_order_is_a_view():
    """Nothing is copied where rows are prompts already."""
    (part,) = forward_of(runner((0, 3, 1), (1, 2, 1)), prompts(3, 2)).parts
    values = rows(2).contiguous()
    assert part.step == 1 and part.in_order
    assert part.spread(values).data_ptr() == values.data_ptr()


def test_a_prefill_beside_decode_steps():
    """Each row in its own prompt and its own step; the others are zeros."""
    forward = forward_of(runner((0, 4, 1), (2, 0, 2), (1, 3, 1)), prompts(3, 3, 2))
    prefill, one, two = forward.parts
    assert [part.step for part in forward.parts] == [0, 1, 2]
    assert [part.members for part in forward.parts] == [(2,), (1,), (0,)]
    assert prefill.spread(rows(4))[..., 0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 2, 3]]
    assert one.spread(rows(4))[..., 0].tolist() == [[0], [4], [0]]
    assert two.spread(rows(4))[..., 0].tolist() == [[1], [0], [0]]
    changed = prefill.put(torch.full((3, 3, 2), 9.0), rows(4))
    assert changed[:, 0].tolist() == [1, 9, 9, 4]
    assert [part.spread(rows(3))[..., 0].tolist() for part in forward.last] == [
        [[0], [0], [2]],
        [[0], [3], [0]],
        [[1], [0], [0]],
    ]


@pytest.mark.parametrize(
    "request_",
    [(0, 0, 2), (0, 2, 1), (0, 3, 2), (0, 0, 4)],
    ids=["first chunk", "last chunk", "two tokens", "begun again"],
)
def test_other_rows_are_refused(request_):
    """A prompt in chunks, or begun again after its cache was taken, is no step."""
    with pytest.raises(ModelError, match="divided the prompt, or begun it again"):
        forward_of(runner(request_), prompts(3))


def test_one_prompt_alone():
    """The default of a view: an axis in front."""
    assert torch.equal(alone(lambda seen: seen * 2, rows(3)), rows(3) * 2)
    assert alone(lambda seen: None, rows(3)) is None


def test_parts_of_a_step_are_gathered():
    """Each forward gives the rows of its own prompts."""
    sink = Gathered()
    for members, value in (((0, 2), 1.0), ((1,), 2.0)):
        sink.part = members
        sink.members.update(members)
        tensor = torch.zeros(3, 1, 2)
        tensor[list(members)] = value
        put(sink, tensor, step=1)
    assert sink.members == {0, 1, 2}
    assert sink.tensors["a:out"][0][..., 0].tolist() == [[1], [2], [1]]


def logits(*tokens):
    found = torch.zeros(len(tokens), 8)
    found[range(len(tokens)), list(tokens)] = 1.0
    return found


def test_tokens_until_all_have_ended():
    """Who has ended is fed padding while others go on, and chooses nothing any more."""
    tokens = PromptTokens(None, num=2, count=5, pad=0, ends={3})
    for one, two in ((4, 3), (5, 6), (3, 6)):
        assert not tokens.done
        tokens.choose((0, 1), logits(one, two))
    assert tokens.done
    result = tokens.result()
    assert result.generated == [[4, 5, 3], [3, 0, 0]]
    assert result.chosen == [[4, 5, 3], [3]]


def test_a_prompt_that_waited_makes_the_steps_of_the_others():
    """Requests of one forward may stand at different steps."""
    tokens = PromptTokens(None, num=2, count=4, pad=0, ends={3})
    tokens.choose((0,), logits(4))
    tokens.choose((1, 0), logits(3, 3))
    assert not tokens.done
    tokens.choose((1,), logits(7))
    assert tokens.done and tokens.result().generated == [[4, 3], [3, 0]]


def test_forced_tokens():
    """The recorded ones are fed, and the own choice is noted."""
    tokens = PromptTokens([[5, 3], [6, 7]], num=2, count=2, pad=0, ends=set())
    only = tokens.choose((1, 0), logits(1, 2))
    assert only.argmax(-1).tolist() == [6, 5]
    with pytest.raises(ModelError, match="made 1 forwards where 2"):
        tokens.result()
    tokens.choose((0, 1), logits(4, 4))
    assert tokens.result().generated == [[5, 3], [6, 7]]
    assert tokens.result().chosen == [[2, 4], [1, 4]]
