"""The first reading of a dump: which prompts and steps its forwards are, and what they hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from divergence.comparison.align import find_prefix
from divergence.domains.importing.dumped import DumpedForward, Notes
from divergence.errors import DumpError, UsageError
from divergence.numerics.formats import format_of
from divergence.run.contents import site_names
from divergence.run.manifest import SampleTokens, Tokens
from divergence.run.reader import Run
from divergence.run.site import near_names

# Nothing is written before all of it was opened: a dump that is half written, lacks ranks or steps,
# or shares no name with the run that it is to be like leaves no run behind.
#
# Tokens are those that the dump shows: integers at the input of the model or of its embedding. A
# forward of more than one token begins a prompt, one of a single token is its next step. Where a
# run is named (``like``), a prompt of the dump is the prompt of that run which has its ids; others
# (a server's warm-up) are left out. Where statistics tell how many ids there were, that tells
# prompts; without it the forwards are the steps of one prompt. Unknown tokens are never copied from
# the run, since that would say what nobody saw.

_IDS = re.compile(
    r"(?:(?:.+\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)|model|transformer|\.)"
    r":in(?:\.input_ids)?"
)


_MAX_IDS = 1 << 22
"""Of a dump; in one forward, more integers are no prompt."""


@dataclass(slots=True)
class Survey:
    """Says what a dump holds. ``places``: each forward's sample and step, None if left out."""

    places: list[tuple[int, int] | None] = field(default_factory=list)
    tokens: Tokens = field(default_factory=lambda: Tokens(samples=[], groups=[]))
    sites: dict[str, None] = field(default_factory=dict)
    dtypes: Counter[str] = field(default_factory=Counter)
    """Elements by floating dtype."""
    statistics_off: float | None = None
    """The most that the digits of statistics leave open; None where all tensors are there."""
    trains: bool = False
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

    forwards: dict[int, int]
    """By its place in the dump, the step of each."""
    rows: list[list[int]] | None
    fed: list[list[int]]
    sample: int | None = None
    num_tokens: int | None = None
    """Of statistics, which show no ids: the tokens of its first forward."""


def survey(forwards: Iterator[DumpedForward], like: Run | None, notes: Notes) -> Survey:
    """Raises DumpError, and UsageError where the dump has no name of ``like``."""
    surveyed = Survey()
    prompts: list[_Prompt] = []
    by_sample: dict[int, _Prompt] = {}
    num_ids = 0
    for index, forward in enumerate(forwards):
        surveyed.places.append(None)
        surveyed.trains = forward.trains
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
        if rows is None and index == min(prompts[-1].forwards):
            prompts[-1].num_tokens = _num_tokens(forward)
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


def _num_tokens(forward: DumpedForward) -> int | None:
    """How many tokens the forward was fed, where their shape alone is known."""
    sizes = (
        dumped.tensor.shape
        for dumped in forward.tensors
        if _IDS.fullmatch(dumped.site) and dumped.tensor.dtype in (torch.int64, torch.int32)
    )
    return next((size[-1] for size in sizes if 1 <= len(size) <= 2), None)


def _place(
    prompts: list[_Prompt],
    by_sample: dict[int, _Prompt],
    index: int,
    forward: DumpedForward,
    rows: list[list[int]] | None,
) -> None:
    """Adds a forward, of these ids, to the prompt that it belongs to."""
    prompt = prompts[-1] if prompts else None
    if forward.sample is not None:  # the map says it
        prompt = by_sample.get(forward.sample)
    elif (_num_tokens(forward) or 0) > 1:
        prompt = None
    wanted = index if forward.sample is None else 0 if prompt is None else len(prompt.forwards)
    if not forward.numbered and forward.number != wanted:
        raise DumpError(
            f"step {wanted} is missing: in its place comes {forward.number}",
            where=forward.where,
            hint="dump every forward from the prefill on, which is step 0",
        )
    if prompt is None:
        if rows is not None and len(rows[0]) == 1:
            raise DumpError(
                "the dump begins with a forward of one token: it is a decode step, and its number "
                "is not known",
                where=forward.where,
                hint="dump the prefill, alone or first",
            )
        prompt = _Prompt({}, rows, [], forward.sample)
        prompts.append(prompt)
        if forward.sample is not None:
            by_sample[forward.sample] = prompt
    elif rows is not None:
        if len(rows) != len(prompt.rows or rows):
            raise DumpError(
                f"a decode step of {len(rows)} prompts follows a prefill of "
                f"{len(prompt.rows or ())}",
                where=forward.where,
                hint="send one request at a time while dumping",
            )
        prompt.fed.append([row[0] for row in rows])
    prompt.forwards[index] = forward.number if forward.numbered else len(prompt.forwards)


