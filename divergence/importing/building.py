"""From tensors of another tool to a run: names, prompts, steps, and what is not known."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from msgspec.structs import replace

from divergence.comparison.align.pairs import find_prefix
from divergence.config import decode, load_toml
from divergence.errors import ConfigError, DumpError, UsageError
from divergence.importing.files import DumpFolder
from divergence.numerics.formats import format_of
from divergence.run.captured import CapturedTensor
from divergence.run.contents import site_names
from divergence.run.location import Location
from divergence.run.manifest import (
    UNKNOWN,
    Manifest,
    ModuleNote,
    ModuleRole,
    Plan,
    SampleTokens,
    Tokens,
)
from divergence.run.reader import Run
from divergence.run.record import Record, expanded
from divergence.run.scores import (
    MAX_TOKEN,
    Scores,
    ScoreSource,
    foreign_manifest,
    put_scores,
    scores_manifest,
)
from divergence.run.site import (
    escape_path,
    join_site,
    module_of,
    natural_key,
    near_names,
    split_site,
)
from divergence.run.writer import RunWriter

# The map of a dump: which of its names is which site (docs/importing.md has one to copy).
#
# ``{layer}``, ``{step}``, ``{sample}`` and ``{rank}`` in a pattern are numbers, any other group is
# text without a slash, ``*`` is anything. ``step``, ``sample`` and ``rank`` place the tensor
# (default 0), and may also be written as keys. The first rule that matches counts.

_NUMBERS = ("layer", "step", "sample", "rank")
_PART = re.compile(r"\{(\w+)\}|(\*)")


class _Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    pattern: str
    site: str
    file: str = "*"
    step: int | None = None
    sample: int | None = None
    rank: int | None = None

    @cached_property
    def compiled(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        return _compiled(self.file), _compiled(self.pattern)


class _MapFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: list[_Rule] = []
    key: list[_Rule] = []


@dataclass(frozen=True, slots=True)
class Found:
    """Where a tensor belongs. None: neither the rule nor the name says."""

    site: str
    step: int | None
    sample: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class Rules:
    """A map that was read."""

    path: str
    files: list[_Rule]
    keys: list[_Rule]

    def near(self, names: Iterable[str]) -> list[str]:
        """The names most like its patterns, then the first few."""
        names = list(names)
        wanted = [_PART.sub("0", rule.pattern) for rule in (*self.files, *self.keys)]
        near = [name for pattern in wanted for name in near_names(pattern, names)]
        return list(dict.fromkeys([*near, *names]))[:4]

    def of_file(self, name: str) -> Found | None:
        """Where the tensor of a file belongs."""
        return self._first(self.files, "", name)

    def of_key(self, file: str, key: str, tags: dict[str, str] | None = None) -> Found | None:
        """Where a tensor inside a file belongs. ``tags``: groups that the dump itself gives."""
        return self._first(self.keys, file, key, tags)

    def _first(
        self, rules: list[_Rule], file: str, name: str, tags: dict[str, str] | None = None
    ) -> Found | None:
        for rule in rules:
            outer, inner = rule.compiled
            around, match = outer.fullmatch(file), inner.fullmatch(name)
            if around is not None and match is not None:
                groups = {**(tags or {}), **around.groupdict(), **match.groupdict()}
                break
        else:
            return None
        try:
            site = rule.site.format_map(groups)
            split_site(site)
        except (KeyError, ValueError, IndexError, AttributeError, UsageError) as error:
            raise ConfigError(
                f"{rule.site!r} makes no site of {name!r}", where=self.path,
                hint="a site is MODULE_PATH:PORT, as model.layers.{layer}:out; its groups are "
                f"those of the pattern: {', '.join(groups) or 'none'}",
            ) from error  # fmt: skip
        step, sample, rank = (
            int(text) if given is None and (text := groups.get(key) or "").isdecimal() else given
            for key, given in (("step", rule.step), ("sample", rule.sample), ("rank", rule.rank))
        )
        return Found(site, step, sample, rank)


def load_rules(path: str | os.PathLike[str]) -> Rules:
    """Reads a map. Raises ConfigError."""
    given = expanded(path)
    content = decode(load_toml(given), _MapFile, where=str(given))
    if not content.file and not content.key:
        raise ConfigError("the map holds no rule", where=str(given), hint="[[file]] or [[key]]")
    rules = Rules(str(given), content.file, content.key)
    for rule in (*rules.files, *rules.keys):
        try:
            _ = rule.compiled
        except re.error as error:
            raise ConfigError(
                f"{rule.pattern!r} is no pattern: {error}", where=str(given),
                hint="each {group} may stand once, and begins with a letter",
            ) from error  # fmt: skip
    return rules


def _compiled(pattern: str) -> re.Pattern[str]:
    parts, at = [], 0
    for match in _PART.finditer(pattern):
        parts.append(re.escape(pattern[at : match.start()]))
        name = match[1]
        if name is None:
            parts.append(".*")
        else:
            parts.append(f"(?P<{name}>{'[0-9]{1,9}' if name in _NUMBERS else '[^/]+'})")
        at = match.end()
    return re.compile("".join([*parts, re.escape(pattern[at:])]))


# The map of a file of log-probabilities: which of its fields holds what.
#
# [fields]
# prompt = "prompt_ids"             # token ids; or tokens = "token_ids", prompt and answer in one
# answer = "completion_ids"
# logprobs = "extra.logps"          # a dot goes into an object or, with a number, into a list
# mask = "loss_mask"                # 0: not scored (a tool's output, padding)
# answer_length = "response_length" # with tokens: how many at the end are the answer
# length = "input_lengths"          # with tokens: how many there are before padding
# attention = "attention_mask"      # 0: padding
# top = "top_logprobs"              # of each token the likeliest: {id: log p} or [[id, log p]]
# text = "prompt"

MAX_TOKENS = 1 << 22
"""Of one prompt and answer."""


class FieldMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module docstring; several names are tried in order."""

    logprobs: str
    prompt: str | None = None
    answer: str | None = None
    tokens: str | None = None
    answer_length: str | None = None
    length: str | None = None
    mask: str | None = None
    attention: str | None = None
    top: str | None = None
    text: str | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fields: FieldMap


