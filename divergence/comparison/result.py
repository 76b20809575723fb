"""The Report: everything `compare` found, as typed data.

Rendering (terminal, JSON, CSV) lives in divergence.report and needs nothing but
this. The JSON form is stable and versioned; numbers that JSON cannot hold
(nan, inf) are written as the strings "nan", "inf", "-inf".
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from divergence.comparison.results import (
    AuditResult,
    Coverage,
    Finding,
    OperatorsResult,
    PreflightLine,
    ReportPart,
    SiteResult,
    TokensResult,
    Unexercised,
    Verdict,
    Visible,
)
from divergence.domain import added, placed
from divergence.errors import UsageError
from divergence.facts import Fact, JsonValue, Worded
from divergence.words import Side, printable_json

if TYPE_CHECKING:
    import pandas
    import polars

    from divergence.html.picture import Picture
    from divergence.run.reader import Run

REPORT_SCHEMA_VERSION = 1

Cell = str | int | float | bool | tuple[int, ...] | None
"""One value of a row of Report.to_records."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the report says about each run, so that the run need not be opened again."""

    path: str
    id: str
    label: str
    """What to call the machine."""
    model: str
    dtype: str
    device: str
    complete: bool
    """The run reached its end."""
    stopped_by: str | None = None
    """What ended an incomplete run."""
    num_records: int = 0
    plants: list[str] = []
    """Faults that were planted."""
    substitutes: list[str] = []
    """Operators whose results were replaced by another run's."""
    compute_dtype: str | None = None
    """Of a truth: the dtype that its operators were computed in."""
    generates: bool = False
    """The model chooses tokens."""
    anchored_to: str | None = None
    """The id of the run whose inputs its blocks got in the anchored pass."""


class JsonAnswer:
    """Says what a command found: a Struct that is written as JSON."""

    __slots__ = ()

    def to_json(self, *, indent: int | None = None) -> str:
        """The whole answer as strict JSON; nan and inf become strings."""
        return strict_json(self, indent=indent)


class Answer(JsonAnswer):
    """One that is written as a page too."""

    __slots__ = ()
    COMMAND: ClassVar[str] = "compare"
    DOCUMENTS: ClassVar[str | None] = None
    """Where the function is that gives the document of its page, or several, ``module:function``;
    None where the page is one of its own."""

    def html(self) -> str:
        """A page for a browser: one file that loads nothing. What an answer does not hold (texts,
        machines) is read from the runs, where they are still there."""
        report = self if isinstance(self, Report) else getattr(self, "report", None)
        background = report and _by_name("comparison", "background").background_of(report)
        page: str = _by_name("report", "page").page_of(self, background)
        return page

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write ``html()`` to a file, as a whole or not at all; its path."""
        written: Path = _by_name("output").write_output(self.html(), path, what="page")
        return written

    def _repr_html_(self) -> str:
        text: str = _by_name("report", "page").notebook_of(self)
        return text


BESIDE = "(parts)"
"""The name of a field whose entries are written as fields of the Struct that has it."""


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Struct with those that lie in ``BESIDE`` among them."""
    beside = fields.get(BESIDE)
    if not isinstance(beside, dict):
        return fields
    return {name: value for name, value in fields.items() if name != BESIDE} | beside


def no_parts() -> dict[str, ReportPart | None]:
    """Nothing of any domain."""
    return dict.fromkeys(added("parts"))