def _number(surveyed: Survey, prompts: list[_Prompt], like: Run | None, notes: Notes) -> None:
    """Gives each prompt its sample, and fills ``tokens`` and ``places``."""
    samples: list[SampleTokens] = []
    groups: list[list[int]] = []
    if like is not None:
        tokens = like.manifest.tokens
        taken: set[int] = set()
        for prompt in prompts:
            group = next((g for g in tokens.groups if _is_group(prompt, g, tokens)), None)
            prompt.sample = prompt.sample if prompt.rows is None else None
            if group is not None and group[0] not in taken:
                prompt.sample = group[0]
                taken.add(group[0])
        if taken or all(prompt.rows is None for prompt in prompts):
            _as_in(surveyed, prompts, tokens, taken, notes)
            return
    for prompt in prompts:
        rows = prompt.rows or [[]]
        members = list(range(len(samples), len(samples) + len(rows)))
        groups.append(members)
        for row in range(len(rows)):
            fed = [step[row] for step in prompt.fed if row < len(step)]
            samples.append(SampleTokens(prompt_ids=rows[row], generated_ids=fed))
        for index, step in prompt.forwards.items():
            surveyed.places[index] = members[0], step
    surveyed.tokens = Tokens(samples=samples, groups=groups)


def _as_in(
    surveyed: Survey, prompts: list[_Prompt], tokens: Tokens, taken: set[int], notes: Notes
) -> None:
    """Return the run's prompts, with the tokens of those that the dump shows."""
    samples = [
        replace(sample, text=None, generated_ids=[], chosen_ids=[])
        if any(group[0] in taken for group in tokens.groups if number in group)
        else SampleTokens(prompt_ids=[])
        for number, sample in enumerate(tokens.samples)
    ]
    num_left_out = 0
    for number, prompt in enumerate(prompts):
        if prompt.sample is None and not taken:
            prompt.sample = _unseen(prompts[:number], prompt, tokens)
        if prompt.sample is None or not tokens.group_of(prompt.sample):
            num_left_out += len(prompt.forwards)
            continue
        group = tokens.group_of(prompt.sample)
        for row, member in enumerate(group if taken else ()):
            samples[member] = replace(
                samples[member], generated_ids=[step[row] for step in prompt.fed if row < len(step)]
            )
        for index, step in prompt.forwards.items():
            surveyed.places[index] = prompt.sample, step
    if num_left_out:
        plural = "s" if num_left_out > 1 else ""
        notes.say(f"{num_left_out} forward{plural} of other prompts than RUN's left out")
    surveyed.tokens = Tokens(samples=samples, groups=tokens.groups)


def _unseen(before: list[_Prompt], prompt: _Prompt, tokens: Tokens) -> int | None:
    """The run's next prompt of as many tokens, where the dump shows no ids."""
    used = {earlier.sample for earlier in before}
    rest = [group[0] for group in tokens.groups if group and group[0] not in used]
    num = prompt.num_tokens
    if num is None:
        return None if before else 0
    return next((n for n in rest if tokens.samples[n].num_padded == num), None)


def _is_group(prompt: _Prompt, group: list[int], tokens: Tokens) -> bool:
    rows = prompt.rows
    if rows is None or len(rows) != len(group):
        return False
    for row, number in zip(rows, group, strict=True):
        own = tokens.samples[number]
        if row[own.num_left_pad : len(row) - own.num_right_pad] != own.prompt_ids:
            return False
    return True


def _check_names(surveyed: Survey, like: Run, notes: Notes) -> None:
    """The dump's sites are to be those of the run, perhaps under another prefix."""
    names = site_names(like.records)
    prefix = find_prefix(surveyed.sites, names)
    if prefix is not None:
        surveyed.prefix = prefix
        dump_prefix, run_prefix = (text or "(nothing)" for text in prefix)
        notes.say(f"sites were named with the prefix {dump_prefix} read as {run_prefix}")
    missing = [site for site in surveyed.sites if surveyed.renamed(site) not in names]
    if len(missing) == len(surveyed.sites):
        near = [name for site in missing[:20] for name in near_names(site, names, count=1)]
        raise UsageError(
            f"none of the dump's {len(missing)} sites is one of {like.path}: the first is "
            f"{missing[0]}",
            hint="there: "
            + ", ".join(dict.fromkeys([*near, *names][:4]))
            + "; a map (--map) names them",
        )
    if missing:
        notes.say(
            f"{len(missing)} of {len(surveyed.sites)} sites are none of RUN's, the first "
            f"{missing[0]}: kept under their own names"
        )
