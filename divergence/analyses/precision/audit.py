"""The audit says which dtype each part ran in, by its operators, beside what is expected."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from divergence.comparison.calls import CallNode, forwards_of, operator_passes
from divergence.comparison.result import (
    INSIDE,
    PARTS,
    AuditedPlace,
    AuditFinding,
    AuditResult,
    AuditRow,
    Part,
)
from divergence.facts import Fact, fact, with_sentences
from divergence.numerics.formats import FORMATS, format_named
from divergence.run.contents import records_at
from divergence.run.manifest import Manifest, StepPrecision
from divergence.run.reader import Run
from divergence.run.record import Operand
from divergence.run.site import BACKWARD, is_of_parameter, is_operator_site, module_of
from divergence.words import SIDES, other_side, side_of

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured


# In which dtype each part of a model is expected to run, and who says so.
#
# The run's own dtype and settings promise that of products, activations and the stream: a side
# below it is named. Common practice for inference asks for norm statistics and softmax in float32,
# the router in float32 or bfloat16 and a cache as narrow as 8 bits; models are meant otherwise, so
# practice accuses nobody: see ``own``. ``nn.LayerNorm`` is one kernel, and judged by nobody.

_PRACTICE: dict[Part, tuple[str, ...]] = {
    "norm statistics": ("float32",),
    "softmax": ("float32",),
    "rotary table": ("float32",),
    "router": ("float32", "bfloat16"),
}
_CACHES = ("float8_e4m3fn", "float8_e5m2", "int8")


def expectation(part: Part, manifest: Manifest) -> dict[str, Any]:
    """Return fields of AuditedPlace: what is expected of ``part`` in a run, by whom, and whether
    the run's dtype and settings themselves say so; empty where nothing is."""
    coded = manifest.model.quantization is not None
    if format_named(manifest.model.dtype).kind != "float" or (
        coded and part in ("matrix product", "logits", "kv cache")
    ):
        return {}  # a quantised model: its parts' dtypes are its own affair
    autocast = manifest.training.autocast
    dtype, by = autocast or manifest.model.dtype, "autocast" if autocast else "model_dtype"
    practice = {**_PRACTICE, "kv cache": (dtype, *_CACHES)}.get(part)
    if practice is not None:
        by = "common_practice"
    return {
        "expected": [*(practice or (dtype,))],
        "expected_from": fact(f"precision.{by}"),
        "own": practice is None,
    }


def is_below(dtype: str, expected: tuple[str, ...] | list[str]) -> bool:
    """Has ``dtype`` fewer significant bits or a narrower range than each of ``expected``? float16
    and bfloat16 are each below the other."""
    if not expected or dtype in expected or not FORMATS.keys() >= {dtype, *expected}:
        return False
    form, wanted = format_named(dtype), [format_named(other) for other in expected]
    if form.kind != "float" or any(other.kind != "float" for other in wanted):
        return form.kind in ("int", "bool") and all(other.kind == "float" for other in wanted)
    return all(
        form.mantissa_bits < other.mantissa_bits or form.max < other.max / 2 for other in wanted
    )


# A forward's calls for the precision audit: who feeds whom, and which part each belongs to.

_PRODUCTS = frozenset(
    {
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "mv",
        "dot",
        "matmul",
        "linear",
        "einsum",
        "convolution",
        "_convolution",
    }
)
SOFTMAX = frozenset({"_softmax", "_safe_softmax", "_log_softmax", "softmax"})
_INSIDE = (
    frozenset(
        {
            "mean",
            "sum",
            "var",
            "var_mean",
            "std",
            "std_mean",
            "linalg_vector_norm",
            "norm",
            "cumsum",
        }
    )
    | SOFTMAX
)


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
    return format_named(node.results[0].dtype).kind in ("float", "complex")