def load_fields(path: str | os.PathLike[str]) -> FieldMap:
    """Reads a map. Raises ConfigError."""
    given = expanded(path)
    fields = decode(load_toml(given), _File, where=str(given)).fields
    if fields.tokens is None and fields.answer is None:
        raise ConfigError(
            "the map names no tokens", where=str(given),
            hint='answer = "FIELD" with prompt = "FIELD", or tokens = "FIELD" for both in one',
        )  # fmt: skip
    return fields


def scores_of(item: Any, fields: FieldMap, where: str) -> Scores:
    """One object's scores. Raises DumpError."""
    values = _numbers(item, fields.logprobs, where)
    mask = _ids(item, fields.mask, where)
    prompt, answer, offset = _tokens(item, fields, mask, where)
    if fields.tokens is not None:  # of each token of the sequence, perhaps with padding behind
        end = offset + len(answer)
        rows: list[list[Any]] = [values, mask]
        values, mask = (
            row[offset:end] if len(row) != len(answer) and len(row) >= end else row for row in rows
        )
    if mask and len(mask) < len(answer):
        raise DumpError(f"{fields.mask} has {len(mask)} entries for {len(answer)} tokens of the "
                        "answer", where=where)  # fmt: skip
    scored = [n for n in range(len(answer)) if not mask or mask[n]]
    if mask:  # what lies behind the last scored token is padding, or nobody's concern
        answer = answer[: scored[-1] + 1] if scored else []
    if len(values) < len(answer):
        raise DumpError(
            f"{fields.logprobs} has {len(values)} entries for {len(answer)} tokens of the answer",
            where=where, hint="a map (--map) names other fields",
        )  # fmt: skip
    if not mask and len(values) != len(answer):
        raise DumpError(
            f"{fields.logprobs} has {len(values)} entries for {len(answer)} tokens of the answer, "
            "and no mask says which of them count", where=where,
        )  # fmt: skip
    scored = [n for n in scored if not math.isnan(values[n])]
    top = _top(item, fields.top, where)
    text = _found(item, fields.text)
    return Scores(
        prompt_ids=prompt, generated_ids=answer, positions=[len(prompt) + n for n in scored],
        logprobs=[values[n] for n in scored],
        top=[top[n] if n < len(top) else () for n in scored] if top else (),
        text=text if isinstance(text, str) else None,
    )  # fmt: skip


