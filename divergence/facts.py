"""Facts are codes and values; sentences are made of them at the very end, from tables of templates.

Whoever measures, judges or decides makes a ``Fact`` and reads the codes and values of others. A
template says what a fact is in English. It stands once, in a table ``SENTENCES`` of the package
that makes the fact: ``operators.alone`` in ``divergence/analyses/operators/sentences.py``; a code
without a dot, or of a stage of the comparison, in ``divergence/comparison/sentences.py``.
``worded`` fills every text of an answer.

A template is a format string with a few additions:

- ``{name:spec}``: a value in one of FORMATS (``figure``, ``letter``, ``count token``, ``names 5``,
  ...), else as Python's ``format`` writes it.
- ``{side:candidate=B alone|reference=A alone|*=both}``: one text for each value. True, False and
  None are ``yes``, ``no`` and ``none``; ``*`` is any other. A text may hold fields.
- ``[[, token {token}]]``: left out where a value in it is None, False or empty.
- A value that is a fact, or a list of facts, is written as its own sentence.
"""

from __future__ import annotations

import functools
import re
import string
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar, cast

import msgspec

from divergence.domain import added
from divergence.words import (
    chance,
    count,
    decimal,
    figure,
    fixed,
    letter,
    list_names,
    relative,
    shape_text,
    share,
    signed,
    size,
    times,
)

P = ParamSpec("P")
T = TypeVar("T")
JsonValue = Annotated[object, msgspec.Meta(extra_json_schema={"description": "any JSON value"})]
"""What JSON can hold."""


class Fact(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One thing that is known, as a code and its values."""

    code: str = ""
    """Names the template: ``token_ratio``, or ``domain.code`` of a domain's own table."""
    values: dict[str, JsonValue] = {}
    """What the sentence tells, by name: numbers, names, sides, or facts."""
    text: str = ""
    """The fact as a sentence, made at the very end by ``worded``."""
    block: str | None = None
    """A block worth a look, although nothing is beyond a limit there."""

    def __post_init__(self) -> None:
        """Values are what JSON holds, so that a fact that was read again is equal."""
        for name, value in self.values.items():
            if isinstance(value, dict | list | tuple):
                self.values[name] = _read_again(value)

    def __eq__(self, other: object) -> bool:
        """Facts are equal by what they tell, whether sentences are made already or not."""
        if not isinstance(other, Fact):
            return NotImplemented
        return (self.code, self.values, self.block) == (other.code, other.values, other.block)

    def __ne__(self, other: object) -> bool:  # msgspec's own tells one object from another
        return not self == other

    def __hash__(self) -> int:
        return hash(self.code)

    def __getitem__(self, name: str) -> Any:
        """The value of that name; None where the fact has none."""
        return self.values.get(name)

    def with_values(self, **values: object) -> Fact:
        """The fact with other values of these names."""
        return msgspec.structs.replace(self, values=self.values | values)


def _read_again(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() >= {"code", "values", "text"}:
        return msgspec.convert(value, Fact)
    if isinstance(value, list | tuple):
        return [_read_again(item) for item in value]
    return value


def fact(code: str, *, standout: str | None = None, **values: Any) -> Fact:
    """The fact of this code with these values. ``standout``: a block that it makes worth a look."""
    return Fact(code=code, values=values, block=standout)


def plain(text: str, **values: Any) -> Fact:
    """Words that come from elsewhere: a library's message, a name, a file."""
    return Fact(code="plain", values={"text": text, **values})


def in_one(facts: Sequence[Fact]) -> list[Fact]:
    """Joins facts into one, with semicolons between them; an empty list stays empty."""
    return list(facts) if len(facts) < 2 else [fact("several", facts=facts)]


def has(facts: Iterable[Fact], *codes: str) -> bool:
    """Is a fact with one of these codes there?"""
    return any(item.code in codes for item in facts)


def _listed(value: Sequence[Any], argument: str) -> str:
    return (argument or ", ").join(map(_plain_text, value))


def _names(value: Sequence[Any], argument: str) -> str:
    most, _, by = argument.partition(" ")
    return list_names([_plain_text(item) for item in value], int(most or 5), by or ", ")


def _series(value: Sequence[Any], _: str) -> str:
    """``a, b and c``."""
    *first, last = map(_plain_text, value)
    return f"{', '.join(first)} and {last}" if first else last


def _some(numbers: Sequence[int], what: str) -> str:
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:4]))}{more}"


