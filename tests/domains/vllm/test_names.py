"""Name maps: where transformers' modules are in vLLM's."""

import re

import pytest
import torch
from torch import nn

from divergence.config import config_names
from divergence.domains.vllm.engine import ModuleMap, map_for, parameters_of, places_of
from divergence.errors import ConfigError, UsageError
from divergence.recording.engines.load import Loading, empty_model
from tests.models.families import build

FAMILIES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "llama": "llama",
    "mixtral": "mixtral",
    "phi3": "phi3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3-moe",
}
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


def others(pattern, target, names):
    """``target`` for each of the names that ``pattern`` stands for."""
    expression = re.compile(re.escape(pattern).replace(r"\*", "([^.]+)"))
    for match in filter(None, map(expression.fullmatch, names)):
        stars = iter(match.groups())
        yield re.sub(r"\*", lambda _, stars=stars: next(stars), target)


def as_vllm(found, structure):
    """vLLM's modules as far as the map names them, of a model of transformers."""
    names = {name for name, _ in structure.named_modules() if name}
    added = set()
    others_named = (found.renamed | found.tables).items()
    for whole, parts in ({one: [two] for one, two in others_named} | found.split).items():
        added.update(others(parts[0], whole, names))
    parameters = {name for name, _ in structure.named_parameters(remove_duplicate=False)}
    weights = {
        one for whole, part in found.weights.items() for one in others(part, whole, parameters)
    }
    tree = paths(*names, *added, *(one.rpartition(".")[0] for one in weights))
    for one in weights:
        owner, _, name = one.rpartition(".")
        tree.get_submodule(owner).register_parameter(name, nn.Parameter(torch.zeros(1)))
    return tree


def test_every_map_is_tested():
    """Here, and against vLLM itself in test_runs."""
    assert set(config_names("maps/")) == set(FAMILIES)


@pytest.fixture(scope="module", params=FAMILIES)
def mapped(request, tmp_path_factory):
    """(name of the map, transformers' model, places, parameters) of each map."""
    name = request.param
    folder = tmp_path_factory.mktemp(name) / "model"
    twin = empty_model(Loading(str(build(FAMILIES[name], folder)))).module
    found = map_for("", name)
    assert found is not None and twin.config.model_type in found.models
    tree = as_vllm(found, twin)
    places = places_of(found, structure=twin, module=tree, model_type=name)
    return name, twin, places, parameters_of(found, structure=twin, module=tree)


def test_a_map_names_all_modules_with_weights(mapped):
    """Each has a place, or its parameters are found one by one."""
    _, twin, places, parameters = mapped
    left = {
        f"{path}.{weight}"
        for path, module in twin.named_modules()
        if path not in places
        for weight, _ in module.named_parameters(recurse=False)
    }
    if twin.config.tie_word_embeddings:
        left.discard("lm_head.weight")
    assert left <= set(parameters)
    assert set(parameters) <= dict(twin.named_parameters(remove_duplicate=False)).keys()


def test_a_fused_matrix_has_all_rows_of_its_parts(mapped):
    """In the order of the map; where transformers has the same matrix there is nothing to split."""
    name, twin, places, _ = mapped
    config, block = twin.config, "model.layers.1."
    head = config.head_dim if hasattr(config, "head_dim") else 16
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    if name == "phi3":
        assert places[f"{block}self_attn.qkv_proj"].rows is None
        return
    assert places[f"{block}self_attn.q_proj"].rows == slice(0, q)
    assert places[f"{block}self_attn.k_proj"].rows == slice(q, q + kv)
    assert places[f"{block}self_attn.v_proj"].rows == slice(q + kv, q + 2 * kv)
    assert places[f"{block}self_attn.q_proj"].theirs == f"{block}self_attn.qkv_proj"
    if f"{block}mlp.up_proj" in places:
        assert places[f"{block}mlp.up_proj"].rows.start == config.intermediate_size


def test_the_parts_that_a_rank_has():
    """Of a matrix that is divided among ranks vLLM tells the rows itself."""
    tree, structure = paths("a.qkv_proj"), paths("a.q_proj", "a.k_proj")
    tree.a.qkv_proj.output_partition_sizes = [8, 2]
    found = ModuleMap(models=("x",), same=(), split={"a.qkv_proj": ("a.q_proj", "a.k_proj")})
    places = places_of(found, structure=structure, module=tree, model_type="x")
    assert places["a.q_proj"].rows == slice(0, 8) and places["a.k_proj"].rows == slice(8, 10)


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
