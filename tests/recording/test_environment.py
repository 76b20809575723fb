"""What is recorded of a machine and of a configuration, and what is not."""

import pytest
import torch

from divergence.experiments.localization.machine import SETTABLE
from divergence.recording import machine as processor
from divergence.recording.engines.identity import MAX_CONFIG_BYTES, chat_example, config_values
from divergence.recording.machine import (
    VARIABLES,
    collect_environment,
    cpu_model,
    cpu_name,
    torch_build,
)

INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Processor @ 2.60GHz
stepping\t: 8
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f
CPU revision\t: 1
"""
UNKNOWN_ARM = GRAVITON.replace("0xd4f", "0xfff").replace("0x41", "0x99")


@pytest.mark.parametrize(
    ("text", "name", "model"),
    [
        (
            INTEL,
            "Intel(R) Xeon(R) Processor @ 2.60GHz",
            "GenuineIntel family 6 model 143 stepping 8",
        ),
        (GRAVITON, "Arm Neoverse-V2", "Arm Neoverse-V2 (0x41/0xd4f) r0p1"),
        (UNKNOWN_ARM, "maker 0x99 part 0xfff", "maker 0x99 part 0xfff (0x99/0xfff) r0p1"),
    ],
    ids=["intel", "arm", "unknown"],
)
def test_a_processor_is_named_as_it_names_itself(text, name, model, tmp_path, monkeypatch):
    """By its brand string, or by implementer and part; clouds hide the first more often."""
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    monkeypatch.setattr(processor, "_CPUINFO", path)
    assert (cpu_name(), cpu_model()) == (name, model)


def test_a_machine_without_cpuinfo_is_described(tmp_path, monkeypatch):
    """Other systems have none."""
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "none")
    assert cpu_name()
    assert cpu_model() is None


def test_the_build_of_torch_is_recorded(monkeypatch):
    """Compiler and linear algebra, from torch's own description."""
    show = (
        "PyTorch built with:\n  - GCC 13.3\n  - C++ Version: 201703\n"
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605\n"
        "  - Intel(R) MKL-DNN v3.7.1 (Git Hash abc)\n"
        "  - Build settings: BLAS_INFO=open, USE_ACL=ON, CXX_FLAGS= -O3 -ffast-math, "
        "LAPACK_INFO=open, \n"
    )
    monkeypatch.setattr(torch.__config__, "show", lambda: show)
    assert torch_build() == {
        "compiler": "GCC 13.3",
        "C++": "201703",
        "MKL": "2024.2-Product",
        "oneDNN": "v3.7.1",
        "BLAS": "open",
        "LAPACK": "open",
        "ACL": "ON",
        "flags": "-O3 -ffast-math",
    }


def test_variables_are_recorded_by_the_list_and_without_paths(monkeypatch):
    """What is on it, and nothing else; some name directories."""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/home/somebody/x --xla_gpu_x=true")
    monkeypatch.setenv("SECRET_TOKEN", "s")
    found = collect_environment("cpu").variables
    assert found["OPENBLAS_CORETYPE"] == "Haswell"
    assert found["XLA_FLAGS"] == "--xla_dump_to=(a path) --xla_gpu_x=true"
    assert "SECRET_TOKEN" not in found
    assert not any(word in name for name in VARIABLES for word in ("TOKEN", "KEY", "SECRET"))
    assert set(SETTABLE) < set(VARIABLES)
    assert "XLA_FLAGS" not in SETTABLE


def test_a_configuration_is_plain_data_without_paths_and_secrets():
    """One level of dotted keys; what is long stands as its digest."""
    values = config_values(
        {
            "rope_scaling": {"factor": 8.0, "type": "yarn"},
            "layer_types": ["full", "sliding"],
            "name_or_path": "/home/somebody/model",
            "auto_map": {"AutoModel": "/home/somebody/x.py"},
            "hf_token": "hf_secret",
            "vocab_file": "vocab.json",
            "pad_token_id": 0,
            "id2label": {str(n): f"L{n}" for n in range(1000)},
            "limit": float("inf"),
            "dtype": torch.float32,
            "nothing": None,
        }
    )
    assert values["rope_scaling.factor"] == 8.0
    assert values["layer_types"] == ["full", "sliding"]
    assert values["pad_token_id"] == 0
    assert values["auto_map.AutoModel"] == "(a path)"
    assert values["id2label"].startswith("digest ")
    assert values["limit"] == "inf"
    text = repr(values)
    assert not any(word in text for word in ("somebody", "hf_secret", "vocab.json"))


def test_a_large_configuration_is_held_in_bounds():
    """Beyond it values stand as digests, which still tell equal from different."""
    values = config_values({f"k{n:05}": "x" * 150 for n in range(2000)})
    assert len(repr(values)) < 3 * MAX_CONFIG_BYTES
    assert values["k00000"] == "x" * 150
    assert values["k01999"].startswith("digest ")


def test_a_template_that_refuses_a_system_prompt_still_has_an_example():
    """Some raise; then without it."""

    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, conversation, **options):
            if conversation[0]["role"] == "system":
                raise ValueError("no system prompts")
            return " ".join(one["content"] for one in conversation)

    assert chat_example(Tokenizer()) == "U1 A1 U2"
    assert chat_example(None) is None
