"""A comparison recorded: what today's judge takes as input, and what answers it again.

``Recorder.compare`` compares as the API does, and keeps what was measured of each pair of tensors
(``PairNumbers``: before any floor, ratio or limit). ``Recording.answer`` asks the same question of
what was kept: manifests and record lines, numbers, and the few tensors that analyses read behind
the measuring (routers' choices, sampled logits, an operator's results). Which these are is not
listed here: right after the comparison it is asked again of the recording, and each tensor that is
missed is read from the run and kept.

On disk a recording is columns: of many objects of one kind the same field, floats rounded to a few
mantissa bits (12 are a relative error of 1.2e-4), compressed together. Where the answer of the
rounded numbers is another, all bits are kept.
"""

from __future__ import annotations

import contextlib
import lzma
import re
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch

from divergence.comparison.api import compare
from divergence.comparison.measure.pairs import Measuring, hangs_on_few, measure_pairs
from divergence.comparison.measure.rating import PairNumbers
from divergence.comparison.result import LogitsDiff, Report
from divergence.numerics.arrays import as_array, joined
from divergence.numerics.pairs import AgainstTruth, PairMetrics, RowMetrics
from divergence.numerics.summary import Summary
from divergence.numerics.sums import Estimate
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Call, Operand, Place, Record, Sketch

__all__ = ["Answer", "Asked", "Recording", "answer_of", "load", "save", "without_truth"]

COARSE, EXACT = 12, 52
"""Mantissa bits that are kept of a float."""
_TYPES = {
    kind.__name__: kind
    for kind in (
        PairNumbers,
        PairMetrics,
        RowMetrics,
        AgainstTruth,
        Estimate,
        LogitsDiff,
        Record,
        Summary,
        Place,
        Sketch,
        Call,
        Operand,
    )
}
SPREADS = ("spread_reference", "spread_candidate")
"""Fields of AgainstTruth that older recordings have not; the columns beside them do."""
_LATER: dict[type, tuple[str, ...]] = {
    AgainstTruth: (*SPREADS, "in_units"),
    PairNumbers: ("statistics_agree",),
    Record: ("checksum", "apart"),
}
"""Fields that older recordings have not, in the order in which they came."""
_DIGEST = re.compile("(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
_PLACE = Place(shard="tensors/0.safetensors", key="0")
"""Of every record that has bytes: where they lay is no part of a recording."""


# ── columns ─────────────────────────────────────────────────────────────────────────────────────


class Columns:
    """Fields of many objects, by path: floats, integers and strings' numbers.

    An object is a form (its nested types, interned) and leaves; the leaves of one path lie
    together.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.forms: dict[Any, int] = {}
        self.strings: dict[str, int] = {}

    def add(self, value: Any) -> int:
        """The number of the object's form."""
        form = self._form(value, "")
        return self.forms.setdefault(form, len(self.forms))

    def _form(self, value: Any, path: str) -> Any:
        if value is None:
            return None
        if isinstance(value, msgspec.Struct):
            kind = type(value)
            return (
                kind.__name__,
                *(
                    self._form(getattr(value, name), f"{path}.{name}")
                    for name in kind.__struct_fields__
                ),
            )
        if isinstance(value, np.ndarray):
            code = {"f": "F", "i": "I", "b": "B", "u": "I"}[value.dtype.kind]
            self.columns.setdefault(f"{path}#", []).extend(value.shape)
            self.columns.setdefault(f"{path}:{code}", []).append(value.ravel())
            return f"{code}{value.ndim}{value.dtype.str}"
        if isinstance(value, bool):
            return value
        if isinstance(value, float):
            self.columns.setdefault(f"{path}:f", []).append(value)
            return "f"
        if isinstance(value, int):
            self.columns.setdefault(f"{path}:i", []).append(value)
            return "i"
        if isinstance(value, str):
            number = self.strings.setdefault(value, len(self.strings))
            self.columns.setdefault(f"{path}:s", []).append(number)
            return "s"
        if isinstance(value, tuple):
            if value and all(type(item) is int for item in value):
                self.columns.setdefault(f"{path}#", []).append(len(value))
                self.columns.setdefault(f"{path}:t", []).extend(value)
                return "t"
            return ("", *(self._form(item, f"{path}.{n}") for n, item in enumerate(value)))
        if isinstance(value, dict):
            return ("json", self._form(msgspec.json.encode(value).decode(), path))
        raise TypeError(f"{type(value).__name__} at {path}")

    def encoded(self, bits: int) -> dict[str, Any]:
        packed = {}
        for path, values in self.columns.items():
            code = path[-1]
            if code in "FIB":
                array = np.concatenate(values) if values else np.zeros(0)
            else:
                array = np.array(values, float if code == "f" else np.int64)
            packed[path] = _floats(array, bits) if code in "Ff" else _integers(array)
        return {"columns": packed, "forms": list(self.forms), "strings": list(self.strings)}


def _floats(values: np.ndarray, bits: int) -> tuple[str, bytes]:
    """Rounded to ``bits`` of mantissa, byte by byte of all numbers: equal bytes come together."""
    raw = np.ascontiguousarray(values, np.float64).view(np.uint64)
    drop = 52 - bits
    if drop:
        finite = np.isfinite(values)
        raw = np.where(finite, raw + np.uint64(1 << (drop - 1)), raw) >> np.uint64(drop)
    size = (12 + bits + 7) // 8
    planes = raw.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :size].T
    return f"f{bits}", planes.tobytes()


