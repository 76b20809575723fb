"""A run from elsewhere names blocks, sites, models, machines: no printed command obeys them."""

import shlex
import sys
from pathlib import Path

import pytest
import torch

import divergence
from divergence import Run
from divergence.comparison.advice import Advice, WithinAdvice
from divergence.errors import RunFormatError
from divergence.run.command import quoted
from divergence.run.manifest import Mesh, MeshAxis, ModuleNote
from divergence.run.site import escape_path
from divergence.run.writer import RunWriter
from tests import by_hand
from tests.by_hand import put

NAMES = [
    "x; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "--touch=pwned",
    "a\\ && touch pwned",
    # nothing of these is written another way in a run
    "x;touch${IFS}pwned",
    "x&touch${IFS}pwned",
    "'$(touch${IFS}pwned)'",
    '"`touch${IFS}pwned`"',
]


def made(
    path: Path,
    evil: str,
    *,
    offset: float = 0.0,
    mesh: Mesh | None = None,
    block: str | None = None,
    **plan,
) -> Run:
    """A run of one block that is called ``evil``, as a stranger would write it. ``block``: the name
    as it stands in the run, escaped where it is not given."""
    block = escape_path(evil) if block is None else block
    manifest = by_hand.manifest(
        id=f"{hash((str(path), offset)) & (2**64 - 1):032x}",
        command=f"divergence capture {evil}",
        model={
            "source": evil,
            "dtype": "bfloat16",
            "attn_implementation": evil if offset else "eager",
        },
        prompts=[[0]],
        settings={"max_new_tokens": 2},
        environment={"label": evil, "versions": {"torch": "2.13.0"}},
        plan={
            "sites": ["blocks", block],
            "modules": {block: ModuleNote(kind="B", role="block")},
            **plan,
        },
        mesh=mesh,
    )
    with RunWriter(path, manifest) as writer:
        for order, port in enumerate(("in", "out")):
            put(writer, torch.full((1, 1, 4), 1.0 + offset), site=f"{block}:{port}", order=order)
    return Run.open(path)


def assert_harmless(texts: list[str], evil: str) -> int:
    """Every word of a command that has something of ``evil`` in it has all of it, in quotes where a
    shell would obey it; how many have."""
    found = 0
    for text in texts:
        if text.startswith("command "):  # how the run says it was made: tests/run/test_command.py
            assert not evil.startswith("x;") or "'x;" in text
            continue
        for start in ("divergence ", "torchrun ", "python "):
            lexer = shlex.shlex(text[text.find(start) :], posix=True, punctuation_chars=False)
            lexer.whitespace_split, lexer.commenters = True, ""
            if start not in text:
                continue
            words = []
            while True:
                try:
                    word = lexer.get_token()
                except ValueError:  # an apostrophe in the prose behind it
                    break
                if word is None or word == "#":
                    break
                words.append(word)
            for word in words:
                if "pwned" in word:
                    assert evil in word or escape_path(evil) in word, text
                    assert not word.startswith("--touch"), text
                    assert text.count(quoted(word)) >= words.count(word), text
                    found += 1
    return found


@pytest.fixture
def captured(invoke, monkeypatch):
    """``captured(run)``: what `capture` prints that has made it."""

    def printed(run: Run) -> str:
        module = sys.modules[divergence.capture.__module__]
        monkeypatch.setattr(module, "make_run", lambda *_, **__: run)
        return invoke("capture", "model", "-o", "out")[1]

    return printed


@pytest.mark.parametrize("evil", NAMES)
def test_every_advice_quotes_what_a_run_says(evil, tmp_path):
    """Paths, the model's name, blocks, mesh axes, planted faults and labels are words."""
    a = made(tmp_path / evil, evil)
    mesh = Mesh(axes=[MeshAxis(name=evil, size=2)])
    manifest = made(tmp_path / "b", evil, offset=1.0, plants=[evil]).manifest
    b = Run.open(tmp_path / "b")
    manifest.mesh = mesh
    b.manifest.mesh = mesh
    texts: list[str] = []
    pairs = [Advice(a, b), Advice(b, a, truth=a), WithinAdvice(b), Advice(a, Run.open(b.path))]
    for advice in pairs:
        for function, given in (
            ("certainty", ([evil],)),
            ("in_full", ([evil],)),
            ("into_block", (evil,)),
            ("truth", ()),
            ("escalate", ()),
            ("operator", (evil, evil, None)),
            ("operator_input", (evil, None)),
            ("look_at", (evil,)),
            ("made_alike", (True,)),
        ):
            texts += [item.text for item in getattr(advice, function)(*given)]
    texts += [item.text for item in pairs[2].whole()]
    assert f"--mesh {quoted(f'{evil}=2')}" in " ".join(texts) or evil.startswith("-")
    assert assert_harmless(texts, evil) > 20


@pytest.mark.parametrize("evil", [*NAMES[3:6:2], NAMES[0], *NAMES[-4::2]])
def test_no_page_prints_a_command_of_the_run_s(evil, tmp_path, invoke, captured):
    """compare of one, two and three, check, inspect, localize, sensitivity, replay and repro."""
    paths = [tmp_path / f"{n}{evil}" for n in "abc"]
    for number, path in enumerate(paths):
        made(path, evil, offset=0.25 * number)
    a, b, c = paths
    texts = []
    for words in (
        ("compare", a, b),
        ("compare", a),
        ("compare", a, b, c),
        ("compare", a, a),
        ("compare", a, b, "--truth", c),
        ("compare", a, b, "--floor", b),
        ("check", a, b),
        ("check", a, a),
        ("inspect", a),
        ("inspect", a, "--site", "nowhere:out"),
        ("localize", a, b, "-o", "out"),
        ("sensitivity", a, "--candidate", b),
        ("replay", a, "-o", "r"),
        ("repro", a, "-o", "r", "--site", f"{evil}:out"),
        ("repro", a, "-o", "r", "--site", f"{escape_path(evil)}:out"),
        ("ranks", a),
        ("unpack", a, "-o", "x.tar"),
        ("pack", a, "-o", "a.tar"),
        ("capture", "--like", a, "-o", a),
    ):
        code, out, err = invoke(*words)
        assert code in (0, 1, 2), err
        texts += [*out.splitlines(), *err.splitlines()]
    assert assert_harmless(texts, evil) >= 10
    assert assert_harmless(captured(Run.open(a)).splitlines(), evil) > 0


@pytest.mark.parametrize("evil", [name for name in NAMES if escape_path(name) != name])
def test_a_name_as_it_is_is_refused(evil, tmp_path, invoke):
    """A run escapes what would mean something else in a site; one that does not is not read."""
    with pytest.raises(RunFormatError, match="is not written as the sites of runs write it"):
        made(tmp_path / "raw", evil, block=evil)
    code, out, err = invoke("inspect", tmp_path / "raw")
    assert (code, out) == (2, "")
    assert_harmless(err.splitlines(), evil)


def test_a_name_of_several_lines_prints_one(tmp_path, captured):
    """A newline would leave its second half as a line of its own, to be copied alone."""
    run = made(tmp_path / "a\ntouch pwned\n", "block")
    assert "touch pwned" not in {line.strip() for line in captured(run).splitlines()}
