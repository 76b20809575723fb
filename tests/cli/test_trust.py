"""Repeating a run from elsewhere: what it names is data, and code is chosen by this command alone.

Each model and each run here tries to make a file called ``evil``; none may.
"""

import json
import os
import pickle
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from divergence import capture
from divergence.errors import ModelError
from divergence.recording.engines import sessions as api
from divergence.recording.engines.load import check_data_alone
from tests.digests import without_digests

KERNEL = "attacker/kernel@main:f"
BLOCK = "model.layers.0.self_attn"
LIKE = ("capture", "--like", "run", "-o", "x", "-q")


class Evil:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.fixture(scope="module")
def honest(tmp_path_factory, llama) -> Path:
    """A run of one block's operators."""
    folder = tmp_path_factory.mktemp("honest")
    capture(str(llama), out=folder / "a", sites=["blocks", f"ops@{BLOCK}"], max_new_tokens=2)
    return folder / "a"


@pytest.fixture
def hostile(honest, tmp_path, monkeypatch):
    """``hostile(model={...}, plan={...})`` → the run in ``run``, so changed."""
    monkeypatch.setattr("logging.raiseExceptions", False)

    def make(name: str = "run", **changes: dict[str, Any]) -> Path:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        run = Path(shutil.copytree(honest, tmp_path / name))
        without_digests(run)
        manifest = json.loads((run / "manifest.json").read_text())
        for key, values in changes.items():
            manifest[key] |= values
        (run / "manifest.json").write_text(json.dumps(manifest))
        return run

    return make


@pytest.fixture
def refused(invoke, tmp_path):
    """``refused(*args, said=...)``: exit code 2, these words, and neither a run nor ``evil``."""

    def call(*args: object, said: tuple[str, ...]) -> str:
        code, out, err = invoke(*args)
        assert (code, out) == (2, ""), err
        for text in said:
            assert text in err
        assert "Traceback" not in err
        assert not (tmp_path / "evil").exists()
        assert not (tmp_path / "x").exists()
        return err

    return call


@pytest.fixture
def model_in_run(llama, tmp_path):
    """``model_in_run()`` → a copy of the model in the run's own folder."""

    def copy(source: Path = llama) -> Path:
        return Path(shutil.copytree(source, tmp_path / "run" / "model"))

    return copy


@pytest.fixture
def not_loaded(monkeypatch):
    """Models are asked for, and none is loaded: what was asked."""
    asked: list[dict[str, Any]] = []

    def load_model(loading, **options):
        asked.append({**asdict(loading), **options})
        raise ModelError("not loaded")

    monkeypatch.setattr(api, "load_model", load_model)
    return asked


# --- checkpoints that two runs with other weights name --------------------------------------------


def holes(folder: Path) -> None:
    header = b'{"x":{"dtype":"F32","shape":[274877906944],"data_offsets":[0,1099511627776]}}'
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**40)


def pickled(folder: Path) -> None:
    weights = {"model.embed_tokens.weight": Evil(folder.parent / "evil")}
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(weights))
    shutil.copy(folder / "pytorch_model.bin", folder / "model.safetensors")
    names = {"weight_map": {"x": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))


@pytest.mark.parametrize(
    ("place", "make"),
    [
        ("b", lambda folder: os.mkfifo(folder / "model.safetensors")),
        ("b", lambda folder: (folder / "model.safetensors").symlink_to("/dev/zero")),
        ("b", lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99)),
        ("b", lambda folder: folder.chmod(0)),
        ("b/c", lambda folder: folder.chmod(0)),
        ("b", holes),
        ("b", pickled),
        ("b" * 5000, lambda folder: None),
    ],
    ids=["pipe", "device", "damaged", "forbidden", "below", "holes", "pickle", "long"],
)
def test_a_checkpoint_that_a_run_names_harms_no_comparison(
    invoke, hostile, honest, tmp_path, place, make
):
    """Nothing is executed, waited for or read without end, and the answer is what it is without."""
    model = json.loads((honest / "manifest.json").read_text())["model"]
    other = dict.fromkeys(model["digests"], "0" * 32)
    source = str(tmp_path / place)
    hostile(model={"source": source, "digest": "0" * 32, "digests": other})
    (tmp_path / "b").mkdir()
    make(tmp_path / "b")
    code, out, err = invoke("compare", honest, "run")
    (tmp_path / "b").chmod(0o700)
    assert code == 2 and "STOPPED" in out and "Traceback" not in err, (out, err)
    assert not (tmp_path / "evil").exists()