def _integers(values: np.ndarray) -> tuple[str, bytes]:
    for code in ("u1", "<i2", "<i4", "<i8"):
        bounds = np.iinfo(code)
        if not values.size or (values.min() >= bounds.min and values.max() <= bounds.max):
            return code, values.astype(code).tobytes()
    raise OverflowError


def _numbers(code: str, data: bytes) -> np.ndarray:
    if not code.startswith("f"):
        return np.frombuffer(data, code)
    bits = int(code[1:])
    size = (12 + bits + 7) // 8
    planes = np.frombuffer(data, np.uint8).reshape(size, -1)
    raw = np.zeros((planes.shape[1], 8), np.uint8)
    raw[:, :size] = planes.T
    return (raw.view("<u8").ravel() << np.uint64(52 - bits)).view(np.float64)


class Objects:
    """What ``Columns`` encoded, object by object, in the same order."""

    def __init__(self, encoded: dict[str, Any]) -> None:
        self.forms, self.strings = encoded["forms"], encoded["strings"]
        self._arrays = {path: _numbers(*data) for path, data in encoded["columns"].items()}
        self._at = dict.fromkeys(self._arrays, 0)

    def next(self, form: int) -> Any:
        return self._value(self.forms[form], "")

    def _take(self, path: str, count: int) -> np.ndarray:
        start = self._at[path]
        self._at[path] = start + count
        return self._arrays[path][start : start + count]

    def _value(self, form: Any, path: str) -> Any:
        if form is None or isinstance(form, bool):
            return form
        if isinstance(form, str):
            if form[0] in "FIB":
                shape = (
                    tuple(self._take(f"{path}#", int(form[1])).tolist()) if form[1] != "0" else ()
                )
                flat = self._take(f"{path}:{form[0]}", int(np.prod(shape, dtype=int)))
                return flat.astype(form[2:]).reshape(shape)
            if form == "t":
                return tuple(self._take(f"{path}:t", int(self._take(f"{path}#", 1)[0])).tolist())
            value = self._take(f"{path}:{form}", 1)[0].item()
            return self.strings[value] if form == "s" else value
        kind, *parts = form
        if kind == "json":
            return msgspec.json.decode(self._value(parts[0], path))
        if kind == "":
            return tuple(self._value(part, f"{path}.{n}") for n, part in enumerate(parts))
        made = _TYPES[kind]
        names = made.__struct_fields__
        later = _LATER.get(made, ())
        absent = later[len(later) - (len(names) - len(parts)) :]  # of an older recording
        names = tuple(name for name in names if name not in absent)
        values = {
            name: self._value(part, f"{path}.{name}")
            for name, part in zip(names, parts, strict=True)
        }
        if made is AgainstTruth and "spread_reference" not in values:
            values |= {name: np.ones(len(values["norm"])) for name in SPREADS}
        return made(**values)


# ── runs that are read from a recording ─────────────────────────────────────────────────────────


