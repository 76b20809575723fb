"""Where recorded pairs lie, and how what a benchmark compares gets there.

``take`` runs the function that a benchmark judges a pair with, and takes every comparison that it
makes: ``install`` has put ``_compare`` in place of ``compare`` in the programs. Each pair of runs
is a line of STORE/answers/KIND.jsonl, a recording and its columns.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import lzma
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks._observed import Observed
from benchmarks._recorded import Answer, Recorder, save
from divergence.comparison import api
from divergence.comparison.result import Report
from divergence.errors import DivergenceError
from divergence.numerics.floor import THRESHOLDS
from divergence.run.reader import Run

__all__ = ["Line", "Store", "Taking", "install", "read_columns", "take", "write_columns"]


class Line(msgspec.Struct, kw_only=True):
    """One pair: a line of answers/KIND.jsonl."""

    kind: str
    key: str
    planted: dict[str, Any]
    """What was planted, and where; a healthy pair has no ``side``."""
    row: dict[str, Any] | None
    """The benchmark's own, as it is now."""
    answers: dict[str, Answer]
    """By way: with the truth that the benchmark ``given``, with the one that the reference has
    ``carried``, and with ``none``."""
    why_not: dict[str, str] = {}
    """Of the ways that cannot be replayed, why."""
    carries: str = ""
    """The reference's own passes of the truth and the floor, where it was asked so."""
    refusal: str | None = None
    """The last error of the project's own."""
    bits: int = 0
    """Mantissa bits that the recording keeps."""
    seconds: float = 0.0
    num_bytes: int = 0
    """Of the recording and the columns."""


