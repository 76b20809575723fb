"""The documents are true: commands exist and run, links resolve, tables equal the code.

Commands stand in ```console blocks after a ``$`` (and in ```bash blocks). ``# exit N``
behind one is the code it must end with. A ```jsonl or ```toml block after a line that
holds only `` `NAME`: `` is written to that file first.
"""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
EXECUTED = (
    "README.md",
    pytest.param("docs/tutorial.md", marks=pytest.mark.slow),
    pytest.param("README.zh.md", marks=pytest.mark.slow),
    pytest.param("docs/outputs-changed.md", marks=pytest.mark.slow),
    pytest.param("docs/operators.md", marks=pytest.mark.slow),
    pytest.param("docs/ci.md", marks=pytest.mark.slow),
    pytest.param("docs/doctor.md", marks=pytest.mark.slow),
)
"""Run from top to bottom, each in a folder of its own; the others are only parsed."""
PENDING: frozenset[str] = frozenset()
"""Pages that are linked and still being written; take a name out once its page is there."""
SUBSTITUTED = (
    # what a document says → what a tiny model of three blocks has
    ("model.layers.6", "model.layers.1"),
    ("./elsewhere/MODEL", "MODEL"),
)
FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.M | re.S)
NAMED = re.compile(r"`([\w.-]+)`:\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``file`` is the name that the line before gives it."""

    language: str
    text: str
    file: str | None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        named = NAMED.search(text[: match.start()])
        yield Block(match[1], match[2], named[1] if named else None)


def commands(block: Block) -> Iterator[tuple[list[str], int]]:
    """(words after ``divergence``, exit code) of each command in a block."""
    if block.language not in ("console", "bash"):
        return
    for line in block.text.splitlines():
        line = line.strip()
        if block.language == "console" and not line.startswith("$ "):
            continue
        line = line.removeprefix("$ ")
        wanted = re.search(r"# exit (\d+)$", line)
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)  # a variable for this command
        if words[:1] == ["torchrun"] and "divergence" in words:
            words = words[words.index("divergence") :]
        if not words or words[0] != "divergence":
            continue
        cut = [n for n, word in enumerate(words) if word in ("|", "||", "&&", ">", ";")]
        yield words[1 : min(cut, default=None)], int(wanted[1]) if wanted else 0


@pytest.mark.whole
def test_every_command_in_the_documents_exists():
    """Each is parsed by the real command line; an unknown option or a missing value fails."""
    from typer.main import get_command

    from divergence.cli.main import app

    group = get_command(app)
    found = [
        (page.name, words)
        for page in PAGES
        for block in blocks(page)
        for words, _ in commands(block)
    ]
    assert len(found) > 40
    for page, words in found:
        assert words[0] in group.commands, f"{page}: divergence {shlex.join(words)}"
        try:
            group.commands[words[0]].make_context(words[0], words[1:])
        except Exception as error:
            pytest.fail(f"{page}: divergence {shlex.join(words)}: {error!r}")


@pytest.mark.parametrize("name", EXECUTED)
def test_the_commands_of_a_page_run_in_order(name, llama, tmp_path, monkeypatch, capsys):
    """With a tiny model in place of MODEL, each ends with the code that the page says."""
    from divergence.cli.main import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    num_run, outputs = 0, []
    for block in blocks(ROOT / name):
        if block.file and block.language in ("toml", "jsonl"):
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        if block.language != "console":
            continue
        for words, wanted in commands(block):
            for said, meant in SUBSTITUTED:
                words = [word.replace(said, meant) for word in words]
            words = [str(llama) if word == "MODEL" else word for word in words]
            with pytest.raises(SystemExit) as ended:
                app(words, prog_name="divergence")
            printed = capsys.readouterr()
            assert ended.value.code in (wanted, None), (
                f"{name}: divergence {shlex.join(words)} ended with {ended.value.code}\n"
                f"{printed.out[-1000:]}{printed.err}"
            )
            num_run += 1
            outputs.append(printed.out)
    assert num_run >= 7
    # each of these pages plants a fault, and the page says where it is then found
    assert any(out.startswith("DIVERGED: the error is made at model.layers.1") for out in outputs)


def anchor(heading: str) -> str:
    """A heading's fragment, as GitHub makes it."""
    text = re.sub(r"[`*]", "", heading.strip().lower())
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))


_OF_DOMAINS = ("extending.md", "facts.md")
"""Pages that link to files of domains."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.whole if page.name in _OF_DOMAINS else ())
        for page in PAGES
    ],
    ids=lambda page: page.name,
)
def test_internal_links_resolve(page):
    """Files exist and headings are there."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() and path.relative_to(ROOT).as_posix() in PENDING:
            continue
        assert path.exists(), f"{page.name}: {target}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
            assert fragment in map(anchor, headings), f"{page.name}: {target}"


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The first table below a heading: the first cell without its quotes → the other cells."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.split(rf"^## {re.escape(heading)}$", text, flags=re.M)[1]
    section = re.split(r"^## ", section, flags=re.M)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def test_the_verdicts_are_all_explained():
    """One row for each kind, in the page on verdicts and in the glossary."""
    from divergence.comparison.result import VerdictKind

    assert list(table("docs/verdicts.md", "Kinds")) == list(get_args(VerdictKind))
    said = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    row = next(line for line in said.splitlines() if line.startswith("| verdict |"))
    assert re.findall(r"`(\w+)`", row) == list(get_args(VerdictKind))


