"""What is shipped is what is here: metadata, pins, make targets and configs agree."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from divergence import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def test_everything_declared_is_pinned_within_its_bounds():
    """Each dependency and each tool of development has a pin that its lower bound admits."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["lint"], *extras["test"]]
    for requirement in wanted:
        bound = tuple(map(int, requirement.partition(">=")[2].split(".")))
        pin = tuple(map(int, pins()[name_of(requirement)].split(".")))
        assert pin >= bound, requirement


def test_pins_carry_no_local_version():
    """``2.13.0+cpu`` exists on one index only; ``2.13.0`` on all."""
    assert not [name for name, version in pins().items() if "+" in version]


def test_dependencies_have_no_upper_bounds():
    """Accelerator hosts come with torch pinned by their vendor."""
    for requirement in PROJECT["project"]["dependencies"]:
        assert re.fullmatch(r"[a-z]+>=[\d.]+", requirement), requirement


def test_version_is_well_formed_and_in_the_changelog():
    """Three numbers; the changelog knows this version, or is collecting for it."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in text or "## [Unreleased]" in text


def test_make_has_the_promised_targets():
    """demo, test, lint, bench and clean exist, and CI calls targets that exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"bench", "clean", "demo", "lint", "test", "test-slow"} <= targets
    called = re.search(r"for target in ([a-z -]+);", (ROOT / ".ci" / "run").read_text())
    assert called is not None and set(called[1].split()) <= targets


def test_nothing_points_outside_the_repository():
    """Build files name no absolute path, parent folder or private host."""
    for name in ("Makefile", ".ci/run", "pyproject.toml", "constraints.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(?:work|tmp|opt|home|root)\b|\.\./|file://", text), name


@pytest.mark.slow
def test_wheel_holds_the_package_and_the_configs(tmp_path):
    """A wheel has every module, py.typed, the license, and configs/ inside the package.

    Needs the package registry: pip fetches the build backend.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"divergence_debug-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in (ROOT / "divergence").rglob("*.py"):
        assert file.relative_to(ROOT).as_posix() in names
    for file in (ROOT / "configs").glob("*.toml"):
        assert f"divergence/configs/{file.name}" in names
    assert {"divergence/py.typed", "divergence/html/style.css", "divergence/html/page.js"} <= {
        *names
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests/")]
