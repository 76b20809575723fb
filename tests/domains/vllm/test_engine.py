"""What the engine refuses before anything is loaded."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from divergence import capture
from divergence.errors import ModelError, UsageError
from tests.models.tiny import build


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build("llama", tmp_path_factory.mktemp("llama") / "model")


def refused(model, tmp_path, kind, **how):
    with pytest.raises(kind) as error:
        capture(model, out=tmp_path / "a", engine="vllm", prompts=[[3, 4]], **how)
    assert not (tmp_path / "a").exists()
    return error.value


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="it is installed")
def test_not_installed(model, tmp_path):
    """Said, with the page that tells how."""
    error = refused(model, tmp_path, ModelError)
    assert "vllm is not installed" in str(error) and "docs/engines.md" in error.hint


def test_too_old(model, tmp_path, monkeypatch):
    """The version that is there, and the one that is needed."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.9.2"))
    error = refused(model, tmp_path, ModelError)
    assert "vllm 0.9.2 is too old" in str(error) and "0.32 or newer" in error.hint


def test_several_processes(model, tmp_path):
    """torchrun starts them: with what to type."""
    error = refused(model, tmp_path, UsageError, engine_options=["tensor_parallel_size=2"])
    assert "tensor_parallel_size=2: this is one process" in str(error)
    assert "--nproc-per-node 2" in error.hint and "--mesh tp" in error.hint


def test_an_option_that_it_has_not(model, tmp_path):
    """Near ones are suggested."""
    error = refused(model, tmp_path, UsageError, engine_options=["max_model_length=64"])
    assert "max_model_len" in error.hint


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("max_num_seqs=many", "Expected `int`"),
        ("max_model_len=0", ">= 1"),
        ("batch_invariant=often", "Expected `bool`"),
        ("max_model_len", "is not KEY=VALUE"),
    ],
)
def test_an_option_of_another_type(model, tmp_path, option, said):
    """Before anything is loaded, with what would be right."""
    error = refused(model, tmp_path, UsageError, engine_options=[option])
    assert said in str(error) and "for example" in error.hint


def test_an_encoder(tmp_path):
    """It has no causal language model's tokens."""
    encoder = build("bert", tmp_path / "model")
    assert "no causal language model" in str(refused(encoder, tmp_path, UsageError))


def test_a_map_that_is_not_there(model, tmp_path):
    """Refused before vLLM is asked."""
    error = refused(model, tmp_path, UsageError, engine_options={"name_map": "lama"})
    assert "no name map 'lama'" in str(error)
