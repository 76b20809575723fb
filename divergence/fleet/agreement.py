"""Which of many runs belong together, and who is odd.

Two runs agree where what differs between them is rounding or nothing. That is no equivalence: two
runs may each be within the floor of a third and not of each other. So a group is named by the run
that all its members were held against, and nothing is claimed beyond that. The first group is that
of the first run, which costs nothing: every run was compared with it. Only where it holds no
majority are the others compared among themselves, each with the first of them that is left, until
some group holds more than half or none can any more.

Runs that are bit for bit the same have one answer, so one of each such group is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import xxhash

from divergence.facts import Fact, fact
from divergence.run.contents import Digests
from divergence.run.manifest import Manifest
from divergence.run.ranks import digests_of
from divergence.run.reader import Run
from divergence.run.record import Record

__all__ = ["agreement_of", "agrees", "find_groups", "fingerprints", "only_there", "outside"]

_AGREEING = frozenset({"identical", "within_floor"})
_TELLING = _AGREEING | {"systematic", "localized", "drift", "nonfinite"}

Key = TypeVar("Key")
At = tuple[int, int, str]


def agrees(kind: str | None) -> bool | None:
    """What a verdict says of agreement; None where it abstains."""
    return kind in _AGREEING if kind in _TELLING else None


def find_groups(
    nodes: Sequence[Key], agree: Callable[[Key, Key], bool | None]
) -> tuple[list[list[Key]], list[Key]]:
    """(groups in order, nodes that were not asked any more).

    ``nodes[0]`` is the first run; ``agree(pivot, other)`` is asked only as long as an answer can
    change which group, if any, holds more than half of all.
    """
    groups: list[list[Key]] = []
    left = list(nodes)
    while left:
        pivot, *others = left
        group = [pivot, *(other for other in others if agree(pivot, other))]
        groups.append(group)
        left = [other for other in others if other not in group]
        if 2 * len(group) > len(nodes) or 2 * len(left) <= len(nodes):
            break
    return groups, left


def fingerprints(runs: Sequence[Run]) -> list[str | None]:
    """By run, one digest over what its own forward gave at each site that the first run recorded.

    Equal ones mean equal bits, as far as recorded digests go: no tensor is read. None for a run
    that lacks the digest of one of these tensors (of the kind that the first run has), and for one
    without any of these sites: of those nothing can be said.
    """
    all_contents = [_contents(run) for run in runs]
    first = all_contents[0]
    kinds = {at: "xxh3" if first[at][1].xxh3 else "fold" for at in sorted(first)}
    return [_fingerprint(contents, kinds) for contents in all_contents]


def _contents(run: Run) -> dict[At, tuple[Record, Digests]]:
    """By (sample, step, site). A suite's repeat holds as ``replayed`` what a fresh run holds as
    ``free``, and no run holds both of a site."""
    return {
        (record.sample, record.step, record.site): (record, digests_of(run, record))
        for record in run.records
        if record.pass_ in ("free", "replayed")
    }


def _fingerprint(
    contents: Mapping[At, tuple[Record, Digests]], kinds: Mapping[At, str]
) -> str | None:
    state, num_known = xxhash.xxh3_128(), 0
    for at, kind in kinds.items():
        identity = None
        if at in contents:
            record, all_digests = contents[at]
            digests = getattr(all_digests, kind)
            if digests is None:
                return None
            identity = digests, all_digests.cuts, record.dtype, record.shape, record.positions
            num_known += 1
        state.update(repr((at, identity)).encode())
    return state.hexdigest() if num_known else None


def _traits(manifest: Manifest) -> dict[str, str]:
    """What a manifest says of the machine and how it was set, by name."""
    at, model = manifest.environment, manifest.model
    traits = {
        "device": f"{at.device_type}: {at.device_name}",
        "driver": at.driver or "-",
        "runtime": at.runtime or "-",
        "cpu": f"{at.cpu} {at.cpu_capability}",
        "threads": str(at.num_threads),
        "platform": at.platform,
        "python": at.python,
        "dtype": model.dtype,
        "attention": model.attn_implementation or "none",
        "quantization": str(model.quantization or "none"),
        "planted faults": ", ".join(manifest.plan.plants) or "none",
        "substituted operators": ", ".join(manifest.plan.substitutes) or "none",
    }
    traits |= {name: version for name, version in at.versions.items()}
    traits |= at.variables
    traits |= {f"torch's {name}": value for name, value in at.torch_build.items()}
    if at.cpu_model is not None:
        traits["cpu model"] = at.cpu_model
    for name, note in model.code.items():
        traits[f"code of {name}"] = "; ".join(note.replaced) or note.digest[:12]
    traits |= {f"config {key}": str(value) for key, value in model.config.items()}
    for switch in manifest.settings.switches:
        traits[switch.name] = f"{switch.asked} ({switch.status})"
    return traits


def only_there(odd: Sequence[Manifest], group: Sequence[Manifest]) -> list[Fact]:
    """What all odd machines share and no machine of the group has."""
    mine, others = ([_traits(manifest) for manifest in them] for them in (odd, group))
    shared = []
    for name in dict.fromkeys(name for traits in (*mine, *others) for name in traits):
        here = {traits.get(name, "-") for traits in mine}
        there = {traits.get(name, "-") for traits in others}
        if len(here) == len(there) == 1 and here != there:
            shared.append(fact("fleet.only_there", name=name, here=here.pop(), others=there.pop()))
    return shared


def agreement_of(
    groups: Sequence[Sequence[str]], left: Sequence[str], *, num_silent: int, identical: bool
) -> Fact:
    """Who agrees with whom. ``num_silent``: runs that could not tell, ``identical``:
    the largest group is so bit for bit."""
    total = sum(map(len, groups)) + len(left)
    num = max(map(len, groups))
    if total < 2:
        return fact("fleet.none_told_apart", num_silent=num_silent)
    if num == total:
        return fact(
            "fleet.all_agree", total=total, num_runs=total + num_silent, num_silent=num_silent,
            identical=identical,
        )  # fmt: skip
    odd = outside(groups, left)
    if not odd:
        return fact(
            "fleet.no_majority", total=total, num=num, num_silent=num_silent, identical=identical
        )
    names = fact("fleet.few", runs=odd)
    if len(odd) > 3:
        names = fact("fleet.many", runs=odd[:3], num_more=len(odd) - 3)
    return fact(
        "fleet.majority", total=total, num=num, num_silent=num_silent, identical=identical,
        odd=names, num_odd=len(odd),
    )  # fmt: skip


def outside(groups: Sequence[Sequence[Key]], left: Sequence[Key]) -> list[Key]:
    """The runs that are not of the group that holds more than half; none where no group does."""
    total = sum(map(len, groups)) + len(left)
    largest = max(groups, key=len)
    if 2 * len(largest) <= total:
        return []
    return [run for group in groups if group is not largest for run in group] + list(left)
