"""The surface of the command line as data: every command, option, default and panel.

    python tests/cli/surface.py       rewrites the surface.json of all, and docs/commands.md

The JSON freezes the surface: a change of it is a change that users meet, so it is
made on purpose, together with a line in the changelog.
"""

import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SURFACE = Path(__file__).with_name("surface.json")
DOCS = ROOT / "docs" / "commands.md"


def commands() -> dict[str, Any]:
    """The app's commands by name, "" being the app itself; click's or typer's own objects."""
    from typer.main import get_command

    from divergence.cli.main import app

    group = get_command(app)
    return {"": group, **{name: command.load() for name, command in group.commands.items()}}


def describe(command: Any) -> list[dict[str, Any]]:
    """The parameters of a command in the order of its help, completion switches left out."""
    rows = []
    for parameter in command.params:
        names = list(parameter.opts)
        if any("completion" in name for name in names):
            continue
        default = parameter.default
        rows.append(
            {
                "names": names,
                "metavar": parameter.metavar or "",
                "required": bool(parameter.required),
                "repeatable": bool(getattr(parameter, "multiple", False)),
                "default": default if isinstance(default, str | int | float) else None,
                "panel": getattr(parameter, "rich_help_panel", None) or "",
                "help": parameter.help,
            }
        )
    return rows


def surface() -> dict[str, list[dict[str, Any]]]:
    """What is frozen: everything but the help texts."""
    return {
        name: [{k: v for k, v in row.items() if k != "help"} for row in describe(command)]
        for name, command in commands().items()
    }


def frozen() -> dict[Path, dict[str, list[dict[str, Any]]]]:
    """By file what it freezes: the core's surface, and each domain's with what it adds to commands
    of the core."""
    from divergence.cli.main import COMMANDS
    from divergence.domain import own_domains, placed
    from divergence.options.option import fields_of

    now, files = surface(), {}
    core = {name: now[name] for name in sorted({"", *COMMANDS})}
    for domain in own_domains():
        held = {command.name: now[command.name] for command in domain.commands}
        kinds = {
            name: [*filter(None, [added.options]), *added.groups.values()]
            for name, added in domain.adds.items()
        }
        for name, places in kinds.items():
            fields = [field for place in places for field in fields_of(placed(place))]
            words = {word for field in fields for option in field.options for word in option.names}
            held[name] = [row for row in core[name] if words & {*row["names"]}]
            core[name] = [row for row in core[name] if row not in held[name]]
        if held:
            path = ROOT / "tests" / "domains" / domain.name / "surface.json"
            files[path] = {name: held[name] for name in sorted(held)}
    return {SURFACE: core, **files}


def docs_text() -> str:
    """docs/commands.md: the help of every command as Markdown."""
    parts = [
        "# Commands\n",
        "Made from `--help` by `python tests/cli/surface.py`.\n",
        "Options of several commands stand [at the end](#options-of-several-commands). "
        "The first clause of each stands here; `divergence COMMAND --help` has all of it, "
        "with examples and exit codes.\n",
    ]
    uses = Counter(_option(row) for command in commands().values() for row in describe(command))
    shared = {row for row, number in uses.items() if number >= 2 and row.startswith("- `-")}
    for name, command in commands().items():
        parts.append(f"## divergence {name}\n" if name else "## divergence\n")
        arguments = [row for row in describe(command) if not row["names"][0].startswith("-")]
        options = [row for row in describe(command) if row["names"][0].startswith("-")]
        usage = " ".join(
            row["metavar"] if row["required"] else f"[{row['metavar']}]" for row in arguments
        )
        usage = usage if name else "COMMAND"
        words = ["divergence", name, "[OPTIONS]", usage]
        parts.append("    " + " ".join(word for word in words if word) + "\n")
        parts.append(inspect.cleandoc(command.help or "").split("\n\n")[0] + "\n")
        own = [row for row in [*arguments, *options] if _option(row) not in shared]
        for panel in dict.fromkeys(row["panel"] for row in own):
            if panel:
                parts.append(f"**{panel}**\n")
            rows = [_option(row) for row in own if row["panel"] == panel]
            parts.append("\n".join(rows) + "\n")
        if others := [f"`{row['names'][0]}`" for row in options if row not in own]:
            parts.append(f"Also {', '.join(others)}.\n")
        if not name:
            parts.append((command.epilog or "").strip().split("\n\n")[-1] + "\n")
    parts.append("## Options of several commands\n")
    parts.append("\n".join(row for row in uses if row in shared) + "\n")
    parts.append(_settings())
    return "\n".join(parts).rstrip() + "\n"


def _settings() -> str:
    """The settings that can be written down, from the options that may be set."""
    from divergence import config

    keys = [
        f"`{section}.{key}`"
        for section, kind in config.SECTIONS.items()
        for key in config.settings_of(kind)
    ]
    machine = [
        f"`{key}`"
        for key, field in config.settings_of(config.SECTIONS["capture"]).items()
        if field.option.machine
    ]
    lines = [
        "## Settings\n",
        "Options that are always the same can be set once. Order, strongest first: the flag, the",
        "variable, the file named by `DIVERGENCE_CONFIG` or else `divergence.toml` in the working",
        "directory, the default. `capture.dtype` is `dtype` in the table `[capture]` of the file,",
        "and the variable `DIVERGENCE_CAPTURE_DTYPE`, where commas separate a list. With `--like`",
        f"only {', '.join(machine[:-1])} and {machine[-1]} are used: everything else comes from "
        "the recorded run.",
        "",
        ", ".join(keys),
    ]
    return "\n".join(lines)


def _option(row: dict[str, Any]) -> str:
    if row["names"][0].startswith("-"):
        names = ", ".join(row["names"]) + (f" {row['metavar']}" if row["metavar"] else "")
    else:
        names = row["metavar"]
    default = re.search(r"Default: .*?\.(?=\s|$)", row["help"])
    told = default[0] if default else f"Default: `{row['default']}`." if row["default"] else ""
    return f"- `{names}`: {_clause(row['help'])} {told}".rstrip()


def _clause(text: str) -> str:
    """The first clause of a help text: up to a full stop, or a colon behind three words."""
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z-])", text)[0]
    head, _, rest = sentence.partition(": ")
    short = rest and len(head.split()) > 2 and head.split()[0] not in ("Of", "With", "Under")
    return f"{head}." if short else sentence


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path, commands_there in frozen().items():
        text = json.dumps(commands_there, indent=1, sort_keys=True) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    DOCS.write_text(docs_text(), encoding="utf-8")
    print(f"wrote {DOCS.relative_to(ROOT)}")
