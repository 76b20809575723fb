"""A command's parameters for typer, made from options.

    def command(
        options: Annotated[dict[str, Any], CompareOptions],     # those of them that were given
        exit_code: bool = option("--exit-code", "...", default=False),
        output: Output,
    ) -> None:

Typer reads the signature of what it is handed, so it is handed one in which a struct of options
(and Output) is spread out to one parameter each, in the place where the command names it. What was
not given is not passed on: the default is that of the function which the command calls.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from divergence.cli.answers import ARGUMENTS, VERBOSE
from divergence.domain import Addition
from divergence.errors import UsageError
from divergence.options.commands import OUTPUT, Output
from divergence.options.option import Option, Options, fields_of, text_type
from divergence.run.command import quoted_words

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


class Added(dict[str, dict[str, Any]]):
    """Options that domains add to a command: those that were given, by the domain's name."""


_Parameter = tuple[Option, inspect.Parameter]


def typer_command(
    function: Callable[..., None], added: Mapping[str, type[Options]] | None = None
) -> Callable[..., None]:
    """``function`` with a signature that typer reads. A ``command`` among its parameters is the
    command line as it was given, for the manifest. ``added``: by domain, what it adds."""
    added = added or {}
    hints = typing.get_type_hints(function, include_extras=True)
    structs: dict[str, type[Options]] = {}
    parameters: list[_Parameter] = []
    defaults: dict[str, Any] = {}
    for own in inspect.signature(function).parameters.values():
        hint = hints[own.name]
        if hint is Output:
            parameters += _spread(Output)
        elif hint is Added:
            parameters += [parameter for kind in added.values() for parameter in _spread(kind)]
        elif isinstance(own.default, dataclasses.Field):
            default, (option,) = own.default.default, own.default.metadata["options"]
            default = inspect.Parameter.empty if default is ... else default
            parameters.append(_parameter(own.name, hint, default, option))
            defaults[own.name] = default
        elif own.name != "command":
            (structs[own.name],) = hint.__metadata__
            parameters += _spread(structs[own.name])
    if "verbose" not in [parameter.name for _, parameter in parameters]:
        raise TypeError(
            f"{function.__module__}.{function.__qualname__} has no -v: "
            "it needs `output: Output` or `verbose: bool = VERBOSE` of divergence.options.commands"
        )
    wants_line = "command" in hints

    def command(ctx: typer.Context, **values: Any) -> None:
        ctx.meta[VERBOSE] = values["verbose"]
        if "output" in hints:
            values["output"] = Output(**_take_given(Output, values))
        for name, kind in structs.items():
            values[name] = _take_given(kind, values)
        if Added in hints.values():
            values["added"] = Added(
                {name: _take_given(kind, values) for name, kind in added.items()}
            )
        for name, default in defaults.items():
            if values[name] is None or values[name] == []:
                values[name] = default
            elif isinstance(values[name], enum.Enum):
                values[name] = values[name].value
        if wants_line:
            arguments = ctx.meta.get(ARGUMENTS)
            values["command"] = quoted_words(["divergence", *arguments]) if arguments else None
        function(**values)

    context = inspect.Parameter("ctx", _KEYWORD, annotation=typer.Context)
    # as help shows them: an option that is to follow another one stands behind it, and the panels
    # that few look for stand behind those that all do
    ordered = [parameter for option, parameter in parameters if option.after is None]
    for option, parameter in parameters:
        if option.after is not None:
            names = [before.name for before in ordered]
            ordered.insert(names.index(option.after) + 1, parameter)
    late = {p.name: 3 if option.panel == OUTPUT else option.late for option, p in parameters}
    ordered.sort(key=lambda shown: late[shown.name])
    listed = [context, *ordered]
    command.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]  # inspect reads it
    return command


def help_of(
    line: str, function: Callable[..., None], additions: Sequence[Addition] = ()
) -> tuple[str, str]:
    """Help and epilog of a command, from its first ``line`` and its docstring, which ends in a
    paragraph of examples, each on a line of its own, and perhaps notes. Typer wants each example to
    be a paragraph. ``additions``: of domains."""
    whole = f"{line}\n\n{inspect.cleandoc(function.__doc__ or '')}"
    text, _, rest = whole.partition("\n\nExamples:\n")
    examples, *notes = rest.split("\n\n")
    lines = [*examples.splitlines(), *(line for added in additions for line in added.examples)]
    indented = [f"  {example}" for example in lines]
    paragraphs = [*text.split("\n\n"), *(added.help for added in additions if added.help)]
    text = "\n\n".join(map(_joined, paragraphs))
    return text, "\n\n".join(["\nExamples:", *indented, *map(_joined, notes)])


def _joined(paragraph: str) -> str:
    """One line, which the terminal folds at its own width; a list keeps its lines."""
    lines = paragraph.splitlines()
    return paragraph if any(line[:1] in " -" for line in lines) else " ".join(lines)


def _spread(kind: type[Options]) -> list[_Parameter]:
    """A parameter for each way in which an option is written. Typer gets no default where the help
    names it in words, or a setting may stand behind it."""
    parameters = []
    for field in fields_of(kind):
        for option in field.options:
            name = field.name if option is field.option else option.word
            hidden = option.setting or "Default: " in option.help
            type_, default = field.type, field.default
            if option.commas:
                type_, default = str, ",".join(default)
            default = default if isinstance(default, str) and not hidden else None
            parameters.append(_parameter(name, type_, default, option))
    return parameters


def _parameter(name: str, type_: Any, default: Any, option: Option) -> _Parameter:
    read_as: Any = text_type(type_)
    if option.choices:
        make_enum: Any = enum.Enum
        read_as = make_enum(name, {choice: choice for choice in option.choices})
    declared: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.panel is not None:
        declared["rich_help_panel"] = option.panel
    if option.minimum is not None:
        declared["min"] = option.minimum
    if read_as is bool:
        default = False
    elif default in (None, ()):
        default, read_as, declared["show_default"] = None, read_as | None, False
    make: Any = typer.Option if option.names else typer.Argument
    annotation: Any = Annotated[read_as, make(*option.names, **declared)]
    return option, inspect.Parameter(name, _KEYWORD, annotation=annotation, default=default)


def _take_given(kind: type[Options], values: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of ``kind`` out of ``values``; those that were given, by their field."""
    given: dict[str, Any] = {}
    for field in fields_of(kind):
        for option in field.options:
            value = values.pop(field.name if option is field.option else option.word)
            if value is None or value is False or value == []:
                continue
            if field.name in given:
                both = " and ".join(way.names[0] for way in field.options)
                raise UsageError(f"{both} cannot be combined", hint="give one of them")
            if isinstance(value, enum.Enum):
                value = value.value
            if option.commas:
                value = [part.strip() for part in value.split(",") if part.strip()]
            given[field.name] = option.turns_on if value is True else value
    return given


def settings(section: str, *, machine_alone: bool = False) -> dict[str, Any]:
    """One section of the settings, by the options' fields; variables that mean nothing are warned
    about. ``machine_alone``: those of this machine, which a repeated run does not choose."""
    from divergence.config import SECTIONS, ignored_variables, load_settings

    for variable in ignored_variables():
        typer.echo(f"warning: {variable} is no setting of divergence; it is ignored", err=True)
    values = load_settings()[section]
    if machine_alone:
        own = {field.name for field in fields_of(SECTIONS[section]) if field.option.machine}
        return {name: value for name, value in values.items() if name in own}
    return values
