"""What relates two stored tensors: one search, in two tables of maps from A to B.

An arrangement says which number of A belongs to which of B: as they stand, turned, in another
shape, with rows added, or rows or columns in another order. Of all that are possible the one wins
in whose rows most are equal or alike, the plainest of several. Then the plainest map of values
that leaves no more than the rounding of both sides is told: a dtype, a rounding, a factor, one
constant, one vector, a low rank; else what the rest looks like: a grid, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from divergence.facts import Fact, fact
from divergence.numerics.formats import Format, format_named, format_of
from divergence.words import SIDES

_NARROWER = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_HEADS = (32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 16, 8)
"""Sizes of a head that rows may be put in another order within."""
_MOST_RANK = 64
_GROUPS = (256, 128, 64, 32, 16)
_GRIDS = (
    (2, None, 4, 8),
    (4, None, 16, 32),
    (None, "float4_e2m1", 3, 16),
    (None, "float8_e5m2", 5, 32),
    (None, "float8_e4m3", 9, 64),
    (8, None, 256, 512),
)
"""Bits, or a format of few bits; how many numbers (of a format, significands, and zero) a group
may have, and in how large a group so few are no accident."""
_UNRELATED = 0.2
"""Below this cosine two tensors have nothing in common: of independent ones of n numbers it is
about 1/sqrt(n); a quantisation to 2 bits keeps more than 0.8."""
_ALIKE, _SAME_SIZE = 0.8, 0.2
"""Cosine of rows that belong together, rounded or quantised; of one number, how far apart."""
ENOUGH = 0.1
"""The share of alike rows that tells an arrangement."""
_ROUNDINGS = 2.0
"""What is left may be so many times the squared error that storing both sides makes."""
_SURE = 4.0
"""Standard errors that a factor beside a quantisation is off by, at least."""
_FEW = 0.5
"""Up to this share of rows some were changed, and from it on all were."""
_SHOWN = 4
"""Places of these that are named."""
_SAMPLED = 64
"""Rows by which it is asked first whether rows are in another order."""
_TURNED = 0.99
"""The correlation of rows' products with one another from which a rotation kept them; of models
that were trained apart they go together far less."""
_RANKED = 16
"""Rows and columns of a matrix, at least, of which more is said than how far it is off."""
_AT_ONCE = 2**20
"""Numbers by which it is asked first what large tensors' difference is made of."""
_SHORT = 2.0**-14
_STRANGERS = ("unrelated", "nonfinite", "zeros", "constant", "codes", "shapes")
"""Relations of tensors that need not be one parameter's."""
_OF_ONE = "percent cosine moved total lost over num places of other least most".split()
"""Values of a relation that are one parameter's own."""


@dataclass(frozen=True, slots=True)
class Relation:
    """``name``: what kind; ``same``: does it hold the same weights, stored otherwise?"""

    name: str
    same: bool
    fact: Fact

    @property
    def kind(self) -> Fact:
        """The fact without what is one parameter's own."""
        values: dict[str, Any] = {name: None for name in _OF_ONE if name in self.fact.values}
        if isinstance(rest := self.fact["rest"], Fact):
            values["rest"] = Relation(self.name, self.same, rest).kind
        return self.fact.with_values(**values)

    @property
    def percent(self) -> float | None:
        """100 ‖A - B‖ / ‖A‖, where it is measured, of rows in one order."""
        rest = self.fact["rest"]
        percent: float | None = (rest if isinstance(rest, Fact) else self.fact)["percent"]
        return percent


def told(name: str, same: bool, **values: Any) -> Relation:
    """Return a relation whose fact has its name."""
    return Relation(name, same, fact(f"weights.{name}", **values))


def relation(a: torch.Tensor, b: torch.Tensor) -> Relation:
    """Return what relates two tensors of one parameter, any shapes and dtypes."""
    if a.shape != b.shape:
        return _reshaped(a, b)
    if a.ndim == 0 or _bits(a, b):
        return _values(a, b)
    x, y = (_wide(part).nan_to_num() for part in (a, b))
    if torch.equal(x, y):
        return _values(a, b)
    forms = [_form(tensor) for tensor in (a, b)]
    if forms[0] != forms[1]:  # in the form that holds less, what was rounded besides is equal
        narrow = max(forms, key=lambda form: form.unit_roundoff).torch_dtype
        x, y = (_wide(part.to(narrow)).nan_to_num() for part in (a, b))
    best, how = max(ENOUGH, _score(x, y)), None
    for name, values, arranged, axis in _arrangements(x, y):
        score = _score(arranged(x), y, axis)
        if score > best + 1e-6:
            best, how = score, (name, values, arranged)
        if best == 1:
            break
    if how is None:
        return _values(a, b)
    # whoever loads it takes it as it is: no shape tells of a square one that it was turned
    name, values, arranged = how
    return _with_rest(name, False, values, _values(arranged(a), b))


