"""A hostile run: nothing it says forges a line or moves the cursor, nothing it asks for takes long.

Every text of manifest and records is planted with a line that looks like a report's, escape codes
and marks of direction, whatever the field: found by walking the types, so that a new field is
planted as well.
"""

import json
import shutil
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from divergence import MachineOptions, Run, capture
from divergence.run.manifest import Manifest
from divergence.run.record import Record
from divergence.run.site import ROOT, escape_path
from tests.counting import lines_of_python
from tests.digests import without_digests

EVIL = "x\nFORGED: the runs agree\r\x1b[2J\x1b[31m\u202e\u2028\x85\x07|`<b>y"

OPERATOR = "model.layers.0.mlp/aten.mul:out"

MEANT = {
    ("ModelIdentity", "dtype"),
    ("ModelIdentity", "task"),
    ("Settings", "compute_dtype"),
    ("Plan", "replayed_pass"),
    ("Plan", "only_changed"),
    ("Place", "shard"),
    ("Place", "key"),
    ("Record", "dtype"),
    ("Operand", "dtype"),
    ("Operand", "site"),
    ("Operand", "origin"),
    ("Operand", "weight"),
    ("Call", "operator"),
    ("Plan", "anchored_to"),
    ("Plan", "plants"),
    ("Plan", "steps"),
    ("Plan", "positions"),
    ("Manifest", "digest"),
    ("Manifest", "record_digests"),
}
"""Words that make the run another one, or none: planted one by one."""

At = Callable[[tuple[str, str]], bool]
"""Is a field planted, by (name of the struct, name of the field)?"""


def planted(kind: Any, value: Any, *, at: At, owner: tuple[str, str] = ("", "")) -> Any:
    """``value`` (built-in types) of type ``kind`` with evil in each text, and in one text of each
    list and each optional field that is empty."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        bound = any(
            meta.pattern or {"pattern", "enum"} & {*(meta.extra_json_schema or ())}
            for meta in arguments[1:]
        )
        return value if bound else planted(arguments[0], value, at=at, owner=owner)
    if origin is Literal:
        return value
    if origin in (typing.Union, types.UnionType):
        for one in arguments:
            if one is not type(None) and (value is None or isinstance(value, _plain(one))):
                return planted(one, value, at=at, owner=owner) or value
        return value
    if kind is str:
        return f"{value or ''}{EVIL}" if at(owner) else value
    if origin in (list, tuple):
        inner = [planted(arguments[0], one, at=at, owner=owner) for one in value or []]
        if not inner and arguments[0] is str:
            inner = [planted(str, None, at=at, owner=owner)]
        return [one for one in inner if one is not None]
    if origin is dict:
        if arguments[1] is Any:
            return value
        name = sited if owner == ("Plan", "modules") else str
        found = {
            name(planted(arguments[0], key, at=at, owner=owner)): planted(
                arguments[1], item, at=at, owner=owner
            )
            for key, item in (value or {}).items()
        }
        if not value and arguments == (str, str) and at(owner):
            found = {f"k{EVIL}": EVIL}
        return found
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if value is None:
            return None
        hints = typing.get_type_hints(kind, include_extras=True)
        names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
        found = dict(value)
        for name, encoded in names.items():
            one = planted(hints[name], value.get(encoded), at=at, owner=(kind.__name__, name))
            if one is not None and not (one in ([], {}) and encoded not in value):
                found[encoded] = one
        return found
    return value


def sited(name: str) -> str:
    """A module's name as a run has it; the root's stays."""
    return name if name == ROOT else escape_path(name)


def _plain(kind: Any) -> tuple[type, ...]:
    """The built-in types that stand for ``kind``."""
    origin = typing.get_origin(kind) or kind
    if origin is Annotated:
        return _plain(typing.get_args(kind)[0])
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return (dict,)
    return {list: (list,), tuple: (list,), dict: (dict,), Literal: (str,)}.get(origin, (origin,))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, llama) -> Path:
    """``a``, and ``b`` which has a fault and another machine's texts."""
    folder = tmp_path_factory.mktemp("hostile")
    sites = ["blocks", "lm_head:out", "ops@model.layers.0.mlp"]
    capture(llama, out=folder / "a", max_new_tokens=2, sites=sites)
    capture(
        llama,
        out=folder / "b",
        max_new_tokens=2,
        sites=sites,
        machine=MachineOptions(label="there"),
        plants=["model.layers.1.mlp:out=scale:1.5"],
    )
    return folder


