"""Two processes, each on a device of its own, where a thread without a device has no context."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROMPTS = ("--prompt", "A bridge", "--prompt", "Once on paper, where every beam is exact")


def test_ranks_that_divide_the_prompts(device_environment, llama, tmp_path):
    """Two ranks on a device give the run of one process."""

    def ran(*words: object, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *map(str, words)],
            cwd=tmp_path,
            timeout=200,
            check=False,
            env=device_environment | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m")
    common = (*PROMPTS, "--max-new-tokens", 2, "--no-probe", "--quiet")
    ran(
        *torchrun,
        "divergence",
        "capture",
        llama,
        "-o",
        "n",
        "--device",
        "npu",
        "--mesh",
        "dp",
        *common,
        SIMULATED_NPU="strict_threads=1,schedule=both",
    )
    ran("divergence", "capture", "--like", "n", "-o", "c", "--device", "cpu", "--no-probe")

    assert ran("divergence", "compare", "c", "n").startswith("IDENTICAL: all ")
    assert "2 ranks (dp 2)" in ran("divergence", "inspect", "n")
    assert {file.name for file in (tmp_path / "n").glob("records*")} == {
        "records.jsonl",
        "records-r00001.jsonl",
    }


def selftest_on(environment, folder, behaviour):
    """`selftest` on a device that behaves so."""
    return subprocess.run(
        [sys.executable, *"-m divergence selftest --device npu --quick --exit-code".split()],
        cwd=folder,
        env=environment | {"SIMULATED_NPU": behaviour},
        timeout=500,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_selftest(device_environment, tmp_path):
    """All that it tries works on a device whose work is late."""
    done = selftest_on(device_environment, tmp_path, "schedule=both")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "failed" not in done.stdout
    assert (tmp_path / "selftest-npu.json").exists()


def test_the_selftest_finds_a_wrong_kernel(device_environment, tmp_path):
    """A device with a wrong kernel fails its selftest with exit code 1."""
    done = selftest_on(device_environment, tmp_path, "wrong=silu")
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert "failed" in done.stdout
