"""inspect: an ``.eval`` file, a zip of ``header.json`` and ``samples/<id>_epoch_<n>.json``.

Epochs are repeats. A score is a number, a letter (C correct, I incorrect, P half, N no answer) or a
table of numbers by name; NaN is inspect's word for not scored. inspect compresses with zstandard,
which Python reads from 3.14 on; before that the package ``zstandard`` does.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from divergence.domains.scores.formats.reading import (
    ReadRequest,
    ResultFormat,
    chat_of,
    text_of,
)
from divergence.domains.scores.rows import Evaluation, SeriesName
from divergence.errors import DumpError, UsageError
from divergence.facts import fact
from divergence.outside import MAX_LINE_BYTES, Budget, disk_bytes, json_value, opened, read_as
from divergence.recording.prompts import Prompt
from divergence.run.foreign import DumpFolder

_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_ZSTANDARD = 93


def recognise(folder: DumpFolder) -> bool:
    return any(name.endswith(".eval") for name in folder.names)


def read(folder: DumpFolder, reading: ReadRequest, evaluation: Evaluation) -> None:
    budget = Budget()
    for name in folder.names:
        if name.endswith(".eval"):
            _log(folder, name, evaluation, reading, budget)


class _Archive:
    """One log's members; ``samples`` with their numbers, from 1."""

    def __init__(self, folder: DumpFolder, name: str, budget: Budget) -> None:
        self.where = folder.where(name)
        hint = "let the evaluation end by itself, or recover it: inspect log recover"
        with read_as("inspect", where=self.where, hint=hint), opened(folder.regular(name)) as file:
            try:
                members = zipfile.ZipFile(file).infolist()
            except zipfile.BadZipFile as error:
                raise DumpError(
                    "the file is no zip, or was cut off", where=self.where, hint=hint
                ) from error
        names = Counter(member.filename for member in members)
        if twice := [name for name, count in names.items() if count > 1]:
            raise DumpError(f"the log holds {twice[0][:80]} twice", where=self.where)
        disk = disk_bytes(self.where)
        if sum(member.compress_size for member in members) > disk:
            raise DumpError("members of the zip overlap", where=self.where)
        budget.expand(sum(member.file_size for member in members), disk=disk, where=self.where)
        self.header = next((item for item in members if item.filename == "header.json"), None)
        samples = (member for member in members if member.filename.startswith("samples/"))
        self.samples = list(enumerate(samples, 1))

    def json(self, entry: zipfile.ZipInfo) -> dict[str, Any]:
        """One member. Raises DumpError."""
        where = f"{self.where}: {entry.filename[:80]}"
        if max(entry.file_size, entry.compress_size) > MAX_LINE_BYTES:
            raise DumpError(f"it is larger than {MAX_LINE_BYTES:,} bytes", where=where)
        with read_as("inspect", where=where):
            data = self._bytes(entry)
        if len(data) != entry.file_size or zlib.crc32(data) != entry.CRC:
            raise DumpError("its size or checksum is wrong", where=where)
        content = json_value(data, where=where)
        if not isinstance(content, dict):
            raise DumpError("it is no object", where=where)
        return content

    def _bytes(self, entry: zipfile.ZipInfo) -> bytes:
        """No more than a byte over what the archive's table tells, whatever the member holds."""
        with opened(self.where) as file:
            file.seek(entry.header_offset)
            head = file.read(30)
            if head[:4] != b"PK\3\4" or entry.flag_bits & 1:
                raise ValueError("a member is encrypted, or is not where the zip's table says")
            file.seek(sum(struct.unpack("<HH", head[26:])), os.SEEK_CUR)
            packed = file.read(entry.compress_size)
        if entry.compress_type == zipfile.ZIP_STORED:
            return packed
        if entry.compress_type == zipfile.ZIP_DEFLATED:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, entry.file_size + 1)
        if entry.compress_type != _ZSTANDARD:
            raise ValueError(f"inspect never packs by method {entry.compress_type}")
        return self._zstandard(packed, entry.file_size + 1)

    def _zstandard(self, packed: bytes, most: int) -> bytes:
        file = io.BytesIO(packed)
        stream: Any
        try:
            if sys.version_info >= (3, 14):
                from compression.zstd import ZstdError, ZstdFile

                stream = ZstdFile(file)
            else:
                from zstandard import ZstdDecompressor, ZstdError

                stream = ZstdDecompressor().stream_reader(file, read_across_frames=True)
        except ImportError as error:
            raise UsageError(
                "inspect's log is compressed with zstandard, which this Python cannot read",
                where=self.where,
                hint="pip install zstandard, or inspect log convert --to json",
            ) from error
        try:
            return bytes(stream.read(most))
        except ZstdError as error:
            raise ValueError(str(error)) from error