def rewrite(source: Path, target: Path, change, change_record=None) -> Path:
    """A copy of a run with another manifest and other records."""
    shutil.copytree(source, target)
    without_digests(target)
    manifest = target / "manifest.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    if change_record is not None:
        lines = target / "records.jsonl"
        found = [change_record(json.loads(line)) for line in lines.read_text().splitlines()]
        lines.write_text("".join(json.dumps(one) + "\n" for one in found))
    return target


def evil_run(source: Path, target: Path, at: At = lambda owner: owner not in MEANT) -> Path:
    return rewrite(
        source,
        target,
        lambda value: planted(Manifest, value, at=at),
        lambda value: planted(Record, value, at=at),
    )


def assert_harmless(*texts: str) -> None:
    """One forged line would begin with the word."""
    for text in texts:
        assert all(char.isprintable() or char == "\n" for char in text), [
            line for line in text.split("\n") if not line.isprintable()
        ][:3]
        assert not any(line.lstrip().startswith("FORGED") for line in text.split("\n"))


def commands(one: Path, two: Path) -> list[tuple[object, ...]]:
    return [
        ("inspect", two),
        ("inspect", two, "-v"),
        ("inspect", two, "--json"),
        ("inspect", two, "--site", "*"),
        ("inspect", two, "--verify"),
        ("compare", one, two),
        ("compare", one, two, "-v", "--all"),
        ("compare", one, two, "--json"),
        ("compare", two, one, "--force"),
        ("compare", two),
        ("compare", one, two, "--force", "--csv", "-"),
        ("compare", one, two, one, "--force"),
        ("compare", one, one, "--truth", two),
        ("compare", one, two, "--floor", two),
        ("check", one, two),
        ("check", one, two, "-v"),
        ("check", one, two, "--json"),
        ("check", one, two, "--bless"),
        ("localize", one, two, "-o", "work"),
        ("capture", "--like", two, "-o", "again"),
        ("truth", two, "-o", "truth"),
        ("replay", two, "-o", "replayed"),
        ("capture", "--like", two, "--dry-run"),
        ("repro", two, "--site", OPERATOR, "-o", "repro"),
        ("repro", two, "--against", one, "--site", OPERATOR, "-o", "repro2"),
        ("pack", two, "-o", "packed.tar"),
        ("compare", one, two, "-vv"),
        ("sensitivity", one, "--candidate", two),
        ("sensitivity", two, "--candidate", one),
        ("doctor", one, two),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
def test_no_text_of_a_run_forges_a_line(runs, invoke, tmp_path, both):
    """Every field at once, in each command that reads a run."""
    one = evil_run(runs / "a", tmp_path / "a") if both else runs / "a"
    two = evil_run(runs / "b", tmp_path / "b")
    assert EVIL in json.loads((two / "manifest.json").read_text())["environment"]["label"]
    assert invoke("inspect", two)[0] == 0, "it is read, so that what it says is printed"
    for command in commands(one, two):
        code, out, err = invoke(*command)
        assert code in (0, 1, 2), (command, err)
        assert_harmless(out, err)
        if "--json" in command and code != 2:
            json.loads(out)
    for file in tmp_path.glob("repro*/report.md"):
        assert_harmless(file.read_text())


@pytest.mark.parametrize(
    "words", [MEANT, *(pytest.param({word}, marks=pytest.mark.slow) for word in sorted(MEANT))]
)
def test_words_that_are_meant_are_refused_without_a_forged_line(words, runs, invoke, tmp_path):
    """Names of dtypes, shards, passes and tasks, all at once and one by one."""
    two = evil_run(runs / "b", tmp_path / "b", words.__contains__)
    for command in (("inspect", two), ("compare", runs / "a", two)):
        code, out, err = invoke(*command)
        assert code in (0, 2), (command, err)
        assert_harmless(out, err)


def test_a_module_that_is_not_written_as_sites_are_is_refused(runs, invoke, tmp_path):
    """Its name may mean two things; what refuses it forges no line either."""

    def change(value: dict) -> dict:
        value["plan"]["modules"] |= {EVIL: {"kind": "X", "role": "block"}}
        return value

    two = rewrite(runs / "b", tmp_path / "b", change)
    for command in (("inspect", two), ("compare", runs / "a", two), ("compare", two, two)):
        code, out, err = invoke(*command)
        assert (code, out) == (2, ""), (command, err)
        assert "is not written as the sites of runs write it" in err
        assert_harmless(err)


def _with_mesh(value: dict) -> dict:
    return value | {"mesh": {"axes": [{"name": "tp", "size": 2**31}] * 4}, "complete": False}


def _with_pads(value: dict) -> dict:
    for sample in value["tokens"]["samples"]:
        sample["num_left_pad"] = 2**40
    return value


def _with_pattern(value: dict) -> dict:
    value["plan"]["sites"] = ["re:(m|[a-z])*(.|o)*(l|.)*0x", "re:(a+)+$"]
    return value


def _with_labels(value: dict) -> dict:
    for sample in value["tokens"]["samples"]:
        sample["labels"] = []
    return value


def _with(group: str, **changes: object):
    return lambda value: value | {group: value[group] | changes}


HUGE = {
    "mesh": (_with_mesh, "a mesh of more than"),
    "pads": (_with_pads, "beyond any batch"),
    "labels": (_with_labels, "one label for each prompt id"),
    "steps": (_with("settings", max_new_tokens=2**62), "more than 16777216 new tokens"),
    "rate": (_with("training", learning_rate=-1e308), "training.learning_rate"),
}

BOUNDED = {
    "name": _with("plan", plants=["x" * 100_000], only_changed="y" * 100_000),
    "steps": _with("plan", steps="1," * 100_000),
    "repetitions": lambda value: value | {"repeatability": {"num_runs": 2**62}},
}


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_or_a_large_number_is_shown_in_part(runs, invoke, tmp_path, name):
    """Nobody reads 100,000 letters, and a terminal takes long to draw them."""
    run = rewrite(runs / "b", tmp_path / "long", BOUNDED[name])
    for command in (
        ("inspect", run, "-v"),
        ("compare", runs / "a", run),
        ("truth", run, "-o", "t"),
        ("capture", "--like", run, "--dry-run"),
        ("doctor", runs / "a", run),
    ):
        code, out, err = invoke(*command)
        assert code in (0, 1, 2), (command, err[-300:])
        assert max(map(len, f"{out}\n{err}".split("\n"))) < 15_000, command


@pytest.mark.parametrize("name", HUGE)
def test_a_few_bytes_ask_for_no_endless_work(runs, invoke, tmp_path, name):
    """Refused as what no run is, in every command, before anything is made of it."""
    change, said = HUGE[name]
    run = rewrite(runs / "b", tmp_path / "huge", change)
    for command in (("inspect", run), ("compare", runs / "a", run), ("capture", "--like", run)):
        with lines_of_python(1_000_000):
            code, out, err = invoke(*command, *(["-o", "x"] if command[0] == "capture" else []))
        assert (code, out) == (2, ""), err
        assert said in err


@pytest.mark.slow
def test_a_pattern_of_a_run_is_no_more_work_than_another(runs, invoke, tmp_path):
    """Each of 41 characters doubled the time. A run's own is not matched: ``--like`` records the
    sites that it holds."""
    run = rewrite(runs / "a", tmp_path / "slow", _with_pattern)
    more = rewrite(
        runs / "b",
        tmp_path / "more",
        lambda value: (
            value
            | {
                "plan": value["plan"]
                | {
                    "modules": value["plan"]["modules"]
                    | {"a" * 200 + ".x": {"kind": "X", "role": "block"}}
                }
            }
        ),
    )
    with lines_of_python(3_000_000):
        assert invoke("compare", run, more)[0] == 0
        assert invoke("capture", "--like", run, "-o", "x")[0] == 0
    assert set(Run.open("x").sites()) <= set(Run.open(run).sites())
