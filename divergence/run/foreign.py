"""A dump's files, which are hostile until proven otherwise: nothing of them is executed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from divergence.errors import DumpError
from divergence.outside import Budget, disk_bytes, inside, json_value, lines, read_bytes
from divergence.run.record import expanded
from divergence.run.tensor_files import tensors_of

# Names come from one walk that follows no symbolic link and refuses every one it meets, and
# whatever is no regular file. What a file may hold is the matter of divergence.outside.

_AGAIN = "dump again, and let the program end by itself"
SUFFIXES = (".pt", ".safetensors", ".npy")
LINES = (".jsonl", ".ndjson")
"""Of a file of JSON lines."""

_MAX_FILES = 2_000_000


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

    def objects(self, *endings: str) -> Iterator[tuple[Any, str]]:
        """The JSON value of each line that is not blank, and where it stands, of all files that
        have one of these endings. Raises DumpError."""
        for name in self.names:
            if name.endswith(endings):
                for number, item in self.rows(name):
                    yield item, f"{self.where(name)}, line {number}"

    def rows(self, name: str) -> Iterator[tuple[int, Any]]:
        """Each line's number and JSON value, of one file. Raises DumpError."""
        file = self.where(name)
        for number, line in enumerate(self.lines(name), 1):
            if line.strip():
                hint = "write the file again, and let the program end by itself"
                yield number, json_value(line, where=f"{file}, line {number}", hint=hint)

    def first_fields(self, name: str) -> dict[str, Any]:
        """The fields of a file's first line; none where it cannot be read, or is no object."""
        try:
            _, item = next(self.rows(name))
        except (DumpError, StopIteration):
            return {}
        return item if isinstance(item, dict) else {}

    def regular(self, name: str) -> Path:
        """The file, which is one, is not empty and has no holes to speak of. Raises DumpError."""
        path = inside(self.root, name, hint=_AGAIN)
        self._place = str(path)
        size = path.stat().st_size
        if not size:
            raise DumpError(
                "the file is empty: the dump is half written", where=str(path), hint=_AGAIN
            )
        self.budget.expand(size, disk=disk_bytes(path), where=str(path))
        return path

    def value(self, name: str) -> Any:
        """Return what a tensor file holds: a tensor, or tensors and plain values by key."""
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
                            "a dump may hold no symbolic link, pipe or device",
                            where=entry.path,
                            hint="copy the files themselves (cp -rL)",
                        )
                    if len(names) + len(folders) > _MAX_FILES:
                        raise DumpError(f"more than {_MAX_FILES:,} files", where=str(root))
        except OSError as error:
            raise DumpError(
                f"cannot be read: {error.strerror}", where=str(root / folder)
            ) from error
    return names
