"""All formats need these: which series are wanted, numbers, hashes, counts of what is left out."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from divergence.domains.scores.rows import Evaluation, ScoreRow, Series, SeriesName
from divergence.errors import DumpError
from divergence.facts import Fact, fact
from divergence.outside import inside
from divergence.recording.prompts import Message, Prompt
from divergence.run.foreign import DumpFolder

_LOWER = frozenset(
    "bpb brier cer distance divergence ece error errors failures hallucinations kl latency loss "
    "mae ms mse nll perplexity ppl rmse seconds ter toxicity violations wer wrong".split()
)
_LOWER_NAMES = frozenset(("bits_per_byte",))
_HIGHER = frozenset(
    "acc accuracy avoidance correction detection f1 free precision recall reduction".split()
)
"""Words of metrics that are known to be better where they are lower, and of those that are not."""
_WORD = re.compile(r"[a-z0-9]+")

_MAX_SERIES, _MAX_NAME = 20_000, 1000
"""Each takes a row of its own of every document."""
_MOST = 1e100
"""No score is as large, and squares of it would be out of range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFormat:
    """A format. Files are read through ``folder``, which refuses links, code and cut files."""

    words: str
    """What to call it."""
    recognise: Callable[[DumpFolder], bool]
    """Does the folder look like it?"""
    read: Callable[[DumpFolder, ReadRequest, Evaluation], None]
    """Puts everything in it into the request's rows, and what it tells of itself into the
    evaluation. Raises DumpError."""
    prompts: Callable[[DumpFolder, str, Collection[int]], Iterable[tuple[int, Prompt]]] = (
        lambda *_: ()
    )
    """What the model was given for the rows of a file at these places, as far as it says."""
    documents: str = ""
    """Of scores without documents: what would hold them."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Says what is asked for. Empty: everything."""

    tasks: Sequence[str] = ()
    metrics: Sequence[str] = ()
    filters: Sequence[str] = ()
    cluster: str | None = None
    """The field of a document that names its cluster."""
    left_out: Counter[str] = field(default_factory=Counter)
    """What was not taken, counted by its code."""
    refused: dict[SeriesName, None] = field(default_factory=dict)
    """What is there and was not asked for."""
    _series: dict[tuple[str, SeriesName], Series | None] = field(default_factory=dict)
    """By file and name; None for one that is not asked for."""

    def series(
        self,
        name: SeriesName,
        file: str,
        settings: Mapping[str, str],
        *,
        higher: bool | None = None,
        where: str | None = None,
    ) -> Series | None:
        """The series of a score in a file, new with the first row; None if it is not asked for.
        ``higher``: is higher better, where the format tells. Raises DumpError for more scores than
        any evaluation has, or names that are none."""
        key = file, name
        if key not in self._series:
            higher = is_higher_better(name.metric) if higher is None else higher
            wanted = self._wants(name, where or file)
            self._series[key] = Series(name, file, dict(settings), higher) if wanted else None
        return self._series[key]

    def row(
        self,
        document: Any,
        value: Any,
        place: int,
        *,
        repeat: int = 0,
        prompt: Any = None,
        target: Any = None,
        answer: Any = None,
        fields: Any = None,
    ) -> ScoreRow:
        """One answer of what a file says of it, None where it does not. ``value``: what stands in
        the place of the score; ``fields``: the document's, of which one names its cluster."""
        score, why = number_of(value)
        return ScoreRow(
            document=text_of(document),
            score=score,
            why=why,
            repeat=repeat,
            place=place,
            prompt=None if prompt is None else hashed(prompt),
            target=None if target is None else hashed(target),
            answer=None if answer is None else text_of(answer)[:200],
            cluster=self.cluster_of(fields),
        )

    def clear(self) -> None:
        """Forgets what was read, before the next side."""
        self._series.clear()
        self.left_out.clear()
        self.refused.clear()

    def series_of(self, file: str | None = None) -> list[Series]:
        """Those that were begun, of one file or of all."""
        series = [entry for (its, _), entry in self._series.items() if file in (None, its)]
        return [entry for entry in series if entry is not None]

    def _wants(self, name: SeriesName, where: str) -> bool:
        if sum(map(len, name)) > _MAX_NAME:
            raise DumpError(
                f"a task's or metric's name is longer than {_MAX_NAME:,} letters", where=where
            )
        if len(self._series) >= _MAX_SERIES:
            raise DumpError(f"more than {_MAX_SERIES:,} tasks and metrics", where=where)
        wanted = all(
            not patterns or any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns)
            for part, patterns in (
                (name.task, self.tasks),
                (name.metric, self.metrics),
                (name.filter, self.filters),
            )
        )
        if not wanted:
            self.refused[name] = None
        return wanted

    def cluster_of(self, fields: Any) -> str | None:
        """Return the cluster of a document's fields. Without the field it is one of its own."""
        if self.cluster is None or not isinstance(fields, Mapping):
            return None
        cluster = fields.get(self.cluster)
        return None if cluster is None else text_of(cluster)


