"""Name maps: where transformers' modules are in vLLM's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from divergence.config import config_names
from divergence.errors import ConfigError, UsageError
from divergence.recording.engines.load import empty_model
from divergence.recording.engines.vllm.names import ModuleMap, map_for, places_of
from tests.models.tiny import build

FAMILIES = {"llama": "llama", "qwen3": "qwen3"}
"""Name map → a tiny model of such a family."""


def paths(*names):
    """A tree of empty modules."""
    root = nn.Module()
    for name in names:
        node = root
        for part in name.split("."):
            if part not in dict(node.named_children()):
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
    return root


def as_vllm(found, structure):
    """vLLM's modules as far as the map names them, of a model of transformers."""
    names = [name for name, _ in structure.named_modules() if name]
    fused = set()
    for whole, parts in found.split.items():
        for name in names:
            if parts[0].rpartition(".")[2] == name.rpartition(".")[2]:
                fused.add(f"{name.rpartition('.')[0]}.{whole.rpartition('.')[2]}")
    return paths(*names, *fused)


def test_every_map_is_tested():
    """Here, and against vLLM itself in test_runs."""
    assert set(config_names("maps/")) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_map_names_modules_of_transformers(tmp_path, name):
    """Every pattern is a module of a real model, and a fused matrix has all rows of its parts."""
    twin = empty_model(str(build(FAMILIES[name], tmp_path / "model"))).module
    found = map_for(name)
    assert found is not None and name in found.models
    places = places_of(found, structure=twin, module=as_vllm(found, twin), model_type=name)
    config = twin.config
    head, hidden = config.head_dim, config.hidden_size
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    block = "model.layers.1."
    assert places[f"{block}self_attn.q_proj"].rows == slice(0, q)
    assert places[f"{block}self_attn.k_proj"].rows == slice(q, q + kv)
    assert places[f"{block}self_attn.v_proj"].rows == slice(q + kv, q + 2 * kv)
    assert places[f"{block}mlp.up_proj"].rows.start == config.intermediate_size
    assert places[f"{block}self_attn.q_proj"].theirs == f"{block}self_attn.qkv_proj"
    assert twin.get_submodule("model.norm").weight.shape == torch.Size([hidden])
    left = {
        path for path, module in twin.named_modules()
        if path not in places and any(True for _ in module.parameters(recurse=False))
    }  # fmt: skip
    assert not left, "modules with weights that the map does not know"


def test_a_pattern_that_matches_nothing():
    """Near names are suggested."""
    tree = paths("model.layers.0.mlp", "model.norm")
    found = ModuleMap(models=("x",), same=("model.layer.*",))
    with pytest.raises(UsageError, match="matches no module of the model in vLLM") as error:
        places_of(found, structure=tree, module=tree, model_type="x")
    assert "model.layers.0" in str(error.value.hint)


def test_a_module_that_transformers_lacks():
    """The map is for another family."""
    found = ModuleMap(models=("x",), same=("model.norm",))
    with pytest.raises(UsageError, match="in transformers"):
        places_of(found, structure=paths("model.final"), module=paths("model.norm"), model_type="x")


def with_blocks(name):
    root = nn.Module()
    root.add_module(name, nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    return root


def test_an_unknown_family_has_its_blocks_alone():
    """Where both have them at one path: nothing else, since it may mean another thing."""
    places = places_of(
        None, structure=with_blocks("layers"), module=with_blocks("layers"), model_type="x"
    )
    assert set(places) == {".", "layers.0", "layers.1"}


def test_an_unknown_family_with_other_names():
    """The known families are said."""
    with pytest.raises(UsageError, match="no name map is known") as error:
        places_of(None, structure=with_blocks("layers"), module=with_blocks("h"), model_type="x")
    assert "llama" in str(error.value.hint) and "qwen3" in str(error.value.hint)


def test_a_map_that_is_not_there():
    """Near names of the shipped ones."""
    with pytest.raises(ConfigError, match="no name map 'lama'") as error:
        map_for("llama", "lama")
    assert "did you mean llama" in str(error.value.hint)


def test_a_map_of_ones_own(tmp_path):
    """By path; strict, as all configuration."""
    path = tmp_path / "mine.toml"
    path.write_text('models = ["mine"]\nsame = ["model.norm"]\n')
    assert map_for("other", str(path)) == ModuleMap(models=("mine",), same=("model.norm",))
    path.write_text('models = ["mine"]\nsames = ["model.norm"]\n')
    with pytest.raises(ConfigError, match="unknown key 'sames'"):
        map_for("other", str(path))
