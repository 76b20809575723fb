"""Settings: options written down once instead of typed each time.

Order, strongest first: a flag, a ``DIVERGENCE_*`` variable, the settings file, the default of the
command. The settings file is ``DIVERGENCE_CONFIG`` or else ``divergence.toml`` in the working
directory:

    [capture]
    device = "cuda:0"          # DIVERGENCE_CAPTURE_DEVICE
    sites = ["attention"]      # DIVERGENCE_CAPTURE_SITES, comma-separated

    [check]
    policy = "strict"          # DIVERGENCE_CHECK_POLICY

Whether an option has a setting is declared with the option (``divergence.options``). All TOML is
decoded strictly: an unknown key or a wrong type is refused with the file, the key path and the
nearest right name. Nothing that executes foreign code (``trust_remote_code``, a kernel of the hub
as attention) can be set here.

Policies, site presets and name maps are TOML files too, named by path or, for those in configs/, by
name: ``ci`` is configs/ci.toml. A path has a suffix or a slash, so that a file called ``ci`` in the
working directory is never taken for the policy of that name.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from divergence.errors import ConfigError, first_line
from divergence.options.commands import CaptureOptions, CheckOptions, CompareOptions
from divergence.options.option import Field, Options, fields_of
from divergence.outside import check_value, read_bytes
from divergence.run.manifest import ATTENTION
from divergence.run.site import BUILTIN_SITES, did_you_mean, near_names

SETTINGS_FILE = "divergence.toml"
PREFIX = "DIVERGENCE_"
_MAX_TOML_BYTES = 1 << 20
_T = TypeVar("_T")


class SitesPreset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file sites-NAME.toml: patterns under one name."""

    sites: tuple[str, ...]
    description: str = ""


SECTIONS: dict[str, type[Options]] = {
    "capture": CaptureOptions,
    "compare": CompareOptions,
    "check": CheckOptions,
}
"""The tables of the settings file, with the options of their commands."""


def settings_of(kind: type[Options]) -> dict[str, Field]:
    """The options of a command that may be set, by their key."""
    return {field.option.key: field for field in fields_of(kind) if field.option.setting}


def _settings_type(sections: Mapping[str, type[Options]]) -> type[msgspec.Struct]:
    """The type that the settings file is decoded into; None is what the file does not set."""
    strict: dict[str, Any] = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
    tables: list[Any] = []
    for name, kind in sections.items():
        options = settings_of(kind).items()
        keys = [(key, _written_type(field) | None, None) for key, field in options]
        table = msgspec.defstruct(f"{name.title()}Settings", keys, **strict)
        tables.append((name, table, table()))
    return msgspec.defstruct("Settings", tables, **strict)


def _written_type(field: Field) -> Any:
    """The type of an option in a file: paths are text there."""
    kind = field.text_type
    if kind in (bool, int):
        return kind
    return tuple[str, ...] if kind == list[str] else str


def config_folders() -> list[Path]:
    """List where named configs lie: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    return [path for path in (package.parent / "configs", package / "configs") if path.is_dir()]


def config_names(prefix: str = "") -> list[str]:
    """Names of the shipped configs that begin with ``prefix``, sorted, without it."""
    files = {file for folder in config_folders() for file in folder.glob(f"{prefix}*.toml")}
    return sorted({file.stem.removeprefix(prefix) for file in files})


def find_config(name: str | os.PathLike[str], *, prefix: str = "", what: str = "config") -> Path:
    """The file meant by a path (with a suffix or a slash) or by the name of a shipped config;
    ConfigError if there is none."""
    text = os.fspath(name)
    path = Path(text).expanduser()
    if is_path(text):
        if path.is_file():
            return path
    else:
        for folder in config_folders():
            candidate = folder / f"{prefix}{text}.toml"
            if candidate.is_file():
                return candidate
    names = config_names(prefix)
    if not prefix:
        names = [item for item in names if not item.startswith("sites-")]
    shipped = f"give the path of a TOML file, or one of: {', '.join(names) or 'none shipped'}"
    hint = did_you_mean(text, names, then=shipped)
    if not is_path(text) and path.is_file():
        hint = f"for the file of that name write .{os.sep}{text}; otherwise {shipped}"
    raise ConfigError(f"there is no {what} {text!r}", hint=hint)


def is_path(text: str) -> bool:
    """Is a path meant, and not the name of a shipped config? It has a suffix or a slash."""
    return Path(text).suffix != "" or any(slash in text for slash in (os.sep, os.altsep) if slash)


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of one TOML file; ConfigError naming file and line otherwise."""
    data, where = read_bytes(path, most=_MAX_TOML_BYTES, error=ConfigError), str(path)
    try:
        tables = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError("the file is not UTF-8 text", where=where) from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"the file is not TOML: {first_line(error)}", where=where) from error
    check_value(tables, where=where, error=ConfigError)
    return tables


