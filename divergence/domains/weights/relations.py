"""The relations of two stored tensors, as exactly as their values tell.

The first relation that holds is the one that is told, from exact ones (equal values, a rounding,
another order of rows, a transpose) to those that are measured: one factor, one constant, a low
rank, a grid. A relation that is measured leaves no more than the two dtypes' own rounding makes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from divergence.facts import Fact, fact
from divergence.numerics.formats import Format, format_named, format_of

_NARROWER = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_HEADS = (32, 40, 48, 56, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 16, 8)
"""Sizes of a head that rows may be put in another order within."""
_MOST_RANK = 64
_GROUPS = (256, 128, 64, 32, 16)
_FLOATS = (("float4_e2m1", 2, 16), ("float8_e5m2", 4, 32), ("float8_e4m3", 8, 64))
"""Formats of few bits: how many significands their numbers times a scale may have, and in how
large a group so few are no accident."""
_UNRELATED = 0.2
"""Below this cosine two tensors have nothing in common: of independent ones of n numbers it is
about 1/sqrt(n); a quantisation to 2 bits keeps more than 0.8."""
_ALIKE = 0.8
"""Above it rows in another order are that, and rounded or quantised besides."""
_ROUNDINGS = 2.0
"""What is left may be so many times the squared error that storing both sides makes."""


_FEW = 0.5
"""Up to this share of rows some were changed, and from it on all were."""
_SHOWN = 4
"""Places of these that are named."""
_SAMPLED = 64
"""Rows by which it is asked first whether rows are in another order."""


_STRANGERS = ("unrelated", "nonfinite", "zeros", "codes")
"""Relations of tensors that need not be one parameter's."""
_OF_ONE = ("percent", "cosine", "moved", "total", "lost", "over", "num", "places", "of", "other")
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


def relation(a: torch.Tensor, b: torch.Tensor) -> Relation:
    """Return what relates two tensors of one parameter, any shapes and dtypes."""
    if a.shape != b.shape:
        return _shape_relation(a, b)
    names = [format_of(tensor.dtype).name for tensor in (a, b)]
    if a.dtype == b.dtype and _bits(a, b):
        return Relation("equal", True, fact("weights.equal"))
    if not (a.is_floating_point() and b.is_floating_point()):
        num = int((a != b).sum())
        return Relation("codes", False, fact("weights.codes", num=num, total=a.numel()))
    x, y = _wide(a), _wide(b)
    if torch.equal(x, y):
        return Relation(
            "dtype", True, fact("weights.dtype", reference=names[0], candidate=names[1])
        )
    for side, wide, short, own in (("candidate", x, y, b), ("reference", y, x, a)):
        for form in _NARROWER:
            if torch.equal(wide.to(format_named(form).torch_dtype).to(wide.dtype), short):
                as_stored = form == format_of(own.dtype).name
                over, lost = (
                    int(part.sum())
                    for part in (~short.isfinite() & wide.isfinite(), (short == 0) & (wide != 0))
                )
                apart = float((wide.double() - short.double()).norm() / wide.double().norm())
                # below its smallest normal number a format rounds to more than its precision
                coarse = over > 0 or not apart <= format_named(form).unit_roundoff
                how = fact(
                    "weights.rounded",
                    side=side,
                    form=form,
                    stored=as_stored,
                    over=over or None,
                    lost=lost if coarse and lost else None,
                )
                return Relation("rounded", as_stored and not coarse, how)
    for side, values in (("reference", x), ("candidate", y)):
        if num := int((~values.isfinite()).sum()):
            return Relation("nonfinite", False, fact("weights.nonfinite", side=side, num=num))
        if not values.any():
            return Relation("zeros", False, fact("weights.zeros", side=side))
    if moved := _reordered(x, y):
        return moved
    forms = [_form(tensor) for tensor in (a, b)]
    if forms[0] != forms[1]:  # one side was rounded as well
        narrow = max(forms, key=lambda form: form.unit_roundoff)
        rounded = [part.to(narrow.torch_dtype).to(part.dtype) for part in (x, y)]
        if moved := _reordered(*rounded):
            side = "reference" if narrow == forms[0] else "candidate"
            rest = fact("weights.rounded", side=side, form=narrow.name, stored=True)
            return Relation("reordered", False, moved.fact.with_values(rest=rest))
    return _few_rows(a, b, x, y) or _measured(a, b, x, y)


