"""A dump as a run: its tensors as records of the free pass, and a manifest of what was seen."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from divergence.domains.importing.dumped import Dumped, DumpedForward, Notes
from divergence.domains.importing.survey import Survey
from divergence.errors import DumpError
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import UNKNOWN, Manifest, ModuleNote, ModuleRole, Plan, digest_tensor
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.scores import foreign_manifest
from divergence.run.site import module_of, natural_key
from divergence.run.writer import RunWriter

# What a dump does not show is left unknown, and preflight says so: weights, configuration, code,
# settings, machine (``model.digest`` is empty). Of the run that it is to be like only the name of
# the model is taken, the modules' parts in it, and shapes.
#
# Ranks: tensors that every rank of a site holds with the same bits are taken once. Others are
# parts, and which parts nobody says: they are left out and counted.

_FIRST_NUMBER = re.compile(r"[^0-9]*?\.\d+")


def manifest_of(
    surveyed: Survey,
    *,
    name: str,
    dtype: str | None,
    like: Run | None,
    label: str | None,
    command: str | None,
) -> Manifest:
    """Return what is known of the run. ``name``, ``dtype``: of the layout."""
    own = None if like is None else like.manifest
    sites = [surveyed.renamed(site) for site in surveyed.sites]
    logits = "lm_head:out" if own is None else own.plan.logits_site
    plan = Plan(
        passes=["free"],
        sites=["*"],
        modules=_modules(sites, like),
        logits_site=logits if logits in sites else None,
        statistics_off=surveyed.statistics_off,
        store="full" if surveyed.statistics_off is None else "stats",
    )
    return foreign_manifest(
        surveyed.tokens,
        plan,
        tool=f", importing a dump of {name}",
        label=label or f"dump of {name}",
        command=command,
        dtype=dtype or surveyed.dtype,
        source=UNKNOWN if own is None else own.model.source,
        task=own.model.task if own else "encoder" if surveyed.trains else "causal-lm",
        max_new_tokens=0 if surveyed.trains else surveyed.num_steps - 1,
        batch=any(len(group) > 1 for group in surveyed.tokens.groups),
    )


def _modules(sites: list[str], like: Run | None) -> dict[str, ModuleNote]:
    """The part of each module in the model: the run's, else by the numbers in its path."""
    if like is not None:
        notes = like.manifest.plan.modules
        modules = {path: notes[path] for path in map(module_of, sites) if path in notes}
        if modules:
            return modules
    paths = list(dict.fromkeys(map(module_of, sites)))
    blocks = {match[0] for path in paths if (match := _FIRST_NUMBER.match(path))}
    around = set[str]()
    for path in blocks:
        while (path := path.rpartition(".")[0]) and path not in around:
            around.add(path)

    def role(path: str) -> ModuleRole:
        if path in blocks:
            return "block"
        return "inner" if path in around or _FIRST_NUMBER.match(path) else "trunk"

    return {path: ModuleNote(kind=UNKNOWN, role=role(path)) for path in paths}


def write(
    writer: RunWriter,
    forwards: Iterator[DumpedForward],
    surveyed: Survey,
    like: Run | None,
    notes: Notes,
) -> None:
    """Puts every tensor that can be told into the run."""
    handed_on = {} if like is None else _handed_on(like, surveyed)
    tokens, logits, num_records = writer.manifest.tokens, writer.manifest.plan.logits_site, 0
    groups = {
        group[0]: [tokens.samples[number] for number in group] for group in tokens.groups if group
    }
    for place, forward in zip(surveyed.places, forwards, strict=True):
        if place is None:
            continue
        sample, step = place
        kept: dict[str, CapturedTensor] = {}
        sites: dict[str, dict[int, Dumped]] = {}
        for dumped in forward.tensors:
            sites.setdefault(dumped.site, {}).setdefault(dumped.rank, dumped)
        num_again = len(forward.tensors) - sum(map(len, sites.values()))
        notes.add("were seen at a site again within a forward, and left out", num_again)
        for site, ranks in sites.items():
            first = next(iter(ranks.values()))
            tensor = _common_tensor(list(ranks.values()))
            if tensor is None:
                notes.add("are not the same on all ranks (parts, it seems), and were left out")
                continue
            site = surveyed.renamed(site)
            record = None if like is None else like.find(("free", sample, step, site))
            # engines lay all sequences on one axis: (T, H) as (1, T, H), where the run has it so
            if record is not None and record.shape == (1, *tensor.shape):
                tensor = tensor.unsqueeze(0)
            kept[site] = CapturedTensor(tensor)
            if first.summary is not None:
                kept[site].tensor = None
                kept[site].summary, kept[site].checksum = first.summary, first.checksum
                kept[site].apart = first.apart
                continue
            members = groups[sample]
            if (
                site == logits
                and tensor.ndim == 3
                and tensor.shape[0] == len(members)
                and tensor.numel()
                and not any(member.num_right_pad for member in members)
            ):
                # the greedy choice, from logits (B, T, V) of which the last row is the last token's
                chosen = tensor[:, -1].argmax(-1).tolist()
                for member, token in zip(members, chosen, strict=True):
                    member.chosen_ids.append(token)
        for site, other in handed_on.items():
            if site not in kept and other in kept:
                kept[site] = kept[other]
                notes.add(
                    "that blocks return were taken from the next module's input, which has "
                    "the same bits in RUN"
                )
        positions = {
            surveyed.renamed(site): next(iter(ranks.values())).positions
            for site, ranks in sites.items()
        }
        for order, (site, item) in enumerate(kept.items()):
            writer.put(
                item,
                pass_="free",
                sample=sample,
                step=step,
                site=site,
                order=order,
                positions=positions.get(site),
            )
        num_records += len(kept)
    if not num_records:
        raise DumpError(
            "nothing in the dump is the same on all ranks: the run would be empty",
            hint="name the files of one rank, as of data-parallel ones",
        )


def _common_tensor(ranks: list[Dumped]) -> torch.Tensor | None:
    if ranks[0].summary is not None:
        kept = [(item.summary, item.checksum, item.tensor.shape) for item in ranks]
        return ranks[0].tensor if all(other == kept[0] for other in kept[1:]) else None
    first = ranks[0].value().contiguous()
    same = all(
        (other.shape, other.dtype) == (first.shape, first.dtype)
        and digest_tensor(other) == digest_tensor(first)
        for other in (item.value() for item in ranks[1:])
    )
    return first if same else None


def _handed_on(like: Run, surveyed: Survey) -> dict[str, str]:
    """Output of a block that the dump lacks → an input, behind it, that had its bits in the run at
    every step of it."""
    notes = like.manifest.plan.modules
    dumped = {surveyed.renamed(site) for site in surveyed.sites}
    wanted = {f"{path}:out" for path, note in notes.items() if note.role == "block"} - dumped
    if not wanted:
        return {}
    outs: dict[str, list[Record]] = {}
    after: dict[tuple[int, int, str | None], list[Record]] = {}
    for entry in like.records:
        if entry.pass_ == "free" and entry.site in wanted:
            outs.setdefault(entry.site, []).append(entry)
        elif entry.pass_ == "free" and entry.site in dumped and entry.site.endswith(":in"):
            after.setdefault((entry.sample, entry.step, entry.xxh3), []).append(entry)
    sources: dict[str, str] = {}
    for site, records in outs.items():
        common = [
            {
                later.site
                for later in after.get((record.sample, record.step, record.xxh3), ())
                if later.order > record.order and later.shape == record.shape and record.xxh3
            }
            for record in records
        ]
        if both := sorted(set.intersection(*common), key=natural_key):
            sources[site] = both[0]
    return sources
