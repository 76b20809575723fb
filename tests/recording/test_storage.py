"""Which loops digest what a capture sees, and that the run is the same either way."""

import sys
from types import SimpleNamespace

import pytest
import torch

from divergence.numerics.kernels import RESIDENT_BYTES, WORTH_BYTES, has_compiled
from divergence.recording import storage as room
from divergence.recording.api import capture
from divergence.recording.storage import about_bytes
from divergence.run.writing.buffer import DEFAULT_BUFFER_BYTES, MIN_BUFFER_BYTES, Limits

PROMPT = ["Snow fell on the harbour"]


def test_volume_by_hand():
    """Two linear layers of 3 → 5 and 5 → 3, and a block around them, over 2 + 4 tokens."""
    block = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 3))
    samples = [SimpleNamespace(prompt_ids=[1, 2])]
    linears = about_bytes(block, {"0", "1", "2"}, samples, 4)
    assert linears == 6 * 4 * (8 + 8)  # the GELU has no parameters to tell its width by
    assert about_bytes(block, {"."}, samples, 4) == 6 * 4 * (3 + 3)
    assert about_bytes(block, set(), samples, 4) == 0
    assert about_bytes(torch.nn.GELU(), {"."}, samples, 4) == 0


def test_the_volume_is_near_what_is_seen(tiny_model, tmp_path):
    """Within a factor of two of the bytes of every module's tensors (attention weights, which no
    parameter tells of, are small here)."""
    run = capture(
        str(tiny_model("llama", hidden=256, num_blocks=2)), out=tmp_path / "run", prompts=PROMPT,
        max_new_tokens=3, sites=["modules"], probe=False,
    )  # fmt: skip
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.manifest.model.source)
    found = about_bytes(model, set(run.manifest.plan.modules), run.manifest.tokens.samples, 3)
    assert 0.5 < found / run.manifest.sizes.seen_bytes < 2


@pytest.mark.parametrize(
    ("num_bytes", "buffer_bytes", "kernel"),
    [
        (WORTH_BYTES - 1, DEFAULT_BUFFER_BYTES, "numpy"),
        (WORTH_BYTES, DEFAULT_BUFFER_BYTES, "compiled"),
        (WORTH_BYTES, MIN_BUFFER_BYTES, "numpy"),
        (1 << 40, 4 * RESIDENT_BYTES - 1, "numpy"),
    ],
)
def test_compiled_loops_where_they_pay_and_fit(monkeypatch, num_bytes, buffer_bytes, kernel):
    """Many bytes, and a buffer of which the loops' own memory is a small part."""
    monkeypatch.setattr("divergence.numerics.kernels.has_compiled", lambda: True)
    assert room._kernel(num_bytes, buffer_bytes=buffer_bytes) == kernel


def test_compiled_loops_are_within_the_bound():
    """Their memory is taken off the ring, not added to the buffer."""
    plain, compiled = (
        Limits.of(DEFAULT_BUFFER_BYTES, kernel=kernel) for kernel in ("numpy", "compiled")
    )
    assert plain.ring_bytes - compiled.ring_bytes == RESIDENT_BYTES
    assert compiled.shard_bytes == compiled.ring_bytes // 4


@pytest.mark.skipif(not has_compiled(), reason="numba is not installed")
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("full", marks=pytest.mark.slow), "sketch",
        pytest.param("stats", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_run_is_the_same(tiny_model, tmp_path, monkeypatch, mode):
    """Digests are equal; statistics and sketches are, to rounding."""
    model = str(tiny_model("llama", hidden=256, num_blocks=2, dtype="bfloat16"))

    def captured(name):
        return capture(
            model, out=tmp_path / name, prompts=PROMPT, max_new_tokens=3, sites=["modules"],
            store=mode, probe=False,
        )  # fmt: skip

    one = captured("numpy")
    monkeypatch.setattr("divergence.numerics.kernels.WORTH_BYTES", 1)
    two = captured("compiled")
    assert "numba" in sys.modules
    for a, b in zip(one.records, two.records, strict=True):
        assert (a.site, a.xxh3, a.shape) == (b.site, b.xxh3, b.shape)
        for name in ("min", "max", "mean", "rms", "absmax"):
            x, y = getattr(a.summary, name), getattr(b.summary, name)
            assert y == pytest.approx(x, rel=1e-6, abs=1e-6 * (a.summary.rms or 0.0))
        assert a.summary.num_zero == b.summary.num_zero
        if a.sketch is not None:
            x, y = one.read_sketch(a), two.read_sketch(b)
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-5 * float(x[:, -2].max()))