def _tokens(
    item: Any, fields: FieldMap, mask: list[int], where: str
) -> tuple[list[int], list[int], int]:
    """(prompt, answer, index of the answer in what the file calls its tokens)."""
    attention = _ids(item, fields.attention, where)
    if fields.tokens is None:
        prompt = _ids(item, fields.prompt, where)
        answer = _ids(item, fields.answer, where)
        if len(attention) == len(prompt) + len(answer):
            prompt = [token for token, told in zip(prompt, attention, strict=False) if told]
        return prompt, answer, 0
    tokens = _ids(item, fields.tokens, where)
    length = _one(item, fields.length)
    if length is not None:
        tokens = tokens[:length]
    count = _one(item, fields.answer_length)
    if count is None:
        first = next((n for n, flag in enumerate(mask) if flag), None)
        if first is None:
            raise DumpError(
                f"nothing says where in {fields.tokens} the answer begins", where=where,
                hint="answer_length or mask in the map (--map)",
            )  # fmt: skip
        count = len(tokens) - first
    if not 0 <= count <= len(tokens):
        raise DumpError(f"{fields.answer_length} is {count} of {len(tokens)} tokens", where=where)
    start = len(tokens) - count
    return tokens[:start], tokens[start:], start


def _found(item: Any, path: str | None) -> Any:
    """What lies at a dotted path; None where nothing does."""
    for part in (path or "").split(".") if path else ():
        if isinstance(item, dict) and part in item:
            item = item[part]
        elif isinstance(item, list) and part.isdecimal() and int(part) < len(item):
            item = item[int(part)]
        else:
            return None
    return item if path else None


def _row(item: Any, path: str | None, where: str) -> list[Any]:
    """A list; one of one list (a batch of one) is that list."""
    value = _found(item, path)
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if value is None:
        return []
    if not isinstance(value, list):
        raise DumpError(f"{path} is no list", where=where)
    if len(value) > MAX_TOKENS:
        raise DumpError(f"{path} has {len(value):,} entries", where=where)
    return value


def _ids(item: Any, path: str | None, where: str) -> list[int]:
    value = _row(item, path, where)
    for token in value:
        whole = isinstance(token, bool | int) or (isinstance(token, float) and token.is_integer())
        if not whole or not 0 <= token <= MAX_TOKEN:
            raise DumpError(f"{path}: {str(token)[:40]!r} is no token id", where=where)
    return [int(token) for token in value]


def _numbers(item: Any, path: str, where: str) -> list[float]:
    if _found(item, path) is None:
        keys = ", ".join(list(item)[:12]) if isinstance(item, dict) else "no object"
        raise DumpError(f"there is no field {path}: {keys}", where=where,
                        hint="a map (--map) names the fields")  # fmt: skip
    numbers = []
    for value in _row(item, path, where):
        if value is None:
            numbers.append(math.nan)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.append(float(value))
        elif value in ("nan", "-inf", "NaN", "-Infinity"):
            numbers.append(float(value.replace("Infinity", "inf")))
        else:
            raise DumpError(f"{path}: {str(value)[:40]!r} is no number", where=where)
    return numbers


def _one(item: Any, path: str | None) -> int | None:
    value = _found(item, path)
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _top(item: Any, path: str | None, where: str) -> list[list[tuple[int, float]]]:
    rows = []
    for row in _row(item, path, where):
        entries = list(row.items()) if isinstance(row, dict) else row or []
        try:
            pairs = [(int(token), float(value)) for token, value in entries]
        except (TypeError, ValueError) as error:
            raise DumpError(f"{path}: {str(row)[:60]} are no ids with log-probabilities",
                            where=where) from error  # fmt: skip
        rows.append(sorted(pairs, key=lambda pair: -pair[1]))
    return rows


# What an importer makes of a dump: forwards, and the tensors seen in each.
#
# A layout is a module of ``layouts/`` with the functions of ``DumpLayout``. It knows where another
# tool puts its tensors and what it calls them, and gives each the site that a capture would. What
# follows from several of them (ranks, tokens, the run that is repeated) is found by ``building``,
# for all layouts alike. A further format is one more module, named in ``layouts/__init__.py``.

_MAX_NAME = 1_000

BLOCK = re.compile(r"(?:.+\.)?(?:layers|layer|h|blocks)\.(\d+)")
"""Path of a repeated block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """One tensor of one rank. ``plus``: is added to it; some engines hand on what a block returns
    in two parts, its own update and the residual before it."""

    site: str
    tensor: torch.Tensor
    plus: torch.Tensor | None = None
    rank: int = 0

    def value(self) -> torch.Tensor:
        """The sum of both parts, rounded once to their dtype, as the engine's own addition does."""
        tensor = self.tensor.detach()
        return tensor if self.plus is None else tensor + self.plus.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedForward:
    """All tensors of one forward, in order of execution. ``where``: the file or folder, for errors.
    ``sample`` and ``step``: where the dump says them; else each forward of more than one token
    begins a new prompt. ``num_ranks``: as far as the dump tells."""

    where: str
    tensors: list[Dumped]
    number: int
    sample: int | None = None


