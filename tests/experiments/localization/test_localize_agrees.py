"""One decision: compare, localize's first line, its page and JSON name one place and one side."""

import pytest
import torch

from divergence import capture, compare, localize

MIDDLE = "model.layers.1"


@pytest.fixture
def pair(shared_run, shared_truth):
    """(the run, its truth)."""
    prompts = ["one two three four five six seven eight"]
    model = {"dtype": "float32", "num_blocks": 3}
    a = shared_run(model=model, prompts=prompts, max_new_tokens=2, probe=False)
    return a, shared_truth(a)


def every_epsilon(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= 1e4


def every_scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.05


def added_everywhere(model):
    for layer in model.model.layers:
        down = layer.mlp.down_proj
        down.forward = lambda x, own=down.forward: own(x) + 0.5


def a_kept_result(model):
    """A result that belongs to another call, copied as it is."""
    activation, kept = model.get_submodule(f"{MIDDLE}.mlp.act_fn"), {}
    own = activation.forward

    def forward(x):
        return kept.setdefault(x.shape, own(x) * 1.05).clone()

    activation.forward = forward


def kept_results(model):
    """The same code in every block; only the middle one's result is off."""
    for number, layer in enumerate(model.model.layers):
        factor, kept, own = torch.tensor([1, 1.05, 1])[number], {}, layer.mlp.act_fn.forward

        def forward(x, factor=factor, kept=kept, own=own):
            return kept.setdefault(x.shape, own(x) * factor).clone()

        layer.mlp.act_fn.forward = forward


def a_kept_value(model):
    """In decode steps the cache's values are copied and partly overwritten."""
    attention = model.get_submodule(f"{MIDDLE}.self_attn")
    own = attention.forward

    def forward(hidden_states, past_key_values=None, **options):
        update = past_key_values.update

        def stale(key, value, layer, *args, **more):
            key, value = update(key, value, layer, *args, **more)
            if hidden_states.shape[1] == 1:
                value = value.clone()
                value[:, :, :3] = 0
            return key, value

        past_key_values.update = stale
        try:
            return own(hidden_states, past_key_values=past_key_values, **options)
        finally:
            del past_key_values.update

    attention.forward = forward


def a_kept_table(model):
    rotary, kept = model.model.rotary_emb, {}
    own = rotary.forward

    def forward(x, position_ids):
        cos, sin = own(x, position_ids)
        return kept.setdefault(cos.shape, cos * 0.95).clone(), sin

    rotary.forward = forward


def most_linears(model):
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.forward = lambda x, own=module.forward: own(x) * 1.1


CASES = {
    "epsilon": (every_epsilon, "is called with other="),
    "scale": (every_scale, "is called with "),
    "bias": (added_everywhere, "from operators that only B calls: "),
    "result": (a_kept_result, "from operators that only B calls: "),
    "value": (a_kept_value, "the error comes into "),
    "table": (a_kept_table, "model.rotary_emb:out, by B: "),
    "linears": (most_linears, "from operators that only B calls: "),
}


@pytest.mark.parametrize("case", CASES)
def test_no_command_says_otherwise(pair, tmp_path, case, lines_of):
    """Where all operators are right by themselves, the first line says what comes in; compare's
    side and confidence are those of the descent and of its page."""
    (a, true), (prepare, words) = pair, CASES[case]
    b = capture(like=a, out=tmp_path / "b", prepare=prepare, probe=False)
    verdict = compare(a, b, truth=true).verdict
    result = localize(
        a, b, truth=true, out=tmp_path / "work", here="both", prepare_candidate=prepare
    )
    first = lines_of(result)[0]
    assert words in first
    assert "is made at" not in first
    assert "with other casts or layouts" not in first
    # both sides' configurations have A's number, and may be wrong
    confidence = "medium" if case in ("epsilon", "scale") else "high"
    assert (verdict.side, verdict.confidence) == ("candidate", confidence)
    assert result.report is not None
    assert (result.side, result.doubt, result.contradiction) == ("candidate", None, None)
    decided = result.report.verdict
    assert (decided.side, decided.confidence) == (verdict.side, verdict.confidence)
    if result.operator is not None:
        assert first == f"LOCALIZED: {decided.summary}"
        assert decided.onset.site == f"{result.operator.site}:out"
        assert result.levels[-1].site == decided.onset.site


@pytest.mark.slow
def test_code_of_both_sides_names_none_in_either(pair, tmp_path, monkeypatch, lines_of):
    """B's class runs other code that is nobody's replacement there: neither command takes A's
    truth for a proof."""
    a, true = pair
    monkeypatch.setattr("divergence.recording.code._Reader._say", lambda *_: None)
    b = capture(like=a, out=tmp_path / "b", prepare=kept_results, probe=False)
    verdict = compare(a, b, truth=true).verdict
    result = localize(
        a, b, truth=true, out=tmp_path / "work", here="both", prepare_candidate=kept_results
    )
    assert result.report is not None
    decided = result.report.verdict
    assert (verdict.side, verdict.confidence) == (None, "medium")
    assert (result.side, decided.side, decided.confidence) == (None, None, "medium")
    assert "whose code is right it cannot tell" in result.doubt
    assert ", by B" not in lines_of(result)[0]