def _few_rows(
    a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> Relation | None:
    """Some rows, or columns, alone were changed: new tokens, a shard, an outlier."""
    for what, own, other in (("rows", x, y), ("columns", x.T, y.T)) if x.ndim == 2 else ():
        places = (own != other).any(1).nonzero().flatten()
        if 0 < len(places) <= _FEW * len(own):
            flip = what == "columns"
            parts = [part.T[places] if flip else part[places] for part in (a, b, x, y)]
            rest = _measured(*parts) if parts[2].any() and parts[3].any() else None
            values: dict[str, Any] = {"num": len(places), "of": len(own), "what": what}
            values |= {"places": places[:_SHOWN].tolist(), "more": len(places) > _SHOWN}
            how = fact("weights.some", **values, rest=None if rest is None else rest.fact)
            return Relation("some", False, how)
    return None


def row_digests(tensor: torch.Tensor) -> list[bytes]:
    """One of each row, of values and not of a dtype (-0 is 0)."""
    rows = (_wide(tensor) + 0.0).reshape(len(tensor), -1).contiguous().numpy()
    return [xxhash.xxh3_128_digest(row) for row in rows]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(part.contiguous().reshape(-1).view(torch.uint8) for part in (a, b)))


def _shape_relation(a: torch.Tensor, b: torch.Tensor) -> Relation:
    """Name the relation of two shapes: the other way round, flattened, or with more rows."""
    shapes: dict[str, Any] = {"reference": list(a.shape), "candidate": list(b.shape)}
    x, y = _wide(a), _wide(b)
    if x.ndim == y.ndim == 2 and x.shape == y.T.shape:
        turned = relation(a, b.T)
        if turned.name not in _STRANGERS:
            shapes["rest"] = None if turned.name == "equal" else turned.fact
            return Relation("transposed", turned.same, fact("weights.transposed", **shapes))
    if x.numel() == y.numel() and torch.equal(x.reshape(-1), y.reshape(-1)):
        return Relation("reshaped", True, fact("weights.reshaped", **shapes))
    if x.ndim and x.ndim == y.ndim and x.shape[1:] == y.shape[1:]:
        common = min(len(x), len(y))
        if torch.equal(x[:common], y[:common]):
            side, rest = ("reference", x[common:]) if len(x) > common else ("candidate", y[common:])
            zeros = not bool(rest.any())
            how = fact("weights.padded", side=side, num=len(rest), rows=common, zeros=zeros)
            return Relation("padded", bool(how["zeros"]), how)
    return Relation("shapes", False, fact("weights.shapes", **shapes))


def _reordered(x: torch.Tensor, y: torch.Tensor) -> Relation | None:
    """The same rows, or columns, in another order."""
    if x.ndim == 2 and x.shape[0] == x.shape[1] and torch.equal(x.T, y):
        shapes: dict[str, Any] = {"reference": list(x.shape), "candidate": list(y.shape)}
        # whoever loads it takes it as it is: no shape tells that it was turned
        return Relation("transposed", False, fact("weights.transposed", **shapes, rest=None))
    axes = [("rows", x, y)]
    if x.ndim == 2:
        axes.append(("columns", x.T, y.T))
    for what, own, other in axes:
        first, second = row_digests(own), row_digests(other)
        if Counter(first) != Counter(second):
            continue
        places = {digest: number for number, digest in enumerate(first)}
        order = torch.tensor([places[digest] for digest in second])
        moved = int((order != torch.arange(len(order))).sum())
        values: dict[str, Any] = {"what": what, "moved": moved, "total": len(order)}
        if len(places) == len(first):  # no two alike
            values |= _order(order)
        how = _PLAIN_ORDER | values
        return Relation("reordered", False, fact("weights.reordered", **how))
    return None


_PLAIN_ORDER = dict.fromkeys(("to", "head", "turned", "blocks", "rest"))


def _order(order: torch.Tensor) -> dict[str, Any]:
    """Return how rows were put in that order: ``order[i]`` is A's number of B's row i. Within
    heads, pairs next to one another became two halves (rotary tables of two conventions), or halves
    pairs; or whole blocks of rows moved."""
    for head, size, to, rotary in _rotary_orders(len(order)):
        if torch.equal(order, rotary):
            return {"to": to, "head": head, "turned": size if size < head else 0}
    steps = (order[1:] != order[:-1] + 1).nonzero().flatten() + 1
    size = math.gcd(len(order), *steps.tolist())
    return {"blocks": size} if size > 1 else {}


def _rotary_orders(num: int) -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """(size of a head, how many of its rows are turned, what became of them, their order) of rotary
    tables of two kinds: of whole heads, or of their first or last part."""
    for part in (1, 2, 4, 3):
        for head in _HEADS:
            size = head // part
            if num % head or head % part or size % 2:
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


