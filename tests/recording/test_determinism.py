"""Switches of both generations of names, what cannot be read back, and warnings that name
operators. CUDA's switches can be set where there is no GPU."""

import os
import warnings

import pytest
import torch
import transformers

from divergence.errors import ModelError
from divergence.recording.engines.load import Loading, load_model
from divergence.recording.machine import VARIABLES, deterministic_settings

B = torch.backends
NEW = hasattr(B, "fp32_precision")
GETTERS = {
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "matmul.allow_tf32": lambda: B.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: B.cudnn.allow_tf32,
    "general": lambda: B.fp32_precision,
    "mkldnn.matmul": lambda: B.mkldnn.matmul.fp32_precision,
    "cuda": lambda: B.cudnn.fp32_precision,
    "cuda.matmul": lambda: B.cuda.matmul.fp32_precision,
    "cudnn.conv": lambda: B.cudnn.conv.fp32_precision,
    "cudnn.rnn": lambda: B.cudnn.rnn.fp32_precision,
}


def told() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, get in GETTERS.items():
        try:
            found[name] = get()
        except RuntimeError:  # torch does not tell: the generations disagree
            found[name] = None
    return found


def by_old_names(value: str) -> None:
    torch.set_float32_matmul_precision(value)


def by_new_name() -> None:
    B.cuda.matmul.fp32_precision = "tf32"


def generally() -> None:
    B.fp32_precision = "tf32"


def of_onednn() -> None:
    B.mkldnn.matmul.fp32_precision = "bf16"


def by_flag() -> None:
    B.cuda.matmul.allow_tf32 = True


@pytest.fixture
def as_it_was():
    with deterministic_settings("cuda", seed=0):
        yield


@pytest.mark.skipif(not NEW, reason="this torch has one generation of names")
@pytest.mark.parametrize(
    "before",
    [lambda: None, lambda: by_old_names("medium"), by_new_name, generally, of_onednn, by_flag],
)
def test_both_generations_of_precision_agree_and_are_put_back(before, as_it_was):
    """torch's old and new switches say the same inside, and what they said before behind it."""
    before()
    found = told()

    with deterministic_settings("cuda", seed=0) as state:
        inside = told()
        with B.cudnn.flags(enabled=False):  # torch's own code, which reads the old names
            pass

    assert told() == found
    assert inside == {
        "float32_matmul_precision": "highest",
        "matmul.allow_tf32": False,
        "cudnn.allow_tf32": False,
        **dict.fromkeys(list(GETTERS)[3:], "ieee"),
    }
    assert not [s.name for s in state.switches if s.status == "refused"]


def test_a_variable_is_set_and_not_called_accepted(monkeypatch):
    """Nobody knows whether a library has read it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_settings("cuda", seed=0) as state:
        pass
    statuses = {s.name: s.status for s in state.switches}
    assert statuses["CUBLAS_WORKSPACE_CONFIG"] == "set"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    "device, name, value",
    [("npu", "HCCL_DETERMINISTIC", "strict"), ("cuda", "CUBLAS_WORKSPACE_CONFIG", ":16:8")],
)
def test_a_stronger_setting_is_kept(monkeypatch, device, name, value):
    """A user's own value that is as deterministic stays."""
    monkeypatch.setenv(name, value)
    with deterministic_settings(device, seed=0) as state:
        assert os.environ[name] == value
    switch = next(s for s in state.switches if s.name == name)
    assert (switch.found, switch.status) == (value, "set") and "kept" in switch.note


def test_what_chooses_kernels_is_told():
    """Switches that are not set are recorded as found."""
    with deterministic_settings("cuda", seed=0) as state:
        pass
    found = {s.name: s for s in state.switches}
    assert found["torch.backends.cuda.flash_sdp_enabled()"].found == "true"
    assert found["torch.backends.cuda.preferred_blas_library()"].asked == "-"
    assert {
        "TORCH_NPU_USE_COMPATIBLE_IMPL",
        "TORCH_NPU_LAZY_FUSION",
        "HCCL_OP_EXPANSION_MODE",
        "TORCH_NPU_FALLBACK_CPU_DISABLE",
        "INF_NAN_MODE_ENABLE",
    } <= set(VARIABLES)


TEXTS = {
    "CAUTION: The operator 'aten::_int_mm' is not currently supported on the NPU backend and will "
    "fall back to run on the CPU. This may have performance implications. (function "
    "npu_cpu_fallback)": "aten::_int_mm",
    "The operator 'aten::linalg_svd' is not currently supported on the MPS backend and will fall "
    "back to run on the CPU. This may have performance implications.": "aten::linalg_svd",
    "Aten Op fallback from XPU to CPU happends. This may have performance implications.": (
        "an operator"
    ),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seen_before", [False, True])
def test_operators_that_the_cpu_ran_are_noted(text, seen_before):
    """Once each, however often the runtime warns."""
    if seen_before:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("default")
            warnings.warn(text, stacklevel=1)
    with deterministic_settings("npu", seed=0) as state:
        for _ in range(2):
            warnings.warn(text, stacklevel=1)
    assert state.fallbacks == [TEXTS[text]]


def test_other_warnings_go_where_the_user_sends_them():
    """Those of determinism are recorded, all others are left alone."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with deterministic_settings("cpu", seed=0) as state:
            warnings.warn("something else", stacklevel=1)
            warnings.warn("cumsum does not have a deterministic implementation", stacklevel=1)
    assert [str(one.message) for one in heard] == ["something else"]
    assert state.warnings == ["cumsum"]
    with (
        warnings.catch_warnings(),
        pytest.raises(UserWarning, match="something else"),
        deterministic_settings("cpu", seed=0),
    ):
        warnings.simplefilter("error")
        warnings.warn("something else", stacklevel=1)


def test_a_package_that_does_not_import_is_no_damaged_file(llama, monkeypatch):
    """The error names the package."""

    def broken(*args, **options):
        raise ImportError("libhccl.so: cannot open shared object file", name="torch_npu")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", broken)
    with pytest.raises(ModelError) as error:
        load_model(Loading(str(llama)))
    assert "damaged" not in str(error.value) + error.value.hint
    assert "importing torch_npu" in error.value.hint