class Tensors:
    """The tensors that a recording keeps, by content. While it is made, what is missed is read."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.sources: dict[str, tuple[Run, Record]] = {}

    def read(self, record: Record) -> torch.Tensor:
        key = f"{record.xxh3} {record.dtype} {record.shape}"
        if key not in self.kept:
            if key not in self.sources:
                raise KeyError(f"{record.site} was not recorded")
            run, source = self.sources[key]
            self.kept[key] = run.read(source).clone()
        return self.kept[key]


class ReplayedRun(Run):
    """A run whose tensors come from a recording."""

    def __init__(
        self,
        path: Any,
        manifest: Manifest,
        records: Sequence[Record],
        *,
        torn_tail: bool = False,
        store: Any = None,
    ) -> None:
        super().__init__(path, manifest, records, torn_tail=torn_tail)
        self.tensors = store

    def _opened(self) -> Any:
        return self.tensors  # handed on to the truth that a run carries

    def array(self, record: Record, *, verify: bool = True) -> np.ndarray:
        return as_array(self.tensors.read(record))

    def arrays(self, records: Sequence[Record]) -> np.ndarray:
        return joined([self.array(record)[None] for record in records], 0)

    def check(self, record: Record) -> None:
        """Its bytes were checked when it was recorded."""

    def expect(self, records: Any) -> None: ...

    def release(self, num_bytes: int) -> None: ...


@contextlib.contextmanager
def without_tensors() -> Iterator[None]:
    """Within it, nothing looks at the tensors of an onset: no recording keeps them. What is told of
    them names no other place or side."""
    with (
        mock.patch("divergence.analyses.blocks.onset.structures_at", lambda measured, unit: []),
        mock.patch("divergence.comparison.invariances.freed", lambda measured, report: None),
    ):
        yield


@contextlib.contextmanager
def without_truth() -> Iterator[None]:
    """Within it, the truth that a run carries is not seen."""
    with (
        mock.patch("divergence.comparison.api.own_truth", lambda run: None),
        mock.patch("divergence.comparison.align.own_truth", lambda run: None),
    ):
        yield


# ── what was asked and answered ─────────────────────────────────────────────────────────────────


class Answer(msgspec.Struct, frozen=True):
    """What a report comes to, as far as it is held against another."""

    kind: str
    confidence: str
    side: str | None
    site: str | None
    block: str | None
    sample: int | None
    step: int | None
    pass_: str | None
    usage: float
    findings: tuple[str, ...] = ()
    error: str | None = None

    @property
    def said(self) -> tuple[object, ...]:
        """Kind, place, side and confidence."""
        return (
            self.kind,
            self.site,
            self.sample,
            self.step,
            self.pass_,
            self.side,
            self.confidence,
            self.error,
        )


def answer_of(report: Report) -> Answer:
    verdict, onset = report.verdict, report.verdict.onset
    place = (None,) * 5
    if onset is not None:
        place = (onset.site, onset.block, onset.sample, onset.step, onset.pass_)
    usage = max((s.limit_usage for s in report.sites if s.limit_usage is not None), default=0.0)
    return Answer(
        verdict.kind,
        verdict.confidence,
        verdict.side,
        *place,
        float(usage),
        tuple(finding.claim for finding in report.findings),
    )


@dataclass
class Asked:
    """One comparison. ``way``: with which truth (given, carried, none); ``roles``: the numbers of
    its runs, by a, b and truth; ``calls``: what was measured, by calls of ``measure_all``."""

    way: str
    roles: dict[str, int]
    calls: list[list[PairNumbers | None]]
    answer: Answer
    why_not: str | None = None
    """Why it cannot be replayed."""


@dataclass
class Recording:
    """The comparisons of one pair of runs. ``bits``: that floats were rounded to."""

    runs: list[tuple[str, Manifest, list[Record]]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    tensors: Tensors = field(default_factory=Tensors)
    bits: int = COARSE
    columns: dict[tuple[str, str, int, int], dict[str, np.ndarray]] = field(default_factory=dict)
    """By pass, site, sample and step, what an older recording has not: of how many numbers each
    row's errors are made, and the same in each channel's own unit."""

    def replay(self, asked: Asked) -> Answer:
        """The answer to what was asked, from what is recorded."""
        return answer_of(self.report(asked))

    def report(self, asked: Asked) -> Report:
        """The whole report, from what is recorded."""
        runs = {}
        for role, number in asked.roles.items():
            path, manifest, records = self.runs[number]
            runs[role] = ReplayedRun(Path(path), manifest, records, store=self.tensors)
        calls = iter(asked.calls)

        def recorded(measurer: Any, pairs: Sequence[Any], progress: Any = None) -> Generator[Any]:
            numbers = next(calls)
            if len(numbers) != len(pairs):
                raise LookupError(f"{len(numbers)} pairs were recorded, {len(pairs)} are asked for")
            for pair, measured in zip(pairs, numbers, strict=True):
                yield self._with_columns(pair, measured)

        with (
            without_truth() if asked.way == "none" else contextlib.nullcontext(),
            without_tensors(),
            mock.patch("divergence.run.reader.Run", ReplayedRun),
        ):
            report = compare(
                runs["a"],
                runs["b"],
                truth=runs.get("truth"),
                device=Measuring(measure=recorded),
            )
        if next(calls, None) is not None:
            raise LookupError("more was measured when it was recorded")
        return report

    def _with_columns(self, pair: Any, measured: Any) -> Any:
        record, against = pair.reference.record, getattr(measured, "against", None)
        columns = self.columns.get((pair.pass_, record.site, record.sample, record.step))
        if against is None or columns is None or not against.num_rows:
            return measured
        rows = against.row_index
        if rows.max() >= len(columns["sn.A"]):
            return measured
        at = {name: values[rows] for name, values in columns.items()}
        against = msgspec.structs.replace(against, **_counts(at["sn.A"], at["sn.B"]))
        if against.update is not None and hangs_on_few(against):
            sizes = {name: np.sqrt(at[key]) for name, key in _IN_UNITS.items()}
            counts = _counts(at["cn.A"], at["cn.B"])
            in_units = msgspec.structs.replace(
                against, **sizes, **counts, update=None, channels=np.zeros((6, 0))
            )
            against = msgspec.structs.replace(against, in_units=in_units)
        return msgspec.structs.replace(measured, against=against)


_IN_UNITS = {"norm": "z2", "reference": "c2.A", "candidate": "c2.B", "between": "c2.D"}
"""Sizes of AgainstTruth in each channel's own unit, and the columns of their squares."""


