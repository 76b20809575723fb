"""inspect: an ``.eval`` file, a zip of ``header.json`` and ``samples/<id>_epoch_<n>.json``.

Epochs are repeats. A score is a number, a letter (C correct, I incorrect, P half, N no answer) or a
table of numbers by name; NaN is inspect's word for not scored. inspect compresses with zstandard,
which Python reads from 3.14 on; before that the package ``zstandard`` does.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from divergence.errors import DumpError, UsageError, first_line
from divergence.evaluations.formats.reading import (
    ReadRequest,
    answer_of,
    finish,
    hashed,
    number_of,
    text_of,
)
from divergence.evaluations.rows import Evaluation, ScoreRow, Series, SeriesName
from divergence.importing.folder import DumpFolder
from divergence.recording.prompts import Message, Prompt

__all__ = ["NAME", "prompts", "read", "recognise"]

NAME = "inspect"
_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_ZSTANDARD = 93
_MAX_BYTES = 1 << 30
"""Of one member, unpacked."""


def recognise(folder: DumpFolder) -> bool:
    return any(name.endswith(".eval") for name in folder.names)


def read(folder: DumpFolder, reading: ReadRequest) -> Evaluation:
    evaluation = Evaluation(path=str(folder.path), format="inspect")
    for name in folder.names:
        if name.endswith(".eval"):
            _log(folder, name, evaluation, reading)
    return finish(evaluation, reading)


class _Archive:
    """One log's members."""

    def __init__(self, folder: DumpFolder, name: str) -> None:
        self.where = folder.where(name)
        try:
            self._zip = zipfile.ZipFile(folder.regular(name))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
            raise DumpError(
                "the file is no zip, or was cut off", where=self.where,
                hint="let the evaluation end by itself, or recover it: inspect log recover",
            ) from error  # fmt: skip
        members = self._zip.infolist()
        self.samples = [member for member in members if member.filename.startswith("samples/")]
        self.names = {member.filename for member in members}

    def json(self, member: zipfile.ZipInfo | str) -> dict[str, Any]:
        """One member. Raises DumpError."""
        entry = self._zip.getinfo(member) if isinstance(member, str) else member
        where = f"{self.where}: {entry.filename}"
        if entry.file_size > _MAX_BYTES:
            raise DumpError(f"larger than {_MAX_BYTES:,} bytes", where=where)
        try:
            data = self._bytes(entry)
            content = json.loads(data)
        except (ValueError, RecursionError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DumpError(f"it cannot be read: {first_line(error)}", where=where) from error
        if not isinstance(content, dict):
            raise DumpError("it is no object", where=where)
        return content

    def _bytes(self, entry: zipfile.ZipInfo) -> bytes:
        """By zipfile, where that knows the compression; else by ``zstandard``."""
        if entry.compress_type != _ZSTANDARD or hasattr(zipfile, "ZIP_ZSTANDARD"):
            return self._zip.read(entry)
        try:
            import zstandard
        except ImportError as error:
            raise UsageError(
                "inspect's log is compressed with zstandard, which this Python cannot read",
                where=self.where, hint="pip install zstandard, or inspect log convert --to json",
            ) from error  # fmt: skip
        with open(self.where, "rb") as file:
            file.seek(entry.header_offset)
            head = file.read(30)
            skipped = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            file.seek(skipped, 1)
            packed = file.read(entry.compress_size)
        data: bytes = zstandard.ZstdDecompressor().stream_reader(
            packed, read_across_frames=True
        ).read(_MAX_BYTES)  # fmt: skip
        if len(data) != entry.file_size or zlib.crc32(data) != entry.CRC:
            raise zipfile.BadZipFile("its checksum is wrong")
        return data


def _log(folder: DumpFolder, name: str, evaluation: Evaluation, reading: ReadRequest) -> None:
    archive = _Archive(folder, name)
    if "header.json" not in archive.names:
        raise DumpError(
            "the log has no header: the evaluation did not end", where=archive.where,
            hint="let it end by itself, or recover it: inspect log recover",
        )  # fmt: skip
    header = archive.json("header.json")
    spec = header.get("eval") or {}
    evaluation.model = evaluation.model or spec.get("model")
    version = (spec.get("packages") or {}).get("inspect_ai")
    evaluation.tool = evaluation.tool or (f"inspect {version}" if version else None)
    if header.get("status") != "success":
        evaluation.incomplete = f"inspect's status is {header.get('status')!r}"
    task = text_of(spec.get("task_registry_name") or spec.get("task") or name)
    settings = _settings(header, spec)
    series: dict[SeriesName, Series] = {}
    for number, entry in enumerate(archive.samples, 1):
        sample = archive.json(entry)
        for metric, score, why, answer in _scores(sample):
            named = SeriesName(task, "", metric)
            if not reading.wants(named):
                continue
            held = series.setdefault(named, Series(named, archive.where, dict(settings)))
            held.rows.append(ScoreRow(
                document=text_of(sample.get("id")), score=score, why=why,
                repeat=int(sample.get("epoch") or 1) - 1, prompt=hashed(_asked(sample)),
                target=hashed(sample.get("target")), answer=answer,
                cluster=reading.cluster_of(sample.get("metadata")), place=number,
            ))  # fmt: skip
        if sample.get("error") is not None:
            reading.left_out["samples ended in an error, and have no score"] += 1
    evaluation.series += series.values()


def _settings(header: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, str]:
    plan = header.get("plan") or {}
    generation = {**(spec.get("model_generate_config") or {}), **(plan.get("config") or {})}
    generation = {k: v for k, v in generation.items() if not k.startswith("max_conn")}
    return {
        "task version": text_of(spec.get("task_version")),
        "generation settings": json.dumps(generation, sort_keys=True, default=str),
        "task settings": json.dumps(
            {"solvers": [step.get("solver") for step in plan.get("steps") or []],
             "arguments": spec.get("task_args") or {}}, sort_keys=True, default=str,
        ),
    }  # fmt: skip


def _scores(
    sample: Mapping[str, Any],
) -> Iterator[tuple[str, float | None, str | None, str | None]]:
    """(metric, score, why there is none, answer) of each scorer."""
    for name, given in (sample.get("scores") or {}).items():
        value = given.get("value") if isinstance(given, dict) else given
        answer = given.get("answer") if isinstance(given, dict) else None
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, score in parts:
            if isinstance(score, str):
                score = _LETTERS.get(score, score)
            metric = f"{name}/{part}" if part else text_of(name)
            yield metric, *number_of(score), answer_of(answer)


def _asked(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    given = sample.get("input")
    if isinstance(given, list):
        return [
            (text_of(message.get("role")), text_of(message.get("content")))
            for message in given if isinstance(message, dict)
        ]  # fmt: skip
    return [("user", text_of(given))]


def prompts(series: Series, places: Collection[int]) -> dict[int, Prompt]:
    """The input, as chat."""
    folder = DumpFolder(series.file)
    archive = _Archive(folder, folder.names[0])
    by_place: dict[int, Prompt] = {}
    for number, entry in enumerate(archive.samples, 1):
        if number in places:
            asked = _asked(archive.json(entry))
            by_place[number] = Prompt(messages=tuple(Message(*turn) for turn in asked))
    return by_place