def is_attention(node: CallNode) -> bool:
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

    def left(self) -> Iterator[CallNode]:
        """The calls on floats that belong to no part yet, in order."""
        return (node for node in self.nodes if self.free(node) and is_float(node))

    def add(
        self, part: Part, nodes: Iterable[CallNode], root: CallNode, *, kernel: bool = False
    ) -> None:
        """The nodes that belong to no part yet, as one."""
        kept = tuple(sorted(filter(self.free, nodes), key=lambda node: node.order))
        if not kept:
            return
        self._claimed.update(node.path for node in kept)
        casts = [n for call in kept for n in self.feeders(call) if n.is_cast]
        takers = [n for call in kept for n in self.eaters.get(call.path, [])]
        near = tuple(dict.fromkeys(node.path for node in (*casts, *takers)))
        self.found.append(PartOperators(part, kept, root, kernel, near))

    def add_kernel(self, node: CallNode, parts: Sequence[Part]) -> None:
        """One kernel that does all of these parts."""
        for part in parts:
            self._claimed.discard(node.path)
            self.add(part, [node], node, kernel=True)

    def feeders(self, node: CallNode) -> list[CallNode]:
        return [self.by_path[path] for path in node.feeds]

    def maker(self, operand: Operand) -> CallNode | None:
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
        waiting = [] if node is None else [node]
        seen: set[str] = set()
        while waiting:
            call = waiting.pop()
            if is_product(call) or is_attention(call):
                return True
            if call.path not in seen:
                seen.add(call.path)
                waiting += self.feeders(call)
        return False


# The parts of a model, recognised in one forward's operators by what they compute.
#
# From the graph, not from names: a norm's statistics are what stands between a reduction and the
# ``rsqrt`` it ends in; a softmax is the kernel or exp over its sum; scores are what a softmax
# takes, back to the matrix product; a router is what a ``topk`` chooses by, back to a product with
# a weight; rotary is the sum of two products of which one saw its input turned; a residual add is
# an add of the block's stream to what a matrix product inside the block led to. Names tell only
# fused kernels and activations, a file's name only a cache. Each operator belongs to one part at
# most: the first in that order.

_ON_SCORES = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "masked_fill",
        "where",
        "tanh",
        "clamp",
        "cat",
        "clone",
        "maximum",
        "index",
        "slice_scatter",
    }
)
_ON_ROUTES = SOFTMAX | {
    "sigmoid",
    "add",
    "sub",
    "mul",
    "div",
    "sum",
    "gather",
    "masked_fill",
    "where",
    "clamp",
    "clamp_min",
    "topk",
    "softplus",
    "sqrt",
    "tanh",
    "amax",
    "max",
    "exp",
}
_ACTIVATIONS = frozenset(
    {
        "silu",
        "gelu",
        "relu",
        "relu6",
        "leaky_relu",
        "elu",
        "tanh",
        "sigmoid",
        "softplus",
        "mish",
        "hardswish",
        "hardsigmoid",
        "_glu",
        "glu",
        "swiglu",
    }
)


def find_parts(
    nodes: list[CallNode], blocks: set[str], logits: str | None = None
) -> list[PartOperators]:
    """Every part in one forward's calls. ``logits``: the path of what makes the logits."""
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
        kernels = ("_softmax", "sigmoid", "_safe_softmax")
        scored = next((node for node in inside if bare(node) in kernels), top)
        graph.add("router", [*inside, *after, *([top] if is_float(top) else [])], scored)
        for node in products:
            graph.add("router product", [node], node)


def _takes_weight(graph: Calls, node: CallNode) -> bool:
    casts = [maker for maker in map(graph.maker, node.call.operands) if maker and maker.is_cast]
    operands = [*node.call.operands, *(o for cast in casts for o in cast.call.operands[:1])]
    return any(operand.weight for operand in operands)


def _fused(graph: Calls) -> None:
    for node in graph.left():
        name, parts = bare(node), list[Part]()
        if is_attention(node):
            parts = ["softmax", "attention scores"]
        elif is_norm_kernel(node):
            parts = ["norm statistics", "residual add"] if "add" in name else ["norm statistics"]
        elif "rotary" in name or "rope" in name:
            parts = ["rotary"]
        graph.add_kernel(node, parts)


