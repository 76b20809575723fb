"""The journey of the README by command: capture here, repeat there, compare anywhere."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = {
    "": {
        "schema_version",
        "tool_version",
        "reference",
        "candidate",
        "verdict",
        "preflight",
        "tokens",
        "coverage",
        "sites",
        "notes",
    },
    "verdict": {"kind", "summary", "onset", "confidence", "side", "evidence", "next"},
    "coverage": {"num_compared", "num_only_reference", "num_only_candidate", "num_skipped"},
    "tokens": {"num_tokens", "num_equal", "forced", "first_difference"},
    "reference": {"path", "id", "label", "model", "dtype", "device", "complete", "plants"},
    "onset": {"site", "block", "sample", "step", "position"},
    "site": set(
        "pass sample step site identical rel_l2 cosine max_abs ratio flagged match".split()
    ),
}
"""Keys that scripts rely on: more may come, none of these may go."""

pytestmark = pytest.mark.slow
"""The demo plays the same commands, and is played after the tests."""


def divergence(*args: object, cwd: Path, **switches: str) -> subprocess.CompletedProcess:
    """One command in a process of its own, as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "divergence", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"} | switches,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def journey(tmp_path_factory, tiny_model) -> Path:
    """A directory with run a, and its repeats: b elsewhere, c with a fault elsewhere."""
    folder = tmp_path_factory.mktemp("journey")
    model = tiny_model("llama")
    elsewhere = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    plant = "model.layers.1.mlp.down_proj:out=scale:1.5"
    for command, switches in (
        (("capture", model, "-o", "a", "--max-new-tokens", 4), {}),
        (("capture", "--like", "a", "-o", "b"), elsewhere),
        (("capture", "--like", "a", "-o", "c", "--plant", plant), elsewhere),
    ):
        done = divergence(*command, cwd=folder, **switches)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def compared(journey):
    """``compared("b")`` → (exit code, report) of a against b, as scripts get them."""

    @functools.cache
    def call(candidate: str) -> tuple[int, dict]:
        done = divergence("compare", "a", candidate, "--json", "--exit-code", cwd=journey)
        return done.returncode, json.loads(done.stdout)

    return call


def test_other_kernels_are_rounding(compared):
    """Two healthy machines: no alarm, everything compared, exit code 0."""
    code, report = compared("b")
    assert code == 0
    assert report["verdict"]["kind"] in ("identical", "within_floor")
    assert report["coverage"]["num_compared"] > 100
    assert report["coverage"]["unmatched"] == []
    assert {site["pass"] for site in report["sites"]} == {"free", "anchored"}
    assert report["tokens"]["num_tokens"] == 4


def test_a_fault_is_named(compared, journey):
    """A fault on the second machine: its block, in JSON and for people, and exit code 1."""
    code, report = compared("c")
    assert code == 1
    assert report["verdict"]["kind"] == "localized"
    assert report["verdict"]["onset"]["block"] == "model.layers.1"
    said = divergence("compare", "a", "c", cwd=journey)
    assert said.returncode == 0
    assert said.stdout.startswith("DIVERGED")
    assert "model.layers.1:out" in said.stdout
    assert "\x1b" not in said.stdout


def test_the_core_of_the_json_is_stable(compared):
    """The keys that scripts rely on are there, and numbers are numbers or their names."""
    _, report = compared("c")
    assert report["schema_version"] == 1
    parts = {"": report, "onset": report["verdict"]["onset"], "site": report["sites"][0]} | {
        name: report[name] for name in ("verdict", "coverage", "tokens", "reference")
    }
    for name, part in parts.items():
        assert CORE[name] <= part.keys(), name
    for site in report["sites"]:
        assert isinstance(site["rel_l2"], float | int) or site["rel_l2"] in ("nan", "inf")


def test_a_run_can_be_moved_and_verified(journey, tmp_path):
    """A run is its directory: copied elsewhere it is whole, and damage is found."""
    shutil.copytree(journey / "a", tmp_path / "moved")
    good = divergence("inspect", "moved", "--verify", "--json", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["problems"] == []
    shard = next((tmp_path / "moved" / "tensors").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    bad = divergence("inspect", "moved", "--verify", cwd=tmp_path)
    assert bad.returncode == 2
    assert shard.name in bad.stdout + bad.stderr