def _with_rest(name: str, same: bool, values: dict[str, Any], rest: Relation) -> Relation:
    return told(name, same, **values, rest=None if rest.name == "equal" else rest.fact)


def _reshaped(a: torch.Tensor, b: torch.Tensor) -> Relation:
    """Name the relation of two shapes: the other way round, flattened, or with more rows."""
    shapes: dict[str, Any] = {"reference": list(a.shape), "candidate": list(b.shape)}
    ways = [("transposed", a, b.mT)] if a.ndim in (2, 3) and a.mT.shape == b.shape else []
    ways += [("reshaped", a.reshape(b.shape), b)] if a.numel() == b.numel() else []
    for name, own, other in ways:
        rest = relation(own, other)
        if rest.name not in _STRANGERS and rest.fact["what"] != "numbers":
            return _with_rest(name, rest.same, shapes, rest)
    for what, axis in (("rows", 0), ("columns", -1)) if a.ndim == b.ndim else ():
        rest_a, rest_b = (
            shape[:axis] + shape[axis:][1:] for shape in map(tuple, (a.shape, b.shape))
        )
        least = min(a.shape[axis], b.shape[axis])
        if rest_a != rest_b or not least:
            continue
        rest = _values(*(part.narrow(axis, 0, least) for part in (a, b)))
        if rest.name in _STRANGERS:
            continue
        side, long = ("reference", a) if a.shape[axis] > least else ("candidate", b)
        more = long.narrow(axis, least, long.shape[axis] - least)
        values = {"side": side, "num": more.shape[axis], "rows": least, "what": what}
        zeros = not bool(more.any())
        return _with_rest("padded", zeros and rest.same, {**values, "zeros": zeros}, rest)
    return told("shapes", False, **shapes)


def alike(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Say of each row whether it may be the other's, rounded or quantised."""
    if x.ndim == 1:  # of one number a row
        return (x - y).abs() <= _SAME_SIZE * y.abs()
    x, y = x.reshape(len(x), -1), y.reshape(len(y), -1)
    products, own, other = (torch.einsum("ij,ij->i", *pair) for pair in ((x, y), (x, x), (y, y)))
    return (products > _ALIKE * (own * other).sqrt()) | ((own == 0) & (other == 0))


def row_digests(tensor: torch.Tensor) -> list[bytes]:
    """One of each row, of values and not of a dtype (-0 is 0)."""
    rows = (_wide(tensor) + 0.0).reshape(len(tensor), -1).contiguous().numpy()
    return [xxhash.xxh3_128_digest(row) for row in rows]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = (part.contiguous().reshape(-1).view(torch.uint8) for part in (a, b))
    return a.dtype == b.dtype and torch.equal(*bits)


def _score(x: torch.Tensor, y: torch.Tensor, axis: int = 0) -> float:
    """Return the share of rows that are equal; one that is alike counts a half."""
    x, y = x.movedim(axis, 0), y.movedim(axis, 0)
    return float(((x == y).reshape(len(x), -1).all(1).float() + alike(x, y).float()).mean()) / 2


def _arrangements(
    x: torch.Tensor, y: torch.Tensor
) -> Iterator[tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor], int]]:
    """Each order of A's numbers in one shape: its name and values, what makes it, and the axis
    along which it is to be held against B."""
    if x.ndim in (2, 3) and x.shape[-1] == x.shape[-2]:
        shape = list(x.shape)
        yield "transposed", {"reference": shape, "candidate": shape}, lambda t: t.mT, 0
    for what, axis in (("rows", 0), ("columns", 1))[: 2 if x.ndim == 2 else 1]:
        for order in _orders(x.movedim(axis, 0), y.movedim(axis, 0)):
            moved = int((order != torch.arange(len(order))).sum())
            values = {"what": what, "moved": moved, "total": len(order), **_named(order)}
            yield "reordered", values, partial(torch.index_select, dim=axis, index=order), axis


