"""`divergence bundle`: one zip with what a vendor or a colleague needs to see of a comparison.

Names of files in it are fixed here, so that no name of a run can lead out of it. All text goes
through one place that takes out paths and names of hosts and users (``Redaction``), and in
report.md every word of a run is code (divergence.words).
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import io
import os
import re
import socket
import zipfile
from collections.abc import Mapping
from typing import Any

import msgspec

from divergence.comparison.result import Report, strict_json
from divergence.document import Column, Table
from divergence.errors import UsageError
from divergence.experiments.result import Localization
from divergence.layout import cut
from divergence.report.localization import page_document
from divergence.report.screen import screen_lines
from divergence.report.summary import machine_tables, opening_of
from divergence.report.text import document_lines, fenced_lines
from divergence.run.manifest import Environment, Manifest
from divergence.words import markdown_code

# What tells of people and places, taken out of text that is to be sent.
#
# Runs hold no host name, user or environment beyond a list (recording.machine); what is
# left are paths, as they were typed, and labels. Runs named by a path are called A, B and TRUTH; of
# any other path below a root or a home only the last name is kept; this machine's host and user
# names are taken out wherever they are words of their own. Keys and passwords are recorded nowhere;
# one that somebody typed is taken out by its form, or by the name before it.

_PATHS = re.compile(
    r"(?<![\w./:~-])(?:file://)?(?:~|[A-Za-z]:)?(?:[\\/][^\\/\s'\"`<>|:;,()\[\]{}]+){2,}[\\/]?"
    r"|(?<![\w./:-])~[\\/][^\\/\s'\"`<>|:;,()\[\]{}]+"
)
_HOMES = re.compile(r"([\\/](?:home|Users|Documents and Settings)[\\/])[^\\/\s'\"]+", re.IGNORECASE)
_SECRETS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|AIza)[\w-]{12,}"
    r"|(?<=://)[^/\s@'\"]+(?=@)"  # user and password of a URL
    r"|(?<=[Bb]earer )[\w.~+/-]{8,}=*"
)
_NAMED_SECRET = re.compile(
    r"(?i)((?<![A-Za-z0-9])\w*(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|credential|"
    r"(?:access|auth|hf|hub|github)_token|(?-i:[A-Z]\w*_TOKEN)|x-amz-\w+)"
    r"\w*[\"']?\s*[=:]\s*[\"']?)([^\s\"'&;,]{4,})"
)
_COMMON = {"root", "localhost", "user", "admin", "ubuntu", "runner", "nobody", "docker", "linux"}
_SHORTEST = 4
"""A host called ``gpu`` is not taken out: the word says nothing of anybody."""


class Redaction:
    """``named``: what to call each place, by its path as it was given."""

    def __init__(self, named: Mapping[str, str], *, private: tuple[str, ...] | None = None) -> None:
        forms: dict[str, str] = {}
        for path, name in named.items():
            for form in (path, os.path.abspath(path), os.path.realpath(path)):
                if re.search(r"[\\/]", form):  # a plain name tells nothing, and may be a word
                    forms.setdefault(form, name)
        longest = sorted(map(re.escape, forms), key=len, reverse=True)
        self._forms = forms
        self._named = re.compile(rf"(?<![\w./-])(?:{'|'.join(longest) or '(?!)'})(?![\w.-])")
        host, user = socket.gethostname(), ""
        with contextlib.suppress(KeyError, OSError):  # a container's user without a name
            user = getpass.getuser()
        words = (host, host.partition(".")[0], user) if private is None else private
        telling = [
            re.escape(word)
            for word in words
            if len(word) >= _SHORTEST and word.lower() not in _COMMON
        ]
        self._private = (
            re.compile(rf"(?<!\w)(?:{'|'.join(telling)})(?!\w)", re.I) if telling else None
        )

    def text(self, text: str) -> str:
        """``text`` without what tells."""
        text = self._named.sub(lambda match: self._forms[match[0]], text)
        text = _PATHS.sub(lambda match: f"…/{_last(match[0])}", text)
        text = _NAMED_SECRET.sub(r"\1…", _SECRETS.sub("…", _HOMES.sub(r"\1…", text)))
        return text if self._private is None else self._private.sub("…", text)

    def all(self, value: Any) -> Any:
        """The same of every text in plain data, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.all(key): self.all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.all(item) for item in value]
        return value


def _last(path: str) -> str:
    """The last name; a home's own name is none that may stay."""
    words = [word for word in re.split(r"[\\/]", path) if word]
    return "" if len(words) == 2 and words[0].lower() in ("home", "users") else words[-1]


