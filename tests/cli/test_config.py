"""Settings, presets and how configs are found."""

import re

import pytest

from divergence.config import (
    SitesPreset,
    config_names,
    decode,
    expand_sites,
    find_config,
    ignored_variables,
    load_settings,
    load_toml,
)
from divergence.errors import ConfigError
from divergence.run.site import compile_patterns


def test_nothing_set_is_nothing(tmp_path):
    """Without a file and without variables every setting is left to its command."""
    assert load_settings({}, folder=tmp_path) == {"capture": {}, "compare": {}, "check": {}}


def test_variables_are_stronger_than_the_file(tmp_path):
    """DIVERGENCE_* beats divergence.toml, key by key, in the settings' own types."""
    (tmp_path / "divergence.toml").write_text(
        '[capture]\ndevice = "cuda"\nmax_new_tokens = 3\nsites = ["mlp"]\n'
    )
    environ = {
        "DIVERGENCE_CAPTURE_MAX_NEW_TOKENS": "8",
        "DIVERGENCE_CAPTURE_SITES": "attention, lm_head:out",
        "DIVERGENCE_CAPTURE_DETERMINISTIC": "false",
        "DIVERGENCE_CHECK_POLICY": "",
    }
    settings = load_settings(environ, folder=tmp_path)
    assert settings["capture"] == {
        "device": "cuda",
        "max_new_tokens": 8,
        "sites": ("attention", "lm_head:out"),
        "deterministic": False,
    }
    assert settings["check"] == {}


def test_the_file_can_be_elsewhere(tmp_path):
    """DIVERGENCE_CONFIG names the file, and then it must exist."""
    file = tmp_path / "mine.toml"
    file.write_text('[check]\npolicy = "strict"\n')
    assert load_settings({"DIVERGENCE_CONFIG": str(file)})["check"] == {"policy": "strict"}
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        load_settings({"DIVERGENCE_CONFIG": str(tmp_path / "gone.toml")})


@pytest.mark.parametrize(
    ("text", "place", "told"),
    [
        ('[captrue]\ndevice = "x"\n', "divergence.toml", "capture"),
        ('[capture]\ndevcie = "x"\n', "divergence.toml: capture", "device"),
        ('[capture]\nmax_new_tokens = "x"\n', "divergence.toml: capture.max_new_tokens", "int"),
        ("[capture]\ntrust_remote_code = true\n", "divergence.toml: capture", "unknown key"),
    ],
)
def test_wrong_settings_name_file_and_key(tmp_path, text, place, told):
    """Typos are refused with the right name; foreign code cannot be allowed from a file."""
    (tmp_path / "divergence.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings({}, folder=tmp_path)
    assert place in caught.value.where
    assert told in str(caught.value)


def test_wrong_variables_name_themselves():
    """A variable of a section must name a setting and hold its type."""
    with pytest.raises(ConfigError, match="DIVERGENCE_CAPTURE_DEVICE") as caught:
        load_settings({"DIVERGENCE_CAPTURE_DEVCE": "cpu"})
    assert caught.value.where == "DIVERGENCE_CAPTURE_DEVCE"
    with pytest.raises(ConfigError, match="'many'"):
        load_settings({"DIVERGENCE_CAPTURE_SEED": "many"})


def test_foreign_variables_are_listed():
    """A section that does not exist is warned about, since it may be somebody else's."""
    environ = {"DIVERGENCE_CAPTRUE_DEVICE": "x", "DIVERGENCE_CAPTURE_DEVICE": "cpu", "PATH": "x"}
    environ |= {"DIVERGENCE_CONFIG": "x.toml", "DIVERGENCE_PROCESS_TUNING": "0"}
    assert ignored_variables(environ) == ["DIVERGENCE_CAPTRUE_DEVICE"]


@pytest.mark.parametrize("name", config_names("sites-"))
def test_shipped_presets_load_and_compile(name):
    """Every preset is a list of patterns, of which each regular expression compiles."""
    preset = decode(load_toml(find_config(name, prefix="sites-")), SitesPreset, where=name)
    assert preset.sites
    assert preset.description
    for pattern in preset.sites:
        if pattern.startswith("re:"):
            re.compile(pattern[3:])


@pytest.mark.parametrize(
    ("preset", "site", "expected"),
    [
        ("attention", "model.layers.3.self_attn:out", True),
        ("attention", "model.layers.3.self_attn.q_proj:in", True),
        ("attention", "transformer.h.0.attn.c_attn:out", True),
        ("attention", "model.layers.3.self_attn:out.1", False),
        ("attention", "bert.encoder.layer.1.attention.self.query:out", True),
        ("attention", "decoder.block.1.layer.0.SelfAttention.q:out", True),
        ("attention", "model.layers.3.mlp.up_proj:out", False),
        ("mlp", "model.layers.3.mlp:out", True),
        ("mlp", "model.layers.3.block_sparse_moe.gate:out", True),
        ("mlp", "model.layers.3.self_attn:out", False),
        ("norms", "model.layers.3.input_layernorm:out", True),
        ("norms", "model.layers.3.self_attn.q_norm:in", True),
        ("norms", "transformer.h.0.ln_1:out", True),
        ("norms", "transformer.ln_f:out", True),
        ("norms", "bert.embeddings.LayerNorm:out", True),
        ("norms", "model.layers.3.mlp:out", False),
    ],
)
def test_presets_select_what_they_are_called(preset, site, expected):
    """The names that transformers gives these modules are found, and others are not."""
    patterns = [pattern for pattern in expand_sites([preset]) if pattern != "blocks"]
    assert compile_patterns(patterns)(site) is expected


def test_sites_are_words_presets_or_patterns(tmp_path):
    """Built-in words stay, presets are replaced by their patterns, the rest is a pattern."""
    assert expand_sites(["blocks", "lm_head", "a.*:out"]) == ["blocks", "lm_head", "a.*:out"]
    assert expand_sites(["attention"])[0] == "blocks"
    assert expand_sites(["attention:*"]) == ["attention:*"]
    assert expand_sites(["blocks", "attention", "blocks"])[0] == "blocks"
    file = tmp_path / "mine.toml"
    file.write_text('sites = ["x:out"]\n')
    assert expand_sites([str(file)]) == ["x:out"]
    with pytest.raises(ConfigError, match=r"none\.toml"):
        expand_sites(["none.toml"])


def test_configs_are_found_by_name_or_path(tmp_path):
    """A path wins; a name is one of the shipped files; near names are offered."""
    file = tmp_path / "ci.toml"
    file.write_text("")
    assert find_config(file) == file
    assert find_config("ci").name == "ci.toml"
    with pytest.raises(ConfigError, match="did you mean strict"):
        find_config("strickt", what="policy")
    with pytest.raises(ConfigError, match="there is no policy"):
        find_config(tmp_path / "ci2.toml", what="policy")


def test_no_setting_chooses_code(tmp_path):
    """A settings file lies in the working directory, whosever that is."""
    (tmp_path / "divergence.toml").write_text('[capture]\nattn_implementation = "a/kernel:f"\n')
    with pytest.raises(ConfigError, match="may be code of its own"):
        load_settings({}, folder=tmp_path)
    with pytest.raises(ConfigError, match="may be code of its own"):
        load_settings({"DIVERGENCE_CAPTURE_ATTN_IMPLEMENTATION": "a/kernel:f"}, folder="/")