def _orders(x: torch.Tensor, y: torch.Tensor) -> Iterator[torch.Tensor]:
    """Orders of A's rows that B may have: each row of B at the place of the one row of A that it
    equals, or is most alike; of single numbers those of rotary tables too."""
    if _may_be_same_numbers(x, y):
        first, second = row_digests(x), row_digests(y)
        if sorted(first) == sorted(second):
            if len(set(first)) < len(first):  # of several orders that of a rotary table
                yield from (order for *_, order in _rotary_orders(len(x)))
            places: dict[bytes, list[int]] = {}
            for number, digest in enumerate(first):
                places.setdefault(digest, []).append(number)
            yield torch.tensor([places[digest].pop(0) for digest in second])
            return
    if x.ndim == 1:
        return
    some = torch.linspace(0, len(x) - 1, min(len(x), _SAMPLED)).long()
    astray = some[~alike(x[some], y[some])]
    if len(astray) and float(_cosines(y[astray], x).max(1).values.median()) < _ALIKE:
        return
    astray = (~alike(x, y)).nonzero().flatten()
    if not len(astray):
        return
    own = x[astray]
    order = torch.cat([_cosines(part, own).argmax(1) for part in y[astray].split(1024)])
    if len(order.unique()) == len(order):
        whole = torch.arange(len(x))
        whole[astray] = astray[order]
        yield whole


