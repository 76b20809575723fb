"""The parts of a model, recognised in one forward's operators by what they compute.

From the graph, not from names: a norm's statistics are what stands between a reduction and the
``rsqrt`` it ends in; a softmax is the kernel or exp over its sum; scores are what a softmax takes,
back to the matrix product; a router is what a ``topk`` chooses by, back to a product with a
weight; rotary is the sum of two products of which one saw its input turned; a residual add is
an add of the block's stream to what a matrix product inside the block led to. Names tell
only fused kernels and activations, a file's name only a cache. Each operator belongs
to one part at most: the first in that order.
"""

from __future__ import annotations

from divergence.analyses.precision.graph import (
    SOFTMAX,
    Calls,
    PartOperators,
    bare,
    is_attention,
    is_float,
    is_product,
)
from divergence.comparison.calls.graph import CallNode
from divergence.numerics.formats import format_named
from divergence.run.record import Operand

__all__ = ["find_norms", "find_parts", "is_norm_kernel"]

_ON_SCORES = frozenset({"add", "sub", "mul", "div", "masked_fill", "where", "tanh", "clamp", "cat",
                        "clone", "maximum", "index", "slice_scatter"})  # fmt: skip
_ON_ROUTES = SOFTMAX | {"sigmoid", "add", "sub", "mul", "div", "sum", "gather", "masked_fill",
                         "where", "clamp", "clamp_min", "topk", "softplus", "sqrt", "tanh",
                         "amax", "max", "exp"}  # fmt: skip
_ACTIVATIONS = frozenset({"silu", "gelu", "relu", "relu6", "leaky_relu", "elu", "tanh", "sigmoid",
                          "softplus", "mish", "hardswish", "hardsigmoid", "_glu", "glu",
                          "swiglu"})  # fmt: skip


def find_parts(
    nodes: list[CallNode], blocks: set[str], logits: str | None = None
) -> list[PartOperators]:
    """Every part in one forward's calls. ``blocks``: module paths of the repeated blocks;
    ``logits``: that of what makes the logits."""
    graph = Calls(nodes, blocks, logits)
    for find in (_routers, _fused, find_norms, _softmaxes, _rotary, _residuals, _caches, _rest):
        find(graph)
    return graph.found


def _routers(graph: Calls) -> None:
    for top in graph.nodes:
        if bare(top) not in ("topk", "sort", "argmax") or not graph.free(top):
            continue
        if not top.call.operands or format_named(top.call.operands[0].dtype).kind != "float":
            continue  # tokens sorted by expert
        inside, ends = graph.back(top, lambda node: bare(node) in _ON_ROUTES)
        products = [node for node in ends if is_product(node)]
        if not any(_takes_weight(graph, node) for node in products):
            continue  # an indexer's scores, a sampler's
        after: list[CallNode] = []
        own = {top.path, *(node.path for node in inside)}
        for node in graph.nodes:  # the weights of those chosen, normalised: no casts, no experts
            fed = any(path in own for path in node.feeds)
            same = node.module == top.module and node.order > top.order
            if same and fed and is_float(node) and bare(node) in _ON_ROUTES:
                after.append(node)
                own.add(node.path)
        chain = [node for node in (*inside, *after) if graph.free(node)]
        scored = next(
            (n for n in inside if bare(n) in ("_softmax", "sigmoid", "_safe_softmax")), top
        )
        chain += [top] if is_float(top) else []
        graph.add("router", chain, scored)
        for node in products:
            if graph.free(node):
                graph.add("router product", [node], node)


def _takes_weight(graph: Calls, node: CallNode) -> bool:
    for operand in node.call.operands:
        maker = graph.maker(operand)
        cast = maker.call.operands if maker is not None and maker.is_cast else []
        if operand.weight or (cast and cast[0].weight):
            return True
    return False


def _fused(graph: Calls) -> None:
    for node in graph.nodes:
        name = bare(node)
        if not graph.free(node) or not is_float(node):
            continue
        if is_attention(node):
            graph.add("softmax", [node], node, kernel=True)
            graph.add("attention scores", [node], node, kernel=True)
        elif is_norm_kernel(node):
            graph.add("norm statistics", [node], node, kernel=True)
            if "add" in name:
                graph.add("residual add", [node], node, kernel=True)
        elif "rotary" in name or "rope" in name:
            graph.add("rotary", [node], node, kernel=True)


def _softmaxes(graph: Calls) -> None:
    for root in graph.nodes:
        if not graph.free(root) or not is_float(root):
            continue
        if bare(root) in SOFTMAX or "softmax" in bare(root):
            chain = [root]
        else:
            chain = _written_out(graph, root)
        if not chain:
            continue
        first = chain[0]
        inside, ends = graph.back(first, lambda node: bare(node) in _ON_SCORES)
        # the cast before it is the softmax's own: in which dtype it is given its scores
        graph.add("softmax", chain, root)
        products = [node for node in ends if is_product(node) and graph.free(node)]
        if products:
            scores = [n for n in inside if graph.free(n) and not n.is_cast]
            graph.add("attention scores", [*products, *scores], products[0])


def _written_out(graph: Calls, root: CallNode) -> list[CallNode]:
    """exp(x - max) over its sum, as separate operators; empty where ``root`` does not end one."""
    if bare(root) not in ("div", "mul") or len(root.call.operands) != 2:
        return []
    top, under = (graph.maker(operand) for operand in root.call.operands)
    while top is not None and top.is_cast:
        top = next(iter(graph.feeders(top)), None)
    if top is None or under is None or bare(top) != "exp":
        return []
    inside, _ = graph.back(root, lambda node: bare(node) in ("sum", "reciprocal", "add"))
    sums = [node for node in inside if bare(node) == "sum"]
    if not any(
        top in graph.feeders(cast) for total in sums for cast in (total, *graph.feeders(total))
    ):
        return []
    before = [n for n in graph.feeders(top) if bare(n) == "sub" and graph.free(n)]
    return sorted([*before, top, *inside, root], key=lambda node: node.order)