@dataclass(slots=True)
class Notes:
    """What was left out, and what was done. ``counts``: end of a sentence → how many tensors."""

    counts: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def add(self, text: str, count: int = 1) -> None:
        self.counts[text] += count

    def sentences(self) -> list[str]:
        counted = [(count, text) for text, count in self.counts.items() if count]
        texts = [f"{count:,} tensor{'s' if count != 1 else ''} {text}" for count, text in counted]
        return [*self.said, *texts]


class DumpLayout(Protocol):
    """A module of ``layouts/``."""

    NAME: str
    """What to call it in words."""
    TAKES_MAP: bool
    """Do rules of a map say what its names are?"""

    def recognise(self, folder: DumpFolder) -> bool:
        """Does the folder look like such a dump?"""

    def read(
        self, folder: DumpFolder, rules: Rules | None, notes: Notes
    ) -> Iterator[DumpedForward]:
        """Its forwards in order. Raises DumpError. It is called twice: to check, then to write."""


def module_site(name: str, port: str, call: int = 1) -> str:
    """The site of a module by its torch name. Raises ValueError."""
    path = escape_path(checked_name(name))
    return join_site(path if call == 1 else f"{path}#{call}", port)


def checked_name(name: str) -> str:
    """The name of a module or tensor, if it is one: a model's have some 100 letters, and names of
    names grow beyond any memory. Raises ValueError, which outside.read_as gives its place."""
    if len(name) > _MAX_NAME:
        raise ValueError(f"{name[:60]}... is a name of {len(name):,} letters")
    return name


def first_missing(numbers: Container[int]) -> int:
    """The first number from 0 on that is not there."""
    return next(number for number in itertools.count() if number not in numbers)


def adds_residual(path: str) -> bool:
    """May the norm at this path get and return a residual beside its input? Those of a block and of
    the model do; one inside a sublayer may have another second input, a gate."""
    parent, _, name = path.rpartition(".")
    beside = BLOCK.fullmatch(parent) is not None or BLOCK.match(path) is None
    return beside and ("norm" in name or name.startswith("ln_"))


def same_kind(part: torch.Tensor, other: torch.Tensor) -> bool:
    """Are both floating, of one shape and one dtype: parts that may be added?"""
    return part.shape == other.shape and part.dtype == other.dtype and part.is_floating_point()


def leaves(value: Any, port: str, is_leaf: Any) -> list[tuple[str, Any]]:
    """(port, leaf) of nested lists and dicts, named as a capture names them: the first is the
    port alone, others carry their index or key."""
    named_leaves: list[tuple[str, Any]] = []

    def walk(value: Any, name: str) -> None:
        if is_leaf(value):
            named_leaves.append((name, value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, checked_name(f"{name}.{index}"))
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, checked_name(f"{name}.{key}"))

    walk(value, port)
    return [(port, named_leaves[0][1]), *named_leaves[1:]] if named_leaves else []


# The first reading of a dump: which prompts and steps its forwards are, and what they hold.
#
# Nothing is written before all of it was opened: a dump that is half written, lacks ranks or steps,
# or shares no name with the run that it is to be like leaves no run behind.
#
# Tokens are those that the dump shows: integers at the input of the model or of its embedding. A
# forward of more than one token begins a prompt, one of a single token is its next step. Where a
# run is named (``like``), a prompt of the dump is the prompt of that run which has its ids; others
# (a server's warm-up) are left out. Without ids the forwards are the steps of one prompt, whose
# tokens are unknown; they are never copied from the run, since that would say what nobody saw.

_IDS = re.compile(
    r"(?:(?:.+\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)|model|transformer|\.)"
    r":in(?:\.input_ids)?"
)


_MAX_IDS = 1 << 22
"""Of a dump; in one forward, more integers are no prompt."""


@dataclass(slots=True)
class Survey:
    """What a dump holds. ``places``: sample and step of each forward, None where it is left out."""

    places: list[tuple[int, int] | None] = field(default_factory=list)
    tokens: Tokens = field(default_factory=lambda: Tokens(samples=[], groups=[]))
    sites: dict[str, None] = field(default_factory=dict)
    dtypes: Counter[str] = field(default_factory=Counter)
    """Elements by floating dtype."""
    prefix: tuple[str, str] = ("", "")
    """What sites of the dump begin with, and what RUN has in its place."""

    @property
    def dtype(self) -> str:
        return max(self.dtypes, key=lambda name: self.dtypes[name], default="float32")

    @property
    def num_steps(self) -> int:
        return 1 + max((place[1] for place in self.places if place is not None), default=0)

    def renamed(self, site: str) -> str:
        old, new = self.prefix
        return new + site[len(old) :] if site.startswith(old) else site


