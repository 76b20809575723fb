"""A dump's files, which are hostile until proven otherwise: nothing of them is executed.

Names come from one walk that follows no symbolic link and refuses every one it meets, and whatever
is no regular file. What a file may hold is the matter of divergence.outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from divergence.errors import DumpError
from divergence.outside import Budget, disk_bytes, inside, json_value, lines, read_bytes
from divergence.run.schema.layout import expanded

__all__ = ["SUFFIXES", "DumpFolder"]

SUFFIXES = (".pt", ".safetensors", ".npy")

_MAX_FILES = 2_000_000
_AGAIN = "dump again, and let the program end by itself"


class DumpFolder:
    """``names``: of all regular files, relative, with slashes, in natural order of the system's
    names. A single file is a folder that holds nothing else. ``budget``: of what all of them may
    become."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = given = expanded(path)
        self._place = str(given)
        if not os.path.exists(given):
            raise DumpError("there is no such file or folder", where=str(given))
        self.budget = Budget()
        if given.is_dir():
            self.root, self.names = given, sorted(_walk(given))
        else:
            self.root, self.names = given.parent, [given.name]
            inside(self.root, given.name)
        if not self.names:
            raise DumpError("the folder holds no file", where=str(given))

    def where(self, name: str) -> str:
        return str(self.root / name)

    def place(self) -> str:
        """The file, and line, that was read last: for what a reader trips over."""
        return self._place

    def json(self, name: str) -> Any:
        """A JSON file. Raises DumpError."""
        path = self.regular(name)
        return json_value(read_bytes(path), where=str(path), hint=_AGAIN)

    def lines(self, name: str) -> Iterator[bytes]:
        """A text file, line by line. Raises DumpError."""
        path = self.regular(name)
        for number, line in enumerate(lines(path), 1):
            self._place = f"{path}, line {number}"
            yield line

    def regular(self, name: str) -> Path:
        """The file, which is one, is not empty and has no holes to speak of. Raises DumpError."""
        path = inside(self.root, name, hint=_AGAIN)
        self._place = str(path)
        size = path.stat().st_size
        if not size:
            raise DumpError("the file is empty: the dump is half written", where=str(path),
                            hint=_AGAIN)  # fmt: skip
        self.budget.expand(size, disk=disk_bytes(path), where=str(path))
        return path

    def value(self, name: str) -> Any:
        """What a tensor file holds: a tensor, or tensors and plain values by key."""
        from divergence.importing.tensor_files import tensors_of

        return tensors_of(self.regular(name), self.budget)


def _walk(root: Path) -> list[str]:
    names: list[str] = []
    folders = [""]
    for folder in folders:  # which grows meanwhile
        try:
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/")
                    elif entry.is_file(follow_symlinks=False):
                        names.append(name)
                    else:
                        raise DumpError(
                            "a dump may hold no symbolic link, pipe or device", where=entry.path,
                            hint="copy the files themselves (cp -rL)",
                        )  # fmt: skip
                    if len(names) + len(folders) > _MAX_FILES:
                        raise DumpError(f"more than {_MAX_FILES:,} files", where=str(root))
        except OSError as error:
            raise DumpError(f"cannot be read: {error.strerror}",
                            where=str(root / folder)) from error  # fmt: skip
    return names
