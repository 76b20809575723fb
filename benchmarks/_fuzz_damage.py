"""What is done to the bytes, values and lines of files for benchmarks/fuzz.py."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**40,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**70,
    0.5,
    -0.0,
    1e308,
    1e-320,
    10**400,
]
TEXTS = [
    "",
    "x",
    "..",
    "/",
    "a:b",
    "a/b#2:out",
    "\n",
    "\x1b[2J",
    "\u202e",
    "\ud800",
    "x" * 9999,
    "nan",
    "float32",
    "bfloat16",
    "float64",
    "int64",
    "bool",
    "complex64",
    "float8_e4m3fn",
    "float4_e2m1fn_x2",
    "free",
    "anchored",
    "escalated",
    "whole",
    "replayed",
    "shard:0",
    "shard:63",
    "partial:sum",
    "replicate",
    "single",
    "re:(a+)+$",
    "*",
    "[",
    "re:(",
    "model.layers.0:out",
    "lm_head:out",
    "operators",
    "encoder",
    "encoder-decoder",
    "0" * 32,
    "sketch",
    "hash",
    "tensors/r00000-000000.safetensors",
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"x": 1}, "", 0]


def damaged_bytes(data: bytes, random_: random.Random) -> bytes:
    """The bytes with one kind of damage."""
    kind = random_.choice(["flip", "flip", "cut", "insert", "remove", "swap", "repeat", "zero"])
    place = random_.randrange(len(data) + 1)
    if kind == "flip" and data:
        changed = bytearray(data)
        for _ in range(random_.choice([1, 1, 4])):
            changed[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        return bytes(changed)
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return data[:place] + random_.randbytes(random_.choice([1, 8, 600])) + data[place:]
    if kind == "remove":
        return data[:place] + data[place + random_.choice([1, 9, 512]) :]
    if kind == "repeat":
        return data[:place] + data[max(0, place - 512) : place] + data[place:]
    if kind == "zero":
        return data[:place] + bytes(16) + data[place + 16 :]
    other = random_.randrange(len(data) + 1)
    low, high = sorted((place, other))
    return data[:low] + data[high:] + data[low:high]


def damaged_value(value: Any, random_: random.Random) -> Any:
    """The JSON value with one part changed, somewhere inside."""
    places = list(places_of(value))
    if not places:
        return random_.choice(OTHERS)
    holder, key = random_.choice(places)
    one = holder[key]
    kind = random_.random()
    if kind < 0.1 and isinstance(holder, dict):
        del holder[key]
    elif kind < 0.15 and isinstance(holder, dict):
        holder[random_.choice(TEXTS)] = holder.pop(key)
    elif kind < 0.2:
        holder[key] = copy.deepcopy(at(random_.choice(places)))
    elif kind < 0.3:
        holder[key] = random_.choice(OTHERS)
    elif isinstance(one, bool):
        holder[key] = not one
    elif isinstance(one, int | float):
        near = [one + 1, one - 1, one * 2, -one]
        holder[key] = random_.choice(near if random_.random() < 0.5 else NUMBERS)
    elif isinstance(one, str):
        holder[key] = random_.choice([*TEXTS, one + random_.choice(TEXTS), one[:-1]])
    elif isinstance(one, list):
        holder[key] = random_.choice([one[1:], one * 2, one[::-1], [*one, *one[:1]], one * 50])
    else:
        holder[key] = random_.choice([*NUMBERS, *TEXTS, *OTHERS])
    return value


def at(place: tuple[Any, Any]) -> Any:
    return place[0][place[1]]


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, dict | list):
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        yield from places_of(value[key])


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def damage_records(path: Path, random_: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return
    kind = random_.random()
    if kind < 0.1:
        random_.shuffle(lines)
    elif kind < 0.15:
        lines.pop(random_.randrange(len(lines)))
    elif kind < 0.2:
        lines.append(random_.choice(lines))
    elif kind < 0.35:  # the same part of every record
        values = [json.loads(line) for line in lines]
        key = random_.choice(sorted({key for value in values for key in value}))
        fresh = random_.choice([*NUMBERS, *TEXTS, *OTHERS, [0], [1, 0], [2**40, 0], [3, 4]])
        for value in values:
            value[key] = fresh
        lines = [as_json(value) + b"\n" for value in values]
    else:
        for _ in range(random_.choice([1, 1, 3, 20])):
            number = random_.randrange(len(lines))
            value = damaged_value(json.loads(lines[number]), random_)
            lines[number] = as_json(value) + b"\n"
    path.write_bytes(b"".join(lines))


def damage_header(path: Path, random_: random.Random) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    for _ in range(random_.choice([1, 1, 3])):
        damaged_value(header, random_)
    text = as_json(header)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
