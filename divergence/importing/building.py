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
from divergence.importing.dump import Dumped, Forward, Notes
from divergence.importing.reading import Survey, by_site
from divergence.run.reader import Run
from divergence.run.schema.contents import site_names
from divergence.run.schema.manifest import (
    UNKNOWN,
    Environment,
    Manifest,
    ModelIdentity,
    ModuleNote,
    ModuleRole,
    Plan,
    Settings,
)
from divergence.run.schema.record import Record
from divergence.run.schema.site import module_of
from divergence.run.writing.writer import CapturedTensor, RunWriter, new_run_id

__all__ = ["manifest_of", "write"]

_FIRST_NUMBER = re.compile(r"[^0-9]*?\.\d+")


def manifest_of(
    found: Survey, *, name: str, like: Run | None, label: str | None, command: str | None
) -> Manifest:
    """What is known of the run. ``name``: of the layout."""
    own = None if like is None else like.manifest
    sites = [found.renamed(site) for site in found.sites]
    logits = "lm_head:out" if own is None else own.plan.logits_site
    return Manifest(
        id=new_run_id(),
        tool_version=f"{__version__}, importing a dump of {name}",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        model=ModelIdentity(
            source=UNKNOWN if own is None else own.model.source, model_class="",
            task="causal-lm" if own is None else own.model.task, config_digest="",
            dtype=found.dtype, num_parameters=0, digest="",
        ),
        tokens=found.tokens,
        settings=Settings(
            deterministic=False, seed=0, device=UNKNOWN, max_new_tokens=found.num_steps - 1,
            batch=any(len(group) > 1 for group in found.tokens.groups),
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
        found = {path: theirs[path] for path in map(module_of, sites) if path in theirs}
        if found:
            return found
    paths = list(dict.fromkeys(map(module_of, sites)))
    blocks = {match[0] for path in paths if (match := _FIRST_NUMBER.match(path))}

    def role(path: str) -> ModuleRole:
        if path in blocks:
            return "block"
        holds = any(block.startswith(f"{path}.") for block in blocks)
        return "inner" if holds or _FIRST_NUMBER.match(path) else "trunk"

    return {path: ModuleNote(kind=UNKNOWN, role=role(path)) for path in paths}


def write(
    writer: RunWriter, forwards: Iterator[Forward], found: Survey, like: Run | None, notes: Notes
) -> None:
    """Puts every tensor that can be told into the run."""
    handed_on = {} if like is None else _handed_on(like)
    logits = writer.manifest.plan.logits_site
    for place, forward in zip(found.places, forwards, strict=True):
        if place is None:
            continue
        sample, step = place
        kept: dict[str, CapturedTensor] = {}
        for site, ranks in by_site(forward.tensors).items():
            tensor = _of_all_ranks(ranks)
            if tensor is None:
                notes.add("are not the same on all ranks (parts, it seems), and were left out")
                continue
            site = found.renamed(site)
            record = None if like is None else like.find(("free", sample, step, site))
            tensor = _shaped(tensor, record)
            kept[site] = CapturedTensor(tensor)
            if site == logits:
                _choose(writer.manifest, sample, tensor)
        for site, other in handed_on.items():
            if site not in kept and other in kept:
                kept[site] = kept[other]
                notes.add("that blocks return were taken from the next module's input, which has "
                          "the same bits in RUN")  # fmt: skip
        for order, (site, item) in enumerate(kept.items()):
            writer.put(item, pass_="free", sample=sample, step=step, site=site, order=order)


def _choose(manifest: Manifest, sample: int, logits: torch.Tensor) -> None:
    """The greedy choice, from logits (B, T, V) of which the last row is the last token's."""
    samples = [manifest.tokens.samples[one] for one in manifest.tokens.group_of(sample)]
    if logits.ndim != 3 or logits.shape[0] != len(samples) or not logits.numel():
        return
    if not any(one.num_right_pad for one in samples):
        for one, token in zip(samples, logits[:, -1].argmax(-1).tolist(), strict=True):
            one.chosen_ids.append(token)


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


def _handed_on(like: Run) -> dict[str, str]:
    """Output of a block → an input that had the very bits in the run, at every step of it."""
    notes = like.manifest.plan.modules
    outs = {site for site in site_names(like.records)
            if site.endswith(":out") and (note := notes.get(module_of(site))) is not None
            and note.role == "block"}  # fmt: skip
    found: dict[str, str] = {}
    for site in outs:
        records = [one for one in like.at_site(site) if one.pass_ == "free"]
        for one in _following(like, records[0]) if records else ():
            pairs = [(r, like.find((r.pass_, r.sample, r.step, one))) for r in records]
            if all(o is not None and r.xxh3 == o.xxh3 and r.xxh3 for r, o in pairs):
                found[site] = one
                break
    return found


def _following(like: Run, record: Record) -> list[str]:
    """Sites that come after it in its forward and have its bits."""
    return [
        one.site
        for one in like.records
        if (one.pass_, one.sample, one.step) == (record.pass_, record.sample, record.step)
        and one.order > record.order and one.site.endswith(":in")
        and record.xxh3 and one.xxh3 == record.xxh3 and one.shape == record.shape
    ]  # fmt: skip