class Report(msgspec.Struct, Answer, Worded, frozen=True, kw_only=True):
    """The answer of `compare`."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    schema_version: int = REPORT_SCHEMA_VERSION
    tool_version: str
    reference: RunSummary
    candidate: RunSummary
    verdict: Verdict
    preflight: list[PreflightLine]
    tokens: TokensResult | None
    coverage: Coverage
    sites: list[SiteResult]
    remarks: list[Fact] = []
    """What else to know of the two runs."""
    notes: list[str] = []
    not_exercised: list[Unexercised] = []
    """What no prompt reached on the reference."""
    visible: Visible | None = None
    """How small an error would have been seen; None where no block was judged."""
    operators: OperatorsResult | None = None
    """None unless both sides recorded operators."""
    audit: AuditResult | None = None
    """None where neither side recorded operators."""
    replicas: list[ReplicaCheck] = []
    """For each side that several ranks made: its ranks compared with one another."""
    findings: list[Finding] = []
    """What each analysis claimed. The verdict was made of these."""
    parts: dict[str, ReportPart | None] = msgspec.field(name=BESIDE, default_factory=no_parts)
    """What domains have to say, None where they say nothing: ``report.NAME``, and in the JSON a key
    of that name beside the others."""

    def __getattr__(self, name: str) -> Any:
        """The part of that name. Only what is no field is asked for here."""
        try:
            return self.parts[name]
        except KeyError:
            raise AttributeError(f"a report has no {name!r}") from None

    def __repr__(self) -> str:
        """``<Report a b: localized>``: all fields are megabytes."""
        return f"<Report {self.reference.path} {self.candidate.path}: {self.verdict.kind}>"

    def to_records(self) -> list[dict[str, Cell]]:
        """One flat dict per compared site, ready for pandas.DataFrame or csv.DictWriter."""
        rows: list[dict[str, Cell]] = []
        for site in self.sites:
            row: dict[str, Any] = msgspec.to_builtins(site)
            row.pop("prompts")
            for name in ("logits", "nonfinite", "truth", "estimated"):
                nested = row.pop(name) or {}
                row.update({f"{name}_{key}": value for key, value in nested.items()})
            rows.append(row)
        return rows

    def to_pandas(self) -> pandas.DataFrame:
        """Makes ``to_records`` a pandas DataFrame; the columns are the fields of SiteResult. Raises
        UsageError where pandas is not installed."""
        frame: pandas.DataFrame = _library("pandas").DataFrame(self.to_records())
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Makes ``to_records`` a polars DataFrame."""
        frame: polars.DataFrame = _library("polars").DataFrame(
            self.to_records(), infer_schema_length=None, strict=False
        )
        return frame

    @classmethod
    def of(cls, fields: dict[str, JsonValue]) -> Report:
        """The report of which these are the fields, as JSON has them. Raises what msgspec does."""
        fields, parts = flat(fields), no_parts()
        for name, place in added("parts").items():
            if fields.get(name) is not None:
                parts[name] = msgspec.convert(fields[name], placed(place), strict=False)
        report = msgspec.convert(fields, cls, strict=False)  # "nan" is a number
        return msgspec.structs.replace(report, parts=parts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """The report in a file that ``compare --json``, ``check --json`` or ``localize --json``
        wrote. Raises UsageError where there is none."""
        from divergence.outside import json_value, read_bytes

        hint = "divergence compare A B --json > report.json"

        def refused(why: str, hint: str = hint) -> UsageError:
            return UsageError(f"no report can be read: {why}", where=os.fspath(path), hint=hint)

        try:
            data = read_bytes(path, error=UsageError, hint=hint)
            stored = json_value(data, where=os.fspath(path), error=UsageError, hint=hint)
            stored = stored.get("report", stored)
            version = stored["schema_version"]
            if version != REPORT_SCHEMA_VERSION:
                raise refused(
                    f"its schema_version is {version}",
                    hint="a newer divergence wrote it, which reads it too",
                )
            return cls.of(stored)
        except (AttributeError, KeyError, TypeError):
            raise refused("it holds something else") from None
        except (ValueError, RecursionError) as error:  # what msgspec raises is a ValueError
            raise refused(str(error)) from None

    def plot(self) -> Picture:
        """The error of each block beside what rounding explains, as a picture that a notebook
        shows; ``plot().save("error.svg")`` or ``"error.png"`` (extra ``plot``) writes it. Raises
        UsageError where no block was compared."""
        made: Picture = _by_name("report", "page").picture_of(self)
        return made


def _by_name(*names: str) -> ModuleType:
    """A module that is needed for a page alone, and that knows reports."""
    return import_module(".".join(("divergence", *names)))


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name} is not installed", hint=f"pip install {name}, or take to_records()"
        ) from error


def strict_json(value: Any, *, indent: int | None = 2) -> str:
    """Structs, dicts and lists as JSON text that any parser reads and any terminal may show.
    Indented, each of a report's sites is one line: they are nearly all of it."""
    return "".join(json_parts(value, indent=indent))


def json_parts(value: Any, *, indent: int | None = 2) -> Iterator[str]:
    """Yields ``strict_json`` in pieces, in order: 26 MB are not held at once."""
    waiting = bytearray()
    for part in _written(value, b" " * (indent or 0), b"\n" if indent else b""):
        waiting += part
        if len(waiting) > _PIECE_BYTES:
            yield printable_json(waiting.decode())
            waiting.clear()
    yield printable_json(waiting.decode())


