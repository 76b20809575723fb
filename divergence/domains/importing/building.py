"""From tensors of another tool to a run: names, prompts, steps, and what is not known."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from divergence.comparison.align.pairs import find_prefix
from divergence.config import decode, load_toml
from divergence.errors import ConfigError, DumpError, UsageError
from divergence.numerics.formats import format_of
from divergence.numerics.summary import Summary
from divergence.run.captured import CapturedTensor
from divergence.run.contents import site_names
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
from divergence.run.record import Apart, Record, expanded
from divergence.run.scores import foreign_manifest
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
class Target:
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

    def place(
        self, name: str, *, inside: str | None = None, tags: dict[str, str] | None = None
    ) -> Target | None:
        """Where the tensor of a file belongs, or one of this name ``inside`` a file, by the first
        rule that matches. ``tags``: groups that the dump itself gives. Raises ConfigError."""
        for rule in self.files if inside is None else self.keys:
            outer, inner = rule.compiled
            around, match = outer.fullmatch(inside or ""), inner.fullmatch(name)
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
                f"{rule.site!r} makes no site of {name!r}",
                where=self.path,
                hint="a site is MODULE_PATH:PORT, as model.layers.{layer}:out; its groups are "
                f"those of the pattern: {', '.join(groups) or 'none'}",
            ) from error
        step, sample, rank = (
            int(text) if given is None and (text := groups.get(key) or "").isdecimal() else given
            for key, given in (("step", rule.step), ("sample", rule.sample), ("rank", rule.rank))
        )
        return Target(site, step, sample, rank)


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
                f"{rule.pattern!r} is no pattern: {error}",
                where=str(given),
                hint="each {group} may stand once, and begins with a letter",
            ) from error
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


# What an importer makes of a dump: forwards, and the tensors seen in each.

_MAX_NAME = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """One tensor of one rank. ``plus``: is added to it; some engines hand on what a block returns
    in two parts, its own update and the residual before it."""

    site: str
    tensor: torch.Tensor
    plus: torch.Tensor | None = None
    rank: int = 0
    summary: Summary | None = None
    """What the tool kept in its place: ``tensor`` then has a shape and no memory."""
    checksum: str | None = None
    """``crc32:`` or another name, and hexadecimal digits."""
    off: float = 0.0
    """What the digits of the summary leave open, relative."""
    positions: tuple[int, ...] | None = None
    """Of the tokens that it holds, where it does not hold all."""
    apart: Apart | None = None
    """What the tool said when it compared the tensor with another one."""

    def value(self) -> torch.Tensor:
        """The sum of both parts, rounded once to their dtype, as the engine's own addition does."""
        tensor = self.tensor.detach()
        return tensor if self.plus is None else tensor + self.plus.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedForward:
    """All tensors of one forward, in order of execution."""

    where: str
    """The file or folder, for errors."""
    tensors: list[Dumped]
    number: int
    """Of the forward: in the dump, or among those of ``sample``."""
    sample: int | None = None
    """Where the dump says it; else each forward of more than one token begins a new prompt."""


@dataclass(slots=True)
class Notes:
    """What was left out, and what was done. ``counts``: end of a sentence → how many tensors."""

    counts: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        if sentence not in self.said:
            self.said.append(sentence)

    def add(self, text: str, count: int = 1) -> None:
        self.counts[text] += count

    def sentences(self) -> list[str]:
        counted = [(count, text) for text, count in self.counts.items() if count]
        texts = [f"{count:,} tensor{'s' if count != 1 else ''} {text}" for count, text in counted]
        return [*self.said, *texts]


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


def check_ranks(steps: Mapping[int, Iterable[int]], where: str) -> None:
    """Every step is to have the same ranks, from 0 on. Raises DumpError."""
    hint = "copy the files of all ranks together"
    ranks = {rank for there in steps.values() for rank in there}
    if (missing := first_missing(ranks)) < max(ranks):
        raise DumpError(f"rank {missing} is missing", where=where, hint=hint)
    for step, there in steps.items():
        if lacking := ranks.difference(there):
            raise DumpError(
                f"rank {min(lacking)} is missing at step {step}", where=where, hint=hint
            )


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
    statistics_off: float | None = None
    """The most that the digits of statistics leave open; None where all tensors are there."""
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
            if tensor.summary is not None:
                surveyed.statistics_off = max(surveyed.statistics_off or 0.0, tensor.off)
            try:
                form = format_of(tensor.tensor.dtype)
            except UsageError as error:
                raise DumpError(error.message, where=f"{tensor.site} in {forward.where}") from error
            if tensor.tensor.is_floating_point():
                surveyed.dtypes[form.name] += tensor.tensor.numel()
        rows = _reading_ids(forward)
        num_ids += sum(map(len, rows or ()))
        if num_ids > _MAX_IDS:
            raise DumpError(f"the dump holds more than {_MAX_IDS:,} token ids", where=forward.where)
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
        is_whole = tensor.dtype in (torch.int64, torch.int32) and not tensor.is_meta
        if _IDS.fullmatch(dumped.site) and is_whole:
            rows = tensor.reshape(1, -1) if tensor.ndim == 1 else tensor
            if rows.ndim == 2 and 0 < rows.numel() <= _MAX_IDS and not bool((rows < 0).any()):
                break
    else:
        return None
    positions = (
        other.tensor.reshape(-1)
        for other in forward.tensors
        if other.site.endswith(":in.position_ids")
        and other.tensor.numel()
        and not other.tensor.is_meta
    )
    last = next(positions, None)
    if rows.shape[1] > 1 and last is not None and int(last[-1]) >= rows.shape[1]:
        raise DumpError(
            "a prompt was prefilled in parts, or on top of a cached prefix",
            where=forward.where,
            hint="dump it in one forward: --chunked-prefill-size -1 --disable-radix-cache",
        )
    return [list(map(int, row)) for row in rows.tolist()]


