"""Norms among a forward's calls: their statistics, and the product with their weight."""

from __future__ import annotations

from divergence.analyses.precision.graph import Calls, bare, is_float
from divergence.comparison.calls.graph import Node

__all__ = ["find_norms", "is_norm_kernel"]

_REDUCTIONS = frozenset({"mean", "sum", "var", "var_mean", "std", "std_mean",
                         "linalg_vector_norm", "norm"})  # fmt: skip
_STATISTICS = _REDUCTIONS | {"pow", "square", "mul", "sub", "add", "clamp", "clamp_min", "div",
                             "maximum"}  # fmt: skip


def find_norms(graph: Calls) -> None:
    """From the square to the root, in any spelling; x * x is one, and a mean under a mean too."""
    roots = [node for node in graph.nodes if bare(node) in ("rsqrt", "sqrt") or _is_inverse(node)]
    alone = [node for node in graph.nodes if bare(node) in ("var", "var_mean", "std", "std_mean")]
    for root in (*roots, *alone):
        if not graph.free(root):
            continue
        inside = [node for node in _between(graph, root) if graph.free(node)]
        if not any(bare(node) in _REDUCTIONS for node in (root, *inside)):
            continue
        after = [n for n in graph.eaters.get(root.path, []) if n.is_cast and graph.free(n)]
        graph.add("norm statistics", [*inside, root, *after], root)
        _norm_weight(graph, root)


def _between(graph: Calls, root: Node) -> list[Node]:
    """Of what leads to the root, the reductions, what follows them, and the squares and casts that
    they take: not what made the norm's input."""

    def belongs(node: Node) -> bool:
        return node.module == root.module and (bare(node) in _STATISTICS or node.is_cast)

    leading, _ = graph.back(root, belongs)
    known = {node.path for node in leading if node.module == root.module}
    kept: dict[str, Node] = {}

    def visit(node: Node, reduced: bool) -> None:
        for feeder in graph.feeders(node):
            if feeder.path not in known or feeder.path in kept:
                continue
            if reduced and not (feeder.is_cast or _may_be_reduced(feeder)):
                continue
            kept[feeder.path] = feeder
            if not (reduced and feeder.is_cast):  # what it casts is the norm's input
                visit(feeder, reduced or bare(feeder) in _REDUCTIONS)

    visit(root, bare(root) in _REDUCTIONS)
    return list(kept.values())


def _may_be_reduced(node: Node) -> bool:
    """A square, a difference from the mean, or a mean."""
    if bare(node) == "mul":
        return _is_square(node)
    return bare(node) in ("pow", "square", "sub") or bare(node) in _REDUCTIONS


def _is_square(node: Node) -> bool:
    operands = node.call.operands
    return len(operands) == 2 and operands[0].site == operands[1].site


def _is_inverse(node: Node) -> bool:
    """x ** -0.5"""
    return bare(node) == "pow" and node.call.arguments.get("exponent") == -0.5


def _norm_weight(graph: Calls, root: Node) -> None:
    """The product with the norm's weight: after the root, in the same module."""
    for node in graph.nodes:
        near = node.module == root.module and node.order > root.order
        if near and graph.free(node) and bare(node) == "mul" and is_float(node):
            makers = [graph.maker(operand) for operand in node.call.operands]
            weighted = any(operand.weight for operand in node.call.operands) or any(
                maker is not None and _of_weights(graph, maker) for maker in makers
            )
            if weighted:
                graph.add("norm weight", [node], node)


def _of_weights(graph: Calls, node: Node) -> bool:
    """Made of weights and constants alone, in one module: ``1 + weight.float()``."""
    ahead = [node]
    while ahead:
        one = ahead.pop()
        if one.module != node.module or not one.call.operands:
            return False
        for operand in one.call.operands:
            if operand.weight is None:
                maker = graph.maker(operand)
                if maker is None:
                    return False
                ahead.append(maker)
    return True


def is_norm_kernel(node: Node) -> bool:
    """A fused norm: in a post-norm block the stream goes through it."""
    return "norm" in bare(node) and bare(node) not in _REDUCTIONS
