"""Domains are found, not listed: those of the folder, and those that packages announce."""

import importlib
import importlib.metadata
import inspect
import pkgutil
import typing
import warnings
from pathlib import Path

import pytest

import divergence
from divergence import domain
from divergence.cli.main import app, commands
from divergence.domains import public
from divergence.facts import fact, sentence
from divergence.options.option import Options, fields_of

MINE = """
from divergence.domain import Domain, Subcommand

DOMAIN = Domain(
    name="mine",
    commands=(Subcommand("norms", "{module}:norms", "Norms by type of token.", after="compare"),),
    public={{"norms": "{module}"}},
    sentences={{"mine": "{module}"}},
)
SENTENCES = {{"norm": "a norm of {{value:.1f}}"}}


def norms():
    return 1
"""


@pytest.fixture
def announced(tmp_path, monkeypatch):
    """``announced(name, text)``: installs a package whose entry point names it a domain."""
    points = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [point for point in points if group == domain.FOLDER],
    )

    def install(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        points.append(importlib.metadata.EntryPoint(name, name, domain.FOLDER))
        domain.domains.cache_clear()

    yield install
    domain.domains.cache_clear()


def test_a_package_adds_a_command_a_name_and_sentences(announced):
    """Nothing of divergence names it."""
    announced("mine_of_a_package", MINE.format(module="mine_of_a_package"))
    listed = list(commands())
    assert listed.index("norms") == listed.index("compare") + 1
    assert divergence.norms() == 1
    assert "norms" in divergence.__all__
    assert sentence(fact("mine.norm", value=2.0)) == "a norm of 2.0"


COUNTS = """
from dataclasses import dataclass
from pathlib import Path

from divergence.domain import Addition, Domain, Files
from divergence.options.option import Options, option

DOMAIN = Domain(
    name="counts",
    adds={"compare": Addition(
        options="counts_of_a_package:CountOptions", help="Two files of counts are compared.",
        examples=("divergence compare a.count b.count",),
        files=Files(
            noun="counts", recognise="counts_of_a_package:is_count",
            command="counts_of_a_package:compare",
        ),
    )},
)


@dataclass(frozen=True, kw_only=True)
class CountOptions(Options):
    times: int | None = option("--times N", "How often.", minimum=1, after="force")


def is_count(path):
    return path.endswith(".count")


def compare(reference, candidate, *, exit_code, output, times=1):
    print((int(Path(candidate).read_text()) - int(Path(reference).read_text())) * times)
"""


def test_a_package_compares_files_of_its_own(announced, tmp_path):
    """With options and help that it adds to `compare`, which means nothing else by them."""
    from typer.testing import CliRunner

    announced("counts_of_a_package", COUNTS)
    a, b = tmp_path / "a.count", tmp_path / "b.count"
    a.write_text("40")
    b.write_text("42")

    def compare(*words: object) -> str:
        return CliRunner().invoke(app, ["compare", *map(str, words)]).output

    assert compare(a, b, "--times", 3) == "6\n"
    assert compare(a, b) == "2\n"
    assert "--csv: of runs, and here counts are compared" in compare(a, b, "--csv", "-")
    assert "of files of counts two are compared at a time" in compare(a, b, b)
    assert "--times is for two files of counts" in compare(tmp_path, tmp_path, "--times", 3)
    shown = compare("--help")
    assert "Two files of counts are compared." in shown and "compare a.count b.count" in shown
    assert shown.index("--force") < shown.index("--times") < shown.index("--truth")


def test_a_broken_package_takes_nothing_away(announced):
    """It is left out, and said."""
    announced("broken_package", "raise RuntimeError('no such kernel')")
    with pytest.warns(UserWarning, match="broken_package cannot be imported: no such kernel"):
        names = commands()
    assert "compare" in names


def test_a_package_whose_module_is_broken_is_named(announced):
    """Not divergence: and with what is wrong with it."""
    from typer.testing import CliRunner

    announced("half_a_package", MINE.format(module="no_such_module"))
    shown = CliRunner().invoke(app, ["norms"])
    assert shown.exit_code == 2
    assert "no_such_module:norms, which a domain names, cannot be imported" in shown.output


def test_what_type_checkers_know_is_what_is_there():
    """divergence/domains/public.py has the public names of every domain."""
    added = {name: at for each in domain.own_domains() for name, at in each.public.items()}
    assert sorted(added) == sorted(public.__all__)
    for name, module in added.items():
        assert getattr(public, name) is getattr(importlib.import_module(module), name)


BESIDE = {"candidate", "command", "force", "others", "out", "progress", "reference", "run", "runs"}
"""What a function is given that is no option of its command."""


@pytest.mark.parametrize("name", ["doctor", "probe", "quantize", "scores"])
def test_a_function_takes_what_its_command_takes(name):
    """By the same names, with the same defaults."""
    added = [command for each in domain.own_domains() for command in each.commands]
    (command,) = (command for command in added if command.name == name)
    hints = typing.get_type_hints(pkgutil.resolve_name(command.function), include_extras=True)
    (kind,) = (
        kind
        for hint in hints.values()
        for kind in getattr(hint, "__metadata__", ())
        if isinstance(kind, type) and issubclass(kind, Options)
    )
    parameters = inspect.signature(getattr(divergence, name)).parameters
    given = {key: value.default for key, value in parameters.items() if key not in BESIDE}
    assert given == {
        field.name: field.default for field in fields_of(kind) if field.name not in BESIDE
    }


def test_a_domain_says_what_it_adds_and_imports_nothing():
    """All that it names is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in domain.own_domains():
            places = [command.function for command in each.commands]
            more = list(each.adds.values())
            files = [added.files for added in more if added.files]
            places += [place for item in files for place in (item.recognise, item.command)]
            places += [added.options for added in more if added.options]
            places += [place for added in more for place in added.groups.values()]
            places += [added.source.function for added in more if added.source]
            places += [engine.place for engine in each.engines.values() if each.name != "vllm"]
            for place in each.hooks.values():
                assert domain.placed(place)
            assert all(callable(domain.placed(place)) for place in places)
            for module in each.sentences.values():
                assert importlib.import_module(module).SENTENCES


def test_a_hook_that_nothing_calls_is_refused():
    """With those that there are."""
    with pytest.raises(ValueError, match=r"step_option: no hook of a domain .*step_options"):
        domain.Domain(name="mine", hooks={"step_option": "mine:settled"})


def test_an_option_of_compare_that_reaches_nothing_is_refused():
    """Runs are not asked it: nobody would hear that it was given."""
    with pytest.raises(ValueError, match="here are none"):
        domain.Domain(name="mine", adds={"compare": domain.Addition(options="mine:Options")})


def test_the_protocol_is_a_page_of_names():
    """At most twelve, and each of them, and each hook, stands in docs/extending.md."""
    text = (Path(divergence.__file__).parents[1] / "docs" / "extending.md").read_text("utf-8")
    fields = list(domain.Domain.__dataclass_fields__)
    assert len(fields) <= 12
    assert [name for name in fields if f"| `{name}` |" not in text] == []
    hooks = text.split("The hooks are ")[1].split("`HOOKS`")[0]
    assert [name for name in domain.HOOKS if f"`{name}`" not in hooks] == []
