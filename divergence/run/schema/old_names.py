"""Runs of earlier versions, in which the name of a module stood in a site as torch has it.

A ``/`` or ``#`` in it then reads like an operator or a repeated call. The manifest's modules tell
which sites are meant; they are read in the form that ``escape_path`` gives today.
"""

from __future__ import annotations

import re

import msgspec

from divergence.run.schema.call import Operand
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.record import Record
from divergence.run.schema.site import escape_path, unescape_path

__all__ = ["Renaming", "with_escaped_modules"]

_RAW = re.compile(r"[/:#\s\x00-\x1f\x7f-\x9f]")


def with_escaped_modules(manifest: Manifest) -> Manifest:
    """The manifest with today's module paths; the same object where nothing changes."""
    modules = manifest.plan.modules
    if any(map(_RAW.search, modules)):
        manifest.plan.modules = {
            escape_path(path) if _RAW.search(path) else path: note for path, note in modules.items()
        }
    return manifest


class Renaming:
    """A record's sites in today's form. False where no module of the run has such a name."""

    def __init__(self, manifest: Manifest) -> None:
        names = {unescape_path(path): path for path in manifest.plan.modules if "%" in path}
        self._paths = {name: path for name, path in names.items() if name != path}

    def __bool__(self) -> bool:
        return bool(self._paths)

    def __call__(self, record: Record) -> Record:
        call = record.call
        if call is not None:
            operands = tuple(map(self._operand, call.operands))
            if operands != call.operands:
                call = msgspec.structs.replace(call, operands=operands)
        return msgspec.structs.replace(record, site=self._site(record.site), call=call)

    def _operand(self, operand: Operand) -> Operand:
        site, origin = (one and self._site(one) for one in (operand.site, operand.origin))
        return msgspec.structs.replace(operand, site=site, origin=origin)

    def _site(self, site: str) -> str:
        path, colon, port = site.rpartition(":")
        found = self._module(path)
        if found is None:  # an operator has no slash in its own name
            owner, slash, operator = path.rpartition("/")
            module = self._module(owner) if slash else None
            found = None if module is None else f"{module}/{operator}"
        return site if found is None else f"{found}{colon}{port}"

    def _module(self, path: str) -> str | None:
        """The path with its call (``#2``, ``#word``, ``#word#2``), or None for another module."""
        call = ""
        for _ in range(3):
            if path in self._paths:
                return self._paths[path] + call
            path, mark, last = path.rpartition("#")
            if not mark:
                return None
            call = f"#{last}{call}"
        return None