def _softmaxes(graph: Calls) -> None:
    for root in graph.left():
        fused = bare(root) in SOFTMAX or "softmax" in bare(root)
        chain = [root] if fused else _written_out(graph, root)
        if not chain:
            continue
        inside, ends = graph.back(chain[0], lambda node: bare(node) in _ON_SCORES)
        # the cast before it is the softmax's own: in which dtype it is given its scores
        graph.add("softmax", chain, root)
        products = [node for node in ends if is_product(node) and graph.free(node)]
        if products:
            scores = [n for n in inside if not n.is_cast]
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
    for root in graph.left():
        if bare(root) in ("cos", "sin"):
            graph.add("rotary table", [root], root)
        elif bare(root) == "mul" and format_named(root.results[0].dtype).kind == "complex":
            graph.add("rotary", [root], root)
        elif bare(root) == "add":
            sides = [n for n in graph.feeders(root) if bare(n) == "mul"]
            if len(sides) == 2 and any(_is_turned(graph, side) for side in sides):
                graph.add("rotary", [*sides, root], root)
        elif bare(root) in ("cat", "stack"):
            halves = _halves(graph, root)
            graph.add("rotary", halves, halves[-1] if halves else root)


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
    return any(
        bare(factor) in ("cat", "stack")
        and any(bare(part) == "neg" for part in graph.feeders(factor))
        for factor in graph.feeders(node)
    )


def _residuals(graph: Calls) -> None:
    stream: set[str] = set()

    def is_stream(operand: Operand) -> bool:
        maker = graph.maker(operand)
        return operand.weight is None and (maker is None or maker.path in stream)

    for node in graph.nodes:
        operands = node.call.operands
        if is_norm_kernel(node) or node.is_cast or bare(node) == "clone":
            if operands and is_stream(operands[0]):
                stream.add(node.path)
            continue
        if not graph.free(node) or bare(node) != "add" or not is_float(node):
            continue
        inside = any(node.module == b or node.module.startswith(f"{b}.") for b in graph.blocks)
        alike = len(operands) == 2 and all(o.shape == node.results[0].shape for o in operands)
        if not inside or not alike:
            continue
        carried = [is_stream(operand) for operand in operands]
        made = [graph.leads_from_product(graph.maker(operand)) for operand in operands]
        if (carried[0] and made[1]) or (carried[1] and made[0]):
            graph.add("residual add", [node], node)
            stream.add(node.path)


def _caches(graph: Calls) -> None:
    for node in graph.left():
        file = (node.call.source or "").partition(":")[0]
        writes = bare(node) in ("cat", "index_copy", "copy", "index_put", "slice_scatter")
        if "cache" in bare(node) or ("cache" in file and writes):
            graph.add("kv cache", [node], node)


def _rest(graph: Calls) -> None:
    for node in graph.left():
        if is_product(node):
            made = node.module == graph.logits or node.module.rpartition(".")[2] == "lm_head"
            graph.add("logits" if made else "matrix product", [node], node)
        elif bare(node) in _ACTIVATIONS:
            graph.add("activation", [node], node)