def by_site(tensors: Sequence[Dumped]) -> dict[str, list[Dumped]]:
    """The ranks' tensors of each site. What one rank saw at a site again is left out."""
    sites: dict[str, dict[int, Dumped]] = {}
    for tensor in tensors:
        sites.setdefault(tensor.site, {}).setdefault(tensor.rank, tensor)
    return {site: list(ranks.values()) for site, ranks in sites.items()}


@dataclass(slots=True)
class _Prompt:
    """The forwards of one prompt, or of one batch of prompts: rows of ids, as far as seen."""

    forwards: list[int]
    rows: list[list[int]] | None
    fed: list[list[int]]
    sample: int | None = None


def survey(forwards: Iterator[DumpedForward], like: Run | None, notes: Notes) -> Survey:
    """Raises DumpError, and UsageError where the dump has no name of ``like``."""
    surveyed = Survey()
    prompts: list[_Prompt] = []
    by_sample: dict[int, _Prompt] = {}
    num_ids = 0
    for index, forward in enumerate(forwards):
        surveyed.places.append(None)
        for tensor in forward.tensors:
            surveyed.sites[tensor.site] = None
            try:
                form = format_of(tensor.tensor.dtype)
            except UsageError as error:
                raise DumpError(error.message, where=f"{tensor.site} in {forward.where}") from error
            if tensor.tensor.is_floating_point():
                surveyed.dtypes[form.name] += tensor.tensor.numel()
        rows = _reading_ids(forward)
        num_ids += sum(map(len, rows or ()))
        if num_ids > _MAX_IDS:
            raise DumpError(f"the dump holds more than {_MAX_IDS:,} token ids",
                            where=forward.where)  # fmt: skip
        _place(prompts, by_sample, index, forward, rows)
    if not surveyed.sites:
        raise DumpError("nothing in the dump is the tensor of a module's input or output")
    if like is not None:
        _check_names(surveyed, like, notes)
    _number(surveyed, prompts, like, notes)
    return surveyed


def _reading_ids(forward: DumpedForward) -> list[list[int]] | None:
    """Rows of token ids that the forward was fed."""
    for dumped in forward.tensors:
        tensor = dumped.tensor
        if _IDS.fullmatch(dumped.site) and tensor.dtype in (torch.int64, torch.int32):
            rows = tensor.reshape(1, -1) if tensor.ndim == 1 else tensor
            if rows.ndim == 2 and 0 < rows.numel() <= _MAX_IDS and not bool((rows < 0).any()):
                break
    else:
        return None
    positions = (
        other.tensor.reshape(-1) for other in forward.tensors
        if other.site.endswith(":in.position_ids") and other.tensor.numel()
    )  # fmt: skip
    last = next(positions, None)
    if rows.shape[1] > 1 and last is not None and int(last[-1]) >= rows.shape[1]:
        raise DumpError(
            "a prompt was prefilled in parts, or on top of a cached prefix", where=forward.where,
            hint="dump it in one forward: --chunked-prefill-size -1 --disable-radix-cache",
        )  # fmt: skip
    return [list(map(int, row)) for row in rows.tolist()]


def _place(
    prompts: list[_Prompt], by_sample: dict[int, _Prompt], index: int, forward: DumpedForward,
    rows: list[list[int]] | None,
) -> None:  # fmt: skip
    """Adds a forward, of these ids, to the prompt that it belongs to."""
    held = prompts[-1] if prompts else None
    if forward.sample is not None:  # the map says it
        held = by_sample.get(forward.sample)
    elif rows is not None and len(rows[0]) > 1:
        held = None
    wanted = index if forward.sample is None else 0 if held is None else len(held.forwards)
    if forward.number != wanted:
        raise DumpError(
            f"step {wanted} is missing: in its place comes {forward.number}", where=forward.where,
            hint="dump every forward from the prefill on, which is step 0",
        )  # fmt: skip
    if held is None:
        if rows is not None and len(rows[0]) == 1:
            raise DumpError(
                "the dump begins with a forward of one token: it is a decode step, and its number "
                "is not known", where=forward.where, hint="dump the prefill, alone or first",
            )  # fmt: skip
        held = _Prompt([], rows, [], forward.sample)
        prompts.append(held)
        if forward.sample is not None:
            by_sample[forward.sample] = held
    elif rows is not None:
        if len(rows) != len(held.rows or rows):
            raise DumpError(
                f"a decode step of {len(rows)} prompts follows a prefill of {len(held.rows or ())}",
                where=forward.where, hint="send one request at a time while dumping",
            )  # fmt: skip
        held.fed.append([row[0] for row in rows])
    held.forwards.append(index)


