"""Files that a command reads besides runs: whatever they are, it ends with 2 and names the file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

HOLES = 40 << 30


def pipe(path: Path) -> None:
    os.mkfifo(path)


def holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HOLES)


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


KINDS = {
    "a pipe": pipe,
    "holes": holes,
    "deep": text("[" * 1_000_000),
    "values": text("[" + "[]," * 11_000_000 + "[]]"),
    "no line end": text("x" * 11_000_000),
    "deep objects": text('{"a":' * 200_000),
    "a folder": Path.mkdir,
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "losses.jsonl": ("compare", "FILE", "FILE"),
    "losses.csv": ("compare", "FILE", "FILE"),
    "losses.json": ("compare", "FILE", "FILE"),
    "prompts.jsonl": ("capture", "MODEL", "--prompts", "FILE", "-o", "out"),
    "prompts.json": ("capture", "MODEL", "--prompts", "FILE", "-o", "out"),
    "labels.jsonl": ("capture", "MODEL", "--train", "--labels", "FILE", "-o", "out"),
    "policy.json": ("capture", "MODEL", "--train", "--precision-policy", "FILE", "-o", "out"),
    "map.json": ("capture", "MODEL", "--device-map", "FILE", "-o", "out"),
    "sites.toml": ("capture", "MODEL", "--sites", "FILE", "-o", "out"),
    "policy.toml": ("scores", "FILE", "b", "--policy", "FILE"),
    "report.json": ("view", "FILE"),
}


WHOLE = {
    name for name in COMMANDS if name.partition(".")[0] in ("losses", "labels", "policy", "report")
}
"""Files that domains read."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.whole] if name in WHOLE else [], id=name)
        for name in COMMANDS
    ],
)
def test_each_file_of_each_command(name, kind, invoke, tiny_model, tmp_path):
    """Nothing is waited for, spread out or blamed on the tool."""
    path = tmp_path / name
    KINDS[kind](path)
    model = str(tiny_model("llama"))
    words = {"FILE": str(path), "MODEL": model}
    code, _, error = invoke(*(words.get(word, word) for word in COMMANDS[name]))
    assert code == 2, error
    assert name in error and "fault in divergence" not in error, error
    assert len(error) < 4000


@pytest.mark.parametrize("kind", ["a pipe", "holes", "deep"])
def test_settings(kind, invoke, tmp_path, monkeypatch):
    """Of the file that a variable names."""
    KINDS[kind](tmp_path / "settings.toml")
    monkeypatch.setenv("DIVERGENCE_CONFIG", str(tmp_path / "settings.toml"))
    code, _, error = invoke("capture", "tiny", "-o", "out")
    assert code == 2 and "settings.toml" in error, error


@pytest.mark.parametrize(
    "option",
    [
        ("compare", "NAME", "NAME"),
        pytest.param(("scores", "NAME", "NAME"), marks=pytest.mark.whole),
        ("capture", "NAME", "-o", "out"),
        ("inspect", "NAME"),
    ],
)
@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300 + ".jsonl"])
def test_names_that_no_file_has(option, name, invoke):
    """Too long for the system."""
    code, _, error = invoke(*(name if word == "NAME" else word for word in option))
    assert code == 2 and "fault in divergence" not in error, error