class Store:
    """A folder of recorded pairs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, kind: str | None = None) -> list[Line]:
        files = sorted(self.path.glob(f"answers/{kind or '*'}.jsonl"))
        decode = msgspec.json.Decoder(Line).decode
        lines = []
        for text in (text for file in files for text in file.read_bytes().splitlines()):
            try:
                lines.append(decode(text))
            except msgspec.DecodeError:  # cut short by a kill: its pair is made again
                print("a line that was cut short is left out", file=sys.stderr)
        return lines

    def file(self, what: str, kind: str, key: str) -> Path:
        name = re.sub(r"[^\w.-]+", "-", key)[:80]
        digest = hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
        return self.path / what / kind / f"{name}-{digest}.xz"

    def add(self, line: Line) -> None:
        file = self.path / "answers" / f"{line.kind}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")
        with file.open("ab") as out:  # behind a line that was cut short, on one of its own
            out.write(b"" if whole else b"\n")
            out.write(msgspec.json.encode(line) + b"\n")


def write_columns(path: Path, table: dict[str, np.ndarray], preset: int = 4) -> int:
    """Column by column, high and low bytes apart. Gives its size."""
    heads, parts = [], []
    for name, column in table.items():
        if column.dtype == object:
            data, form = "\n".join(column).encode(), "text"
        else:
            planes = column.view(np.uint8).reshape(-1, column.itemsize).T
            data, form = planes.tobytes(), column.dtype.str
        heads.append((name, form, len(data)))
        parts.append(data)
    head = msgspec.json.encode(heads)
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(b"\n".join([head, b"".join(parts)]), preset=preset)
    path.write_bytes(packed)
    return len(packed)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """The tables that ``write_columns`` wrote."""
    head, _, data = lzma.decompress(path.read_bytes()).partition(b"\n")
    table, start = {}, 0
    for name, form, size in json.loads(head):
        part = data[start : start + size]
        start += size
        if form == "text":
            table[name] = np.array(part.decode().split("\n"), dtype=object)
            continue
        width = np.dtype(form).itemsize
        planes = np.frombuffer(part, np.uint8).reshape(width, -1)
        table[name] = np.ascontiguousarray(planes.T).view(form).ravel()
    return table


_original = api.compare
_USUAL = {
    "device": "cpu",
    "floor": (),
    "force": False,
    "layers": (),
    "name_map": None,
    "progress": None,
    "thresholds": THRESHOLDS,
}
"""What ``compare`` is called with by whoever wants nothing else of it."""


@dataclass
class _Pair:
    """Two runs that were compared, with ``options`` beside their truth."""

    a: Run
    b: Run
    options: dict[str, Any]
    recorder: Recorder
    observed: Observed


class Taking:
    """Takes comparisons into the store, one recording for each pair of runs. Each pair is asked
    with the truth that its reference carries, and without any, too.

    ``anchor``: the run that both sides repeat, where the reference is such a repetition: it is the
    one that carries a truth.
    """

    def __init__(
        self, store: Store, kind: str, key: str, planted: dict[str, Any], anchor: Path | None = None
    ) -> None:
        self.store, self.anchor = store, anchor
        self._line = functools.partial(Line, kind=kind, planted=planted)
        self._kind, self._key = kind, key
        self._pairs: dict[Any, _Pair] = {}
        self._refusal: str | None = None
        self._began = time.perf_counter()

    def compare(self, a: Any, b: Any = None, *, truth: Any = None, **options: Any) -> Report:
        """As the API's; a run alone is compared, and not taken."""
        if b is None:
            return _original(a, truth=truth, **options)
        options.pop("progress", None)
        options = {name: value for name, value in options.items() if _USUAL[name] != value}
        a, b = Run.open(a), Run.open(b)
        place = a.manifest.id, b.manifest.id, str(sorted(options))
        if place not in self._pairs:
            observed = Observed({a.manifest.id: "a", b.manifest.id: "b"})
            self._pairs[place] = _Pair(a, b, options, Recorder(), observed)
        pair = self._pairs[place]
        way = "carried" if truth is None else "given"
        if any(asked.way == way for asked in pair.recorder.recording.asked):
            return _original(a, b, truth=truth, **options)
        try:
            if pair.observed.num_pairs:
                return pair.recorder.compare(way, a, b, truth, **options)
            with pair.observed.operators():
                return pair.recorder.compare(
                    way, a, b, truth, observe=pair.observed.observe, **options
                )
        except DivergenceError as error:
            self._refusal = error.message
            raise

    def finish(self, row: Any) -> None:
        """Writes what was taken. ``row``: the benchmark's own of the pair, on its first line."""
        row = asdict(row) if is_dataclass(row) and not isinstance(row, type) else row
        for number, pair in enumerate(self._pairs.values()):
            self._write(self._key if number == 0 else f"{self._key} #{number}", pair, row)
            row = None
        if not self._pairs:
            self._add(self._key, row, answers={}, refusal=self._refusal)

    def _write(self, key: str, pair: _Pair, row: Any) -> None:
        user = pair.a if self.anchor is None else Run.open(self.anchor)
        asked = pair.recorder.recording.asked
        if asked and not pair.options:
            for way, truth in (("carried", user if self.anchor else None), ("none", None)):
                if not any(each.way == way for each in asked):
                    with contextlib.suppress(DivergenceError):
                        pair.recorder.compare(way, pair.a, pair.b, truth)
        bits = num_bytes = 0
        if asked:
            file = self.store.file("recordings", self._kind, key)
            bits = save(file, pair.recorder.recording).bits
            columns = self.store.file("columns", self._kind, key)
            num_bytes = file.stat().st_size + write_columns(columns, pair.observed.table())
        own = {"truth", "truth_free", "floor"} & set(user.manifest.plan.passes)
        self._add(
            key,
            row,
            answers={each.way: each.answer for each in asked},
            why_not={each.way: each.why_not for each in asked if each.why_not},
            bits=bits,
            num_bytes=num_bytes,
            carries=" ".join(sorted(own)),
            refusal=self._refusal,
        )

    def _add(self, key: str, row: Any, **values: Any) -> None:
        now = time.perf_counter()
        self.store.add(self._line(key=key, row=row, seconds=round(now - self._began, 2), **values))
        self._began = now


_taking: Taking | None = None


@functools.wraps(_original)
def _compare(*args: Any, **options: Any) -> Report:
    """``compare``, into what is being taken; a comparison that another makes is its own affair."""
    global _taking
    taking, _taking = _taking, None
    try:
        return (_original if taking is None else taking.compare)(*args, **options)
    finally:
        _taking = taking


def install() -> None:
    """Programs that are imported get ``_compare`` for ``compare``, and those that come later."""
    for name, module in list(sys.modules.items()):
        own = name in ("benchmarks._recorded", "benchmarks._taken")
        if not own and getattr(module, "compare", None) is _original:
            module.compare = _compare  # type: ignore[attr-defined]


def take(
    store: Store,
    kind: str,
    key: str,
    planted: dict[str, Any],
    run: Callable[[], Any],
    anchor: Path | None = None,
) -> None:
    """Runs a benchmark's pair and writes what it compared. One that cannot be made is told, and
    tried again the next time."""
    global _taking
    _taking = taking = Taking(store, kind, key, planted, anchor)
    try:
        row = run()
        _taking = None
        taking.finish(row)
    except Exception as error:
        print(f"{kind}: {key}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        _taking = None