def _number(surveyed: Survey, prompts: list[_Prompt], like: Run | None, notes: Notes) -> None:
    """Gives each prompt its sample, and fills ``tokens`` and ``places``."""
    samples: list[SampleTokens] = []
    groups: list[list[int]] = []
    if like is not None:
        known = like.manifest.tokens
        taken: set[int] = set()
        for prompt in prompts:
            group = next((g for g in known.groups if _is_group(prompt, g, known)), None)
            prompt.sample = prompt.sample if prompt.rows is None else None
            if group is not None and group[0] not in taken:
                prompt.sample = group[0]
                taken.add(group[0])
        if taken or all(prompt.rows is None for prompt in prompts):
            _as_in(surveyed, prompts, known, taken, notes)
            return
    for prompt in prompts:
        rows = prompt.rows or [[]]
        members = list(range(len(samples), len(samples) + len(rows)))
        groups.append(members)
        for row in range(len(rows)):
            fed = [step[row] for step in prompt.fed if row < len(step)]
            samples.append(SampleTokens(prompt_ids=rows[row], generated_ids=fed))
        for step, index in enumerate(prompt.forwards):
            surveyed.places[index] = members[0], step
    surveyed.tokens = Tokens(samples=samples, groups=groups)


def _as_in(
    surveyed: Survey, prompts: list[_Prompt], known: Tokens, taken: set[int], notes: Notes
) -> None:
    """As the run has them: its prompts, with the tokens of those that the dump shows."""
    samples = [
        replace(sample, text=None, generated_ids=[], chosen_ids=[])
        if any(group[0] in taken for group in known.groups if number in group)
        else SampleTokens(prompt_ids=[])
        for number, sample in enumerate(known.samples)
    ]
    num_left_out = 0
    for number, prompt in enumerate(prompts):
        if prompt.sample is None and not taken and number == 0:
            prompt.sample = 0
        if prompt.sample is None or not known.group_of(prompt.sample):
            num_left_out += len(prompt.forwards)
            continue
        group = known.group_of(prompt.sample)
        for row, member in enumerate(group if taken else ()):
            samples[member] = replace(
                samples[member], generated_ids=[step[row] for step in prompt.fed if row < len(step)]
            )
        for step, index in enumerate(prompt.forwards):
            surveyed.places[index] = prompt.sample, step
    if num_left_out:
        plural = "s" if num_left_out > 1 else ""
        notes.say(f"{num_left_out} forward{plural} of other prompts than RUN's left out")
    surveyed.tokens = Tokens(samples=samples, groups=known.groups)


def _is_group(prompt: _Prompt, group: list[int], known: Tokens) -> bool:
    rows = prompt.rows
    if rows is None or len(rows) != len(group):
        return False
    for row, number in zip(rows, group, strict=True):
        own = known.samples[number]
        if row[own.num_left_pad : len(row) - own.num_right_pad] != own.prompt_ids:
            return False
    return True


def _check_names(surveyed: Survey, like: Run, notes: Notes) -> None:
    """The dump's sites are to be those of the run, perhaps under another prefix."""
    theirs = site_names(like.records)
    prefix = find_prefix(surveyed.sites, theirs)
    if prefix is not None:
        surveyed.prefix = prefix
        dump_prefix, run_prefix = (text or "(nothing)" for text in prefix)
        notes.say(f"sites were named with the prefix {dump_prefix} read as {run_prefix}")
    missing = [site for site in surveyed.sites if surveyed.renamed(site) not in theirs]
    if len(missing) == len(surveyed.sites):
        near = [name for site in missing[:20] for name in near_names(site, theirs, count=1)]
        raise UsageError(
            f"none of the dump's {len(missing)} sites is one of {like.path}: the first is "
            f"{missing[0]}", hint="there: " + ", ".join(dict.fromkeys([*near, *theirs][:4]))
            + "; a map (--map) names them",
        )  # fmt: skip
    if missing:
        notes.say(
            f"{len(missing)} of {len(surveyed.sites)} sites are none of RUN's, the first "
            f"{missing[0]}: kept under their own names"
        )