def test_sides_and_confidences_are_all_explained():
    """Each value that a verdict may carry has its place."""
    from divergence.comparison.result import Verdict

    hints = get_type_hints(Verdict)
    sides = {value for part in get_args(hints["side"]) for value in get_args(part)}
    first = " ".join(table("docs/verdicts.md", "Side"))
    assert {word for word in re.findall(r"\w+", first) if word not in ("not", "given")} == sides
    text = (ROOT / "docs/verdicts.md").read_text(encoding="utf-8")
    assert "| verdict | " + " | ".join(get_args(hints["confidence"])) + " |" in text


def test_the_table_of_thresholds_is_the_code():
    """Names, order and values."""
    from divergence.numerics.floor import THRESHOLDS

    said = {name: float(row[0]) for name, row in table("docs/verdicts.md", "Thresholds").items()}
    meant = {name: getattr(THRESHOLDS, name) for name in THRESHOLDS.__struct_fields__}
    assert said == meant
    assert list(said) == list(meant)


def test_the_floor_in_the_documents_is_the_code():
    """The counts of stores and products, and the factors."""
    from divergence.numerics import floor

    rows = table("docs/verdicts.md", "The floor")
    by_name = {name.partition(",")[0]: cells for name, cells in rows.items()}
    assert by_name["n_r"] == [str(floor._STORES), str(floor._TRUNK_STORES)]
    assert by_name["n_g"] == [str(floor._PRODUCTS), str(floor._TRUNK_PRODUCTS)]
    assert by_name["K"] == [f"{floor._WIDENING} × the last axis", "the last axis"]
    text = (ROOT / "docs/verdicts.md").read_text(encoding="utf-8")
    assert f"rms {floor.ONE_ROUNDING} u" in text
    assert f"√2 · {floor.ONE_ROUNDING} u = {2**0.5 * floor.ONE_ROUNDING:.2f} u" in text


def test_the_worked_example_of_the_judge_is_the_code():
    """A block with W = 6.5 beside 29 healthy ones, of 4,000 numbers each."""
    from divergence.comparison import judge
    from divergence.numerics.floor import THRESHOLDS

    own = 1 / 4000 + 1 / 4000**2
    variance = own + math.pi / 2 * own / 29 + THRESHOLDS.site_spread**2
    n = 2 / (math.sqrt(1 + 4 * variance) - 1)
    z = (8 * n + 1) / (8 * n + 3) * math.sqrt(2 * n * math.log(math.cosh(math.log(6.5))))
    limit = judge.limit_of(30)
    reached = math.exp(judge.reach(limit, np.array([variance]))[0])
    text = (ROOT / "docs/verdicts.md").read_text(encoding="utf-8")
    figures = f"{variance:.5f}", f"that of n = {n:.0f}", f"=  {z:.1f}", f"z = {limit:.1f}"
    for figure in (*figures, f"W = {reached:.1f} ×"):
        assert figure in text


def test_switches_and_variables_of_devices_are_the_code():
    """docs/devices.md names every switch that is set and every variable that is recorded."""
    from divergence.recording import machine as determinism
    from divergence.recording import machine as environment

    text = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
    for group in determinism._ATTRIBUTES.values():
        for name, _ in group:
            stem, _, last = name.rpartition(".")
            part = f"`.{stem.rpartition('.')[2]}.`"  # a sibling, named by its last part but one
            assert f"`torch.{name}`" in text or part in text or f"`{last}`" in text, name
    for group in determinism._VARIABLES.values():
        for name, value in group:
            assert re.search(rf"\| `{name}` \| `?{re.escape(value)}`? \|", text), name
    recorded = text.split("## What of the environment")[1].split("\n## ")[0]
    assert set(re.findall(r"`([A-Z][A-Z0-9_]+)`", recorded)) == set(environment.VARIABLES)
    said = {name.partition("`")[0] for name in table("docs/devices.md", "Names, and what was run")}
    assert {name.partition(" ")[0] for name in said} == set(environment.DEVICE_TYPES)


def test_the_faults_of_the_tutorial_are_the_code():
    """Each fault that can be planted is in the table, with its syntax."""
    from divergence.recording.plant import FAULTS

    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    section = text.split("## 5. ")[1].split("\n## ")[0]
    said = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.+?) \|", section, re.M)))
    meant = [syntax.split()[0] for syntax, _ in FAULTS.values()]
    assert said == meant


def test_both_readmes_show_the_same_commands():
    """The Chinese README is not behind."""
    english, chinese = (
        [words for block in blocks(ROOT / name) for words, _ in commands(block)]
        for name in ("README.md", "README.zh.md")
    )
    assert english == chinese
    outputs = [
        [block.text for block in blocks(ROOT / name) if block.language == "text"]
        for name in ("README.md", "README.zh.md")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["ci", "operators", "outputs-changed", "quantization", "rl"])
def test_a_page_in_chinese_shows_what_the_english_one_shows(name):
    """Its commands and outputs are the English page's, in the same order; it may show fewer."""
    (english, shown), (chinese, also_shown) = (
        (
            [words for block in page for words, _ in commands(block)],
            [block.text for block in page if block.language == "text"],
        )
        for page in (
            list(blocks(ROOT / "docs" / f"{name}.md")),
            list(blocks(ROOT / "docs" / f"{name}.zh.md")),
        )
    )
    assert len(chinese) >= 3 and also_shown
    for parts, whole in ((chinese, english), (also_shown, shown)):
        places = [whole.index(part) for part in parts]
        assert places == sorted(places)


@pytest.mark.whole
def test_the_page_of_the_keys_of_the_json_is_that_of_the_types():
    """``python tests/json_page.py`` writes docs/json.md and docs/report.schema.json again."""
    from tests.json_page import PAGE, SCHEMA, page, schema

    assert PAGE.read_text(encoding="utf-8") == page()
    assert SCHEMA.read_text(encoding="utf-8") == schema()
