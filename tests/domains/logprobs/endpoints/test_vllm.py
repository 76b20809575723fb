"""A real server on loopback: vLLM's CPU build. Run where it is installed, as the engine's tests are
(tests/domains/vllm/requirements.txt)."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from divergence import RecordOptions, ServerOptions, capture, compare
from tests.models.tiny import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

PROMPTS = [[3 + n, 40, 50 + n, 60, 7] for n in range(10)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build("llama", tmp_path_factory.mktemp("llama") / "model", hidden=128)


@pytest.fixture(scope="module")
def served(model):
    """The address of a server of the model, in bfloat16."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "128",
        "--enforce-eager",
    ]
    variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        words, stdout=quiet, stderr=quiet, env=variables, start_new_session=True
    )
    try:
        for _ in range(600):
            time.sleep(1)
            assert server.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                continue
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def test_a_healthy_server_raises_no_alarm(model, served, tmp_path):
    """transformers in bfloat16 against vLLM in bfloat16, its answers scored there token by token;
    the server against itself is identical."""
    a = capture(
        model,
        out=tmp_path / "a",
        prompts=PROMPTS,
        max_new_tokens=8,
        device="cpu",
        probe=False,
        recording=RecordOptions(anchor=False),
    )
    b = capture("tiny", server=ServerOptions(endpoint=served), like=a, out=tmp_path / "b")
    assert b.manifest.engine.facts["prompts scored"] == "prompt_logprobs"
    report = compare(a, b)
    assert report.logprobs.num_equal == 80 and report.verdict.kind == "within_floor", report
    again = capture(
        "tiny", server=ServerOptions(endpoint=served, concurrency=1), like=a, out=tmp_path / "c"
    )
    assert compare(b, again).logprobs.pattern in ("equal", "within")