FORMATS: dict[str, Callable[[Any, str], str]] = {
    "letter": lambda value, _: letter(value),
    "letters": lambda value, _: " and ".join(map(letter, value)),
    "figure": lambda value, digits: figure(value, int(digits or 1)),
    "count": lambda value, noun: count(value, noun),
    "plural": lambda value, noun: (
        noun if (len(value) if isinstance(value, list | tuple) else value) == 1 else f"{noun}s"
    ),
    "list": _listed,
    "lengths": lambda value, _: " x ".join(map(str, value)) or "one number",
    "squared": lambda value, _: f"[{_listed(value, '')}]" if isinstance(value, list) else value,
    "names": _names,
    "some": _some,
    "series": _series,
    "decimal": lambda value, _: decimal(value),
    "factor": lambda value, _: f"{value:.6g}" if abs(value - 1) > 1e-3 else f"1 {value - 1:+.1e}",
    "fixed": lambda value, digits: fixed(value, int(digits or 3)),
    "times": lambda value, _: times(value),
    "share": lambda value, _: share(value),
    "short": lambda value, _: f"{value:.1f}" if value < 100 else f"{value:.2g}",
    "size": lambda value, _: size(value),
    "relative": relative,
    "signed": lambda value, _: signed(value),
    "chance": lambda value, _: chance(value),
    "shape": lambda value, _: shape_text(value),
    "site": lambda value, _: f"the model's output ({value})" if value == ".:out" else str(value),
}
"""Ways to write a value, each called with the value and the rest of the spec."""

_CHOICE = re.compile(r"[\w*., -]*=")
_SECTION = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_WORDS: dict[object, str] = {True: "yes", False: "no", None: "none"}
STAGES = ("preflight", "align", "measure")
"""Of the comparison: their templates stand in its table under their whole codes."""


def sentence(item: Fact) -> str:
    """The fact in words. Raises KeyError for a code without a template."""
    if not item.code:
        return item.text
    return filled(template_of(item.code), item.values)


def sentence_behind(item: Fact, place: str) -> str:
    """The fact in words, without the head that names ``place`` where it begins with that."""
    try:
        template = template_of(item.code)
    except KeyError:  # of a report that another version made
        return item.text
    head = re.match(r"\{(\w+)\}", template)
    named = str(item[head[1]]) if head else ""
    if head and (named.startswith(place) or named == place.partition(":")[0]):
        template = template.partition(": ")[2]
    return filled(template, item.values)


def template_of(code: str) -> str:
    """The template of a code. Raises KeyError where no table has it."""
    domain, _, name = code.rpartition(".")
    return table_of("")[code] if domain in STAGES else table_of(domain)[name]


@functools.cache
def table_of(domain: str) -> Mapping[str, str]:
    """The table of a domain, by its name; that of the comparison has no name."""
    rooms = ("divergence", "divergence.analyses", "divergence.comparison")
    places = [f"{room}.{domain}.sentences" for room in rooms]
    for place in places if domain else ["divergence.comparison.sentences"]:
        try:
            return cast(Mapping[str, str], import_module(place).SENTENCES)
        except ModuleNotFoundError:
            continue
    if domain not in added("sentences"):
        raise KeyError(f"no table of sentences for {domain!r}")
    return cast(Mapping[str, str], import_module(added("sentences")[domain]).SENTENCES)