_REDUCTIONS = frozenset(
    {"mean", "sum", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm"}
)
_STATISTICS = _REDUCTIONS | {
    "pow",
    "square",
    "mul",
    "sub",
    "add",
    "clamp",
    "clamp_min",
    "div",
    "maximum",
}


def find_norms(graph: Calls) -> None:
    """Find norms, from square to root, in any spelling; x * x is one, and a mean of a mean too."""
    roots = [
        node
        for node in graph.nodes
        if bare(node) in ("rsqrt", "sqrt")
        or (bare(node) == "pow" and node.call.arguments.get("exponent") == -0.5)
    ]
    alone = [node for node in graph.nodes if bare(node) in ("var", "var_mean", "std", "std_mean")]
    for root in (*roots, *alone):
        inside = [node for node in _between(graph, root) if graph.free(node)]
        reduces = any(bare(node) in _REDUCTIONS for node in (root, *inside))
        if not graph.free(root) or not reduces:
            continue
        after = [n for n in graph.eaters.get(root.path, []) if n.is_cast]
        graph.add("norm statistics", [*inside, root, *after], root)
        for node in graph.nodes:
            near = node.module == root.module and node.order > root.order
            if near and graph.free(node) and bare(node) == "mul" and is_float(node):
                makers = [graph.maker(operand) for operand in node.call.operands]
                weighted = any(operand.weight for operand in node.call.operands) or any(
                    maker is not None and _is_of_weights(graph, maker) for maker in makers
                )
                if weighted:
                    graph.add("norm weight", [node], node)


def _between(graph: Calls, root: CallNode) -> list[CallNode]:
    """Return, of what leads to the root, the reductions, what follows them, and the squares and
    casts that they take: not what made the norm's input."""

    def belongs(node: CallNode) -> bool:
        return node.module == root.module and (bare(node) in _STATISTICS or node.is_cast)

    leading, _ = graph.back(root, belongs)
    root_calls = {node.path for node in leading if node.module == root.module}
    kept: dict[str, CallNode] = {}

    def visit(node: CallNode, reduced: bool) -> None:
        for feeder in graph.feeders(node):
            if feeder.path not in root_calls or feeder.path in kept:
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
        operands = node.call.operands
        return len(operands) == 2 and operands[0].site == operands[1].site
    return bare(node) in ("pow", "square", "sub") or bare(node) in _REDUCTIONS


def _is_of_weights(graph: Calls, node: CallNode) -> bool:
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


# The precision policy of a training step, as rows of the audit.
#
# Held to common practice, which is stated with each row, and named where a side is below it: sums
# of gradients in 16 bits, and weights in 16 bits that the optimizer steps themselves, are the two
# that cost a training run its last bits. Dtypes are those of the step's tensors (StepPrecision),
# not those that were asked for.
#
# Sources: Micikevicius et al., "Mixed precision training", ICLR 2018 (float32 copies of weights);
# Megatron-LM, which adds up and reduces gradients in float32 by default where weights are bfloat16.

_STEP_PARTS: dict[Part, tuple[str, str, str, bool]] = {
    "reduced gradients": ("reduction", "precision.reduced_gradients", "precision.megatron", True),
    "gradient sums": ("gradients", "precision.gradient_sums", "precision.megatron", True),
    "main weights": ("main_weights", "precision.main_weights", "precision.mixed_precision", True),
    "moments": ("moments", "precision.moments", "precision.common_practice", True),
    "buffers": ("buffers", "precision.buffers", "precision.common_practice", False),
}
"""Its dtype's field of StepPrecision, its sentence, who expects float32, and whether a side below
it is named."""

PHASES: dict[Part, str] = {
    "reduced gradients": "backward",
    "gradient sums": "backward",
    "main weights": "optimizer",
    "moments": "optimizer",
}
"""Where what a part does is first seen: in parameters' gradients, or in what they become."""


def step_rows(
    reference: Manifest, candidate: Manifest | None
) -> tuple[list[AuditRow], list[AuditFinding]]:
    """Make the rows of one run or two. Nothing where no side trained a step in its own dtype."""
    manifests = (reference, candidate)
    sides = [
        None if each is None or each.settings.compute_dtype is not None else each.training.precision
        for each in manifests
    ]
    rows, findings = [], []
    for part, (name, _, by, named) in _STEP_PARTS.items():
        dtypes: list[str | None] = [getattr(step, name, None) for step in sides]
        if part == "gradient sums":  # one micro-batch is no sum
            dtypes = [
                dtype if manifest is not None and len(manifest.tokens.groups) > 1 else None
                for dtype, manifest in zip(dtypes, manifests, strict=True)
            ]
        if dtypes == [None, None]:
            continue
        below = [dtype is not None and is_below(dtype, ["float32"]) for dtype in dtypes]
        whose = side_of(below)
        given: list[list[str] | None] = [
            None if step is None else [dtype] if dtype is not None else []
            for step, dtype in zip(sides, dtypes, strict=True)
        ]
        row = AuditRow(
            part=part,
            reference=given[0],
            candidate=given[1],
            expected=["float32"],
            expected_from=fact(by),
            own=named,
            below=whose,
            differs=None not in dtypes and dtypes[0] != dtypes[1],
            num_places=1,
        )
        rows.append(row)
        if row.differs or (whose is not None and named):
            what = _what_is_done(row, sides, alone=candidate is None)
            findings.append(AuditFinding(part=part, what=what))
    return rows, findings


def gradient_errors(measured: Measured) -> Fact | None:
    """The median error of both sides' parameters' gradients; None without a truth."""
    truths = [
        site.truth
        for site in measured.sites
        if site.pass_ == "free"
        and site.phase == "backward"
        and is_of_parameter(site.site)
        and site.truth is not None
    ]
    if not truths:
        return None
    return fact(
        "precision.gradient_errors",
        reference=statistics.median(truth.reference_error for truth in truths),
        candidate=statistics.median(truth.candidate_error for truth in truths),
    )


def _what_is_done(row: AuditRow, steps: list[StepPrecision | None], *, alone: bool) -> Fact:
    """Return who does it in which dtype: the side that is below what is expected, or both alike."""
    code = _STEP_PARTS[row.part][1]
    dtypes = [cell[0] if cell else None for cell in (row.reference, row.candidate)]
    wide = row.below is None and dtypes[1] == "float32"
    odd = 0 if alone or wide or row.below in ("reference", "both") else 1
    both = not alone and row.below == "both" and not row.differs
    other = dtypes[1 - odd] if not alone and not both else None
    values: dict[str, Any] = {
        "who": "run" if alone else "both" if both else SIDES[odd],
        "dtype": dtypes[odd],
        "expected": row.expected,
        "expected_from": row.expected_from,
    }
    if row.part == "main weights":
        shares = [
            step.num_unmoved / step.num_stepped
            for step in (steps if both else [steps[odd]])
            if step is not None and step.num_stepped
        ]
        unmoved = [fact("precision.unmoved", share=share) for share in shares if any(shares)]
        holder = SIDES[1 - odd] if other == "float32" else None
        return fact(code, **values, holder=holder, unmoved=unmoved)
    return fact(code, **values, other_dtype=other, other=SIDES[1 - odd] if other else None)


# The precision audit: in which dtype each part of a model really ran, beside what is expected.
#
# Read from operator records alone: no tensor is opened. Every operator rounds its result to the
# result's dtype, so a part made of several was computed in the narrowest dtype among their
# results; that much is known. Not known, and not claimed: what one kernel does inside. A
# fused attention or norm is named as such; a 16-bit softmax or matrix product says what it took
# and gave, and what it adds up in is for the probe to tell.
#
# A part is below what is expected where that narrowest dtype has fewer bits or less range than
# every dtype that would do. A run computed in float64 is not audited. A finding is made where the
# sides computed the same module's part in different dtypes, or where a side is below its own dtype
# and settings; below common practice alone is shown in the table and accuses nobody.

MAX_OPERATORS = 64
"""Named at one place; a scan calls the same line once for every token."""

_PASSES = ("anchored", "free", "whole", "replayed")


@with_sentences
def audit_runs(
    reference: Run, candidate: Run | None = None, *, rename: Callable[[str], str] = lambda s: s
) -> AuditResult | None:
    """The audit of one run or two; None where neither holds operators that can be audited, nor a
    training step.

    ``rename``: a site of the reference → the candidate's.
    """
    places_a = audited_places(reference)
    places_b = None if candidate is None else audited_places(candidate)
    step, step_findings = step_rows(
        reference.manifest, None if candidate is None else candidate.manifest
    )
    if places_a is None and places_b is None:
        return AuditResult(rows=step, findings=step_findings) if step else None
    remarks = []
    alike = candidate is None or reference.manifest.model.dtype == candidate.manifest.model.dtype
    if places_a is not None and places_b is not None and not alike:
        remarks = [fact("precision.other_dtypes")]
    probed: dict[tuple[str, ...], list[Fact]] = {}
    for name, run, places in (
        ("reference", reference, places_a),
        ("candidate", candidate, places_b),
    ):
        if run is not None and places is not None:
            side = None if candidate is None else name
            stored = {place.computed for place in places if place.accumulates}
            by_probe: dict[tuple[str, str], list[str]] = {}
            for item in run.manifest.arithmetic:
                *words, dtype = item.subject.split() or [""]
                if item.probe == "accumulator" and item.verified and dtype in stored:
                    what = " ".join(itertools.takewhile(lambda word: "=" not in word, words))
                    by_probe.setdefault((dtype, item.value), []).append(what)
            for key in [(*key, *dict.fromkeys(names)) for key, names in by_probe.items()]:
                probed.setdefault(key, []).append(fact("precision.side", side=side))
    for (dtype, accumulator, *operators), sides in probed.items():
        remarks.append(
            fact(
                "precision.probed",
                sides=sides,
                dtype=dtype,
                accumulator=accumulator,
                operators=operators,
            )
        )
    rows, findings = [], []
    for part in PARTS:
        own, other = (
            [p for p in places or () if p.part == part] for places in (places_a, places_b)
        )
        if not own and not other:
            continue
        pairs = differing(own, other, rename) if alike else []
        judged = next((place for place in (*own, *other) if place.expected), None)
        below = any(place.below for place in own), any(place.below for place in other)
        row = AuditRow(
            part=part,
            reference=None if places_a is None else _computed(own),
            candidate=None if places_b is None else _computed(other),
            expected=judged.expected if judged else [],
            expected_from=judged.expected_from if judged else None,
            own=judged.own if judged else False,
            below=side_of(below),
            differs=bool(pairs),
            num_places=max(sum(place.num_calls for place in each) for each in (own, other)),
        )
        rows.append(row)
        audit_finding = finding(row, own, other, pairs, alone=candidate is None)
        findings += [] if audit_finding is None else [audit_finding]
    return AuditResult(
        rows=rows + step,
        findings=findings + step_findings,
        reference=places_a,
        candidate=places_b,
        remarks=remarks,
    )


def audited_places(run: Run) -> list[AuditedPlace] | None:
    """Each part at each place, in execution order; None where the run is not to be audited."""
    manifest = run.manifest
    passes = operator_passes(run)
    chosen = next((name for name in _PASSES if name in passes), None)
    if chosen is None or manifest.settings.compute_dtype or manifest.model.task == "operators":
        return None
    blocks = {path for path, note in manifest.plan.modules.items() if note.role == "block"}
    logits = manifest.plan.logits_site
    head = None if logits is None else module_of(logits)
    places: dict[tuple[str | None, ...], AuditedPlace] = {}
    for nodes in forwards_of(run, chosen).values():
        forward = [node for node in nodes if BACKWARD not in node.module]
        for part in find_parts(forward, blocks, head):
            root = part.root
            results = [(node, _part_dtype(node.results[0].dtype)) for node in part.nodes]
            narrow, computed = min(results, key=lambda item: _width(item[1]))
            same = {dtype for _, dtype in results} == {computed}
            adds_up = all(accumulates(node) for node, dtype in results if dtype == computed)
            taken = [_part_dtype(operand.dtype) for operand in part.nodes[0].call.operands]
            if part.part in ("matrix product", "router product", "logits"):
                # what is multiplied is rounded to the operands' dtype before anything is added up
                factors = [t for t in taken if format_named(t).kind == "float" or t in _CODE_DTYPES]
                computed = min([computed, *factors], key=_width)
            shown = root if same else narrow
            expected = expectation(part.part, manifest)
            note = manifest.plan.modules.get(root.module.partition("#")[0])
            place = AuditedPlace(
                part=part.part,
                module=root.module,
                kind=None if note is None else note.kind,
                site=shown.path,
                operators=[node.path for node in part.nodes],
                near=list(part.near),
                source=shown.call.source,
                operands=list(dict.fromkeys(taken)),
                result=part.nodes[-1].results[0].dtype,
                computed=None if part.kernel else computed,
                kernel=root.name if part.kernel else None,
                accumulates=not part.kernel and adds_up,
                below=not part.kernel and is_below(computed, expected.get("expected", ())),
                **expected,
            )
            key = (
                place.part,
                place.module,
                place.source,
                place.computed,
                place.kernel,
                place.result,
                *place.operands,
            )
            if key in places:  # in another forward, or for another tensor there
                seen = places[key]
                operators, near = (
                    list(dict.fromkeys([*old, *new]))[:MAX_OPERATORS]
                    for old, new in ((seen.operators, place.operators), (seen.near, place.near))
                )
                place = msgspec.structs.replace(
                    seen, operators=operators, near=near, num_calls=seen.num_calls + 1
                )
            places[key] = place
    kept = list(places.values())
    if logits is None or is_operator_site(logits) or any(p.part == "logits" for p in kept):
        return kept
    # the logits as the model gave them, where the operators of the head were not recorded
    records = records_at(run.records, [logits])
    for record in records[:1]:
        expected = expectation("logits", manifest)
        place = AuditedPlace(
            part="logits",
            module=module_of(logits),
            site=logits,
            operators=[],
            operands=[],
            result=record.dtype,
            computed=record.dtype,
            num_calls=len(records),
            below=is_below(record.dtype, expected.get("expected", ())),
            **expected,
        )
        kept.append(place)
    return kept


_COMPONENT = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The dtype of a complex number's parts."""
_CODE_DTYPES = ("int8", "uint8")


def _part_dtype(dtype: str) -> str:
    return _COMPONENT.get(dtype, dtype)


def _width(dtype: str) -> tuple[int, float]:
    form = format_named(dtype)
    return (form.mantissa_bits, form.max) if form.kind == "float" else (0, 0.0)


def _computed(places: list[AuditedPlace]) -> list[str]:
    counts: Counter[str] = Counter()
    for place in places:
        counts[place.computed or f"{INSIDE}{place.kernel}"] += place.num_calls
    return [name for name, _ in counts.most_common()]


PlacePair = tuple[AuditedPlace, AuditedPlace]


def differing(
    places_a: list[AuditedPlace], places_b: list[AuditedPlace], rename: Callable[[str], str]
) -> list[PlacePair]:
    """Places of the same module and part whose dtypes are known on both sides, and differ."""
    by_module: dict[str, tuple[dict[str, AuditedPlace], ...]] = {}
    for side, places in enumerate((places_a, places_b)):
        for place in places:
            name = place.module if side else rename(f"{place.module}:out").rpartition(":")[0]
            if place.computed is not None:
                by_dtype = by_module.setdefault(name, ({}, {}))[side]
                by_dtype.setdefault(place.computed, place)
    pairs = []
    for own, other in by_module.values():
        if own and other and own.keys() != other.keys():
            odd = [place for dtype, place in own.items() if dtype not in other]
            new = [place for dtype, place in other.items() if dtype not in own]
            pairs.append(((odd or list(own.values()))[0], (new or list(other.values()))[0]))
    return sorted(pairs, key=lambda pair: pair[0].site)


def finding(
    row: AuditRow,
    places_a: list[AuditedPlace],
    places_b: list[AuditedPlace],
    pairs: list[PlacePair],
    *,
    alone: bool,
) -> AuditFinding | None:
    """Say what there is to say of a part; None where nothing is. ``pairs``: see ``differing``."""
    accused = row.below if row.own else None
    if pairs:
        # the side that is below what is expected, is not as expected, or below the other; else B

        def oddness(side: int) -> tuple[bool, ...]:
            first, second = pairs[0][side], pairs[0][1 - side]
            unexpected = first.computed not in first.expected
            narrower = is_below(first.computed or "", [second.computed or ""])
            return first.below, unexpected, narrower, side == 1

        number = max((0, 1), key=oddness)
        odd, first, second = SIDES[number], pairs[0][number], pairs[0][1 - number]
        what = fact(
            "precision.computes",
            side=odd,
            part=row.part,
            place=_dtype_and_place(first),
            other=other_side(odd),
            dtype=second.computed,
            expected=row.expected,
            num_more=len({place.module for place, _ in pairs}) - 1 or None,
            expected_from=row.expected_from,
        )
        places = [place for pair in pairs for place in pair]
    elif accused:
        places = [place for place in (*places_a, *places_b) if place.below]
        other = {"reference": places_b, "candidate": places_a}.get(accused, [])
        what = fact(
            "precision.computes_below",
            who="run" if alone else accused,
            part=row.part,
            place=_dtype_and_place(places[0]),
            expected=row.expected,
            expected_from=row.expected_from,
            kernel=next((place.kernel for place in other if place.kernel), None),
        )
    else:
        return None
    sites = [site for place in places for site in (*place.operators, *place.near)]
    return AuditFinding(part=row.part, what=what, operators=list(dict.fromkeys(sites)))


def _dtype_and_place(place: AuditedPlace) -> Fact:
    # one kernel: it rounds what it gives; what it adds up in is not in the records
    where = (place.source or place.site).partition(" in ")[0]
    return fact("precision.place", dtype=place.computed, where=where, accumulates=place.accumulates)
