"""tested.md: what each engine records, pass by pass, is what a test exercises."""

import re
from pathlib import Path

import pytest

from divergence.recording.engines.engine import built_in

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[3]
PASSES = ["free", "anchored", "escalated", "whole"]


def rows() -> list[list[str]]:
    """The cells of the table, its first line first."""
    text = Path(__file__).with_name("tested.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in found if set(row) != {"---"}]


def test_every_engine_has_its_rows():
    """The table lists all that are built in."""
    head, *body = rows()
    assert head == ["engine", "sites", *PASSES]
    assert list(dict.fromkeys(row[0].strip("`") for row in body)) == list(built_in())


def test_each_cell_names_a_test_that_is_there():
    """Or says that there is no such pass."""
    names: set[str] = set()
    homes = [ROOT / "tests" / "recording", *(ROOT / "tests" / "domains").iterdir()]
    for file in (file for home in homes for file in home.rglob("test_*.py")):
        names.update(re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M))
    for row in rows()[1:]:
        assert len(row) == 2 + len(PASSES), row
        for cell in row[2:]:
            told = re.findall(r"`(\w+)`", cell)
            assert told or cell == "no", f"{row[0]}, {row[1]}: {cell!r} names no test"
            assert set(told) <= names, f"{row[0]}, {row[1]}: {set(told) - names}"