# A dump as a run: its tensors as records of the free pass, and a manifest that says what was seen.
#
# What a dump does not show is left unknown, and preflight says so: weights, configuration, code,
# settings, machine (``model.digest`` is empty). Of the run that it is to be like only the name of
# the model is taken, the modules' parts in it, and shapes.
#
# Ranks: tensors that every rank of a site holds with the same bits are taken once. Others are
# parts, and which parts nobody says: they are left out and counted.

_FIRST_NUMBER = re.compile(r"[^0-9]*?\.\d+")


def manifest_of(
    surveyed: Survey, *, name: str, like: Run | None, label: str | None, command: str | None
) -> Manifest:
    """What is known of the run. ``name``: of the layout."""
    own = None if like is None else like.manifest
    sites = [surveyed.renamed(site) for site in surveyed.sites]
    logits = "lm_head:out" if own is None else own.plan.logits_site
    plan = Plan(
        passes=["free"], sites=["*"], modules=_modules(sites, like),
        logits_site=logits if logits in sites else None,
    )  # fmt: skip
    return foreign_manifest(
        surveyed.tokens, plan, tool=f", importing a dump of {name}",
        label=label or f"dump of {name}", command=command, dtype=surveyed.dtype,
        source=UNKNOWN if own is None else own.model.source,
        task="causal-lm" if own is None else own.model.task,
        max_new_tokens=surveyed.num_steps - 1,
        batch=any(len(group) > 1 for group in surveyed.tokens.groups),
    )  # fmt: skip


def _modules(sites: list[str], like: Run | None) -> dict[str, ModuleNote]:
    """The part of each module in the model: the run's, else by the numbers in its path."""
    if like is not None:
        theirs = like.manifest.plan.modules
        modules = {path: theirs[path] for path in map(module_of, sites) if path in theirs}
        if modules:
            return modules
    paths = list(dict.fromkeys(map(module_of, sites)))
    blocks = {match[0] for path in paths if (match := _FIRST_NUMBER.match(path))}
    around = set[str]()
    for path in blocks:
        while (path := path.rpartition(".")[0]) and path not in around:
            around.add(path)

    def role(path: str) -> ModuleRole:
        if path in blocks:
            return "block"
        return "inner" if path in around or _FIRST_NUMBER.match(path) else "trunk"

    return {path: ModuleNote(kind=UNKNOWN, role=role(path)) for path in paths}


def write(
    writer: RunWriter,
    forwards: Iterator[DumpedForward],
    surveyed: Survey,
    like: Run | None,
    notes: Notes,
) -> None:
    """Puts every tensor that can be told into the run."""
    handed_on = {} if like is None else _handed_on(like, surveyed)
    tokens, logits, num_records = writer.manifest.tokens, writer.manifest.plan.logits_site, 0
    groups = {
        group[0]: [tokens.samples[number] for number in group] for group in tokens.groups if group
    }
    for place, forward in zip(surveyed.places, forwards, strict=True):
        if place is None:
            continue
        sample, step = place
        kept: dict[str, CapturedTensor] = {}
        sites = by_site(forward.tensors)
        num_again = len(forward.tensors) - sum(map(len, sites.values()))
        notes.add("were seen at a site again within a forward, and left out", num_again)
        for site, ranks in sites.items():
            tensor = _of_all_ranks(ranks)
            if tensor is None:
                notes.add("are not the same on all ranks (parts, it seems), and were left out")
                continue
            site = surveyed.renamed(site)
            record = None if like is None else like.find(("free", sample, step, site))
            # engines lay all sequences on one axis: (T, H) as (1, T, H), where the run has it so
            if record is not None and record.shape == (1, *tensor.shape):
                tensor = tensor.unsqueeze(0)
            kept[site] = CapturedTensor(tensor)
            members = groups[sample]
            if (
                site == logits and tensor.ndim == 3 and tensor.shape[0] == len(members)
                and tensor.numel() and not any(member.num_right_pad for member in members)
            ):  # fmt: skip
                # the greedy choice, from logits (B, T, V) of which the last row is the last token's
                chosen = tensor[:, -1].argmax(-1).tolist()
                for member, token in zip(members, chosen, strict=True):
                    member.chosen_ids.append(token)
        for site, other in handed_on.items():
            if site not in kept and other in kept:
                kept[site] = kept[other]
                notes.add("that blocks return were taken from the next module's input, which has "
                          "the same bits in RUN")  # fmt: skip
        for order, (site, item) in enumerate(kept.items()):
            writer.put(item, pass_="free", sample=sample, step=step, site=site, order=order)
        num_records += len(kept)
    if not num_records:
        raise DumpError("nothing in the dump is the same on all ranks: the run would be empty")