def _written(value: Any, step: bytes, line: bytes) -> Iterator[bytes]:
    """The JSON of a value, ``line`` before each of its closing brackets, ``step`` deeper before
    what is in them."""
    if isinstance(value, msgspec.Struct) and not type(value).__struct_config__.omit_defaults:
        values = (getattr(value, name) for name in value.__struct_fields__)
        value = dict(zip(value.__struct_encode_fields__, values, strict=True))
    elif isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    is_object = isinstance(value, dict)
    if not value or not (is_object or isinstance(value, list | tuple | set | frozenset)):
        yield _encoded(value)
        return
    inner, colon = line + step if line else b"", b": " if line else b":"
    before = b"{" if is_object else b"["
    if isinstance(value, list) and isinstance(value[0], SiteResult):
        for start in range(0, len(value), _AT_ONCE):
            part = value[start : start + _AT_ONCE]
            yield before + inner
            if _is_plain(part):  # all at once
                yield _ENCODER.encode_lines(part)[:-1].replace(b"\n", b"," + inner)
            else:
                yield (b"," + inner).join(map(_encoded, part))
            before = b","
        yield line + b"]"
        return
    for key, item in flat(value).items() if is_object else enumerate(value):
        yield before + inner + (_encoded(key) + colon if is_object else b"")
        yield from _written(item, step, inner)
        before = b","
    yield line + (b"}" if is_object else b"]")


_NONFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""How msgpack begins a nan or an infinity, which JSON writes as null."""


def _number(value: Any) -> Any:
    """A numpy scalar as Python's own number. Raises AttributeError for what is none."""
    return value.item()


_ENCODER = msgspec.json.Encoder(enc_hook=_number)
_PIECE_BYTES = 1 << 16
_AT_ONCE = 64
"""Sites that are written in one go."""


def _encoded(value: Any) -> bytes:
    """A number, a text, or a site's result; a key."""
    return _ENCODER.encode(value if _is_plain(value) else _json_safe(value))


def _is_plain(value: Any) -> bool:
    """Is JSON's own way of writing it right?"""
    try:
        return _NONFINITE.search(msgspec.msgpack.encode(value, enc_hook=_number)) is None
    except UnicodeEncodeError:  # undecodable bytes of a path
        return False


def _json_safe(value: Any) -> Any:
    """Replace non-finite floats, which JSON cannot hold, by their names, and what UTF-8 cannot hold
    by escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if isinstance(value, msgspec.Struct):
        values = zip(value.__struct_fields__, msgspec.structs.astuple(value), strict=True)
        return msgspec.structs.replace(value, **{name: _json_safe(item) for name, item in values})
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value


ToldBy = Literal["majority", "other run", "nobody"]
"""What tells which of the ranks are wrong."""


class ReplicaDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that should hold the same tensor and do not."""

    side: Side
    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    ranks: tuple[int, ...]
    """The ranks that differ from ``peers``."""
    peers: tuple[int, ...]
    """The ranks they are held against: most of them. Where two versions are equally frequent and
    ``told_by`` is ``other run``: those with the version nearer to the other run."""
    told_by: ToldBy = "majority"
    """What tells which ranks are wrong; ``nobody`` where it cannot be told."""
    rel_l2: float | None = None
    """‖odd - peers'‖ / ‖peers'‖ of the version farthest off. None where it was not measured."""


class ReplicaCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one run, compared with one another."""

    side: Side
    mesh: str
    """The ranks in words, for example ``4 ranks (dp 2 × tp 2)``."""
    num_tensors: int
    """Tensors of which several ranks hold an equal copy."""
    num_different: int
    """How many of them differ between ranks."""
    first: list[ReplicaDiff] = []
    """The first difference of each pass that has any, in execution order, measured."""


def summary_of(run: Run) -> RunSummary:
    manifest = run.manifest
    return RunSummary(
        path=str(run.path),
        id=manifest.id,
        label=manifest.environment.label,
        model=manifest.model.source,
        dtype=manifest.model_dtype,
        device=f"{manifest.environment.device_type}: {manifest.environment.device_name}",
        complete=manifest.complete,
        stopped_by=manifest.stopped_by,
        num_records=len(run.records),
        compute_dtype=manifest.settings.compute_dtype,
        generates=manifest.model.task in ("causal-lm", "encoder-decoder")
        and manifest.plan.replayed_pass is None,
        plants=manifest.plan.plants,
        substitutes=manifest.plan.substitutes,
        anchored_to=manifest.plan.anchored_to,
    )