def _rotary(graph: Calls) -> None:
    for root in graph.nodes:
        if not graph.free(root) or not is_float(root):
            continue
        if bare(root) in ("cos", "sin"):
            graph.add("rotary table", [root], root)
        elif bare(root) == "mul" and format_named(root.results[0].dtype).kind == "complex":
            graph.add("rotary", [root], root)
        elif bare(root) == "add":
            sides = [n for n in graph.feeders(root) if bare(n) == "mul"]
            if len(sides) == 2 and any(_is_turned(graph, side) for side in sides):
                graph.add("rotary", [n for n in (*sides, root) if graph.free(n)], root)
        elif bare(root) in ("cat", "stack"):
            halves = _halves(graph, root)
            if halves:
                graph.add("rotary", [n for n in halves if graph.free(n)], halves[-1])


def _halves(graph: Calls, root: CallNode) -> list[CallNode]:
    """x cos - y sin beside y cos + x sin: the same four factors twice."""
    halves: dict[str, list[CallNode]] = {}
    for half in graph.feeders(root):
        products = [node for node in graph.feeders(half) if bare(node) == "mul"]
        if bare(half) in ("sub", "add") and len(products) == 2:
            halves[bare(half)] = [*products, half]
    if len(halves) != 2:
        return []
    factors = [
        {operand.site for node in nodes[:2] for operand in node.call.operands}
        for nodes in halves.values()
    ]
    return [*halves["sub"], *halves["add"]] if factors[0] == factors[1] else []


def _is_turned(graph: Calls, node: CallNode) -> bool:
    """One factor is its input turned: halves or pairs swapped, one of them negated."""
    for factor in graph.feeders(node):
        parts = graph.feeders(factor)
        if bare(factor) in ("cat", "stack") and any(bare(part) == "neg" for part in parts):
            return True
    return False


def _residuals(graph: Calls) -> None:
    stream: set[str] = set()

    def of_stream(operand: Operand) -> bool:
        maker = graph.maker(operand)
        return operand.weight is None and (maker is None or maker.path in stream)

    for node in graph.nodes:
        operands = node.call.operands
        if is_norm_kernel(node) or node.is_cast or bare(node) == "clone":
            if operands and of_stream(operands[0]):
                stream.add(node.path)
            continue
        if not graph.free(node) or bare(node) != "add" or not is_float(node):
            continue
        inside = any(node.module == b or node.module.startswith(f"{b}.") for b in graph.blocks)
        alike = len(operands) == 2 and all(o.shape == node.results[0].shape for o in operands)
        if not inside or not alike:
            continue
        carried = [of_stream(operand) for operand in operands]
        made = [graph.leads_from_product(graph.maker(operand)) for operand in operands]
        if (carried[0] and made[1]) or (carried[1] and made[0]):
            graph.add("residual add", [node], node)
            stream.add(node.path)


def _caches(graph: Calls) -> None:
    for node in graph.nodes:
        if not graph.free(node) or not is_float(node):
            continue
        file = (node.call.source or "").partition(":")[0]
        writes = bare(node) in ("cat", "index_copy", "copy", "index_put", "slice_scatter")
        if "cache" in bare(node) or ("cache" in file and writes):
            graph.add("kv cache", [node], node)


def _rest(graph: Calls) -> None:
    for node in graph.nodes:
        if not graph.free(node) or not is_float(node):
            continue
        if is_product(node):
            made = node.module == graph.logits or node.module.rpartition(".")[2] == "lm_head"
            graph.add("logits" if made else "matrix product", [node], node)
        elif bare(node) in _ACTIVATIONS:
            graph.add("activation", [node], node)


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


def _between(graph: Calls, root: CallNode) -> list[CallNode]:
    """Of what leads to the root, the reductions, what follows them, and the squares and casts that
    they take: not what made the norm's input."""

    def belongs(node: CallNode) -> bool:
        return node.module == root.module and (bare(node) in _STATISTICS or node.is_cast)

    leading, _ = graph.back(root, belongs)
    known = {node.path for node in leading if node.module == root.module}
    kept: dict[str, CallNode] = {}

    def visit(node: CallNode, reduced: bool) -> None:
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


def _may_be_reduced(node: CallNode) -> bool:
    """A square, a difference from the mean, or a mean."""
    if bare(node) == "mul":
        return _is_square(node)
    return bare(node) in ("pow", "square", "sub") or bare(node) in _REDUCTIONS


def _is_square(node: CallNode) -> bool:
    operands = node.call.operands
    return len(operands) == 2 and operands[0].site == operands[1].site


def _is_inverse(node: CallNode) -> bool:
    """x ** -0.5"""
    return bare(node) == "pow" and node.call.arguments.get("exponent") == -0.5


def _norm_weight(graph: Calls, root: CallNode) -> None:
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


def _of_weights(graph: Calls, node: CallNode) -> bool:
    """Made of weights and constants alone, in one module: ``1 + weight.float()``."""
    ahead = [node]
    while ahead:
        current = ahead.pop()
        if current.module != node.module or not current.call.operands:
            return False
        for operand in current.call.operands:
            if operand.weight is None:
                maker = graph.maker(operand)
                if maker is None:
                    return False
                ahead.append(maker)
    return True


def is_norm_kernel(node: CallNode) -> bool:
    """A fused norm: in a post-norm block the stream goes through it."""
    return "norm" in bare(node) and bare(node) not in _REDUCTIONS