def _matching_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """The order of A's rows in which each is nearly B's; None where some rows have none."""
    x, y = (part / part.norm(dim=1, keepdim=True).clamp_min(1e-30) for part in (x, y))
    some = torch.linspace(0, len(y) - 1, min(len(y), _SAMPLED)).long()
    if float((y[some] @ x.T).max(1).values.median()) < _ALIKE:
        return None
    order = torch.cat([(part @ x.T).argmax(1) for part in y.split(1024)])
    return order if len(order.unique()) == len(x) else None


def _measured(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Relation:
    """Return what the difference is made of."""
    x, y = x.double(), y.double()
    apart = y - x
    norm, other, error = (float(part.norm()) for part in (x, y, apart))
    # squared error of storing both: rounding moves a number by u/sqrt(3) of itself at most
    rounding = _ROUNDINGS * sum(
        (_form(own).unit_roundoff * own.double().norm()) ** 2 / 3 for own in (a, b)
    )
    factor = float((x * y).sum()) / norm**2
    cosine = factor * norm / other
    share = 100 * error / norm
    if float((y - factor * x).square().sum()) <= rounding < error**2:
        factor = _shortest(factor, 4 * math.sqrt(rounding / x.numel()) / norm)
        return Relation("scaled", False, fact("weights.scaled", factor=factor))
    constant = float(apart.mean())
    if float((apart - constant).square().sum()) <= rounding < error**2:
        constant = _shortest(constant, 4 * math.sqrt(rounding) / x.numel())
        return Relation("shifted", False, fact("weights.shifted", constant=constant))
    if error**2 <= rounding:
        # no format holds both: other weights, if hardly
        return Relation("rounding", False, fact("weights.rounding", percent=share))
    is_square = x.ndim == 2 and x.shape[0] == x.shape[1] and cosine < _ALIKE
    if is_square and float((x.T * y).sum()) > _ALIKE * norm * other:
        kept = _measured(a.T, b, x.T, y).fact
        shape = list(x.shape)
        how = fact("weights.transposed", reference=shape, candidate=shape, rest=kept)
        return Relation("transposed", False, how)
    if x.ndim == 2 and cosine < _ALIKE:
        for what, own, there in (("rows", x, y), ("columns", x.T, y.T)):
            order = _matching_rows(own, there)
            moved = 0 if order is None else int((order != torch.arange(len(order))).sum())
            if order is None or not moved:
                continue
            turned = [part[order] if what == "rows" else part[:, order] for part in (a, x)]
            shown: dict[str, Any] = {**_PLAIN_ORDER, "what": what, "moved": moved}
            shown |= {"total": len(order), **_order(order)}
            shown["rest"] = _measured(turned[0], b, turned[1], y).fact
            return Relation("reordered", False, fact("weights.reordered", **shown))
    if abs(cosine) < _UNRELATED:
        return Relation("unrelated", False, fact("weights.unrelated", cosine=cosine))
    if (
        x.ndim == 2
        and len(x) > _SHOWN
        and float((apart - apart.mean(0)).square().sum()) <= rounding
    ):
        return Relation("one_vector", False, fact("weights.one_vector", percent=share))
    for side, values in (("candidate", y), ("reference", x)):
        if grid := _grid(values):
            how = fact("weights.quantised", side=side, percent=share, **grid)
            return Relation("quantised", False, how)
    if rank := _rank(apart, rounding):
        return Relation("low_rank", False, fact("weights.low_rank", rank=rank, percent=share))
    return Relation("near", False, fact("weights.near", percent=share))


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
    if x.ndim != 2:
        return None
    rows = x[: max(1, 65_536 // x.shape[1])]
    numbers = [(bits, rows, 2**bits, 2 * 2**bits) for bits in (2, 4)]
    significands = rows.frexp().mantissa.abs()  # zero has one of its own
    floats = [(form, significands, 1 + most, least) for form, most, least in _FLOATS]
    for what, values, most, least in (*numbers, *floats, (8, rows, 256, 512)):
        for size in (x.shape[1], *(size for size in _GROUPS if size < x.shape[1])):
            if size < least or x.shape[1] % size:
                continue  # of so few numbers it is no wonder
            ordered = values.reshape(-1, size).sort(1).values
            counts = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
            if int(counts.max()) <= most:
                group = None if size == x.shape[1] else size
                is_form = isinstance(what, str)
                return {
                    "bits": None if is_form else what,
                    "form": what if is_form else None,
                    "group": group,
                }
    return None


def _rank(apart: torch.Tensor, rounding: float) -> int:
    """The rank of a difference, but for what rounding leaves; 0 where it is not low. By a random
    range (Halko, Martinsson and Tropp, SIAM Review 53, 2011, algorithm 4.4)."""
    if apart.ndim != 2 or min(apart.shape) < 16:
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