def filled(template: str, values: Mapping[str, Any]) -> str:
    """A template with its values."""

    def section(match: re.Match[str]) -> str:
        names = names_in(match[1])
        return match[1] if all(_is_there(values.get(name)) for name in names) else ""

    return "".join(_pieces(_SECTION.sub(section, template), values))


def names_in(template: str) -> set[str]:
    """The names of all values that a template may ask for."""
    names: set[str] = set()
    for _, name, spec, _ in string.Formatter().parse(template.replace("[[", "").replace("]]", "")):
        if name is not None:
            names.add(name)
            names |= names_in(spec or "") if "{" in (spec or "") else set()
    return names


def _is_there(value: Any) -> bool:
    return value is not None and value is not False and value != "" and value != []


def _pieces(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    for literal, name, spec, _ in string.Formatter().parse(template):
        yield literal
        if name is None:
            continue
        value, spec = values[name], spec or ""
        if _CHOICE.match(spec):
            yield filled(_choice(spec, value), values)
            continue
        how, _, argument = filled(spec, values).partition(" ")
        if how in FORMATS:
            yield FORMATS[how](value, argument)
        elif spec:
            yield format(value, spec)
        else:
            yield _plain_text(value)


def _choice(spec: str, value: Any) -> str:
    """The text for ``value``: choices stand apart by ``|``, outside of fields."""
    texts: dict[str, str] = {}
    depth, begin = 0, 0
    for at, character in enumerate(spec + "|"):
        depth += (character == "{") - (character == "}")
        if character == "|" and depth == 0:
            key, _, text = spec[begin:at].partition("=")
            texts[key] = text
            begin = at + 1
    key = _WORDS[value] if value is None or isinstance(value, bool) else str(value)
    return texts[key] if key in texts else texts["*"]


def _plain_text(value: Any) -> str:
    if isinstance(value, Fact):
        return sentence(value)
    if isinstance(value, list | tuple):
        return "".join(map(_plain_text, value))
    return str(value)


def with_sentences(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` whose answer is ``worded``."""

    @functools.wraps(function)
    def finished(*args: P.args, **kwargs: P.kwargs) -> T:
        return worded(function(*args, **kwargs))

    return finished


class Worded:
    """A Struct with texts that are made of facts: ``TEXTS`` names, for each text, the field that
    holds its facts. Sentences of several facts follow on one another; what stands between them
    belongs to the templates."""

    __slots__ = ()
    TEXTS: ClassVar[Mapping[str, str]] = {}


def worded(value: T) -> T:
    """``value`` with the texts of all facts in it, however deep."""
    if isinstance(value, Fact):
        inner = {name: worded(item) for name, item in value.values.items()}
        text = sentence(value)
        return cast(T, msgspec.structs.replace(value, values=inner, text=text))
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        changes: dict[str, Any] = {
            name: worded(getattr(value, name)) for name in _fields_with_facts(kind)
        }
        for text, source in getattr(kind, "TEXTS", {}).items():
            if facts := changes.get(source, getattr(value, source)):
                if not isinstance(facts, list | tuple):
                    facts = [facts]
                texts = [item.text for item in facts]
                many = isinstance(getattr(value, text), list)
                changes[text] = texts if many else "".join(texts)
        return cast(T, msgspec.structs.replace(value, **changes)) if changes else value
    if isinstance(value, list | tuple):
        return cast(T, type(value)(map(worded, value)))
    if isinstance(value, dict):
        return cast(T, {key: worded(item) for key, item in value.items()})
    return value


@functools.cache
def _fields_with_facts(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if _holds_facts(field.type))


@functools.cache
def _holds_facts(kind: Any) -> bool:
    if kind is Fact:
        return True
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)  # of a base without any, nobody knows
        return not fields or any(_holds_facts(field.type) for field in fields)
    return any(_holds_facts(inner) for inner in typing.get_args(kind))
