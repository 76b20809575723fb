"""A dump as a run: its tensors as records of the free pass, and a manifest that says what was seen.

What a dump does not show is left unknown, and preflight says so: weights, configuration, code,
settings, machine (``model.digest`` is empty). Of the run that it is to be like only the name of the
model is taken, the modules' parts in it, and shapes.

Ranks: tensors that every rank of a site holds with the same bits are taken once. Others are parts,
and which parts nobody says: they are left out and counted.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

import torch

from divergence._version import __version__
from divergence.errors import DumpError
from divergence.importing.dump import Dumped, DumpedForward, Notes
from divergence.importing.reading import Survey, by_site
from divergence.run.reader import Run
from divergence.run.schema.manifest import (
    UNKNOWN,
    Environment,
    Manifest,
    ModelIdentity,
    ModuleNote,
    ModuleRole,
    Plan,
    SampleTokens,
    Settings,
)
from divergence.run.schema.record import Record
from divergence.run.schema.site import module_of, natural_key
from divergence.run.writing.writer import CapturedTensor, RunWriter, new_run_id

__all__ = ["manifest_of", "write"]

_FIRST_NUMBER = re.compile(r"[^0-9]*?\.\d+")


def manifest_of(
    surveyed: Survey, *, name: str, like: Run | None, label: str | None, command: str | None
) -> Manifest:
    """What is known of the run. ``name``: of the layout."""
    own = None if like is None else like.manifest
    sites = [surveyed.renamed(site) for site in surveyed.sites]
    logits = "lm_head:out" if own is None else own.plan.logits_site
    return Manifest(
        id=new_run_id(),
        tool_version=f"{__version__}, importing a dump of {name}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        model=ModelIdentity(
            source=UNKNOWN if own is None else own.model.source, model_class="",
            task="causal-lm" if own is None else own.model.task, config_digest="",
            dtype=surveyed.dtype, num_parameters=0, digest="",
        ),
        tokens=surveyed.tokens,
        settings=Settings(
            deterministic=False, seed=0, device=UNKNOWN, max_new_tokens=surveyed.num_steps - 1,
            batch=any(len(group) > 1 for group in surveyed.tokens.groups),
        ),
        environment=Environment(
            label=label or f"dump of {name}", platform="", python="", device_type=UNKNOWN,
            device_name=UNKNOWN, cpu="", cpu_capability="", num_threads=0, versions={},
        ),
        plan=Plan(
            passes=["free"], sites=["*"], modules=_modules(sites, like),
            logits_site=logits if logits in sites else None,
        ),
    )  # fmt: skip


def _modules(sites: list[str], like: Run | None) -> dict[str, ModuleNote]:
    """The part of each module in the model: the run's, else by the numbers in its path."""
    if like is not None:
        theirs = like.manifest.plan.modules
        modules = {path: theirs[path] for path in map(module_of, sites) if path in theirs}
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
        sites = by_site(forward.tensors)
        num_again = len(forward.tensors) - sum(map(len, sites.values()))
        notes.add("were seen at a site again within a forward, and left out", num_again)
        for site, ranks in sites.items():
            tensor = _of_all_ranks(ranks)
            if tensor is None:
                notes.add("are not the same on all ranks (parts, it seems), and were left out")
                continue
            site = surveyed.renamed(site)
            record = None if like is None else like.find(("free", sample, step, site))
            tensor = _shaped(tensor, record)
            kept[site] = CapturedTensor(tensor)
            if site == logits:
                _choose(groups[sample], tensor)
        for site, other in handed_on.items():
            if site not in kept and other in kept:
                kept[site] = kept[other]
                notes.add("that blocks return were taken from the next module's input, which has "
                          "the same bits in RUN")  # fmt: skip
        for order, (site, item) in enumerate(kept.items()):
            writer.put(item, pass_="free", sample=sample, step=step, site=site, order=order)
        num_records += len(kept)
    if not num_records:
        raise DumpError("nothing in the dump is the same on all ranks: the run would be empty")


def _choose(samples: list[SampleTokens], logits: torch.Tensor) -> None:
    """The greedy choice, from logits (B, T, V) of which the last row is the last token's."""
    if logits.ndim != 3 or logits.shape[0] != len(samples) or not logits.numel():
        return
    if not any(member.num_right_pad for member in samples):
        for member, token in zip(samples, logits[:, -1].argmax(-1).tolist(), strict=True):
            member.chosen_ids.append(token)


def _of_all_ranks(ranks: list[Dumped]) -> torch.Tensor | None:
    first = ranks[0].value().contiguous()
    bits = _bits(first)
    for other in ranks[1:]:
        tensor = other.value().contiguous()
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            return None
        if not torch.equal(_bits(tensor), bits):
            return None
    return first


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def _shaped(tensor: torch.Tensor, record: Record | None) -> torch.Tensor:
    """(T, H) as (1, T, H), where the run has it so: engines lay all sequences on one axis."""
    if record is not None and record.shape[:1] == (1,) and record.shape[1:] == tuple(tensor.shape):
        return tensor.unsqueeze(0)
    return tensor


def _handed_on(like: Run, surveyed: Survey) -> dict[str, str]:
    """Output of a block that the dump lacks → an input, behind it, that had its bits in the run at
    every step of it."""
    notes = like.manifest.plan.modules
    held = {surveyed.renamed(site) for site in surveyed.sites}
    wanted = {f"{path}:out" for path, note in notes.items() if note.role == "block"} - held
    if not wanted:
        return {}
    outs: dict[str, list[Record]] = {}
    after: dict[tuple[int, int, str | None], list[Record]] = {}
    for entry in like.records:
        if entry.pass_ == "free" and entry.site in wanted:
            outs.setdefault(entry.site, []).append(entry)
        elif entry.pass_ == "free" and entry.site in held and entry.site.endswith(":in"):
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