def _log(
    folder: DumpFolder, name: str, evaluation: Evaluation, reading: ReadRequest, budget: Budget
) -> None:
    archive = _Archive(folder, name, budget)
    if archive.header is None:
        raise DumpError(
            "the log has no header: the evaluation did not end",
            where=archive.where,
            hint="let it end by itself, or recover it: inspect log recover",
        )
    header = archive.json(archive.header)
    spec = header.get("eval") or {}
    evaluation.model = evaluation.model or spec.get("model")
    version = (spec.get("packages") or {}).get("inspect_ai")
    evaluation.tool = evaluation.tool or (f"inspect {version}" if version else None)
    if header.get("status") != "success":
        status = repr(header.get("status"))
        evaluation.incomplete = fact("evaluations.other_status", status=status)
    task = text_of(spec.get("task_registry_name") or spec.get("task") or name)
    settings = _settings(header, spec)
    for number, entry in archive.samples:
        sample = archive.json(entry)
        prompt = _asked(sample)
        for metric, value, answer in _scores(sample):
            named = SeriesName(task, "", metric)
            series = reading.series(named, archive.where, settings, higher=True)
            if series is not None:
                row = reading.row(
                    sample.get("id"),
                    value,
                    number,
                    repeat=int(sample.get("epoch") or 1) - 1,
                    prompt=prompt,
                    target=sample.get("target"),
                    answer=answer,
                    fields=sample.get("metadata"),
                )
                series.rows.append(row)
        if sample.get("error") is not None:
            reading.left_out["evaluations.samples_with_error"] += 1


def _settings(header: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, str]:
    plan = header.get("plan") or {}
    generation = {**(spec.get("model_generate_config") or {}), **(plan.get("config") or {})}
    generation = {k: v for k, v in generation.items() if not k.startswith("max_conn")}
    return {
        "task version": text_of(spec.get("task_version")),
        "generation settings": json.dumps(generation, sort_keys=True, default=str),
        "task settings": json.dumps(
            {
                "solvers": [step.get("solver") for step in plan.get("steps") or []],
                "arguments": spec.get("task_args") or {},
            },
            sort_keys=True,
            default=str,
        ),
    }


def _scores(sample: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(metric, value, answer) of each scorer."""
    for name, given in (sample.get("scores") or {}).items():
        scored = given if isinstance(given, dict) else {"value": given}
        value = scored.get("value")
        for part, score in value.items() if isinstance(value, dict) else [("", value)]:
            letter = _LETTERS.get(score) if isinstance(score, str) else None
            metric = f"{name}/{part}" if part else text_of(name)
            yield metric, score if letter is None else letter, scored.get("answer")


def _asked(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    given = sample.get("input")
    if isinstance(given, list):
        return [
            (text_of(message.get("role")), text_of(message.get("content")))
            for message in given
            if isinstance(message, dict)
        ]
    return [("user", text_of(given))]


def prompts(folder: DumpFolder, name: str, places: Collection[int]) -> Iterator[tuple[int, Prompt]]:
    archive = _Archive(folder, name, Budget())
    for number, entry in archive.samples:
        if number in places:
            yield number, chat_of(_asked(archive.json(entry)))


INSPECT = ResultFormat(words="inspect", recognise=recognise, read=read, prompts=prompts)
