"""A machine that changes while it runs: the onset is where the run first shows it."""

from __future__ import annotations

import pytest

PROMPTS = [[7, 9, 11, 13, 15, 17, 19], [21, 23, 25, 27], [31, 33, 35, 37, 39]]


def scaled_from(first_id, model):
    """Another scale of one block's attention, from the prompt on that begins with this token."""
    attention = model.model.layers[1].self_attn
    changed = 1.5 * attention.scaling

    def watch(module, inputs, options):
        ids = options.get("input_ids")
        if ids is not None and ids.shape[1] > 1 and ids[0, 0] == first_id:
            attention.scaling = changed

    model.model.register_forward_pre_hook(watch, with_kwargs=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_id", "prompt", "told"),
    [(21, 1, "shows it in prompts 1, 2 (of 3)"), (31, 2, "shows it in prompt 2 alone (of 3)")],
)
def test_the_onset_is_in_the_first_prompt_whose_free_pass_shows_it(
    first_id, prompt, told, shared_run, answer
):
    """The anchored pass runs behind the change, so that all prompts are off in it."""
    a = shared_run(model={"dtype": "float32"}, prompts=PROMPTS, max_new_tokens=2, probe=False)
    verdict = answer(a, lambda model: scaled_from(first_id, model)).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", "model.layers.1:out")
    assert verdict.onset.sample == prompt
    assert told in verdict.summary