# --- code of a model ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["{here}/run/model", "/proc/self/cwd/run/model", "~/run/model"])
def test_code_that_came_with_the_run(
    refused, invoke, hostile, model_in_run, tiny_model, tmp_path, monkeypatch, place
):
    """However its folder is called: it runs by this command's word, not by the run's."""
    if place.startswith("/proc") and not Path("/proc/self/cwd").exists():
        pytest.skip("no /proc here")
    monkeypatch.setenv("HOME", str(tmp_path))
    source = place.format(here=tmp_path)
    hostile(model={"source": source, "trust_remote_code": True})
    model = model_in_run(tiny_model("remote-code"))
    for file in model.glob("*.py"):
        evil = f"open({str(tmp_path / 'evil')!r}, 'w').close()\n"
        file.write_text(file.read_text().replace("import torch\n", f"import torch\n{evil}", 1))
    said = ("carries its own modelling code", "read that code, then pass --trust-remote-code")
    refused(*LIKE, said=said)
    refused("truth", "run", "-o", "x", said=said)
    refused("capture", "--like", "run", "-o", "x", "--dry-run", said=said)
    invoke(*LIKE, "--trust-remote-code")
    assert (tmp_path / "evil").exists()  # so the code above is what would have run


def test_a_model_that_tries_everything(invoke, hostile, model_in_run, tmp_path):
    """Config, tokenizer, template and generation of a model that the run names are data."""
    hostile(model={"source": str(tmp_path / "run/model"), "trust_remote_code": True})
    model = model_in_run()
    evil = tmp_path / "evil"
    code = f"open({str(evil)!r}, 'w').close()\n"
    (model / "custom_generate").mkdir()
    for name in ("evil.py", "tokenization_evil.py", "custom_generate/generate.py"):
        (model / name).write_text(code)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "elsewhere/repo--evil.M"},
        "_attn_implementation": KERNEL,
        "attn_implementation": KERNEL,
        "use_kernels": True,
        "_attn_implementation_internal": KERNEL,
        "_name_or_path": "elsewhere/repo",
        "custom_generate": "elsewhere/repo",
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text('{"custom_generate": "elsewhere/repo"}')
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer |= {
        "auto_map": {"AutoTokenizer": ["tokenization_evil.T", None]},
        "chat_template": "{{ cycler.__init__.__globals__.os.system('touch " + str(evil) + "') }}",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere/repo"}')
    code, out, err = invoke(*LIKE)
    assert (code, out) == (0, "x\n"), err
    assert not evil.exists()
    manifest = json.loads((tmp_path / "x/manifest.json").read_text())
    assert manifest["model"]["attn_implementation"] == "eager"
    assert manifest["model"]["trust_remote_code"] is False


def test_an_adapter_beside_a_model(refused, hostile, model_in_run, tmp_path, monkeypatch):
    """Where PEFT is installed transformers would load it, with the modules that it names."""
    monkeypatch.setattr("transformers.utils.is_peft_available", lambda: True)
    hostile(model={"source": str(tmp_path / "run/model")})
    (model_in_run() / "adapter_config.json").write_text('{"base_model_name_or_path": "other"}')
    refused(*LIKE, said=("comes with an adapter", "name it yourself: --model"))


# --- weights -----------------------------------------------------------------------------------


def pickled(model: Path, name: str = "pytorch_model.bin") -> Path:
    torch.save(load_file(model / "model.safetensors"), model / name)
    (model / "model.safetensors").unlink()
    return model / name


def test_pickled_weights_are_the_users_choice(refused, invoke, hostile, model_in_run, tmp_path):
    """A run names no pickle to be read; ``--model`` does, and torch reads tensors alone."""
    hostile(model={"source": str(tmp_path / "run/model")})
    model = model_in_run()
    weights = pickled(model)
    said = ("has pickled weights (pytorch_model.bin)", "name it yourself: --model")
    refused(*LIKE, said=said)
    refused("truth", "run", "-o", "x", said=said)
    assert invoke(*LIKE, "--model", "run/model")[:2] == (0, "x\n")
    shutil.rmtree(tmp_path / "x")
    weights.write_bytes(pickle.dumps({"lm_head.weight": Evil(tmp_path / "evil")}))
    refused(*LIKE, "--model", "run/model", said=("cannot load",))
    torch.save({"lm_head.weight": Evil(tmp_path / "evil")}, weights)
    refused(*LIKE, "--model", "run/model", said=("cannot load",))


@pytest.mark.parametrize("config", [{}, {"transformers_weights": "my.safetensors.index.json"}])
def test_an_index_that_names_a_pickle(refused, hostile, model_in_run, tmp_path, config):
    """The files of a safetensors index are whatever it says."""
    hostile(model={"source": str(tmp_path / "run/model")})
    model = model_in_run()
    names = list(load_file(model / "model.safetensors"))
    pickled(model, "weights.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "weights.bin")}
    name = config.get("transformers_weights", "model.safetensors.index.json")
    (model / name).write_text(json.dumps(index))
    known = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(known | config))
    refused(*LIKE, said=("has pickled weights (weights.bin)",))


DEEP = b'{"x": %s%s, "weight_map": {"a": "b.bin"}}' % (b"[" * 150, b"]" * 150)
"""The loader would read it."""


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"pytorch_model.bin": b""}, "pickled weights (pytorch_model.bin)"),
        ({"pytorch_model.bin.index.json": b"{}"}, "pickled weights"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "b.pt"}}'}, "weights (b.pt)"),
        ({"config.json": b'{"transformers_weights": "adapter_model.bin"}'}, "adapter_model.bin"),
        ({"model.safetensors.index.json": DEEP}, "nested more than 100 deep"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../b.safetensors"}}'}, "outside"),
        ({"config.json": b'{"transformers_weights": "../b.index.json"}'}, "outside its folder"),
        ({"config.json": b'{"transformers_weights": "/b.safetensors"}'}, "outside its folder"),
        ({"config.json": b"{"}, "no JSON"),
        ({"model.safetensors": b"", "pytorch_model.bin": b""}, None),
        ({}, None),  # the loader says that there are no weights
    ],
)
def test_weights_on_the_hub(tmp_path, monkeypatch, files, said):
    """The same of what a run calls by a hub id: asked file by file, at the revision."""

    def cached_file(source, name, *, revision, local_files_only):
        assert (source, revision) == ("org/model", "v1")
        if not (tmp_path / name).exists():
            raise OSError("no such file there")
        return str(tmp_path / name)

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    for name, data in ({"config.json": b"{}"} | files).items():
        (tmp_path / name).write_bytes(data)
    if said is None:
        check_data_alone("org/model", revision="v1")
        return
    with pytest.raises(ModelError, match=re.escape(said)):
        check_data_alone("org/model", revision="v1")