def decode(tables: Mapping[str, Any], kind: type[_T], *, where: str) -> _T:
    """``tables`` as a typed struct: unknown keys and wrong types refused, by their key path."""
    try:
        return msgspec.convert(tables, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        keys = path.rstrip("`").removeprefix("$").removeprefix(".")
        unknown = re.search(r"unknown field `(.+)`", text)
        node = msgspec.inspect.type_info(kind)  # of a key path such as tolerance[...].x
        for part in filter(None, re.split(r"\.|\[.*?\]", keys)):
            types = {field.encode_name: field.type for field in getattr(node, "fields", ())}
            node = _named_in(types.get(part, node))
        values = map(str, getattr(node, "values", ()))
        hint = f"one of {', '.join(values)}" if text.startswith("Invalid enum") else None
        if unknown:
            key = unknown[1]
            names = sorted(field.encode_name for field in getattr(node, "fields", ()))
            text = f"unknown key {key!r}"
            hint = did_you_mean(key, names, then=f"keys here: {', '.join(names)}")
        place = f"{where}: {keys}" if keys else where
        raise ConfigError(f"{text[:1].lower()}{text[1:]}", where=place, hint=hint) from error


def _named_in(node: Any) -> Any:
    """The struct or the literal inside ``list[...]``, ``tuple[..., ...]`` or ``... | None``."""
    kinds = msgspec.inspect.StructType, msgspec.inspect.LiteralType
    inner = filter(None, [getattr(node, "item_type", None), *getattr(node, "types", ())])
    parts = map(_named_in, () if isinstance(node, kinds) else inner)
    return next((part for part in parts if isinstance(part, kinds)), node)


def load_settings(
    environ: Mapping[str, str] | None = None,
    *,
    folder: str | os.PathLike[str] = ".",
    sections: Mapping[str, type[Options]] = SECTIONS,
) -> dict[str, dict[str, Any]]:
    """The settings of the environment over those of the file; neither need exist. By section, and
    there by the field of the option."""
    environ = os.environ if environ is None else environ
    named = environ.get(f"{PREFIX}CONFIG")
    path = Path(named) if named else Path(folder) / SETTINGS_FILE
    tables: dict[str, Any] = load_toml(path) if named or path.is_file() else {}
    written = decode(tables, _settings_type(sections), where=str(path))
    settings: dict[str, dict[str, Any]] = {}
    for section, kind in sections.items():
        values = msgspec.structs.asdict(getattr(written, section))
        settings[section] = {
            field.name: values[key]
            for key, field in settings_of(kind).items()
            if values[key] is not None
        }
    for variable, section, key in _variables(environ):
        if section in sections and key:
            fields = settings_of(sections[section])
            if key not in fields:
                near = near_names(key, fields) or sorted(fields)
                listed = ", ".join(f"{PREFIX}{section}_{name}".upper() for name in near)
                raise ConfigError(
                    "a variable names no setting", where=variable, hint=f"did you mean {listed}?"
                )
            field = fields[key]
            settings[section][field.name] = _from_text(field, environ[variable], variable)
    attention = settings.get("capture", {}).get("attn_implementation")
    if attention is not None and attention not in ATTENTION:
        raise ConfigError(
            f"{attention!r} may be code of its own, which no setting chooses",
            where="capture: attn_implementation",
            hint=f"one of {', '.join(ATTENTION)}; others with --attn-implementation",
        )
    return settings


def ignored_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """DIVERGENCE_* variables that belong to no section, so that the user can be warned."""
    environ = os.environ if environ is None else environ
    return [
        variable
        for variable, section, key in _variables(environ)
        if section not in SECTIONS or not key
    ]


def _variables(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(variable, section, key) of every DIVERGENCE_* variable that is not empty."""
    alone = (f"{PREFIX}CONFIG", f"{PREFIX}PROCESS_TUNING")  # the second: of earlier versions
    variables = []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in alone and environ[variable]:
            section, _, key = variable.removeprefix(PREFIX).lower().partition("_")
            variables.append((variable, section, key))
    return variables


def _from_text(field: Field, text: str, variable: str) -> Any:
    """A variable's text in the type of its setting, split where that is a list."""
    kind = _written_type(field)
    value: Any = text
    if kind == tuple[str, ...]:
        value = [part.strip() for part in text.split(",") if part.strip()]
    try:
        # strict=False: the text "16" is the number 16, the text "false" is False
        return msgspec.convert(value, kind | None, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}, got {value!r}", where=variable) from error


def expand_sites(words: Iterable[str]) -> list[str]:
    """``--sites`` words as patterns: a built-in word, else a preset's name or file, else a pattern.

    A pattern that happens to be called like a preset is written with its port
    (``attention:*``).
    """
    patterns: list[str] = []
    for word in words:
        plain = re.fullmatch(r"[\w-]+", word) is not None
        if word not in BUILTIN_SITES and plain and word in config_names("sites-"):
            path = find_config(word, prefix="sites-", what="site preset")
        elif word.endswith(".toml"):
            path = find_config(word, what="site preset")
        else:
            patterns.append(word)
            continue
        patterns.extend(decode(load_toml(path), SitesPreset, where=str(path)).sites)
    return list(dict.fromkeys(patterns))
