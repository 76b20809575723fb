"""An option: one declaration for the command line, the settings, the API and the manifest."""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

# An option: one field of a dataclass, from which everything that knows options is derived.
#
#     @dataclass(frozen=True, kw_only=True)
#     class CaptureOptions(Options):
#         seed: int | None = option(
#             "--seed N", "Seed of every generator.", REPEATING, setting=True,
#             recorded="settings.seed",
#         )
#
# That is the whole declaration. Derived from it: the parameter of the command line (cli.signature),
# the key of the settings file and its DIVERGENCE_* variable (config), the check of what a caller
# of the Python API gave (recording.prompts), the place in the manifest where it is written
# and from where ``--like`` takes it (recording.request), whether a suite of cases may be
# given it (recording.cases), and the words of a command that is run elsewhere (experiments).
#
# The field's type is that of the plain value. ``capture`` takes most of its options in groups, that
# is in classes of them. Other functions of the Python API repeat names and defaults, since type
# checkers and ``help()`` read nothing but a written signature; a test holds
# them equal to the struct. A key of the manifest is written down in run.manifest as well:
# that is the format of files, which must not change because an option was renamed.


class Option(msgspec.Struct, frozen=True):
    """Says how an option is written, and what uses it.

    ``words``: its names and then the word for its value, as help prints them: ``--out -o RUN``.
    Without a name it is an argument. A switch called ``--no-...`` sets False.
    """

    words: str
    help: str
    panel: str | None = None
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    setting: bool = False
    """May be set in the settings file and as a variable, under its long name."""
    machine: bool = False
    """Its setting is this machine's: used for ``--like`` and for a suite of cases, too."""
    recorded: str | None = None
    """Where the manifest holds it, ``settings.seed``; ``--like`` takes it from there. The part
    alone where its key has the option's name."""
    needs_like: bool = False
    suite: Literal["", "too", "alone"] = ""
    """Means something to a suite of cases too, or to one that takes it (``Suite.takes``) and to no
    model."""
    commas: bool = False
    """A list that is written as one text, its parts divided by commas."""
    after: str | None = None
    """The parameter that it follows in help, where that is not the one before it."""
    late: int = 0
    """How far behind those that everyone looks for help shows its panel."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(word for word in self.words.split() if word.startswith("-"))

    @property
    def metavar(self) -> str:
        return " ".join(word for word in self.words.split() if not word.startswith("-"))

    @property
    def word(self) -> str:
        """Its long name as an identifier: ``no_batch`` of ``--no-batch``."""
        long = next(name for name in self.names if name.startswith("--"))
        return long.removeprefix("--").replace("-", "_")

    @property
    def key(self) -> str:
        """Return what the settings file calls it."""
        return self.word.removeprefix("no_")

    @property
    def turns_on(self) -> bool:
        """Return what a switch sets: False for one called ``--no-...``."""
        return not self.word.startswith("no_")


def option(
    words: str,
    help: str,
    panel: str | None = None,
    *,
    default: Any = None,
    also: Option | None = None,
    **details: Any,
) -> Any:
    """Declares a field of ``Options``, or a parameter of a command; ``...`` as its default is none.
    ``also``: the other way of a switch that can be turned both ways."""
    ways = (Option(words, help, panel, **details), *filter(None, [also]))
    return dataclasses.field(default=default, metadata={"options": ways})


def but(declared: Any, **changes: Any) -> Any:
    """The same option where a command means a little more or less by it."""
    ways = (msgspec.structs.replace(declared.metadata["options"][0], **changes),)
    return dataclasses.field(default=declared.default, metadata={"options": ways})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one command, each with the default of the Python API."""

    def __init_subclass__(cls) -> None:
        """Several commands share a declaration, and dataclass writes the name and type of its field
        into it: so each class gets its own."""
        for name, declared in list(vars(cls).items()):
            if isinstance(declared, dataclasses.Field):
                setattr(cls, name, copy.copy(declared))


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One option as code meets it. ``options``: how it is written; two for a switch that can be
    turned both ways."""

    name: str
    type: Any
    default: Any
    options: tuple[Option, ...]

    @property
    def option(self) -> Option:
        return self.options[0]

    @property
    def text_type(self) -> Any:
        """Return what its words on a command line or in a file are read as."""
        return text_type(self.type)

    def is_given(self, value: Any) -> bool:
        """Does a value of this option ask for anything? An empty list does not, nor False for what
        is not on anyhow."""
        if value is None or (value is False and self.default is not True):
            return False
        return bool(value != self.default and value not in ((), [], {}))


def kinds_of(type_: Any) -> tuple[Any, ...]:
    """The members of a union without None; of another type, itself."""
    if get_origin(type_) in (Union, types.UnionType):
        return tuple(member for member in get_args(type_) if member is not type(None))
    return (type_,)


def text_type(type_: Any) -> Any:
    """bool, int, str, Path, or a list of one: the first that a type takes."""
    first = kinds_of(type_)[0]
    if get_origin(first) is Sequence:
        (item,) = get_args(first)
        return list[int] if item is int else list[str]
    return first


_Options = TypeVar("_Options", bound=Options)
_FIELDS: dict[type[Options], tuple[Field, ...]] = {}


def fields_of(kind: type[Options]) -> tuple[Field, ...]:
    """The options of a command, in the order of its help."""
    if kind in _FIELDS:
        return _FIELDS[kind]
    hints = typing.get_type_hints(kind)
    fields = []
    for field in dataclasses.fields(kind):
        first, *others = field.metadata["options"]
        if first.recorded and "." not in first.recorded:
            first = msgspec.structs.replace(first, recorded=f"{first.recorded}.{field.name}")
        fields.append(
            Field(
                name=field.name,
                type=hints[field.name],
                default=field.default,
                options=(first, *others),
            )
        )
    _FIELDS[kind] = tuple(fields)
    return _FIELDS[kind]


def given_fields(options: Options) -> Iterator[Field]:
    """Those that ask for something else than their default."""
    for field in fields_of(type(options)):
        if field.is_given(getattr(options, field.name)):
            yield field


def group_of(kind: type[_Options], options: Options) -> _Options:
    """Those of one class among the options of a command that has them all."""
    return kind(**{field.name: getattr(options, field.name) for field in fields_of(kind)})


def recorded_in(options: Options, part: str, kind: type[Options]) -> dict[str, Any]:
    """Return what the manifest's ``settings`` or ``plan`` hold of the options, by the manifest's
    names."""
    recorded = {}
    for field in fields_of(kind):
        place, _, name = (field.option.recorded or "").partition(".")
        if place == part:
            recorded[name] = getattr(options, field.name)
    return recorded


def command_options(kind: type[Options], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options, in their order, as the keywords of ``run.command``:
    ``no_batch=True`` for ``batch=False``, and ``plant`` for the ``plants``."""
    fields = {field.name: field for field in fields_of(kind)}
    keywords: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, bool):
            ways = fields[name].options
            keywords |= {option.word: True for option in ways if option.turns_on == value}
        else:
            keywords[fields[name].option.word] = value
    return keywords