# --- names in the manifest ---------------------------------------------------------------------


@pytest.mark.parametrize("place", ["model", "settings"])
def test_attention_that_is_code(refused, hostile, not_loaded, place):
    """Only transformers' own names are taken from a run; others are given on the command line."""
    changes = {"model": {"attn_implementation": None}, "settings": {"attn_implementation": None}}
    changes[place] = {"attn_implementation": KERNEL}
    hostile(**changes)
    said = (KERNEL, "may be code of its own", "--attn-implementation")
    refused(*LIKE, said=said)
    refused("capture", "--like", "run", "-o", "x", "--dry-run", said=said)
    refused(*LIKE, "--trust-remote-code", said=said)
    refused("sensitivity", "run", said=("not loaded",))  # with eager and sdpa alone
    assert not [one for one in not_loaded if one["attn_implementation"] == KERNEL]
    refused(*LIKE, "--attn-implementation", KERNEL, said=("not loaded",))
    assert not_loaded[-1]["attn_implementation"] == KERNEL
    refused(*LIKE, "--attn-implementation", "eager", said=("not loaded",))
    assert not_loaded[-1]["attn_implementation"] == "eager"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"source": "https://example.com/m"}}, "neither a path nor a hub id"),
        ({"model": {"source": ""}}, "neither a path nor a hub id"),
        ({"model": {"source": "a\x1b[2Jb"}}, "neither a path nor a hub id"),
        ({"model": {"source": "a\0b"}}, "neither a path nor a hub id"),
        ({"model": {"revision": "../../etc/x"}}, "no branch, tag or commit"),
        ({"model": {"revision": "-x"}}, "no branch, tag or commit"),
        ({"plan": {"sites": ["/etc/passwd.toml"]}}, "among its sites"),
    ],
)
def test_names_that_lead_elsewhere(refused, hostile, not_loaded, changes, said):
    """URLs, files and escape codes are no models, revisions or sites."""
    hostile(**changes)
    refused(*LIKE, said=(said,))
    refused("truth", "run", "-o", "x", said=(said,))
    assert not_loaded == []


def test_revisions_as_the_hub_has_them(refused, hostile, not_loaded):
    """Branches, tags, commits and pull requests."""
    for revision in ("main", "v1.0-rc.1", "8" * 40, "refs/pr/1"):
        hostile(model={"source": "org/model", "revision": revision})
        refused(*LIKE, said=("not loaded",))
        assert not_loaded[-1]["revision"] == revision


# --- what is said ------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_taken_from_the_run_is_said(invoke, honest, llama):
    """In one line on stderr, less what this command chooses; not with -q."""
    code, _, err = invoke("capture", "--like", honest, "-o", "x", "--sites", "blocks")
    model = f"model {llama} (as data, no code)"
    rest = "1 prompt, up to 2 new tokens"
    assert code == 0
    assert err == f"from {honest}: {model}, bfloat16, eager attention, {rest}\n"
    words = ("--model", llama, "--dtype", "float32", "--attn-implementation", "sdpa", "--force")
    _, _, err = invoke("capture", "--like", honest, "-o", "x", "--sites", "blocks", *words)
    assert err == f"from {honest}: {rest}\n"
    _, _, err = invoke("truth", honest, "-o", "truth", "--sites", "blocks")
    assert err == f"from {honest}: {model}, bfloat16, eager attention, {rest}\n"
    _, _, err = invoke("replay", honest, "-o", "y", "--model", llama, "--site", f"{BLOCK}/*mm*")
    assert err == f"from {honest}: 4 operators with their recorded inputs, seed 0\n"
    assert invoke("capture", "--like", honest, "-o", "x", "--force", "-q")[2] == ""


def test_a_seed_beyond_64_bits(refused, hostile):
    """torch takes none; it is the run that is wrong, not the tool."""
    hostile(settings={"seed": 2**70})
    refused("replay", "run", "-o", "x", said=("does not fit 64 bits", "settings.seed"))
    refused(*LIKE, said=("does not fit 64 bits",))
