"""One forward's operators as a graph: the order of the calls, and whose results feed whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from divergence.run.reader import Run
from divergence.run.schema.call import Call, Operand
from divergence.run.schema.record import Record
from divergence.run.schema.site import is_operator_site

__all__ = ["Forward", "Node", "forwards_of", "maker_of", "operator_passes"]

Forward = tuple[int, int]
"""(sample, step)"""


@dataclass(slots=True, eq=False)
class Node:
    """One call. ``path``: its site without the port; ``module``: what called it; ``name``: the
    operator without overload and in-place mark. ``feeds``: paths of the calls whose results
    it was given."""

    path: str
    module: str
    name: str
    call: Call
    results: list[Record] = field(default_factory=list)
    feeds: list[str] = field(default_factory=list)

    @property
    def order(self) -> int:
        return self.results[0].order

    @property
    def is_cast(self) -> bool:
        """Exact but for the rounding to another dtype."""
        return self.name in ("aten._to_copy", "aten.to")

    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """What the same call on another machine has in common with this one."""
        return self.module, self.name, self.results[0].shape


def operator_passes(run: Run) -> set[str]:
    """The passes in which a run recorded operators."""
    return {record.pass_ for record in run.records if record.call is not None}


def forwards_of(run: Run, pass_: str) -> dict[Forward, list[Node]]:
    """The calls of a pass in execution order, by forward."""
    by_forward: dict[Forward, dict[str, Node]] = {}
    records = (r for r in run.records if r.pass_ == pass_ and is_operator_site(r.site))
    for record in sorted(records, key=lambda r: (r.sample, r.step, r.order)):
        path, _, port = record.site.rpartition(":")
        if not port.startswith("out"):
            continue
        nodes = by_forward.setdefault((record.sample, record.step), {})
        if record.call is not None:
            module, _, operator = path.rpartition("/")
            name = operator.partition("#")[0]
            name = name.rstrip("_") if not name.endswith("__") else name
            nodes[path] = Node(path, module, name, record.call)
        if path in nodes:
            nodes[path].results.append(record)
    found = {forward: list(nodes.values()) for forward, nodes in by_forward.items()}
    for calls in found.values():
        _connect(calls)
    return found


def maker_of(operand: Operand) -> str | None:
    """Path of the call whose result an operand is, or is a view of; None where none is known."""
    for site in (operand.site or "", operand.origin or ""):
        maker, _, port = site.rpartition(":")
        if port.startswith("out") and is_operator_site(site):
            return maker
    return None


def _connect(nodes: list[Node]) -> None:
    known = {node.path for node in nodes}
    for node in nodes:
        makers = dict.fromkeys(maker_of(operand) for operand in node.call.operands)
        node.feeds += [maker for maker in makers if maker in known]