def _counts(*values: np.ndarray) -> dict[str, np.ndarray]:
    return {
        name: np.nan_to_num(count, nan=1.0, posinf=1.0)
        for name, count in zip(SPREADS, values, strict=True)
    }


class Recorder:
    """Takes comparisons of one pair of runs into a recording."""

    def __init__(self) -> None:
        self.recording = Recording()
        self._numbers: dict[str, int] = {}
        self._digests: dict[str, str] = {}

    def compare(
        self,
        way: str,
        a: Run,
        b: Run,
        truth: Any = None,
        observe: Callable[..., None] | None = None,
        **options: Any,
    ) -> Report:
        """As the API's. ``observe`` is shown each measurer and its pairs."""
        runs = {"a": a, "b": b}
        if truth is not None:
            runs["truth"] = Run.open(truth)
        calls: list[list[PairNumbers | None]] = []

        def measure(measurer: Any, pairs: Sequence[Any], progress: Any = None) -> Generator[Any]:
            numbers = []
            for measured in measure_pairs(measurer, pairs, progress):
                numbers.append(measured)
                yield measured
            calls.append(numbers)
            if observe is not None:
                try:
                    observe(measurer, pairs)
                except Exception:  # the comparison goes on without
                    traceback.print_exc()

        with without_truth() if way == "none" else contextlib.nullcontext():
            report = compare(
                a, b, truth=runs.get("truth"), device=Measuring(measure=measure), **options
            )
        roles = {role: self._run(run) for role, run in runs.items()}
        asked = Asked(way, roles, calls, answer_of(report))
        self.recording.asked.append(asked)
        if options:
            asked.why_not = f"asked with {', '.join(sorted(options))}"
            return report
        try:  # whatever it reads is kept now
            answer = self.recording.replay(asked)
        except Exception as error:
            asked.why_not = f"{type(error).__name__}: {error}"[:200]
        else:
            if answer.said != asked.answer.said:
                asked.why_not = f"other answer: {answer.said}"
        return report

    def _run(self, run: Run) -> int:
        """The run's number in the recording. Digests are numbered: what is equal stays so. Those of
        weights stay, by which the manifest and calls name them."""
        if run.manifest.id in self._numbers:
            return self._numbers[run.manifest.id]
        records = []
        weights = set(_DIGEST.findall(msgspec.json.encode(run.manifest).decode()))
        for record in run.records:
            for operand in () if record.call is None else record.call.operands:
                weights.add(operand.xxh3 or "")
        for digest in weights:
            self._digests.setdefault(digest, digest)
        for record in run.records:
            values: dict[str, Any] = {"place": _PLACE if record.place is not None else None}
            for name in ("xxh3", "fold"):
                digest = getattr(record, name)
                if digest is not None:
                    values[name] = self._digests.setdefault(digest, f"{len(self._digests):032x}")
            made = msgspec.structs.replace(record, **values)
            if record.place is not None:
                key = f"{made.xxh3} {made.dtype} {made.shape}"
                self.recording.tensors.sources.setdefault(key, (run, record))
            records.append(made)
        number = len(self.recording.runs)
        self.recording.runs.append((f"run-{number}", run.manifest, records))
        self._numbers[run.manifest.id] = number
        return self._numbers[run.manifest.id]


