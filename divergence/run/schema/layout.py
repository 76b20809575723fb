"""Names and limits of the files of a run, in one place for the writer and the reader.

Nothing in a run may point outside its directory: shard names are matched against
a narrow pattern, and symbolic links are refused wherever they stand.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from divergence.errors import RunFormatError
from divergence.outside import inside

__all__ = [
    "COMMON_SHARD_DTYPES", "MANIFEST", "MAX_FORWARD_TOKENS", "MAX_LINE_BYTES",
    "MAX_MANIFEST_BYTES", "MAX_NEW_TOKENS", "MAX_NUMEL", "MAX_RANKS", "RECORDS", "SHARD_DTYPES",
    "SHARD_PATTERN", "TENSORS", "checked_file", "checked_name", "checked_shard_name", "expanded",
    "is_records_name", "is_run_name", "records_name", "shard_name",
]  # fmt: skip

MANIFEST = "manifest.json"
RECORDS = "records.jsonl"
_INDEX = re.compile(r"records\.index(\.[0-9]+\.tmp)?")
"""A cache that earlier versions kept beside the lines. Nothing reads it."""
TENSORS = "tensors"
_RUN_NAMES = frozenset({MANIFEST, MANIFEST + ".tmp", RECORDS, TENSORS})
"""All that lies in the directory of a run of one process; see ``is_run_name``."""
_RANK_RECORDS = re.compile(r"records-r[0-9]{5}\.jsonl")

MAX_LINE_BYTES = 1 << 20
"""A record takes some 500 bytes; a line beyond 1 MiB is damage, not data."""
MAX_MANIFEST_BYTES = 1 << 30
"""Digests take some 100 bytes a parameter tensor; 1 GiB is beyond any model."""
MAX_RANKS = 100_000
"""The names of their records have five digits."""
MAX_NEW_TOKENS = 1 << 24
"""Beyond any context: a step for each is counted."""
MAX_FORWARD_TOKENS = 1 << 28
"""Of all prompts of a batch with their padding: far beyond what any device runs at once."""
MAX_NUMEL = (1 << 59) - 1
"""Elements of the largest tensor (and of an empty one's other axes): its bytes fit 64 bits."""

COMMON_SHARD_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What every safetensors release in use knows; other dtypes are written as raw bytes (U8)."""
SHARD_DTYPES = COMMON_SHARD_DTYPES | {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "complex64": "C64",
}
"""A record's dtype → the name that a safetensors header gives it."""

SHARD_PATTERN = r"^tensors/[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors$"


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` replaced; as it is where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def records_name(rank: int) -> str:
    """Where a rank's records are: ``records.jsonl`` of the first, ``records-r00003.jsonl``."""
    return RECORDS if rank == 0 else f"records-r{rank:05d}.jsonl"


def is_records_name(name: str) -> bool:
    """Are the records of some rank under this name?"""
    return name == RECORDS or _RANK_RECORDS.fullmatch(name) is not None


def is_run_name(name: str) -> bool:
    """Is this the name of something that lies in a run's directory?"""
    return name in _RUN_NAMES or is_records_name(name) or _INDEX.fullmatch(name) is not None


def shard_name(rank: int, number: int) -> str:
    """``(0, 3)`` → ``"tensors/r00000-000003.safetensors"``."""
    return f"{TENSORS}/r{rank:05d}-{number:06d}.safetensors"


def checked_shard_name(name: str, *, where: str) -> str:
    """The name as it is; RunFormatError where it leads out of the run."""
    if re.match(SHARD_PATTERN, name) is None or name.endswith("\n"):
        raise RunFormatError(
            f"shard name {name!r} is not allowed",
            where=where,
            hint="a shard is named tensors/NAME.safetensors, inside the run's own directory",
        )
    return name


def checked_name(name: str, *, where: str) -> str:
    """The name of a file that makes a run, as it is: RunFormatError for any other. Every name is
    checked by this before it is joined to a place, whoever gave it."""
    if name == MANIFEST or is_records_name(name):
        return name
    return checked_shard_name(name, where=where)


def checked_file(root: Path, name: str) -> Path:
    """``root/name`` if it is a regular file reached through no symbolic link inside the run."""
    return inside(
        root, checked_name(name, where=str(root)), error=RunFormatError,
        hint="copy the whole run directory; a run is not complete without it",
    )  # fmt: skip
