"""One answer, many faces, of every command that answers: what its first screen says first, -v,
--quiet, the page, Markdown and JSON say in the same words."""

import contextlib
import html
import io
import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from divergence import capture
from divergence.cli.main import app
from divergence.experiments import selftest
from divergence.experiments.diff import _Steps

FIXTURES = Path(__file__).parents[1] / "fixtures"
MLP = "model.layers.1.mlp:out"
COMMANDS = {
    "inspect": "inspect ops",
    "doctor": "doctor a b",
    "localize": "localize a b --here both -o descent",
    "bundle": "bundle a b -o sent.zip --force",
    "localize, nothing": "localize a again --here both -o nothing",
    "selfcheck": "selfcheck MODEL --max-new-tokens 2 --only again,batch",
    "sensitivity": "sensitivity a --candidate again --blocks middle --faults scale,bias",
    "scores": "scores scores/a scores/b",
    "quantize": "quantize a --scheme w8a8",
    "probe": "probe --quick -o probed",
    "replay": "replay ops -o replayed --site model.layers.1.mlp/*",
    "losses": "compare a.csv b.csv",
    "collectives": "compare sums",
    "many runs": "compare a again b",
    "weights": "weights MODEL MODEL",
    "golden": "check a b",
    "diff": "diff MODEL --attn-implementation eager,sdpa --max-new-tokens 2 -o apart",
    "selftest": "selftest --device cpu --quick --force -o tested.json",
}
OF_DOMAINS = ("doctor", "scores", "quantize", "probe", "losses", "collectives", "weights")
PAGES = ("localize", "sensitivity", "selfcheck", "scores", "compare", "check")
"""Commands that write a page."""
NUMBERS = ("inspect", "selfcheck", "sensitivity", "quantize", "probe", "replay", "weights")
"""Their JSON holds what the sentence is made of, and no sentence."""
TABLES = ("scores", "doctor")
"""Commands that print Markdown."""
LABELS = ("95%", "90%", "99%", "report.md", "report.html", "tested.json")
"""Of intervals, of quantiles and of files: what their JSON has under keys."""
WHOLE = ("-v", "page", "Markdown")
"""Faces that hold all of the opening lines."""
PATHS = ("probe", "replay", "bundle")
"""With --quiet they print the path of what they made."""
ELSEWHERE = ("golden", "collectives", "diff", "probe")
"""Of reports test_faces names each fact; what `probe` counts stands under -v one by one."""
MADE = ("probed", "replayed")
"""What was made, in the way of the next."""


STEPS = ("the CPU", "--device-map")
"""Of selftest."""


@pytest.fixture(scope="module")
def made(tmp_path_factory, llama):
    """A folder with the runs and files that COMMANDS name."""
    folder = tmp_path_factory.mktemp("made")
    options = {"probe": False, "dtype": "float32"}
    prompts = ["Snow fell on", "One"]
    first = capture(llama, out=folder / "a", prompts=prompts, max_new_tokens=2, **options)
    capture(like=first, out=folder / "b", probe=False, plants=[f"{MLP}=scale:1.3"])
    capture(like=first, out=folder / "again", probe=False, attn_implementation="sdpa")
    sites = ["ops@model.layers.1"]
    capture(llama, out=folder / "ops", prompts=["One"], sites=sites, max_new_tokens=1, **options)
    for name, slope in (("a", 0.0), ("b", 0.01)):
        rows = [f"{step},{2.0 + slope * step}" for step in range(60)]
        (folder / f"{name}.csv").write_text("\n".join(["step,loss", *rows]) + "\n")
    shutil.copytree(FIXTURES / "scores" / "lm_eval", folder / "scores")
    return folder


def in_this_process(steps, words, side, shown):
    """A step of diff."""
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        app(words[3:], prog_name="divergence")
    return [__file__]


def words(text: str) -> str:
    return " ".join(text.split()).casefold()


def facts_of(screen: str) -> list[str]:
    """The parts of each line before what is next, as far as they are whole."""
    lines = re.split(r"^next$", screen, flags=re.M)[0].splitlines()
    left = ("more  ", "the page to send")  # what is no part of the answer
    shown = [line for line in lines if not line.startswith(left) and "> odd" not in line]
    parts = [part for line in shown for part in re.split(r"  +|: ", line) if "…" not in part]
    return [part.strip(" -?!>:") for part in parts]