def _cosines(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of each row of the one to each of the other."""
    x, y = (torch.nn.functional.normalize(part.flatten(1), dim=1) for part in (x, y))
    return x @ y.T


def _may_be_same_numbers(x: torch.Tensor, y: torch.Tensor) -> bool:
    """In whatever order: what sums and squares tell, before anything is sorted."""
    sums = [float(part.sum(dtype=torch.float64)) for part in (x, y)]
    norms = [float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in (x, y)]
    return math.isclose(*norms, rel_tol=1e-9) and abs(sums[0] - sums[1]) <= 1e-9 * sum(norms)


def _named(order: torch.Tensor) -> dict[str, Any]:
    """Return how rows were put in that order: ``order[i]`` is A's number of B's row i. Within
    heads, pairs next to one another became two halves (rotary tables of two conventions), or halves
    pairs; or whole blocks of rows moved."""
    values: dict[str, Any] = dict.fromkeys(("to", "head", "turned", "blocks"))
    for head, size, to, rotary in _rotary_orders(len(order)):
        if torch.equal(order, rotary):
            return values | {"to": to, "head": head, "turned": size if size < head else 0}
    steps = (order[1:] != order[:-1] + 1).nonzero().flatten() + 1
    size = math.gcd(len(order), *steps.tolist())
    return values | ({"blocks": size} if size > 1 else {})


def _rotary_orders(num: int) -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """(size of a head, how many of its rows are turned, what became of them, their order) of rotary
    tables of two kinds: of whole heads, or of their first or last part."""
    for part in (1, 2, 4, 3):
        for head in _HEADS:
            size = head // part
            if num % head or head % part or size % 2 or size < 4:
                continue
            rows = torch.arange(num).view(-1, head)
            for first in (True, False) if part > 1 else (True,):
                own = rows[:, :size] if first else rows[:, head - size :]
                for to, turned in (
                    ("halves", own.reshape(-1, size // 2, 2).transpose(1, 2)),
                    ("pairs", own.reshape(-1, 2, size // 2).transpose(1, 2)),
                ):
                    kept = rows[:, size:] if first else rows[:, : head - size]
                    whole = [turned.reshape(-1, size), kept]
                    yield head, size, to, torch.cat(whole if first else whole[::-1], 1).reshape(-1)


# Values, of numbers that belong together.


def _values(a: torch.Tensor, b: torch.Tensor) -> Relation:
    """Return the plainest map of A's values to B's."""
    names = [format_of(tensor.dtype).name for tensor in (a, b)]
    if _bits(a, b):
        return told("equal", True)
    x, y = _wide(a), _wide(b)
    if bool(((x == y) | (x.isnan() & y.isnan())).all()):
        return told("dtype", True, reference=names[0], candidate=names[1])
    if not (a.is_floating_point() and b.is_floating_point()):
        return told("codes", False, num=int((a != b).sum()), total=a.numel())
    for side, wide, short, own in (("candidate", x, y, b), ("reference", y, x, a)):
        for form in _NARROWER:
            if torch.equal(wide.to(format_named(form).torch_dtype).to(wide.dtype), short):
                return _rounded(side, form, wide, short, own)
        cut_off = (wide.float().view(torch.int32) & -(1 << 16)).view(torch.float32)
        if torch.equal(cut_off.to(short.dtype), short):
            return told("cut_off", False, side=side)
    finite = [part.isfinite() for part in (x, y)]
    for side, (here, there) in zip(SIDES, (finite, finite[::-1]), strict=True):
        if num := int((there & ~here).sum()):
            return told("nonfinite", False, side=side, num=num)
    if not finite[0].all():  # the same places on both
        x, y = (part.masked_fill(~finite[0], 0) for part in (x, y))
    # of short formats float32 is wide enough to tell what rounding leaves
    if min(_form(part).unit_roundoff for part in (a, b)) < _SHORT:
        x, y = x.double(), y.double()
    for side, values, other in (("reference", x, y), ("candidate", y, x)):
        if not values.any():
            return told("zeros", False, side=side)
        value, there = values.flatten()[0], other.flatten()[0]
        if bool((values == value).all()) and not bool((other == there).all()):
            return told("constant", False, side=side, value=float(value))
    return _some(a, b, x, y) or _measured(a, b, x, y)


def _rounded(
    side: str, form: str, wide: torch.Tensor, short: torch.Tensor, own: torch.Tensor
) -> Relation:
    as_stored = form == format_of(own.dtype).name
    over, lost = (
        int(part.sum())
        for part in (~short.isfinite() & wide.isfinite(), (short == 0) & (wide != 0))
    )
    apart = float((wide.double() - short.double()).norm() / wide.double().norm())
    # below its smallest normal number a format rounds to more than its precision
    coarse = over > 0 or not apart <= format_named(form).unit_roundoff
    return told(
        "rounded",
        as_stored and not coarse,
        side=side,
        form=form,
        stored=as_stored,
        over=over or None,
        lost=lost if coarse and lost else None,
    )


def _some(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Relation | None:
    """Some rows, or columns, alone were changed: new tokens, a shard, an outlier."""
    rounds = _form(a) != _form(b)
    # rounding moves a number by u/sqrt(3) of itself at most
    rounding = _ROUNDINGS * sum(_form(own).unit_roundoff ** 2 / 3 for own in (a, b))
    for what, axis in (("rows", 0), ("columns", 1))[: 2 if x.ndim == 2 else x.ndim]:
        own, other = x.movedim(axis, 0), y.movedim(axis, 0)
        flat, there = own.reshape(len(own), -1), other.reshape(len(own), -1)
        left = rounding * there.square().sum(1) if rounds else torch.zeros(len(own))
        places = ((flat - there).square().sum(1) > left).nonzero().flatten()
        if not 0 < len(places) <= _FEW * len(own):
            continue
        parts = [part.index_select(axis, places) for part in (a, b, x, y)]
        empty = [side for side, part in zip(SIDES, parts[2:], strict=True) if not part.any()]
        rest = fact("weights.zeros", side=empty[0]) if empty else _measured(*parts).fact
        if rest.code == "weights.unrelated":
            numbers = {digest: number for number, digest in enumerate(row_digests(own))}
            again = [numbers.get(digest) for digest in row_digests(other[places])]
            if None not in again:
                rest = fact("weights.again", what=what, places=again[:_SHOWN], more=len(again) > 4)
        what = what if x.ndim > 1 else "numbers"
        values: dict[str, Any] = {"num": len(places), "of": len(own), "what": what}
        values |= {"places": places[:_SHOWN].tolist(), "more": len(places) > _SHOWN}
        return told("some", False, **values, rounded=rounds, rest=rest)
    return None


def _measured(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Relation:
    """Return what the difference is made of: the first map that leaves what rounding leaves."""
    apart = y - x
    norm, other, error = (float(part.norm()) for part in (x, y, apart))
    rounding = _ROUNDINGS * sum(
        (_form(own).unit_roundoff * size) ** 2 / 3 for own, size in ((a, norm), (b, other))
    )
    share = 100 * error / norm
    if x.ndim == 2 and x.numel() > 2 * _AT_ONCE:
        # what no map leaves of some rows, none leaves of all
        num = max(_SAMPLED, _AT_ONCE // x.shape[1])
        some = torch.linspace(0, len(x) - 1, min(num, len(x))).long()
        if _measured(*(part[some] for part in (a, b, x, y))).name == "near":
            return told("near", False, percent=share)
    if error**2 <= rounding:
        # no format holds both: other weights, if hardly
        return told("rounding", False, percent=share)
    cosine = float((x * y).sum()) / (norm * other)
    factor, constant = cosine * other / norm, float(apart.mean())
    digits = 4 * math.sqrt(rounding / x.numel())

    def maps() -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        yield "scaled", factor * x, {"factor": _shortest(factor, digits / norm)}
        steps = digits / math.sqrt(x.numel())
        yield "shifted", x + constant, {"constant": _shortest(constant, steps)}
        if x.ndim == 2 and min(x.shape) > _SHOWN:
            yield "one_vector", x + apart.mean(0), {"percent": share}
            for what, axis in (("row", 1), ("column", 0)):
                factors = ((x * y).sum(axis, True) / x.square().sum(axis, True)).nan_to_num()
                ends = {"least": float(factors.min()), "most": float(factors.max())}
                yield "scales", x * factors, {"what": what, **ends}

    for name, fitted, values in maps():
        if float((y - fitted).square().sum()) <= rounding:
            return told(name, False, **values)
    if _may_be_same_numbers(x, y) and torch.equal(*(p.flatten().sort().values for p in (x, y))):
        moved = {"what": "numbers", "moved": int((x != y).sum()), "total": x.numel()}
        return told("reordered", False, **moved)
    if abs(cosine) < _UNRELATED:
        # rows, or columns, that one orthogonal matrix turns keep their products with one another
        for what, sides in (("row", (x, y)), ("column", (x.mT, y.mT))) if x.ndim == 2 else ():
            num = min(len(sides[0]), _SAMPLED)
            above = torch.ones(num, num).triu(1) > 0
            products = torch.stack([(part[:num] @ part[:num].T)[above] for part in sides])
            if num >= _RANKED and float(products.corrcoef()[0, 1]) > _TURNED:
                return told("rotated", False, what=what)
        return told("unrelated", False, cosine=cosine)
    grids = ((side, _grid(own)) for side, own in (("candidate", y), ("reference", x)))
    grid = next(({"side": side, **grid} for side, grid in grids if grid), {})
    if not grid and (rank := _rank(apart, rounding)):
        return told("low_rank", False, rank=rank, percent=share)
    left = float((y - factor * x).norm()) / (abs(factor) * norm)
    # a quantiser's error may go with what it rounds, by its own share
    doubt = abs(factor) * (2 * left**2 + _SURE * left / math.sqrt(x.numel()))
    scaled = abs(factor - 1) > doubt
    share = 100 * left if scaled else share
    rest = told("quantised" if grid else "near", False, percent=share, **grid)
    return (
        told("scaled", False, factor=_shortest(factor, doubt), rest=rest.fact) if scaled else rest
    )


def _shortest(value: float, error: float) -> float:
    """The number of fewest digits that is no farther off than rounding may have moved it."""
    texts = (f"{value:.{digits}g}" for digits in range(1, 17))
    return next((float(text) for text in texts if abs(float(text) - value) <= error), value)


def _form(tensor: torch.Tensor) -> Format:
    """The narrowest of the usual formats that holds its values."""
    for form in map(format_named, ("bfloat16", "float16")):
        if torch.equal(tensor.to(form.torch_dtype).to(tensor.dtype), tensor):
            return form
    return format_of(tensor.dtype)


def _grid(x: torch.Tensor) -> dict[str, Any] | None:
    """Find groups along the rows of so few different numbers, or significands, that they were
    quantised: to how many bits or which format, in groups of what size (None: whole rows)."""
    if x.ndim < 2:
        return None
    size_of_row = x.shape[-1]
    rows = x.reshape(-1, size_of_row)[: max(1, 65_536 // size_of_row)]
    significands = rows.frexp().mantissa.abs()  # zero has one of its own
    for bits, form, most, least in _GRIDS:
        for size in (size_of_row, *(size for size in _GROUPS if size < size_of_row)):
            if size < least or size_of_row % size:
                continue  # of so few numbers it is no wonder
            ordered = (rows if form is None else significands).reshape(-1, size).sort(1).values
            counts = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
            if int(counts.max()) <= most:
                group = None if size == size_of_row else size
                return {"bits": bits, "form": form, "group": group}
    return None


def _rank(apart: torch.Tensor, rounding: float) -> int:
    """The rank of a difference, but for what rounding leaves; 0 where it is not low. By a random
    range (Halko, Martinsson and Tropp, SIAM Review 53, 2011, algorithm 4.4)."""
    if apart.ndim != 2 or min(apart.shape) < _RANKED:
        return 0
    most = min(_MOST_RANK, min(apart.shape) // 4)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(apart.shape[1], most + 8, generator=generator, dtype=apart.dtype)
    base = torch.linalg.qr(apart @ probe).Q
    base = torch.linalg.qr(apart @ (apart.T @ base)).Q
    sizes = torch.linalg.svdvals(base.T @ apart).square()
    left = float(apart.square().sum()) - sizes.cumsum(0)
    enough = (left[:most] <= rounding).nonzero().flatten()
    return int(enough[0]) + 1 if len(enough) else 0
