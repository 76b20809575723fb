"""Shows what a run holds, from its manifest and records alone.

Nothing here reads a tensor: summaries were recorded with them, so that a run can
be looked at without torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from divergence.analyses.precision.sections import audit_sections
from divergence.comparison.analysis import is_of_machine
from divergence.comparison.result import AuditResult, called_at
from divergence.document import (
    Block,
    Column,
    Document,
    Headline,
    Section,
    Sentence,
    Table,
    each_in,
    named,
    out_of,
)
from divergence.domain import sources, suites
from divergence.errors import UsageError
from divergence.report.environment import (
    arithmetic_sections,
    changes,
    fallbacks,
    machine_section,
    repeats,
    switch_sentences,
)
from divergence.run.command import command_line, requoted
from divergence.run.contents import (
    count_passes,
    count_sites,
    labels_text,
    num_labels,
    prompt_names,
    records_at,
    site_names,
)
from divergence.run.manifest import SUITE, Manifest, OwnTruth
from divergence.run.record import Call, Operand, Record, operand_indices
from divergence.run.site import compile_patterns, natural_key, near_names
from divergence.words import count, grouped, list_names, shape_text, shortened, size

_OF_MODEL = ("  class", "  digest", "  attention", "  run by", "  as found")
"""Facts of a model that -v shows."""
_MOST_OF_COMMAND = 86
MAX_CODE = 12


def run_document(
    path: str,
    manifest: Manifest,
    records: Sequence[Record],
    *,
    audit: AuditResult | None = None,
    verbose: bool = False,
) -> Document:
    """Show what ran, where, on which tokens, whether it finished, and what was recorded; ``audit``:
    in which dtypes, where operators were."""
    settings, plan = manifest.settings, manifest.plan
    state, style = "complete", "bold green"
    if not manifest.complete:
        state = f"INCOMPLETE (stopped by {manifest.stopped_by or 'a crash'})"
        style = "bold yellow"
    top = [
        named(
            "run", f"{manifest.id}, made {manifest.created} by divergence {manifest.tool_version}"
        ),
    ]
    if manifest.digest is None:
        before = "recorded before digests" if manifest.schema_version < 8 else "without digests"
        text = f"{before} of manifest and records: changes to them go unseen"
        top.append(named("", text))
    command = requoted(manifest.command) if manifest.command else ""
    most = len(command) if verbose else _MOST_OF_COMMAND
    top += [named("command", shortened(command, most))] if command else []
    top += [named("like", manifest.like)] if manifest.like else []
    top += happened(manifest, every=verbose)
    about = model_facts(manifest)
    top += [named(*item) for item in about if verbose or item[0] not in _OF_MODEL]
    wide = f"computed in {settings.compute_dtype}, " if settings.compute_dtype else ""
    made = (
        f"device {settings.device}, {wide}{'' if settings.deterministic else 'not '}deterministic, "
        f"seed {settings.seed}, at most {count(settings.max_new_tokens, 'new token')}"
        f"{', prompts in one batch' if settings.batch else ''}"
    )
    body: list[Block] = [named("made with", made, indent=2, width=14)]
    body += [
        named("warned", text, indent=2, width=14) for text in settings.nondeterministic_warnings
    ]
    body += switch_sentences(settings.switches, verbose=True)
    sections = [Section(title="settings", body=body)]
    if manifest.training.train:
        top.append(named("training", training_text(manifest)))
    if plan.replayed_pass is not None:
        top.append(named("replays", f"the {plan.replayed_pass} pass of {plan.anchored_to}"))
    if manifest.mesh is not None:
        unlike = ", on unlike machines; this is the first's" if manifest.mesh.environments else ""
        top.append(named("ranks", f"{manifest.mesh}{unlike}"))
    sections.append(machine_section(manifest.environment))
    sections += arithmetic_sections(manifest.arithmetic, verbose=True)
    if manifest.model.task != "operators":
        sections.append(_prompts(manifest))
    sections.append(_records(records))
    # the detail of each stands in a line; what runs otherwise than expected is shown at once
    details = {item.title: item.detail for item in sections if item.detail}
    top += [named(*item) for item in details.items() if verbose or item[0] != "arithmetic"]
    if plan.truth is not None:
        top.append(named(truth_name(plan.truth), truth_text(plan.truth, manifest)))
    if config := manifest.model.config:
        digest = manifest.model.config_digest[:12]
        columns = ("", Column("", absent="None"))
        table = Table(columns=columns, rows=list(config.items()), num_left=2)
        sections.insert(0, Section(title="config", detail=digest, body=[table]))
    sections = [dataclasses.replace(item, verbose=True) for item in sections]
    sections += audit_sections(audit, alone=True, every=verbose)
    if audit is not None and audit.rows and sections[-1].verbose:
        dtypes = list_names(sorted({name for row in audit.rows for name in row.reference or ()}), 4)
        top.append(named("precision", f"each part as expected: {dtypes}"))
    looks = [command_line("inspect", path, site=records[0].site)] if records else []
    return Document(
        headline=Headline(
            state, f"{path}, {count(len(records), 'record')}, {stored(manifest)}", style
        ),
        known=top,
        sections=sections,
        next=[*following(path, manifest), *looks],
    )


def happened(manifest: Manifest, *, every: bool = False, more: str = "-v") -> list[Sentence]:
    """Say what was done to a run on purpose, and what did not go as asked. ``more``: what lists all
    switches and reasons; ``every``: with the reasons why calls were left out, each on a line."""
    plan, settings = manifest.plan, manifest.settings
    sentences = changes(plan.plants, plan.substitutes)
    sentences += [
        named("", f"{item.name}: {item.used} instead of {item.reference}")
        for item in manifest.overrides
        if not item.name.startswith("engine")  # the model's facts have it
    ]
    sentences += repeats(manifest.repeatability)
    if any(item.status in ("refused", "absent") for item in settings.switches):
        sentences += switch_sentences(settings.switches, more=more)
    return [*sentences, *fallbacks(settings), *_skipped(manifest, every, more)]


def following(run: str, manifest: Manifest) -> list[str]:
    """Return what can be done with a run: the other one is made, and the two are compared."""
    if is_of_machine(manifest):
        return [command_line("compare", run, "OTHER", note="of another machine")]
    if manifest.settings.compute_dtype:
        return [command_line("compare", "A", "B", truth=run, note="A: the run that it repeats")]
    if manifest.plan.replayed_pass is not None:
        return [command_line("compare", "A", run, note="A: the run whose operators it ran again")]
    if manifest.is_of_a_module:
        repeat = f"with divergence.record(module, out='OTHER', like={run!r}) as r: r.repeat()"
        return [
            f"{repeat}   # in Python, on the other machine",
            command_line("compare", run, "OTHER"),
        ]
    ranks: dict[str, Any] = {} if manifest.mesh is None else {"ranks": manifest.num_ranks}
    suite = suites().get(manifest.model.source.removeprefix(SUITE))
    if manifest.model.task == "operators" and suite is not None and suite.answers is not None:
        return [
            command_line("compare", run, note=suite.answers),
            command_line("capture", **ranks, like=run, o="OTHER", note="on the other machine"),
        ]
    if not (manifest.can_be_repeated or manifest.scores_alone):
        return [command_line("compare", run, "OTHER")]
    again: dict[str, Any] = {"note": "on the other machine"}
    for source in sources() if manifest.scores_alone else ():
        again = {source.option: "URL", "model": manifest.model.source, "note": source.note}
    whole = command_line("compare", run, note="its decode steps, against the whole")
    return [
        command_line("capture", **again, like=run, o="OTHER"),
        command_line("compare", run, "OTHER"),
        *[whole] * ("whole" in manifest.plan.passes),
    ]


def training_text(manifest: Manifest) -> str:
    """``forward and backward, adamw, ZeRO 2, labels of 19 of 35 tokens``."""
    labels = labels_text(manifest.tokens)
    return f"{manifest.training}{labels and f', labels of {labels}'}"


def truth_name(truth: OwnTruth) -> str:
    """``truth``, or ``floor`` where the sums alone were kept."""
    return "floor" if truth.mode == "floor" else "truth"


def truth_text(truth: OwnTruth, manifest: Manifest) -> str:
    """``3 of 4 prompts, steps 0-4, in float64 on cpu, 4.1 s of at most 5 s``; or why it is none."""
    stopped = truth.stopped_by
    if stopped is not None and not any(truth.num_steps):
        return f"none: {stopped}"
    groups, free = manifest.tokens.groups, "truth_free" in manifest.plan.passes
    sizes = [len(group) for group, num in zip(groups, truth.num_steps, strict=False) if num]
    total, most = sum(map(len, groups)), max(truth.num_steps, default=0)
    fewer = any(num < most for num in truth.num_steps if num)
    prompts = count(total, "prompt") if sum(sizes) == total else f"{sum(sizes)} of {total} prompts"
    steps = "no step" if not most else "step 0" if most == 1 else f"steps 0-{most - 1}"
    allowed = "" if truth.budget_seconds is None else f" of at most {truth.budget_seconds:.1f}"
    return (
        f"{prompts}, {steps}{' (some fewer)' * fewer}, in float64 on {truth.device}, "
        f"{'the free run too, ' * free}"
        f"{truth.seconds:.1f}{allowed} s{'' if stopped is None else f'; not finished: {stopped}'}"
    )


def _skipped(manifest: Manifest, every: bool, more: str) -> list[Sentence]:
    """Operator calls that were left out, by reason; in one line unless ``every`` is set."""
    reasons = list(manifest.plan.skipped_operators.items())
    if len(reasons) > 2 and not every:
        others, num = count(len(reasons) - 1, "other reason"), sum(num for _, num in reasons)
        reasons = [(f"{reasons[0][0]}; {others} ({more} lists them)", num)]
    texts = [f"{count(number, 'operator call')}: {reason}" for reason, number in reasons]
    return [Sentence(text, "left out", indent=2, hang=14) for text in texts]


def stored(manifest: Manifest) -> str:
    sizes, plan = manifest.sizes, manifest.plan
    text = f"{size(sizes.stored_bytes)} in {count(sizes.num_shards, 'shard')}"
    if plan.only_changed is not None:
        return f"{text} (of {size(sizes.seen_bytes)}, what differs from run {plan.only_changed})"
    if plan.store != "full":
        return f"{text} ({plan.store} of {size(sizes.seen_bytes)})"
    if sizes.seen_bytes > sizes.stored_bytes:
        text += f" ({size(sizes.seen_bytes)} with duplicates)"
    return text


def model_facts(manifest: Manifest) -> list[tuple[str, str]]:
    model = manifest.model
    weights = f", {model.num_parameters:,} parameters in {model.dtype}" * bool(model.num_parameters)
    revision = f" at {model.revision}" if model.revision else ""
    facts = [("model", f"{model.source}{revision}{weights}")]
    if model.model_class:
        facts.append(("  class", f"{model.model_class}, {model.task}"))
    if model.digest:
        facts.append(("  digest", f"{model.digest} of the weights"))
    if model.missing:
        text = f"{count(len(model.missing), 'parameter')} not in the checkpoint, so random: "
        facts.append(("  MISSING", text + ", ".join(model.missing[:4])))
    if model.quantization:
        facts.append(("  quantised", str(model.quantization)))
    if model.attn_implementation:
        facts.append(("  attention", model.attn_implementation))
    if manifest.engine is not None:
        engine = manifest.engine
        options = engine.options.items()
        given = [f"{key}={value}" for key, value in options if value not in (None, "")]
        switches = [f"{key} {value}" for key, value in engine.facts.items() if key != "adapter"]
        given += [f"adapter {engine.facts[key]}" for key in engine.facts if key == "adapter"]
        plain = engine.name == "transformers" and not given
        name = "  run by" if plain else "  engine"
        facts.append((name, ", ".join([engine.name, engine.version, *given])))
        facts += [("  as found", ", ".join(switches))] if switches else []
    return facts + [("  code", text) for text in code_texts(manifest)]


def code_texts(manifest: Manifest) -> list[str]:
    """Return what runs otherwise than the classes say: replaced, wrapped, compiled."""
    texts = [text for note in manifest.model.code.values() for text in note.replaced]
    for name, note in manifest.model.code.items():
        texts += [f"{name}: {text}" for text in note.wrapped]
    groups: dict[str, list[str]] = {}
    for path, own in manifest.plan.compiled.items():
        state = "" if own.state == "compiled" else f", {own.state}: {own.reason}"
        if own.graph_breaks:
            state += f", graph breaks: {'; '.join(own.graph_breaks[:2])}"
        groups.setdefault(f"torch.compile ({own.backend}){state}", []).append(path)
    for text, paths in groups.items():
        texts.append(f"{list_names(paths, 3)}: {text}")
    shown = texts[:MAX_CODE]
    rest = len(texts) - len(shown)
    return shown + ([f"and {rest} more"] if rest else [])


def _prompts(manifest: Manifest) -> Section:
    tokens = manifest.tokens
    forced = f"; decode tokens forced by {tokens.forced_by}" if tokens.forced_by else ""
    rows = []
    names = prompt_names(tokens.samples)
    for number, sample in enumerate(tokens.samples):
        text = names[number] if sample.text is not None else "(token ids only)"
        made = num_labels(sample) if manifest.training.train else len(sample.generated_ids)
        files = "".join(f", {note.path}" for note in sample.media)
        rows.append((number, len(sample.prompt_ids), made, shortened(text, 60) + files))
    num = sum(len(sample.prompt_ids) for sample in tokens.samples)
    detail = f"{count(len(tokens.samples), 'prompt')} of {count(num, 'token')}{forced}"
    what = partial(count, noun="label") if manifest.training.train else "{:,} generated".format
    columns = [Column("", text) for text in (str, partial(count, noun="prompt token"), what, str)]
    table = Table(columns=columns, num_left=4, rows=rows)
    return Section(title="prompts", detail=detail, body=[table])


def _records(records: Sequence[Record]) -> Section:
    """One row per site: its passes, steps, shape in the first step, and size."""
    rows = []
    for count_at in count_sites(records):
        recorded = ", ".join(f"{num:,} {name}" for name, num in count_at.passes.items())
        recorded += f", {count_at.num_nonfinite:,} nan or inf" if count_at.num_nonfinite else ""
        rows.append((count_at.site, count_at.dtype, count_at.shape, recorded))
    table = Table(
        columns=("site", "dtype", Column("first shape", shape_text), "recorded"),
        num_left=4,
        rows=rows,
    )
    passes = ", ".join(f"{num:,} {name}" for name, num in count_passes(records).items())
    detail = f"by pass: {passes}; at {count(len(rows), 'site')}"
    return Section(title="records", detail=detail, body=[table])


def select_records(records: Sequence[Record], site: str) -> list[Record]:
    """The records of one site, or of the sites that a pattern matches; UsageError if none is."""
    names = site_names(records)
    wanted = {site} if site in names else set(filter(compile_patterns([site]), names))
    matches = records_at(records, wanted)
    if not matches:
        near = near_names(site, sorted(names, key=natural_key))
        hint = "`divergence inspect RUN -v` lists every site"
        hint = f"did you mean {' or '.join(near)}?" if near else hint
        raise UsageError(f"the run has no record of {site!r}", hint=hint)
    return matches


def verified_text(kept: int, total: int, why: str) -> str:
    """Return what `--verify` found of a run without a problem: no more than there was to check.
    ``kept``: of how many of all records anything is stored; ``why`` not of the others."""
    if kept == total:
        return "every tensor has the checksum it was written with"
    if kept == 0:
        return f"nothing: no tensor is stored ({why})"
    return (
        "every stored tensor has the checksum it was written with; "
        f"{total - kept:,} of {total:,} are not stored ({why})"
    )


def site_document(path: str, records: Sequence[Record]) -> Document:
    """The recorded summary of each tensor of one or a few sites; of an operator its first call."""
    sections = []
    by_site = grouped(records, lambda record: record.site)
    for site, group in by_site.items():
        ranks = any(record.rank for record in records)
        numbers = each_in(
            group,
            *[("rank", "rank")] * ranks,
            ("pass", "pass_"),
            ("sample", "sample"),
            ("step", "step"),
            (Column("shape", shape_text, left=True), "shape"),
            *(
                (Column(name, "{:.4g}".format), partial(_summed, name))
                for name in ("min", "max", "mean", "rms")
            ),
            (Column("nan/inf/zero", out_of), _special),
        )
        calls = [record.call for record in group if record.call is not None]
        sections.append(
            Section(
                title=site,
                detail=f"{group[0].dtype}, {count(len(group), 'record')}",
                # shapes of a call are the first forward's
                body=[
                    Table(**numbers, num_left=1 + ranks),
                    *(_call(calls[0]) if calls else ()),
                ],
            )
        )
    text = f"{path}: {count(len(records), 'record')} of {count(len(by_site), 'site')}"
    return Document(headline=Headline("", text, "bold"), sections=sections)


def _summed(name: str, record: Record) -> float | None:
    return None if record.summary is None else getattr(record.summary, name)


def _special(record: Record) -> tuple[int, int, int] | None:
    if (summary := record.summary) is None:
        return None
    return summary.num_nan, summary.num_posinf + summary.num_neginf, summary.num_zero


def _call(call: Call) -> list[Sentence]:
    """Return what stands under the operator's site."""
    rows = [("operator", call.operator)]
    called = called_at(call.source, call.backward_of)
    if called is not None:
        rows.append(("called at", called))
    if call.note is not None:
        rows.append(("note", f"it cannot be run again alone: {call.note}"))
    names: set[int] = set()
    for name, value in call.arguments.items():
        numbers = [  # a stranger's run may hold anything there
            n for n in operand_indices(call, name) if type(n) is int and 0 <= n < len(call.operands)
        ]
        if not numbers:
            short = json.dumps(value)
            if isinstance(value, dict) and len(value) == 1:
                short = str(*value.values())
            rows.append(("argument", f"{name} = {short[:80]}"))
        for place, number in enumerate(numbers):
            full = name if len(numbers) == 1 else f"{name}.{place}"
            rows.append(("operand", f"{full}: {_operand(call.operands[number])}"))
            names.add(number)
    rows += [
        ("operand", _operand(operand))
        for number, operand in enumerate(call.operands)
        if number not in names
    ]
    return [named(name, text, indent=2, width=13) for name, text in rows]


def _operand(operand: Operand) -> str:
    whence = operand.site or "not recorded"
    if operand.weight is not None:
        stored = "" if operand.site is None else f", stored as {operand.site}"
        whence = f"weight {operand.weight}{stored}"
    parts = [f"{whence}, {operand.dtype} {shape_text(operand.shape)}"]
    if operand.stride is not None:
        parts.append(f"strides {shape_text(operand.stride)}")
    if operand.via:
        origin = f" of {operand.origin}" if operand.origin not in (None, operand.site) else ""
        parts.append(f"by {', '.join(operand.via)}{origin}")
    return "; ".join(parts)