def _of_all_ranks(ranks: list[Dumped]) -> torch.Tensor | None:
    first = ranks[0].value().contiguous()
    for other in ranks[1:]:
        tensor = other.value().contiguous()
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            return None
        if first.numel() and not torch.equal(
            tensor.reshape(-1).view(torch.uint8), first.reshape(-1).view(torch.uint8)
        ):
            return None
    return first


def _handed_on(like: Run, surveyed: Survey) -> dict[str, str]:
    """Output of a block that the dump lacks → an input, behind it, that had its bits in the run at
    every step of it."""
    notes = like.manifest.plan.modules
    held = {surveyed.renamed(site) for site in surveyed.sites}
    wanted = {f"{path}:out" for path, note in notes.items() if note.role == "block"} - held
    if not wanted:
        return {}
    outs: dict[str, list[Record]] = {}
    after: dict[tuple[int, int, str | None], list[Record]] = {}
    for entry in like.records:
        if entry.pass_ == "free" and entry.site in wanted:
            outs.setdefault(entry.site, []).append(entry)
        elif entry.pass_ == "free" and entry.site in held and entry.site.endswith(":in"):
            after.setdefault((entry.sample, entry.step, entry.xxh3), []).append(entry)
    sources: dict[str, str] = {}
    for site, records in outs.items():
        common = [
            {
                later.site
                for later in after.get((record.sample, record.step, record.xxh3), ())
                if later.order > record.order and later.shape == record.shape and record.xxh3
            }
            for record in records
        ]
        if both := sorted(set.intersection(*common), key=natural_key):
            sources[site] = both[0]
    return sources


# Files of log-probabilities, made runs: what they have in common.
#
# A layout of scores is a module of ``layouts/`` with the functions of ``ScoreLayout``. It gives the
# prompts' scores as they stand in the file; every value is checked before anything is written.


@dataclass(slots=True)
class Scored:
    """What a layout found. ``wheres``: of each prompt, the file and line, for errors."""

    source: ScoreSource
    scores: list[Scores] = field(default_factory=list)
    wheres: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Of tokens, by id."""


class ScoreLayout(Protocol):
    """A module of ``layouts/`` that reads log-probabilities."""

    NAME: str
    """What to call it in words."""
    TAKES_MAP: bool

    def recognise(self, folder: DumpFolder) -> bool:
        """Does the folder look like it?"""

    def scores(self, folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
        """Everything in it. Raises DumpError."""


def import_scores(
    reader: ScoreLayout, folder: DumpFolder, place: Location, *, map: str | Path | None,
    like: Run | None, label: str | None, force: bool, command: str | None, notes: Notes,
) -> Run:  # fmt: skip
    """The run. ``like``: a run whose prompts these are; others are refused."""
    scored = reader.scores(folder, None if map is None else load_fields(map), notes)
    if not any(score.positions for score in scored.scores):
        raise DumpError("no token has a log-probability", where=str(folder.path))
    for score, where in zip(scored.scores, scored.wheres, strict=True):
        score.tensors(where)
    if like is not None:
        _check_prompts(scored, like)
    manifest = scores_manifest(
        scored.source, [score.tokens for score in scored.scores],
        label=label or f"file of {reader.NAME}", command=command, texts=scored.texts,
        forced_by=None if like is None else like.manifest.id,
        tool=f", importing {reader.NAME}",
    )  # fmt: skip
    with RunWriter(place, manifest, force=force) as writer:
        for number, (score, where) in enumerate(zip(scored.scores, scored.wheres, strict=True)):
            put_scores(writer, number, score, where=where)
    return Run.open(place)


def _check_prompts(scored: Scored, like: Run) -> None:
    theirs = like.manifest.tokens.samples
    if len(theirs) != len(scored.scores):
        raise DumpError(
            f"{len(scored.scores)} prompts, and {like.path} has {len(theirs)}",
            hint="leave --like out to import the file as it is",
        )
    for number, (score, other) in enumerate(zip(scored.scores, theirs, strict=True)):
        mine, its = list(score.prompt_ids), other.prompt_ids
        if mine and its and mine != its:
            raise DumpError(
                f"prompt {number} is not that of {like.path}", where=scored.wheres[number],
                hint="leave --like out to import the file as it is",
            )  # fmt: skip
