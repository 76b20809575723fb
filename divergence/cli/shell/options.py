"""What the command line leaves in its context, the settings that stand behind a command's options,
and how an answer is printed."""

from __future__ import annotations

from typing import Any

import typer

from divergence.printable import printable_lines

__all__ = ["ARGUMENTS", "VERBOSE", "settings", "show"]

ARGUMENTS = "divergence.arguments"
"""Context key: the command line as it was given."""
VERBOSE = "divergence.verbose"
"""Context key: whether errors print their traceback."""


def settings(section: str, *, machine_alone: bool = False) -> dict[str, Any]:
    """One section of the settings, by the options' fields; variables that mean nothing are warned
    about. ``machine_alone``: those of this machine, which a repeated run does not choose."""
    from divergence.config import SECTIONS, ignored_variables, load_settings
    from divergence.options.option import fields_of

    for variable in ignored_variables():
        typer.echo(f"warning: {variable} is no setting of divergence; it is ignored", err=True)
    found = load_settings()[section]
    if machine_alone:
        own = {field.name for field in fields_of(SECTIONS[section]) if field.option.machine}
        return {name: value for name, value in found.items() if name in own}
    return found


def show(text: str) -> None:
    """One answer in text form, to stdout."""
    from divergence.layout.terminal import write_text

    write_text(printable_lines(text.removesuffix("\n")) + "\n")
