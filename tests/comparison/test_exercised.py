"""What no prompt reaches is named, and not said to be the same."""

import pytest
import torch
import transformers
from typer.testing import CliRunner

from divergence import capture, compare
from divergence.cli.main import app

PROMPTS = [[5, 9, 17, 101, 23, 44, 61, 8, 12, 90]]


class Tower(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))


def with_tower(name, fault=0.0):
    """A tower that no text reaches, and a fault in it."""

    def prepare(model):
        tower = Tower(model.config.hidden_size)
        for parameter in tower.parameters():
            torch.nn.init.constant_(parameter, 0.5 + fault)
        setattr(model.model, name, tower)

    return prepare


def leaving_early(model):
    """The last block is not called."""
    last = model.model.layers[-1]
    model.model.config.num_hidden_layers -= 1
    assert last is model.model.layers[-1]


def captured(model, out, prepare=None, **options):
    return capture(
        str(model),
        out=out,
        prompts=PROMPTS,
        max_new_tokens=2,
        probe=False,
        prepare=prepare,
        **options,
    )


@pytest.mark.parametrize("name", ["vision_tower", "audio_tower"])
def test_a_tower_that_no_prompt_reaches_is_named(name, tiny_model, tmp_path):
    """Its share of the parameters stands in the summary and beside what is not seen."""
    runs = [captured(tiny_model("llama"), tmp_path / side, with_tower(name)) for side in "ab"]
    report = compare(*runs)
    module, *_ = report.not_exercised
    assert (module.what, module.name) == ("module", f"model.{name}")
    assert 0 < module.share < 1
    assert f"not exercised: model.{name}, " in report.verdict.summary
    shown = CliRunner().invoke(app, ["compare", *(str(run.path) for run in runs)]).stdout
    assert f"model.{name}" in shown.partition("not seen")[2]


def test_layers_behind_an_early_exit_are_named(tiny_model, tmp_path):
    """A block that a model leaves out is no block that was compared."""
    report = compare(
        *(captured(tiny_model("llama"), tmp_path / side, leaving_early) for side in "ab")
    )
    assert [part.name for part in report.not_exercised] == ["model.layers.*"]


@pytest.mark.slow
def test_a_window_longer_than_the_prompts_is_named(tmp_path):
    """Nothing of a sliding window is seen that holds every token; a shorter one is reached."""
    for window, names in ((64, ["sliding_window"]), (4, [])):
        config = transformers.MistralConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=window,
        )
        model = tmp_path / f"model{window}"
        torch.manual_seed(0)
        transformers.MistralForCausalLM(config).save_pretrained(model)
        runs = [captured(model, tmp_path / f"{side}{window}") for side in "ab"]
        assert [part.name for part in compare(*runs).not_exercised] == names


def test_experts_that_no_token_went_to_are_counted(tmp_path):
    """Of 32 experts two tokens of two each reach no more than a few."""
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=32,
        sliding_window=None,
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    runs = [captured(tmp_path / "model", tmp_path / side) for side in "ab"]
    experts = compare(*runs).not_exercised
    assert {part.what for part in experts} == {"experts"}
    assert all(8 <= part.size < part.of == 32 for part in experts)


def test_all_of_a_model_that_ran_is_exercised(tiny_model, tmp_path):
    """Nothing is named where every module was called."""
    report = compare(*(captured(tiny_model("llama"), tmp_path / side) for side in "ab"))
    assert report.not_exercised == []
    assert "exercised" not in report.verdict.summary
