"""What tells of people and places, taken out of text that is to be sent.

Runs hold no host name, user or environment beyond a list (recording.machine.environment); what is
left are paths, as they were typed, and labels. Runs named by a path are called A, B and TRUTH; of
any other path below a root or a home only the last name is kept; this machine's host and user names
are taken out wherever they are words of their own.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

__all__ = ["Redaction"]

_PATHS = re.compile(
    r"(?<![\w./:~-])(?:file://)?(?:~|[A-Za-z]:)?(?:[\\/][^\\/\s'\"`<>|:;,()\[\]{}]+){2,}[\\/]?"
    r"|(?<![\w./:-])~[\\/][^\\/\s'\"`<>|:;,()\[\]{}]+"
)
_HOMES = re.compile(r"([\\/](?:home|Users|Documents and Settings)[\\/])[^\\/\s'\"]+", re.IGNORECASE)
_COMMON = {"root", "localhost", "user", "admin", "ubuntu", "runner", "nobody", "docker", "linux"}
_SHORTEST = 4
"""A host called ``gpu`` is not taken out: the word says nothing of anybody."""


class Redaction:
    """``named``: what to call each place, by its path as it was given."""

    def __init__(self, named: Mapping[str, str], *, private: tuple[str, ...] | None = None) -> None:
        forms: dict[str, str] = {}
        for path, name in named.items():
            for form in (path, os.path.abspath(path), os.path.realpath(path)):
                if (
                    len(re.split(r"[\\/]", form)) > 1
                ):  # a plain name tells nothing, and may be a word
                    forms.setdefault(form, name)
        longest = sorted(map(re.escape, forms), key=len, reverse=True)
        self._forms = forms
        self._named = re.compile(rf"(?<![\w./-])(?:{'|'.join(longest) or '(?!)'})(?![\w.-])")
        words = _own_names() if private is None else private
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
        text = _HOMES.sub(r"\1…", text)
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


def _own_names() -> tuple[str, ...]:
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = ""
    return host, host.partition(".")[0], user