# ── on disk ─────────────────────────────────────────────────────────────────────────────────────


def save(path: Path, recording: Recording, preset: int = 1) -> Recording:
    """Writes the recording, with as few bits as give the same answers, and gives what was
    written."""
    for bits in (COARSE, EXACT):
        data = _encoded(recording, bits)
        read = _decoded(data)
        equal = all(asked.why_not is not None or _replays(read, asked) for asked in read.asked)
        if equal or bits == EXACT:
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(lzma.compress(data, preset=preset))
    part.replace(path)
    return read


def _replays(recording: Recording, asked: Asked) -> bool:
    try:
        return recording.replay(asked).said == asked.answer.said
    except Exception:
        return False


def load(path: Path, columns: dict[str, np.ndarray] | None = None) -> Recording:
    """``columns``: the tables recorded beside it, for what it may lack."""
    recording = _decoded(lzma.decompress(path.read_bytes()))
    if columns and "tokens.sn.A" in columns:
        from benchmarks._observed import of_logarithm

        numbers = columns["tokens.pair"]
        count = len(columns["text.site"])
        starts = np.searchsorted(numbers, np.arange(count + 1))
        for number in range(count):
            if columns["text.sides"][number] != "a b":
                continue
            place = (
                columns["text.pass"][number],
                columns["text.site"][number],
                int(columns["pairs.sample"][number]),
                int(columns["pairs.step"][number]),
            )
            rows = slice(starts[number], starts[number + 1])
            recording.columns[place] = {
                key: of_logarithm(columns[f"tokens.{key}"][rows])
                for key in ("sn.A", "sn.B", "cn.A", "cn.B", *_IN_UNITS.values())
            }
    return recording


def _encoded(recording: Recording, bits: int) -> bytes:
    records, numbers = Columns(), Columns()
    runs = [
        (path, msgspec.json.encode(manifest), [records.add(record) for record in lines])
        for path, manifest, lines in recording.runs
    ]
    asked = [
        (
            each.way,
            each.roles,
            [[numbers.add(item) for item in call] for call in each.calls],
            each.answer,
            each.why_not,
        )
        for each in recording.asked
    ]
    tensors = {
        key: (
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for key, value in recording.tensors.kept.items()
    }
    return msgspec.msgpack.encode(
        {
            "bits": bits,
            "runs": runs,
            "records": records.encoded(bits),
            "asked": asked,
            "numbers": numbers.encoded(bits),
            "tensors": tensors,
        }
    )


def _decoded(data: bytes) -> Recording:
    stored = msgspec.msgpack.decode(data)
    records, numbers = Objects(stored["records"]), Objects(stored["numbers"])
    recording = Recording(bits=stored["bits"])
    for path, manifest, forms in stored["runs"]:
        lines = [records.next(form) for form in forms]
        recording.runs.append((path, msgspec.json.decode(manifest, type=Manifest), lines))
    for way, roles, calls, answer, why_not in stored["asked"]:
        kept = [[numbers.next(form) for form in call] for call in calls]
        recording.asked.append(Asked(way, roles, kept, msgspec.convert(answer, Answer), why_not))
    for key, (dtype, shape, data) in stored["tensors"].items():
        flat = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
        recording.tensors.kept[key] = flat.view(getattr(torch, dtype)).reshape(shape)
    return recording
