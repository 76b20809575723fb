"""What vLLM itself must be there for: limits, name maps that do not fit, an interruption."""

import importlib.util

import pytest

from divergence import Run, capture
from divergence.errors import ModelError, UsageError
from tests.models.families import build

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of vLLM's own calls
]

PROMPTS = [[5, 6, 7, 8]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build("llama", tmp_path_factory.mktemp("llama") / "model", hidden=128)


def run(model, tmp_path, **how):
    how = {"prompts": PROMPTS, "max_new_tokens": 4, "probe": False} | how
    return capture(model, out=tmp_path / "a", engine="vllm", **how)


def test_a_run_longer_than_vllm_was_made_for(model, tmp_path):
    """Before the first forward, with the length that it takes."""
    with pytest.raises(UsageError, match="4 tokens, 4 are to follow, and vLLM was made for 7") as e:
        run(model, tmp_path, engine_options={"max_model_len": 7})
    assert "max_model_len=8" in e.value.hint
    assert not (tmp_path / "a").exists()
    run(model, tmp_path, engine_options={"max_model_len": 8})


def test_more_positions_than_the_model_has(model, tmp_path):
    """vLLM's own words, in one line."""
    with pytest.raises(ModelError, match="max_model_len"):
        run(model, tmp_path, engine_options={"max_model_len": 100_000})


def test_prompts_that_would_be_divided(model, tmp_path):
    """A prompt must fit into one forward."""
    tight = {"max_model_len": 32, "max_num_batched_tokens": 16}
    with pytest.raises(UsageError, match="max_num_batched_tokens=16") as error:
        run(model, tmp_path, engine_options=tight)
    assert "max_num_batched_tokens=32" in error.value.hint


def test_a_name_map_that_matches_nothing(model, tmp_path):
    """Near names of vLLM's modules, or of transformers'."""
    path = tmp_path / "mine.toml"
    for text, said in (
        ('same = ["model.layer.*"]', "no module of the model in vLLM"),
        ('same = []\n[renamed]\n"model.norm" = "model.nrom"', "no module of the model in transf"),
        ('same = []\n[weights]\n"model.norm.wieght" = "model.norm.weight"', "in vLLM"),
    ):
        path.write_text(f'models = ["llama"]\n{text}\n')
        with pytest.raises(UsageError, match=said) as error:
            run(model, tmp_path, engine_options={"name_map": str(path)})
        assert "did you mean" in error.value.hint


def test_an_interruption_leaves_a_readable_run(model, tmp_path):
    """What was recorded before it is there; the variables are put back, and vLLM can be made
    again."""

    def stop(module):
        layer, calls = module.model.layers[1], []
        inner = layer.forward

        def forward(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return inner(*args, **kwargs)

        layer.forward = forward

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, prepare=stop)
    left = Run.open(tmp_path / "a")
    assert not left.manifest.complete
    assert {record.step for record in left.records} == {0, 1, 2}
    again = run(model, tmp_path, force=True)
    assert again.manifest.complete