def _place(
    prompts: list[_Prompt],
    by_sample: dict[int, _Prompt],
    index: int,
    forward: DumpedForward,
    rows: list[list[int]] | None,
) -> None:
    """Adds a forward, of these ids, to the prompt that it belongs to."""
    held = prompts[-1] if prompts else None
    if forward.sample is not None:  # the map says it
        held = by_sample.get(forward.sample)
    elif rows is not None and len(rows[0]) > 1:
        held = None
    wanted = index if forward.sample is None else 0 if held is None else len(held.forwards)
    if forward.number != wanted:
        raise DumpError(
            f"step {wanted} is missing: in its place comes {forward.number}",
            where=forward.where,
            hint="dump every forward from the prefill on, which is step 0",
        )
    if held is None:
        if rows is not None and len(rows[0]) == 1:
            raise DumpError(
                "the dump begins with a forward of one token: it is a decode step, and its number "
                "is not known",
                where=forward.where,
                hint="dump the prefill, alone or first",
            )
        held = _Prompt([], rows, [], forward.sample)
        prompts.append(held)
        if forward.sample is not None:
            by_sample[forward.sample] = held
    elif rows is not None:
        if len(rows) != len(held.rows or rows):
            raise DumpError(
                f"a decode step of {len(rows)} prompts follows a prefill of {len(held.rows or ())}",
                where=forward.where,
                hint="send one request at a time while dumping",
            )
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
            f"{missing[0]}",
            hint="there: "
            + ", ".join(dict.fromkeys([*near, *theirs][:4]))
            + "; a map (--map) names them",
        )
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
        passes=["free"],
        sites=["*"],
        modules=_modules(sites, like),
        logits_site=logits if logits in sites else None,
        statistics_off=surveyed.statistics_off,
        store="full" if surveyed.statistics_off is None else "stats",
    )
    return foreign_manifest(
        surveyed.tokens,
        plan,
        tool=f", importing a dump of {name}",
        label=label or f"dump of {name}",
        command=command,
        dtype=surveyed.dtype,
        source=UNKNOWN if own is None else own.model.source,
        task="causal-lm" if own is None else own.model.task,
        max_new_tokens=surveyed.num_steps - 1,
        batch=any(len(group) > 1 for group in surveyed.tokens.groups),
    )


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
        sites: dict[str, dict[int, Dumped]] = {}
        for dumped in forward.tensors:
            sites.setdefault(dumped.site, {}).setdefault(dumped.rank, dumped)
        num_again = len(forward.tensors) - sum(map(len, sites.values()))
        notes.add("were seen at a site again within a forward, and left out", num_again)
        for site, ranks in sites.items():
            first = next(iter(ranks.values()))
            tensor = _of_all_ranks(list(ranks.values()))
            if tensor is None:
                notes.add("are not the same on all ranks (parts, it seems), and were left out")
                continue
            site = surveyed.renamed(site)
            record = None if like is None else like.find(("free", sample, step, site))
            # engines lay all sequences on one axis: (T, H) as (1, T, H), where the run has it so
            if record is not None and record.shape == (1, *tensor.shape):
                tensor = tensor.unsqueeze(0)
            kept[site] = CapturedTensor(tensor)
            if first.summary is not None:
                kept[site].tensor = None
                kept[site].summary, kept[site].checksum = first.summary, first.checksum
                kept[site].apart = first.apart
                continue
            members = groups[sample]
            if (
                site == logits
                and tensor.ndim == 3
                and tensor.shape[0] == len(members)
                and tensor.numel()
                and not any(member.num_right_pad for member in members)
            ):
                # the greedy choice, from logits (B, T, V) of which the last row is the last token's
                chosen = tensor[:, -1].argmax(-1).tolist()
                for member, token in zip(members, chosen, strict=True):
                    member.chosen_ids.append(token)
        for site, other in handed_on.items():
            if site not in kept and other in kept:
                kept[site] = kept[other]
                notes.add(
                    "that blocks return were taken from the next module's input, which has "
                    "the same bits in RUN"
                )
        positions = {
            surveyed.renamed(site): next(iter(ranks.values())).positions
            for site, ranks in sites.items()
        }
        for order, (site, item) in enumerate(kept.items()):
            writer.put(
                item,
                pass_="free",
                sample=sample,
                step=step,
                site=site,
                order=order,
                positions=positions.get(site),
            )
        num_records += len(kept)
    if not num_records:
        raise DumpError("nothing in the dump is the same on all ranks: the run would be empty")


def _of_all_ranks(ranks: list[Dumped]) -> torch.Tensor | None:
    if ranks[0].summary is not None:
        kept = [(item.summary, item.checksum, item.tensor.shape) for item in ranks]
        return ranks[0].tensor if all(other == kept[0] for other in kept[1:]) else None
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