def values(value: object) -> list[object]:
    """Every text and number in an answer's JSON, and how long each of its lists is."""
    if isinstance(value, dict):
        inner = [one for key, item in value.items() for one in (key, *values(item))]
        return [*inner, len(value)]
    if isinstance(value, list):
        return [*(one for item in value for one in values(item)), len(value)]
    return [value]


NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def unsaid(part: str, told: str, numbers: list[float]) -> list[str]:
    """The names and numbers of a part of a screen that its JSON does not hold."""
    lacking = []
    for word in re.split(r"[\s,;()/]+", part):
        word = word.strip(".:!?'\"")
        if word in LABELS or not re.search(r"\d|\w[._:=]", word) or word.casefold() in told:
            continue
        for shown in NUMBER.findall(word) or [word]:
            plain = shown.replace(",", "")
            if plain == word and not NUMBER.fullmatch(shown):
                lacking.append(word)
                continue
            mantissa, _, exponent = plain.partition("e")
            half = 0.51 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
            size = abs(float(plain))
            ways = (1, 100, 1 / 1024, 1 / 1024**2)
            if not any(abs(abs(n) * way - size) <= half for n in numbers for way in ways):
                lacking.append(word)
    return lacking


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.whole if name in OF_DOMAINS else ())
        for name in COMMANDS
    ],
)
def test_every_face_begins_with_the_same_answer(made, llama, invoke, monkeypatch, name):
    """Its first word and sentence, and the facts that stand below it."""
    monkeypatch.chdir(made)
    monkeypatch.setattr(_Steps, "_process", in_this_process)
    monkeypatch.setattr(_Steps, "start", lambda steps, side, **how: None)
    steps = selftest._steps
    monkeypatch.setattr(
        selftest, "_steps", lambda *of: (step for step in steps(*of) if step[0].startswith(STEPS))
    )
    command = COMMANDS[name].replace("MODEL", str(llama)).split()

    def ask(*more: str) -> str:
        for place in MADE:
            shutil.rmtree(made / place, ignore_errors=True)
        code, out, err = invoke(*command, *more)
        assert code in (0, 1), (out, err)
        return out

    if name == "collectives":
        sites = ["all_reduce.float32.tiny*"]
        capture("suite:collectives", out=made / "sums", sites=sites, ranks=2)
    page = made / ("apart/report.html" if name == "diff" else "page.html")
    screen = ask(*["--html", str(page)] * (command[0] in PAGES and name != "losses"))
    opening = [line for line in screen.partition("\n\n")[0].splitlines() if line[:1] != " "]
    faces = {"-v": ask("-v")}
    if name not in PATHS:
        faces["--quiet"] = ask("--quiet")
    if page.exists():
        text = re.sub(r"<(style|script).*?</\1>", "", page.read_text(), flags=re.DOTALL)
        faces["page"] = html.unescape(re.sub(r"<[^>]*>", " ", text))
        page.unlink()
    if command[0] in TABLES:
        faces["Markdown"] = html.unescape(re.sub(r"</?\w+>", "", ask("--markdown")))
    if name == "bundle":
        with zipfile.ZipFile("sent.zip") as sent:
            for file in ("README.md", "report.md"):
                faces[file] = html.unescape(re.sub(r"</?code>", "", sent.read(file).decode()))
    told = facts_of(screen)
    for face in {"-v", "page", "Markdown"}.intersection(faces) if name not in ELSEWHERE else ():
        missing = [part for part in told if words(part) not in words(faces[face])]
        assert not missing, (face, missing)
    for face, text in faces.items():
        for line in opening if face in WHOLE else opening[:1]:
            for part in re.split(r"  +", line)[-1].split(": "):
                assert words(part).rstrip(".;:") in words(text), (face, part)
    made_of = values(json.loads(ask("--json")))
    every = words(" ".join(map(str, made_of)))
    numbers = [float(one) for one in made_of if isinstance(one, int | float)]
    missing = [(part, lack) for part in told if (lack := unsaid(part, every, numbers))]
    assert not missing, missing
    if name not in NUMBERS:
        long = [words(one) for one in made_of if isinstance(one, str) and len(one) > 20]
        assert any(one in words(screen) for one in long), long
