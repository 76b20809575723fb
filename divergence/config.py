"""Settings: what a person wrote down once instead of typing it each time.

Order, strongest first: a flag, a ``DIVERGENCE_*`` variable, the settings file,
the default of the command. The settings file is ``DIVERGENCE_CONFIG`` or else
``divergence.toml`` in the working directory:

    [capture]
    device = "cuda:0"          # DIVERGENCE_CAPTURE_DEVICE
    sites = ["attention"]      # DIVERGENCE_CAPTURE_SITES, comma-separated

    [check]
    policy = "strict"          # DIVERGENCE_CHECK_POLICY

``DIVERGENCE_PROCESS_TUNING=0`` is a variable alone: see run/process_tuning.py.

All TOML is decoded strictly: an unknown key or a wrong type is refused with the
file, the key path and the nearest right name. Nothing that executes foreign code
(``trust_remote_code``, a kernel of the hub as attention) can be set here.

Policies, site presets and name maps are TOML files too, named by path or, for
those in configs/, by name: ``ci`` is configs/ci.toml. A path has a suffix or a slash, so that a
file called ``ci`` in the working directory is never taken for the policy of that name.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from divergence.errors import ConfigError
from divergence.run.process_tuning import VARIABLE as PROCESS_TUNING
from divergence.run.schema.site import near_names
from divergence.run.untrusted.trust import ATTENTION

__all__ = [
    "BUILTIN_SITES",
    "CaptureSettings",
    "CheckSettings",
    "CompareSettings",
    "Settings",
    "SitesPreset",
    "config_names",
    "decode",
    "expand_sites",
    "find_config",
    "ignored_variables",
    "load_settings",
    "load_toml",
]

SETTINGS_FILE = "divergence.toml"
PREFIX = "DIVERGENCE_"
BUILTIN_SITES = ("blocks", "modules")
"""Words that capture itself understands; they come before any preset of that name."""

_T = TypeVar("_T")


class CaptureSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults of ``capture``. With ``--like`` only device, device_map and label are used:
    everything else comes from the recorded run."""

    device: str | None = None
    device_map: str | None = None
    label: str | None = None
    task: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    max_new_tokens: int | None = None
    sites: tuple[str, ...] | None = None
    seed: int | None = None
    deterministic: bool | None = None


class CompareSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults of ``compare``."""

    map: str | None = None


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults of ``check``."""

    policy: str | None = None
    map: str | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set outside the command line."""

    capture: CaptureSettings = CaptureSettings()
    compare: CompareSettings = CompareSettings()
    check: CheckSettings = CheckSettings()


class SitesPreset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file sites-NAME.toml: patterns under one name."""

    sites: tuple[str, ...]
    description: str = ""


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "capture": CaptureSettings,
    "compare": CompareSettings,
    "check": CheckSettings,
}


