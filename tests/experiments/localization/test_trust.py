"""What the second run of a pair names is no choice of this machine's user either."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from divergence import Run, capture, replay, sensitivity
from divergence.comparison.advice import _options
from divergence.errors import ModelError, UsageError
from divergence.experiments.localization.machine import Goal, Maker, also_taken, variables_to_set
from divergence.run.command import command

KERNEL = "attacker/kernel@main:f"


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("trust")
    sites = ["blocks", "ops@model.layers.0.mlp"]
    return capture(str(llama), out=folder / "a", sites=sites, max_new_tokens=1)


def changed(run: Run, **model) -> Run:
    """The run as its own manifest would say otherwise of the model."""
    manifest = run.manifest
    other = msgspec.structs.replace(manifest.model, **model)
    return Run(run.path, msgspec.structs.replace(manifest, model=other), run.records)


@pytest.fixture
def maker(run, tmp_path):
    """``maker(candidate, here=...)``: what makes localize's runs, in an empty folder."""

    def make(candidate: Run, here: str = "both") -> Maker:
        return Maker(
            run,
            candidate,
            tmp_path / "work",
            model=None,
            device="cpu",
            here=here,
            force=False,
            trust_remote_code=False,
            prepare={},
            again=command("localize"),
            progress=lambda *_: None,
        )

    return make


GOAL = Goal(sites=["blocks"])


def test_the_candidates_attention(run, maker):
    """localize takes the candidate's attention for its side: transformers' own alone."""
    with pytest.raises(UsageError, match="may be code of its own"):
        maker(changed(run, attn_implementation=KERNEL)).operators("candidate", GOAL)


def test_the_attention_of_a_planted_candidate(run, tmp_path):
    """sensitivity --confirm captures as the candidate was captured, with the same limit."""
    theirs = changed(capture(like=run, out=tmp_path / "b"), attn_implementation=KERNEL)
    with pytest.raises(UsageError, match="may be code of its own"):
        sensitivity(run, candidate=theirs, blocks=["0"], faults=["scale"], confirm=True)


def test_the_candidates_model(run, llama, maker, tmp_path):
    """Where it has another source than the reference, that is loaded as data, too."""
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has pickled weights"):
        maker(changed(run, source=str(model))).operators("candidate", GOAL)


def test_what_is_taken_of_the_second_run_is_said(run):
    """Its model, dtype, attention and variables, where they are not the first's."""
    values = {"dtype": "float16", "attn_implementation": "sdpa", "label": "x"}
    variables = {"OMP_NUM_THREADS": "2", "MKL_CBWR": None}
    said = also_taken(run, "org/m", values, variables, with_code=False)
    rest = "model org/m (as data, no code), float16, sdpa, OMP_NUM_THREADS=2"
    assert said == f"from {run.path}: {rest}"
    assert also_taken(run, None, {"label": "x"}, {}, with_code=True) is None


def test_a_run_in_another_process_imports_nothing_from_here(run, maker, monkeypatch):
    """Beside a run there may lie a torch.py: the process that has its variables looks elsewhere."""
    started = []

    def start(words, *, env, **_):
        started.append(env)
        return SimpleNamespace(returncode=1, stderr="")

    monkeypatch.setattr("divergence.experiments.localization.machine.subprocess.run", start)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    environment = msgspec.structs.replace(run.manifest.environment, variables={"MKL_CBWR": "AVX2"})
    manifest = msgspec.structs.replace(run.manifest, environment=environment)
    with pytest.raises(ModelError, match="recorded environment variables failed"):
        maker(Run(run.path, manifest, run.records)).operators("candidate", GOAL)
    assert (started[0]["PYTHONSAFEPATH"], started[0]["MKL_CBWR"]) == ("1", "AVX2")


def test_printed_commands_trust_no_code(run, maker):
    """What is to be run on another machine says no word that this user has not said."""
    theirs = changed(run, trust_remote_code=True, source="org/model")
    made = maker(theirs, here="none")
    made.operators("candidate", GOAL)
    (needed,) = made.commands
    assert "--trust-remote-code" not in needed.text
    kernel = changed(run, attn_implementation=KERNEL).manifest
    assert "kernel" not in str(_options(kernel, run.manifest))


def test_weights_of_a_replay(run, llama, tmp_path):
    """Where a weight is in none of the files, the model is loaded: not with the run's kernels."""
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    theirs = changed(run, attn_implementation=KERNEL)
    with pytest.raises(UsageError, match="may be code of its own"):
        replay(theirs, out=tmp_path / "x", model=model)


def test_environment_variables_that_are_set(run, monkeypatch):
    """Numbers and names for arithmetic; no code, no paths, no flood of threads."""
    hostile = {
        "OMP_NUM_THREADS": "100000",
        "MKL_NUM_THREADS": "3",
        "MKL_CBWR": "AVX2,STRICT",
        "USE_HUB_KERNELS": "YES",
        "PYTORCH_TUNABLEOP_TUNING": "1",
        "LD_PRELOAD": "/tmp/evil.so",
        "KMP_AFFINITY": "x\0y",
        "OMP_PLACES": "/tmp/evil",
        "XLA_FLAGS": "--xla_dump_to=/tmp",
    }
    for name in hostile:
        monkeypatch.delenv(name, raising=False)
    found = msgspec.structs.replace(run.manifest.environment, variables=hostile)
    wanted = {name: value for name, value in variables_to_set(found).items() if value is not None}
    assert wanted == {"MKL_NUM_THREADS": "3", "MKL_CBWR": "AVX2,STRICT"}