_WIDEST = 400
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def bundle_files(
    report: Report,
    environments: Mapping[str, Environment],
    redaction: Redaction,
    *,
    manifests: Mapping[str, Manifest] | None = None,
    reproducer: Mapping[str, bytes] | None = None,
    localization: object = None,
) -> dict[str, bytes]:
    """The files of the zip by name. ``environments``, ``manifests``: of the runs, by what they are
    called; ``reproducer``, ``localization``: the files of one that `localize` wrote, and its
    answer."""
    report = Report.of(redaction.all(msgspec.to_builtins(report)))
    machines = {
        name: msgspec.convert(redaction.all(msgspec.to_builtins(environment)), Environment)
        for name, environment in environments.items()
    }
    files = {"report.json": report.to_json(indent=1)}
    # under other ids, since a page opens the runs again if it can, and they tell more
    sides = {
        side: msgspec.structs.replace(getattr(report, side), id="")
        for side in ("reference", "candidate")
    }
    files["report.html"] = msgspec.structs.replace(report, **sides).html()
    with contextlib.suppress(UsageError):  # no block was compared, so there is no curve
        files["error.svg"] = report.plot().svg
    descent = redaction.all(localization)
    if descent is not None:
        files["localize.json"] = strict_json(descent)
    for name, manifest in (manifests or {}).items():
        redacted = redaction.all(msgspec.to_builtins(manifest))
        files[f"manifest-{name}.json"] = strict_json(redacted, indent=1)
    encoded = {name: text.encode("utf-8", "backslashreplace") for name, text in files.items()}
    for name, data in (reproducer or {}).items():
        if _NAME.fullmatch(name) is None:
            continue
        if name.endswith((".md", ".py")):
            data = redaction.text(data.decode("utf-8", "replace")).encode()
        encoded[f"reproducer/{name}"] = data
    texts = {
        "README.md": _readme(report, machines, encoded),
        "report.md": _markdown(report, machines, descent),
    }
    return {n: text.encode("utf-8", "backslashreplace") for n, text in texts.items()} | encoded


_CONTENTS = {
    "report.md": "what differs, where and why; both machines; what localize found",
    "report.html": "the same as a page, with every table",
    "report.json": "the same for programs: Report.load of Python reads it",
    "error.svg": "the error from block to block",
    "localize.json": "from the block to the operator, for programs",
    "manifest-A.json": "of run A: model, settings, tokens, code by digests, environment",
    "manifest-B.json": "of run B",
    "reproducer/report.md": "the operator's own bug report",
    "reproducer/repro.py": "runs the operator alone",
}


def _readme(report: Report, machines: Mapping[str, Environment], files: Mapping[str, bytes]) -> str:
    """Write what somebody who has never seen this tool needs to use what is in the zip."""
    top = opening_of(report).headline
    devices = "; ".join(
        f"{name} on {_code(f'{item.device_name} ({item.device_type})')}"
        for name, item in machines.items()
    )
    lines = [
        f"# {top.word}",
        "",
        _code(top.text),
        "",
        "One model was run twice on the same tokens, and what its modules computed was compared "
        f"({devices}). Begin with report.md.",
        "",
    ]
    if "reproducer/repro.py" in files:
        report_text = files.get("reproducer/report.md", b"").decode("utf-8", "replace")
        title = report_text.partition("\n")[0].removeprefix("# ").replace("`", "")
        lines += [
            "## Run it alone",
            "",
            *([f"What it shows: {_code(title)}", ""] if title else []),
            "```",
            "pip install torch safetensors",
            "python reproducer/repro.py",
            "```",
            "",
            "It lays the recorded inputs out as they lay, sets the recorded switches, runs one "
            "operator and prints how far its result is from the recorded one and from float64. "
            "Neither the model nor divergence is needed.",
            "",
        ]
    rows = [item for item in _CONTENTS.items() if item[0] in ("report.md", *files)]
    columns = (Column("file", own=True), Column("what it is", own=True))
    lines += ["## Files", "", *Table(columns=columns, rows=rows).markdown()]
    lines += [
        "",
        "The runs themselves are not in here, and no weights. Paths, the names of the "
        "sender's host and user, and keys were taken out of all text.",
    ]
    return "\n".join(lines) + "\n"


def zipped(files: Mapping[str, bytes]) -> bytes:
    """The same files give the same bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as folder:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            folder.writestr(entry, data)
    return made.getvalue()


def _markdown(report: Report, machines: Mapping[str, Environment], descent: object) -> str:
    top = opening_of(report).headline
    lines = [f"# {top.word}", "", _code(top.text), "", "## The comparison", ""]
    lines += fenced_lines(screen_lines(report, more="report.json"))
    # nothing of what is no answer of localize
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        result = msgspec.convert(descent, Localization, strict=False)  # "nan" is a number
        if result.operator is None or result.report is not None:
            lines += [
                "## What localize found",
                "",
                *fenced_lines(document_lines(page_document(result))),
            ]
    lines += ["## The machines", ""]
    for table in machine_tables({name: item.facts for name, item in machines.items()}):
        columns = [Column(title, _short) for title in table.titles]
        table = dataclasses.replace(table, columns=columns)
        lines += [f"{table.caption}:", "", *table.markdown(), ""]
    lines.append(f"Made by `divergence bundle` {_code(report.tool_version)}.")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return markdown_code(_short(text))


def _short(text: str) -> str:
    return cut(text, _WIDEST)