def config_folders() -> list[Path]:
    """Where named configs lie: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    return [path for path in (package.parent / "configs", package / "configs") if path.is_dir()]


def config_names(prefix: str = "") -> list[str]:
    """Names of the shipped configs that begin with ``prefix``, sorted, without it."""
    found = {file.stem for folder in config_folders() for file in folder.glob("*.toml")}
    return sorted(name[len(prefix) :] for name in found if name.startswith(prefix))


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
    near = near_names(text, names)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    if not is_path(text) and path.is_file():
        hint = f"for the file of that name write .{os.sep}{text}; otherwise "
    raise ConfigError(
        f"there is no {what} {text!r}",
        hint=f"{hint}give the path of a TOML file, or one of: {', '.join(names) or 'none shipped'}",
    )


def is_path(text: str) -> bool:
    """Is a path meant, and not the name of a shipped config? It has a suffix or a slash."""
    return Path(text).suffix != "" or any(one in text for one in (os.sep, os.altsep) if one)


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of one TOML file; ConfigError naming file and line otherwise."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("the file is not UTF-8 text", where=str(path)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the file is not TOML: {error}", where=str(path)) from error


def decode(tables: Mapping[str, Any], kind: type[_T], *, where: str) -> _T:
    """``tables`` as a typed struct: unknown keys and wrong types refused, by their key path."""
    try:
        return msgspec.convert(tables, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        keys = path.rstrip("`").removeprefix("$").removeprefix(".")
        unknown = re.search(r"unknown field `(.+)`", text)
        hint = None
        if unknown:
            key = unknown[1]
            names = sorted(_keys_at(kind, keys))
            near = near_names(key, names)
            text = f"unknown key {key!r}"
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            hint += f"keys here: {', '.join(names)}"
        place = f"{where}: {keys}" if keys else where
        raise ConfigError(f"{text[:1].lower()}{text[1:]}", where=place, hint=hint) from error


def _keys_at(kind: Any, path: str) -> Iterable[str]:
    """Names of the keys allowed at a key path such as ``tolerance[...].x``."""
    node = msgspec.inspect.type_info(kind)
    for part in [part for part in re.split(r"\.|\[.*?\]", path) if part]:
        fields = {field.encode_name: field.type for field in getattr(node, "fields", ())}
        node = fields.get(part, node)
        node = _struct_in(node)
    return [field.encode_name for field in getattr(node, "fields", ())]


def _struct_in(node: Any) -> Any:
    """The struct inside ``list[...]``, ``tuple[..., ...]`` or ``... | None``."""
    if isinstance(node, msgspec.inspect.StructType):
        return node
    for inner in [getattr(node, "item_type", None), *getattr(node, "types", ())]:
        found = _struct_in(inner) if inner is not None else None
        if isinstance(found, msgspec.inspect.StructType):
            return found
    return node


def load_settings(
    environ: Mapping[str, str] | None = None, *, folder: str | os.PathLike[str] = "."
) -> Settings:
    """Settings of the environment over those of the file; neither need exist."""
    environ = os.environ if environ is None else environ
    named = environ.get(f"{PREFIX}CONFIG")
    path = Path(named) if named else Path(folder) / SETTINGS_FILE
    tables: dict[str, Any] = load_toml(path) if named or path.is_file() else {}
    settings = decode(tables, Settings, where=str(path))

    over: dict[str, dict[str, Any]] = {}
    for variable, section, key in _variables(environ):
        if section not in _SECTIONS or not key:
            continue
        over.setdefault(section, {})[key] = _from_text(_SECTIONS[section], key, environ[variable])
    changed = {
        section: msgspec.structs.replace(
            getattr(settings, section), **_checked(_SECTIONS[section], values)
        )
        for section, values in over.items()
    }
    settings = msgspec.structs.replace(settings, **changed)
    attention = settings.capture.attn_implementation
    if attention is not None and attention not in ATTENTION:
        raise ConfigError(
            f"{attention!r} may be code of its own, which no setting chooses",
            where="capture: attn_implementation",
            hint=f"one of {', '.join(ATTENTION)}; others with --attn-implementation",
        )
    return settings


def ignored_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """DIVERGENCE_* variables that belong to no section, so that nobody thinks they were used."""
    environ = os.environ if environ is None else environ
    return [
        variable
        for variable, section, key in _variables(environ)
        if section not in _SECTIONS or not key
    ]


def _variables(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(variable, section, key) of every DIVERGENCE_* variable that holds something."""
    found = []
    for variable in sorted(environ):
        alone = (f"{PREFIX}CONFIG", PROCESS_TUNING)  # in no section
        if variable.startswith(PREFIX) and variable not in alone and environ[variable]:
            section, _, key = variable.removeprefix(PREFIX).lower().partition("_")
            found.append((variable, section, key))
    return found


def _from_text(kind: type[msgspec.Struct], key: str, text: str) -> Any:
    """A variable's text, split where the setting is a list."""
    types = {field.name: str(field.type) for field in msgspec.structs.fields(kind)}
    if "tuple" in types.get(key, ""):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _checked(kind: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    """The values of one section's variables in the types of their settings."""
    section = next(name for name, struct in _SECTIONS.items() if struct is kind)
    names = {field.name: field for field in msgspec.structs.fields(kind)}
    checked = {}
    for key, value in values.items():
        variable = f"{PREFIX}{section}_{key}".upper()
        if key not in names:
            near = near_names(key, names) or sorted(names)
            listed = ", ".join(f"{PREFIX}{section}_{name}".upper() for name in near)
            raise ConfigError(
                "a variable names no setting", where=variable, hint=f"did you mean {listed}?"
            )
        try:
            # strict=False: the text "16" is the number 16, the text "false" is False
            checked[key] = msgspec.convert(value, names[key].type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{error}, got {value!r}", where=variable) from error
    return checked


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