def files_in(folder: DumpFolder, part: str, suffix: str) -> list[str]:
    """The files below a folder called ``part``; a single file is one wherever it lies."""
    names = [name for name in folder.names if name.endswith(suffix)]
    return [name for name in names if part in PurePosixPath(name).parts] or (
        names if len(folder.names) == 1 else []
    )


def root_of(folder: DumpFolder, name: str, part: str) -> Path | None:
    """The folder that a tool wrote into, of a file that lies in it as ``part/MODEL/FILE``, through
    no link. A folder that the user named is not left; None where there is none."""
    path = Path(os.path.abspath(folder.where(name)))
    if len(path.parts) < 4 or path.parts[-3] != part:
        return None
    root = path.parents[2]
    if folder.path.is_dir() and not root.is_relative_to(os.path.abspath(folder.path)):
        return None
    return root if part_of(root, "/".join(path.parts[-3:])) else None


def part_of(root: Path | None, name: str) -> Path | None:
    """A regular file below ``root``, through no link; None where there is none."""
    try:
        return None if root is None else inside(root, name)
    except DumpError:
        return None


def only_model(folder: DumpFolder, names: Sequence[str], *, hint: str) -> str | None:
    """The model whose results these are, by the folder they lie in. DumpError for several."""
    models = {PurePosixPath(name).parent.name for name in names}
    if len(models) > 1:
        raise DumpError(
            f"the folder holds {len(models)} models: {', '.join(sorted(models)[:12])}",
            where=str(folder.path),
            hint=hint,
        )
    return next(iter(models), None) or None


def is_higher_better(metric: str) -> bool:
    """Tell by the words of its name, for formats that do not tell: ``val_loss``, ``WER (%)``."""
    words = _WORD.findall(metric.lower())
    lower = "_".join(words) in _LOWER_NAMES or not _LOWER.isdisjoint(words)
    return not lower or not _HIGHER.isdisjoint(words)


def number_of(value: Any) -> tuple[float | None, Fact | None]:
    """(score, why there is none) of what stands in the place of a score."""
    if isinstance(value, bool | int | float):
        try:
            score = float(value)
        except OverflowError:  # an integer of hundreds of digits
            return None, fact("evaluations.no_number")
        if abs(score) < _MOST:
            return score, None
        return None, fact("evaluations.score_is", score=score)
    return None, fact("evaluations.without_score" if value is None else "evaluations.no_number")


def chat_of(turns: Iterable[tuple[str, str]]) -> Prompt:
    """A prompt of roles and what they say."""
    return Prompt(messages=tuple(Message(*turn) for turn in turns))


def table_of(value: Any) -> dict[str, Any]:
    """An object's fields; what is none has none."""
    return value if isinstance(value, dict) else {}


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def hashed(value: Any) -> str:
    """Hash a prompt or a target, whatever it is made of."""
    return xxhash.xxh3_64_hexdigest(str(value).encode("utf-8", "surrogatepass"))
