"""The structure of a difference at the onset, where it is plain.

Looked at are the tensors of the onset alone, d = b - a in the rows that are beyond their limit. A
structure is what a cause leaves behind: one vector added to all tokens (a bias that is added twice
or left out), one factor, one constant a row, one channel, head or row of the vocabulary; and in
the order of tokens, an error that begins at a token, or grows from there (a window, positions).
It is named where it explains at least ``EXPLAINED_SHARE`` of the squared difference, in its own
numbers and in rounding's: each number over what rounding moves a number of its size by, so that
massive channels and sinks, where rounding itself is largest, are none. Rounding alone has no
structure.

Of what a difference is made of, and of where it is, one each is named: the one with the fewest
numbers of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from divergence.analyses.blocks.units import is_table
from divergence.comparison.align import Pair, Pieces, same_positions
from divergence.comparison.constants import (
    BEGINS_TIMES,
    CLEAR_TIMES,
    EXPLAINED_SHARE,
    FEW_ROWS,
    FEWEST_SIBLINGS,
)
from divergence.comparison.measure.truth import inputs_of
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.drawn import signs
from divergence.numerics.formats import format_of, is_float
from divergence.run.manifest import NUM_SUMS
from divergence.run.site import module_of

if TYPE_CHECKING:
    from divergence.analyses.blocks.units import JudgedUnit
    from divergence.comparison.analysis import Measured
    from divergence.comparison.judge import Floats
    from divergence.run.manifest import ParameterNote

_MOST_NUMBERS = 1 << 23
"""Of a larger site the first rows are looked at: 200 MB."""


@dataclass(frozen=True, slots=True)
class OnsetRows:
    """``a``, ``d`` (N, C): the reference, and the candidate less it. ``base``: the block's input.
    ``prompt``, ``position``, ``tokens`` (N,): of each row, -1 where it is not known. ``beyond``
    (N,): is the row of a forward beyond its limit? ``heads``: that the channels are divided into.
    ``vocabulary``: are the channels tokens? ``parameters``: of the block, or else the module."""

    site: str
    kind: str
    block: str | None
    a: Floats
    d: Floats
    base: Floats | None
    prompt: Floats
    position: Floats
    beyond: np.ndarray
    tokens: np.ndarray
    heads: int | None
    vocabulary: bool
    parameters: Mapping[str, ParameterNote]

    def rows(self, kept: np.ndarray) -> OnsetRows:
        changes = {
            name: values[kept]
            for name in ("a", "d", "base", "prompt", "position", "beyond", "tokens")
            if (values := getattr(self, name)) is not None
        }
        return replace(self, **changes)


Structure = Callable[[OnsetRows], tuple[float, Fact] | None]
"""(the share of the squared difference that it explains, what it is), where it may be asked."""


def structures_at(measured: Measured, unit: JudgedUnit) -> list[Fact]:
    """Tells what is plain of the difference at a unit: of what it is made, and where it is."""
    whole = _difference(measured, unit)
    if whole is None:
        return []
    facts = []
    for seen, table in ((whole.rows(whole.beyond), VALUES), (whole, PLACES)):
        for structure in table:
            answer = structure(seen)
            if answer is not None and answer[0] >= EXPLAINED_SHARE:
                facts.append(answer[1].with_values(plain=True))
                break
    return facts


# Of what a difference is made.


def _factor(x: OnsetRows, *, update: bool = False) -> tuple[float, Fact] | None:
    """b = f a: one factor on the output; or b - in = f (a - in), on what a block adds."""
    base = x.base if update else 0.0
    if base is None:
        return None
    scaled = x.a - base
    along = float((x.d * scaled).sum())
    share, factor = along**2 / (_square(x.d) * _square(scaled)), along / _square(scaled)
    site = x.block if update else x.site
    return share, fact("blocks.factor", share=share, site=site, factor=1 + factor, update=update)


def _column(x: OnsetRows) -> tuple[float, Fact] | None:
    """One channel; of logits, one row of the vocabulary."""
    share, column = _largest_part(x, x.d.shape[1])
    code = "blocks.vocabulary_row" if x.vocabulary else "blocks.channel"
    return share, fact(code, share=share, site=x.site, number=column, total=x.d.shape[1])


def _head(x: OnsetRows) -> tuple[float, Fact] | None:
    if x.heads is None or x.heads < 2 or x.d.shape[1] % x.heads:
        return None
    share, head = _largest_part(x, x.heads)
    return share, fact("blocks.head", share=share, site=x.site, number=head, total=x.heads)


def _vector(x: OnsetRows) -> tuple[float, Fact] | None:
    """d = 1 cᵀ: one vector at all tokens, and the parameter that it is a multiple of."""
    if len(x.d) < FEWEST_SIBLINGS:
        return None
    mean = x.d.mean(0)
    share = len(x.d) * _square(mean) / _square(x.d)
    name, times = _parameter_like(x, mean) if share >= EXPLAINED_SHARE else (None, None)
    cause = None
    if times is not None and abs(abs(times) - 1) < 1 - EXPLAINED_SHARE:
        cause = "twice" if times > 0 else "left_out"
    return share, fact(
        "blocks.vector",
        share=share,
        site=x.site,
        num=len(x.d),
        parameter=name,
        times=times,
        cause=cause,
    )


def _constants(x: OnsetRows) -> tuple[float, Fact] | None:
    """d = c 1ᵀ: one constant in all channels of a row."""
    if x.d.shape[1] < FEWEST_SIBLINGS:
        return None
    means = x.d.mean(1)
    share = x.d.shape[1] * _square(means) / _square(x.d)
    return share, fact(
        "blocks.row_constants", share=share, site=x.site, largest=float(np.abs(means).max())
    )


def _shard(x: OnsetRows) -> tuple[float, Fact] | None:
    """One of equal parts of the channels, as ranks hold them, in all of it."""
    width = x.d.shape[1]
    energy = np.square(x.d / np.maximum(*_channel_sizes(x))).sum(0)
    for count in (16, 8, 4, 2):
        if width % count or width // count < FEW_ROWS:
            continue
        share, number = _largest_part(x, count)
        inside = np.arange(width) * count // width == number
        if share >= EXPLAINED_SHARE and np.median(energy[inside]) > energy[~inside].mean():
            first = number * width // count
            return share, fact(
                "blocks.shard",
                share=share,
                site=x.site,
                first=first,
                last=first + width // count - 1,
                num=count,
                total=width,
                vocabulary=x.vocabulary,
            )
    return None


VALUES: tuple[Structure, ...] = (
    _factor,
    partial(_factor, update=True),
    _column,
    _head,
    _constants,
    _vector,
    _shard,
)


# Where it is.


def _token_id(x: OnsetRows) -> tuple[float, Fact] | None:
    """All rows of one token id, of a table that is looked up by it."""
    if "Embedding" not in x.kind or (x.tokens < 0).any() or len(set(x.tokens)) < 2:
        return None
    energy = _row_energy(x)
    by_id = {number: float(energy[x.tokens == number].sum()) for number in set(x.tokens)}
    top = max(by_id, key=lambda number: by_id[number])
    share = float(by_id[top] / energy.sum())
    return share, fact(
        "blocks.vocabulary_row", share=share, site=x.site, number=int(top), total=len(by_id)
    )


def _token(x: OnsetRows) -> tuple[float, Fact] | None:
    """One token, of all those of all prompts."""
    if (x.position < 0).any() or len(x.position) < 2 * FEWEST_SIBLINGS:
        return None
    energy = _row_energy(x)
    top = int(energy.argmax())
    share = float(energy[top] / (energy.sum() or math.inf))
    return share, fact(
        "blocks.one_token",
        share=share,
        site=x.site,
        sample=int(x.prompt[top]),
        token=int(x.position[top]),
        total=len(energy),
    )


def _growing(x: OnsetRows) -> tuple[float, Fact] | None:
    """Does the error grow with the distance from a token on? what is multiplied by the position is
    off."""
    sizes = _by_position(x)
    if sizes is None:
        return None
    size = np.sqrt(sizes)
    first = int(np.flatnonzero(sizes * BEGINS_TIMES > sizes.max())[0])
    best = 0.0, 0
    for begin in {0, max(0, first - 1)}:
        line = np.maximum(0.0, np.arange(len(size)) - begin)
        share = float(size @ line) ** 2 / float((size @ size) * (line @ line) or math.inf)
        best = max(best, (share, begin))
    third = len(size[best[1] :]) // 3
    tail, even = size[best[1] :], size[first:]
    if even.sum() ** 2 / len(even) > best[0] * float(size @ size):
        return None  # it begins there, and stays
    if third < 1 or tail[-third:].mean() < CLEAR_TIMES * max(tail[:third].mean(), 1e-300):
        return None
    share = best[0]
    return share, fact("blocks.growing", share=share, site=x.site, token=best[1] or None)


def _beginning(x: OnsetRows) -> tuple[float, Fact] | None:
    """Does the error begin at a token, before which it is many times smaller? The first token alone
    tells nothing: it is often a sink, beside whose size an error is small, and attention has only
    itself there."""
    sizes = _by_position(x)
    if sizes is None:
        return None
    for begin in range(2, len(sizes) - 1):
        before, behind = sizes[:begin].max(), sizes[begin:]
        clear = behind > BEGINS_TIMES * before
        if clear[0] and clear.mean() >= EXPLAINED_SHARE:
            share = float(behind.sum() / sizes.sum())
            times = math.sqrt(float(np.median(behind)) / before) if before else None
            return share, fact(
                "blocks.beginning", share=share, site=x.site, token=begin, times=times
            )
    return None


PLACES: tuple[Structure, ...] = (_token_id, _token, _growing, _beginning)


def layer_type_of(
    measured: Measured, units: Sequence[JudgedUnit], flagged: Sequence[JudgedUnit]
) -> Fact | None:
    """Tells whether the blocks beyond their limit are those of one type of layer, or every second
    one."""
    blocks = {unit.block for unit in units} - {None}
    off = {unit.block for unit in flagged} - {None}
    numbers = {block: block.rpartition(".")[2] for block in blocks if block is not None}
    if not all(map(str.isdigit, numbers.values())) or not 2 <= len(off) <= len(blocks) - 2:
        return None
    kinds = layer_types_of(measured, numbers)
    for parity, name in enumerate(("even", "odd")):
        kinds[name] = {block for block, number in numbers.items() if int(number) % 2 == parity}
    for name, members in kinds.items():
        if members == off:
            return fact("blocks.layer_type", type=name, num=len(off), total=len(blocks))
    return None


def _square(values: Floats) -> float:
    return float(np.square(values).sum()) or 1e-300


def _largest_part(x: OnsetRows, count: int) -> tuple[float, int]:
    """Finds the largest of so many equal parts of the channels: (its share, its number)."""
    shares = []
    weighed: Floats = np.square(x.d / np.maximum(*_channel_sizes(x)))
    for energy in (np.square(x.d), weighed):
        parts = energy.sum(0).reshape(count, -1).sum(1)
        shares.append(parts / (parts.sum() or 1e-300))
    top = int(shares[0].argmax())
    return float(min(share[top] for share in shares)), top


def _channel_sizes(x: OnsetRows) -> tuple[Floats, float]:
    """Measures the channels of A: (the rms of each, the median of them)."""
    usual: Floats = np.sqrt(np.square(x.a).mean(0))
    return usual, float(np.median(usual)) or 1.0


def _row_energy(x: OnsetRows) -> Floats:
    """The squared error of each row (N,), relative to it."""
    energy: Floats = np.square(x.d).sum(1) / np.maximum(np.square(x.a).sum(1), 1e-300)
    return energy


def _by_position(x: OnsetRows) -> Floats | None:
    """The mean squared relative error (T,) of the rows at each position from 0 on, of the prompts
    that are beyond their limit; None where positions are not known or few."""
    comparable = (x.position >= 0) & np.isin(x.prompt, np.unique(x.prompt[x.beyond]))
    if comparable.sum() < 2 * FEWEST_SIBLINGS:
        return None
    position, energy = x.position[comparable].astype(int), _row_energy(x)[comparable]
    count = np.bincount(position)
    length = int(np.argmin(count > 0)) if (count == 0).any() else len(count)
    if length < 2 * FEWEST_SIBLINGS:
        return None
    sums = np.bincount(position, energy)[:length] / count[:length]
    return sums if sums.sum() > 0 else None


def _parameter_like(x: OnsetRows, vector: Floats) -> tuple[str | None, float | None]:
    """The parameter of which ``vector`` is a multiple, by its recorded sums, and the multiple."""
    by_place = signs(len(vector), NUM_SUMS).astype(np.float64)
    own, size = vector @ by_place, math.sqrt(_square(vector))
    best: tuple[float, str | None, float | None] = (1 - EXPLAINED_SHARE, None, None)
    for name, note in x.parameters.items():
        if note.shape != [len(vector)] or not note.norm:
            continue
        sums = np.array(note.sums[NUM_SUMS : 2 * NUM_SUMS])
        times = math.copysign(size / note.norm, float(own @ sums))
        apart = float(np.abs(own - times * sums).max()) / size
        best = min(best, (apart, name, times), key=lambda entry: entry[0])
    return best[1:]


# The tensors of the onset.


def _difference(measured: Measured, unit: JudgedUnit) -> OnsetRows | None:
    """All rows of the unit's site in its pass; None where not both sides are at hand."""
    a, b = measured.reference, measured.candidate
    first, manifest = unit.results[0], a.manifest
    pieces = Pieces(a, b, inputs_of(a, b))
    usages = {look.place: look.usage for look in unit.looks}
    some = any(usage > 1 for usage in usages.values())
    parts: list[tuple[Floats, ...]] = []
    numbers = 0
    sites = [unit.site]
    if is_table(first):  # cosine and sine: a point on a circle
        sites = [f"{module_of(unit.site)}:{port}" for port in ("out", "out.1")]
    forwards: dict[tuple[int, int], list[Pair]] = {}
    for pair in measured.alignment.pairs:
        if pair.pass_ == unit.pass_ and pair.reference.record.site in sites:
            place = pair.reference.sample, pair.candidate.record.step
            forwards.setdefault(place, []).append(pair)
    own_steps = {look.result.step for look in unit.looks}
    for (_, step), pairs in forwards.items():
        if numbers >= _MOST_NUMBERS:
            break
        if unit.phase == "prefill" and step not in own_steps:
            continue  # an error of a prefill need not be in decode steps
        tensors = []
        for pair in pairs:
            piece, other = pair.reference, pair.candidate
            if not (a.has_bytes(piece.record) and b.has_bytes(other.record)):
                return None
            x, y = same_positions(
                pieces.array(a, piece), piece.record, pieces.array(b, other), other.record
            )
            entering = pieces.base(pair) if first.role == "block" else None
            if x.shape != y.shape or x.ndim < 3 or not is_float(format_of(x.dtype)):
                return None
            if entering is None or entering.shape != x.shape:
                entering = np.broadcast_to(np.nan, x.shape)
            tensors.append((x, y, entering))
        shape = (*tensors[0][0].shape[:2], 1)
        if len(pairs) < len(sites) or any(x.shape[:2] != shape[:2] for x, *_ in tensors):
            return None
        num_columns = sum(math.prod(x.shape[2:]) for x, *_ in tensors)
        num_rows = min(math.prod(shape), max(1, (_MOST_NUMBERS - numbers) // num_columns))
        numbers += num_rows * num_columns
        columns = [  # the first tokens' rows, with all their numbers in one
            np.concatenate(
                [wide(side.reshape(math.prod(shape), -1)[:num_rows]) for side in sides], axis=1
            )
            for sides in zip(*tensors, strict=True)
        ]
        kept = np.isfinite(columns[0]).all(axis=1) & np.isfinite(columns[1]).all(axis=1)
        mask = pieces.row_mask(pairs[0].reference, shape)
        if mask is not None:
            kept &= mask[:num_rows]
        rows = [pieces.locate(pairs[0].reference, shape, row) for row in range(num_rows)]
        numbered = np.array([[-1 if n is None else n for n in row] for row in rows], float)
        beyond = [not some or usages.get((int(n), step), 0.0) > 1 for n in numbered[:, 0]]
        together = (*columns, numbered, np.array(beyond))
        parts.append(tuple(column[kept] for column in together))
    if len({part[0].shape[1] for part in parts}) != 1:
        return None
    side_a, side_b, base, where, off = (np.concatenate(each) for each in zip(*parts, strict=True))
    if not len(side_a) or np.array_equal(side_a, side_b):
        return None
    home = f"{first.block or module_of(unit.site)}."
    logits = next((r for r in a.records if r.site == manifest.plan.logits_site), None)
    ids = []
    for sample, position in where.astype(int).tolist():
        text = manifest.tokens.samples[sample] if sample >= 0 else None
        line = [] if text is None else [*text.prompt_ids, *text.generated_ids]
        ids.append(line[position] if 0 <= position < len(line) else -1)
    # of what an attention takes and gives, by head
    path, _, port = unit.site.partition(":")
    name, config = path.rpartition(".")[2], manifest.model.config
    heads = config.get("num_attention_heads", config.get("n_head"))
    if (name, port) in (("k_proj", "out"), ("v_proj", "out")):
        heads = config.get("num_key_value_heads", heads)
    heads = heads if (name, port) in _DIVIDED and isinstance(heads, int) else None
    return OnsetRows(
        site=unit.site,
        kind=first.kind or "",
        block=first.block,
        a=side_a,
        d=side_b - side_a,
        base=None if np.isnan(base).any() else base,
        prompt=where[:, 0],
        position=where[:, 1],
        beyond=off,
        tokens=np.array(ids),
        heads=heads,
        vocabulary=first.block is None
        and logits is not None
        and logits.shape[-1] == side_a.shape[1],
        parameters={
            name: note for name, note in manifest.model.parameters.items() if name.startswith(home)
        },
    )


_DIVIDED = {
    *((name, "out") for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")),
    *((name, "in") for name in ("o_proj", "out_proj")),
}
"""Where an attention's channels are heads, one after another."""


def layer_types_of(measured: Measured, blocks: Iterable[str]) -> dict[str, set[str]]:
    """The blocks of each type that the model's configuration lists; none where it lists none."""
    config = measured.reference.manifest.model.config
    listed = config.get("layer_types", config.get("text_config.layer_types"))
    kinds: dict[str, set[str]] = {}
    for block in blocks:
        number = block.rpartition(".")[2]
        if isinstance(listed, list) and number.isdigit() and int(number) < len(listed):
            kinds.setdefault(str(listed[int(number)]), set()).add(block)
    return kinds
