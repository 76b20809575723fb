"""A forward's calls for the precision audit: who feeds whom, and which part each belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from divergence.comparison.calls.graph import CallNode
from divergence.comparison.results import Part
from divergence.numerics.formats import format_named
from divergence.run.record import Operand

__all__ = [
    "SOFTMAX", "Calls", "PartOperators", "accumulates", "bare", "is_attention", "is_float",
    "is_product",
]  # fmt: skip

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "matmul",
                       "linear", "einsum", "convolution", "_convolution"})  # fmt: skip
SOFTMAX = frozenset({"_softmax", "_safe_softmax", "_log_softmax", "softmax"})
_INSIDE = frozenset({"mean", "sum", "var", "var_mean", "std", "std_mean", "linalg_vector_norm",
                     "norm", "cumsum"}) | SOFTMAX  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartOperators:
    """A part, its operators in execution order. ``root``: the one it is known by. ``kernel``: one
    kernel did it all. ``near``: paths of the casts that feed it and of what takes its results:
    where a fault of the part may first be seen."""

    part: Part
    nodes: tuple[CallNode, ...]
    root: CallNode
    kernel: bool = False
    near: tuple[str, ...] = ()


def is_product(node: CallNode) -> bool:
    """A matrix product of any name: also ``_grouped_mm``, ``_scaled_mm``, a vendor's."""
    name = bare(node)
    return name in _PRODUCTS or name.endswith("_mm") or "matmul" in name or "_mm_" in name


def bare(node: CallNode) -> str:
    """``mm`` of ``aten.mm``."""
    return node.name.rpartition(".")[2]


def accumulates(node: CallNode) -> bool:
    """Does it add up inside its kernel, in a dtype that no record shows?"""
    return bare(node) in _INSIDE or is_product(node)


def is_float(node: CallNode) -> bool:
    """Is its first result floating-point or complex?"""
    return format_named(node.results[0].dtype).kind in ("float", "complex")


def is_attention(node: CallNode) -> bool:
    """An attention kernel: all of it in one operator."""
    name = bare(node)
    return "attention" in name or "flash_attn" in node.name


class Calls:
    """The calls, who feeds whom, and what was found so far."""

    def __init__(self, nodes: list[CallNode], blocks: set[str], logits: str | None) -> None:
        self.nodes, self.blocks, self.logits = nodes, blocks, logits
        self.by_path = {node.path: node for node in nodes}
        self.eaters: dict[str, list[CallNode]] = {}
        for node in nodes:
            for path in node.feeds:
                self.eaters.setdefault(path, []).append(node)
        self.found: list[PartOperators] = []
        self._claimed: set[str] = set()

    def free(self, node: CallNode) -> bool:
        return node.path not in self._claimed

    def add(
        self, part: Part, nodes: Iterable[CallNode], root: CallNode, *, kernel: bool = False
    ) -> None:
        kept = tuple(sorted(nodes, key=lambda node: node.order))
        self._claimed.update(node.path for node in kept)
        casts = [n for call in kept for n in self.feeders(call) if n.is_cast]
        takers = [n for call in kept for n in self.eaters.get(call.path, [])]
        near = tuple(dict.fromkeys(node.path for node in (*casts, *takers)))
        self.found.append(PartOperators(part, kept, root, kernel, near))

    def feeders(self, node: CallNode) -> list[CallNode]:
        return [self.by_path[path] for path in node.feeds]

    def maker(self, operand: Operand) -> CallNode | None:
        """The call whose result, or a view of it, the operand is."""
        for site in (operand.site, operand.origin):
            path, _, port = (site or "").rpartition(":")
            if port.startswith("out") and path in self.by_path:
                return self.by_path[path]
        return None

    def back(
        self, start: CallNode, through: Callable[[CallNode], bool]
    ) -> tuple[list[CallNode], list[CallNode]]:
        """(what leads to ``start`` through such nodes and casts, where that ends)."""
        inside: dict[str, CallNode] = {}
        ends: dict[str, CallNode] = {}
        ahead = self.feeders(start)
        while ahead:
            node = ahead.pop()
            if node.path in inside or node.path in ends:
                continue
            if is_float(node) and (node.is_cast or through(node)):
                inside[node.path] = node
                ahead += self.feeders(node)
            else:
                ends[node.path] = node
        return list(inside.values()), list(ends.values())

    def leads_from_product(self, node: CallNode | None) -> bool:
        """Did a matrix product lead to it?"""
        ahead, seen = [node] if node is not None else [], set()
        while ahead:
            current = ahead.pop()
            if current.path in seen:
                continue
            seen.add(current.path)
            if is_product(current) or is_attention(current):
                return True
            ahead += self.feeders(current)
        return False
